"""The sampler of a rank, which holds the logits of a part of the vocabulary.

A draw is an arg-max, so where nothing but a temperature is asked for, each rank finds the best of its own tokens and
the ranks exchange their scores and ids: two numbers a request instead of a row of the vocabulary. Whatever looks at
whole rows (top_k, top_p, min_p, penalties, biases, masks, logprobs) has them gathered first. Either way all ranks
compute the token from the same gathered values, so they have the same one; and either way it is, bit by bit, the token
that the whole row gives.
"""

from __future__ import annotations

import torch

from fenceline.layers.linear import VocabParallelEmbedding
from fenceline.sampling.gumbel import GumbelSampler
from fenceline.sampling.sampler import SampleOutput, Sampler
from fenceline.sampling.sampling_batch import SamplingBatch


class RankSampler(Sampler):
    """See ``Sampler``; logits are ``head.own_logits``. All ranks call ``forward`` with the same batch."""

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
        """Sample one token per request. ``logits`` [B, this rank's columns] float32; for the rest see ``Sampler``."""
        if not batch.is_plain:
            return super().forward(self._head.whole_logits(logits), positions, batch, masks)
        if batch.seed_keys is None:
            scores, columns = logits.max(dim=-1)
        else:
            scores, columns = self._own.best(
                self._scaled(logits, batch), batch.seed_keys, positions, batch.noise_scales
            )
        return SampleOutput(self._winners(scores, columns + self._head.first_row), None)

    def _scaled(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """(logits - maximum of the whole row) / temperature: what ``Sampler`` adds noise to."""
        maxima = self._head.shard.all_gather(logits.amax(dim=-1, keepdim=True))
        scaled = logits - maxima.amax(dim=-1, keepdim=True)
        return scaled if batch.temperatures is None else scaled.div_(batch.temperatures[:, None])

    def _winners(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The id [B] with the best score over all ranks, the lowest one of several; ``scores``, ``ids`` [B]: this
        rank's best. Both fit in float64 without loss, so that one exchange does."""
        pairs = self._head.shard.all_gather(torch.stack((scores.double(), ids.double()), dim=-1))
        # [B, ranks, (score, id)], and a rank's ids are lower than the next one's.
        pairs = pairs.unflatten(-1, (-1, 2))
        best = pairs[..., 0].argmax(dim=-1, keepdim=True)
        winners = pairs[..., 1].gather(1, best).squeeze(1).long()
        return winners.clamp_(max=self._vocab_size - 1)  # a row without any finite score
