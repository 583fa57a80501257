"""The one launch between the projections of lightning attention and its recurrence."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fenceline.layers.kernels.base import QKNorm
from fenceline.memory_order.triton_launcher import KernelVariant

_TILE = 512  # features in each half of a program's heads


def lightning_inputs(
    projected: torch.Tensor,
    decays: torch.Tensor,
    norms: QKNorm,
    table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``LayerKernels.lightning_inputs``. The features of a token are contiguous. Current stream, no host
    synchronisation."""
    num, heads, half = len(projected), len(decays), table.shape[1] // 3
    assert projected.stride(1) == 1 and projected.shape[1] == 8 * heads * half
    assert table.dtype == torch.float32 and table.is_contiguous()
    assert positions.dtype == torch.int64 and positions.is_contiguous() and decays.is_contiguous()
    shape = (num, heads, 2 * half)
    q = torch.empty(shape, dtype=torch.float32, device=projected.device)
    k = torch.empty(shape, dtype=torch.float32, device=projected.device)
    v = torch.empty(shape, dtype=torch.float32, device=projected.device)
    of_tokens = torch.empty((num, heads), dtype=torch.float32, device=projected.device)
    if num:
        blocks, variant = _variant(heads, half)
        weights = norms.q_weight, norms.k_weight
        tensors = (projected, decays, *weights, table, positions, q, k, v, of_tokens)
        variant.launch((num, blocks), tensors, (projected.stride(0), norms.eps, scale))
    return q, k, v, of_tokens


@cache
def _variant(heads: int, half: int) -> tuple[int, KernelVariant]:
    block_half = triton.next_power_of_2(half)
    block_heads = min(max(_TILE // block_half, 1), triton.next_power_of_2(heads))
    constants = {"HEADS": heads, "BLOCK_HEADS": block_heads, "HALF": half, "BLOCK_HALF": block_half}
    return -(-heads // block_heads), KernelVariant(_lightning_inputs_kernel, constants, 4)


@triton.jit
def _rotated(source, weight, cos, sin, live, lanes, in_half, eps, HALF: tl.constexpr):
    """The halves of heads after the norm and the rotation, rounded as these are by two operators, in float32."""
    dtype = source.dtype.element_ty
    x1 = tl.load(source, mask=live, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
    w1 = tl.load(weight + lanes, mask=in_half, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(weight + HALF + lanes, mask=in_half, other=0.0).to(tl.float32)[None, :]
    x1, x2 = (x1 * factor * w1).to(dtype).to(tl.float32), (x2 * factor * w2).to(dtype).to(tl.float32)
    return (x1 * cos - x2 * sin).to(dtype).to(tl.float32), (x2 * cos + x1 * sin).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["stride"])
def _lightning_inputs_kernel(
    projected, decays, q_weight, k_weight, table, positions, q, k, v, of_tokens, stride, eps, scale,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """A program has some heads of a token, as two tiles [heads, half]."""
    WIDTH: tl.constexpr = HEADS * 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    lanes = tl.arange(0, BLOCK_HALF)
    in_half = lanes < HALF
    live = (heads < HEADS)[:, None] & in_half[None, :]
    elements = heads[:, None] * (2 * HALF) + lanes[None, :]
    source, target = projected + token * stride + elements, token * WIDTH + elements
    angles = table + tl.load(positions + token) * (3 * HALF) + lanes
    cos = tl.load(angles, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angles + 2 * HALF, mask=in_half, other=0.0)[None, :]
    y1, y2 = _rotated(source, q_weight, cos, sin, live, lanes, in_half, eps, HALF)
    tl.store(q + target, y1 * scale, mask=live)
    tl.store(q + target + HALF, y2 * scale, mask=live)
    y1, y2 = _rotated(source + WIDTH, k_weight, cos, sin, live, lanes, in_half, eps, HALF)
    tl.store(k + target, y1, mask=live)
    tl.store(k + target + HALF, y2, mask=live)
    values = source + 2 * WIDTH
    tl.store(v + target, tl.load(values, mask=live, other=0.0).to(tl.float32), mask=live)
    tl.store(v + target + HALF, tl.load(values + HALF, mask=live, other=0.0).to(tl.float32), mask=live)
    decay = tl.load(decays + heads, mask=heads < HEADS, other=0.0)
    tl.store(of_tokens + token * HEADS + heads, decay, mask=heads < HEADS)
