"""Kimi delta attention (arXiv:2510.26692): a gated delta net in which each feature of a key has its own decay."""

from __future__ import annotations

from dataclasses import replace

import torch

from fenceline.config import state_layout
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.decoder_layer import BEFORE_ATTENTION, BranchNorms, LayerSite, RecurrentMixer
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import HeadLayout
from fenceline.layers.kernels.recurrence import DeltaGates
from fenceline.layers.linear import ColumnParallelLinear, ColumnPart, MergedColumnParallelLinear, RowParallelLinear
from fenceline.layers.recurrent_state import LayerState, StateRows
from fenceline.layers.weight import WeightSlot, WeightSlots


class KimiDeltaAttention(RecurrentMixer):
    """x += o_proj(norm(recurrence(convolution(q, k, v))) * sigmoid(g)), with projections of norm(x). Decays and the
    gate g are products of a few features of norm(x), which each rank computes whole; heads are divided."""

    def __init__(self, site: LayerSite, norms: BranchNorms = BEFORE_ATTENTION) -> None:
        """Parameters are uninitialised."""
        config, context = site.config, site.context.inside(self.name)
        assert config.recurrent is not None, "the family reads the sizes from config.json"
        self.sizes, self.shard, self._kernels = config.recurrent, context.shard, context.kernels
        dim, rank = self.sizes.key_dim, self.shard.rank
        heads = self.shard.divide(self.sizes.num_heads, "heads of recurrent layers")
        full, own = self.sizes.num_heads * dim, heads * dim
        matrices = [ColumnPart(name, full, own, rank) for name in ("q_proj", "k_proj", "v_proj")]
        gates = [ColumnPart(name, dim, dim, 0) for name in ("f_a_proj", "g_a_proj")]
        gates.append(ColumnPart("b_proj", self.sizes.num_heads, heads, rank))
        # Quantised checkpoints may leave the gates plain.
        groups = [matrices + gates] if context.format is None else [matrices, gates]
        made = [ColumnParallelLinear(config.hidden_size, group, False, context) for group in groups]
        self.in_proj, self.gates_proj = made[0], made[1] if len(made) > 1 else None
        width = sum(part.size for group in groups for part in group)
        super().__init__(site, norms, HeadLayout(heads, heads, dim), width, LayerRules(), 1.0)
        self.f_b_proj, self.g_b_proj = (
            MergedColumnParallelLinear(dim, {name: full}, False, context) for name in ("f_b_proj", "g_b_proj")
        )
        self.conv_weight = torch.empty(3 * own, self.sizes.taps, dtype=context.dtype)
        self.gates = DeltaGates(
            torch.empty(heads, dtype=torch.float32), torch.empty(own, dtype=torch.float32), heads, dim
        )
        self.o_norm = replace(context, norm_offset=0.0).norm(dim, config.rms_norm_eps)
        self.o_proj = RowParallelLinear("o_proj", full, config.hidden_size, False, context)
        self.state_spec = state_layout.together(
            state_layout.convolution(3 * own, self.sizes.taps, str(context.dtype).removeprefix("torch.")),
            state_layout.recurrence(heads, heads, dim, dim, by_channel=True),
        )

    def mix(self, projected: torch.Tensor, state: LayerState, rows: StateRows) -> torch.Tensor:
        heads, dim = self.heads.num_heads, self.sizes.key_dim
        mixed, decay, gate, b = projected.split((3 * heads * dim, dim, dim, heads), 1)
        mixed = self._kernels.short_convolution(mixed, self.conv_weight, None, True, state, rows)
        a = self.f_b_proj.forward(decay.contiguous())
        q, k, v, decays, beta = self._kernels.delta_inputs(mixed, a, b, self.gates)
        result = self._kernels.recurrence(q, k, v, decays, beta, state, rows)
        gates = self.g_b_proj.forward(gate.contiguous()).unflatten(1, (heads, dim))
        return self._kernels.gated_norm(result, gates, self.o_norm.weight, self.o_norm.eps, silu=False).flatten(1)

    def _add_attended(self, x: torch.Tensor, attended: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.add_product(x, self.o_proj, attended, batch)

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = {**self.o_proj.weight_slots(prefix), **self.o_norm.weight_slots(f"{prefix}o_norm")}
        for linear in (self.in_proj, self.gates_proj, self.f_b_proj, self.g_b_proj):
            slots |= {} if linear is None else linear.weight_slots(prefix)
        heads, dim, rank = self.heads.num_heads, self.sizes.key_dim, self.shard.rank
        all_heads = self.sizes.num_heads
        slots[f"{prefix}A_log"] = WeightSlot(
            self.gates.a_log, (1, 1, all_heads, 1), 0, heads * rank, convert=torch.flatten
        )
        slots[f"{prefix}dt_bias"] = WeightSlot(self.gates.dt_bias, (all_heads * dim,), 0, heads * dim * rank)
        for part, name in zip(self.conv_weight.chunk(3), ("q_conv1d", "k_conv1d", "v_conv1d"), strict=True):
            full_shape = (all_heads * dim, 1, self.sizes.taps)
            slots[f"{prefix}{name}.weight"] = WeightSlot(part[:, None], full_shape, 0, heads * dim * rank)
        return slots
