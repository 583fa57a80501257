"""Attention on a CPU in an order that depends on a query's position alone.

Keys are taken in segments of ``_SEGMENT`` positions, counted from the sequence's first token, and queries ``_ROWS`` at
a time, so that every product has the same shape. The largest score of a query has no order, and the segments' sums are
added one after the other; segments beyond a query's tokens add zeros. So it does not matter how a prompt was cut,
whether a query comes in a prefill, a decode or a verify step, or which requests are computed beside it.

The nodes of a tree lie in the pool in the order of their numbers. Each query reads its own path in the order of
positions, as if the tokens that were not accepted had never been there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from fenceline.layers.attention.base import NO_RULES, LayerRules
from fenceline.layers.attention.reference import ReferenceAttentionBackend, ReferencePlan, Requests, slots_of
from fenceline.layers.kernels.fixed_order import try_products
from fenceline.mem_cache.kv_pool import KVPool

_SEGMENT = 64
_ROWS = 32


class _FixedOrderPlan(ReferencePlan):
    def prepare(self) -> None:
        self._reads = [
            some.reads(self._kv_pool.page_size, self._window, _SEGMENT)
            if some.tree.ancestors is None
            else _paths(some, some.tree.ancestors, self._kv_pool.page_size, self._window)
            for some in self._requests
        ]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, rules: LayerRules
    ) -> torch.Tensor:
        more_rows, more_tokens = -q.shape[2] % _ROWS, -k.shape[2] % _SEGMENT
        visible = F.pad(visible, (0, more_tokens, 0, more_rows))
        k, v = (F.pad(x.float(), (0, 0, 0, more_tokens)).contiguous().unflatten(2, (-1, _SEGMENT)) for x in (k, v))
        sinks = None if rules.sinks is None else F.pad(rules.sinks, (0, more_rows)).split(_ROWS, -1)
        outputs = []
        for number, rows in enumerate(F.pad(q.float(), (0, 0, 0, more_rows)).split(_ROWS, 2)):
            mask = visible[:, :, number * _ROWS : (number + 1) * _ROWS]
            sink = None if sinks is None else sinks[number]
            outputs.append(_attend_tile(rows, k, v, mask, scale, rules.soft_cap, sink))
        return torch.cat(outputs, 2)[:, :, : q.shape[2]].to(q.dtype)


def _attend_tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [G, heads, _ROWS, head_dim] over k and v [G, heads, segments, _SEGMENT, head_dim] → like q, all in float32.
    ``visible`` [G, 1, _ROWS, tokens]; sinks [heads, _ROWS]. Rows that see nothing are undefined."""
    num_segments, (_, _, _, head_dim) = k.shape[2], q.shape
    tiles = q.unsqueeze(2).expand(-1, -1, num_segments, -1, -1).reshape(-1, _ROWS, head_dim)
    scores = (tiles @ k.flatten(0, 2).transpose(1, 2)).view(*k.shape[:3], _ROWS, _SEGMENT).mul_(scale)
    if soft_cap:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    hidden = ~visible.unflatten(3, (num_segments, _SEGMENT)).transpose(2, 3)
    scores.masked_fill_(hidden, float("-inf"))
    largest = scores.amax((2, 4))
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    weights = scores.sub_(largest[:, :, None, :, None]).exp_()
    parts = (weights.flatten(0, 2) @ v.flatten(0, 2)).view(*k.shape[:3], _ROWS, -1)
    sums, total = torch.zeros_like(parts[:, :, 0]), torch.zeros_like(largest)
    for part, part_total in zip(parts.unbind(2), weights.sum(-1).unbind(2), strict=True):
        sums += part
        total += part_total
    if sinks is not None:
        total += (sinks - largest).exp()
    return sums / total.unsqueeze(-1)


def _paths(
    some: Requests, ancestors: torch.Tensor, page_size: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``Requests.reads`` with each query of a tree as a request of its own, whose tokens are in the order of their
    positions: the slots [G * queries, tokens] int32, and whether the query sees them, [G * queries, 1, tokens]."""
    tree, numbers = some.tree, torch.arange(some.tree.num_nodes, device=ancestors.device)
    own = numbers[tree.num_nodes - tree.num_queries :, None]
    on_path = (ancestors[:, :, None] >> numbers & 1).bool() | (numbers == own)
    order = on_path.logical_not().byte().sort(dim=-1, stable=True).indices  # a node comes after its ancestors
    start = (some.seq_lens - tree.num_nodes)[:, None, None]
    end = start + on_path.sum(-1, keepdim=True)
    num_tokens, first = some.max_seq_len, torch.zeros_like(end)
    if window is not None:
        num_tokens = min(num_tokens, window + _SEGMENT)
        first = (end - window).clamp(min=0) // _SEGMENT * _SEGMENT
    positions = first + torch.arange(num_tokens, device=start.device)
    nodes = order.gather(2, (positions - start).clamp(0, tree.num_nodes - 1))
    visible = positions < end
    if window is not None:
        visible &= positions >= end - window
    # A query before the first token sees that one, so that its softmax has a key.
    visible |= (end <= 0) & (positions == 0)
    tokens = torch.where(positions < start, positions, start + nodes).clamp(min=0)
    rows = some.rows.repeat_interleave(tree.num_queries)
    slots = slots_of(some.page_table, rows, tokens.flatten(0, 1), visible.flatten(0, 1), page_size)
    return slots, visible.flatten(0, 1).unsqueeze(1)


class FixedOrderAttentionBackend(ReferenceAttentionBackend):
    """The backend ``torch`` of a CPU with --enable-deterministic-inference."""

    plan_type = _FixedOrderPlan

    def __init__(self, kv_pool: KVPool, rules: Mapping[int, LayerRules] = NO_RULES) -> None:
        """Raises ``ValueError`` with the remedy if this machine's products depend on a row's place."""
        super().__init__(kv_pool, rules)
        for head_dim in {row.shape[2] for rows in kv_pool.rows for row in rows.values()}:
            for n, k in ((_SEGMENT, head_dim), (head_dim, _SEGMENT)):
                try_products(n, k, torch.float32, _ROWS, _one_of_several)


def _one_of_several(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.flip(0), x, x]).matmul(torch.stack([weight] * 3).transpose(1, 2))[1]
