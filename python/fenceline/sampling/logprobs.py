"""Logprobs of sampled tokens and of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fenceline.sampling.gumbel import row_chunks, take_rows


@dataclass(frozen=True, slots=True)
class OutputLogprobs:
    """Logprobs of N tokens and of the K most likely alternatives of each, most likely first. ``named`` are those of the
    W tokens that each row asks for by id (``named_ids``), in the same order. The values are always finite, so that they
    can be sent as JSON: a probability of 0 (a masked token, a row of NaN) becomes float32's lowest number. See
    ``token_logprobs`` for the order of alternatives with equal logprobs."""

    chosen: torch.Tensor  # [N] float32
    top_logprobs: torch.Tensor  # [N, K] float32
    top_ids: torch.Tensor  # [N, K] int64
    named: torch.Tensor | None = None  # [N, W] float32; None if no tokens are asked for by id


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    top_k: int,
    index: torch.Tensor | None = None,
    named_ids: torch.Tensor | None = None,
    fixed_order: bool = False,
) -> OutputLogprobs:
    """Log-softmax of ``logits`` [M, V] (any float dtype; computed in float32; not changed) at ``token_ids`` [M] int64
    and at its ``min(top_k, V)`` largest entries, for the N rows ``index`` [N] int64 (None: all rows, N = M). With
    ``named_ids`` [N, W] int64 also at these entries. ``fixed_order``: the bits of a row's values do not depend on the
    other rows, and equal alternatives are in the order of their ids."""
    num_rows = logits.shape[0] if index is None else index.shape[0]
    num_top = min(top_k, logits.shape[1])
    chosen, values, ids, named = [], [], [], []
    for rows in row_chunks(num_rows, logits.shape[1]):
        logprobs = _log_softmax(take_rows(logits, index, rows), fixed_order)
        chosen.append(logprobs.gather(1, take_rows(token_ids, index, rows)[:, None]).squeeze(1))
        if num_top:
            best_ids = first_of_best(logprobs, num_top) if fixed_order else logprobs.topk(num_top, dim=-1).indices
            values.append(logprobs.gather(1, best_ids))
            ids.append(best_ids)
        if named_ids is not None:
            named.append(logprobs.gather(1, named_ids[rows]))
    if not chosen:
        chosen.append(logits.new_empty(0, dtype=torch.float32))
    if not values:
        values.append(logits.new_empty((num_rows, num_top), dtype=torch.float32))
        ids.append(logits.new_empty((num_rows, num_top), dtype=torch.int64))
    return OutputLogprobs(
        _finite(torch.cat(chosen)),
        _finite(torch.cat(values)),
        torch.cat(ids),
        _finite(torch.cat(named)) if named else None,
    )


def _log_softmax(logits: torch.Tensor, fixed_order: bool) -> torch.Tensor:
    """Of each row of ``logits`` [N, V], in float32."""
    if not (fixed_order and logits.is_cuda):
        return torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    from fenceline.layers.kernels.triton.log_sums import log_sums

    largest, sums = log_sums(logits.contiguous())
    return (logits - largest[:, None]).sub_(sums[:, None])


def first_of_best(logprobs: torch.Tensor, num: int) -> torch.Tensor:
    """The ids of the ``num`` largest entries of each row of ``logprobs`` [N, V] float32, the largest first, and of
    equal ones that with the lowest id. (How torch's operator breaks ties on a GPU depends on the number of rows.)"""
    # No logprob is above 0. So of their magnitudes, in the high bits of a key, the smallest are the best.
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    keys = (_finite(logprobs).abs().view(torch.int32).long() << 32).add_(ids)
    return keys.topk(num, dim=-1, largest=False).values & 0xFFFFFFFF


def prompt_logprobs(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    top_k: int,
    named_ids: torch.Tensor | None = None,
    fixed_order: bool = False,
) -> OutputLogprobs:
    """Logprobs of prompt tokens. ``logits`` [N, V] are the model's logits at N prompt positions, and ``target_ids`` [N]
    int64 the token that follows each of them. Bias, penalties and temperature are not applied, because they concern
    sampled tokens only. The rows are processed in pieces, so temporary memory is one piece in float32, not [N, V]."""
    return token_logprobs(logits, target_ids, top_k, named_ids=named_ids, fixed_order=fixed_order)


def spread(part: OutputLogprobs, index: torch.Tensor, num_reqs: int) -> OutputLogprobs:
    """Put the rows of ``part`` at batch positions ``index`` of ``num_reqs`` rows. The other rows, whose requests asked
    for no logprobs, are 0."""

    def place(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros((num_reqs, *values.shape[1:])).index_copy_(0, index, values)

    named = None if part.named is None else place(part.named)
    return OutputLogprobs(place(part.chosen), place(part.top_logprobs), place(part.top_ids), named)


def select_logprobs(logprobs: OutputLogprobs, index: torch.Tensor) -> OutputLogprobs:
    """The logprobs of the rows ``index`` [N] int64."""
    named = None if logprobs.named is None else logprobs.named[index]
    return OutputLogprobs(logprobs.chosen[index], logprobs.top_logprobs[index], logprobs.top_ids[index], named)


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    lowest = torch.finfo(torch.float32).min
    return logprobs.nan_to_num_(nan=lowest, posinf=0.0, neginf=lowest)
