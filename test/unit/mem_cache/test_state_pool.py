"""StatePool: where the states of recurrent layers lie, and what a request's slot begins with."""

import pytest
import torch

from fenceline.config.kv_layout import KVRow
from fenceline.config.state_layout import GRID, StateLayout, StateSpec, gated_delta_net
from fenceline.mem_cache.state_pool import StatePool

_DELTA_NET = gated_delta_net(2, 4, 8, 16, 4, "bfloat16")
_CONV = StateSpec((KVRow("conv", (3, 2), "float16"),))
CPU = torch.device("cpu")


def _pool(num_rows: int = 4, num_snapshots: int = 3) -> StatePool:
    return StatePool(num_rows, num_snapshots, StateLayout((_DELTA_NET, _CONV, _DELTA_NET)), CPU)


def _tensors(pool: StatePool) -> list[torch.Tensor]:
    parts = [(layer.running, layer.grid, layer.ring) for layer in pool.layers]
    return [tensor for of_layer in parts for tensors in of_layer for tensor in tensors.values()]


def test_layers_have_the_tensors_that_they_declare() -> None:
    pool = _pool()
    for layer, spec in zip(pool.layers, pool.layout.layers, strict=True):
        for states in (layer.running, layer.grid):
            assert {name: tuple(t.shape) for name, t in states.items()} == {r.name: (4, *r.shape) for r in spec.carried}
        assert {name: tuple(t.shape) for name, t in layer.ring.items()} == {
            row.name: (4, GRID, *row.shape) for row in spec.kept
        }


def test_no_two_tensors_of_a_slot_share_bytes() -> None:
    pool = _pool()
    for number, tensor in enumerate(_tensors(pool)):
        tensor.fill_(number + 1)
    for number, tensor in enumerate(_tensors(pool)):
        assert bool((tensor == number + 1).all())
    assert pool.slots.shape[1] == pool.layout.slot_nbytes
    assert pool.states.shape == (4, pool.layout.snapshot_nbytes)


def test_a_request_begins_with_zeros_whoever_had_its_row() -> None:
    pool = _pool()
    pool.slots.fill_(255)
    pool.begin(torch.tensor([2]))
    for layer in pool.layers:
        for tensor in (*layer.running.values(), *layer.grid.values()):
            assert not tensor[2].any() and bool(tensor[[0, 1, 3]].ne(0).all())


@pytest.mark.parametrize("num_snapshots", [0, 3])
def test_snapshots_are_leased_without_number_0(num_snapshots: int) -> None:
    pool = _pool(num_snapshots=num_snapshots)
    leased = [pool.snapshots.alloc(1) for _ in range(num_snapshots)]
    assert [int(one[0][0]) for one in leased if one is not None] == [*range(1, num_snapshots + 1)]
    assert pool.snapshots.alloc(1) is None
