"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), in its absorbed form and expanded.

A token keeps one row for all heads: a latent vector c, from which each head's key and value are products, and a rotated
part that each key has in common. Instead of the keys, the queries are multiplied by the matrix of keys, and instead of
the values, the sums over the latents by the matrix of values. Attention then is that of one key/value head as wide as
the row, which any backend computes that takes one row for keys and values: no key or value is ever computed, also not
those of a cached prefix. Its first features of the result are the sums.

For a long prompt without a prefix this is about three times the arithmetic of attention with each head's keys and
values, so its layers compute these of its own latents. Which form a row takes depends on its own request alone, and on
no other of the step.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fenceline.config.quantization import ON_LINE_METHOD
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.decoder_layer import BEFORE_ATTENTION, BranchNorms, LayerSite, TokenMixer, in_order
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import HeadLayout
from fenceline.layers.linear import ColumnParallelLinear, ColumnPart, MergedColumnParallelLinear, RowParallelLinear
from fenceline.layers.quantized import QuantizedWeight
from fenceline.layers.rotary import yarn_mscale
from fenceline.layers.weight import DenseWeight, WeightSlots

# The norms of the latents have this in transformers and in DeepSeek's own code, whatever rms_norm_eps is.
_EPS = 1e-6


class LatentAttention(TokenMixer):
    """x += o_proj(attention(norm(x))). Its row in the pool is ``latent``, [kv_lora_rank + qk_rope_head_dim], which each
    rank keeps whole; heads are divided over the ranks."""

    selects = False
    """Whether a query attends to selected tokens."""

    def __init__(self, site: LayerSite, bias: bool = False, norms: BranchNorms = BEFORE_ATTENTION) -> None:
        """``bias`` is for the projections from and to the residual stream. Parameters are uninitialised."""
        config, context = site.config, site.context.inside(self.name)
        assert config.latent is not None, "the family reads the sizes from config.json"
        self.latent, hidden_size = config.latent, config.hidden_size
        num_heads = context.shard.divide(config.num_heads, "attention heads")
        scale, scaling = config.head_dim**-0.5, config.rope_scaling
        if scaling is not None and scaling.mscale_all_dim:
            scale *= yarn_mscale(scaling, scaling.mscale_all_dim) ** 2
        heads = HeadLayout(num_heads, 1, self.latent.width)
        rules = LayerRules(rows=("latent", "latent"), value_dim=self.latent.kv_lora_rank, selects=self.selects)
        super().__init__(site, norms, heads, (num_heads + 1) * self.latent.width, rules, scale)
        rank, queries = self.latent.q_lora_rank, config.num_heads * config.head_dim
        parts = [ColumnPart("kv_a_proj_with_mqa", self.latent.width, self.latent.width, 0)]
        if rank is None:
            self.q_proj = MergedColumnParallelLinear(hidden_size, {"q_proj": queries}, False, context)
        else:
            parts.insert(0, ColumnPart("q_a_proj", rank, rank, 0))
            self.q_a_norm = context.norm(rank, _EPS)
            self.q_proj = MergedColumnParallelLinear(rank, {"q_b_proj": queries}, False, context)
        self.a_proj = ColumnParallelLinear(hidden_size, parts, bias, context)  # whole on each rank
        self.kv_a_norm = context.norm(self.latent.kv_lora_rank, _EPS)
        per_head = self.latent.qk_nope_head_dim + self.latent.v_head_dim
        outputs = {"kv_b_proj": config.num_heads * per_head}
        self._kernels = context.kernels
        for n, k in (
            (self.latent.kv_lora_rank, self.latent.qk_nope_head_dim),
            (self.latent.v_head_dim, self.latent.kv_lora_rank),
        ):
            self._kernels.prepare_linear(n, k, context.dtype)
        # It is multiplied as plain numbers, because blocks of a format lie across its heads and their two parts. So a
        # checkpoint's plain numbers are not rounded.
        stored = context.format_of([*outputs])
        plain = stored is None or stored.method == ON_LINE_METHOD
        of_up = replace(context, format=None) if plain else context
        self.kv_b_proj = MergedColumnParallelLinear(self.latent.kv_lora_rank, outputs, False, of_up)
        weight = self.kv_b_proj.weight
        self._up = weight.data if isinstance(weight, DenseWeight) else torch.empty(weight.shape, dtype=context.dtype)
        out_size = config.num_heads * self.latent.v_head_dim
        self.o_proj = RowParallelLinear("o_proj", out_size, hidden_size, bias, context)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        sections = batch.attn.sections
        if not sections or self.selects:
            return super().forward(x, batch)
        assert batch.buffers is None, "steps with new prompts of so many tokens have no pieces"
        num_heads, rank, plain = self.heads.num_heads, self.latent.kv_lora_rank, self.latent.qk_nope_head_dim
        rows = x.new_empty(len(x), num_heads + 1, self.latent.width)
        queries, row, _, _ = self._compressed(x, batch)
        self._store(queries, row, rows, batch)
        keys, values = self._up_matrices()
        result = x.new_empty(len(x), num_heads, self.latent.v_head_dim)
        for section in sections:
            of_section, stored = queries[section.tokens], rows[section.tokens]
            heads, common = stored[:, :num_heads], stored[:, num_heads:]
            if section.attend_new is not None:
                up = self._kernels.linear(common[:, 0, :rank].contiguous(), self._up).unflatten(1, (num_heads, -1))
                q = torch.cat((of_section[..., :plain], heads[..., rank:]), 2)
                k = torch.cat((up[..., :plain], common[..., rank:].expand(-1, num_heads, -1)), 2)
                result[section.tokens] = section.attend_new(q, k, up[..., plain:].contiguous(), self.score_scale)
                continue
            assert section.plan is not None, "a section has either"
            self._kernels.by_head(of_section[..., :plain], keys.transpose(1, 2), heads[..., :rank])
            sums = section.plan.forward(self.layer_id, heads, common, common, self.score_scale)
            self._kernels.by_head(sums[..., :rank], values, result[section.tokens])
        return self.add_product(x, self.o_proj, result.flatten(1), batch)

    def project(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x → queries of the row's width, then the row, [T, (num_heads + 1) * width]; the row also goes to the pool."""
        num_heads, rank = self.heads.num_heads, self.latent.kv_lora_rank
        if batch.buffers is None:
            projected = x.new_empty(len(x), self._widths[0])
        else:
            projected = batch.buffers.tensors[self._projected_buffer]
        rows = projected.view(len(x), num_heads + 1, -1)
        queries, row, normed, down = self._compressed(x, batch)
        keys, _ = self._up_matrices()
        plain = queries[..., : self.latent.qk_nope_head_dim]
        self._kernels.by_head(plain, keys.transpose(1, 2), rows[:, :num_heads, :rank])
        self._store(queries, row, rows, batch)
        if self.selects:
            assert normed is not None and down is not None
            self.project_index(normed, down, batch)
        return projected

    def _compressed(
        self, x: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """x → queries [T, num_heads, head_dim] and rows [T, width], before norm and rotation of the rows; x after its
        norm and the queries' latents, if the layer selects tokens."""
        query_rank = self.latent.q_lora_rank
        norm = self.input_norm
        normed, down = batch.normed.pop(norm, None), None
        if normed is None and norm is not None and query_rank is not None and not self.selects:
            compressed = self.a_proj.forward_normed(x, norm)  # nothing else reads the norm of x
        else:
            if normed is None:
                normed = x if norm is None else norm.forward(x)
            compressed = self.a_proj.forward(normed)
        if query_rank is None:
            assert normed is not None
            queries = self.q_proj.forward(normed)
        elif self.selects or len(x) > 1:  # of one row a product may compute the norm as well
            down = self.q_a_norm.forward(compressed[:, :query_rank])
            queries = self.q_proj.forward(down)
        else:
            queries = self.q_proj.forward_normed(compressed[:, :query_rank], self.q_a_norm)
        return queries.view(len(x), self.heads.num_heads, -1), compressed[:, -self.latent.width :], normed, down

    def _store(self, queries: torch.Tensor, row: torch.Tensor, rows: torch.Tensor, batch: ForwardBatch) -> None:
        """``LayerKernels.store_latent`` into ``rows`` [T, num_heads + 1, width] and the layer's row of the pool."""
        if batch.layer_ready is not None:
            # This must come before the store too, because this batch may write to the last page that is being loaded.
            batch.layer_ready(self.layer_id)
        self._kernels.store_latent(
            queries, row, self.kv_a_norm.weight, self.kv_a_norm.eps, self._rotary.table, batch.positions[0],
            rows, batch.kv_pool.row(self.layer_id, "latent"), batch.out_slots,
        )  # fmt: skip

    def project_index(self, normed: torch.Tensor, query_latent: torch.Tensor, batch: ForwardBatch) -> None:
        """What a layer that selects tokens computes further of its input, after its norm, and the queries' latents."""

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = projected.view(len(projected), self.heads.num_heads + 1, -1)
        row = rows[:, self.heads.num_heads :]
        return rows[:, : self.heads.num_heads], row, row

    def _add_attended(self, x: torch.Tensor, attended: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        _, values = self._up_matrices()
        sums = attended.view(len(x), self.heads.num_heads, -1)[..., : self.latent.kv_lora_rank]
        result = x.new_empty(len(x), self.heads.num_heads, self.latent.v_head_dim)
        self._kernels.by_head(sums, values, result)
        return self.add_product(x, self.o_proj, result.flatten(1), batch)

    def _up_matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each head's matrices of keys and of values, [num_heads, features of a head, kv_lora_rank]."""
        by_head = self._up.unflatten(0, (self.heads.num_heads, -1))
        keys, values = by_head.split((self.latent.qk_nope_head_dim, self.latent.v_head_dim), 1)
        return keys, values

    def _dequantise(self) -> None:
        assert isinstance(self.kv_b_proj.weight, QuantizedWeight), "plain numbers are what is loaded"
        self._up.copy_(self.kv_b_proj.weight.stored.dequantized(self._up.dtype))

    def weight_slots(self, prefix: str) -> WeightSlots:
        latents, queries = self.a_proj.weight_slots(prefix), self.q_proj.weight_slots(prefix)
        up = self.kv_b_proj.weight_slots(prefix)
        if isinstance(self.kv_b_proj.weight, QuantizedWeight):
            # Slots of a quantised matrix are filled together, so one of them is enough.
            name = next(name for name, slot in up.items() if slot.dest.numel() and slot.loaded is None)
            up[name] = replace(up[name], loaded=self._dequantise)
        if (order := self._rotary.order) is not None:
            for start, linear, slots in (
                (self.latent.qk_nope_head_dim, self.q_proj, queries),
                (self.latent.kv_lora_rank, self.a_proj, latents),
            ):
                linear.weight.moves_rows(start + len(order) if start % len(order) else len(order))
                whole = (*range(start), *(start + feature for feature in order))
                rotated = {name: slot for name, slot in slots.items() if not name.startswith(f"{prefix}q_a_proj.")}
                slots |= in_order(rotated, whole)
        norms = self.kv_a_norm.weight_slots(f"{prefix}kv_a_layernorm")
        if self.latent.q_lora_rank is not None:
            norms |= self.q_a_norm.weight_slots(f"{prefix}q_a_layernorm")
        return {**latents, **norms, **queries, **up, **self.o_proj.weight_slots(prefix)}
