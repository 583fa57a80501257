"""HiCacheController on a GPU: a thousand random transfers, steps and storage workers leave what a quiet copy leaves."""

from __future__ import annotations

import pytest
from transfer_rounds import SHAPE, SPIN_CYCLES, RandomTransfers, io_backends, layouts, open_rounds

from fenceline.mem_cache.transfer import TransferKind
from fenceline.memory_order import Points
from fenceline.memory_order.edges import PAGE_EDGES

pytestmark = pytest.mark.gpu
NUM_TURNS = 1000
SHORT_SPIN_CYCLES = 40_000  # about 20 us, so that streams drift apart without the queue growing for ever
CHECK_EVERY = 50


@layouts
@io_backends
@pytest.mark.parametrize("seed", [1, 2])
def test_random_transfers_leave_the_bytes_of_a_quiet_copy(seed: int, io_backend: str, layout: str) -> None:
    rounds = open_rounds("cuda", io_backend=io_backend, layout=layout, spin_cycles=SHORT_SPIN_CYCLES)
    transfers = RandomTransfers(rounds, seed)
    for turn in range(NUM_TURNS):
        transfers.turn()
        if turn % CHECK_EVERY == CHECK_EVERY - 1:
            transfers.check()
    assert rounds.controller.num_in_flight == 0


def test_without_edges_they_do_not() -> None:
    """The test above can fail. How soon it does depends on the machine's speed, and later operations may replace wrong
    bytes. So the pages are compared often, and several seeds are tried, with work that is more and more late."""
    wrong = [edge.name for edge in PAGE_EDGES if any(_goes_wrong(edge.name, seed) for seed in range(3, 9))]
    assert len(wrong) >= len(PAGE_EDGES) // 2, wrong


def _goes_wrong(edge: str, seed: int) -> bool:
    """Whether some page has wrong bytes in a thousand turns without ``edge``."""
    rounds = open_rounds("cuda", edge, spin_cycles=(seed - 2) * SPIN_CYCLES)
    transfers = RandomTransfers(rounds, seed)
    try:
        for turn in range(NUM_TURNS):
            transfers.turn()
            if turn % 10 == 9:
                transfers.check()
    except AssertionError:
        return True
    return False


@io_backends
def test_seconds_are_those_of_the_copies(io_backend: str) -> None:
    """Not those of the steps that a transfer has waited for, nor of the spin before them."""
    rounds = open_rounds("cuda", io_backend=io_backend)
    rounds.late_stores = rounds.late_loads = False
    for number in range(50):
        rounds.spin_cycles = 2_000_000  # a step of 1 ms
        done = rounds.write(1 + number % 8, 0)
        rounds.store([1 + number % 8], [number % SHAPE.num_host_pages], Points.of(done))
    rounds.settle()
    counts = rounds.controller.counts[TransferKind.STORE]
    assert (counts.num_transfers, counts.num_pages) == (50, 50)
    assert 0 < counts.seconds < 50 * 0.5e-3
