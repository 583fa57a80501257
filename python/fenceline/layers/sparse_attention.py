"""Sparse attention over latents (DeepSeek-V3.2, arXiv:2512.02556): an indexer selects the tokens to attend to.

The indexer keeps a key for each token, as a row of the layer's pages beside the latent, so whatever moves a page moves
both. Its heads score the tokens that a query sees, and the best are selected; where a query sees no more than are to be
selected, it attends to all of them. This depends on the query's own position alone. Layers without an indexer (GLM-5)
attend to the tokens that the last layer with one has selected.

With a KV cache in FP8 queries and keys are rounded as in the published code (``kernels/index_rows.py``), otherwise they
stay in the model's type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fenceline.config.kv_layout import INDEX
from fenceline.layers.decoder_layer import BEFORE_ATTENTION, BranchNorms, LayerSite, in_order
from fenceline.layers.forward_batch import ForwardBatch, IndexQueries, Selection
from fenceline.layers.latent_attention import LatentAttention
from fenceline.layers.linear import ReplicatedLinear
from fenceline.layers.weight import WeightSlots, whole
from fenceline.memory_order import ArenaField, Role

_EPS = 1e-6  # of the norm of keys, whatever rms_norm_eps is


class Indexer:
    """Scores tokens: see ``IndexQueries``. Every rank computes the whole of it, so all select the same tokens. The
    weights of heads are computed in float32."""

    name = "indexer"

    def __init__(self, site: LayerSite) -> None:
        """Parameters are uninitialised."""
        config, context = site.config, site.context.inside("self_attn").inside(self.name)
        assert config.indexer is not None and config.latent is not None, "the family reads both from config.json"
        self.config, self.rope_dim = config.indexer, config.latent.qk_rope_head_dim
        num_heads, head_dim, hidden_size = self.config.num_heads, self.config.head_dim, config.hidden_size
        rank = config.latent.q_lora_rank
        assert rank is not None, "the family has it"
        self._kernels, self._rotary = context.kernels, site.rotary
        self.wq_b = ReplicatedLinear("wq_b", rank, num_heads * head_dim, False, context)
        self.wk = ReplicatedLinear("wk", hidden_size, head_dim, False, context)
        self.k_norm = (torch.empty(head_dim, dtype=torch.float32), torch.empty(head_dim, dtype=torch.float32))
        self.weights_proj = torch.empty(num_heads, hidden_size, dtype=torch.float32)
        self._kernels.prepare_linear(num_heads, hidden_size, torch.float32)

    def forward(
        self,
        normed: torch.Tensor,
        query_latent: torch.Tensor,
        batch: ForwardBatch,
        cache_rows: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Store the keys of the layer's input [T, hidden_size] after its norm, and write what scores tokens by them, of
        the latents [T, q_lora_rank] of its queries: to ``out``, queries [T, heads * features] and weights [T, heads]
        float32."""
        num_heads, head_dim = self.config.num_heads, self.config.head_dim
        queries = self.wq_b.forward(query_latent).view(-1, num_heads, head_dim)
        weights = self._kernels.router_logits(normed, self.weights_proj)
        self._kernels.store_index(
            queries, self.wk.forward(normed), *self.k_norm, _EPS, self._rotary.table, batch.positions[0],
            weights, (num_heads * head_dim) ** -0.5, out[0].view(queries.shape), out[1], cache_rows, batch.out_slots,
        )  # fmt: skip

    def weight_slots(self, prefix: str) -> WeightSlots:
        inside = f"{prefix}{self.name}."
        slots = {**self.wq_b.weight_slots(inside), **self.wk.weight_slots(inside)}
        slots |= {f"{inside}k_norm.{name}": whole(p) for name, p in zip(("weight", "bias"), self.k_norm, strict=True)}
        if self.config.interleaved and self._rotary.order is not None:
            order = (*self._rotary.order, *range(self.rope_dim, self.config.head_dim))
            for linear in (self.wq_b, self.wk):
                linear.weight.moves_rows(len(order))
            slots = in_order(slots, order)
        return slots | {f"{inside}weights_proj.weight": whole(self.weights_proj)}


class SparseLatentAttention(LatentAttention):
    """``LatentAttention`` to selected tokens. Layers with an indexer have one more row in the pool, ``index``
    [index_head_dim], which each rank keeps whole."""

    selects = True

    def __init__(self, site: LayerSite, bias: bool = False, norms: BranchNorms = BEFORE_ATTENTION) -> None:
        super().__init__(site, bias, norms)
        config = site.config.indexer
        assert config is not None and 0 in config.layers, "the first layer selects for itself"
        self.indexer = Indexer(site) if site.index in config.layers else None
        self._source = site.layer_id - site.index + max(layer for layer in config.layers if layer <= site.index)
        self._selecting = site.context.selecting
        self._index_sizes = config.num_heads * config.head_dim, config.num_heads
        self._index_buffers = f"index_q_{self._index_sizes[0]}", f"index_weights_{config.num_heads}"

    def project_index(self, normed: torch.Tensor, query_latent: torch.Tensor, batch: ForwardBatch) -> None:
        if self.indexer is None:
            return
        if batch.buffers is None:
            num_tokens, (width, num_heads) = len(normed), self._index_sizes
            weights = normed.new_empty(num_tokens, num_heads, dtype=torch.float32)
            batch.sparse.queries = normed.new_empty(num_tokens, width), weights
        self.indexer.forward(
            normed, query_latent, batch, batch.kv_pool.row(self.layer_id, INDEX), self._index_queries(batch)
        )

    def attend(self, projected: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q, k, v = self.split(projected)
        tokens = self._selected(batch)
        return batch.attn.forward_selected(self.layer_id, q, k, v, self.score_scale, tokens).flatten(1)

    def attend_between_pieces(self, batch: ForwardBatch) -> None:
        assert batch.buffers is not None, "only a forward in pieces has buffers"
        tensors = batch.buffers.tensors
        tensors[self._attended_buffer].copy_(self.attend(tensors[self._projected_buffer], batch))

    def _selected(self, batch: ForwardBatch) -> Sequence[torch.Tensor]:
        """The tokens to attend to, in the form of the batch's plan."""
        if self.indexer is None:
            selection = batch.sparse.selection
            assert selection is not None and selection.layer_id == self._source, "the layer that selects comes first"
            assert selection.out_slots is batch.out_slots, (
                f"step_selection: layer {self.layer_id} attends by a selection of layer {self._source} in another step"
            )
            return selection.tokens
        queries, weights = self._index_queries(batch)
        heads = queries.unflatten(1, (-1, self.indexer.config.head_dim))
        index = IndexQueries(heads, weights, self.indexer.config.top_k, self._selecting.best)
        selection = Selection(self.layer_id, batch.out_slots, batch.attn.select(self.layer_id, index))
        batch.sparse.selection = self._selecting.hand_on(self.layer_id, selection)
        return selection.tokens

    def _index_queries(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if batch.buffers is not None:
            queries, weights = (batch.buffers.tensors[name] for name in self._index_buffers)
            return queries, weights
        assert batch.sparse.queries is not None, "project comes first"
        return batch.sparse.queries

    def arena_fields(self) -> Sequence[ArenaField]:
        fields = super().arena_fields()
        if self.indexer is None:
            return fields
        dtypes = self._dtype, torch.float32
        return *fields, *(
            ArenaField(name, dtype, Role.OUTPUT, pad=0, shape=(size,))
            for name, dtype, size in zip(self._index_buffers, dtypes, self._index_sizes, strict=True)
        )

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = super().weight_slots(prefix)
        return slots if self.indexer is None else slots | self.indexer.weight_slots(prefix)
