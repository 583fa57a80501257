"""The storage tier from the scheduler's side: write-behind, prefetch, policies, bounds. Real threads on the CPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from storage_cases import page_files
from storage_faults import FaultyBackend
from storage_tier import (
    KEYS,
    NUM_PAGES,
    PAGE,
    PATIENCE_S,
    TWO_PAGES,
    DictBackend,
    Gate,
    Make,
    file_backend,
    tiers_of_one_test,
)

from fenceline.config.server_args import MemLayout, PrefetchPolicy
from fenceline.config.state_layout import convolution
from fenceline.mem_cache.host.host_states import HostStates
from fenceline.mem_cache.state_pool import StatePool
from fenceline.mem_cache.storage.controller import Ack, Done, Fetched, Found, StorageLimits, TimedOut, Written, apply
from fenceline.mem_cache.storage.worker import Outcome, Prefetch, StoredStates
from fenceline.memory_order import Points, open_device

make = tiers_of_one_test


# --- pages come back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("written_by", ["page_first", "layer_first"])
@pytest.mark.parametrize("read_by", ["page_first", "layer_first"])
def test_pages_come_back_in_another_server(
    written_by: MemLayout, read_by: MemLayout, make: Make, tmp_path: Path
) -> None:
    writer = make(file_backend(tmp_path), layout=written_by, limits=TWO_PAGES)
    pages = writer.write(KEYS[:5], handle=7)
    writer.settle()
    assert writer.acks == [Written(7, 5)]
    writer.retire(pages)

    reader = make(file_backend(tmp_path), layout=read_by, limits=TWO_PAGES)
    op = reader.start_fetch([*KEYS[:5], *KEYS[100:102]])
    assert reader.finish(op) == 5
    fetched = [Fetched(op, 0, 2), Fetched(op, 2, 2), Fetched(op, 4, 1)]
    assert reader.acks == [Found(op, 5), *fetched, Done(op, Outcome.COMPLETE)]
    assert op.outcome is Outcome.COMPLETE and op.over
    assert reader.pool.pages.num_leased == 0

    stats = reader.controller.stats()
    assert (stats.found, stats.fetched, stats.prefetches) == (5, 5, {Outcome.COMPLETE: 1})
    assert stats.missed == 2
    assert stats.backend.hits == 5 and stats.read_seconds > 0
    assert writer.controller.stats().written == 5 and writer.controller.stats().write_seconds > 0


def test_only_the_leading_pages_count(make: Make, tmp_path: Path) -> None:
    tier = make(file_backend(tmp_path))
    tier.store(KEYS[:3])
    tier.store(KEYS[4:6])
    assert tier.prefetch(KEYS[:6]) == 3
    assert tier.prefetch(KEYS[3:6]) == 0
    assert tier.controller.stats().prefetches == {Outcome.COMPLETE: 1, Outcome.ABSENT: 1}
    assert tier.controller.num_outstanding == 0 and tier.drain() == []


def test_fewer_host_pages_than_found(make: Make, tmp_path: Path) -> None:
    tier = make(file_backend(tmp_path))
    tier.store(KEYS[:5])
    op = tier.start_fetch(KEYS[:5], num_pages=3)
    assert tier.finish(op) == 3 and op.outcome is Outcome.COMPLETE


def test_a_prefetch_of_no_page_is_over_at_once(make: Make, tmp_path: Path) -> None:
    tier = make(file_backend(tmp_path))
    op = tier.query([])
    tier.settle()
    assert tier.acks == [Done(op, Outcome.ABSENT)] and op.outcome is Outcome.ABSENT


def test_what_is_known_of_a_prefetch_is_what_acks_have_said(make: Make, tmp_path: Path) -> None:
    """Whoever is given the same acks, another rank or a replay of a recording, knows the same."""
    tier = make(file_backend(tmp_path), "wait_complete", limits=TWO_PAGES)
    tier.store(KEYS[:4])
    op = tier.start_fetch(KEYS[:4])
    acks: list[Ack] = []
    deadline = time.monotonic() + PATIENCE_S
    while not any(isinstance(ack, Done) for ack in acks):
        assert time.monotonic() < deadline, f"nothing came: {acks}"
        acks += tier.controller.drain()
    assert (op.num_fetched, op.over, tier.controller.may_schedule(op)) == (0, False, False)
    known = []
    for ack in acks:
        apply(ack)
        known.append((op.num_fetched, op.over, tier.controller.may_schedule(op)))
    assert known == [(2, False, False), (4, False, False), (4, True, True)]


# --- policies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_who_may_be_scheduled(policy: PrefetchPolicy, make: Make, tmp_path: Path) -> None:
    gate = Gate()
    inner = file_backend(tmp_path)
    make(inner).store(KEYS[:4])
    backend = FaultyBackend(inner)
    tier = make(backend, policy, 2.0 if policy == "timeout" else None, limits=TWO_PAGES)
    may = tier.controller.may_schedule

    op = tier.start_fetch(KEYS[:4])  # the gate comes after the query
    assert may(op) is (policy == "best_effort") or op.over
    tier.finish(op)
    assert may(op)

    backend.pause = gate
    op = tier.query(KEYS[:4])
    gate.wait_for_somebody()
    tier.clock.now += 1.5
    tier.drain()
    assert may(op) is (policy == "best_effort")
    tier.clock.now += 1.0
    tier.drain()
    assert may(op) is (policy != "wait_complete")
    assert tier.acks.count(TimedOut(op)) == (policy == "timeout")
    tier.clock.now += 1.0
    tier.drain()
    assert tier.acks.count(TimedOut(op)) == (policy == "timeout"), "it is said once"
    tier.controller.cancel(op)
    gate.open()
    assert tier.finish(op) == 0 and op.outcome is Outcome.CANCELLED
    assert tier.controller.stats().timeouts == (policy == "timeout")


# --- cancelling --------------------------------------------------------------------------------------


class SlowReads(FaultyBackend):
    """``get`` waits at a gate, from the second call on."""

    def __init__(self, inner: object, gate: Gate) -> None:
        super().__init__(inner)  # type: ignore[arg-type]
        self.gate = gate
        self.num_gets = 0

    def get(self, keys: object, pages: object) -> list[bool]:
        self.num_gets += 1
        if self.num_gets > 1:
            self.gate()
        return super().get(keys, pages)  # type: ignore[arg-type]


def test_what_is_there_is_taken_and_the_rest_cancelled(make: Make, tmp_path: Path) -> None:
    gate = Gate()
    inner = file_backend(tmp_path)
    make(inner).store(KEYS[:8])
    backend = SlowReads(inner, gate)
    tier = make(backend, limits=TWO_PAGES)
    op = tier.start_fetch(KEYS[:8])
    gate.wait_for_somebody()
    tier.until(lambda: op.num_fetched == 2)
    tier.assert_right(op.host_pages[:2], KEYS[:2])  # while the worker is busy with the next two
    tier.controller.cancel(op)
    tier.controller.cancel(op)
    tier.drain()
    assert not op.over, "a worker still writes its pages"
    gate.open()
    assert tier.finish(op) == 2 and op.outcome is Outcome.CANCELLED
    assert tier.acks[-1] == Done(op, Outcome.CANCELLED)
    assert [ack for ack in tier.acks if isinstance(ack, Fetched)] == [Fetched(op, 0, 2)]
    assert backend.num_gets == 2, "batches after the cancellation are not read"
    stats = tier.controller.stats()
    assert (stats.found, stats.fetched, stats.fetched_in_vain) == (8, 2, 2)


def test_cancelled_in_every_state(make: Make, tmp_path: Path) -> None:
    tier = make(file_backend(tmp_path))
    tier.store(KEYS[:2])
    asked = tier.query(KEYS[:2])
    tier.controller.cancel(asked)
    assert not asked.over or tier.controller.num_outstanding
    assert tier.finish(asked) == 0
    found = tier.query(KEYS[:2])
    tier.until(lambda: found.num_found > 0)
    tier.controller.cancel(found)
    assert tier.finish(found) == 0
    tier.settle()
    over = tier.query(KEYS[5:6])
    tier.finish(over)
    tier.controller.cancel(over)
    assert over.outcome is Outcome.ABSENT and tier.drain() == []
    assert tier.controller.stats().prefetches == {Outcome.CANCELLED: 2, Outcome.ABSENT: 1}


# --- bounds ------------------------------------------------------------------------------------------


def test_a_slow_disk_holds_no_more_than_its_share_of_host_memory(make: Make, tmp_path: Path) -> None:
    gate = Gate()
    limits = StorageLimits(batch_bytes=2 * PAGE, max_write_pages=5)
    tier = make(FaultyBackend(file_backend(tmp_path), pause=gate), limits=limits)
    tier.write(KEYS[:3], handle=1)
    tier.write(KEYS[3:7], handle=2)  # two of the four fit
    tier.write(KEYS[7:9], handle=3)
    assert tier.drain() == [Written(3, 0)]
    assert tier.controller.stats().num_queued == 5 and tier.controller.stats().dropped == 4
    gate.open()
    tier.settle()
    assert tier.acks == [Written(3, 0), Written(1, 3), Written(2, 2)]
    tier.write(KEYS[10:15], handle=4)
    tier.settle()
    assert tier.acks[-1] == Written(4, 5), "there is room again"
    stats = tier.controller.stats()
    assert (stats.written, stats.unwritten, stats.dropped, stats.num_queued) == (10, 0, 4, 0)
    assert make(file_backend(tmp_path)).prefetch(KEYS[:7]) == 5, "the leading pages were kept"


def test_prefetches_are_bounded_in_pages(make: Make, tmp_path: Path) -> None:
    tier = make(file_backend(tmp_path), limits=StorageLimits(max_fetch_pages=5))
    tier.store(KEYS[:4])
    first, second, third = (tier.query(KEYS[:4], handle) for handle in range(3))
    tier.until(lambda: third.over)
    assert (first.num_found, second.num_found) == (4, 1)
    assert third.outcome is Outcome.DROPPED
    for op in (first, second):
        tier.controller.fetch(op, tier.lease(1), Points.none())
        assert tier.finish(op) == 1
    again = tier.query(KEYS[:4])
    tier.until(lambda: again.num_found > 0)
    assert again.num_found == 4, "all is given back"
    tier.controller.cancel(again)
    tier.settle()


def test_a_prefix_with_states_is_cut_where_one_is(make: Make, tmp_path: Path) -> None:
    """There is room for five pages, and a state after two, four and eight of them."""
    pool = StatePool(1, 1, [convolution(4, 3, "float32")], torch.device("cpu"))
    states = HostStates(open_device("cpu"), pool, 2)
    stored, limits = StoredStates(states, DictBackend(states.nbytes)), StorageLimits(max_fetch_pages=5)
    tier = make(file_backend(tmp_path), limits=limits, states=stored)
    tier.store(KEYS[:8])
    for end in (2, 4, 8):
        states.buffer[0] = end
        stored.set(KEYS[end - 1], 0)
    for held, num_pages in ((0, 4), (2, 2), (4, 0)):
        holders = [Prefetch(9, KEYS[:held], ends=[held])] if held else []
        for op in holders:
            tier.controller.query(op)
            tier.until(lambda op=op: op.num_found > 0)  # type: ignore[misc]
        op = Prefetch(1, KEYS[:8], ends=[2, 4, 6, 8])
        tier.controller.query(op)
        tier.until(lambda op=op: op.num_found > 0 or op.over)  # type: ignore[misc]
        assert op.num_found == num_pages
        if num_pages:
            tier.controller.fetch(op, tier.lease(num_pages), Points.none(), 1)
            assert tier.finish(op) == num_pages and bool((states.buffer[1] == num_pages).all())
        for op in holders:
            tier.controller.cancel(op)
        tier.settle()
    stats = tier.controller.stats()
    assert stats.missed == 0 and stats.prefetches[Outcome.DROPPED] == 1, "what there was no room for is not missing"


def test_prefetches_are_bounded_in_number(make: Make, tmp_path: Path) -> None:
    gate = Gate()
    tier = make(FaultyBackend(file_backend(tmp_path), pause=gate), limits=StorageLimits(max_prefetches=2))
    ops = [tier.query(KEYS[:4], handle) for handle in range(3)]
    tier.drain()
    assert [op.over for op in ops] == [False, False, True] and ops[2].outcome is Outcome.DROPPED
    gate.open()
    tier.settle()
    assert tier.controller.stats().prefetches == {Outcome.DROPPED: 1, Outcome.ABSENT: 2}
    assert len([ack for ack in tier.acks if isinstance(ack, Done)]) == 3


def test_default_bounds_are_shares_of_the_pool(make: Make, tmp_path: Path) -> None:
    gate = Gate()
    tier = make(FaultyBackend(file_backend(tmp_path), pause=gate))
    tier.write(KEYS[:NUM_PAGES])
    assert tier.controller.stats().num_queued == NUM_PAGES // 4
    gate.open()
    tier.settle()


# --- clearing and closing ----------------------------------------------------------------------------


def test_clear_empties_storage_and_what_is_queued_for_it(make: Make, tmp_path: Path) -> None:
    tier = make(file_backend(tmp_path))
    tier.store(KEYS[:3])
    tier.write(KEYS[3:8])
    assert tier.controller.clear() == 8
    assert page_files(tmp_path) == []
    tier.settle()
    assert tier.acks[-1] == Written(0, 5), "acks that came meanwhile are not lost"
    assert tier.prefetch(KEYS[:8]) == 0
    tier.store(KEYS[:2])
    assert tier.prefetch(KEYS[:8]) == 2, "it goes on"


def test_closing_leaves_what_is_queued(make: Make, tmp_path: Path) -> None:
    gate = Gate()
    tier = make(FaultyBackend(file_backend(tmp_path), pause=gate), num_workers=3)
    pages = tier.lease(4)
    tier.fill(pages, KEYS[:4])
    for i in range(4):
        tier.controller.write(KEYS[i : i + 1], pages[i : i + 1], Points.none(), i)
    op = Prefetch(1, KEYS[:2])
    tier.controller.query(op)
    gate.wait_for_somebody()
    gate.open()
    tier.controller.close()
    tier.controller.close()
    assert len(page_files(tmp_path)) < 4
