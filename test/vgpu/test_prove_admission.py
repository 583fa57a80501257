"""What the proof says of memory: faults of one line each in what is admitted, which change no answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fenceline.scheduler import prefill
from fenceline.scheduler.prefill import PrefillPlanner
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.scheduler.running_batch import NewTokenRatio, RunningBatch
from fenceline.scheduler.schedule_policy import ShortShare
from fenceline.scheduler.scheduler import Scheduler
from fenceline.vgpu.proving.runs import ANSWERS, Trial, run

torch.set_num_threads(1)
SMALL = (1, 12, 19, 26, 37)  # seeds whose runs keep memory for short requests


def _more_is_expected(patch: pytest.MonkeyPatch) -> None:
    right = PrefillPlanner._expected
    patch.setattr(PrefillPlanner, "_expected", lambda self, req: right(self, req) + 8)


def _nothing_is_reserved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningBatch, "reserved_tokens", lambda self, ratio, clip: 0)


def _a_page_is_not_available(patch: pytest.MonkeyPatch) -> None:
    right = RequestMemory.num_available_pages
    patch.setattr(RequestMemory, "num_available_pages", property(lambda self: max(right.fget(self) - 1, 0)))


def _pinned_pages_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """A prefix that nobody uses is counted as available, although the request that is admitted keeps it."""
    right = PrefillPlanner._admit

    def wrong(self: PrefillPlanner, plan: Any, req: Any, budget: Any, alone: bool) -> bool:
        match = self._memory.match(req).match
        budget.memory_tokens += match.num_tokens
        return right(self, plan, req, budget, alone)

    patch.setattr(PrefillPlanner, "_admit", wrong)


def _the_share_of_short_ones_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShortShare, "kept_tokens", property(lambda self: 0))


def _short_ones_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningBatch, "short_share", lambda self, share: share)


def _more_is_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShortShare, "is_short", lambda self, final_len: final_len <= self.tokens)


def _one_gives_way_although_more_must(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill._MemoryForecast, "release", lambda self, *args: setattr(self, "released", True))
    patch.setattr(prefill._MemoryForecast, "has_room", lambda self, *args: hasattr(self, "released"))


def _one_more_gives_way(patch: pytest.MonkeyPatch) -> None:
    right = PrefillPlanner.preempted

    def wrong(self: PrefillPlanner, waiting: Any, running: Any, *args: Any) -> Any:
        victims = right(self, waiting, running, *args)
        return victims and victims + [req for req in running if req not in victims][-1:]

    patch.setattr(PrefillPlanner, "preempted", wrong)


def _a_decode_step_waits_longer(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.plan_prefill

    def wrong(self: Scheduler) -> Any:
        self.prefill_in_row = max(self.prefill_in_row - 2, 0)
        return right(self)

    patch.setattr(Scheduler, "plan_prefill", wrong)


def _a_prompt_waits_for_a_decode_step(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.plan_prefill

    def wrong(self: Scheduler) -> Any:
        self.prefill_in_row += 2
        return right(self)

    patch.setattr(Scheduler, "plan_prefill", wrong)


def _the_ratio_does_not_sink(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NewTokenRatio, "decay", lambda self: None)


def _a_retraction_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NewTokenRatio, "after_retraction", lambda self, *args: None)


def _the_device_waits_for_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "speculates_under_masks", property(lambda self: True))


@pytest.mark.parametrize(
    ("plant", "workload", "seeds", "said"),
    [
        (_more_is_expected, "retraction", range(8), "admission: r\\d+ waits: it needs"),
        (_nothing_is_reserved, "bodies", range(8), "admission: r\\d+ is admitted: it needs"),
        (_a_page_is_not_available, "mixed", range(8), "pages are said to be available"),
        (_pinned_pages_do_not_count, "conversations", range(16), "admission: r\\d+ is admitted: it needs"),
        (_the_share_of_short_ones_is_not_kept, "bodies", SMALL, "admission: r\\d+ is admitted: it needs"),
        (_short_ones_hold_nothing, "bodies", SMALL, "admission: r\\d+ (waits|is admitted): it needs"),
        (_more_is_short, "bodies", SMALL, "admission: r\\d+ of \\d+ tokens is short"),
        (_one_gives_way_although_more_must, "bodies", range(5, 13), "requests are retracted for nobody"),
        (
            _one_more_gives_way,
            "priorities",
            range(16),
            "and without that the same requests would be admitted",
        ),
        (
            _a_decode_step_waits_longer,
            "mixed",
            range(8),
            "prompt tokens is planned, and a decode step is due",
        ),
        (
            _a_prompt_waits_for_a_decode_step,
            "mixed",
            range(8),
            "prompts wait for a decode step, and it is not due",
        ),
        (
            _the_device_waits_for_the_host,
            "mixed",
            range(2),
            "published before the next step has been launched",
        ),
        (_the_ratio_does_not_sink, "bodies", range(4), "the ratio of new tokens is"),
        (_a_retraction_is_forgotten, "retraction", range(8), "the ratio of new tokens is"),
    ],
)
def test_a_request_that_waits_or_runs_for_a_wrong_sum_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    workload: str,
    seeds: range | tuple[int, ...],
    said: str,
) -> None:
    plant(monkeypatch)
    outcomes = (run(Trial(workload, seed)) for seed in seeds)
    found = next((one for one in outcomes if not one.clean), None)
    assert found is not None and found.checker == ANSWERS
    assert re.search(said, found.report), found.report
