"""The workload with everything: what it reaches is counted, and what it does not reach fails the proof."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from fenceline.sampling.sampling_params import SamplingParams
from fenceline_proof import campaign, events
from fenceline_proof.campaign import Plan, carry_out
from fenceline_proof.everything import EVERYTHING
from fenceline_proof.runs import Outcome, Trial, run, storage_directory
from fenceline_proof.steps import make_config
from fenceline_proof.table import Proof, as_json, as_text

torch.set_num_threads(1)


def _plan(num_intact: int) -> Plan:
    return Plan(
        arms=(),
        workloads=(EVERYTHING.name,),
        first_seed=0,
        num_intact=num_intact,
        num_per_arm=0,
        everything=False,
        jobs=1,
        progress=lambda num: None,
    )


def test_every_feature_is_in_some_scenario() -> None:
    """Of flags and of what requests ask for."""
    flags: dict[str, set[object]] = {}
    asked: dict[str, int] = {}
    for seed in range(200):
        scenario = EVERYTHING.scenario(seed)
        for name, value in scenario.flags.items():
            flags.setdefault(name, set()).add(value)
        for arrival in scenario.arrivals:
            params = getattr(arrival.message, "sampling_params", None)
            for name in () if params is None else params.__struct_fields__:
                if getattr(params, name) != getattr(type(params)(), name):
                    asked[name] = asked.get(name, 0) + 1
    assert flags["hicache_write_policy"] == {"write_through", "write_through_selective", "write_back"}
    assert flags["hicache_mem_layout"] == {"layer_first", "page_first"}
    assert flags["hicache_io_backend"] == {"kernel", "direct"}
    assert flags["hicache_storage_prefetch_policy"] == {"best_effort", "wait_complete", "timeout"}
    assert flags["retract_policy"] == {"recompute", "offload"} and flags["page_size"] == {1, 2, 4, 8}
    assert flags["schedule_policy"] == {"fcfs", "lpm", "dfs-weight", "random"}
    assert flags["enable_priority_scheduling"] == {True}
    of_text = {"stop", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"}
    assert asked.keys() == set(SamplingParams.__struct_fields__) - of_text and min(asked.values()) > 20, asked


def test_flags_go_together() -> None:
    """Also where an arranged run replaces some of them."""
    for seed in range(100):
        with storage_directory(EVERYTHING.scenario(seed).flags) as flags:
            make_config(flags, "vgpu")  # raises ConfigError


def test_a_seed_is_a_run_of_everything_too() -> None:
    """With storage's threads, their time-out and reactions to what happens."""
    scenarios = ((seed, EVERYTHING.scenario(seed)) for seed in count())
    seed = next(seed for seed, s in scenarios if "hicache_storage_prefetch_timeout" in s.flags and s.reactions)
    outcomes = [run(Trial(EVERYTHING.name, seed)) for _ in range(2)]
    assert outcomes[0] == outcomes[1] and outcomes[0].clean and len(outcomes[0].events) > 10


def test_what_has_not_happened_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """By three runs, of which the last sees what the others did not; and by five, which never see the rest."""
    rare, never = "retracted twice", "remap"

    def quick_run(trial: Trial) -> Outcome:
        return Outcome(trial, events=frozenset({"hit"} | ({rare} if trial.seed == 3 else set())))

    monkeypatch.setattr(campaign, "run", quick_run)
    monkeypatch.setattr(campaign, "_RUNS_FOR_EVENTS", 1)
    monkeypatch.setattr(campaign, "_MORE_SEEDS_FOR_EVENTS", 4)
    for wanted, num_runs in ((("hit",), 1), (("hit", rare), 4), (("hit", rare, never), 5)):
        monkeypatch.setattr(campaign, "EVENTS", dict.fromkeys(wanted, ""))
        proof = carry_out(_plan(1))
        assert proof.num_intact == num_runs and not proof.failures
        assert proof.unseen == [event for event in wanted if event == never]
        assert proof.clean == (never not in wanted) and proof.events["hit"] == num_runs


def test_only_runs_that_may_show_it_are_made_for_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    rare = "drafts under a window"

    def quick_run(trial: Trial) -> Outcome:
        flags = EVERYTHING.scenario(trial.seed).flags
        assert trial.seed == 0 or ("draft" in flags and flags["model"] == "windows")
        return Outcome(trial, events=frozenset({rare} if trial.seed > 30 else ()))

    monkeypatch.setattr(campaign, "run", quick_run)
    monkeypatch.setattr(campaign, "_RUNS_FOR_EVENTS", 1)
    monkeypatch.setattr(campaign, "EVENTS", {rare: ""})
    proof = carry_out(_plan(1))
    assert proof.events[rare] == 1 and 2 < proof.num_intact < 20


def test_what_has_not_happened_is_named() -> None:
    proof = Proof(num_intact=20, events={"remap": 0, "hit": 3})
    assert not proof.clean and as_json(proof)["events"] == {"remap": 0, "hit": 3}
    text = as_text(proof)
    assert "events: 1 of 2 seen" in text and f"NOT SEEN: remap ({events.EVENTS['remap']})" in text
    assert Proof(num_intact=20, events={"hit": 3}).clean


def test_too_few_runs_are_not_asked_for_events() -> None:
    proof = carry_out(_plan(1))
    assert proof.num_intact == 1 and not proof.events and proof.clean
