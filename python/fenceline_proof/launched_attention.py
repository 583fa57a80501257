"""Our own attention kernels on the virtual GPU: the launches of the ``triton`` backend with the kernels' declared
accesses, and the values of the reference.

Importing this module makes the backends :data:`LAUNCHED` and :data:`REFERENCE` available on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fenceline.layers.attention.backends import AttentionSetting, register_attention_backend
from fenceline.layers.attention.base import PLAIN, AttentionBackend, LayerRules
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    ForwardMode,
    GraphDecodeInputs,
    QueryTree,
    VerifyInputs,
)
from fenceline.layers.kernels import accesses
from fenceline.memory_order.kernel import is_watched

LAUNCHED = "launched"
REFERENCE = "reference"
_WORKSPACE = 1 << 10  # elements; its size has no effect


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
        extends = isinstance(inputs, AttentionInputs) and inputs.mode is ForwardMode.EXTEND

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
