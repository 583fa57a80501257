"""Token embedding and language-model head, split over the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fenceline.layers.shard import Shard
from fenceline.layers.weight_slot import WeightSlot, new_param


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary, ``ceil(vocab_size / size)`` for each rank; the last ranks may hold padding.

    As an embedding the ranks' outputs sum to the whole; as a head (its product with hidden states) they concatenate to
    it, padding last. Padding rows are zero and never named by a token id.
    """

    def __init__(self, vocab_size: int, hidden_size: int, shard: Shard, dtype: torch.dtype) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.shard = shard
        num_rows = -(-vocab_size // shard.size)
        self.first_row = min(shard.rank * num_rows, vocab_size)
        self.num_live_rows = min(num_rows, vocab_size - self.first_row)
        self.weight = new_param(num_rows, hidden_size, dtype=dtype)
        self.weight[self.num_live_rows :].zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 in [0, vocab_size) → [T, hidden_size]; zeros for ids of other ranks."""
        if self.shard.size == 1:
            return F.embedding(ids, self.weight)
        rows = ids - self.first_row
        mine = (rows >= 0) & (rows < self.num_live_rows)
        return F.embedding(torch.where(mine, rows, 0), self.weight) * mine.unsqueeze(-1)

    def weight_slot(self) -> WeightSlot:
        """The slot of the whole [vocab_size, hidden_size] table in the checkpoint."""
        full_shape = (self.vocab_size, self.weight.shape[1])
        return WeightSlot(self.weight[: self.num_live_rows], full_shape, dim=0, start=self.first_row)
