"""F1: a backup reads KV pages after the step that writes them, and nobody writes them again before it has read them."""

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

from fenceline.memory_order import Points


def of_a_step_in_flight(rounds: Rounds, number: int) -> bool:
    """The step that writes the page is late; its backup has been submitted already."""
    page, host, pattern = _names(number)
    rounds.late_stores = False
    done = rounds.write(page, pattern)
    rounds.store([page], [host], Points.of(done))
    rounds.settle()
    return rounds.same(rounds.on_host(host), pattern)


def of_a_page_that_is_reused(rounds: Rounds, number: int) -> bool:
    """The backup is late; its page has been given to a request whose step writes it at once."""
    page, host, pattern = _names(number)
    rounds.late_stores = True
    done = rounds.write(page, pattern, late=False)
    ticket = rounds.store([page], [host], Points.of(done))
    rounds.write(page, (pattern + 1) % NUM_PATTERNS, ticket.points, late=False)
    rounds.settle()
    return rounds.same(rounds.on_host(host), pattern)


def _names(number: int) -> tuple[int, int, int]:
    """A device page, a host page and a pattern: neither page holds this pattern from its last round."""
    return 1 + number % 8, number % SHAPE.num_host_pages, number % NUM_PATTERNS


ROUNDS = {"store_after_forward": of_a_step_in_flight, "forward_after_store": of_a_page_that_is_reused}
edges = pytest.mark.parametrize("edge", ROUNDS)


@edges
@kinds
@layouts
@io_backends
def test_a_backup_has_what_the_page_held(kind: str, layout: str, io_backend: str, edge: str) -> None:
    check_rounds(kind, ROUNDS[edge], layout=layout, io_backend=io_backend)


@edges
@asynchronous
def test_without_the_edge_a_backup_has_another_steps_values(kind: str, edge: str) -> None:
    check_without(kind, edge, ROUNDS[edge])
