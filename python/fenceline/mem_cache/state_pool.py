"""StatePool: the states of recurrent layers, one slot for each request row, and snapshots of states at points of the
grid from which other requests begin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fenceline.config.kv_layout import KVRow
from fenceline.config.state_layout import GRID, StateLayout
from fenceline.mem_cache.kv_pool import zeros
from fenceline.memory_order import LeasePool


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """The states of one recurrent layer, by the names of its ``StateSpec``: views whose rows are not contiguous to one
    another. ``running`` and ``grid`` [num_rows, *shape]: the state after the last token, and at the last point of the
    grid. ``ring`` [num_rows, GRID, *shape]: what is kept of the tokens after that point, at position % GRID."""

    running: dict[str, torch.Tensor]
    grid: dict[str, torch.Tensor]
    ring: dict[str, torch.Tensor]


class StatePool:
    """A slot for each of ``num_rows`` request rows, which has the number of the row, and ``num_snapshots`` snapshots.

    A row's slot belongs to the request that has the row, so that it is leased and retired with it. Row 0 is the sink,
    which padding reads and writes. Snapshots are leased from ``snapshots`` by the tree; number 0 is nobody's and
    stands for "none". Only FORWARD accesses either, in program order, and in place.
    """

    def __init__(self, num_rows: int, num_snapshots: int, layout: StateLayout, device: torch.device) -> None:
        self.layout = layout
        self.slots = zeros((num_rows, layout.slot_nbytes), torch.uint8, device)
        self.states = zeros((num_snapshots + 1, layout.snapshot_nbytes), torch.uint8, device)
        self.snapshots = LeasePool("state snapshots", num_snapshots + 1, reserved=1)
        size = layout.snapshot_nbytes
        self._grid, self._running = self.slots[:, :size], self.slots[:, size : 2 * size]
        ring = self.slots[:, 2 * size :]
        self.layers: list[LayerStates] = []
        for spec, places in zip(layout.layers, layout.offsets(), strict=True):
            states = [
                {row.name: _view(part, row, places[row.name], row.shape) for row in spec.carried}
                for part in (self._running, self._grid)
            ]
            kept = {row.name: _view(ring, row, places[row.name], (GRID, *row.shape)) for row in spec.kept}
            self.layers.append(LayerStates(*states, kept))

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes + self.states.nbytes

    def begin(self, rows: torch.Tensor) -> None:
        """The slots of ``rows`` [N] int64 are those of requests without a token."""
        self._grid.index_fill_(0, rows, 0)
        self._running.index_fill_(0, rows, 0)


def _view(part: torch.Tensor, row: KVRow, place: tuple[int, int], shape: Sequence[int]) -> torch.Tensor:
    """The bytes ``place`` (first, number) of ``part`` [N, nbytes] as a tensor [N, *shape] of the row's dtype."""
    first, nbytes = place
    typed = part[:, first : first + nbytes].view(getattr(torch, row.dtype))
    assert typed.shape[1] == math.prod(shape)
    return typed.unflatten(1, tuple(shape))
