"""Weight: one matrix of a layer in some number format, and the products that read it.

A linear layer holds a Weight and never looks inside. A new format (FP8, INT4) is a new subclass: it says where a
checkpoint's tensors go and how it is multiplied. ``product`` is all that it must have. The other products are the ones
that a decoder layer is made of; a kind whose kernels fuse them overrides them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F

from fenceline.layers.norm import RMSNorm
from fenceline.layers.weight_slot import WeightSlot, WeightSlots


class Weight(ABC):
    """A matrix [out_features, in_features].

    All products run on the current stream and never make the host wait. Activations are contiguous [T, features] in the
    model's dtype; sums are at least float32. A bias is [out_features].
    """

    kind: ClassVar[str]  # the number format: "dense"

    def __init__(self, out_features: int, in_features: int) -> None:
        self.shape = (out_features, in_features)

    @abstractmethod
    def slots(self, name: str, rows: slice, full_shape: tuple[int, int], dim: int, start: int) -> WeightSlots:
        """Where the checkpoint's tensors of the matrix ``name`` go: into ``rows`` of this one.

        This rank keeps the part that begins at ``start`` along ``dim`` of the whole matrix of ``full_shape``.
        """

    @abstractmethod
    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K] @ weight [N, K] transposed + bias → [T, N], in ``out`` if given."""

    def normed_product(
        self,
        x: torch.Tensor,
        norm: RMSNorm,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product of norm(x)."""
        return self.product(norm.forward(x), bias, out)

    def gated_product(self, x: torch.Tensor, norm: RMSNorm, bias: torch.Tensor | None) -> torch.Tensor:
        """SwiGLU's product (arXiv:2002.05202) of norm(x): the first half of the rows are gates, the second what they
        gate. silu(gate) * up, [T, N / 2]."""
        return norm.kernels.silu_and_mul(self.normed_product(x, norm, bias))

    def add_product(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``residual`` [T, N] += the product of x, in place; returns ``residual``."""
        return residual.add_(self.product(x, bias))


class DenseWeight(Weight):
    """Plain floating-point numbers, multiplied by torch's operators: the reference on any device."""

    kind = "dense"

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        """Uninitialised, on the default device."""
        super().__init__(out_features, in_features)
        self.data = torch.empty(out_features, in_features, dtype=dtype)

    def slots(self, name: str, rows: slice, full_shape: tuple[int, int], dim: int, start: int) -> WeightSlots:
        return {f"{name}.weight": WeightSlot(self.data[rows], full_shape, dim, start)}

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = F.linear(x, self.data, bias)
        return y if out is None else out.copy_(y)
