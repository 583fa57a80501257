"""The planner of prefill steps and the order of waiting requests, asked about random states, with faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from fenceline.memory_order import Points
from fenceline.model_executor.step import PageWrites
from fenceline.scheduler import prefill, schedule_policy
from fenceline.scheduler.prefill import PrefillPlanner
from fenceline.scheduler.schedule_policy import PrefixWork, ShortShare, StepSharing
from fenceline.vgpu.proving.policy_order import compare_policies
from fenceline.vgpu.proving.prefill_plans import compare_prefill_plans
from fenceline.vgpu.proving.runs import ANSWERS, Trial, run

torch.set_num_threads(1)

SEEDS = range(50)


def nothing(self: Any, *args: Any) -> None:
    """In the place of a method that does something."""


def always(value: object) -> Callable[..., Any]:
    """In the place of a decision."""
    return lambda *args: value


def waits_for_nothing(self: PrefillPlanner, plan: Any, *args: Any, **kwargs: Any) -> bool:
    got = admit(self, plan, *args, **kwargs)
    plan.after = Points.none()
    return got


def counts_no_cached(self: PrefillPlanner, plan: Any, *args: Any, **kwargs: Any) -> bool:
    got = admit(self, plan, *args, **kwargs)
    plan.num_cached_tokens = 0
    return got


def looks_at_all(self: PrefillPlanner, plan: Any, waiting: Any, *args: Any) -> None:
    reqs = list(waiting)
    for req in reqs:
        self._memory.match(req)
    admit_waiting(self, plan, reqs, *args)


def one_slot_further(self: PrefillPlanner, *args: Any) -> Any:
    return slots(self, *args) + 1


def scores_the_first(self: PrefillPlanner, *args: Any) -> Any:
    seq = make_seq(self, *args)
    return seq if seq.prompt_logprobs_from is None else replace(seq, prompt_logprobs_from=seq.prefix_len)


def keeps_of_a_small_memory(num_tokens: int, num_rows: int) -> ShortShare:
    return ShortShare(num_tokens // 16, num_rows // 32)


def of_a_layer_without_mlp(model: Any, device: str) -> PrefixWork:
    model.active_mlp_size = 0
    work = of_model(model, device)
    assert work is not None, "on a CPU work is limited"
    return work


def in_turn(waiting: Any, policy: str, match: Any, random: Random) -> Any:
    return waiting if policy == "random" else order_waiting(waiting, policy, match, random)


admit, admit_waiting = PrefillPlanner._admit, PrefillPlanner._admit_waiting
slots, make_seq = PrefillPlanner._slots, PrefillPlanner._seq
of_model, order_waiting = PrefixWork.of, schedule_policy.order_waiting


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (prefill._MemoryForecast, "pin", nothing, "give way to waiting requests"),
        (prefill._MemoryForecast, "admit", nothing, "give way to waiting requests"),
        (prefill._MemoryForecast, "might_have_room", always(True), "all of them would not be enough"),
        (PrefillPlanner, "_must_be_alone", always(False), "is wrongly judged"),
        (PrefillPlanner, "_admit_beside", nothing, "a step has"),
        (PrefixWork, "of_tokens", lambda self, num_tokens, prefix_len: num_tokens, "a step has"),
        (StepSharing, "tokens", always(99), "a step has"),
        (ShortShare, "take", nothing, "a step has"),
        (PrefillPlanner, "_admit_waiting", looks_at_all, "is looked up, which this step cannot take"),
        (PrefillPlanner, "_admit", waits_for_nothing, "with which its memory was leased"),
        (PrefillPlanner, "_admit", counts_no_cached, "are left half-way and cached"),
        (prefill._Plan, "page_writes", lambda self: PageWrites.none(), "a step writes the pages"),
        (PrefillPlanner, "_slots", one_slot_further, "goes to slots"),
        (PrefillPlanner, "_seq", scores_the_first, "has logprobs from"),
        (ShortShare, "of", keeps_of_a_small_memory, "are kept"),
        (PrefixWork, "of", of_a_layer_without_mlp, "is said to take as long as"),
    ],
)
def test_plans_are_decided_again(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = [compare_prefill_plans(Random(seed)) for seed in SEEDS]
    assert any(says in text for text in found), next(filter(None, found), "")


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("order_waiting", in_turn, "the random order is always the same"),
        ("order_waiting", lambda waiting, *args: waiting[:1], "puts requests in the order"),
        ("_split_shared", lambda waiting, matched: (waiting, []), "lpm puts requests in the order"),
        ("_by_weight", lambda waiting, match: waiting, "dfs-weight puts requests in the order"),
        ("num_waiting_tokens", always(7), "7 tokens are said to wait"),
    ],
)
def test_orders_of_waiting_requests_are_computed_again(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, says: str
) -> None:
    monkeypatch.setattr(schedule_policy, name, fault)
    found = [compare_policies(Random(seed)) for seed in SEEDS]
    assert any(says in text for text in found), next(filter(None, found), "")


def test_the_intact_engine_decides_rightly() -> None:
    assert not any(compare_prefill_plans(Random(seed)) or compare_policies(Random(seed)) for seed in SEEDS)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (
            PrefixWork,
            "of_tokens",
            lambda self, num_tokens, prefix_len: num_tokens,
            "prefill plans: a step has",
        ),
        (schedule_policy, "num_waiting_tokens", always(7), "policies: 7 tokens are said to wait"),
    ],
)
def test_a_run_asks_for_them(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    outcomes = [run(Trial("staging", seed)) for seed in range(3)]
    assert any(one.checker == ANSWERS and says in one.report for one in outcomes), [
        o.report for o in outcomes
    ]
