"""RankSampler: the sampler of a rank that has the logits of only a part of the vocabulary.

A draw is an arg-max. So if a batch needs at most a temperature, each rank finds the best tokens of its own part, and
the ranks exchange scores and ids: a few numbers per request instead of a row of the vocabulary. For everything that
needs whole rows (top_k, top_p, min_p, penalties, biases, masks, logprobs) the logits are gathered first. In both cases
all ranks compute the token from the same gathered values, so they get the same token, and it is, bit by bit, the one
that would be drawn from the whole row.
"""

from __future__ import annotations

import torch

from fenceline.layers.context import Shard
from fenceline.layers.linear import VocabParallelEmbedding
from fenceline.sampling.draw_kernels import combine_pieces, draw_part
from fenceline.sampling.gumbel import GumbelSampler
from fenceline.sampling.sampler import SampleOutput, Sampler
from fenceline.sampling.sampling_batch import SamplingBatch


class RankSampler(Sampler):
    """A ``Sampler`` whose logits are ``head.own_logits``. All ranks must call ``forward`` with the same batch."""

    def __init__(
        self, head: VocabParallelEmbedding, num_rows: int, device: torch.device, fixed_order: bool = False
    ) -> None:
        super().__init__(head.vocab_size, num_rows, device, fixed_order)
        self._head = head
        self._own = GumbelSampler(head.weight.shape[0], device, head.first_row)

    def forward(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        batch: SamplingBatch,
        masks: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        last_tokens: torch.Tensor | None = None,
    ) -> SampleOutput:
        """Sample one token per request. ``logits`` [B, this rank's columns]; for the rest see ``Sampler``."""
        if not batch.is_plain or masks is not None:
            whole = self._head.whole_logits(logits.float())
            return super().forward(whole, positions, batch, masks, rows, last_tokens)
        next_tokens = torch.empty_like(positions)
        self.draw(
            logits,
            batch.temperatures,
            batch.noise_scales,
            batch.seed_keys,
            positions,
            rows=rows,
            last_tokens=last_tokens,
            next_tokens=next_tokens,
        )
        return SampleOutput(next_tokens, None)

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        noise_scales: torch.Tensor | None,
        seed_keys: torch.Tensor | None,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
        last_tokens: torch.Tensor | None,
        next_tokens: torch.Tensor,
        steps: torch.Tensor | None = None,
        rows_each: int = 1,
        ahead: int = 0,
    ) -> None:
        """``sample_tokens`` for ``logits`` [B, this rank's columns], with a temperature at most."""
        drawn = (logits, temperatures, noise_scales, seed_keys, positions)
        if not len(logits):
            return
        if logits.is_cuda:
            best = draw_part(*drawn, self._head.first_row, rows_each, ahead)
        else:
            best = self._best(*drawn, rows_each, ahead)
        scores, ids = gather_pieces(self._head.shard, *best)
        combine_pieces(scores, ids, rows, last_tokens, next_tokens, steps)

    def _best(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        noise_scales: torch.Tensor | None,
        seed_keys: torch.Tensor | None,
        positions: torch.Tensor,
        rows_each: int,
        ahead: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best score [B, 1] float32 of this rank's columns and its token [B, 1] int32, with ``Sampler``'s means."""
        if seed_keys is None:
            best = logits.float().max(dim=-1, keepdim=True)
            scores, columns = best.values, best.indices
        else:
            if rows_each > 1:
                temperatures, noise_scales, seed_keys = (
                    None if values is None else values.repeat_interleave(rows_each)
                    for values in (temperatures, noise_scales, seed_keys)
                )
                assert seed_keys is not None
            scaled, _ = scale_own(self._head.shard, logits.float(), temperatures)
            scores, columns = self._own.best(scaled, seed_keys, positions + ahead, noise_scales)
            scores, columns = scores[:, None], columns[:, None]
        # In a row without finite scores the column may be one of the padding.
        ids = (columns + self._head.first_row).clamp_(max=self._vocab_size - 1)
        return scores, ids.int()


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


def gather_pieces(shard: Shard, *values: torch.Tensor) -> list[torch.Tensor]:
    """Each of ``values`` [B, P], of 32-bit types, of all ranks: [B, ranks * P], contiguous. One exchange."""
    words = shard.all_gather(torch.stack([value.view(torch.int32) for value in values])).contiguous()
    return [part.view(value.dtype) for part, value in zip(words, values, strict=True)]
