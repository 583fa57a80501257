"""F15: host pages are leased like device pages: while a transfer or a storage worker uses one, nobody else does."""

from __future__ import annotations

import pytest
from transfer_rounds import (
    NUM_PATTERNS,
    SHAPE,
    Rounds,
    asynchronous,
    check_rounds,
    check_without,
    io_backends,
    kinds,
    layouts,
)

from fenceline.memory_order import LeasePool, Points


def backup_into_an_evicted_page(rounds: Rounds, number: int) -> bool:
    """A host page is evicted while a late load reads it; a backup takes it at once."""
    rounds.late_loads, rounds.late_stores = True, False
    first, second = number % NUM_PATTERNS, (number + 1) % NUM_PATTERNS
    pages = LeasePool("host KV pages", 1, reserved=0)
    leased, after = pages.alloc(1) or pytest.fail("the page is free")
    rounds.fill_host(0, first)
    done = rounds.write(2, second, late=False)
    rounds.device.synchronize()
    pages.retire(leased, after=rounds.load([1], [0], after).points)
    leased, after = pages.alloc(1) or pytest.fail("the page is free")
    rounds.store([2], [0], after.join(Points.of(done)))
    rounds.settle()
    return rounds.same(rounds.on_device(1), first) and rounds.same(rounds.on_host(0), second)


def load_of_a_page_that_is_being_written(rounds: Rounds, number: int) -> bool:
    """A prefix is matched on the host while its late backup runs."""
    rounds.late_loads, rounds.late_stores = False, True
    pattern, host = number % NUM_PATTERNS, number % SHAPE.num_host_pages
    rounds.fill_host(host, (pattern + 1) % NUM_PATTERNS)
    done = rounds.write(1, pattern, late=False)
    stored = rounds.store([1], [host], Points.of(done))
    rounds.load([2], [host], stored.points)
    rounds.settle()
    return rounds.same(rounds.on_device(2), pattern)


def storage_fills_an_evicted_page(rounds: Rounds, number: int) -> bool:
    """A worker writes what it has read from storage to a page that a late load still reads."""
    rounds.late_loads = True
    first, second = number % NUM_PATTERNS, (number + 1) % NUM_PATTERNS
    rounds.fill_host(0, first)
    loaded = rounds.load([1], [0], Points.none())
    rounds.worker_writes(0, second, loaded.points)
    rounds.settle()
    return rounds.same(rounds.on_device(1), first) and rounds.same(rounds.on_host(0), second)


def storage_takes_a_page_that_is_being_written(rounds: Rounds, number: int) -> bool:
    """A worker writes a page to storage whose late backup runs."""
    rounds.late_stores = True
    pattern, host = number % NUM_PATTERNS, number % SHAPE.num_host_pages
    rounds.fill_host(host, (pattern + 1) % NUM_PATTERNS)
    done = rounds.write(1, pattern, late=False)
    stored = rounds.store([1], [host], Points.of(done))
    taken = rounds.worker_reads(host, stored.points)
    rounds.settle()
    return rounds.same(taken, pattern)


ROUNDS = {
    backup_into_an_evicted_page: "store_after_load",
    load_of_a_page_that_is_being_written: "load_after_store",
    storage_fills_an_evicted_page: "host_page_reuse",
    storage_takes_a_page_that_is_being_written: "host_page_reuse",
}
rounds_of = pytest.mark.parametrize("play", ROUNDS, ids=lambda play: play.__name__)


@rounds_of
@kinds
@layouts
@io_backends
def test_host_pages_have_one_user_at_a_time(kind: str, layout: str, io_backend: str, play) -> None:  # type: ignore[no-untyped-def]
    check_rounds(kind, play, layout=layout, io_backend=io_backend)


@rounds_of
@asynchronous
def test_without_the_edge_two_meet(kind: str, play) -> None:  # type: ignore[no-untyped-def]
    check_without(kind, ROUNDS[play], play)
