"""The ordering proof: its whole run at CI's size, and that it would notice."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import edges_page
from fenceline.memory_order.edges import EDGE_PARTS, EDGES, FORWARD_AFTER_LOAD, ROWS, UNDER_SPECULATION, edge_of
from fenceline_proof import campaign, prove
from fenceline_proof.arms import DORMANT, MISNAMED, NECESSARY, REDUNDANT, Arm, all_arms, judge, unarmed_rows
from fenceline_proof.campaign import Plan, carry_out, undeclared_sites
from fenceline_proof.events import EVENTS
from fenceline_proof.runs import HAPPENS_BEFORE, Outcome, Trial, run
from fenceline_proof.table import Proof, record
from fenceline_proof.workloads import WORKLOADS
from fenceline_sim.device import VgpuDevice

torch.set_num_threads(1)
ARMS = {arm.name: arm for arm in all_arms()}
# What graphs rely on is a matter of program order: each has the check that it is for.
CHECKERS = {
    "arena_pad": "freshness",
    "plan_source": "protection",
    "total_buckets": "freshness",
    "graph_pool": "lifetime",
    "sink": "bounds",
    "kept_hidden": "freshness",
    "registered_graph": "peers",
    "one_stream": "happens-before",
    "flag_generation": "happens-before",
    "peer_halves": "happens-before",
    "peer_words": "happens-before",
    "arena_pad/speculation": "freshness",
    "total_buckets/speculation": "freshness",
    "graph_pool/speculation": "lifetime",
    "sink/speculation": "bounds",
}

# Whose races hardly ever reach a token (docs/proof/prove.md): found in dozens of runs without the detector, or in none.
HARDLY_SEEN = {
    "store_after_forward",
    "forward_after_load@HiCacheController.layer_ready",
    "store_after_load",
    "sm_exclusive:forward-store",
    "sm_exclusive:store-forward",
    "host_page_reuse:host-load",
    "host_page_reuse:host-store",
    # What a step in flight computes with other weights is dropped: its requests are retracted.
    "new_weights",
    # What a draft computes changes no token, and the others are here without speculation.
    "kept_hidden",
    "row_tokens",
    "whole_page",
    # Sums of several ranks, without an engine: their own tests show what comes out wrong.
    "registered_graph",
    "one_stream",
    "flag_generation",
    "peer_halves",
    "peer_words",
    *UNDER_SPECULATION,
    # Other edges cover them.
    *(name for name, part in EDGE_PARTS.items() if part.covered),
}

# Of the others, the number of the run that shows it where the first does not. Only saves time: all are tried before we
# give up.
SEEN_FIRST = {
    "arena_pad": 3,
    "committed_state": 4,
    "forward_after_schedule@InputRing.upload": 3,
    "forward_after_schedule@MaskTable.upload": 3,
    "forward_after_load@ModelRunner.copy_state": 6,
    "forward_after_store@ModelRunner.copy_state": 6,
    "growth_stop": 4,
    "image_keys": 30,
    "image_names": 3,
    "load_after_store": 1,
    "moved_nodes": 1,
    "own_results": 25,
    "retired_after": 1,
    "schedule_after_forward@InputRing.upload": 4,
    "staging_reuse@InputRing.upload": 3,
    "step_images": 121,
}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_intact_engine_is_clean_and_every_edge_is_necessary(tmp_path: Path) -> None:
    """The whole command, with fewer runs of the intact engine. The record in the repository is what it finds."""
    result = tmp_path / "proof.json"
    command = [sys.executable, "-m", "fenceline_proof.prove", "--seeds", "100", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads(result.read_text())
    assert proof["clean"] and not proof["intact"]["failures"]
    assert proof["intact"]["seeds"] >= 100 and proof["intact"]["by_workload"].keys() == WORKLOADS.keys()
    assert set(proof["events"]) == set(EVENTS) and all(proof["events"].values())
    assert proof["intact"]["by_workload"]["everything"] >= 20 and proof["intact"]["close"] <= 2
    assert proof["never_met"] == [] and {pair["edge"] for pair in proof["pairs"]} == set(EDGES)
    assert [row["name"] for row in proof["edges"]] == list(ROWS)
    for row in proof["edges"]:
        explained = row["name"] in EDGE_PARTS and EDGE_PARTS[row["name"]].covered
        if row["status"] == DORMANT or (row["status"] == REDUNDANT and explained):
            continue
        assert row["status"] == "necessary" and row["seeds_caught"] >= 1, row
        if row["kind"] == "edge" or row["name"] in CHECKERS:
            edge = edge_of(row["name"])
            assert "by name" in row["caught_by"] and edge in row["report"]
            assert row["caught_by"].startswith(CHECKERS.get(row["name"], HAPPENS_BEFORE))
        if row["name"] in CHECKERS:
            assert re.search(rf"missing guard: .*{re.escape(edge)}", row["report"])
            assert re.search(r"fenceline\w*/\S+\.py:\d+ in", row["report"])
        if row["name"] == "own_results":
            assert "WAR on decode.next_tokens" in row["report"]
    kept = ("name", "status", "workload", "seed", "caught_by")
    found = [{name: row[name] for name in kept} for row in proof["edges"]]
    assert json.loads(edges_page.RECORD.read_text()) == found, "run: python -m fenceline_proof.prove --write-docs"


def test_everything_in_the_tables_has_an_arm_or_a_reason() -> None:
    assert all(row.fine and row.report for row in unarmed_rows())
    assert set(ARMS) | {row.name for row in unarmed_rows()} == set(ROWS)
    assert {row.name for row in unarmed_rows()} == {"result_lease"}


@pytest.mark.long
def test_an_edge_that_another_path_covers_is_redundant(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two slots the input ring's fences are implied by the order in which the loop publishes results."""
    from fenceline.memory_order import InputRing

    monkeypatch.setattr(InputRing.__init__, "__defaults__", (2,))
    rows = []
    for name in ("schedule_after_forward", "staging_reuse"):
        arm = ARMS[f"{name}@InputRing.upload"]
        rows.append(judge(arm, [run(arm.trial(seed)) for seed in range(2)]))
        assert rows[-1].status == REDUNDANT
    assert not Proof(rows=rows).clean


@pytest.mark.parametrize("everything", [True, False])
def test_a_severed_edge_gets_no_more_runs_than_it_needs(everything: bool) -> None:
    """Where each run fails, the first one is enough in a campaign of everything; where none names the edge, all are
    made, and more."""
    arm = ARMS["host_after_copy"]
    unnamed = Arm("copy_after_forward", "prefixes", lambda outcome: False)
    plan = Plan(
        arms=(arm, unnamed), workloads=("mixed",), first_seed=0, num_intact=0, num_per_arm=3,
        everything=everything, jobs=1, progress=lambda count: None,
    )  # fmt: skip
    rows = {row.name: row for row in carry_out(plan).rows}
    assert rows[arm.name].status == NECESSARY and rows[arm.name].seed == 0
    assert rows[arm.name].num_runs == rows[arm.name].num_caught == (1 if everything else 3)
    assert rows[unnamed.name].status == MISNAMED and rows[unnamed.name].num_runs == (18 if everything else 3)


def test_what_no_run_has_shown_gets_more_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first one that fails; six times the usual number at most. Also those of which there are usually half as
    many. What is known to be covered gets a third, and no more."""
    made: list[tuple[frozenset[str], int]] = []

    def quick_run(trial: Trial) -> Outcome:
        made.append((trial.severed, trial.seed))
        return Outcome(trial, checker=HAPPENS_BEFORE if trial.seed == 7 and "sink" in trial.severed else "")

    monkeypatch.setattr(campaign, "run", quick_run)
    arms = [
        Arm("sink", "graphs", lambda outcome: not outcome.clean),
        Arm("graph_pool", "graphs", lambda outcome: not outcome.clean),
        Arm("old_kv", "ranks", lambda outcome: not outcome.clean),
        ARMS["staging_reuse@MaskTable.begin"],
    ]
    plan = Plan(
        arms=tuple(arms), workloads=("mixed",), first_seed=0, num_intact=9, num_per_arm=3, everything=True, jobs=1,
        progress=lambda count: None,
    )  # fmt: skip
    one = dataclasses.replace(plan, everything=False)
    for more, num_runs in ((plan, [8, 18, 18, 1]), (one, [3, 3, 2, 1])):
        made.clear()
        rows = {row.name: row for row in carry_out(more).rows}
        assert [rows[arm.name].num_runs for arm in arms] == num_runs
        assert (rows["sink"].status, rows["sink"].seed) == ((NECESSARY, 7) if num_runs[0] == 8 else (REDUNDANT, None))
        assert rows["graph_pool"].status == REDUNDANT and not rows["graph_pool"].fine
        assert [seed for severed, seed in made if "old_kv" in severed] == list(range(num_runs[2]))


def test_a_failure_of_another_name_does_not_count() -> None:
    arm = Arm("copy_after_forward", "prefixes", lambda outcome: False)
    row = judge(arm, [run(arm.trial(0))])
    assert row.status == MISNAMED and row.caught_by.startswith(HAPPENS_BEFORE) and not row.fine


def test_no_run_proves_nothing() -> None:
    assert not judge(ARMS["staging_reuse@InputRing.upload"], []).fine


def test_a_failure_of_the_intact_engine_is_not_clean() -> None:
    failure = run(ARMS["host_after_copy"].trial(0))
    assert not failure.clean and Proof(num_intact=1).clean
    assert not Proof(num_intact=1, failures=[failure]).clean


@pytest.mark.parametrize("name", ["mixed"])
def test_same_seed_same_outcome(name: str) -> None:
    outcomes = [run(Trial(name, 3, frozenset({"staging_reuse"}))) for _ in range(2)]
    assert outcomes[0] == outcomes[1] and outcomes[0].edges == ("staging_reuse",)
    assert run(Trial(name, 3)).clean


# Whose answers or decisions the proof finds wrong with the detector too.
SEEN_ANYWAY = {
    row["name"] for row in json.loads(edges_page.RECORD.read_text()) if row["caught_by"] in ("answers", "decisions")
}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(ARMS.keys() - HARDLY_SEEN - SEEN_ANYWAY))
def test_without_the_detector_races_show_as_wrong_answers(name: str) -> None:
    """Each edge's race is real: some schedule makes something else of the same decisions."""
    numbers = dict.fromkeys((SEEN_FIRST.get(name, 0), *range(40)))
    outcomes = (run(ARMS[name].trial(number, detect=False)) for number in numbers)
    failure = next((outcome for outcome in outcomes if not outcome.clean), None)
    assert failure is not None and failure.checker != HAPPENS_BEFORE


@pytest.mark.parametrize(("name", "number"), [("host_after_copy", 4), ("load_after_forward", 0)])
def test_the_command_that_is_printed_repeats_the_failure(
    name: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one's first runs show nothing, and it is not counted from behind them twice."""
    command = ARMS[name].trial(number).command
    assert prove.main([*command.split()[3:], "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"missing edge: {name}" in printed and f"repeat: {command}" in printed
    assert NECESSARY in printed


def test_one_workload_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert prove.main(["--workload", "aborts", "--seeds", "3", "--seed", "5", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    intact = result["intact"]
    assert intact.pop("tokens") > 20 and intact.pop("close") == 0
    assert intact == {"seeds": 3, "by_workload": {"aborts": 3}, "failures": []}
    assert result["edges"] == [] and "3 seeds, clean" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [["--edge", "forward_after_lunch"], ["--workload", "lunch"], ["--edge", "result_lease"]]
)
def test_wrong_names_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        prove.main(argv)
    assert stop.value.code == 2 and "choose one of" in capsys.readouterr().err


def test_the_record_holds_what_every_run_finds_again() -> None:
    arm = ARMS["staging_reuse@InputRing.upload"]
    (mine,) = record([judge(arm, [run(arm.trial(0))])])
    kept = {entry["name"]: entry for entry in json.loads(edges_page.RECORD.read_text())}
    assert kept["staging_reuse@InputRing.upload"] == mine


def test_a_function_that_applies_an_edge_unnamed_fails_the_proof() -> None:
    def outcome(*applied: tuple[str, str]) -> Outcome:
        return Outcome(Trial("mixed", 0), applied=frozenset(applied))

    launch, ready = "ModelRunner.launch", "HiCacheController.layer_ready"
    known = outcome(
        ("forward_after_load", launch), ("forward_after_load", ready), ("copy_after_forward", "ResultRing.download")
    )
    assert undeclared_sites([known]) == []
    others = [outcome(("copy_after_forward", "other")), outcome(("forward_after_load", "third"))]
    assert undeclared_sites([known, *others]) == [
        "copy_after_forward at ResultRing.download", "copy_after_forward at other", "forward_after_load at third",
    ]  # fmt: skip


class HiCacheController:
    """A function of the name under which the table of edges knows one."""

    def layer_ready(self, device: VgpuDevice) -> None:
        device.forward.wait(device.load.record(), FORWARD_AFTER_LOAD)


def test_an_edge_is_severed_in_one_function_alone() -> None:
    def waits(*severed: str) -> tuple[int, int]:
        device = VgpuDevice(frozenset(severed))
        made: list[object] = []
        device.forward._wait_event = made.append  # type: ignore[method-assign]
        device.forward.wait(device.load.record(), FORWARD_AFTER_LOAD)
        others = len(made)
        HiCacheController().layer_ready(device)
        return others, len(made) - others

    assert waits() == (1, 1) and waits("forward_after_load") == (0, 0)
    assert waits("forward_after_load@HiCacheController.layer_ready") == (1, 0)
