"""RMSNorm (arXiv:1910.07467)."""

from __future__ import annotations

import torch

from fenceline.layers.kernels.base import LayerKernels
from fenceline.layers.weight_slot import WeightSlots, whole


class RMSNorm:
    """x [..., size] → x / rms(x) * weight over the last axis."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, kernels: LayerKernels) -> None:
        self.eps = eps
        self.weight = torch.empty(size, dtype=dtype)
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of x's shape and dtype."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def weight_slots(self, name: str) -> WeightSlots:
        """The slot named ``{name}.weight``."""
        return {f"{name}.weight": whole(self.weight)}
