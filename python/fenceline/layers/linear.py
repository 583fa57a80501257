"""Layers that hold a Weight and are split over ranks: linear layers, the embedding and the language-model head.

The linear layers are Megatron-LM's column-parallel and row-parallel products (arXiv:1909.08053), fused.

A column-parallel layer holds some of the output features, so the ranks' outputs are concatenated. A row-parallel layer
holds some of the input features, so the ranks' outputs are summed. Its Weight defines how a matrix is stored and
multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fenceline.layers.context import LayerContext, Shard
from fenceline.layers.kernels.base import SILU
from fenceline.layers.weight import RMSNorm, WeightSlot, WeightSlots


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """One output of a fused layer: this rank holds features ``[index * size, (index + 1) * size)`` of ``full``."""

    name: str  # in the checkpoint, for example gate_proj
    full: int
    size: int
    index: int


class ColumnParallelLinear:
    """Column-parallel products of one input, fused into one matrix. The product of x [T, in_features] is [T, sum of
    this rank's parts], one part after the other."""

    def __init__(self, in_features: int, parts: Sequence[ColumnPart], bias: bool, context: LayerContext) -> None:
        self.parts = tuple(parts)
        self.sizes = [part.size for part in parts]
        self.in_features = in_features
        self.weight = context.linear(sum(self.sizes), in_features, [part.name for part in parts])
        self.bias = torch.empty(sum(self.sizes), dtype=context.dtype) if bias else None

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in_features] → [T, sum of ``sizes``], in ``out`` if given."""
        return self.weight.product(x, self.bias, out)

    def forward_normed(self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        """``forward`` of norm(x), in ``out`` if given."""
        return self.weight.normed_product(x, norm, self.bias, out)

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots named ``{prefix}{part}.weight`` and ``.bias``."""
        slots: WeightSlots = {}
        offset = 0
        for part in self.parts:
            rows, name = slice(offset, offset + part.size), f"{prefix}{part.name}"
            start = part.index * part.size
            slots |= self.weight.slots(name, rows, (part.full, self.in_features), dim=0, start=start)
            if self.bias is not None:
                slots[f"{name}.bias"] = WeightSlot(self.bias[rows], (part.full,), dim=0, start=start)
            offset += part.size
        return slots


class ReplicatedLinear(ColumnParallelLinear):
    """A linear layer that every rank holds whole."""

    def __init__(self, name: str, in_features: int, out_features: int, bias: bool, context: LayerContext) -> None:
        """``name`` is the layer's in the checkpoint (``fc``)."""
        super().__init__(in_features, [ColumnPart(name, out_features, out_features, 0)], bias, context)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several outputs that are all divided evenly over the ranks, for example gate and up."""

    def __init__(self, in_features: int, outputs: Mapping[str, int], bias: bool, context: LayerContext) -> None:
        """``outputs``: the full number of features of each part, by its name in the checkpoint."""
        shard = context.shard
        parts = [
            ColumnPart(name, full, shard.divide(full, f"{name} output features"), shard.rank)
            for name, full in outputs.items()
        ]
        super().__init__(in_features, parts, bias, context)
        self.kernels = context.kernels

    def forward_gated(self, x: torch.Tensor, norm: RMSNorm | None, activation: str = SILU) -> torch.Tensor:
        """activation(gate) * up, [T, size of one part], of norm(x), or of x if ``norm`` is None. The layer must have
        two parts of the same size, gate and up."""
        return self.weight.gated_product(x, norm, self.bias, self.kernels, activation)


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values, split by heads. With more ranks than key/value heads, adjacent ranks hold the same
    key/value head. ``num_heads`` and ``num_kv_heads`` are this rank's."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        context: LayerContext,
        gated: bool = False,
        gate: str | None = None,
    ) -> None:
        """``num_heads`` and ``num_kv_heads``: the whole model's. ``gated``: q_proj has as many rows again for gates,
        after those of each query head. ``gate``: a projection of this name makes them, behind the values."""
        shard = context.shard
        q_heads = shard.divide(num_heads, "attention heads")
        kv_heads, kv_index = split_kv_heads(num_kv_heads, shard)
        kv_full, kv_size, q_dim = num_kv_heads * head_dim, kv_heads * head_dim, head_dim * (2 if gated else 1)
        parts = [
            ColumnPart("q_proj", num_heads * q_dim, q_heads * q_dim, shard.rank),
            ColumnPart("k_proj", kv_full, kv_size, kv_index),
            ColumnPart("v_proj", kv_full, kv_size, kv_index),
        ]
        if gate is not None:
            parts.append(ColumnPart(gate, num_heads * q_dim, q_heads * q_dim, shard.rank))
        super().__init__(hidden_size, parts, bias, context)
        self.num_heads = q_heads
        self.num_kv_heads = kv_heads


def split_kv_heads(num_kv_heads: int, shard: Shard) -> tuple[int, int]:
    """``(heads of this rank, index of its part)``. Heads are repeated if there are fewer of them than ranks. Raises
    ``ValueError`` where neither number divides the other."""
    if shard.size <= num_kv_heads:
        return shard.divide(num_kv_heads, "key/value heads"), shard.rank
    if shard.size % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} key/value heads cannot be repeated evenly over {shard.size} ranks; "
            f"choose a tensor-parallel size that is a multiple of {num_kv_heads}"
        )
    return 1, shard.rank * num_kv_heads // shard.size


class RowParallelLinear:
    """x [T, in_features of this rank] → [T, out_features]: the whole product is the sum of the ranks' products."""

    def __init__(self, name: str, in_features: int, out_features: int, bias: bool, context: LayerContext) -> None:
        """``name`` is the layer's in the checkpoint (``o_proj``)."""
        self.name = name
        self.shard = context.shard
        self.in_features = in_features
        size = self.shard.divide(in_features, f"{name} input features")
        self.weight = context.linear(out_features, size, [name])
        self.bias = torch.empty(out_features, dtype=context.dtype) if bias else None

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole product of x, [T, out_features]: the whole is the sum of the ranks' parts. Only
        rank 0 adds the bias: if all ranks added it, the sum would contain it ``size`` times."""
        return self.weight.product(x, self.bias if self.shard.rank == 0 else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The whole product of x, [T, out_features]."""
        return self.shard.all_reduce(self.part(x))

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots named ``{prefix}{name}.weight`` and ``.bias``."""
        out_features, size = self.weight.shape
        name, full_shape = f"{prefix}{self.name}", (out_features, self.in_features)
        slots = self.weight.slots(name, slice(None), full_shape, dim=1, start=self.shard.rank * size)
        if self.bias is not None:
            slots[f"{name}.bias"] = WeightSlot(self.bias, (out_features,))
        return slots


class WideNorm:
    """RMSNorm over all features of a part (all query or all key heads) that is split over the ranks."""

    def __init__(self, name: str, part: ColumnPart, eps: float, context: LayerContext) -> None:
        self.name, self.part, self.eps = name, part, eps
        self.shard, self.kernels = context.shard, context.kernels
        self.weight = torch.empty(part.size, dtype=context.dtype)
        if self.shard.size > 1:
            self.kernels.prepare_linear(1, part.size, torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's features x [T, size] of the part → a new tensor of their shape."""
        if self.shard.size == 1:
            return self.kernels.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        squares = wide.square()
        if self.kernels.fixed_order:
            squares = self.kernels.router_logits(squares, squares.new_ones(1, squares.shape[1]))
        else:
            squares = squares.sum(-1, keepdim=True)
        squares = self.shard.all_reduce(squares)
        # If ranks share a head, each of them has added its squares. So the divisor counts the head as often.
        mean = squares / (self.part.size * self.shard.size)
        return (wide * (mean + self.eps).rsqrt()).to(x.dtype) * self.weight

    def weight_slots(self, prefix: str) -> WeightSlots:
        """The slot named ``{prefix}{name}.weight``."""
        start = self.part.index * self.part.size
        return {f"{prefix}{self.name}.weight": WeightSlot(self.weight, (self.part.full,), 0, start)}


class VocabParallelEmbedding:
    """Rows of the vocabulary, ``ceil(vocab_size / size)`` for each rank; the last ranks may hold padding. As an
    embedding, the ranks' results are summed. As the head (the product with hidden states) they are concatenated, with
    the padding last. Padding rows are zero, and no token id selects them."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        context: LayerContext,
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
        logits_cap: float = 0.0,
    ) -> None:
        """Embeddings and logits are multiplied by their scales. The scale of embeddings is rounded to their type first.
        If the cap c is above 0, a scaled logit x then becomes c tanh(x / c)."""
        self.embedding_scale = torch.tensor(embedding_scale, dtype=context.dtype, device="cpu").item()
        self.logits_scale, self.logits_cap = logits_scale, logits_cap
        self.vocab_size = vocab_size
        self.shard = shard = context.shard
        num_rows = -(-vocab_size // shard.size)
        self.first_row = min(shard.rank * num_rows, vocab_size)
        self.num_live_rows = min(num_rows, vocab_size - self.first_row)
        self.weight = context.dense(num_rows, hidden_size)
        self.weight.data[self.num_live_rows :].zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 in [0, vocab_size) → [T, hidden_size]."""
        x = self._rows(ids)
        return x if self.embedding_scale == 1.0 else x.mul_(self.embedding_scale)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.shard.size == 1:
            return F.embedding(ids, self.weight.data)
        rows = ids - self.first_row
        mine = (rows >= 0) & (rows < self.num_live_rows)
        own = F.embedding(torch.where(mine, rows, 0), self.weight.data) * mine.unsqueeze(-1)
        return self.shard.all_reduce(own)

    def with_rows(self, ids: torch.Tensor, context: LayerContext) -> VocabParallelEmbedding:
        """A head that has a copy of the rows ``ids`` [N] int64 of this one, and no others. For a single rank."""
        assert self.shard.size == 1, "a rank has no rows of the others"
        head = VocabParallelEmbedding(
            len(ids), self.weight.shape[1], context,
            logits_scale=self.logits_scale, logits_cap=self.logits_cap,
        )  # fmt: skip
        head.weight.data.copy_(self.weight.data[ids.to(self.weight.data.device)])
        return head

    def own_logits(self, x: torch.Tensor, norm: RMSNorm | None, out: torch.Tensor | None = None) -> torch.Tensor:
        """As the head: norm(x), or x as it is, [L, hidden_size] → this rank's columns of the logits [L, vocab_size] in
        x's dtype, in ``out`` if given: those of the tokens from ``first_row`` on. All ranks have the same number of
        columns; those of padding are -inf."""
        logits = self._product(x, norm, out)
        if self.num_live_rows < len(self.weight.data):
            logits[:, self.num_live_rows :] = -torch.inf
        return logits

    def whole_logits(self, own: torch.Tensor) -> torch.Tensor:
        """The logits [L, vocab_size] from all ranks' ``own_logits``."""
        return own if self.shard.size == 1 else self.shard.all_gather(own)[:, : self.vocab_size]

    def _product(self, x: torch.Tensor, norm: RMSNorm | None, out: torch.Tensor | None = None) -> torch.Tensor:
        if norm is None:
            logits = self.weight.product(x, out=out)
        else:
            logits = self.weight.normed_product(x, norm, out=out)
        if self.logits_scale != 1.0:
            logits.mul_(self.logits_scale)
        if self.logits_cap:
            logits.div_(self.logits_cap).tanh_().mul_(self.logits_cap)
        return logits

    def weight_slots(self, name: str) -> WeightSlots:
        """The slot of the whole [vocab_size, hidden_size] table, named ``{name}.weight``."""
        full_shape = (self.vocab_size, self.weight.shape[1])
        return self.weight.slots(name, slice(self.num_live_rows), full_shape, dim=0, start=self.first_row)
