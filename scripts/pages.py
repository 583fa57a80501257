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

# The colours of the web page (entrypoints/web/style.css), each (light, dark). A viewer that knows the reader's colour
# scheme uses it.
_COLOURS = {
    "page": ("#f6f6f3", "#14181a"),
    "card": ("#ffffff", "#1c2224"),
    "sunk": ("#eeefeb", "#252c2f"),
    "line": ("#dcded8", "#343d40"),
    "text": ("#1c2426", "#e4e8e7"),
    "muted": ("#5a6669", "#9aa6a8"),
}
# What a box or a bar stands for. A box has a tint of its colour inside an outline of it.
_KINDS = {
    "prefill": ("#c7791a", "#dd9a48"),
    "decode": ("#1f8a84", "#45b0a8"),
    "host": ("#6d7b80", "#8b999d"),
    "results": ("#43697f", "#8fb4cb"),
    "memory": ("#5b8fc7", "#7fadde"),
    "transfer": ("#7b62b3", "#a48fdb"),
}
_SIZE = 13  # of the letters, in pixels
LETTER = 0.58 * _SIZE  # the mean width of a letter, with some to spare


class Svg:
    """A drawing of ``width`` by ``height`` pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self._parts = [f"<title>{escape(title)}</title>"]

    def box(self, x: float, y: float, width: float, height: float, colour: str, lines: list[str]) -> None:
        """A rectangle with lines of text in its middle, the first in bold if others follow."""
        self.rect(x, y, width, height, colour)
        top = y + height / 2 - (len(lines) - 1) * 8.5
        for number, line in enumerate(lines):
            style = "muted" if number else "text strong" if len(lines) > 1 else "text"
            self.text(x + width / 2, top + number * 17, line, style, "middle")

    def rect(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A card of the page's ``card`` or ``sunk``, or a box of a kind."""
        if colour not in _COLOURS and colour not in _KINDS:
            raise ValueError(f"there is no colour {colour}")
        corner = 10 if colour in _COLOURS else 6
        self._parts.append(
            f'<rect class="{colour} box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{corner}"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A filled rectangle."""
        self._parts.append(
            f'<rect class="{kind} full" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
        )

    def legend(self, x: float, y: float, names: dict[str, str]) -> None:
        """What each kind stands for, in a row that begins at ``x``."""
        for kind, name in names.items():
            self.bar(x, y - 5, 10, 10, kind)
            self.text(x + 16, y, name, "muted")
            x += 16 + len(name) * LETTER + 18

    def text(self, x: float, y: float, text: str, style: str = "text", anchor: str = "start") -> None:
        """One line, its middle at height ``y``. Refuses a line that would leave the drawing."""
        length = len(text) * LETTER
        left = x - {"start": 0, "middle": length / 2, "end": length}[anchor]
        if left < 0 or left + length > self.width:
            raise ValueError(f"{text!r} does not fit into {self.width} pixels at {x:g}")
        self._parts.append(
            f'<text class="{style}" x="{x:g}" y="{y + 4.5:g}" text-anchor="{anchor}">{escape(text)}</text>'
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
            fills = [f".{name} {{ fill: {pair[scheme]} }}" for name, pair in _COLOURS.items()]
            fills.append(f".strong {{ fill: {_COLOURS['text'][scheme]} }}")
            kinds = [f".{name} {{ fill: {pair[scheme]}; stroke: {pair[scheme]} }}" for name, pair in _KINDS.items()]
            line, muted = _COLOURS["line"][scheme], _COLOURS["muted"][scheme]
            lines = f".card, .sunk {{ stroke: {line} }} .rule, .arrow {{ stroke: {muted} }}"
            return " ".join([*fills, *kinds, lines])

        style = (
            f"text {{ font: {_SIZE}px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif }}\n"
            ".strong { font-weight: 600 } .box { fill-opacity: .16 } .card.box, .sunk.box { fill-opacity: 1 }\n"
            ".full { stroke: none } .arrow { fill: none; stroke-width: 1.3 } .rule { stroke-width: 1.2 }\n"
            f"{rules(0)}\n@media (prefers-color-scheme: dark) {{ {rules(1)} }}"
        )
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            '<path class="muted" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img">\n<style>\n{style}\n</style>\n{head}\n'
            f'<rect width="{self.width}" height="{self.height}" rx="10" class="page"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


# --- drawings -------------------------------------------------------------------------------------------------------


def drawing(source: str) -> str:
    """The SVG that a text describes. Its lines are, with lengths in pixels, texts in quotes, # for comments:

    size WIDTH HEIGHT "title"; box X Y WIDTH HEIGHT COLOUR "line" "line" ...; rect X Y WIDTH HEIGHT COLOUR;
    text X Y "text" [STYLE [ANCHOR]]; arrow X,Y X,Y ...; dashed X,Y X,Y ...; line X Y X Y; legend X Y KIND "name" ...
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
            elif what == "legend":
                svg.legend(float(rest[0]), float(rest[1]), dict(zip(rest[2::2], rest[3::2], strict=True)))
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
    null where there is none). With ``ratio`` a row is one bar: how many times better the first series is than the
    second, so that rows of different sizes can be compared. ``commit``, ``date``, ``machine``: of what was measured."""
    series, rows = result["series"], result["rows"]
    assert all(len(row["values"]) == len(series) <= len(_BARS) for row in rows), "a value for each series"
    names = max(len(row["name"]) for row in rows)
    left, width, bar = 20 + names * LETTER + 12, 900, 17
    source = ", ".join(result[key] for key in ("commit", "date", "machine") if key in result)
    in_row = 1 if result.get("ratio") else len(series)
    svg = Svg(width, 86 + len(rows) * (in_row * bar + 12) + 20 * bool(source), result["title"])
    svg.rect(8, 8, width - 16, svg.height - 16, "card")
    y = 74.0
    if result.get("ratio"):
        svg.text(20, 28, result["title"], "text strong")
        first, second = series
        svg.text(20, 50, f"{first}, times better than {second} (line: 1; behind it {result['unit']} of both)", "muted")
        ratios = [_times_better(row["values"][0], row["values"][1], result["better"]) for row in rows]
        told = [
            f"{_told(*ratio, '.2f')}   ({_told(*_ends(ours))} / {_told(*_ends(theirs))})"
            for ratio, (ours, theirs) in zip(ratios, (row["values"] for row in rows), strict=True)
        ]
        room = [width - 28 - left - len(text) * LETTER for text in told]
        scale = min(pixels / high for pixels, (_, high) in zip(room, ratios, strict=True))
        for row, text, (low, high) in zip(rows, told, ratios, strict=True):
            _bar(svg, left, y, scale, low, high, "decode", text, at_least=1)
            svg.text(left - 12, y + bar / 2, row["name"], "text", "end")
            y += bar + 12
        svg.line(left + scale, 66, left + scale, y - 8)
    else:
        svg.text(20, 28, f"{result['title']} ({result['unit']}, {result['better']} is better)", "text strong")
        svg.legend(20, 50, dict(zip(_BARS, series, strict=False)))
        most = max(_ends(value)[1] for row in rows for value in row["values"])
        scale = (width - left - 150) / most
        for row in rows:
            svg.text(left - 12, y + len(series) * bar / 2, row["name"], "text", "end")
            for value, kind in zip(row["values"], _BARS, strict=False):
                if value is not None:
                    _bar(svg, left, y, scale, *_ends(value), kind, _told(*_ends(value)))
                y += bar
            y += 12
    if source:
        svg.text(20, y + 4, source, "muted")
    return str(svg)


_BARS = ("decode", "host", "prefill")


def _bar(
    svg: Svg, x: float, y: float, scale: float, low: float, high: float, kind: str, told: str, at_least: float = 0
) -> None:
    """A bar as long as the middle of ``low`` and ``high``, a line between these, and what it says behind it."""
    svg.bar(x, y + 1, max((low + high) / 2 * scale, 1), 14, kind)
    if low < high:
        svg.line(x + low * scale, y + 8, x + high * scale, y + 8)
    svg.text(x + max(high, at_least) * scale + 8, y + 7.5, told, "muted")


def _told(low: float, high: float, form: str = ",") -> str:
    return f"{low:{form}}" if low == high else f"{low:{form}} – {high:{form}}"


def _times_better(ours: float | list[float], theirs: float | list[float], better: str) -> tuple[float, float]:
    """The least and the largest ratio that the runs of both allow, above 1 where ours is better."""
    (low, high), (their_low, their_high) = _ends(ours), _ends(theirs)
    return (their_low / high, their_high / low) if better == "lower" else (low / their_high, high / their_low)


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
        print(f"{path.relative_to(ROOT)}: {'out of date: run python scripts/pages.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
