"""Mutants: what the rules make of a source, and that a run of one is a run of the changed engine."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

import psutil
import pytest

from fenceline_proof import mutate
from fenceline_proof.mutants import FOLDERS, LEFT_OUT, PACKAGE, Mutant, all_mutants, mutants_of
from fenceline_proof.mutate import Result, Traced, read_results, report, runs_for

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
        ("drop", "pages.count()", 5),
        ("key", "pages", 6),
        ("key", "after", 6),
    }


def test_runs_that_execute_a_line_come_first_in_rounds_of_all_workloads() -> None:
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
def test_shards_are_parts_of_one_random_order(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*more: str) -> list[str]:
        assert mutate.main(["--list", "--only", "sampling/*", *more]) == 0
        return capsys.readouterr().out.splitlines()

    everything, parts = listed(), [listed("--shard", f"{i}/3") for i in (1, 2, 3)]
    assert sorted(sum(parts, [])) == sorted(everything) and len(everything) > 20
    assert parts[1] == everything[1::3] and everything[:9] == listed("--sample", "9")
    assert everything != listed("--seed", "1") and sorted(everything) == sorted(listed("--seed", "1"))


def test_a_campaign_ends_in_time_and_keeps_nothing_of_what_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of mutants whose runs never end two are running when the time is over; one is reached by no run."""
    mutants = mutants_of("sampling/sampler.py", SOURCE)[:4]
    unreached = replace(mutants[0], path="sampling/filters.py")

    def runs(mutant: Mutant) -> Iterator[tuple[str, int]]:
        return iter([] if mutant is unreached else [("mixed", 0)])

    monkeypatch.setattr(mutate, "_run_mutant", lambda *args: signal.pause())
    results = tmp_path / "results.jsonl"
    before, began = psutil.Process().children(), time.monotonic()
    mutate._campaign([unreached, *mutants], runs, 2, 0.1, results, began + 1)
    assert [one.state for one in read_results(results).values()] == ["unreached"]
    assert psutil.Process().children() == before
    mutate._campaign(mutants, runs, 2, 60, results, time.monotonic() + 60)  # too late for one to begin
    assert len(read_results(results)) == 1


def test_a_time_limit_has_room_for_a_mutant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mutate.main(["--minutes", "2", "--cpu-limit", "60"])
    assert "--minutes: too few" in capsys.readouterr().err


def test_results_of_shards_are_merged_each_mutants_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"path": "mem_cache/x.py", "line": 1, "rule": "drop", "ordering": False, "old": "a", "text": "b"}
    shards = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for shard, ids, state in zip(shards, ("ab", "bc", "d"), ("survived", "killed", "killed"), strict=True):
        lines = (json.dumps({"id": one, "state": state, "named": [], **fields}) + "\n" for one in ids)
        shard.write_text("".join(lines))
    paths = [str(shard) for shard in shards]
    assert mutate.main(["--report", "--results", paths[0], "--merge", *paths[1:]]) == 1, "one has no review"
    assert {one.id: one.killed for one in read_results(shards[0]).values()} == {
        "a": False, "b": True, "c": True, "d": True
    }  # fmt: skip
    assert "| mem_cache | 4 | 3 |" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    "what", ["node.host_after.join(in_flight)", "node.host_after.join(transfer_points(node))"]
)
def test_points_of_a_node_that_has_left_are_missed(what: str) -> None:
    """Without those that it had before, the pages are handed on, or loaded, while a transfer still uses them. The run
    itself shows it, without the questions that are asked when it has ended."""
    forgets = what.partition("join(")[2].removesuffix(")")
    mutant = next(one for one in all_mutants() if one.old == what and one.text == forgets)
    code = f"""
import sys
from fenceline_proof.mutate import _Finder
from fenceline_proof.mutants import all_mutants
sys.meta_path.insert(0, _Finder(next(one for one in all_mutants() if one.id == {mutant.id!r})))
from fenceline_proof.runs import Trial, run
from fenceline_proof.steps import Loop
outcomes = (run(Trial("gone", seed)) for seed in range(60))
print(next(outcome.report for outcome in outcomes if not outcome.clean))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=280
    )
    assert "missing edge:" in done.stdout


@pytest.mark.long
def test_a_lost_wait_is_noticed_by_its_name_and_a_result_is_made_once(tmp_path: Path) -> None:
    """The wait of a step's results for the forward that computes them."""
    mutant = next(one for one in all_mutants() if "COPY_AFTER_FORWARD" in one.old and one.rule == "drop")
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "fenceline_proof.mutate", "--id", mutant.id, "--workload", "prefixes"]
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
        "4": Result(id="4", ordering=False, state="unreached", function="Tree.evict", **fields),
    }
    page = report(results, {"3": {"verdict": "equivalent", "why": "Nobody reads it."}}, 3000)
    assert "| mem_cache | 4 | 2 | 1 | 66.7% | 2 | 50% |" in page
    assert "equivalent. Nobody reads it." in page
    assert "4 of 3,000 mutants" in page and "20.8% to 93.9% are killed" in page  # Wilson's interval of 2 of 3
    assert "not reviewed (unreached)" in page
    assert "* `mem_cache/x.py` `Tree.evict`: 1\n" in page, "what no run has come to, by function"
    assert "| drop | 4 | 2 | 1 |" in page and "| mem_cache/x.py | 4 | 2 | 1 |" in page
