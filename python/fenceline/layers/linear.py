"""Linear layers that know their shard: Megatron-LM's column and row parallel products (arXiv:1909.08053), fused.

A column-parallel layer holds some of the output features, so the ranks' outputs concatenate to the whole; a
row-parallel one holds some of the input features, so they sum to it. Weights are [out_features, in_features].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fenceline.layers.shard import Shard
from fenceline.layers.weight_slot import WeightSlot, WeightSlots, new_param


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """One output of a fused layer: this rank holds features ``[index * size, (index + 1) * size)`` of ``full``."""

    name: str  # in the checkpoint: gate_proj
    full: int
    size: int
    index: int


class ColumnParallelLinear(nn.Module):
    """Column-parallel products of one input, fused into one matrix.

    Its product of x [T, in_features] is [T, sum of this rank's parts], part after part.
    """

    def __init__(self, in_features: int, parts: Sequence[ColumnPart], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.sizes = [part.size for part in parts]
        self.weight = new_param(sum(self.sizes), in_features, dtype=dtype)
        self.bias = new_param(sum(self.sizes), dtype=dtype) if bias else None

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots named ``{prefix}{part}.weight`` and ``.bias``."""
        slots: WeightSlots = {}
        offset = 0
        for part in self.parts:
            rows = slice(offset, offset + part.size)
            for kind, param in (("weight", self.weight), ("bias", self.bias)):
                if param is not None:
                    full_shape = (part.full, *param.shape[1:])
                    slots[f"{prefix}{part.name}.{kind}"] = WeightSlot(
                        param[rows], full_shape, dim=0, start=part.index * part.size
                    )
            offset += part.size
        return slots


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Parts that are all split alike: gate and up."""

    def __init__(
        self, in_features: int, outputs: Mapping[str, int], bias: bool, shard: Shard, dtype: torch.dtype
    ) -> None:
        """``outputs``: the full number of features of each part, by its name in the checkpoint."""
        parts = [
            ColumnPart(name, full, shard.divide(full, f"{name} output features"), shard.rank)
            for name, full in outputs.items()
        ]
        super().__init__(in_features, parts, bias, dtype)


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values, split by heads; with more ranks than key/value heads, neighbours hold the same one.

    ``num_heads`` and ``num_kv_heads`` are this rank's.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        shard: Shard,
        dtype: torch.dtype,
    ) -> None:
        """``num_heads`` and ``num_kv_heads``: the whole model's."""
        q_heads = shard.divide(num_heads, "attention heads")
        kv_heads, kv_index = split_kv_heads(num_kv_heads, shard)
        kv_full, kv_size = num_kv_heads * head_dim, kv_heads * head_dim
        parts = [
            ColumnPart("q_proj", num_heads * head_dim, q_heads * head_dim, shard.rank),
            ColumnPart("k_proj", kv_full, kv_size, kv_index),
            ColumnPart("v_proj", kv_full, kv_size, kv_index),
        ]
        super().__init__(hidden_size, parts, bias, dtype)
        self.num_heads = q_heads
        self.num_kv_heads = kv_heads


def split_kv_heads(num_kv_heads: int, shard: Shard) -> tuple[int, int]:
    """``(heads of this rank, index of its part)``; heads are repeated where there are fewer than ranks.

    Raises ``ValueError`` where neither number divides the other.
    """
    if shard.size <= num_kv_heads:
        return shard.divide(num_kv_heads, "key/value heads"), shard.rank
    if shard.size % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} key/value heads cannot be repeated evenly over {shard.size} ranks; "
            f"choose a tensor-parallel size that is a multiple of {num_kv_heads}"
        )
    return 1, shard.rank * num_kv_heads // shard.size


class RowParallelLinear(nn.Module):
    """x [T, in_features of this rank] → [T, out_features], a summand of the whole. The bias is rank 0's."""

    def __init__(
        self, name: str, in_features: int, out_features: int, bias: bool, shard: Shard, dtype: torch.dtype
    ) -> None:
        """``name`` is the layer's in the checkpoint (``o_proj``)."""
        super().__init__()
        self.name = name
        self.shard = shard
        self.in_features = in_features
        size = shard.divide(in_features, f"{name} input features")
        self.weight = new_param(out_features, size, dtype=dtype)
        self.bias = new_param(out_features, dtype=dtype) if bias else None

    @property
    def own_bias(self) -> torch.Tensor | None:
        """What this rank adds to its product: if all added the bias, the sum would hold it ``size`` times."""
        return self.bias if self.shard.rank == 0 else None

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots named ``{prefix}{name}.weight`` and ``.bias``."""
        out_features, size = self.weight.shape
        slots = {
            f"{prefix}{self.name}.weight": WeightSlot(
                self.weight, (out_features, self.in_features), dim=1, start=self.shard.rank * size
            )
        }
        if self.bias is not None:
            slots[f"{prefix}{self.name}.bias"] = WeightSlot(self.bias, (out_features,))
        return slots
