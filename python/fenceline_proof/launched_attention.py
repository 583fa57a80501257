"""Our own attention kernels on the virtual GPU: the launches of the ``triton`` backend with the kernels' declared
accesses, and the values of the reference.

Importing this module makes the backends :data:`LAUNCHED` and :data:`REFERENCE` available on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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

    def __init__(self, k: torch.Tensor, v: torch.Tensor, page_size: int, dtype: torch.dtype) -> None:
        self.rows, self.page_size, self.dtype = [{"k": k, "v": v}], page_size, dtype

    def row(self, layer: int, name: str) -> torch.Tensor:
        return self.rows[layer][name]


class _Plan(AttentionPlan):
    def __init__(
        self, backend: LaunchedAttentionBackend, inputs: AttentionInputs | GraphDecodeInputs | VerifyInputs, method: str
    ) -> None:
        """``method``: that of the reference which makes such a plan."""
        self._backend, self._inputs, self._method = backend, inputs, method

    def _plan_again(self, pool: _Layer, rules: LayerRules, tensors: Sequence[torch.Tensor]) -> AttentionPlan:
        """The reference's plan, with the inputs as they are when it runs."""
        page_table, rows, seq_lens, *ancestors = tensors
        given: Any = replace(self._inputs, page_table=page_table, rows=rows, seq_lens=seq_lens)
        if ancestors:
            given = replace(given, tree=replace(given.tree, ancestors=ancestors[0]))
        backend = ReferenceAttentionBackend(pool, {0: rules})  # type: ignore[arg-type]
        plan: AttentionPlan = getattr(backend, self._method)(given)
        plan.prepare()
        return plan

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        pool, inputs = self._backend.kv_pool, self._inputs
        rules = self._backend.rules.get(layer_id, PLAIN)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        caches = tuple(pool.row(layer_id, name) for name in rules.rows)
        requests = inputs.page_table, inputs.rows, inputs.seq_lens
        extends = _extends(inputs)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *rest: Any) -> None:
            tree = rest[7:8] if isinstance(inputs, VerifyInputs) else ()
            layer, tensors = _Layer(k, v, pool.page_size, q.dtype), rest[1:4] if extends else (*rest[:3], *tree)
            new = _new_tokens(layer, inputs, tensors) if extends else slice(len(q))
            plan = self._plan_again(layer, replace(rules, sinks=rest[-1], rows=PLAIN.rows), tensors)
            out.copy_(plan.forward(0, q, k[new].to(q.dtype), v[new].to(q.dtype), scale))

        beside = rules.window, rules.sinks
        if extends:
            assert isinstance(inputs, AttentionInputs)
            starts = inputs.query_starts
            memory = (q, *caches, out, None, *requests, starts)
            accesses.extend_attention.launch(attend, *memory, pool.page_size, *beside)
        else:
            work = self._backend.workspace
            tree = inputs.tree if isinstance(inputs, VerifyInputs) else QueryTree(1, 1)
            nodes = tree.ancestors, tree.num_queries, tree.num_nodes
            operands = (q, *caches, out, *requests, *work, pool.page_size, *nodes, *beside)
            accesses.decode_attention.launch(attend, *operands)
            if rules.shared:
                accesses.merge_pieces.launch(lambda *_: None, *work[:2], inputs.seq_lens, out)
        return out

    def select(self, layer_id: int, index: IndexQueries) -> Sequence[torch.Tensor]:
        """See ``select_tokens.select_tokens``."""
        pool, inputs, num = self._backend.kv_pool, self._inputs, len(index.queries)
        tree = inputs.tree if isinstance(inputs, VerifyInputs) else QueryTree(1, 1)
        longest, device = inputs.page_table.shape[1] * pool.page_size, index.queries.device
        keys = torch.empty(num, longest, device=device)
        slots = torch.empty(num, min(index.top_k, longest), dtype=torch.int32, device=device)
        counts = torch.empty(num, dtype=torch.int64, device=device)

        def read(
            table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, ancestors: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """The slots [queries, tokens] of each query's request, and which of them it sees."""
            if _extends(inputs):
                assert isinstance(inputs, AttentionInputs)
                lens = torch.from_numpy(inputs.query_lens_cpu)
                behind = torch.cat([torch.arange(int(n), 0, -1) for n in lens])
                rows, seq_lens = rows.repeat_interleave(lens), seq_lens.repeat_interleave(lens) - behind + 1
            given = Requests(table, rows, seq_lens, longest, replace(tree, ancestors=ancestors))
            where, visible = given.reads(pool.page_size, None)
            return where.repeat_interleave(tree.num_queries, 0), visible.flatten(0, 1)

        def score(
            queries: torch.Tensor, weights: torch.Tensor, cache_rows: torch.Tensor, table: torch.Tensor,
            rows: torch.Tensor, seq_lens: torch.Tensor, keys: torch.Tensor, _: int, ancestors: torch.Tensor | None,
        ) -> None:  # fmt: skip
            where, visible = read(table, rows, seq_lens, ancestors)
            of_query = unpacked(cache_rows[:, 0].index_select(0, where.flatten())).unflatten(0, where.shape)
            products = (queries.float() @ of_query.transpose(1, 2)).relu()
            keys.copy_((products * weights.unsqueeze(-1)).sum(1).masked_fill(~visible, float("-inf")))

        def choose(
            keys: torch.Tensor, table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor,
            ancestors: torch.Tensor | None, slots: torch.Tensor, counts: torch.Tensor,
        ) -> None:  # fmt: skip
            where, visible = read(table, rows, seq_lens, ancestors)
            for i, chosen in enumerate(visible & index.best(keys, index.top_k)):
                found = where[i][chosen]
                slots[i, : len(found)], counts[i] = found, len(found)

        requests = inputs.page_table, inputs.rows, inputs.seq_lens
        rows, sizes = pool.row(layer_id, INDEX), (pool.page_size, tree.ancestors)
        accesses.score_keys.launch(score, index.queries, index.weights, rows, *requests, keys, *sizes)
        accesses.select_best.launch(choose, keys, *requests, tree.ancestors, slots, counts)
        return slots, counts

    def forward_selected(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
        tokens: Sequence[torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """See ``TritonAttentionBackend.attend_to``."""
        pool, rules, work = self._backend.kv_pool, self._backend.rules[layer_id], self._backend.workspace
        (slots, counts), out = tokens, torch.empty(q.shape, dtype=q.dtype, device=q.device)
        caches, ones = tuple(pool.row(layer_id, name) for name in rules.rows), np.ones(len(q), np.int64)

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, slots: torch.Tensor,
            lists: torch.Tensor, counts: torch.Tensor, *_: torch.Tensor,
        ) -> None:  # fmt: skip
            inputs = AttentionInputs(ForwardMode.DECODE, slots, lists, counts, ones * slots.shape[1], ones)
            layer = _Layer(k, v, 1, q.dtype)
            plan = ReferenceAttentionBackend(layer, {0: replace(rules, rows=PLAIN.rows)}).plan(inputs)  # type: ignore[arg-type]
            out.copy_(plan.forward(0, q, k[: len(q)], v[: len(q)], scale))

        lists = self._backend.lists[: len(q)]
        accesses.list_attention.launch(attend, q, *caches, out, slots, lists, counts, *work)
        accesses.merge_pieces.launch(lambda *_: None, *work[:2], counts, out)
        return out


def _extends(inputs: AttentionInputs | GraphDecodeInputs | VerifyInputs) -> bool:
    return isinstance(inputs, AttentionInputs) and inputs.mode is ForwardMode.EXTEND


def _new_tokens(
    layer: _Layer, inputs: AttentionInputs | GraphDecodeInputs | VerifyInputs, tensors: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Slots of the step's own tokens, which have been written to the pool before."""
    assert isinstance(inputs, AttentionInputs)
    page_table, rows, seq_lens = tensors
    slots = []
    for row, length, new in zip(rows.tolist(), seq_lens.tolist(), inputs.query_lens_cpu.tolist(), strict=True):
        at = torch.arange(length - new, length)
        slots.append(page_table[row][at // layer.page_size].long() * layer.page_size + at % layer.page_size)
    return torch.cat(slots)


register_attention_backend(LAUNCHED, _make)
register_attention_backend(REFERENCE, lambda setting: ReferenceAttentionBackend(setting.kv_pool, setting.rules))
