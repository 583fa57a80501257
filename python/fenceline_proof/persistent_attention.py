"""An attention backend that behaves like persistent kernels: the reference's values, computed while holding the SMs.

Importing this module makes the backend :data:`PERSISTENT` available on any device. Both its prefill and its decode hold
the SMs, as FlashAttention-3's do. A graph reads the page table from memory of its plan, which is zero when the plan has
been made and is written by each replay.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fenceline.layers.attention.backends import AttentionSetting, register_attention_backend
from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.forward_batch import AttentionInputs, AttentionPlan, ForwardMode, GraphDecodeInputs, VerifyInputs
from fenceline.memory_order import Device
from fenceline.memory_order.access import occupies_sm
from fenceline.memory_order.edges import StreamName

PERSISTENT = "torch_persistent"


class PersistentAttentionBackend(AttentionBackend):
    """The reference, with plans whose every layer uses the resource ``sm``."""

    def __init__(self, setting: AttentionSetting) -> None:
        self._device, self._page_size = setting.device, setting.kv_pool.page_size
        self._reference = ReferenceAttentionBackend(setting.kv_pool, setting.rules)

    def persistent(self, mode: ForwardMode) -> bool:
        return True

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        return _Plan(self._device, self._reference.plan(inputs))

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        num_columns = -(-inputs.max_seq_len // self._page_size)
        table = torch.zeros_like(inputs.page_table[: len(inputs.rows), :num_columns])
        rows = torch.arange(len(inputs.rows), device=table.device)
        plan = self._reference.plan_graph(replace(inputs, page_table=table, rows=rows))
        return None if plan is None else _GraphPlan(self._device, plan, inputs, table)

    def plan_verify(self, inputs: VerifyInputs) -> AttentionPlan | None:
        plan = self._reference.plan_verify(inputs)
        return None if plan is None else _Plan(self._device, plan)


class _Plan(AttentionPlan):
    def __init__(self, device: Device, plan: AttentionPlan) -> None:
        self._device = device
        self._plan = plan

    def prepare(self) -> None:
        self._plan.prepare()

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        self._device.declare(StreamName.FORWARD, "persistent attention", occupies_sm)
        return self._plan.forward(layer_id, q, k, v, scale)


class _GraphPlan(_Plan):
    def __init__(self, device: Device, plan: AttentionPlan, inputs: GraphDecodeInputs, table: torch.Tensor) -> None:
        super().__init__(device, plan)
        self._inputs, self._table = inputs, table

    def prepare(self) -> None:
        rows = self._inputs.page_table.index_select(0, self._inputs.rows)
        self._table.copy_(rows[:, : self._table.shape[1]])
        super().prepare()


register_attention_backend(PERSISTENT, PersistentAttentionBackend)
