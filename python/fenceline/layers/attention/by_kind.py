"""For models whose layers attend in different ways: each kind of layers has its own backend, and its own plan in each
step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.forward_batch import AttentionInputs, AttentionPlan, ForwardMode, GraphDecodeInputs, VerifyInputs


class BackendsByKind(AttentionBackend):
    """Several backends, each of which attends in some layers of the pool."""

    def __init__(self, parts: Sequence[tuple[Sequence[int], AttentionBackend]]) -> None:
        """``parts``: each backend with the layers in which it attends, as indices in the pool."""
        self.backends = tuple(backend for _, backend in parts)
        self._index = {layer: index for index, (layers, _) in enumerate(parts) for layer in layers}

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        return _Plans([backend.plan(inputs) for backend in self.backends], self._index)

    def persistent(self, mode: ForwardMode) -> bool:
        return any(backend.persistent(mode) for backend in self.backends)

    def is_compiled(self, mode: ForwardMode) -> bool:
        return all(backend.is_compiled(mode) for backend in self.backends)

    def begin_to_compile(self) -> None:
        for backend in self.backends:
            backend.begin_to_compile()

    def warm_up(self) -> None:
        for backend in self.backends:
            backend.warm_up()

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        return self._of_all([backend.plan_graph(inputs) for backend in self.backends])

    def plan_verify(self, inputs: VerifyInputs) -> AttentionPlan | None:
        return self._of_all([backend.plan_verify(inputs) for backend in self.backends])

    def _of_all(self, plans: Sequence[AttentionPlan | None]) -> AttentionPlan | None:
        made = [plan for plan in plans if plan is not None]
        return _Plans(made, self._index) if len(made) == len(plans) else None

    def before_replay(self, bucket: int, seq_lens_cpu: npt.NDArray[np.int64]) -> None:
        for backend in self.backends:
            backend.before_replay(bucket, seq_lens_cpu)


class _Plans(AttentionPlan):
    def __init__(self, plans: Sequence[AttentionPlan], index: Mapping[int, int]) -> None:
        self._plans, self._index = plans, index

    def prepare(self) -> None:
        for plan in self._plans:
            plan.prepare()

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return self._plans[self._index[layer_id]].forward(layer_id, q, k, v, scale)

    def forward_into(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        self._plans[self._index[layer_id]].forward_into(layer_id, q, k, v, scale, out)
