"""An attention backend that behaves like persistent kernels: the reference's values, computed while holding the SMs.

Importing this module makes the backend :data:`PERSISTENT` available on any device. Both its prefill and its decode hold
the SMs, as FlashAttention-3's do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.attention.backends import AttentionSetting, register_attention_backend
from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.attention.torch_backend import TorchAttentionBackend
from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    ForwardMode,
    GraphDecodeInputs,
    VerifyInputs,
)
from fenceline.memory_order import Device
from fenceline.memory_order.access import occupies_sm
from fenceline.memory_order.edges import StreamName

PERSISTENT = "torch_persistent"


class PersistentAttentionBackend(AttentionBackend):
    """The torch backend, with plans whose every layer uses the resource ``sm``."""

    def __init__(self, setting: AttentionSetting) -> None:
        self._device = setting.device
        self._reference = TorchAttentionBackend(setting.kv_pool, setting.rules)

    def persistent(self, mode: ForwardMode) -> bool:
        """See ``AttentionBackend.persistent``."""
        return True

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """See ``AttentionBackend.plan``."""
        return _Plan(self._device, self._reference.plan(inputs))

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        """See ``AttentionBackend.plan_graph``."""
        plan = self._reference.plan_graph(inputs)
        return None if plan is None else _Plan(self._device, plan)

    def plan_verify(self, inputs: VerifyInputs) -> AttentionPlan | None:
        """See ``AttentionBackend.plan_verify``."""
        plan = self._reference.plan_verify(inputs)
        return None if plan is None else _Plan(self._device, plan)

    def before_replay(self, bucket: int, seq_lens_cpu: npt.NDArray[np.int64]) -> None:
        """See ``AttentionBackend.before_replay``."""
        self._reference.before_replay(bucket, seq_lens_cpu)


class _Plan(AttentionPlan):
    def __init__(self, device: Device, plan: AttentionPlan) -> None:
        self._device = device
        self._plan = plan

    def prepare(self) -> None:
        self._plan.prepare()

    def forward(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See ``AttentionPlan.forward``."""
        self._device.declare(StreamName.FORWARD, "persistent attention", occupies_sm)
        return self._plan.forward(layer_id, q, k, v, scale)


register_attention_backend(PERSISTENT, PersistentAttentionBackend)
