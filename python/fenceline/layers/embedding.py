"""Token embedding and language-model head, split over the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fenceline.layers.context import LayerContext
from fenceline.layers.weight import RMSNorm, WeightSlots


class VocabParallelEmbedding:
    """Rows of the vocabulary, ``ceil(vocab_size / size)`` for each rank; the last ranks may hold padding.

    As an embedding, the ranks' results are summed. As the head (the product with hidden states) they are concatenated,
    with the padding last. Padding rows are zero, and no token id selects them.
    """

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        self.vocab_size = vocab_size
        self.shard = shard = context.shard
        num_rows = -(-vocab_size // shard.size)
        self.first_row = min(shard.rank * num_rows, vocab_size)
        self.num_live_rows = min(num_rows, vocab_size - self.first_row)
        self.weight = context.dense(num_rows, hidden_size)
        self.weight.data[self.num_live_rows :].zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 in [0, vocab_size) → [T, hidden_size]."""
        if self.shard.size == 1:
            return F.embedding(ids, self.weight.data)
        rows = ids - self.first_row
        mine = (rows >= 0) & (rows < self.num_live_rows)
        own = F.embedding(torch.where(mine, rows, 0), self.weight.data) * mine.unsqueeze(-1)
        return self.shard.all_reduce(own)

    def logits(self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        """As the head: norm(x) [L, hidden_size] → logits [L, vocab_size] in x's dtype, in ``out`` if given."""
        if self.shard.size == 1:
            return self.weight.normed_product(x, norm, out=out)
        logits = self.shard.all_gather(self.weight.normed_product(x, norm))[:, : self.vocab_size]
        return logits if out is None else out.copy_(logits)

    def weight_slots(self, name: str) -> WeightSlots:
        """The slot of the whole [vocab_size, hidden_size] table, named ``{name}.weight``."""
        full_shape = (self.vocab_size, self.weight.shape[1])
        return self.weight.slots(name, slice(self.num_live_rows), full_shape, dim=0, start=self.first_row)
