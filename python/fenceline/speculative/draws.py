"""What a draft proposes at a position: the tokens with the best draft scores after adding the noise of that position.
The target draws with the same noise there, so the two often agree (see ``accept``).

Each rank has the logits of a part of the draft's vocabulary. The ranks exchange the best of their own tokens and all
choose from these, so they propose the same tokens.
"""

from __future__ import annotations

import torch

from fenceline.layers.kernels.speculative_operands import Pieces
from fenceline.layers.linear import VocabParallelEmbedding
from fenceline.sampling.draw_kernels import draw_pieces, whole_vocabulary
from fenceline.sampling.gumbel import GumbelSampler
from fenceline.sampling.rank_sampler import gather_pieces, scale_own

_NO_TOKEN = 2**31 - 1  # greater than every token id


def draw_draft(
    logits: torch.Tensor,
    head: VocabParallelEmbedding,
    target_ids: torch.Tensor | None,
    vocab_size: int,
    temperatures: torch.Tensor | None,
    noise_scales: torch.Tensor | None,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
    ahead: int = 0,
) -> Pieces:
    """Draw tokens of the target's vocabulary at ``positions`` + ``ahead`` from ``logits`` [B, this rank's columns of
    ``head``], as ``sample_tokens`` does. ``target_ids`` are the target's ids of the draft's tokens, None if the
    vocabularies are the same; tokens that are not in the draft's vocabulary are never drawn. The result is in pieces,
    from which ``keep_draft`` or :func:`drawn_tokens` gets the tokens; each rank's columns are a piece."""
    if head.shard.size == 1:
        return Pieces(
            *draw_pieces(logits, temperatures, noise_scales, seed_keys, positions, ahead, target_ids, vocab_size)
        )
    tokens = _own_tokens(head, target_ids)
    if logits.is_cuda:
        own = draw_pieces(logits, temperatures, noise_scales, seed_keys, positions, ahead, tokens, vocab_size)
        return Pieces(*gather_pieces(head.shard, *own))
    logits = logits.float()
    if seed_keys is None:  # all are greedy
        best, columns = logits.max(dim=-1)
        maxima = None  # those are the scores
    else:
        scaled, maxima = scale_own(head.shard, logits, temperatures)
        sampler = GumbelSampler(len(tokens), logits.device, token_ids=tokens)
        best, columns = sampler.best(scaled, seed_keys, positions + ahead, noise_scales)
    scores, ids = gather_pieces(head.shard, best[:, None], tokens[columns].int()[:, None])
    largest = scores if maxima is None else maxima
    return Pieces(scores, ids, largest.masked_fill(largest.isnan(), torch.inf))


def drawn_tokens(pieces: Pieces) -> torch.Tensor:
    """The drawn tokens [B] int64; -1, which ``check_draft`` refuses, if a logit was NaN or the largest infinite."""
    best_scores, best_ids, largest = pieces
    ids = best_ids.long().masked_fill(best_scores != best_scores.amax(dim=1, keepdim=True), _NO_TOKEN)
    best = largest.amax(dim=1)
    return ids.amin(dim=1).masked_fill(best.isnan() | best.isinf(), -1)


def best_drafts(
    logits: torch.Tensor,
    head: VocabParallelEmbedding,
    target_ids: torch.Tensor | None,
    vocab_size: int,
    temperatures: torch.Tensor | None,
    noise_scales: torch.Tensor | None,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``topk`` tokens with the best scores with noise [B, topk] int64, and their log-probabilities [B, topk]
    float32, from which ``tree`` computes cumulative scores. They are the log-softmax of the scores with noise. The
    first token is the one that :func:`draw_draft` would draw. If logits are NaN or infinite, the log-probabilities are
    not finite, and ``check_draft`` refuses the draft. Operands as for :func:`draw_draft`."""
    shard, tokens = head.shard, None
    if shard.size == 1:
        scores = whole_vocabulary(logits, target_ids, vocab_size).float()
        scores = scores - scores.amax(dim=-1, keepdim=True)
        if temperatures is not None:
            scores = scores / temperatures[:, None]
    else:
        tokens = _own_tokens(head, target_ids)
        scores, _ = scale_own(shard, logits.float(), temperatures)
    num_columns = scores.shape[1]
    num = min(topk, num_columns)
    if seed_keys is None:  # all are greedy
        values, columns = scores.topk(num, dim=-1)
        totals = scores.logsumexp(dim=-1, keepdim=True)
    else:
        sampler = GumbelSampler(num_columns, logits.device, token_ids=tokens)
        values, columns, totals = sampler.topk(scores, seed_keys, positions, num, noise_scales)
    if tokens is None:
        return columns, values - totals
    # Scores, ids and the total of each rank, all of which fit in float64 without loss: one exchange.
    own = torch.cat((values.double(), tokens[columns].double(), totals.double()), dim=-1)
    parts = shard.all_gather(own).unflatten(-1, (shard.size, 2 * num + 1))
    values, ids = parts[..., :num].flatten(1), parts[..., num : 2 * num].flatten(1)
    # Of equal scores that of the lowest rank is first.
    best = values.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    logprobs = values.gather(1, best) - parts[..., -1].logsumexp(dim=-1, keepdim=True)
    return ids.gather(1, best).long(), logprobs.float()


def _own_tokens(head: VocabParallelEmbedding, target_ids: torch.Tensor | None) -> torch.Tensor:
    """The target's id of the token of each of this rank's columns [columns] int64. Padding columns, whose logits are
    -inf, have arbitrary numbers."""
    first, num = head.first_row, head.weight.shape[0]
    columns = torch.arange(first, first + num, device=head.weight.data.device)
    return columns if target_ids is None else target_ids[columns.clamp(max=len(target_ids) - 1)]
