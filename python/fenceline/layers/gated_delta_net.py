"""Gated delta nets (arXiv:2412.06464), as in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from dataclasses import replace

import torch

from fenceline.config import state_layout
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.context import Shard
from fenceline.layers.decoder_layer import BEFORE_ATTENTION, BranchNorms, LayerSite, RecurrentMixer
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import HeadLayout
from fenceline.layers.kernels.recurrence import DeltaGates
from fenceline.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from fenceline.layers.recurrent_state import LayerState, StateRows
from fenceline.layers.weight import WeightSlot, WeightSlots


class GatedDeltaNet(RecurrentMixer):
    """x += out_proj(norm(recurrence(convolution(q, k, v))) * silu(z)), with projections q, k, v and z of norm(x), and a
    and b, which make decays and how much of a value is written. Heads are divided over the ranks."""

    name = "linear_attn"

    def __init__(self, site: LayerSite, interleaved: bool = False, norms: BranchNorms = BEFORE_ATTENTION) -> None:
        """``interleaved``: the checkpoint has one matrix for q, k, v and z and one for b and a, whose rows are those of
        each key head in turn. Parameters are uninitialised."""
        config, context = site.config, site.context.inside(self.name)
        assert config.recurrent is not None, "the family reads the sizes from config.json"
        self.sizes, self.shard, self._kernels = config.recurrent, context.shard, context.kernels
        heads = self.shard.divide(self.sizes.num_heads, "value heads of recurrent layers")
        key_heads = self.shard.divide(self.sizes.num_key_heads, "key heads of recurrent layers")
        keys, values = self.sizes.num_key_heads * self.sizes.key_dim, self.sizes.num_heads * self.sizes.value_dim
        self._full_parts = keys, keys, values
        self._parts = tuple(size // self.shard.size for size in self._full_parts)
        if interleaved:
            matrices, gates = {"in_proj_qkvz": 2 * (keys + values)}, {"in_proj_ba": 2 * self.sizes.num_heads}
        else:
            matrices = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values, "in_proj_z": values}
            gates = dict.fromkeys(("in_proj_b", "in_proj_a"), self.sizes.num_heads)
        # Quantised checkpoints may leave the gates plain.
        groups = [matrices | gates] if context.format is None else [matrices, gates]
        made = [MergedColumnParallelLinear(config.hidden_size, group, False, context) for group in groups]
        self.in_proj, self.gates_proj = made[0], made[1] if len(made) > 1 else None
        width = sum(size for linear in made for size in linear.sizes)
        layout = HeadLayout(heads, heads, self.sizes.value_dim)
        super().__init__(site, norms, layout, width, LayerRules(), 1.0)
        self.conv_weight = torch.empty(sum(self._parts), self.sizes.taps, dtype=context.dtype)
        self.gates = DeltaGates(
            torch.empty(heads, dtype=torch.float32), torch.empty(heads, dtype=torch.float32),
            key_heads, self.sizes.key_dim, interleaved,
        )  # fmt: skip
        self.norm = replace(context, norm_offset=0.0).norm(self.sizes.value_dim, config.rms_norm_eps)
        self.out_proj = RowParallelLinear("out_proj", values, config.hidden_size, False, context)
        dtype = str(context.dtype).removeprefix("torch.")
        self.state_spec = state_layout.together(
            state_layout.convolution(sum(self._parts), self.sizes.taps, dtype, key_heads if interleaved else 1),
            state_layout.recurrence(heads, key_heads, self.sizes.key_dim, self.sizes.value_dim),
        )

    def mix(self, projected: torch.Tensor, state: LayerState, rows: StateRows) -> torch.Tensor:
        mixed, z, a, b = self._split(projected)
        mixed = self._kernels.short_convolution(mixed, self.conv_weight, None, True, state, rows)
        q, k, v, decays, beta = self._kernels.delta_inputs(mixed, a, b, self.gates)
        result = self._kernels.recurrence(q, k, v, decays, beta, state, rows)
        return self._kernels.gated_norm(result, z, self.norm.weight, self.norm.eps).flatten(1)

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v [T, features]; z [T, heads, value_dim]; a and b [T, heads]. If they are interleaved, all have an
        axis of key heads before the last axes."""
        heads, key_heads = self.heads.num_heads, self.gates.num_key_heads
        mixed, values = sum(self._parts), self._parts[2]
        if not self.gates.interleaved:
            qkv, z, b, a = projected.split((mixed, values, heads, heads), 1)
            return qkv, z.unflatten(1, (heads, -1)), a, b
        by_head, gates = projected.split((mixed + values, 2 * heads), 1)
        qkv, z = by_head.unflatten(1, (key_heads, -1)).tensor_split((mixed // key_heads,), 2)
        b, a = gates.unflatten(1, (key_heads, 2, -1)).unbind(2)
        return qkv, z.unflatten(2, (heads // key_heads, -1)), a, b

    def _add_attended(self, x: torch.Tensor, attended: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.add_product(x, self.out_proj, attended, batch)

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = {**self.out_proj.weight_slots(prefix), **self.norm.weight_slots(f"{prefix}norm")}
        for linear in (self.in_proj, self.gates_proj):
            slots |= {} if linear is None else linear.weight_slots(prefix)
        first = self.heads.num_heads * self.shard.rank
        for name, values in (("A_log", self.gates.a_log), ("dt_bias", self.gates.dt_bias)):
            slots[prefix + name] = WeightSlot(values, (self.sizes.num_heads,), 0, first)
        full_shape = (sum(self._full_parts), 1, self.sizes.taps)

        def own(weight: torch.Tensor) -> torch.Tensor:
            own = own_channels(weight[:, 0], self._full_parts, self.shard)
            if not self.gates.interleaved:
                return own
            by_head = [part.unflatten(0, (self.gates.num_key_heads, -1)) for part in own.split(self._parts)]
            return torch.cat(by_head, 1).flatten(0, 1)

        slots[f"{prefix}conv1d.weight"] = WeightSlot(self.conv_weight, full_shape, convert=own)
        return slots


def own_channels(weight: torch.Tensor, parts: tuple[int, ...], shard: Shard) -> torch.Tensor:
    """The rows of ``weight`` that a rank holds, if each of the ``parts`` that lie one after the other is divided."""
    return torch.cat([part.chunk(shard.size)[shard.rank] for part in weight.split(parts)])
