"""Products of few rows with a large weight in Triton. They take about as long as reading the weight once.

Each program computes ``block_n`` output features of all rows over the whole of K. So no sum is split over programs, and
a result depends neither on timing nor on the other rows. RMSNorm needs no pass of its own: its weight is applied to x
when x is loaded, the squares are summed together with the product, and the row's result is multiplied by 1 / rms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """How a product is divided: ``block_n`` features and ``block_k`` inputs at a time, both powers of two.

    ``launch_pdl``: the kernel starts before the preceding one has ended and loads its first weights meanwhile
    (programmatic dependent launch, sm_90 and later).
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    launch_pdl: bool = True


@dataclass(frozen=True, slots=True)
class Fusion:
    """The operations before and after the product. By default there are none.

    ``norm_weight`` [K] with ``eps``: x is normalised first, as by rms_norm. ``bias`` [N] is added. ``gated``: the first
    half of the weight's rows makes gate, the second up, and the result is silu(gate) * up [T, N / 2]. ``residual``
    [T, N], contiguous: the product is added to it in place, and it is the result.
    """

    norm_weight: torch.Tensor | None = None
    eps: float = 0.0
    bias: torch.Tensor | None = None
    gated: bool = False
    residual: torch.Tensor | None = None


PLAIN = Fusion()


def may_fuse_norm(x: torch.Tensor, norm_weight: torch.Tensor) -> bool:
    """Whether the norm of ``x`` [T, K] can be fused with the product. With several rows the kernels round x * weight to
    x's type before they divide by the row's rms, and this could exceed float16's largest number, 65,504. They also need
    norm weights of x's type."""
    return norm_weight.dtype == x.dtype and (len(x) == 1 or x.dtype != torch.float16)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: TritonConfig,
    fusion: Fusion = PLAIN,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] with ``fusion`` around it → [T, N] ([T, N / 2] if gated), in x's dtype.

    The result is in ``fusion.residual`` or ``out`` (contiguous, at most one is given) or in a new tensor.

    1 ≤ T ≤ 64; x and weight contiguous, of one floating dtype, on one device; sums are float32. Current stream, no host
    synchronisation.
    """
    num_rows, k = x.shape
    assert 0 < num_rows <= MAX_ROWS, num_rows
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    assert weight.shape[1] == k, (weight.shape, k)
    num_out = weight.shape[0] // 2 if fusion.gated else weight.shape[0]
    assert out is None or fusion.residual is None
    if out is None:
        out = fusion.residual if fusion.residual is not None else x.new_empty(num_rows, num_out)
    assert out.shape == (num_rows, num_out) and out.is_contiguous()
    flags = {
        "K": k,
        "HAS_NORM": fusion.norm_weight is not None,
        "HAS_BIAS": fusion.bias is not None,
        "GATED": fusion.gated,
        "ADD": fusion.residual is not None,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PDL": config.launch_pdl,
    }
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": config.launch_pdl}
    grid = (triton.cdiv(num_out, config.block_n),)
    if num_rows == 1:
        _gemv_kernel[grid](
            x,
            fusion.norm_weight,
            weight,
            fusion.bias,
            out,
            num_out,
            num_out * k,
            fusion.eps,
            **flags,
            **launch,
        )
    else:
        padded = max(16, triton.next_power_of_2(num_rows))
        _gemm_kernel[grid](
            x, fusion.norm_weight, weight, fusion.bias, out, num_rows, num_out, num_out * k, fusion.eps,
            **flags, ROWS=padded, **launch,
        )  # fmt: skip
    return out


@triton.jit
def _gemv_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, num_out, up_offset, eps, K: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [K], weight [num_out or 2 num_out, K] → out [num_out]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < num_out
    cols = tl.arange(0, BLOCK_K)
    # A feature past the end computes the first one again, which is in bounds, and is not stored.
    first = tl.where(live, n, 0).to(tl.int64)[:, None] * K + cols[None, :]
    gate_ptrs = weight_ptr + first
    up_ptrs = gate_ptrs + up_offset
    # No kernel writes the weights, so the first tile is loaded while the preceding kernel is still running.
    gate = tl.load(gate_ptrs, mask=(cols < K)[None, :], other=0.0, eviction_policy="evict_first")
    up = gate
    if GATED:
        up = tl.load(up_ptrs, mask=(cols < K)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for k in range(0, K, BLOCK_K):
        # The next tile is loaded before this one is used; nothing is read past the end.
        more = (k + BLOCK_K + cols < K)[None, :]
        gate_ptrs += BLOCK_K
        next_gate = tl.load(gate_ptrs, mask=more, other=0.0, eviction_policy="evict_first")
        next_up = next_gate
        if GATED:
            up_ptrs += BLOCK_K
            next_up = tl.load(up_ptrs, mask=more, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + k + cols, mask=k + cols < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + k + cols, mask=k + cols < K, other=0.0).to(tl.float32)
        acc += gate.to(tl.float32) * x[None, :]
        gate = next_gate
        if GATED:
            acc_up += up.to(tl.float32) * x[None, :]
            up = next_up
    y = tl.sum(acc, axis=1)
    y_up = y
    if GATED:
        y_up = tl.sum(acc_up, axis=1)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
        y_up *= scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)
        if GATED:
            y_up += tl.load(bias_ptr + num_out + n, mask=live, other=0.0).to(tl.float32)
    if GATED:
        y = y * tl.sigmoid(y) * y_up
    if ADD:
        y += tl.load(out_ptr + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _gemm_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_out, up_offset, eps, K: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x [num_rows, K], weight [num_out or 2 num_out, K] → out [num_rows, num_out]; num_rows ≤ ROWS."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live_n = n < num_out
    rows = tl.arange(0, ROWS)
    live_rows = rows < num_rows
    cols = tl.arange(0, BLOCK_K)
    # A feature past the end computes the first one again, which is in bounds, and is not stored.
    gate_ptrs = weight_ptr + tl.where(live_n, n, 0).to(tl.int64)[None, :] * K + cols[:, None]
    x_ptrs = x_ptr + rows[:, None] * K + cols[None, :]
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + cols < K
        gate = tl.load(gate_ptrs + k, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptrs + k, mask=live_rows[:, None] & inside[None, :], other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            norm = tl.load(norm_ptr + k + cols, mask=inside, other=0.0).to(tl.float32)
            x = (wide * norm[None, :]).to(x.dtype)
        acc = tl.dot(x, gate, acc, input_precision="ieee")
        if GATED:
            up = tl.load(
                gate_ptrs + up_offset + k, mask=inside[:, None], other=0.0, eviction_policy="evict_first"
            )
            acc_up = tl.dot(x, up, acc_up, input_precision="ieee")
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
        acc *= scale
        acc_up *= scale
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=live_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias_ptr + num_out + n, mask=live_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    out_ptrs = out_ptr + rows[:, None] * num_out + n[None, :]
    live = live_rows[:, None] & live_n[None, :]
    if ADD:
        acc += tl.load(out_ptrs, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live)
