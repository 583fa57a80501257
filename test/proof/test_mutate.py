"""Mutants: what the rules make of a source, and that a run of one is a run of the changed engine."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from fenceline_proof import mutate
from fenceline_proof.mutants import FOLDERS, LEFT_OUT, PACKAGE, all_mutants, mutants_of
from fenceline_proof.mutate import Result, Traced, read_results, report, runs_for
from mutate_kernels import CUDA_TESTS, ROOT, TESTS, checks_of, cuda_mutants, kernel_mutants

engine_mutants = cache(all_mutants)  # which takes seconds
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
        ("shift", "stream.wait(after, EDGE)\n    first = start + 1", "first = start + 1\n    stream.wait(after, EDGE)"),
        ("drop", "pool.retire(pages[first:], after)", "pass"),
        ("points", "after", points),
        ("context", "with stream.active()", "if True"),
        ("condition", "first < len(pages)", "not (first < len(pages))"),
        ("drop", "stream.record()", "pass"),
        ("join", "after.join(first)", "after"),
        ("join", "after.join(first)", "first"),
    }


def test_every_file_of_cuda_has_tests_and_mutants() -> None:
    mutants = cuda_mutants()
    assert {one.path for one in mutants} == CUDA_TESTS.keys()
    assert all((ROOT / script).exists() for path in CUDA_TESTS for script, _, _ in checks_of(path))


def test_every_kernel_has_tests_and_mutants() -> None:
    mutants = kernel_mutants()
    assert {Path(one.path).stem for one in mutants} == TESTS.keys()
    assert all((ROOT / script).exists() for one in mutants for script, _, _ in checks_of(one.path))
    for one in mutants[::5]:
        ast.parse(one.apply((PACKAGE / one.path).read_text(encoding="utf-8")))


def test_a_mutant_keeps_its_name_when_lines_move() -> None:
    assert [mutant.id for mutant in mutants_of("x.py", SOURCE)] == [
        mutant.id for mutant in mutants_of("x.py", "# more\n\n" + SOURCE)
    ]
    assert str(mutants_of("x.py", SOURCE)[0]) == "x.py:4 move [drop] stream.wait(after, EDGE)  ->  pass"


def test_a_mutant_is_reached_with_the_statement_that_it_changes() -> None:
    """Not with the beginning of the block or function around it, which a run need not execute, or always does."""
    source = """
def key_of(pages, after) -> tuple[list, Points]:
    if after:
        pages.retire(after)
        pages.count()
    return (
        pages,
        after,
    )
"""
    assert {(one.rule, one.old, one.statement) for one in mutants_of("x.py", source)} == {
        ("condition", "after", 3),
        ("drop", "pages.retire(after)", 4),
        ("shift", "pages.retire(after)\n        pages.count()", 4),
    }


def test_runs_that_execute_a_line_come_first_in_rounds() -> None:
    """The fastest first; then other seeds. Workloads that do not come to the line are left out, and the one with the
    largest share makes three runs in a round."""
    line, elsewhere = {"x.py": frozenset({7, 8})}, {"x.py": frozenset({8}), "y.py": frozenset({7})}
    traced = [
        Traced("slow", 0, 1, 4.0, line),
        Traced("slow", 1, 1, 3.0, line),
        Traced("seldom", 0, 2, 1.0, elsewhere),
        Traced("seldom", 1, 2, 1.0, line),
        Traced("everything", 0, 10, 0.9, line),
        Traced("everything", 1, 10, 0.8, line),
        Traced("never", 0, 9, 0.1, elsewhere),
    ]
    first = list(islice(runs_for(("x.py", 7), traced), 10))
    assert first == [
        ("everything", 1), ("everything", 0), ("everything", 2), ("seldom", 1), ("slow", 1),
        ("everything", 3), ("everything", 4), ("everything", 5), ("seldom", 2), ("slow", 0),
    ]  # fmt: skip
    assert list(runs_for(("x.py", 9), traced)) == []


def test_every_mutant_of_the_engine_is_a_program() -> None:
    mutants = engine_mutants()
    sources = {path: (PACKAGE / path).read_text(encoding="utf-8") for path in {mutant.path for mutant in mutants}}
    assert len({mutant.id for mutant in mutants}) == len(mutants) > 200
    for mutant in mutants[::7]:
        changed = mutant.apply(sources[mutant.path])
        ast.parse(changed)
        assert changed.count("\n") == sources[mutant.path].count("\n")


def test_every_file_that_is_left_out_exists() -> None:
    files = [path.relative_to(PACKAGE).as_posix() for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")]
    assert [pattern for pattern, _ in LEFT_OUT if not any(fnmatchcase(file, pattern) for file in files)] == []


@pytest.mark.long
@pytest.mark.parametrize("what", ["node.host_after.join(in_flight)", "node.host_after.join(transfer_points(node))"])
def test_points_of_a_node_that_has_left_are_missed(what: str) -> None:
    """Without those that it had before, the pages are handed on, or loaded, while a transfer still uses them. The run
    itself shows it, without the questions that are asked when it has ended."""
    forgets = what.partition("join(")[2].removesuffix(")")
    mutant = next(one for one in engine_mutants() if one.old == what and one.text == forgets)
    code = f"""
from fenceline_proof.mutate import _load_changed
from fenceline_proof.mutants import Mutant
_load_changed({mutant!r})
from fenceline_proof.runs import Trial, run
from fenceline_proof.steps import Loop
outcomes = (run(Trial("gone", seed)) for seed in range(60))
print(next(outcome.report for outcome in outcomes if not outcome.clean))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=280)
    assert "missing edge:" in done.stdout


@pytest.mark.long
def test_a_lost_wait_is_noticed_by_its_name(tmp_path: Path) -> None:
    """The wait of a step's results for the forward that computes them."""
    mutant = next(one for one in engine_mutants() if "COPY_AFTER_FORWARD" in one.old and one.rule == "drop")
    results = tmp_path / "results.jsonl"
    argv = ["--id", mutant.id, "--workload", "prefixes", "--results", str(results)]
    command = [sys.executable, "-m", "fenceline_proof.mutate", *argv]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    assert mutate.main(argv) == 0, "what has been tried is not tried again"
    (line,) = results.read_text().splitlines()
    assert json.loads(line)["state"] == "killed"
    assert read_results(results)[mutant.id].by_name


def test_a_survivor_that_the_page_does_not_list_is_a_loss() -> None:
    fields = {"path": "mem_cache/x.py", "line": 1, "rule": "drop", "function": "", "edit": "a  ->  b"}
    results = [
        Result(id="1", state="killed", killed_by="happens-before", by_name=True, **fields),
        Result(id="2", state="killed", killed_by="tokens", **fields),
        Result(id="3", state="survived", **fields),
        Result(id="4", state="unreached", **fields),
    ]
    page = report(results, frozenset({"3"}))
    assert "2 of 4 killed, 1 of these by name." in page and "a  ->  b: survived\n" in page
    assert "4 a  ->  b: unreached, LOST" in page


def test_each_known_survivor_has_a_reason() -> None:
    known, folder = mutate.known_survivors(), Path(__file__).parents[1]
    assert len(known) > 10 and all(known.values())
    for reason in known.values():
        file, _, name = reason.removeprefix("killed by ").partition("::")
        assert not name or f"def {name}(" in (folder / file).read_text(encoding="utf-8"), reason
