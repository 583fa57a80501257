"""What the model's layers compute with. A step's forward gets it in its ForwardBatch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a fused row of queries, keys and values is laid out: ``num_heads`` query heads, then ``num_kv_heads`` of
    keys, then as many of values, each of ``head_dim`` elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of qkv [T, size]: q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]."""
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        # Methods that are not written in Python: this runs once a layer.
        heads = qkv.view(qkv.shape[0], sum(sizes), self.head_dim)
        return heads.split_with_sizes(sizes, 1)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm of each query and key head before the rotation; weights [head_dim]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


class LayerKernels(ABC):
    """All run on the current stream and never make the host wait. Activations are contiguous [T, features] in the
    model's dtype; weights are [out_features, in_features]; sums are at least float32."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis, x [T, D] → [T, D]."""

    @abstractmethod
    def linear_add(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``residual`` [T, N] += x [T, K] @ weight [N, K] transposed + bias [N], in place; returns ``residual``."""

    @abstractmethod
    def norm_linear(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """rms_norm(x [T, K]) @ weight [N, K] transposed + bias [N] → [T, N], in ``out`` if given."""

    @abstractmethod
    def norm_gate_up(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """SwiGLU's product (arXiv:2002.05202) of rms_norm(x): weight [2 I, K], gate rows then up rows → [T, I]."""

    @abstractmethod
    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: HeadLayout,
        norms: QKNorm | None,
        table: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out_slots: torch.Tensor,
    ) -> None:
        """Normalise (if ``norms``) and rotate q and k in place, and write k and v to the pool.

        qkv [T, size of ``heads``]; ``table`` [max_positions, 3 * head_dim / 2] float32, cos twice then sin (see
        ``RotaryEmbedding``); positions [T] int64; caches [num_slots, num_kv_heads, head_dim]; out_slots [T] int64.
        """
