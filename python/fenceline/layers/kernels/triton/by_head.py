"""Products of few rows with a matrix for each head, as latent attention has them in front of attention and behind it.

A program has some outputs of one head for up to ``MAX_ROWS`` rows. It reads its part of the matrix once, all of it
before it waits for the preceding kernel, which takes most of the time.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.memory_order.triton_launcher import KernelVariant

MAX_ROWS = 64
_TILE = 16_384  # elements of a matrix that a program holds in registers
_FEW_PROGRAMS = 128  # with fewer, some multiprocessors of a large GPU have nothing to read
_MIN_SIZE = 16  # of a matrix product
_NUM_WARPS = 4


def by_head(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, pdl: bool = False, fixed: bool = False
) -> torch.Tensor:
    """See ``LayerKernels.by_head``, for at most ``MAX_ROWS`` rows, or with ``fixed`` for any number: these are
    multiplied ``MAX_ROWS`` at a time, always by the same instructions, so that a row's result does not depend on the
    others. x [T, H, K] and ``out`` [T, H, N] may be parts of wider rows; either axis of a matrix in ``weight`` [H, N,
    K] may be the contiguous one. Sums are float32. Current stream, no host synchronisation. ``pdl``: see ``rms_norm``;
    reads ``weight`` before its wait."""
    num_rows, num_heads, k = x.shape
    n = weight.shape[1]
    assert weight.shape == (num_heads, n, k) and out.shape == (num_rows, num_heads, n)
    assert (fixed or num_rows <= MAX_ROWS) and x.stride(2) == out.stride(2) == 1 and 1 in weight.stride()[1:]
    assert x.dtype == weight.dtype == out.dtype
    if num_rows == 0:
        return out
    rows = MAX_ROWS if fixed else max(triton.next_power_of_2(num_rows), _MIN_SIZE)
    strides = (*x.stride()[:2], *weight.stride(), *out.stride()[:2])
    blocks, variant = _variant(num_heads, n, k, rows, strides, pdl)
    variant.launch((num_heads * blocks, triton.cdiv(num_rows, rows)), (x, weight, out), (num_rows,))
    return out


@cache
def _variant(
    num_heads: int, n: int, k: int, rows: int, strides: tuple[int, ...], pdl: bool
) -> tuple[int, KernelVariant]:
    """The number of programs for each head, and the kernel that they run."""
    block_k = max(triton.next_power_of_2(k), _MIN_SIZE)
    block_n = max(min(triton.next_power_of_2(n), _TILE // block_k), _MIN_SIZE)
    while block_n > _MIN_SIZE and num_heads * -(-n // block_n) < _FEW_PROGRAMS:
        block_n //= 2
    names = "X_ROW", "X_HEAD", "WEIGHT_HEAD", "WEIGHT_N", "WEIGHT_K", "OUT_ROW", "OUT_HEAD"
    sizes = {"N": n, "K": k, "BLOCK_N": block_n, "BLOCK_K": block_k, "ROWS": rows}
    constants = sizes | dict(zip(names, strides, strict=True)) | {"PDL": pdl}
    return -(-n // block_n), KernelVariant(_by_head_kernel, constants, _NUM_WARPS, pdl)


@triton.jit(do_not_specialize=["num_rows"])
def _by_head_kernel(
    x, weight, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    X_ROW: tl.constexpr, X_HEAD: tl.constexpr, WEIGHT_HEAD: tl.constexpr, WEIGHT_N: tl.constexpr,
    WEIGHT_K: tl.constexpr, OUT_ROW: tl.constexpr, OUT_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    outputs = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    wanted = (inputs < K)[:, None] & (outputs < N)[None, :]
    places = weight + head * WEIGHT_HEAD + inputs[:, None] * WEIGHT_K + outputs[None, :] * WEIGHT_N
    matrix = tl.load(places, mask=wanted, other=0.0)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (rows < num_rows)[:, None]
    given = tl.load(
        x + head * X_HEAD + rows[:, None] * X_ROW + inputs[None, :], mask=live & (inputs < K)[None, :], other=0.0
    )
    product = tl.dot(given, matrix, input_precision="ieee")
    target = out + head * OUT_HEAD + rows[:, None] * OUT_ROW + outputs[None, :]
    tl.store(target, product.to(out.dtype.element_ty), mask=live & (outputs < N)[None, :])
