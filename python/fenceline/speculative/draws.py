"""What a draft proposes for a place: the tokens that its own scores favour under the noise of that place, which is the
noise that the target will draw with there. So the two agree often (see ``accept``)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fenceline.sampling.gumbel import GumbelSampler
from fenceline.sampling.kernels.sample import draw_pieces, whole_vocabulary

_NO_TOKEN = 2**31 - 1  # above all


class Pieces(NamedTuple):
    """What has been drawn for each of B requests, in P pieces of the vocabulary: see ``sample.draw_pieces``."""

    best_scores: torch.Tensor  # [B, P] float32
    best_ids: torch.Tensor  # [B, P] int32
    largest: torch.Tensor  # [B, P] float32


def draw_draft(
    logits: torch.Tensor,
    target_ids: torch.Tensor | None,
    vocab_size: int,
    temperatures: torch.Tensor | None,
    noise_scales: torch.Tensor | None,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
    ahead: int = 0,
) -> Pieces:
    """Tokens of the target's vocabulary at ``positions`` + ``ahead``, drawn as ``sample_tokens`` does from ``logits``
    [B, draft vocabulary], in pieces: ``keep_draft`` and :func:`drawn_tokens` go on from there. Those that the draft
    does not know are never drawn."""
    return Pieces(
        *draw_pieces(logits, temperatures, noise_scales, seed_keys, positions, ahead, target_ids, vocab_size)
    )


def drawn_tokens(pieces: Pieces) -> torch.Tensor:
    """The tokens [B] int64; -1, which ``check_draft`` refuses, where logits were NaN or infinite."""
    best_scores, best_ids, largest = pieces
    ids = best_ids.long().masked_fill(best_scores != best_scores.amax(dim=1, keepdim=True), _NO_TOKEN)
    best = largest.amax(dim=1)
    return ids.amin(dim=1).masked_fill(best.isnan() | best.isinf(), -1)


def best_drafts(
    logits: torch.Tensor,
    target_ids: torch.Tensor | None,
    vocab_size: int,
    temperatures: torch.Tensor | None,
    noise_scales: torch.Tensor | None,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``topk`` tokens with the best scores under the noise [B, topk] int64, the first of which :func:`draw_draft`
    would draw, and the logarithms of their shares [B, topk] float32: the softmax of the scores with noise, of which
    ``tree`` makes cumulative scores. Not finite, which ``check_draft`` refuses, where logits are NaN or infinite."""
    scores = whole_vocabulary(logits, target_ids, vocab_size).float()
    scores = scores - scores.amax(dim=-1, keepdim=True)
    if temperatures is not None:
        scores = scores / temperatures[:, None]
    if seed_keys is None:  # all are greedy
        best = scores.topk(topk, dim=-1)
        return best.indices, best.values - scores.logsumexp(dim=-1, keepdim=True)
    return GumbelSampler(vocab_size, logits.device).topk(scores, seed_keys, positions, topk, noise_scales)
