"""The gated activation of Llama-like MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's product (arXiv:2002.05202): silu(gate) * up, element by element; both [T, size]."""
    return F.silu(gate).mul_(up)
