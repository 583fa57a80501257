"""Mutants: what the rules make of a source, and that a run of one is a run of the changed engine."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from fenceline.vgpu.mutate import Result, read_results, report
from fenceline.vgpu.proving.mutants import FOLDERS, LEFT_OUT, PACKAGE, all_mutants, mutants_of

SOURCE = '''
def move(stream, pool, pages, after, start):
    """Not this text: start + 1."""
    stream.wait(after, EDGE)
    first = start + 1
    pool.retire(pages[first:], after)
    assert first + 1 < len(pages)
    with stream.active():
        copy(pool.k, pool.v)
    if first < len(pages):
        stream.record()
    return after.join(first)
'''


def edits(source: str) -> set[tuple[str, str, str]]:
    return {(mutant.rule, mutant.old, mutant.text) for mutant in mutants_of("x.py", source)}


def test_the_rules_find_each_place_once() -> None:
    points = "__import__('fenceline.memory_order', fromlist=['Points']).Points.none()"
    assert edits(SOURCE) == {
        ("drop", "stream.wait(after, EDGE)", "pass"),
        (
            "shift",
            "stream.wait(after, EDGE)\n    first = start + 1",
            "first = start + 1\n    stream.wait(after, EDGE)",
        ),
        ("arithmetic", "start + 1", "(start - 1)"),
        ("number", "1", "2"),
        ("number", "1", "0"),
        ("drop", "pool.retire(pages[first:], after)", "pass"),
        ("points", "after", points),
        ("slice", "first", "(first) + 1"),
        ("slice", "first", "None"),
        ("context", "with stream.active()", "if True"),
        ("drop", "copy(pool.k, pool.v)", "pass"),
        ("turn", "pool.k, pool.v", "pool.v, pool.k"),
        ("half", "pool.k", "pool.v"),
        ("half", "pool.v", "pool.k"),
        ("comparison", "first < len(pages)", "((first) <= (len(pages)))"),
        ("condition", "first < len(pages)", "not (first < len(pages))"),
        ("drop", "stream.record()", "pass"),
        ("join", "after.join(first)", "after"),
        ("join", "after.join(first)", "first"),
    }


def test_a_mutant_keeps_its_name_when_lines_move() -> None:
    assert [mutant.id for mutant in mutants_of("x.py", SOURCE)] == [
        mutant.id for mutant in mutants_of("x.py", "# more\n\n" + SOURCE)
    ]


def test_every_mutant_of_the_engine_is_a_program_of_the_same_lines() -> None:
    mutants = all_mutants()
    sources = {
        path: (PACKAGE / path).read_text(encoding="utf-8") for path in {mutant.path for mutant in mutants}
    }
    assert len({mutant.id for mutant in mutants}) == len(mutants) > 1000
    for mutant in mutants[::7]:
        changed = mutant.apply(sources[mutant.path])
        ast.parse(changed)
        assert changed.count("\n") == sources[mutant.path].count("\n")


def test_every_file_that_is_left_out_exists() -> None:
    files = [
        path.relative_to(PACKAGE).as_posix()
        for folder in FOLDERS
        for path in (PACKAGE / folder).rglob("*.py")
    ]
    assert [pattern for pattern, _ in LEFT_OUT if not any(fnmatchcase(file, pattern) for file in files)] == []


@pytest.mark.long
def test_a_lost_wait_is_noticed_by_its_name_and_a_result_is_made_once(tmp_path: Path) -> None:
    """The wait of a step's results for the forward that computes them."""
    mutant = next(one for one in all_mutants() if "COPY_AFTER_FORWARD" in one.old and one.rule == "drop")
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "fenceline.vgpu.mutate", "--id", mutant.id, "--workload", "prefixes"]
    for _ in range(2):
        subprocess.run([*command, "--results", str(results)], check=True, capture_output=True, timeout=280)
    (line,) = results.read_text().splitlines()
    assert json.loads(line)["state"] == "killed"
    assert read_results(results)[mutant.id].by_name


def test_the_report_counts_what_is_not_equivalent() -> None:
    fields = {"path": "mem_cache/x.py", "line": 1, "rule": "drop", "old": "a", "text": "b"}
    results = {
        "1": Result(
            id="1", ordering=True, state="killed", killed_by="happens-before", by_name=True, **fields
        ),
        "2": Result(id="2", ordering=True, state="killed", killed_by="tokens", **fields),
        "3": Result(id="3", ordering=False, state="survived", **fields),
        "4": Result(id="4", ordering=False, state="unreached", **fields),
    }
    page = report(results, {"3": {"verdict": "equivalent", "why": "Nobody reads it."}})
    assert "| mem_cache | 4 | 2 | 1 | 66.7% | 2 | 50% |" in page
    assert "equivalent. Nobody reads it." in page
    assert "not reviewed (unreached)" in page
