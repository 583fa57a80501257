"""Detects unusable drafts on the device, without host synchronisation.

A draft model may fail where the target does not: it may give probabilities that are not finite, or token ids outside
the vocabulary. Each step of a draft is checked before its ids are used as indices. If a draft is bad, the request
continues with token ids that are harmless as indices, and none of its draft tokens is accepted. So a bad draft does not
change the output; it is only counted.
"""

from __future__ import annotations

import torch

_HARMLESS_TOKEN = 0


def check_draft(
    token_ids: torch.Tensor, logprobs: torch.Tensor, vocab_size: int, is_bad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns usable token ids and log-probabilities, and which drafts have been bad so far [B] bool. ``token_ids`` [B,
    ...] int64 are ids of the target's vocabulary, ``logprobs`` [B, ...] float32. ``is_bad`` [B] bool is the result of
    the draft's step before. A draft is bad if an id is outside [0, vocab_size), or a log-probability is NaN or +inf
    (-inf is a probability of 0). All ids and log-probabilities of a bad draft become 0."""
    usable = (token_ids == token_ids.clamp(0, vocab_size - 1)) & (logprobs < torch.inf)  # false for NaN
    is_bad = is_bad | ~usable.flatten(1).all(1)
    shape = (-1, *[1] * (token_ids.dim() - 1))
    ids = token_ids.masked_fill(is_bad.view(shape), _HARMLESS_TOKEN)
    return ids, logprobs.masked_fill(is_bad.view(shape), 0.0), is_bad
