"""What the documentation shows is made from what lies in the repository, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

import pages
import recipes
import setup_env
from fenceline.config.families import FAMILIES
from fenceline.config.server_args import parse_args

DOCS = setup_env.ROOT / "docs"
DRAWINGS = ("processes", "step", "page", "folders")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def test_drawings_and_charts_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main(check=True) == 0, capsys.readouterr().out


def test_the_architecture_is_a_short_page_with_four_drawings() -> None:
    text = (DOCS / "internals" / "architecture.md").read_text()
    assert len(text.split()) <= 1200
    assert re.findall(r"\(\.\./drawings/(\w+)\.svg\)", text) == list(DRAWINGS)
    assert {path.stem for path in (DOCS / "drawings").glob("*.txt")} == set(DRAWINGS)


def test_the_page_of_models_lists_the_families_that_are_served() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "use" / "models.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(FAMILIES)


def test_every_server_that_a_page_starts_has_flags_of_ours() -> None:
    """Those of the lab are a record of what was run."""
    lines: list[str] = []
    for page in [setup_env.ROOT / "README.md", *DOCS.glob("[!l]*/**/*.md"), *DOCS.glob("*.md")]:
        text = page.read_text().replace("\\\n", " ")
        for language, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL):
            if language in ("", "bash"):
                lines += re.findall(r"(?:scripts/serve|fenceline serve|\.launch_server)([^\n#;&|>]*)", block, re.DOTALL)
    assert len(lines) > 10
    for line in lines:
        parse_args(shlex.split(line.replace("FURTHER_FLAGS", "")))


@pytest.mark.parametrize("page", sorted(recipes.FOLDER.glob("[a-z]*.md")), ids=lambda page: page.stem)
def test_recipes_are_resolved_and_say_what_they_need(page: Path, tmp_path: Path) -> None:
    """As a start on a GPU would be, up to the weights. The memory of the first command stands for that of all, which
    would take long."""
    found = [
        (shlex.split(words.replace("\\\n", " ")), note) for words, note in recipes.COMMAND.findall(page.read_text())
    ]
    assert len(found) == page.read_text().count("fenceline serve ") > 5
    for argv, note in found:
        config = recipes.resolve_command(argv, tmp_path)
        assert config.device == "cuda" and re.fullmatch(
            r"# [\d.]+ GB, [\d.]+ KiB(, \d+ MB)?: (no|[\d,]+) / (no|[\d,]+)", note
        )
    assert recipes.note(found[0][0], tmp_path) == found[0][1], "run: python scripts/recipes.py"


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.stem)
def test_a_drawing_is_xml_with_both_colour_schemes(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert "prefers-color-scheme: dark" in path.read_text()
    for element in root.iter():
        if element.tag.endswith(("}rect", "}text")) and "x" in element.attrib:
            x, y = float(element.attrib["x"]), float(element.attrib["y"])
            assert x >= 0 and x + float(element.attrib.get("width", 0)) <= width
            assert y >= 0 and y + float(element.attrib.get("height", 0)) <= height


def test_bars_are_as_long_as_their_values() -> None:
    rows = [{"name": "a", "values": [10, 40]}, {"name": "b", "values": [None, 20]}]
    result = {"title": "t", "unit": "ms", "better": "lower", "series": ["x", "y"], "rows": rows}
    root = ElementTree.fromstring(pages.chart(result))
    bars = [e for e in root.iter() if e.tag.endswith("}rect") and e.get("height") == "14"]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert len(widths) == 3
    assert widths[1] / widths[0] == pytest.approx(4) and widths[1] / widths[2] == pytest.approx(2)
    texts = [e.text for e in root.iter() if e.tag.endswith("}text")]
    assert {"a", "b", "10", "20", "40", "t (ms, lower is better)"} <= set(texts)


def test_a_ratio_is_above_1_where_the_first_series_is_better() -> None:
    rows = [{"name": "a", "values": [10, 40]}, {"name": "b", "values": [[20, 40], 20]}]
    result = {"title": "t", "unit": "ms", "better": "lower", "ratio": True, "series": ["x", "y"], "rows": rows}
    root = ElementTree.fromstring(pages.chart(result))
    bars = [e for e in root.iter() if e.tag.endswith("}rect") and e.get("height") == "14"]
    assert float(bars[1].attrib["width"]) / float(bars[0].attrib["width"]) == pytest.approx(0.75 / 4, rel=1e-4)
    texts = {e.text for e in root.iter() if e.tag.endswith("}text")}
    assert {"a", "4.00   (10 / 40)", "b", "0.50 – 1.00   (20 – 40 / 20)"} <= texts


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('size 100 50 "t"\ntext 10 20 "far too long for it"', "line 2.*does not fit"),
        ('size 100 50 "t"\ncircle 1 2 3 4', "line 2.*circle"),
        ("box 1 2 3 4 host", "size comes first"),
        ('size 100 50 "t"\nbox 1 2 3 4 blue', "line 2.*no colour blue"),
    ],
)
def test_a_drawing_with_a_mistake_names_its_line(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pages.drawing(source)


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings can be linked to, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    sorted([*DOCS.rglob("*.md"), *setup_env.ROOT.glob("*.md"), setup_env.ROOT / "test/support/README.md"]),
    ids=lambda path: str(path.relative_to(setup_env.ROOT)),
)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    broken = []
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_pages_that_code_names_exist() -> None:
    folders = ("python", "scripts", "test", "benchmark", "deploy", "docker", "sgl-kernel")
    files = [path for folder in folders for path in (setup_env.ROOT / folder).rglob("*") if path.is_file()]
    named = {
        (path.relative_to(setup_env.ROOT).as_posix(), page)
        for path in files
        if path.suffix in {".py", ".yaml", ".service", ".cu", ".cuh", ".html", ".js", ""}
        for page in re.findall(r"\bdocs/[\w/]+\.(?:md|json|svg)\b", path.read_text(errors="ignore"))
    }
    assert len(named) > 20
    assert sorted(entry for entry in named if not (setup_env.ROOT / entry[1]).exists()) == []
