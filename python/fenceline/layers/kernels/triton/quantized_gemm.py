"""One row times a quantised weight in Triton, the plain matrix of a quantised weight, and rounding to FP8.

A product of one row takes as long as reading the weight, so fewer bytes make it faster: numbers are read as they are
stored and dequantised in registers. Each program computes ``block_n`` output features over the whole of K. So no sum is
split over programs, and a result does not depend on timing. RMSNorm is fused: its weight is applied to x when x is
loaded, the squares are summed together with the product, and the result is multiplied by 1 / rms. Several rows times a
weight in FP8 are a product of ``skinny_gemm``, for which x is rounded to FP8 here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.layers.kernels.triton.skinny_gemm import PLAIN, Fusion, TritonConfig

_FP8_MAX: tl.constexpr = tl.constexpr(448.0)


def quantized_linear(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    config: TritonConfig,
    fusion: Fusion = PLAIN,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [1, K] times the weight [N, K] that ``data``, ``scales`` and ``zeros`` store (``quantized.QuantizedFormat``:
    int4 if there are ``zeros``, else fp8 or int8), with ``fusion`` around it → [1, N] ([1, N / 2] if gated), in x's
    dtype. The result is in ``fusion.residual`` or ``out`` (contiguous, at most one is given) or in a new tensor. All
    tensors are on one device and contiguous, except scales and zeros, which have equal strides. Computed in float32.
    Current stream, no host synchronisation."""
    num_rows, k = x.shape
    num_out = data.shape[0] // 2 if fusion.gated else data.shape[0]
    assert num_rows == 1 and x.is_contiguous() and data.is_contiguous()
    assert zeros is None or zeros.stride() == scales.stride()
    assert data.shape[1] == (k if zeros is None else k // 2) and scales.shape == (data.shape[0], triton.cdiv(k, group))
    assert out is None or fusion.residual is None
    if out is None:
        out = fusion.residual if fusion.residual is not None else x.new_empty(num_rows, num_out)
    assert out.shape == (num_rows, num_out) and out.is_contiguous()
    _one_row_kernel[(triton.cdiv(num_out, config.block_n),)](
        x, fusion.norm_weight, data, scales, zeros, fusion.bias, out, *scales.stride(), num_out, fusion.eps,
        K=k, GROUP=group, INT4=zeros is not None, HAS_NORM=fusion.norm_weight is not None,
        HAS_BIAS=fusion.bias is not None, GATED=fusion.gated, ADD=fusion.residual is not None,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, PDL=config.launch_pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=config.launch_pdl,
    )  # fmt: skip
    return out


@triton.jit
def _tile(
    data_ptr, scales_ptr, zeros_ptr, row_stride, group_stride, features, k, K: tl.constexpr, GROUP: tl.constexpr,
    INT4: tl.constexpr,
):  # fmt: skip
    """The weight's numbers of ``features`` at inputs ``k``, float32; the two index tensors broadcast to the tile. For
    fp8 with one scale for a row the scale is not applied here but to the sums."""
    inside = k < K
    at = features * row_stride + k // GROUP * group_stride
    if INT4:
        # Two numbers share a byte. It is loaded for each of them, the second time from the cache.
        place = features * (K // 2) + k // 8 * 4 + k % 2 * 2 + k % 8 // 4
        both = tl.load(data_ptr + place, mask=inside, other=0, eviction_policy="evict_first").to(tl.int32)
        zeros = tl.load(zeros_ptr + at, mask=inside, other=0).to(tl.int32)
        number = (both >> (k // 2 % 2 * 4)) & 15
        # The bits of 2^23 + number as a float32; this is faster than a conversion.
        numbers = (number | 0x4B000000).to(tl.float32, bitcast=True) - (zeros + 8388608).to(tl.float32)
        numbers *= tl.load(scales_ptr + at, mask=inside, other=0.0)
    else:
        numbers = tl.load(data_ptr + features * K + k, mask=inside, other=0.0, eviction_policy="evict_first")
        numbers = numbers.to(tl.float32)
        if GROUP < K:
            numbers *= tl.load(scales_ptr + at, mask=inside, other=0.0)
    return numbers


@triton.jit
def _one_row_kernel(
    x_ptr, norm_ptr, data_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, row_stride, group_stride, num_out, eps,
    K: tl.constexpr, GROUP: tl.constexpr, INT4: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [K] → out [num_out]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < num_out
    # A feature past the end computes the first one again, which is in bounds, and is not stored.
    gate = tl.where(live, n, 0).to(tl.int64)
    up = gate + num_out
    cols = tl.arange(0, BLOCK_K)
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + cols
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        acc += x[None, :] * _tile(
            data_ptr, scales_ptr, zeros_ptr, row_stride, group_stride, gate[:, None], k[None, :], K, GROUP, INT4
        )  # fmt: skip
        if GATED:
            acc_up += x[None, :] * _tile(
                data_ptr, scales_ptr, zeros_ptr, row_stride, group_stride, up[:, None], k[None, :], K, GROUP, INT4
            )  # fmt: skip
    y = tl.sum(acc, axis=1)
    y_up = tl.sum(acc_up, axis=1)
    if not INT4 and GROUP >= K:
        y *= tl.load(scales_ptr + gate * row_stride)
        if GATED:
            y_up *= tl.load(scales_ptr + up * row_stride)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= factor
        y_up *= factor
    if HAS_BIAS:
        y += tl.load(bias_ptr + gate).to(tl.float32)
        if GATED:
            y_up += tl.load(bias_ptr + up).to(tl.float32)
    if GATED:
        y = y * tl.sigmoid(y) * y_up
    if ADD:
        y += tl.load(out_ptr + gate).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=live)


def dequantize(
    data: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    num_columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The plain matrix [N, K] of ``dtype`` that ``data``, ``scales`` and ``zeros`` store, see ``quantized_linear``."""
    assert data.is_contiguous() and (zeros is None or zeros.stride() == scales.stride())
    out = data.new_empty(len(data), num_columns, dtype=dtype)
    _dequantize_kernel[(len(data), triton.cdiv(num_columns, 2048))](
        data, scales, zeros, out, *scales.stride(), K=num_columns, GROUP=group, INT4=zeros is not None,
        BLOCK=2048, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(
    data_ptr, scales_ptr, zeros_ptr, out_ptr, row_stride, group_stride, K: tl.constexpr, GROUP: tl.constexpr,
    INT4: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers = _tile(
        data_ptr, scales_ptr, zeros_ptr, row_stride, group_stride, row, k, K, GROUP, INT4
    )  # fmt: skip
    if not INT4 and GROUP >= K:
        numbers *= tl.load(scales_ptr + row * row_stride)
    tl.store(out_ptr + row * K + k, numbers.to(out_ptr.dtype.element_ty), mask=k < K)


def quantize_rows(
    x: torch.Tensor,
    group: int,
    scale: torch.Tensor | None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K], contiguous → its nearest E4M3 numbers [T, K] and their scales [T, ceil(K / group)] float32. The scale
    is ``scale``, a number on the device. If that is None, it maps the largest number of each group to the largest of
    E4M3. ``group`` is K or more, or a power of two. ``norm_weight`` [K] with ``eps``: x is normalised first, as by
    rms_norm but without rounding to x's type; it is contiguous. K is at most 65,536. ``pdl``: see rms_norm's module;
    reads ``norm_weight`` and ``scale`` before its wait."""
    num_rows, k = x.shape
    groups = triton.cdiv(k, group)
    assert x.is_contiguous() and k <= 65_536 and (groups == 1 or group & (group - 1) == 0), (k, group)
    assert norm_weight is None or (norm_weight.is_contiguous() and norm_weight.shape == (k,))
    numbers = torch.empty_like(x, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = x.new_empty(num_rows, groups, dtype=torch.float32)
    size = group if groups > 1 else triton.next_power_of_2(k)
    blocks = triton.next_power_of_2(groups)
    _quantize_rows_kernel[(num_rows,)](
        x, norm_weight, scale, numbers, scales, k, groups, eps, HAS_NORM=norm_weight is not None,
        HAS_SCALE=scale is not None, GROUPS=blocks, SIZE=size, PDL=pdl,
        num_warps=max(1, min(16, blocks * size // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return numbers, scales


@triton.jit
def _quantize_rows_kernel(
    x_ptr, norm_ptr, scale_ptr, numbers_ptr, scales_ptr, k_size, num_groups, eps, HAS_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: up to GROUPS groups of SIZE numbers."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    k = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = k < k_size
    if HAS_NORM:
        weight = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        scale = tl.zeros([GROUPS], tl.float32) + tl.load(scale_ptr)
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    x = tl.load(x_ptr + row * k_size + k, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        x *= tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / k_size + eps) * weight
    if not HAS_SCALE:
        scale = tl.maximum(tl.max(tl.abs(x), axis=1) / _FP8_MAX, 1e-12)
    tl.store(scales_ptr + row * num_groups + groups, scale, mask=groups < num_groups)
    x = x / scale[:, None]
    x = tl.minimum(tl.maximum(x, -_FP8_MAX), _FP8_MAX)
    tl.store(numbers_ptr + row * k_size + k, x.to(tl.float8e4nv), mask=inside)
