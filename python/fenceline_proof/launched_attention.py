"""Our own attention kernels on the virtual GPU: the launches of the ``triton`` backend with the kernels' declared
accesses, and the values of the reference.

Importing this module makes the backends :data:`LAUNCHED` and :data:`REFERENCE` available on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import torch

from fenceline.config.kv_layout import INDEX
from fenceline.layers.attention.backends import AttentionSetting, register_attention_backend
from fenceline.layers.attention.base import PLAIN, AttentionBackend, LayerRules
from fenceline.layers.attention.reference import ReferenceAttentionBackend, Requests
from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    ForwardMode,
    GraphDecodeInputs,
    IndexQueries,
    QueryTree,
    VerifyInputs,
)
from fenceline.layers.kernels import accesses
from fenceline.layers.kernels.index_rows import unpacked
from fenceline.memory_order.kernel import is_watched
from fenceline_sim.kernels import launch_function

LAUNCHED = "launched"
REFERENCE = "reference"
_WORKSPACE = 1 << 10  # elements; its size has no effect
_MOST_LISTS = 1 << 10  # of selected tokens in a step


def _make(setting: AttentionSetting) -> AttentionBackend:
    """On a device that watches its memory; elsewhere the reference itself, whose values are the same."""
    if is_watched(setting.kv_pool.device):
        return LaunchedAttentionBackend(setting)
    return ReferenceAttentionBackend(setting.kv_pool, setting.rules)


class LaunchedAttentionBackend(AttentionBackend):
    """Plans over one KV pool, which share a workspace as those of ``TritonAttentionBackend`` do."""

    def __init__(self, setting: AttentionSetting) -> None:
        self.kv_pool, self.rules = setting.kv_pool, setting.rules
        self._reference = ReferenceAttentionBackend(setting.kv_pool, setting.rules)
        device = setting.kv_pool.device
        self.workspace = [
            torch.zeros(_WORKSPACE, dtype=dtype, device=device) for dtype in (torch.float32, torch.float32, torch.int32)
        ]
        self.lists = torch.arange(_MOST_LISTS, device=device)

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        return _Plan(self, inputs, "plan")

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        return None if self._reference.plan_graph(inputs) is None else _Plan(self, inputs, "plan_graph")

    def plan_verify(self, inputs: VerifyInputs) -> AttentionPlan | None:
        return _Plan(self, inputs, "plan_verify")


class _Layer:
    """A KV pool of one layer, on the CPU. ``dtype``: the model's; a cache in FP8 has another."""

    def __init__(self, caches: Sequence[torch.Tensor], page_size: int, dtype: torch.dtype) -> None:
        self.rows, self.page_size, self.dtype = [dict(zip(PLAIN.rows, caches, strict=True))], page_size, dtype

    def row(self, layer: int, name: str) -> torch.Tensor:
        return self.rows[layer][name]


class _Plan(AttentionPlan):
    def __init__(
        self, backend: LaunchedAttentionBackend, inputs: AttentionInputs | GraphDecodeInputs | VerifyInputs, method: str
    ) -> None:
        """``method``: that of the reference which makes such a plan."""
        self._backend, self._inputs, self._method = backend, inputs, method
        self._requests = inputs.page_table, inputs.rows, inputs.seq_lens
        self._tree = inputs.tree if isinstance(inputs, VerifyInputs) else QueryTree(1, 1)

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        pool, inputs, tree = self._backend.kv_pool, self._inputs, self._tree
        rules = self._backend.rules.get(layer_id, PLAIN)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        caches, beside = tuple(pool.row(layer_id, name) for name in rules.rows), (rules.window, rules.sinks)
        args = out, q, caches, inputs, rules, pool.page_size, self._method, scale
        if _extends(inputs):
            operands = q, *caches, out, None, *self._requests, inputs.query_starts, pool.page_size, *beside
            launch_function(accesses.extend_attention, _attend, args, operands)
            return out
        work, nodes = self._backend.workspace, (tree.ancestors, tree.num_queries, tree.num_nodes)
        operands = q, *caches, out, *self._requests, *work, pool.page_size, *nodes, *beside
        launch_function(accesses.decode_attention, _attend, args, operands)
        if rules.shared:
            accesses.merge_pieces.launch(lambda *_: None, *work[:2], inputs.seq_lens, out)
        return out

    def select(self, layer_id: int, index: IndexQueries) -> Sequence[torch.Tensor]:
        pool, inputs, num = self._backend.kv_pool, self._inputs, len(index.queries)
        longest, device, tree = inputs.page_table.shape[1] * pool.page_size, index.queries.device, self._tree
        keys = torch.empty(num, longest, device=device)
        slots = torch.empty(num, min(index.top_k, longest), dtype=torch.int32, device=device)
        counts = torch.empty(num, dtype=torch.int64, device=device)

        def read(
            table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, tree: QueryTree
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """The slots [queries, tokens] of each query's request, and which of them it sees."""
            if _extends(inputs):
                lens = torch.from_numpy(inputs.query_lens_cpu)
                behind = torch.cat([torch.arange(int(n), 0, -1) for n in lens])
                rows, seq_lens = rows.repeat_interleave(lens), seq_lens.repeat_interleave(lens) - behind + 1
            where, visible = Requests(table, rows, seq_lens, longest, tree).reads(pool.page_size, None)
            return where.repeat_interleave(tree.num_queries, 0), visible.flatten(0, 1)

        def score(keys: torch.Tensor, index: IndexQueries, cache_rows: torch.Tensor, *requests: Any) -> None:
            where, visible = read(*requests)
            of_query = unpacked(cache_rows[:, 0].index_select(0, where.flatten())).unflatten(0, where.shape)
            products = (index.queries.float() @ of_query.transpose(1, 2)).relu()
            keys.copy_((products * index.weights.unsqueeze(-1)).sum(1).masked_fill(~visible, float("-inf")))

        def choose(keys: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, *requests: Any) -> None:
            where, visible = read(*requests)
            for i, chosen in enumerate(visible & index.best(keys, index.top_k)):
                found = where[i][chosen]
                slots[i, : len(found)], counts[i] = found, len(found)

        rows, requests = pool.row(layer_id, INDEX), (*self._requests, tree)
        operands = index.queries, index.weights, rows, *self._requests, keys, pool.page_size, tree.ancestors
        launch_function(accesses.score_keys, score, (keys, index, rows, *requests), operands)
        made, read_too = (slots, counts), (*self._requests, tree.ancestors)
        launch_function(accesses.select_best, choose, (keys, *made, *requests), (keys, *read_too, *made))
        return slots, counts

    def forward_selected(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
        tokens: Sequence[torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        pool, rules, work = self._backend.kv_pool, self._backend.rules[layer_id], self._backend.workspace
        (slots, counts), out = tokens, torch.empty(q.shape, dtype=q.dtype, device=q.device)
        caches, ones = tuple(pool.row(layer_id, name) for name in rules.rows), np.ones(len(q), np.int64)

        lists = self._backend.lists[: len(q)]
        inputs = AttentionInputs(ForwardMode.DECODE, slots, lists, counts, ones * slots.shape[1], ones)
        args = out, q, caches, inputs, rules, 1, "plan", scale
        launch_function(accesses.list_attention, _attend, args, (q, *caches, out, slots, lists, counts, *work))
        accesses.merge_pieces.launch(lambda *_: None, *work[:2], counts, out)
        return out


def _attend(
    out: torch.Tensor, q: torch.Tensor, caches: Sequence[torch.Tensor], inputs: Any, rules: LayerRules, page_size: int,
    method: str, scale: float,
) -> None:  # fmt: skip
    """By the reference's plan, with the inputs as they are when it runs."""
    layer: Any = _Layer(caches, page_size, q.dtype)
    plan = getattr(ReferenceAttentionBackend(layer, {0: replace(rules, rows=PLAIN.rows)}), method)(inputs)
    plan.prepare()
    out.copy_(plan.forward(0, q, *caches, scale))


def _extends(inputs: AttentionInputs | GraphDecodeInputs | VerifyInputs) -> TypeGuard[AttentionInputs]:
    return isinstance(inputs, AttentionInputs) and inputs.mode is ForwardMode.EXTEND


register_attention_backend(LAUNCHED, _make)
register_attention_backend(REFERENCE, lambda setting: ReferenceAttentionBackend(setting.kv_pool, setting.rules))
