"""RMSNorm in Triton: one pass that reads and writes every element once.

``pdl`` in Triton launchers means programmatic dependent launch (sm_90 and later). The kernel may start before the
preceding kernel has ended, which hides the time of the launch. Before it writes anything, and before it reads what a
forward computes, it waits with ``griddepcontrol.wait`` until all preceding kernels have ended and their writes are
visible. A kernel's docstring names what it reads *before* its wait. Between the kernel that writes such data and the
one that reads it there must be a kernel launched without pdl, because that one begins only when all kernels before it
have ended.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.memory_order.triton_launcher import KernelVariant

# The fewest elements for one program: short rows share a program.
_MIN_TILE = 1024
_ELEMENTS_A_THREAD = 8  # one 16-byte load of bfloat16
_MAX_WARPS = 16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool = False) -> torch.Tensor:
    """x [T, D] / sqrt(mean of squares over D + eps) * weight [D] → a new tensor [T, D] in x's dtype, computed in
    float32. x is in bfloat16, float16 or float32, and its rows may be parts of wider ones; D is at most 16384; T is any
    size. Current stream, no host synchronisation. ``pdl``: see the module's docstring; reads ``weight`` before its
    wait."""
    num_rows, size = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and weight.shape == (size,)
    out = x.new_empty(x.shape)
    if num_rows == 0:
        return out
    variant = _variant(size, x.stride(0), pdl)
    variant.launch((-(-num_rows // variant.constants["ROWS"]),), (x, weight, out), (num_rows, eps))
    return out


@cache
def _variant(size: int, stride: int, pdl: bool) -> KernelVariant:
    block = triton.next_power_of_2(size)
    rows_each = max(1, _MIN_TILE // block)
    num_warps = max(1, min(_MAX_WARPS, block * rows_each // (32 * _ELEMENTS_A_THREAD)))
    constants = {"SIZE": size, "STRIDE": stride, "BLOCK": block, "ROWS": rows_each, "PDL": pdl}
    return KernelVariant(_rms_norm_kernel, constants, num_warps, pdl)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, weight, out, num_rows, eps,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    in_row = columns < SIZE
    scale = tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (rows < num_rows)[:, None] & in_row[None, :]
    values = tl.load(x + rows[:, None] * STRIDE + columns[None, :], mask=live, other=0.0).to(tl.float32)
    mean_square = tl.sum(values * values, axis=1) / SIZE
    normed = values * tl.rsqrt(mean_square + eps)[:, None] * scale[None, :]
    tl.store(out + rows[:, None] * SIZE + columns[None, :], normed.to(out.dtype.element_ty), mask=live)
