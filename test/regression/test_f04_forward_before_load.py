"""F4: a step that reads pages which are being loaded waits for them, layer by layer; every other step runs undisturbed,
its graph included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from guarded_runs import SPIN_CYCLES
from late_loads import differences, late_loads
from model_tiers import PAGE, Tiers, hicache_runner, prompt
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

from fenceline.memory_order import Points, open_device


def read_while_loading(rounds: Rounds, number: int) -> bool:
    """Each layer is late; the step that attends over the page has been submitted already."""
    page, host, pattern = _names(rounds, number)
    ticket = rounds.load([page], [host], Points.none())
    rounds.read(page, (ticket,), late=False)
    rounds.settle()
    return rounds.same(rounds.read_out, pattern)


def write_after_an_abandoned_load(rounds: Rounds, number: int) -> bool:
    """The request is aborted while its prefix is being loaded; the page's next owner writes it."""
    page, host, pattern = _names(rounds, number)
    ticket = rounds.load([page], [host], Points.none())
    rounds.write(page, (pattern + 1) % NUM_PATTERNS, ticket.points, late=False)
    rounds.settle()
    return rounds.same(rounds.on_device(page), (pattern + 1) % NUM_PATTERNS)


def _names(rounds: Rounds, number: int) -> tuple[int, int, int]:
    """A device page, a host page, and the pattern that is now on the host and not on the device."""
    page, host, pattern = 1 + number % 8, number % SHAPE.num_host_pages, number % NUM_PATTERNS
    rounds.fill_host(host, pattern)
    return page, host, pattern


ROUNDS = [read_while_loading, write_after_an_abandoned_load]
rounds_of = pytest.mark.parametrize("play", ROUNDS, ids=lambda play: play.__name__)


@rounds_of
@kinds
@layouts
@io_backends
def test_pages_are_there_when_they_are_read(
    kind: str, layout: str, io_backend: str, play: Callable[[Rounds, int], bool]
) -> None:
    check_rounds(kind, play, layout=layout, io_backend=io_backend)


@rounds_of
@asynchronous
def test_without_the_edge_they_are_not(kind: str, play: Callable[[Rounds, int], bool]) -> None:
    check_without(kind, "forward_after_load", play)


# --- under the model runner --------------------------------------------------------------------------


@pytest.mark.gpu
@io_backends
def test_answers_do_not_depend_on_when_pages_arrive(io_backend: str) -> None:
    assert differences("", 100, SPIN_CYCLES // 10, io_backend) == []


@pytest.mark.gpu
def test_without_the_edge_answers_do() -> None:
    assert differences("forward_after_load", 5, SPIN_CYCLES)


@pytest.mark.gpu
def test_a_decode_graph_replays_beside_a_load() -> None:
    """The load takes a tenth of a second; steps that do not read its pages neither wait for it nor fall back."""
    tiers = Tiers(hicache_runner(open_device("cuda")))
    tokens = prompt(1, 2 * PAGE + 1)
    tiers.extend(1, tokens, [1, 2, 3])
    tiers.runner.launch(tiers.decode_batch(1, len(tokens) + 1, 1)).wait()
    late_loads(tiers, 5 * SPIN_CYCLES)
    ticket = tiers.load([11, 12], [1, 2], Points.none())
    for step in range(2, 6):
        tiers.runner.launch(tiers.decode_batch(1, len(tokens) + step, 1)).wait()
    assert tiers.hicache.drain_acks() == [], "the steps were done before the load"
    stats = tiers.runner.graph_stats
    assert stats is not None and stats.replays == stats.eligible_steps == 5
    assert stats.fallbacks == {} and stats.repairs == {}
    tiers.runner.device.synchronize()
    assert tiers.drain() == [ticket]
    assert np.isfinite(tiers.hicache.counts[ticket.kind].seconds)
