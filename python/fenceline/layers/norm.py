"""RMSNorm (arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fenceline.layers.weight_slot import new_param


class RMSNorm(nn.Module):
    """x [..., size] → x / rms(x) * weight over the last axis; statistics in float32, result in x's type."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_param(size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
