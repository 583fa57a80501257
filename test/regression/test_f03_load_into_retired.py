"""F3: a page is retired after its last step, which may still read it: a load into it waits for that step alone."""

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

from fenceline.memory_order import Points, page_leases


def into_a_retired_page(rounds: Rounds, number: int) -> bool:
    """One page: a step reads it, late; its request leaves at once, and a prefix is loaded into it."""
    pages = page_leases(rounds.device, 2)
    host, old, new = number % SHAPE.num_host_pages, number % NUM_PATTERNS, (number + 1) % NUM_PATTERNS
    rounds.fill_host(host, new)
    rounds.late_loads = False
    leased, after = pages.alloc(1) or pytest.fail("the page is free")
    page = int(leased[0])
    written = rounds.write(page, old, after, late=False)
    read = rounds.read(page, after=Points.of(written))
    pages.retire(leased, after=Points.of(read))
    leased, after = pages.alloc(1) or pytest.fail("the page is free")
    rounds.load([page], [host], after)
    rounds.settle()
    return rounds.same(rounds.read_out, old) and rounds.same(rounds.on_device(page), new)


@kinds
@layouts
@io_backends
def test_a_step_in_flight_reads_its_own_page(kind: str, layout: str, io_backend: str) -> None:
    check_rounds(kind, into_a_retired_page, layout=layout, io_backend=io_backend)


@asynchronous
def test_without_the_edge_it_reads_what_is_loaded_for_others(kind: str) -> None:
    check_without(kind, "load_after_forward", into_a_retired_page)


@pytest.mark.gpu
def test_pages_that_lose_their_points_are_as_bad() -> None:
    check_without("cuda", "retired_after", into_a_retired_page)
