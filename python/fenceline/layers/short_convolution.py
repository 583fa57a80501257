"""Gated short convolutions (LFM2, arXiv:2511.23404), whose state is the last inputs."""

from __future__ import annotations

import torch

from fenceline.config import state_layout
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.decoder_layer import BEFORE_ATTENTION, BranchNorms, LayerSite, RecurrentMixer
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import HeadLayout
from fenceline.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from fenceline.layers.recurrent_state import LayerState, StateRows
from fenceline.layers.weight import WeightSlot, WeightSlots


class ShortConvolution(RecurrentMixer):
    """x += out_proj(c * convolution(b * u)), where b, c and u are projections of norm(x). Channels are divided over the
    ranks."""

    name = "conv"

    def __init__(self, site: LayerSite, bias: bool = False, norms: BranchNorms = BEFORE_ATTENTION) -> None:
        """``bias`` is for the projections and the convolution. Parameters are uninitialised."""
        config, context = site.config, site.context.inside(self.name)
        assert config.recurrent is not None, "the family reads the sizes from config.json"
        self.shard, self._kernels, size = context.shard, context.kernels, config.hidden_size
        # In the checkpoint they are one matrix, ``in_proj``.
        names = ("in_proj_gate", "in_proj_output", "in_proj_input")
        self.in_proj = MergedColumnParallelLinear(size, dict.fromkeys(names, size), bias, context)
        channels, self._size = size // self.shard.size, size
        super().__init__(site, norms, HeadLayout(1, 1, channels), 3 * channels, LayerRules(), 1.0)
        self.weight = torch.empty(channels, config.recurrent.taps, dtype=context.dtype)
        self.bias = torch.empty(channels, dtype=context.dtype) if bias else None
        self.out_proj = RowParallelLinear("out_proj", size, size, bias, context)
        dtype = str(context.dtype).removeprefix("torch.")
        self.state_spec = state_layout.convolution(channels, config.recurrent.taps, dtype)

    def mix(self, projected: torch.Tensor, state: LayerState, rows: StateRows) -> torch.Tensor:
        gate, output_gate, inputs = projected.chunk(3, 1)
        return self._kernels.short_convolution(gate * inputs, self.weight, self.bias, False, state, rows) * output_gate

    def _add_attended(self, x: torch.Tensor, attended: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.add_product(x, self.out_proj, attended, batch)

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = {**self.in_proj.weight_slots(prefix), **self.out_proj.weight_slots(prefix)}
        channels, taps = self.weight.shape
        first = channels * self.shard.rank
        slots[f"{prefix}conv.weight"] = WeightSlot(self.weight[:, None], (self._size, 1, taps), 0, first)
        if self.bias is not None:
            slots[f"{prefix}conv.bias"] = WeightSlot(self.bias, (self._size,), 0, first)
        return slots
