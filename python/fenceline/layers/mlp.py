"""GatedMLP: the feed-forward half of a decoder layer, from residual stream to residual stream."""

from __future__ import annotations

import torch

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from fenceline.layers.weight_slot import WeightSlots


class GatedMLP:
    """x += down(silu(gate(norm(x))) * up(norm(x))), SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, context: LayerContext, bias: bool) -> None:
        hidden_size, size = config.hidden_size, config.intermediate_size
        self.input_norm = context.norm(hidden_size, config.rms_norm_eps)
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, {"gate_proj": size, "up_proj": size}, bias, context
        )
        self.down_proj = RowParallelLinear("down_proj", size, hidden_size, bias, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream x [T, hidden_size], added to in place."""
        return self.down_proj.add_to(x, self.gate_up_proj.forward_gated(x, self.input_norm))

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots by their names in the checkpoint, but for ``input_norm``, whose name is the layer's to give."""
        return {**self.gate_up_proj.weight_slots(prefix), **self.down_proj.weight_slots(prefix)}
