"""Drafts that cannot be used, noticed on the device without a synchronisation.

A draft model may go wrong where the target does not: non-finite probabilities, token ids that no vocabulary has. Each
step of a draft is checked before anything is indexed with its ids. The request then goes on with tokens that are
harmless as indices, none of its draft is accepted, and it is counted: such a draft changes no token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fenceline.speculative.tree import DraftTree

_HARMLESS_TOKEN = 0


def check_draft(
    token_ids: torch.Tensor, logprobs: torch.Tensor, vocab_size: int, is_bad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Usable token ids and log-probabilities, and which drafts have been bad so far [B] bool.

    ``token_ids`` [B, ...] int64 are ids of the target's vocabulary, ``logprobs`` [B, ...] float32, ``is_bad`` the
    result of the step before. Bad are ids outside [0, vocab_size) and log-probabilities that are NaN or +inf; -inf
    is a probability of 0. All of a bad draft's ids become 0, its log-probabilities too.
    """
    usable = (token_ids == token_ids.clamp(0, vocab_size - 1)) & (logprobs < torch.inf)  # false for NaN
    is_bad = is_bad | ~usable.flatten(1).all(1)
    shape = (-1, *[1] * (token_ids.dim() - 1))
    ids = token_ids.masked_fill(is_bad.view(shape), _HARMLESS_TOKEN)
    return ids, logprobs.masked_fill(is_bad.view(shape), 0.0), is_bad


def refuse_bad(
    tree: DraftTree, is_bad: torch.Tensor, rows: torch.Tensor, num_refused: torch.Tensor
) -> DraftTree:
    """``tree`` with the drafts that ``is_bad`` [B] bool rejected, and their number added to ``num_refused`` [] int64.

    ``rows`` [B] int64: requests in row 0, the sink, are padding and are not counted. The flags themselves name the
    requests: they are copied to the host with the step's results.
    """
    num_refused.add_((is_bad & (rows != 0)).sum())
    return replace(tree, is_rejected=is_bad)
