"""Lightning attention (arXiv:2401.04658), as in MiniCPM-SALA: linear attention in which each head has one decay."""

from __future__ import annotations

import torch

from fenceline.config import state_layout
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.decoder_layer import BEFORE_ATTENTION, BranchNorms, LayerSite, RecurrentMixer
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import HeadLayout, QKNorm
from fenceline.layers.linear import MergedColumnParallelLinear, RowParallelLinear, WideNorm
from fenceline.layers.weight import WeightSlots


class LightningAttention(RecurrentMixer):
    """x += o_proj(o_norm(recurrence(q, k, v)) * sigmoid(z)), with projections of norm(x), of which q and k are
    normalised head by head and rotated. ``o_norm`` is over all heads, which are divided over the ranks."""

    def __init__(self, site: LayerSite, bias: bool = False, norms: BranchNorms = BEFORE_ATTENTION) -> None:
        """``bias`` is for all projections. Parameters are uninitialised."""
        config, context = site.config, site.context.inside(self.name)
        assert config.recurrent is not None, "the family reads the sizes from config.json"
        num_heads, dim, eps = config.recurrent.num_heads, config.recurrent.key_dim, config.rms_norm_eps
        self._kernels, shard = context.kernels, context.shard
        heads = shard.divide(num_heads, "heads of recurrent layers")
        names = ("q_proj", "k_proj", "v_proj", "z_proj")
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size, dict.fromkeys(names, num_heads * dim), bias, context
        )
        layout = HeadLayout(heads, heads, dim)
        super().__init__(site, norms, layout, 4 * heads * dim, LayerRules(), dim**-0.5)
        self.q_norm, self.k_norm = context.norm(dim, eps), context.norm(dim, eps)
        self.o_norm = WideNorm("o_norm", self.in_proj.parts[0], eps, context)
        self.o_proj = RowParallelLinear("o_proj", num_heads * dim, config.hidden_size, bias, context)
        self._decays = -torch.tensor(slopes(num_heads)[heads * shard.rank : heads * (shard.rank + 1)])
        self.state_spec = state_layout.recurrence(heads, heads, dim, dim)

    def attend(self, projected: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        assert batch.states is not None, "recurrent layers have states"
        norms = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        table = self._rotary.table if batch.angles is None else batch.angles
        inputs = self._kernels.lightning_inputs(
            projected, self._decays, norms, table, batch.positions[0], self.score_scale
        )
        state, rows = batch.states.layers[self.layer_id], batch.states.rows
        result = self._kernels.recurrence(*inputs, None, state, rows).flatten(1)
        z = projected[:, 3 * result.shape[1] :]
        if self.o_norm.shard.size > 1:
            return self.o_norm.forward(result.to(z.dtype)).mul_(self._kernels.sigmoid(z))
        weight, eps = self.o_norm.weight, self.o_norm.eps
        return self._kernels.gated_norm(result.unsqueeze(1), z.unsqueeze(1), weight, eps, silu=False).flatten(1)

    def _add_attended(self, x: torch.Tensor, attended: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.add_product(x, self.o_proj, attended, batch)

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {
            **self.in_proj.weight_slots(prefix),
            **self.q_norm.weight_slots(f"{prefix}q_norm"),
            **self.k_norm.weight_slots(f"{prefix}k_norm"),
            **self.o_norm.weight_slots(prefix),
            **self.o_proj.weight_slots(prefix),
        }


def slopes(num_heads: int) -> list[float]:
    """By what each head's state decays with a token, as a negative logarithm: ALiBi's slopes (arXiv:2108.12409). Those
    of a power of two are a geometric series; of other numbers the rest are every second one of the next series."""
    power = 1 << num_heads.bit_length() - 1
    series = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    rest = [2 ** (-4 * (head + 1) / power) for head in range(2 * power)][::2]
    return series + rest[: num_heads - power]
