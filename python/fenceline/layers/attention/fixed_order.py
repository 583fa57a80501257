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
from fenceline.layers.attention.reference import SINK_SLOT, ReferenceAttentionBackend, ReferencePlan, Requests, slots_of
from fenceline.layers.kernels.fixed_order import try_products
from fenceline.mem_cache.kv_pool import KVPool

_SEGMENT = 64
_ROWS = 16


class _FixedOrderPlan(ReferencePlan):
    def prepare(self) -> None:
        """Of each request whole segments are gathered; its last one ends with the sink's tokens, which are hidden."""
        self._reads = []
        for some in self._requests:
            if some.tree.ancestors is None:
                slots, visible = some.reads(self._kv_pool.page_size, self._window, _SEGMENT)
            else:
                slots, visible = _paths(some, some.tree.ancestors, self._kv_pool.page_size, self._window)
            missing = (0, -slots.shape[1] % _SEGMENT)
            self._reads.append((F.pad(slots, missing, value=SINK_SLOT), F.pad(visible, missing)))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, rules: LayerRules
    ) -> torch.Tensor:
        hidden = ~visible.unflatten(3, (-1, _SEGMENT)).transpose(2, 3)
        k, v = (x.new_empty(x.shape, dtype=torch.float32).copy_(x).unflatten(2, (-1, _SEGMENT)) for x in (k, v))
        outputs = []
        for first in range(0, q.shape[2], _ROWS):
            rows = slice(first, first + _ROWS)
            sinks = None if rules.sinks is None else rules.sinks[:, rows]
            tile = q[:, :, rows].float()
            outputs.append(_attend_tile(tile, k, v, hidden[..., rows, :], scale, rules.soft_cap, sinks))
        return torch.cat(outputs, 2).to(q.dtype)

    def products(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        num_rows, num_keys = rows.shape[-2], keys.shape[-2]
        rows = F.pad(rows, (0, 0, 0, -num_rows % _ROWS)).unflatten(-2, (-1, 1, _ROWS))
        keys = F.pad(keys, (0, 0, 0, -num_keys % _SEGMENT)).unflatten(-2, (1, -1, _SEGMENT)).transpose(-1, -2)
        shape = torch.broadcast_shapes(rows.shape[:-2], keys.shape[:-2])
        tiles = (x.expand(*shape, *x.shape[-2:]).flatten(0, -3) for x in (rows, keys))
        products = torch.bmm(*tiles).unflatten(0, shape).transpose(-2, -3).flatten(-2).flatten(-3, -2)
        return products[..., :num_rows, :num_keys]

    def index_scores(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        num_heads, segments = q.shape[2], k.unflatten(1, (-1, _SEGMENT)).transpose(2, 3)
        scores = q.new_zeros(*q.shape[:2], k.shape[1])
        for first in range(0, num_heads, _ROWS):
            rows = F.pad(q[:, :, first : first + _ROWS], (0, 0, 0, max(first + _ROWS - num_heads, 0)))
            # [G, queries, segments, _ROWS, _SEGMENT]: every product has the same shape.
            tiles = [rows.unsqueeze(2), segments.unsqueeze(1)]
            shape = (*q.shape[:2], segments.shape[1])
            rows, keys = (x.expand(*shape, -1, -1).flatten(0, 2) for x in tiles)
            products = (rows @ keys).relu().unflatten(0, shape).transpose(2, 3).flatten(3)
            for head in range(first, min(first + _ROWS, num_heads)):
                scores += products[:, :, head - first] * weights[:, :, head, None]
        return scores


def _attend_tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """At most ``_ROWS`` rows of q [G, heads, rows, head_dim] over k and v [G, heads, segments, _SEGMENT, head_dim] →
    like q, all in float32. ``hidden`` [G, 1 or heads, segments, rows, _SEGMENT]; sinks [heads, rows]."""
    num_rows, num_segments = q.shape[2], k.shape[2]
    to_tile = (0, 0, 0, _ROWS - num_rows)  # only products need whole tiles
    tiles = F.pad(q, to_tile).unsqueeze(2).expand(-1, -1, num_segments, -1, -1).flatten(0, 2)
    products = (tiles @ k.flatten(0, 2).transpose(1, 2)).unflatten(0, k.shape[:3])
    scores = products[..., :num_rows, :] * scale
    if soft_cap:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores.masked_fill_(hidden, float("-inf"))
    largest = scores.amax((2, 4))
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    weights = scores.sub_(largest[:, :, None, :, None]).exp_()
    parts = (F.pad(weights, to_tile).flatten(0, 2) @ v.flatten(0, 2)).unflatten(0, k.shape[:3])[..., :num_rows, :]
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
