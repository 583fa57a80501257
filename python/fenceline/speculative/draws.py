"""What a draft proposes for a place: the tokens that its own scores favour under the noise of that place, which is the
noise that the target will draw with there. So the two agree often (see ``accept``)."""

from __future__ import annotations

import torch

from fenceline.sampling.gumbel import GumbelSampler
from fenceline.sampling.kernels.sample import sample_tokens


def draw_draft(
    logits: torch.Tensor,
    target_ids: torch.Tensor | None,
    vocab_size: int,
    temperatures: torch.Tensor | None,
    noise_scales: torch.Tensor | None,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Tokens [B] int64 of the target's vocabulary, drawn as ``sample_tokens`` does from ``logits`` [B, draft
    vocabulary]; those that the draft does not know are never drawn. -1, which ``check_draft`` refuses, where logits are
    NaN or infinite."""
    best = logits.amax(dim=-1)
    logits = _of_target(logits, target_ids, vocab_size)
    tokens = torch.empty_like(positions)
    sample_tokens(
        logits, temperatures, noise_scales, seed_keys, positions, thresholds=None, rows=None, last_tokens=None,
        next_tokens=tokens,
    )  # fmt: skip
    return tokens.masked_fill_(best.isnan() | best.isinf(), -1)


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
    scores = _of_target(logits, target_ids, vocab_size).float()
    scores = scores - scores.amax(dim=-1, keepdim=True)
    if temperatures is not None:
        scores = scores / temperatures[:, None]
    if seed_keys is None:  # all are greedy
        best = scores.topk(topk, dim=-1)
        return best.indices, best.values - scores.logsumexp(dim=-1, keepdim=True)
    return GumbelSampler(vocab_size, logits.device).topk(scores, seed_keys, positions, topk, noise_scales)


def _of_target(logits: torch.Tensor, target_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Logits [B, vocab_size] of the target's tokens, -inf for those that the draft does not know."""
    if target_ids is None:
        return logits
    whole = logits.new_full((len(logits), vocab_size), -torch.inf)
    whole[:, target_ids] = logits
    return whole
