"""Two ranks with storage, and backups: faults of one line each, and what reports them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch

from fenceline.ipc.rank_board import RankBoard
from fenceline.mem_cache.hicache import HiCache
from fenceline.mem_cache.storage import agreement
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import RadixCache, TreeNode
from fenceline.memory_order.staging import ResultLease
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.scheduler import decisions
from fenceline.vgpu.proving.runs import Trial, run
from fenceline.vgpu.proving.workloads import WORKLOADS

torch.set_num_threads(1)


def _learns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank takes its own results to be there for everything that it decides."""
    arrived = ResultLease.arrived

    def learned(self: ResultLease) -> bool:
        found = arrived(self)
        if found:
            self._copied.stream.learn(self._copied)
        return found

    monkeypatch.setattr(ResultLease, "arrived", learned)


def _agrees_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been fetched is agreed on with the end alone."""
    news = agreement._AgreedPrefetch.news

    def at_the_end(self: agreement._AgreedPrefetch, handle: int) -> Sequence[agreement.StorageNews]:
        found = news(self, handle)
        return [one for one in found if one.kind != agreement.NewsKind.FETCHED]

    monkeypatch.setattr(agreement._AgreedPrefetch, "news", at_the_end)


def _one_rank_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write has ended when one rank has ended it."""
    start = agreement.StorageAgreement.__init__

    def alone(self: agreement.StorageAgreement, num_ranks: int) -> None:
        start(self, num_ranks)
        self._num_ranks = 1

    monkeypatch.setattr(agreement.StorageAgreement, "__init__", alone)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (_learns_alone, "ranks 0 and 1 have decided differently"),
        (_agrees_late, "storages of the ranks: rank 1 says ('fetched'"),
        (_one_rank_suffices, ""),
    ],
)
def test_a_fault_of_ranks_with_storage_is_reported(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], said: str
) -> None:
    plant(monkeypatch)
    outcomes = (run(Trial("ranks_storage", seed)) for seed in range(30))
    outcome = next((outcome for outcome in outcomes if not outcome.clean), None)
    assert outcome is not None and said in outcome.report, outcome


def _some_requests_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_names", len)


def _tokens_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions.Decisions, "published", lambda self, out: None)


def _nothing_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankBoard, "post_decision", lambda self, step, fields: None)


def _results_are_not_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankBoard, "post_arrived", lambda self, step: None)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (_some_requests_look_alike, "for the requests ('r"),
        (_tokens_do_not_count, "for the sampled tokens"),
        (_nothing_is_posted, "rank 0 has not posted what it has decided for step 1"),
        (_results_are_not_posted, "results are said to be there up to step 0"),
    ],
)
def test_what_the_ranks_post_about_their_steps_is_compared(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], said: str
) -> None:
    plant(monkeypatch)
    outcomes = (run(Trial("ranks", seed)) for seed in range(8))
    outcome = next((outcome for outcome in outcomes if not outcome.clean), None)
    assert outcome is not None and said in outcome.report, outcome


def test_weights_that_one_rank_cannot_read_are_replaced_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the ranks' exchange each acts on what it has read itself, and they serve two models."""
    outcomes = [run(Trial("ranks", seed)) for seed in range(6)]
    assert all(outcome.clean for outcome in outcomes), [outcome.report for outcome in outcomes]
    monkeypatch.setattr(ModelRunner, "check_weights", lambda self, weights: self._check_weights(weights))
    found = [outcome for seed in range(12) if not (outcome := run(Trial("ranks", seed))).clean]
    assert found, "some rank cannot read them"


def test_ranks_with_storage_are_clean() -> None:
    """In the first run the results of one rank arrive before those of the other, and pages are leased in between."""
    outcomes = [run(Trial("ranks_storage", seed)) for seed in range(2)]
    assert all(outcome.clean for outcome in outcomes), [outcome.report for outcome in outcomes]
    assert all(outcome.num_tokens for outcome in outcomes)


def _nothing_is_backed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HiCache, "write_backups", lambda self: self._inserted.clear())


def _uses_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = RadixCache._walk

    def uncounted(self: RadixCache, *args: object) -> list[TreeNode]:
        path = walk(self, *args)  # type: ignore[arg-type]
        for node in path[1:]:
            node.hit_count -= 1
        return path

    monkeypatch.setattr(RadixCache, "_walk", uncounted)


def _nothing_is_spilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HiRadixCache, "_spill_all", lambda *args: None)


@pytest.mark.parametrize(
    ("fault", "says"),
    [(lambda *args: False, "is looked up again, and they have not moved"), (lambda *args: True, "")],
)
def test_whether_a_match_is_current_is_compared(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., bool], says: str
) -> None:
    monkeypatch.setattr(HiRadixCache, "is_current", fault)
    outcomes = (run(Trial("queued", seed)) for seed in range(8))
    failed = next((outcome for outcome in outcomes if not outcome.clean), None)
    assert failed is not None
    assert says in failed.report, failed.report


@pytest.mark.parametrize(
    ("plant", "workload", "policy"),
    [
        (_nothing_is_spilled, "spill", "write_back"),
        (_nothing_is_backed_up, "persistent", "write_through"),
        (_uses_uncounted, "conversations", "write_through_selective"),
    ],
)
def test_a_page_that_the_write_policy_does_not_copy_is_reported(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], workload: str, policy: str
) -> None:
    plant(monkeypatch)
    make = WORKLOADS[workload].make
    seeds = [seed for seed in range(24) if make(Random(seed)).flags["hicache_write_policy"] == policy]
    reports = (run(Trial(workload, seed)).report for seed in seeds)
    assert any(f"{policy}: pages" in report and "the host" in report for report in reports)
