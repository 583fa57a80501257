"""What layers compute besides matrix products: normalisation, activation, rotation and storing keys and values.

LayerKernels says what each of them does. TorchLayerKernels does it with torch's operators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fenceline.layers.rotary import apply_rotary, rotary_angles


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
        # These methods are not written in Python, which is faster: this runs once for each layer.
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
    model's dtype; sums are at least float32."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis, x [..., D] → a new tensor of its shape."""

    @abstractmethod
    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 I], gate then up → silu(gate) * up, a new tensor [T, I]."""

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


class TorchLayerKernels(LayerKernels):
    """The CPU runs these; they are the reference for our own kernels, and the values of the virtual GPU's launches."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

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
        q, k, v = heads.split(qkv)
        cos, sin = rotary_angles(table, positions)
        rotated = (q, k)
        if norms is not None:
            rotated = (
                self.rms_norm(q, norms.q_weight, norms.eps),
                self.rms_norm(k, norms.k_weight, norms.eps),
            )
        q.copy_(apply_rotary(rotated[0], cos, sin))
        k.copy_(apply_rotary(rotated[1], cos, sin))
        k_cache.index_copy_(0, out_slots, k)
        v_cache.index_copy_(0, out_slots, v)
