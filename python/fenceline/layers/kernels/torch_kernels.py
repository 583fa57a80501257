"""LayerKernels made of torch's operators. The CPU and the virtual GPU run them; they are the reference for our own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fenceline.layers.kernels.base import HeadLayout, LayerKernels, QKNorm
from fenceline.layers.rotary import apply_rotary, rotary_angles


class TorchLayerKernels(LayerKernels):
    """The reference, on any device."""

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
