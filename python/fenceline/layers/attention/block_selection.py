"""Which blocks of tokens a query attends to: see ``BlocksConfig``.

A query's scores of the means of ``width`` keys are weighted as attention weighs scores, but by the sum over means of
four times as many keys, of which one begins at every fourth group: a coarse estimate of the sum over all. The weights
of the queries that share a key head are added up, and a block's score is the largest weight of a mean that overlaps it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fenceline.layers.forward_batch import BlockQueries

_COARSE = 4  # by how much the coarse means are wider, and further apart
_SEGMENT = 64  # sums over more are made in parts of so many, one after the other


def selected_blocks(
    queries: torch.Tensor,
    means: torch.Tensor,
    num_seen: torch.Tensor,
    wanted: BlockQueries,
    products: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """queries [G, queries, num_heads, features] and means [G, groups, num_kv_heads, features] of whole blocks, both
    float32, and how many tokens each query sees [G, queries] → [G, num_kv_heads, queries, blocks] bool. Groups of which
    a query does not see all tokens have any finite means. ``products`` (rows, keys) → rows keys^T."""
    blocks, per_block = wanted.blocks, wanted.blocks.size // wanted.blocks.stride
    keys, rows = means.transpose(1, 2), queries.unflatten(2, (means.shape[2], -1)).permute(0, 2, 3, 1, 4)
    seen, num_blocks = num_seen[:, None, None, :, None], means.shape[1] // per_block

    def scores(width: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of means of ``width`` groups, one at every ``step``-th: [G, kv heads, heads, queries, number]; which of them
        the queries see."""
        number = max((means.shape[1] - width) // step + 1, 0)
        total = torch.zeros_like(keys[:, :, :number])
        for offset in range(width if number else 0):
            total += keys[:, :, offset : offset + (number - 1) * step + 1 : step]
        found = products(rows.flatten(2, 3), total / width).unflatten(2, rows.shape[2:4]) * wanted.scale
        ends = (torch.arange(number, device=seen.device) * step + width) * blocks.stride
        return found, ends <= seen

    width = blocks.width // blocks.stride
    coarse, visible = scores(_COARSE * width, _COARSE)
    missing = 1 + -(coarse.shape[-1] + 1) % _SEGMENT
    coarse = F.pad(coarse.masked_fill(~visible, -torch.inf), (0, missing), value=-torch.inf)
    largest = coarse.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    total = torch.zeros_like(largest)
    for part in (coarse - largest).exp().split(_SEGMENT, -1):
        total += part.sum(-1, keepdim=True)
    fine, visible = scores(width, 1)
    weights = ((fine - largest).exp() / total).masked_fill(~visible | (total == 0), 0.0)
    by_mean = weights[:, :, 0].clone()
    for head in range(1, weights.shape[2]):
        by_mean += weights[:, :, head]
    before = (blocks.width - 1) // blocks.stride  # so many means that overlap a block begin before it
    missing = num_blocks * per_block - by_mean.shape[-1]
    by_block = F.pad(by_mean, (before, missing)).unfold(-1, before + per_block, per_block).amax(-1)
    number = torch.arange(num_blocks, device=seen.device)
    own = (num_seen[:, None, :, None] - 1) // blocks.size
    always = (number < blocks.first) | (own - number <= blocks.local)
    seen_blocks = number <= own
    by_block = by_block.masked_fill(always, torch.inf).masked_fill(~seen_blocks, -torch.inf)
    return wanted.best(by_block, blocks.top_k) & seen_blocks
