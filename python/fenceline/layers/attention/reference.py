"""The reference attention backend: softmax(scale q k^T) v by its definition, over gathered pages, on any device.

Tests judge the other backends by this one. Therefore it has one way for all batches: the tokens that requests may
attend to are gathered, a mask says which of them each query sees, and the rest is computed in float32, step by step.
On a GPU it is what ``--attention-backend torch`` names.

Nothing here makes the host wait for the device: shapes come from the ``*_cpu`` arrays, and indices are computed on the
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fenceline.config.kv_layout import INDEX
from fenceline.layers.attention.base import NO_RULES, PLAIN, AttentionBackend, LayerRules, window_of
from fenceline.layers.attention.block_selection import selected_blocks
from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    BlockQueries,
    ForwardMode,
    GraphDecodeInputs,
    IndexQueries,
    QueryTree,
    VerifyInputs,
)
from fenceline.layers.kernels.index_rows import unpacked
from fenceline.mem_cache.kv_pool import KVPool

_GATHER_BYTES = 256 << 20  # of keys and values that are gathered at once
_GRAPH_GATHERS = 4  # a graph gathers all requests at once; it may gather this many times as much
_QUERY_BLOCK = 128  # queries of a request that are computed at once
_MOST_SCORES = 1 << 24  # by which tokens are selected, that are computed at once
# Tokens past a request's end are read from the sink page, never from one that may belong to another request by now.
SINK_SLOT = 0


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """G requests, padded to ``max_seq_len``. The queries of each are the last nodes of a chain or a tree at its end."""

    page_table: torch.Tensor  # [num_rows, columns] int32
    rows: torch.Tensor  # [G] int64
    seq_lens: torch.Tensor  # [G] int64
    max_seq_len: int
    tree: QueryTree  # with the ancestors of these requests
    whole: tuple[tuple[int, int], ...] = ()  # (first, end) of queries that see one another, in a chain of queries alone

    def reads(self, page_size: int, window: int | None, align: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots [G, tokens] int32 that are read, and which of them each query sees: [G, queries, tokens] bool. The
        position of the first of them is a multiple of ``align``."""
        tree, seq_lens, num_tokens = self.tree, self.seq_lens[:, None], self.max_seq_len
        if window is not None:
            num_tokens = min(num_tokens, window + tree.num_nodes + align - 2)
        positions = torch.arange(num_tokens, device=seq_lens.device).expand(len(seq_lens), -1)
        if window is not None:
            positions = positions + (seq_lens - window - tree.num_nodes + 1).clamp(min=0) // align * align
        slots = slots_of(self.page_table, self.rows, positions, positions < seq_lens, page_size)
        start = seq_lens - tree.num_nodes
        visible = _visible(tree, (positions - start)[:, None], window)
        for first, end in self.whole:
            nodes, own = (positions - start)[:, None], torch.arange(first, end, device=start.device)[:, None]
            seen = (nodes >= first) & (nodes < end)
            visible[:, first:end] |= seen if window is None else seen & (nodes > own - window)
        # A query before the first token sees that one, so that its softmax has a key.
        own = start + torch.arange(tree.num_nodes - tree.num_queries, tree.num_nodes, device=start.device)
        return slots, visible | (own < 0)[:, :, None] & (positions == 0)[:, None]


def slots_of(
    page_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor, page_size: int
) -> torch.Tensor:
    """The slots [G, tokens] int32 of ``positions`` [G, tokens] of ``rows`` [G]; the sink's where not ``valid``."""
    columns = (positions // page_size).clamp(max=page_table.shape[1] - 1)
    pages = page_table.index_select(0, rows).gather(1, columns)
    return (pages * page_size + positions % page_size).masked_fill(~valid, SINK_SLOT).int()


def _visible(tree: QueryTree, nodes: torch.Tensor, window: int | None) -> torch.Tensor:
    """[G, queries, tokens] bool: which tokens each query attends to. ``nodes`` [G, 1, tokens]: the number of each token
    in its request's tree, negative before the tree."""
    numbers = torch.arange(tree.num_nodes, device=nodes.device)
    own = numbers[tree.num_nodes - tree.num_queries :, None]
    if tree.ancestors is None:
        depths, visible = own, nodes <= own
    else:
        assert window is None or window >= tree.num_nodes, f"a window of {window} tokens and a tree of {tree.num_nodes}"
        bits = tree.ancestors[:, :, None]
        depths = ((bits >> numbers & 1).bool() & (numbers != own)).sum(-1, keepdim=True)
        above = (bits >> nodes.clamp(0, 63) & 1).bool() & (nodes < tree.num_nodes)
        visible = (nodes < 0) | (nodes == own) | above
    return visible if window is None else visible & (nodes > depths - window)


class ReferencePlan(AttentionPlan):
    """``requests`` in the order of the T axis. What they read is gathered for one after the other."""

    def __init__(self, kv_pool: KVPool, rules: Mapping[int, LayerRules], requests: Sequence[Requests]) -> None:
        self._kv_pool, self._rules, self._window = kv_pool, rules, window_of(rules)
        self._requests = requests
        self._reads: list[tuple[torch.Tensor, torch.Tensor]] = []

    def prepare(self) -> None:
        self._reads = [some.reads(self._kv_pool.page_size, self._window) for some in self._requests]

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return self._attend_over(self._reads, layer_id, q, k.shape[1], scale)

    def forward_selected(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        tokens: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        reads = [(slots, selected) for (slots, _), selected in zip(self._reads, tokens, strict=True)]
        return self._attend_over(reads, layer_id, q, k.shape[1], scale)

    def select(self, layer_id: int, index: IndexQueries) -> Sequence[torch.Tensor]:
        """For each read which tokens each query attends to, in the form of ``Requests.reads``. Where a query sees
        no more than ``top_k`` these are all, and attention is what it is without an indexer."""
        keys_of_layer, selected, first = self._kv_pool.row(layer_id, INDEX).squeeze(1), [], 0
        for slots, visible in self._reads:
            num_queries, last = visible.shape[1], first + len(slots) * visible.shape[1]
            keys = unpacked(keys_of_layer.index_select(0, slots.view(-1))).unflatten(0, slots.shape)
            queries = index.queries[first:last].unflatten(0, (-1, num_queries)).float()
            weights, first = index.weights[first:last].unflatten(0, (-1, num_queries)), last
            step, blocks = max(_MOST_SCORES // (queries.shape[2] * slots.numel()), 1), []
            for own, weight, mask in zip(*(x.split(step, 1) for x in (queries, weights, visible)), strict=True):
                scores = self.index_scores(own, keys, weight).masked_fill(~mask, float("-inf"))
                blocks.append(mask & index.best(scores, index.top_k))
            selected.append(torch.cat(blocks, 1))
        return selected

    def select_blocks(self, layer_id: int, wanted: BlockQueries) -> Sequence[torch.Tensor]:
        """For each read which tokens each query attends to with each key head: [G, num_kv_heads, queries, tokens]
        bool."""
        rows, blocks, selected, first = self._kv_pool.row(layer_id, INDEX), wanted.blocks, [], 0
        means_of_layer = rows.view(-1, rows.shape[1], rows.shape[2] * blocks.stride)
        for slots, visible in self._reads:
            num_queries, num_tokens, last = *visible.shape[1:], first + len(slots) * visible.shape[1]
            # Of whole blocks, from the first token on; the means of groups that are not full are not read.
            groups = F.pad(slots, (0, -num_tokens % blocks.size), value=SINK_SLOT)[:, :: blocks.stride] // blocks.stride
            num_seen = visible.sum(-1)
            ends = torch.arange(1, groups.shape[1] + 1, device=slots.device) * blocks.stride
            full = ends <= num_seen.amax(1, keepdim=True)
            means = means_of_layer.index_select(0, groups.view(-1)).unflatten(0, groups.shape).float()
            means = means.masked_fill(~full[..., None, None], 0.0)
            queries, first = wanted.queries[first:last].unflatten(0, (-1, num_queries)).float(), last
            step, tokens = max(_MOST_SCORES // (queries.shape[2] * groups.numel()), 1), []
            for own, seen, mask in zip(*(x.split(step, 1) for x in (queries, num_seen, visible)), strict=True):
                chosen = selected_blocks(own, means, seen, wanted, self.products)
                tokens.append(chosen.repeat_interleave(blocks.size, -1)[..., :num_tokens] & mask.unsqueeze(1))
            selected.append(torch.cat(tokens, 2))
        return selected

    def products(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """rows [..., n, features] and keys [..., m, features], float32 → [..., n, m]."""
        return rows @ keys.transpose(-1, -2)

    def index_scores(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """q [G, queries, heads, features], k [G, tokens, features], weights [G, queries, heads], all float32 → [G,
        queries, tokens]: see ``IndexQueries``. Sums of zeros are +0, whatever the signs of weights."""
        products = (q.flatten(1, 2) @ k.transpose(1, 2)).unflatten(1, q.shape[1:3]).relu()
        return (products * weights.unsqueeze(-1)).sum(2)

    def _attend_over(
        self,
        reads: Sequence[tuple[torch.Tensor, torch.Tensor]],
        layer_id: int,
        q: torch.Tensor,
        num_kv_heads: int,
        scale: float,
    ) -> torch.Tensor:
        assert self._reads, "prepare comes first"
        rules, outputs, first = self._rules.get(layer_id, PLAIN), [], 0
        for slots, visible in reads:
            visible = visible if visible.dim() == 4 else visible.unsqueeze(1)  # with an axis of key heads
            num_queries, last = visible.shape[2], first + len(slots) * visible.shape[2]
            keys, values = (
                rows.unflatten(0, slots.shape).transpose(1, 2)
                for rows in gathered(self._kv_pool, layer_id, rules, slots.view(-1), q.dtype)
            )
            queries = q[first:last].unflatten(0, (-1, num_queries)).unflatten(2, (num_kv_heads, -1))
            blocks, first = [], last
            for own, mask in zip(queries.split(_QUERY_BLOCK, 1), visible.split(_QUERY_BLOCK, 2), strict=True):
                # The heads that share a KV head are further rows: [G, num_kv_heads, group * queries, head_dim].
                own, mask = own.permute(0, 2, 3, 1, 4), mask.repeat(1, 1, own.shape[3], 1)
                sinks = rules.sinks
                if sinks is not None:
                    sinks = sinks.view(num_kv_heads, -1).repeat_interleave(own.shape[3], 1)
                rows = self.attend(own.flatten(2, 3), keys, values, mask, scale, replace(rules, sinks=sinks))
                blocks.append(rows.unflatten(2, own.shape[2:4]).permute(0, 3, 1, 2, 4))
            outputs.append(torch.cat(blocks, 1).flatten(2, 3).flatten(0, 1))
        return torch.cat(outputs)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, rules: LayerRules
    ) -> torch.Tensor:
        """q [G, num_kv_heads, rows, head_dim] over k and v [G, num_kv_heads, tokens, head_dim] → like q. ``visible``
        [G, 1 or num_kv_heads, rows, tokens], at least one token for each row; sinks [num_kv_heads, rows]."""
        scores = q.float() @ k.float().transpose(2, 3) * scale
        if rules.soft_cap:
            scores = torch.tanh(scores / rules.soft_cap) * rules.soft_cap
        scores = scores.masked_fill(~visible, float("-inf"))
        if rules.sinks is not None:
            scores = torch.cat((scores, rules.sinks[..., None].expand(*scores.shape[:3], 1)), -1)
        return (torch.softmax(scores, -1)[..., : k.shape[2]] @ v.float()).to(q.dtype)


class ReferenceAttentionBackend(AttentionBackend):
    """Plans over one KV pool. Keeps no state between batches, so plans never share memory."""

    plan_type = ReferencePlan

    def __init__(self, kv_pool: KVPool, rules: Mapping[int, LayerRules] = NO_RULES) -> None:
        self.kv_pool, self.rules, self.window = kv_pool, rules, window_of(rules)
        self._max_tokens = max_tokens(kv_pool, _GATHER_BYTES)

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """See ``AttentionBackend.plan``. The requests of an extend step are computed one after the other."""
        inputs.check()
        if inputs.mode is ForwardMode.DECODE:
            requests = self._together(inputs, inputs.seq_lens_cpu, QueryTree(1, 1))
        else:
            lens = zip(inputs.seq_lens_cpu.tolist(), inputs.query_lens_cpu.tolist(), strict=True)
            requests = [
                Requests(
                    inputs.page_table, rows, seq_lens, num_tokens, QueryTree(num_queries, num_queries),
                    tuple([(first, end) for one, first, end in inputs.whole if one == index]),
                )
                for index, (rows, seq_lens, (num_tokens, num_queries)) in enumerate(
                    zip(inputs.rows.split(1), inputs.seq_lens.split(1), lens, strict=True)
                )
            ]  # fmt: skip
        plan = self.plan_type(self.kv_pool, self.rules, requests)
        plan.prepare()
        return plan

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        """A plan that pads all requests to the longest possible length, so only small contexts can be captured."""
        most = inputs.max_seq_len if self.window is None else min(inputs.max_seq_len, self.window)
        if len(inputs.rows) * most > self._max_tokens * _GRAPH_GATHERS:
            return None
        tree = QueryTree(1, 1)
        requests = Requests(inputs.page_table, inputs.rows, inputs.seq_lens, inputs.max_seq_len, tree)
        return self.plan_type(self.kv_pool, self.rules, [requests])

    def plan_verify(self, inputs: VerifyInputs) -> AttentionPlan | None:
        """See ``AttentionBackend.plan_verify``. Requests are padded to the bounds of their lengths."""
        inputs.tree.check(len(inputs.rows))
        requests = self._together(inputs, inputs.max_seq_lens_cpu, inputs.tree)
        return self.plan_type(self.kv_pool, self.rules, requests)

    def _together(
        self, inputs: AttentionInputs | VerifyInputs, lens: npt.NDArray[np.int64], tree: QueryTree
    ) -> list[Requests]:
        """As many requests of ``lens`` tokens at a time as may be gathered if all are as long as the longest."""
        longest = int(lens.max())
        if self.window is not None:
            longest = min(longest, self.window + tree.num_nodes - 1)
        step, requests = max(self._max_tokens // longest, 1), []
        for first in range(0, len(lens), step):
            some = slice(first, first + step)
            ancestors = None if tree.ancestors is None else tree.ancestors[some]
            own, most = replace(tree, ancestors=ancestors), int(lens[some].max())
            requests.append(Requests(inputs.page_table, inputs.rows[some], inputs.seq_lens[some], most, own))
        return requests


def gathered(
    kv_pool: KVPool, layer_id: int, rules: LayerRules, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values in ``slots`` [N], each [N, num_kv_heads, head_dim]: one tensor if one row holds both."""
    keys, values = (kv_pool.row(layer_id, name) for name in rules.rows)
    k = keys.index_select(0, slots).to(dtype)
    return k, k if values is keys else values.index_select(0, slots).to(dtype)


def max_tokens(kv_pool: KVPool, nbytes: int) -> int:
    """Of how many tokens, at least one, the keys and values of a layer take at most ``nbytes``."""
    return max(nbytes // sum(row[0].nbytes for row in kv_pool.rows[0].values()), 1)
