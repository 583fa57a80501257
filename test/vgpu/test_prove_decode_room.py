"""The memory of decode steps, the tokens of prefill steps, and the order of policies that look at the prefix cache, are
decided again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_model import without_questions

from fenceline.memory_order import Points
from fenceline.scheduler import scheduler as scheduler_module
from fenceline.scheduler.prefill import PrefillPlanner
from fenceline.scheduler.running_batch import RunningBatch
from fenceline.scheduler.schedule_policy import PrefixWork, StepSharing
from fenceline.scheduler.scheduler import Scheduler
from fenceline.vgpu.proving.runs import ANSWERS, Outcome, Trial, run

torch.set_num_threads(1)


def first_failure(*workloads: str, num_seeds: int = 8, first: int = 0) -> Outcome:
    """The first run of these that fails. ``first``: a seed to begin with, which only saves time."""
    seeds = [*range(first, num_seeds), *range(first)]
    outcomes = (run(Trial(name, seed)) for seed in seeds for name in workloads)
    return next(outcome for outcome in outcomes if not outcome.clean)


def one_page_more(self: RunningBatch, *args: Any) -> int:
    return num_pages_needed(self, *args) + 1


def never_plentiful(self: RunningBatch, lens: Any, num_available_pages: int, *args: Any) -> Any:
    return grow(self, lens, 0, *args)


def more_is_plentiful(self: RunningBatch, lens: Any, num_available_pages: int, *args: Any) -> Any:
    return grow(self, lens, num_available_pages - 1, *args)


def without_points(self: RunningBatch, *args: Any) -> Any:
    return replace(schedule_step(self, *args), after=Points.none())


def one_page_left_more(self: Scheduler, shape: Any) -> Any:
    room = make_room(self, shape)
    return room and (room[0], room[1] + (room[1] > 0))


def always_waits(self: Scheduler, shape: Any) -> Any:
    self.num_waits = getattr(self, "num_waits", 0) + 1  # type: ignore[attr-defined]
    return None if self.num_waits % 3 == 0 else make_room(self, shape)  # type: ignore[attr-defined]


def shallowest(self: Scheduler) -> int:
    return min(self.shapes)


def loses_most(self: Scheduler, req: Any) -> Any:
    rank, num_running, (outputs, prompt) = loses_least(self, req)
    return rank, num_running, (-outputs, -prompt)


num_pages_needed, grow = RunningBatch.num_pages_needed, RunningBatch._grow
schedule_step = RunningBatch.schedule_step
make_room, loses_least = Scheduler.make_room, Scheduler.loses_least


@pytest.mark.parametrize(
    ("owner", "name", "fault", "workload", "first", "says"),
    [
        (
            RunningBatch,
            "num_pages_needed",
            one_page_more,
            "retraction",
            1,
            "retracted for a step that has its memory",
        ),
        (RunningBatch, "_grow", never_plentiful, "mixed", 16, "pages for a decode step"),
        (
            Scheduler,
            "make_room",
            one_page_left_more,
            "mixed",
            0,
            "pages are said to be left for a decode step",
        ),
        (Scheduler, "make_room", always_waits, "mixed", 0, "a decode step waits, and has memory"),
        (Scheduler, "deepest_with_room", shallowest, "everything", 0, "memory for drafts of depth"),
        (Scheduler, "loses_least", loses_most, "retraction", 0, "another one loses less"),
    ],
)
def test_the_memory_of_decode_steps_is_decided_again(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    fault: Callable[..., Any],
    workload: str,
    first: int,
    says: str,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = first_failure(workload, num_seeds=40, first=first)
    assert found.checker == ANSWERS and says in found.report, found.report


def test_a_step_that_has_not_its_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share that is kept for short requests, which runs with small limits have."""
    monkeypatch.setattr(
        Scheduler, "has_room", lambda self, num_pages, num_available: num_pages <= num_available
    )
    found = first_failure("retraction", num_seeds=64, first=5)
    assert "a decode step has not the memory that it needs" in found.report, found.report


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("_grow", more_is_plentiful, "growth: "),
        (
            "needs_nothing",
            property(lambda self: self._num_plain_steps > 1),
            "are said to be left for a decode step",
        ),
        ("schedule_step", without_points, "a step does not wait for"),
    ],
)
def test_what_decode_steps_take_and_wait_for_is_compared(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, says: str
) -> None:
    monkeypatch.setattr(RunningBatch, name, fault)
    if says != "growth: ":  # which is one of the questions
        without_questions(monkeypatch)
    found = first_failure("retraction", "row_reuse")
    assert says in found.report, found.report


def test_lengths_of_drafts_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    next_lens = RunningBatch.next_lens
    monkeypatch.setattr(
        RunningBatch, "next_lens", lambda self, shape: next_lens(self, shape) + (shape.depth > 0)
    )
    found = first_failure("speculation")
    assert "a step may bring" in found.report, found.report


@pytest.mark.parametrize(
    ("policy", "workload", "first"), [("lpm", "prefixes", 1), ("dfs-weight", "everything", 7)]
)
def test_the_order_of_a_policy_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, policy: str, workload: str, first: int
) -> None:
    order = scheduler_module.order_waiting

    def reversed_order(waiting: Any, name: str, *args: Any) -> Any:
        reqs = order(waiting, name, *args)
        return reqs[::-1] if name == policy else reqs

    monkeypatch.setattr(scheduler_module, "order_waiting", reversed_order)
    found = first_failure(workload, num_seeds=40, first=first)
    assert f"is tried before one that {policy} prefers" in found.report, found.report


def one_token_less(self: PrefillPlanner, *args: Any) -> int:
    size = chunk_tokens(self, *args)
    return size - 1 if size > 2 else size


chunk_tokens, of_step = PrefillPlanner._chunk_tokens, PrefixWork.of_step


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (PrefillPlanner, "_chunk_tokens", one_token_less, ["are computed behind"]),
        (StepSharing, "tokens", lambda self, num_waiting: 10**6, ["joins 1000000 tokens", "are a step"]),
        (PrefixWork, "of_step", lambda self, num: 2 * of_step(self, num), ["on the CPU: chunks: "]),
    ],
)
def test_the_tokens_of_prefill_steps_are_decided_again(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any], says: list[str]
) -> None:
    monkeypatch.setattr(owner, name, fault)
    without_questions(monkeypatch)
    # With the limits of seed 1, a step's size shows in its tokens as well.
    found = first_failure("bursts", "mixed", "everything", num_seeds=40, first=1)
    assert found.checker == ANSWERS and all(one in found.report for one in says), found.report
