"""Products of few rows with a large weight in Triton. They take about as long as reading the weight once.

Each program computes ``block_n`` output features of all rows over the whole of K. So no sum is split over programs, and
a result depends neither on timing nor on the other rows. For one row RMSNorm needs no pass of its own: its weight is
applied to x when x is loaded, the squares are summed together with the product, and the result is multiplied by 1 /
rms. With more rows the weight's rows are the rows of the product on the tensor core and those of x its columns, because
Hopper's takes 64 rows or more but few columns.

``fixed_linear`` is the product of any number of rows whose sums depend on N and K alone: all of its tiles use the same
instruction of the tensor core, and K is cut into segments that are added up by themselves and then in order. With few
tiles each segment has programs of its own, and the last of a tile to end adds them up; with many a program computes one
after the other. The bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.layers.kernels.triton.rms_norm import rms_norm

MAX_ROWS = 128
MAX_SPLIT_TILES = 1 << 14  # of a product whose K is split over programs
_MAX_WIDE_ROWS = 32  # of a tile in float32, which the tensor core does not multiply
_MAX_SEGMENTS = 8
_MANY_TILES = 160  # so many programs keep a large GPU busy
_FEW_TILES = 64  # of several blocks of rows: so many leave half of it idle
_SEGMENT_INPUTS = 1024  # a segment of K has more than half as many: the more segments, the more often sums are added
_SEGMENT_UNIT = tl.constexpr(128)  # a segment is a multiple of this, which every tile's block of inputs divides
_TOGETHER = tl.constexpr(8)  # so many tiles of features read the same block of rows at about the same time


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """How a product is divided: ``block_n`` features and ``block_k`` inputs at a time, both powers of two. ``split``
    programs share K (then ``block_k`` is at most 128): a weight of few features has too few blocks for all
    multiprocessors. The last of them to end adds up their sums, in order.
    ``launch_pdl``: the kernel starts before the preceding one has ended (programmatic dependent launch, sm_90 and
    later); that of one row with a plain weight loads its first weights meanwhile."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    launch_pdl: bool = True
    split: int = 1


@dataclass(frozen=True, slots=True)
class Fusion:
    """The operations before and after the product. By default there are none. ``norm_weight`` [K] with ``eps``: x is
    normalised first, as by rms_norm. ``bias`` [N] is added. ``gated``: the first half of the weight's rows makes gate,
    the second up, and the result is silu(gate) * up [T, N / 2]. ``residual`` [T, N], contiguous: the product is added
    to it in place, and it is the result."""

    norm_weight: torch.Tensor | None = None
    eps: float = 0.0
    bias: torch.Tensor | None = None
    gated: bool = False
    residual: torch.Tensor | None = None


PLAIN = Fusion()


class SplitWorkspace:
    """The counters of products whose K is split over programs, on ``device``. Launches that share a workspace must be
    on one stream. They use it only after their wait."""

    def __init__(self, device: torch.device) -> None:
        # How many of a tile's programs are done. Zero between launches.
        self.num_done = torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)


def may_fuse_norm(x: torch.Tensor, norm_weight: torch.Tensor) -> bool:
    """Whether the norm of ``x`` [T, K] can be fused with the product: the kernels need norm weights of x's type."""
    return norm_weight.dtype == x.dtype


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: TritonConfig,
    fusion: Fusion = PLAIN,
    out: torch.Tensor | None = None,
    workspace: SplitWorkspace | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] with ``fusion`` around it → [T, N] ([T, N / 2] if gated), in x's dtype.

    The result is in ``fusion.residual`` or ``out`` (contiguous, at most one is given) or in a new tensor.

    1 ≤ T ≤ 128; x and weight contiguous, of one floating dtype, on one device; sums are float32. Current stream, no
    host synchronisation. Several rows whose K is split need a ``workspace``.
    """
    num_rows, k = x.shape
    assert 0 < num_rows <= MAX_ROWS, num_rows
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    assert weight.shape[1] == k, (weight.shape, k)
    out = _result(x, weight, fusion, out)
    num_out = out.shape[1]
    if num_rows > 1:
        if fusion.norm_weight is not None:
            x = rms_norm(x, fusion.norm_weight, fusion.eps, config.launch_pdl)
        assert config.split == 1 or (workspace is not None and config.block_k <= _SEGMENT_UNIT.value), config
        _multiply_rows(x, None, weight, None, 0, config, fusion, out, workspace if config.split > 1 else None)
        return out
    _gemv_kernel[(triton.cdiv(num_out, config.block_n),)](
        x, fusion.norm_weight, weight, fusion.bias, out, num_out, num_out * k, fusion.eps,
        K=k, HAS_NORM=fusion.norm_weight is not None, HAS_BIAS=fusion.bias is not None, GATED=fusion.gated,
        ADD=fusion.residual is not None, BLOCK_N=config.block_n, BLOCK_K=config.block_k, PDL=config.launch_pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=config.launch_pdl,
    )  # fmt: skip
    return out


def scaled_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    config: TritonConfig,
    fusion: Fusion,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K], both E4M3, with ``fusion`` around it, but for the norm → [T, N] ([T, N / 2] if
    gated), in ``fusion.residual`` or ``out``, of which one is given.

    ``x_scales`` [T, groups], contiguous, and ``scales`` [N, groups], float32, multiply the ``group`` numbers along K
    that they belong to; one group may be all of K, or ``config.block_k`` divides it. 1 ≤ T ≤ 128; x, weight and
    the result contiguous, all on one device. Sums are float32; but if a group is all of K, they are the tensor core's
    own, which on Hopper keep some 14 bits, as usual for FP8. Current stream, no host synchronisation.
    """
    num_rows, k = x.shape
    groups = triton.cdiv(k, group)
    assert 0 < num_rows <= MAX_ROWS and weight.shape[1] == k and fusion.norm_weight is None
    if out is None:
        out = fusion.residual
    else:
        assert fusion.residual is None
    assert out is not None and out.is_contiguous()
    assert x.is_contiguous() and weight.is_contiguous() and x_scales.is_contiguous()
    assert x_scales.shape == (num_rows, groups) and scales.shape == (len(weight), groups)
    assert out.shape == (num_rows, len(weight) // (2 if fusion.gated else 1))
    assert groups == 1 or group % config.block_k == 0, (group, config)
    _multiply_rows(x, x_scales, weight, scales, group if groups > 1 else 0, config, fusion, out)
    return out


def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: SplitWorkspace,
    fusion: Fusion = PLAIN,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Like ``skinny_linear``, for any number of rows T: the bits of a row do not depend on T or on the other rows."""
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype and weight.shape[1] == x.shape[1]
    if fusion.norm_weight is not None:
        x = rms_norm(x, fusion.norm_weight, fusion.eps, pdl)
    out = _result(x, weight, fusion, out)
    config = _fixed_config(len(x), fusion.gated, x.element_size(), pdl)
    _multiply_rows(x, None, weight, None, 0, config, fusion, out, workspace)
    return out


def fixed_scaled_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    workspace: SplitWorkspace,
    dtype: torch.dtype,
    fusion: Fusion = PLAIN,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Like ``scaled_linear``, for any number of rows as ``fixed_linear``, in ``out``, the residual or a new tensor of
    ``dtype``."""
    assert x.is_contiguous() and weight.is_contiguous() and fusion.norm_weight is None
    out = _result(x, weight, fusion, out, dtype)
    config = _fixed_config(len(x), fusion.gated, 1, pdl)
    groups = triton.cdiv(x.shape[1], group)
    _multiply_rows(x, x_scales, weight, scales, group if groups > 1 else 0, config, fusion, out, workspace)
    return out


def _result(
    x: torch.Tensor, weight: torch.Tensor, fusion: Fusion, out: torch.Tensor | None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Where a product goes."""
    assert out is None or fusion.residual is None
    num_out = weight.shape[0] // 2 if fusion.gated else weight.shape[0]
    if out is None:
        out = fusion.residual
    if out is None:
        out = x.new_empty(len(x), num_out, dtype=dtype)
    assert out.shape == (len(x), num_out) and out.is_contiguous()
    return out


def _fixed_config(num_rows: int, gated: bool, itemsize: int, pdl: bool) -> TritonConfig:
    """How a product in a fixed order is divided. Sums do not depend on it: features are independent of each other, and
    all tiles take the same inputs of a segment in the same order."""
    block_k = {1: 128, 2: 64, 4: 32}[itemsize]
    if num_rows <= MAX_ROWS or itemsize == 4:
        return TritonConfig(64, block_k, 4, 4 if gated else 6, pdl)
    return TritonConfig(64 if gated else 128, block_k, 8, 4, pdl)


def num_segments(num_out: int, k: int) -> int:
    """Into how many segments K is cut, which adds up in a fixed order: so many that the product of a row with a weight
    of few features has programs for a large GPU."""
    segments, tiles = 1, triton.cdiv(num_out, 64)
    while segments < _MAX_SEGMENTS and tiles * segments < _MANY_TILES and k >= _SEGMENT_INPUTS * segments:
        segments *= 2
    return segments


def _multiply_rows(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    group: int,
    config: TritonConfig,
    fusion: Fusion,
    out: torch.Tensor,
    workspace: SplitWorkspace | None = None,
) -> None:
    """``workspace``: K is cut into ``config.split`` segments, or if that is 1 the sums have the order of
    ``fixed_linear``; None: K is not cut, and there is one block of rows, as there also is with a split."""
    (num_rows, k), num_out = x.shape, out.shape[1]
    if num_rows == 0:
        return
    most = MAX_ROWS if workspace is None or x.element_size() < 4 else _MAX_WIDE_ROWS
    rows, segments = min(max(16, triton.next_power_of_2(num_rows)), most), 0
    tiles, row_blocks, programs = triton.cdiv(num_out, config.block_n), triton.cdiv(num_rows, rows), 1
    partial = out
    if workspace is not None:
        segments = num_segments(num_out, k) if config.split == 1 else config.split
        if segments > 1 and (row_blocks == 1 or tiles * row_blocks <= _FEW_TILES):
            programs = segments
            assert tiles * row_blocks <= MAX_SPLIT_TILES, tiles
            sums = tiles * row_blocks * segments * (2 if fusion.gated else 1)
            partial = torch.empty(sums, config.block_n, rows, dtype=torch.float32, device=x.device)
    _rows_kernel[(tiles * row_blocks * programs,)](
        x, x_scales, weight, scales, fusion.bias, out, partial, None if workspace is None else workspace.num_done,
        num_rows, row_blocks, num_out, k, *((0, 0) if scales is None else scales.stride()),
        GROUP=group, SCALED=scales is not None, HAS_BIAS=fusion.bias is not None, GATED=fusion.gated,
        ADD=fusion.residual is not None, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        EVEN_K=k % config.block_k == 0, PDL=config.launch_pdl, ROWS=rows, SEGMENTS=segments, PROGRAMS=programs,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=config.launch_pdl,
    )  # fmt: skip


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


# Compiled once for all numbers of rows that are padded to ROWS, not anew where 16 divides them.
@triton.jit(do_not_specialize=["num_rows", "row_blocks"])
def _rows_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, partial_ptr, num_done_ptr, num_rows, row_blocks,
    num_out, k_size, row_stride, group_stride, GROUP: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    PDL: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """x [num_rows, k_size], weight [num_out or 2 num_out, k_size] → out [num_rows, num_out]; if SEGMENTS is 0, num_rows
    ≤ ROWS and K is not cut. SCALED: x and weight are E4M3, with scales for whole rows (GROUP 0) or for each GROUP of
    inputs. PROGRAMS: how many share the segments of a tile, all or one."""
    work = tl.program_id(0) // PROGRAMS
    tile = work
    rows = tl.arange(0, ROWS)
    if SEGMENTS > 0:
        together = work // (_TOGETHER * row_blocks) * _TOGETHER
        within = work % (_TOGETHER * row_blocks)
        size = tl.minimum(tl.cdiv(num_out, BLOCK_N) - together, _TOGETHER)
        tile = together + within % size
        rows += within // size * ROWS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    live_n = n < num_out
    # A feature or row past the end computes the first one again, which is in bounds, and is not stored.
    gate = tl.where(live_n, n, 0)
    live_rows = rows < num_rows
    row = tl.where(live_rows, rows, 0)
    begin, end = 0, k_size
    if SEGMENTS > 0:
        row = row.to(tl.int64)
        span = tl.cdiv(tl.cdiv(k_size, _SEGMENT_UNIT), SEGMENTS) * _SEGMENT_UNIT
        total = tl.zeros([BLOCK_N, ROWS], tl.float32)
        total_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
        if PROGRAMS > 1:
            begin = tl.program_id(0) % PROGRAMS * span
            end = tl.minimum(begin + span, k_size)
    cols = tl.arange(0, BLOCK_K)
    up_row = gate.to(tl.int64) + num_out
    weight_ptrs = weight_ptr + gate.to(tl.int64)[:, None] * k_size + cols[None, :]
    up_ptrs = weight_ptr + up_row[:, None] * k_size + cols[None, :]
    x_ptrs = x_ptr + row[None, :] * k_size + cols[:, None]
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    if SCALED:
        num_groups = tl.cdiv(k_size, GROUP) if GROUP > 0 else 1
        scale_ptrs = scales_ptr + gate.to(tl.int64) * row_stride
        up_scale_ptrs = scales_ptr + up_row * row_stride
        x_scale_ptrs = x_scales_ptr + row * num_groups
        first = 0
        if GROUP > 0 and PROGRAMS > 1:
            first = tl.minimum(begin // GROUP, num_groups - 1)
        scales = tl.load(scale_ptrs + first * group_stride)
        x_scales = tl.load(x_scale_ptrs + first)
        if GATED:
            up_scales = tl.load(up_scale_ptrs + first * group_stride)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    acc_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for k in range(begin, end, BLOCK_K):
        if EVEN_K:
            weight = tl.load(weight_ptrs + k, eviction_policy="evict_first")
            x = tl.load(x_ptrs + k)
        else:
            inside = k + cols < k_size
            weight = tl.load(weight_ptrs + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs + k, mask=inside[:, None], other=0.0)
        if GATED:
            if EVEN_K:
                up = tl.load(up_ptrs + k, eviction_policy="evict_first")
            else:
                up = tl.load(up_ptrs + k, mask=(k + cols < k_size)[None, :], other=0.0, eviction_policy="evict_first")
        if SCALED and GROUP > 0:
            # The next group's scales are loaded before the product waits for its operands; after it they would be late.
            group = tl.minimum((k + BLOCK_K) // GROUP, num_groups - 1)
            next_scales = tl.load(scale_ptrs + group * group_stride)
            next_x_scales = tl.load(x_scale_ptrs + group)
            if GATED:
                next_up_scales = tl.load(up_scale_ptrs + group * group_stride)
            acc += tl.dot(weight, x) * (scales[:, None] * x_scales[None, :])
            if GATED:
                acc_up += tl.dot(up, x) * (up_scales[:, None] * x_scales[None, :])
                up_scales = next_up_scales
            scales = next_scales
            x_scales = next_x_scales
        else:
            acc = tl.dot(weight, x, acc, input_precision="ieee")
            if GATED:
                acc_up = tl.dot(up, x, acc_up, input_precision="ieee")
        if SEGMENTS > 1 and PROGRAMS == 1:  # noqa: SIM102 - known when compiling
            if (k + BLOCK_K) % span == 0:
                total += acc
                acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
                if GATED:
                    total_up += acc_up
                    acc_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    if PROGRAMS > 1:
        parts: tl.constexpr = 2 if GATED else 1
        place = tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        sums = partial_ptr + work.to(tl.int64) * (PROGRAMS * parts * BLOCK_N * ROWS) + place
        own = sums + tl.program_id(0) % PROGRAMS * (parts * BLOCK_N * ROWS)
        tl.store(own, acc)
        if GATED:
            tl.store(own + BLOCK_N * ROWS, acc_up)
        # All threads' stores come before the one thread's release, and its acquire before all threads' loads.
        tl.debug_barrier()
        num_before = tl.atomic_add(num_done_ptr + work, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if num_before != PROGRAMS - 1:
            return
        tl.store(num_done_ptr + work, 0)
        acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
        acc_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
        for segment in tl.static_range(PROGRAMS):
            of_segment = sums + segment * (parts * BLOCK_N * ROWS)
            acc += tl.load(of_segment, cache_modifier=".cg")
            if GATED:
                acc_up += tl.load(of_segment + BLOCK_N * ROWS, cache_modifier=".cg")
    elif SEGMENTS > 1:
        acc += total
        acc_up += total_up
    if SCALED and GROUP == 0:
        acc *= scales[:, None] * x_scales[None, :]
        if GATED:
            acc_up *= up_scales[:, None] * x_scales[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + gate).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias_ptr + num_out + gate).to(tl.float32)[:, None]
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    out_ptrs = out_ptr + row.to(tl.int64)[None, :] * num_out + gate[:, None]
    live = live_rows[None, :] & live_n[:, None]
    if ADD:
        acc += tl.load(out_ptrs, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live)
