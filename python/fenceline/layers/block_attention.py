"""Sparse attention to selected blocks of tokens (InfLLM-V2, arXiv:2509.24663), as in MiniCPM-SALA.

With each key head a query attends to blocks that it selects by the means of their keys. The layer keeps these as a
further row of its pages, the mean of each group of ``stride`` tokens, once the group is full: a function of the group's
keys alone. The wider means that the published code keeps for each request, which reach across groups, follow from them.
So whatever moves a page moves all that its tokens are selected by, and requests that share pages share it.

What a query selects depends on its own position and the keys before it alone. The published code attends to all tokens
of a request that is shorter than ``dense_len``, so that a query's result there depends on the length of its prompt, and
on how it was cut. Here all requests take the sparse form. It attends to all tokens up to ``top_k`` blocks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fenceline.config.kv_layout import INDEX
from fenceline.layers.decoder_layer import LayerSite, OutputGatedAttention
from fenceline.layers.forward_batch import BlockQueries, ForwardBatch


class BlockSparseAttention(OutputGatedAttention):
    """``OutputGatedAttention`` to selected blocks. The row ``index`` in the pool has the means of groups of keys."""

    def __init__(self, site: LayerSite, qkv_bias: bool = False, o_bias: bool = False) -> None:
        super().__init__(site, qkv_bias, o_bias)
        assert site.config.blocks is not None, "the family reads them from config.json"
        self.blocks, self._best = site.config.blocks, site.context.selecting.best
        self.rules = replace(self.rules, selects=True)

    def project(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        qkv = super().project(x, batch)
        keys, means = (batch.kv_pool.row(self.layer_id, name) for name in ("k", INDEX))
        self._kernels.store_means(keys, means, batch.positions[0], batch.out_slots, self.blocks.stride)
        return qkv

    def _attention(self, projected: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q, k, v = self.split(projected)
        wanted = BlockQueries(q, self.score_scale, self.blocks, self._best)
        tokens = batch.attn.select_blocks(self.layer_id, wanted)
        return batch.attn.forward_selected(self.layer_id, q, k, v, self.score_scale, tokens)

    def attend_between_pieces(self, batch: ForwardBatch) -> None:
        assert batch.buffers is not None, "only a forward in pieces has buffers"
        tensors = batch.buffers.tensors
        attended = self._attention(tensors[self._projected_buffer], batch).flatten(1)
        torch.mul(attended, self._kernels.sigmoid(tensors[self._gates_buffer]), out=tensors[self._attended_buffer])
