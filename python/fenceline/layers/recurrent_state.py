"""What recurrent layers read and write of their requests' states in one step.

The state of such a layer at a multiple of ``GRID`` tokens is a matrix for each head. It changes only when a block of
tokens is full and known to be kept. Of the tokens after it, the open block, the layer keeps one row each, at their
positions, as attention keeps keys and values. So a token's output and every state are functions of the request's tokens
alone: however these are cut into steps, the same sums are made in the same order. A rejected draft's rows are written
again before they are read, and nothing has to be rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fenceline.config.state_layout import GRID

LayerState = Mapping[str, torch.Tensor]
"""A layer's tensors at fixed addresses by the names of its StateSpec: ``carried`` [slots, *shape] and ``kept`` [slots,
length, *shape]. A slot's part is contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Which slots the B requests of a step read and write. Tensors are on the model's device.

    Where nothing has been absorbed the state is zero, and the slot's is not read. Padding has the sink's slot, 0, and
    starts at 0."""

    starts: torch.Tensor  # [B] int64, position of each request's first token of this step
    absorbed: torch.Tensor  # [B] int64, tokens that its state has absorbed before this step; a multiple of ``grid``
    query_starts: torch.Tensor  # [B + 1] int32, where each request's tokens are on the T axis
    query_lens_cpu: npt.NDArray[np.int64]  # [B], tokens of each request, or bounds of these
    slots: torch.Tensor  # [B] int64
    grid: int = GRID  # tokens of a block; tiles always have GRID rows
    kept: bool = True  # all tokens of the step will stay; False: any of them may be undone, so none is absorbed yet

    def absorbed_after(self) -> torch.Tensor:
        """[B] int64: ``absorbed`` when the step is over."""
        ends = self.starts
        if self.kept:
            ends = ends + (self.query_starts[1:] - self.query_starts[:-1])
        return ends // self.grid * self.grid


@dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """The states of one step: its requests' slots, and each recurrent layer's tensors by its index among these."""

    rows: StateRows
    layers: Sequence[LayerState]
