"""Mamba2 (arXiv:2405.21060), as in Nemotron-H."""

from __future__ import annotations

import torch

from fenceline.config import state_layout
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.decoder_layer import BEFORE_ATTENTION, BranchNorms, LayerSite, RecurrentMixer
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.gated_delta_net import own_channels
from fenceline.layers.kernels.base import HeadLayout
from fenceline.layers.kernels.recurrence import MambaGates
from fenceline.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from fenceline.layers.recurrent_state import LayerState, StateRows
from fenceline.layers.weight import WeightSlot, WeightSlots


class Mamba2(RecurrentMixer):
    """x += out_proj(norm((recurrence(u, B, C) + D u) * silu(z))), where u, B and C are the convolution of projections
    of norm(x), and z and the time steps are others. Each group of heads is normalised. Groups, with their heads, are
    divided over the ranks."""

    name = "mixer"

    def __init__(
        self, site: LayerSite, bias: bool = False, conv_bias: bool = True, norms: BranchNorms = BEFORE_ATTENTION
    ) -> None:
        """``bias`` is for the projections. Parameters are uninitialised."""
        config, context = site.config, site.context.inside(self.name)
        assert config.recurrent is not None, "the family reads the sizes from config.json"
        self.sizes, self.shard, self._kernels = config.recurrent, context.shard, context.kernels
        heads, dim, state_size = self.sizes.num_heads, self.sizes.value_dim, self.sizes.key_dim
        groups = self.shard.divide(self.sizes.num_key_heads, "groups of Mamba2")
        values, keys = heads * dim, self.sizes.num_key_heads * state_size
        # In the checkpoint they are one matrix, ``in_proj``.
        parts = {"gates": values, "values": values, "keys": keys, "queries": keys, "steps": heads}
        outputs = {f"in_proj_{name}": size for name, size in parts.items()}
        self.in_proj = MergedColumnParallelLinear(config.hidden_size, outputs, bias, context)
        self._full_parts = (values, keys, keys)
        own_heads, channels = heads // self.shard.size, sum(self._full_parts) // self.shard.size
        layout = HeadLayout(own_heads, own_heads, dim)
        super().__init__(site, norms, layout, sum(self.in_proj.sizes), LayerRules(), 1.0)
        self.conv_weight = torch.empty(channels, self.sizes.taps, dtype=context.dtype)
        self.conv_bias = torch.empty(channels, dtype=context.dtype) if conv_bias else None
        a_log, dt_bias, skip = (torch.empty(own_heads, dtype=torch.float32) for _ in range(3))
        self.gates = MambaGates(a_log, dt_bias, skip, groups, state_size, self.sizes.step_limits)
        self.norm_weight = torch.empty(groups, own_heads * dim // groups, dtype=context.dtype)
        self._eps = config.rms_norm_eps
        self.out_proj = RowParallelLinear("out_proj", values, config.hidden_size, bias, context)
        self.state_spec = state_layout.together(
            state_layout.convolution(channels, self.sizes.taps, str(context.dtype).removeprefix("torch.")),
            state_layout.recurrence(own_heads, groups, state_size, dim),
        )

    def mix(self, projected: torch.Tensor, state: LayerState, rows: StateRows) -> torch.Tensor:
        heads, dim, groups = self.heads.num_heads, self.heads.head_dim, self.gates.num_groups
        z, mixed, dt = projected.split((heads * dim, len(self.conv_weight), heads), 1)
        mixed = self._kernels.short_convolution(mixed, self.conv_weight, self.conv_bias, True, state, rows)
        q, k, v, decays = self._kernels.mamba_inputs(mixed, dt, self.gates)
        result = self._kernels.recurrence(q, k, v, decays, None, state, rows).view(len(z), groups, -1)
        skip = mixed[:, : heads * dim].unflatten(1, (heads, dim)), self.gates.skip
        z = z.unflatten(1, (groups, -1))
        return self._kernels.gated_norm(result, z, self.norm_weight, self._eps, skip=skip).flatten(1)

    def _add_attended(self, x: torch.Tensor, attended: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.add_product(x, self.out_proj, attended, batch)

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = self.in_proj.weight_slots(prefix) | self.out_proj.weight_slots(prefix)
        heads, rank = self.heads.num_heads, self.shard.rank
        for name, values in (("A_log", self.gates.a_log), ("dt_bias", self.gates.dt_bias), ("D", self.gates.skip)):
            slots[prefix + name] = WeightSlot(values, (self.sizes.num_heads,), 0, heads * rank)
        norm = self.norm_weight.flatten()
        slots[f"{prefix}norm.weight"] = WeightSlot(norm, (self._full_parts[0],), 0, len(norm) * rank)
        channels = sum(self._full_parts)

        def own(weight: torch.Tensor) -> torch.Tensor:
            return own_channels(weight, self._full_parts, self.shard)

        full_shape = (channels, 1, self.sizes.taps)
        slots[f"{prefix}conv1d.weight"] = WeightSlot(self.conv_weight[:, None], full_shape, convert=own)
        if self.conv_bias is not None:
            slots[f"{prefix}conv1d.bias"] = WeightSlot(self.conv_bias, (channels,), convert=own)
        return slots
