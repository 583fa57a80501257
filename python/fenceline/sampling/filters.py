"""top_k, top_p and min_p as one number per request: the lowest score that may still be drawn.

Thresholds on values, not on ranks: which tokens stay depends on the row's values alone, never on how a sort or a
top-k happens to break ties (and ties are common with bf16 logits). Tokens tied with the last one kept are kept too,
as in transformers. As in SGLang the filters are joint: each looks at the full distribution after temperature, and a
token has to pass all of them.
"""

from __future__ import annotations

import torch

from fenceline.sampling.gumbel import row_chunks, take_rows
from fenceline.sampling.sampling_batch import SamplingBatch

# Probabilities relative to the row's largest become integers of this unit. Sums of integers are exact in any order,
# so top_p cuts at the same token whatever the batch's shape makes the device's reductions and scans do.
_ONE = float(1 << 40)


def keep_thresholds(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    """[B] float32 thresholds for ``scaled`` [B, V] float32, whose rows have the maximum 0; None: keep everything.

    No full sort unless some request has top_p without top_k.
    """
    thresholds = _sorted_thresholds(scaled, batch)
    if batch.min_p_logs is None:
        return thresholds
    # p >= min_p * p_max, and the largest score is 0
    return batch.min_p_logs if thresholds is None else torch.maximum(thresholds, batch.min_p_logs)


def _sorted_thresholds(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    if batch.top_ks is None:
        return None
    index, top_ks = batch.filter_index, batch.top_ks
    pieces = []
    for rows in row_chunks(top_ks.shape[0], scaled.shape[1]):
        top_ps = None if batch.top_ps is None else batch.top_ps[rows]
        pieces.append(_lowest_kept(take_rows(scaled, index, rows), batch.max_top_k, top_ks[rows], top_ps))
    lowest = torch.cat(pieces)
    if index is None:
        return lowest
    return scaled.new_full((scaled.shape[0],), -torch.inf).index_copy_(0, index, lowest)


def _lowest_kept(
    scaled: torch.Tensor, max_top_k: int, top_ks: torch.Tensor, top_ps: torch.Tensor | None
) -> torch.Tensor:
    """[F] lowest score that top_k and top_p keep in each row of ``scaled`` [F, V]."""
    vocab_size = scaled.shape[1]
    if max_top_k < vocab_size:
        ordered = scaled.topk(max_top_k, dim=-1).values
    else:
        ordered = scaled.sort(dim=-1, descending=True).values
    last = top_ks.clamp(max=ordered.shape[1]) - 1
    if top_ps is not None:
        last = torch.minimum(last, _last_in_nucleus(scaled, ordered, top_ps))
    return ordered.gather(1, last[:, None]).squeeze(1)


def _last_in_nucleus(scaled: torch.Tensor, ordered: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """[F] int64 rank of the last token of the smallest set whose mass reaches ``top_p`` (Holtzman et al. 2020)."""
    mass = _fixed_point(ordered)
    total = mass.sum(-1) if ordered.shape == scaled.shape else _fixed_point(scaled).sum(-1)
    limit = (total * top_ps).to(torch.int64).clamp_(min=1)
    before = mass.cumsum(-1) - mass
    num_kept = (before < limit[:, None]).sum(-1)
    return (num_kept - 1).clamp_(min=0)  # a row of NaN has no mass: rank 0 keeps the index valid


def _fixed_point(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.to(torch.float64).exp_().mul_(_ONE).to(torch.int64)
