"""Products of up to some hundred rows with a weight in int4, in Triton: the weight is read as it is stored and is made
plain in registers.

As in ``skinny_gemm``, the weight's rows are the rows of the product on the tensor core and those of x its columns.
Hopper's takes its left side from registers, so the plain numbers never go through shared memory. Products of a few
rows take about as long as reading the stored bytes, and those of a few hundred rows as long as the tensor core.

A word of 32 bits has eight numbers (``quantized.Int4Format``). A shift by four times j and a mask leave two adjacent
ones in the low bits of both halves. With 0x4300 in the high bits, each half is a bfloat16 of 128 + number. The tensor
core wants pair j of a word from the j-th of four lanes. So each of four lanes loads the same words and uses one pair of
each. With ``Int4Config.reorder`` a lane loads words of its own and uses all pairs, for which x must have another order.
This takes a quarter of the loads from shared memory, but x must be copied; where there is a norm, it makes the copy.

From 128 + number a lane subtracts 128 + zero, which is exact, and the sums of a block, whose inputs are of one group,
are multiplied by the scale in float32. So the weight is multiplied as it is stored. And the tensor core has done a
block before the numbers of the next one are made: it reads a left side from registers while the program goes on, and
Triton (3.6) does not keep them. With scaled numbers and sums that stay in the tensor core from block to block, it
overwrites registers that are still being read, and large tiles are wrong. A test searches the machine code for that.

A weight of 4,096 features has too few blocks for all multiprocessors. So K may be split: each program of a tile writes
its sums to a workspace, and the last to end, which an atomic counter shows, adds all of them up in the order of K. So a
result does not depend on timing, and no program waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.layers.kernels.triton.rms_norm import rms_norm
from fenceline.layers.kernels.triton.skinny_gemm import MAX_SPLIT_TILES, PLAIN, Fusion, SplitWorkspace

MAX_INT4_ROWS = 512  # for more, making the matrix plain first was always faster
_MAGIC = tl.constexpr(0x43004300)  # two bfloat16 of 128; the low bits of each half count in ones
_MINUS_MAGIC = tl.constexpr(0xC300C300 - (1 << 32))
_ONES = tl.constexpr(0x3F803F80)
_TWICE = tl.constexpr(0x00010001)  # copies 16 bits to both halves


@dataclass(frozen=True, slots=True)
class Int4Config:
    """How a product is divided: ``block_n`` rows of the weight, ``block_rows`` rows of x and ``block_k`` inputs at a
    time, powers of two of at least 64, 16 and 32; ``block_k`` is at most the group. ``split`` programs share K; if
    ``looped``, one program computes their parts in turn, and the sums are the same. ``reorder``: x is copied into the
    order in which lanes read words. ``launch_pdl``: the kernel starts before the preceding one has ended (programmatic
    dependent launch, sm_90 and later), and meanwhile fetches the first weights and its scales into L2."""

    block_n: int
    block_rows: int
    block_k: int
    num_warps: int
    num_stages: int
    split: int = 1
    looped: bool = False
    reorder: bool = False
    launch_pdl: bool = True


def int4_linear(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group: int,
    config: Int4Config,
    workspace: SplitWorkspace,
    fusion: Fusion = PLAIN,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] times the weight [N, K] that ``data``, ``scales`` and ``zeros`` store (``quantized.Int4Format``), with
    ``fusion`` around it → [T, N] ([T, N / 2] if gated), in x's dtype.

    The result is in ``fusion.residual`` or ``out`` (contiguous, at most one is given) or in a new tensor. x is bfloat16
    (in Triton's interpreter float16 or float32), T at least 1. All tensors are on one device and contiguous, except
    scales and zeros, which have equal strides; ``data`` begins at a multiple of four bytes, N is a multiple of 16 and
    ``group`` divides K. Sums are float32. Current stream, no host synchronisation.

    A norm is a kernel of its own in front (``rms_norm`` or ``reorder_columns``). The product reads the weight, its
    scales and its zero points before its wait.
    """
    (num_rows, k), width = x.shape, data.shape[0]
    num_out = width // 2 if fusion.gated else width
    assert num_rows and x.is_contiguous() and data.is_contiguous() and data.shape == (width, k // 2)
    assert width % 16 == 0 and k % group == 0 and group % 32 == 0, (width, k, group)
    assert scales.shape == zeros.shape == (width, k // group) and scales.stride() == zeros.stride()
    assert group % config.block_k == 0, (config, group)
    assert out is None or fusion.residual is None
    if out is None:
        out = fusion.residual if fusion.residual is not None else x.new_empty(num_rows, num_out)
    assert out.shape == (num_rows, num_out) and out.is_contiguous()
    if config.reorder:
        x = reorder_columns(x, config.block_k, fusion.norm_weight, fusion.eps, config.launch_pdl)
    elif fusion.norm_weight is not None:
        x = rms_norm(x, fusion.norm_weight, fusion.eps, config.launch_pdl)
    row_blocks = triton.cdiv(num_rows, config.block_rows)
    tiles = triton.cdiv(width, config.block_n) * row_blocks
    split = config.split
    partial, programs = out, 1 if config.looped else split
    if programs > 1:
        assert tiles <= MAX_SPLIT_TILES, tiles
        partial = x.new_empty(tiles, split, config.block_n, config.block_rows, dtype=torch.float32)
    _int4_kernel[(tiles * programs,)](
        x, data.view(torch.int32), scales, zeros, fusion.bias, out, partial, workspace.num_done, num_rows, row_blocks,
        num_out, *scales.stride(), K=k, GROUP=group, HAS_BIAS=fusion.bias is not None, GATED=fusion.gated,
        ADD=fusion.residual is not None, BLOCK_N=config.block_n, BLOCK_ROWS=config.block_rows, BLOCK_K=config.block_k,
        SPLIT=split, PROGRAMS=programs, REORDERED=config.reorder, PACKED=x.dtype == torch.bfloat16,
        PDL=config.launch_pdl, num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=config.launch_pdl,
    )  # fmt: skip
    return out


def reorder_columns(
    x: torch.Tensor, block: int, norm_weight: torch.Tensor | None = None, eps: float = 0.0, pdl: bool = False
) -> torch.Tensor:
    """x [T, K], contiguous, of any floating type → a new tensor with the columns of each ``block`` (32, 64 or 128,
    which divides K) in the order in which four lanes read their words: lane t has the ``block`` / 32 words from t *
    ``block`` / 32 on, and of each of these in turn come pair 0 of all four lanes, pair 1 and so on. ``norm_weight`` [K]
    with ``eps``: x is normalised first, as by rms_norm. K is at most 65,536. Current stream, no host synchronisation.
    ``pdl``: see ``rms_norm``; reads ``norm_weight`` before its wait."""
    num_rows, k = x.shape
    assert x.is_contiguous() and k <= 65_536 and block in (32, 64, 128) and k % block == 0, (k, block)
    assert norm_weight is None or (norm_weight.is_contiguous() and norm_weight.shape == (k,))
    out = torch.empty_like(x)
    size = triton.next_power_of_2(k)
    _reorder_kernel[(num_rows,)](
        x, norm_weight, out, k, eps, HAS_NORM=norm_weight is not None, WORDS=block // 32, SIZE=size, PDL=pdl,
        num_warps=max(1, min(16, size // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _reorder_kernel(
    x_ptr, norm_ptr, out_ptr, k_size, eps, HAS_NORM: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row. The columns of a block are [lane, word, pair, 2] and become [word, pair, lane, 2]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < k_size
    if HAS_NORM:
        weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    x = tl.load(x_ptr + row * k_size + column, mask=inside, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / k_size + eps)
        x = (wide * weight).to(x.dtype)
    place = column // (32 * WORDS) * (32 * WORDS) + column // 8 % WORDS * 32 + column // 2 % 4 * 8
    place += column // (8 * WORDS) % 4 * 2 + column % 2
    tl.store(out_ptr + row * k_size + place, x, mask=inside)


# Compiled once for all numbers of rows, not anew where 16 divides them.
@triton.jit(do_not_specialize=["num_rows", "row_blocks"])
def _int4_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr, num_done_ptr, num_rows, row_blocks,
    num_out, row_stride, group_stride, K: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, PROGRAMS: tl.constexpr, REORDERED: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [num_rows, K], weight [num_out or 2 num_out, K] → out [num_rows, num_out]. PACKED: x is bfloat16, and two
    numbers are made plain at a time."""
    # The programs of the same rows of the weight are adjacent, so that it is read from memory once.
    split, tile = tl.program_id(0) % PROGRAMS, tl.program_id(0) // PROGRAMS
    first, block = tile // row_blocks * BLOCK_N, tile % row_blocks
    i = tl.arange(0, BLOCK_N)
    n = _row_of(i, first, num_out, GATED)
    rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live_rows = rows < num_rows
    row = tl.where(live_rows, rows, 0)  # a row past the end is the first one again, and is not stored
    cols, words_at = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 8)
    num_groups: tl.constexpr = K // GROUP
    span: tl.constexpr = (K // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K  # of K, for each program
    begin = split * span
    end = begin + span if span * SPLIT == K else tl.minimum(begin + span, K)
    if PROGRAMS < SPLIT:
        end = K
        total = tl.zeros([BLOCK_N, BLOCK_ROWS], tl.float32)

    words_ptrs = words_ptr + n[:, None] * (K // 8) + words_at[None, :]
    x_ptrs = x_ptr + row[None, :] * K + cols[:, None]
    scale_ptrs = scales_ptr + n[:, None] * row_stride
    zero_ptrs = zeros_ptr + n[:, None] * row_stride
    if PDL:
        tl_cuda.gdc_launch_dependents()
    group = tl.minimum(begin // GROUP, num_groups - 1) * group_stride
    scales = tl.load(scale_ptrs + group)
    zeros = tl.load(zero_ptrs + group).to(tl.int32)
    if PDL:
        if PACKED:
            _prefetch(
                words_ptr, scales_ptr, zeros_ptr, first, begin, num_out, row_stride, group_stride, K, GROUP, GATED,
                BLOCK_N, span,
            )  # fmt: skip
        tl_cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_ROWS], tl.float32)
    for k in range(begin, end, BLOCK_K):
        words = tl.load(words_ptrs + k // 8, eviction_policy="evict_first")
        x = tl.load(x_ptrs + k)
        # Scales are loaded one block ahead; Triton does not pipeline a loop that carries a value over two blocks.
        group = tl.minimum((k + BLOCK_K) // GROUP, num_groups - 1) * group_stride
        next_scales = tl.load(scale_ptrs + group)
        next_zeros = tl.load(zero_ptrs + group).to(tl.int32)
        if PACKED:
            weight = _plain_pairs(words, zeros, REORDERED, BLOCK_N, BLOCK_K)
        else:
            weight = _plain(words, zeros, x.dtype, REORDERED, BLOCK_N, BLOCK_K)
        acc += tl.dot(weight, x, input_precision="ieee") * scales
        scales = next_scales
        zeros = next_zeros
        if PROGRAMS < SPLIT:  # noqa: SIM102 - known when compiling
            if (k + BLOCK_K) % span == 0:
                total += acc
                acc = tl.zeros([BLOCK_N, BLOCK_ROWS], tl.float32)
    if PROGRAMS < SPLIT:
        acc += total

    if PROGRAMS > 1:
        place = i[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        partial_ptrs = partial_ptr + tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_ROWS) + place
        tl.store(partial_ptrs + split * (BLOCK_N * BLOCK_ROWS), acc)
        # All threads' stores come before the one thread's release, and its acquire before all threads' loads.
        tl.debug_barrier()
        num_before = tl.atomic_add(num_done_ptr + tile, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if num_before != SPLIT - 1:
            return
        tl.store(num_done_ptr + tile, 0)
        acc = tl.load(partial_ptrs, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT):
            acc += tl.load(partial_ptrs + other * (BLOCK_N * BLOCK_ROWS), cache_modifier=".cg")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    if GATED:
        parts = tl.permute(tl.reshape(acc, (BLOCK_N // 16, 2, 8, BLOCK_ROWS)), (0, 2, 3, 1))
        gate, up = tl.split(parts)
        acc = tl.reshape(gate * tl.sigmoid(gate) * up, (BLOCK_N // 2, BLOCK_ROWS))
        feature = first // 2 + tl.arange(0, BLOCK_N // 2)
    else:
        feature = first + i
    out_ptrs = out_ptr + row.to(tl.int64)[None, :] * num_out + feature[:, None]
    live = live_rows[None, :] & (feature < num_out)[:, None]
    if ADD:
        acc += tl.load(out_ptrs, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _plain_pairs(words, zeros, REORDERED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The numbers of ``words`` [BLOCK_N, BLOCK_K / 8] less their zero points [BLOCK_N, 1], bfloat16 [BLOCK_N, BLOCK_K].
    Two adjacent numbers are computed together: a shift, a mask that also sets the high bits, and a sum."""
    less = zeros * _TWICE | _MINUS_MAGIC  # two bfloat16 of -(128 + zero)
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b32 pair;
        shr.u32 pair, $2, $3;
        lop3.b32 pair, pair, 0x000f000f, $4, 0xea;
        fma.rn.bf16x2 pair, pair, $5, $6;
        mov.b32 {$0, $1}, pair;
        }""",
        "=h,=h,r,r,r,r,r",
        [
            _for_pairs(words, REORDERED, BLOCK_N, BLOCK_K), _shifts(REORDERED), _MAGIC, _ONES,
            _for_pairs(tl.broadcast_to(less, (BLOCK_N, BLOCK_K // 8)), REORDERED, BLOCK_N, BLOCK_K),
        ],
        dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    return tl.reshape(tl.join(low, high), (BLOCK_N, BLOCK_K))


@triton.jit
def _plain(words, zeros, dtype: tl.constexpr, REORDERED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same in another ``dtype``, for Triton's interpreter."""
    pairs = _for_pairs(words, REORDERED, BLOCK_N, BLOCK_K) >> _shifts(REORDERED)
    less = _for_pairs(tl.broadcast_to(zeros, (BLOCK_N, BLOCK_K // 8)), REORDERED, BLOCK_N, BLOCK_K)
    low, high = (pairs & 15) - less, (pairs >> 16 & 15) - less
    return tl.reshape(tl.join(low, high), (BLOCK_N, BLOCK_K)).to(dtype)


@triton.jit
def _shifts(REORDERED: tl.constexpr):
    """Where the four pairs of a word begin, for ``_for_pairs``."""
    shifts = tl.arange(0, 4) * 4
    if REORDERED:
        shifts = shifts[None, None, None, :, None]
    else:
        shifts = shifts[None, None, :]
    return shifts


@triton.jit
def _for_pairs(values, REORDERED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Values of words [BLOCK_N, BLOCK_K / 8] with another dimension for the pairs of a word: behind, or if REORDERED
    between the words of a lane and the lanes (see ``reorder_columns``)."""
    if REORDERED:
        values = tl.permute(tl.reshape(values, (BLOCK_N, 1, 4, BLOCK_K // 32)), (0, 1, 3, 2))[:, :, :, None, :]
    else:
        values = values[:, :, None]
    return values


@triton.jit
def _row_of(i, first, num_out, GATED: tl.constexpr):
    """The weight's row that is row ``i`` of the tile that begins at ``first``. Of each 16 rows of a gated product's
    tile eight are gates and eight are up, so that a thread has the sums of a gate and of its up. A row past the end is
    the first one again, which is in bounds; its result is not stored."""
    if GATED:
        feature = first // 2 + i // 16 * 8 + i % 8
        row = tl.where(feature < num_out, feature, 0) + i // 8 % 2 * num_out
    else:
        row = tl.where(first + i < num_out, first + i, 0)
    return row


@triton.jit
def _prefetch(
    words_ptr, scales_ptr, zeros_ptr, first, begin, num_out, row_stride, group_stride, K: tl.constexpr,
    GROUP: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Fetch the first 512 numbers of each row of a tile, and all scales and zero points of the tile, into L2."""
    rows = _row_of(tl.arange(0, BLOCK_N), first, num_out, GATED)
    words = tl.minimum(begin // 8 + tl.arange(0, 8) * 8, K // 8 - 1)  # a sector of L2 has eight words
    _prefetch_sectors(words_ptr + rows[:, None] * (K // 8) + words[None, :])
    # The scales of eight adjacent rows are in one sector, and their zero points too.
    num_groups: tl.constexpr = (SPAN + GROUP - 1) // GROUP
    ahead = tl.arange(0, triton.next_power_of_2(num_groups))
    groups = tl.minimum(begin // GROUP + tl.minimum(ahead, num_groups - 1), K // GROUP - 1)
    eighths = _row_of(tl.arange(0, BLOCK_N // 8) * 8, first, num_out, GATED)
    at = eighths[:, None] * row_stride + groups[None, :] * group_stride
    _prefetch_sectors(scales_ptr + at)
    _prefetch_sectors(zeros_ptr + at)


@triton.jit
def _prefetch_sectors(pointers):
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [pointers.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
