"""Makes the drawings and charts of the documentation.

Usage: pages.py [--check]. Writes docs/drawings/*.svg from the text beside them (*.txt) and docs/lab/results/*.svg from
the result files beside them (*.json). With --check nothing is written: files that are out of date are named, and the
exit status is 1 if there are any.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

# Every drawing has its own background, so that it can be read on any page. Viewers that know the reader's colour scheme
# use it. Each colour is (light, dark).
_COLOURS = {
    "paper": ("#ffffff", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9198a1"),
    "line": ("#818b98", "#6e7681"),
    "grey": ("#eaeef2", "#2d333b"),
    "blue": ("#cfe4ff", "#1c3f6e"),
    "green": ("#cdeed6", "#1d4a2c"),
    "orange": ("#ffe1bf", "#5c3a12"),
    "purple": ("#e6dcff", "#40306b"),
    "bar": ("#2f6fd0", "#5b9cf5"),
    "bar2": ("#9aa4af", "#7d8590"),
    "bar3": ("#e08a1e", "#e3a04b"),
}
_SIZE = 13  # of the letters, in pixels
LETTER = 0.6 * _SIZE  # no letter of the font is wider


class Svg:
    """A drawing of ``width`` by ``height`` pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self._parts = [f"<title>{escape(title)}</title>"]

    def box(self, x: float, y: float, width: float, height: float, colour: str, lines: list[str]) -> None:
        """A rectangle with lines of text in its middle."""
        self.rect(x, y, width, height, colour)
        top = y + height / 2 - (len(lines) - 1) * 8.5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + number * 17, line, "ink" if number == 0 else "soft", "middle")

    def rect(self, x: float, y: float, width: float, height: float, colour: str, stroke: bool = True) -> None:
        """A rectangle; without ``stroke`` no outline."""
        outline = " box" if stroke else ""
        self._parts.append(
            f'<rect class="{colour}{outline}" x="{x:g}" y="{y:g}" '
            f'width="{width:g}" height="{height:g}" rx="4"/>'
        )

    def text(self, x: float, y: float, text: str, colour: str = "ink", anchor: str = "start") -> None:
        """One line, its middle at height ``y``. Refuses a line that would leave the drawing."""
        length = len(text) * LETTER
        left = x - {"start": 0, "middle": length / 2, "end": length}[anchor]
        if left < 0 or left + length > self.width:
            raise ValueError(f"{text!r} does not fit into {self.width} pixels at {x:g}")
        self._parts.append(
            f'<text class="{colour}" x="{x:g}" y="{y + 4.5:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, points: list[tuple[float, float]], dashed: bool = False) -> None:
        """A line through ``points`` with a head at its end."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<path class="arrow" d="{path}" marker-end="url(#head)"{dash}/>')

    def line(self, x: float, y: float, x_end: float, y_end: float) -> None:
        """A thin line."""
        self._parts.append(f'<path class="rule" d="M{x:g} {y:g} L{x_end:g} {y_end:g}"/>')

    def __str__(self) -> str:
        def rules(scheme: int) -> str:
            fills = " ".join(f".{name} {{ fill: {pair[scheme]} }}" for name, pair in _COLOURS.items())
            ink, line = _COLOURS["ink"][scheme], _COLOURS["line"][scheme]
            return f"{fills} .arrow {{ stroke: {ink} }} .box, .rule {{ stroke: {line} }}"

        style = (
            f"text {{ font: {_SIZE}px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace }}\n"
            ".rule { stroke-width: .6 } .arrow { fill: none; stroke-width: 1.3 }\n"
            f"{rules(0)}\n@media (prefers-color-scheme: dark) {{ {rules(1)} }}"
        )
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            '<path class="ink" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img">\n<style>\n{style}\n</style>\n{head}\n'
            f'<rect width="{self.width}" height="{self.height}" rx="6" class="paper"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


# --- drawings -------------------------------------------------------------------------------------------------------


def drawing(source: str) -> str:
    """The SVG that a text describes. Its lines are, with lengths in pixels, texts in quotes, # for comments:

    size WIDTH HEIGHT "title"; box X Y WIDTH HEIGHT COLOUR "line" "line" ...; rect X Y WIDTH HEIGHT COLOUR;
    text X Y "text" [COLOUR [ANCHOR]]; arrow X,Y X,Y ...; dashed X,Y X,Y ...; line X Y X Y
    """
    svg: Svg | None = None
    for number, line in enumerate(source.splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        what, rest = words[0], words[1:]
        try:
            if what == "size":
                svg = Svg(int(rest[0]), int(rest[1]), rest[2])
                continue
            assert svg is not None, "size comes first"
            if what in ("arrow", "dashed"):
                points = [tuple(map(float, word.split(","))) for word in rest]
                svg.arrow([(x, y) for x, y in points], what == "dashed")
            elif what == "text":
                svg.text(float(rest[0]), float(rest[1]), *rest[2:])
            else:
                numbers = [float(word) for word in rest[:4]]
                if what == "box":
                    svg.box(*numbers, rest[4], rest[5:])  # type: ignore[call-arg]
                elif what == "rect":
                    svg.rect(*numbers, rest[4])  # type: ignore[call-arg]
                else:
                    {"line": svg.line}[what](*numbers)
        except (ValueError, KeyError, IndexError, TypeError, AssertionError) as error:
            raise ValueError(f"line {number}: {line.strip()}: {error}") from error
    return str(svg)


# --- charts ---------------------------------------------------------------------------------------------------------


def chart(result: dict[str, Any]) -> str:
    """The SVG of a result file: ``title``, ``unit``, ``better`` (lower or higher), ``series`` (their names), ``rows``
    (each with a ``name`` and a ``values`` list, one for each series: a number, [lowest, highest] of several runs, or
    null where there is none). ``scale``: "row" if each row has a scale of its own. ``commit``, ``date``, ``machine``:
    of what was measured."""
    series, rows = result["series"], result["rows"]
    assert all(len(row["values"]) == len(series) <= 3 for row in rows), "a value for each series"
    names = max(len(row["name"]) for row in rows)
    left, width, bar = 16 + names * LETTER + 12, 860, 17
    most = max(_ends(value)[1] for row in rows for value in row["values"])
    source = ", ".join(result[key] for key in ("commit", "date", "machine") if key in result)
    svg = Svg(width, 78 + len(rows) * (len(series) * bar + 12) + 20 * bool(source), result["title"])
    svg.text(16, 20, f"{result['title']} ({result['unit']}, {result['better']} is better)")
    x = 16.0
    for name, colour in zip(series, ("bar", "bar2", "bar3"), strict=False):
        svg.rect(x, 36, 12, 12, colour, stroke=False)
        svg.text(x + 18, 42, name, "soft")
        x += 18 + len(name) * LETTER + 24
    y = 66.0
    for row in rows:
        of_row = max(_ends(value)[1] for value in row["values"])
        scale = (width - left - 150) / (of_row if result.get("scale") == "row" else most)
        svg.text(left - 12, y + len(series) * bar / 2, row["name"], "ink", "end")
        for value, colour in zip(row["values"], ("bar", "bar2", "bar3"), strict=False):
            if value is not None:
                low, high = _ends(value)
                svg.rect(left, y + 1, max((low + high) / 2 * scale, 1), bar - 3, colour, stroke=False)
                if low < high:
                    svg.line(left + low * scale, y + bar / 2 - 0.5, left + high * scale, y + bar / 2 - 0.5)
                told = f"{low:,}" if low == high else f"{low:,} to {high:,}"
                svg.text(left + high * scale + 8, y + bar / 2 - 1, told, "soft")
            y += bar
        y += 12
    if source:
        svg.text(16, y + 4, source, "soft")
    return str(svg)


def _ends(value: float | list[float] | None) -> tuple[float, float]:
    low, high = value if isinstance(value, list) else (value or 0, value or 0)
    return low, high


# --- all pages -------------------------------------------------------------------------------------------------------


def pages() -> Iterator[tuple[Path, Callable[[], str]]]:
    """Each file that is made, and the function that returns its contents."""
    for source in sorted((DOCS / "drawings").glob("*.txt")):
        yield source.with_suffix(".svg"), lambda source=source: drawing(source.read_text())  # type: ignore[misc]
    for source in sorted((DOCS / "lab" / "results").glob("*.json")):
        yield source.with_suffix(".svg"), lambda source=source: chart(json.loads(source.read_text()))  # type: ignore[misc]


def main(check: bool) -> int:
    """Make all pages, or with ``check`` report which are out of date. Returns the exit status."""
    stale = []
    for path, make in pages():
        try:
            made = make()
        except ValueError as error:
            print(f"{path.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 2
        if not path.exists() or path.read_text(encoding="utf-8") != made:
            stale.append(path)
            if not check:
                path.write_text(made, encoding="utf-8")
    for path in stale:
        print(
            f"{path.relative_to(ROOT)}: {'out of date: run python scripts/pages.py' if check else 'written'}"
        )
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
