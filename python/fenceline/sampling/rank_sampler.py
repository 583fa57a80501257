"""RankSampler: the sampler of a rank that has the logits of only a part of the vocabulary.

A draw is an arg-max. So if a batch needs at most a temperature, each rank finds the best of its own tokens, and the
ranks exchange scores and ids: two numbers per request instead of a row of the vocabulary. For everything that needs
whole rows (top_k, top_p, min_p, penalties, biases, masks, logprobs) the logits are gathered first. In both cases all
ranks compute the token from the same gathered values, so they get the same token, and it is, bit by bit, the one that
would be drawn from the whole row.
"""

from __future__ import annotations

import torch

from fenceline.layers.context import Shard
from fenceline.layers.linear import VocabParallelEmbedding
from fenceline.sampling.gumbel import GumbelSampler
from fenceline.sampling.sampler import SampleOutput, Sampler
from fenceline.sampling.sampling_batch import SamplingBatch


class RankSampler(Sampler):
    """A ``Sampler`` whose logits are ``head.own_logits``. All ranks must call ``forward`` with the same batch."""

    def __init__(self, head: VocabParallelEmbedding, num_rows: int, device: torch.device) -> None:
        super().__init__(head.vocab_size, num_rows, device)
        self._head = head
        self._own = GumbelSampler(head.weight.shape[0], device, head.first_row)

    def forward(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        batch: SamplingBatch,
        masks: torch.Tensor | None = None,
    ) -> SampleOutput:
        """Sample one token per request. ``logits`` [B, this rank's columns]; for the rest see ``Sampler``."""
        logits = logits.float()
        if not batch.is_plain or masks is not None:
            return super().forward(self._head.whole_logits(logits), positions, batch, masks)
        if batch.seed_keys is None:
            scores, columns = logits.max(dim=-1)
            return SampleOutput(self._winners(scores, columns + self._head.first_row), None)
        tokens = self.draw(logits, batch.temperatures, batch.noise_scales, batch.seed_keys, positions)
        return SampleOutput(tokens, None)

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        noise_scales: torch.Tensor | None,
        seed_keys: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Draw one token [B] int64 from each row of ``logits`` [B, this rank's columns] float32, with a temperature at
        most. The other operands [B] are those of ``SamplingBatch``. May be captured."""
        scaled, _ = scale_own(self._head.shard, logits, temperatures)
        scores, columns = self._own.best(scaled, seed_keys, positions, noise_scales)
        return self._winners(scores, columns + self._head.first_row)

    def _winners(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The ids [B] int64 with the best score of all ranks; of equal scores the lowest id. ``scores`` [B] float32 and
        ``ids`` [B] int64 are this rank's best."""
        scores, ids = gather_pairs(self._head.shard, scores, ids)
        # A rank's ids are lower than those of the next rank, so the first maximum is right.
        best = scores.argmax(dim=-1, keepdim=True)
        winners = ids.gather(1, best).squeeze(1)
        # In a row without finite scores the id may be one of the padding columns.
        return winners.clamp_(max=self._vocab_size - 1)


def scale_own(
    shard: Shard, logits: torch.Tensor, temperatures: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the values to which ``Sampler`` adds noise, for this rank's columns ``logits`` [B, columns] float32:
    (logits - the maximum of the whole row) / temperature, new; and the maximum of each rank's columns [B, ranks]
    float32. One exchange."""
    maxima = shard.all_gather(logits.amax(dim=-1, keepdim=True))
    scaled = logits - maxima.amax(dim=-1, keepdim=True)
    if temperatures is not None:
        scaled.div_(temperatures[:, None])
    return scaled, maxima


def gather_pairs(shard: Shard, scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' ``scores`` [B] float32 and ``ids`` [B] int64, below 2**31: [B, ranks] each, in the order of ranks.
    Both fit in float64 without loss, so one exchange is enough."""
    pairs = shard.all_gather(torch.stack((scores.double(), ids.double()), dim=-1)).unflatten(-1, (-1, 2))
    return pairs[..., 0].float(), pairs[..., 1].long()
