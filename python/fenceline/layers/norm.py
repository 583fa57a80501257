"""RMSNorm (arXiv:1910.07467): its parameters. What computes it is in layers/kernels."""

from __future__ import annotations

import torch
from torch import nn

from fenceline.layers.weight_slot import new_param


class RMSNorm(nn.Module):
    """x [..., size] → x / rms(x) * weight over the last axis."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_param(size, dtype=dtype)
