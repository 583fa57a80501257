"""The products of a mixture of experts in Triton. Every row is multiplied by the matrix of its expert, and rows with
the same expert read it together. An expert without rows is not read.

Up to 32 pairs of token and expert are multiplied one by one, because two of them rarely have the same expert: a program
computes a few features of one pair. With more pairs, a program computes a tile: up to ``block_m`` pairs of one expert
by ``block_n`` features. The grid has as many tiles as any routing may need. Each program finds its expert from the ends
of the experts' pairs, and programs past the last tile end at once. If no expert has more than ``block_m`` pairs, as
usual in decode, each matrix is read at most once. In both cases a program sums over all of K, so results do not depend
on timing.

Matrices of four-bit numbers (``four_bit``) are read as they are stored. A byte has two numbers that are 16 inputs
apart, so adjacent bytes are multiplied by adjacent inputs. The sum over K is the sum over the low halves plus that over
the high halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.config.quantization import INT4_GROUPS
from fenceline.layers.kernels.base import CLAMPED_ALPHA, FP8_GROUP, Routing
from fenceline.memory_order.triton_launcher import KernelVariant

_COMBINE_BLOCK = 1024
_FEW_PAIRS = 32  # up to this many pairs are multiplied one by one
_CLAMPED_ALPHA = tl.constexpr(CLAMPED_ALPHA)
_GROUP = tl.constexpr(FP8_GROUP)
_INT4, _E2M1 = tl.constexpr(1), tl.constexpr(2)  # formats of four bits: integers with zero points, MXFP4
_TWICE_E2M1 = tl.constexpr(0xC8643210 - (1 << 32))  # twice each of the eight magnitudes, in four bits each


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """How a grouped product is divided: pairs, features and inputs at a time, powers of two of at least 16."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def grouped_config(num_pairs: int, num_experts: int, itemsize: int) -> GroupedConfig:
    """The configuration for ``num_pairs`` pairs. It does not depend on the routing."""
    if itemsize > 2:
        return GroupedConfig(16, 32, 32, 4, 2)
    pairs_an_expert = num_pairs // num_experts
    if pairs_an_expert <= 16:
        return GroupedConfig(16, 64, 128, 4, 3)
    if pairs_an_expert <= 64:
        return GroupedConfig(64, 64, 64, 4, 3)
    return GroupedConfig(128, 64, 64, 8, 3)


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    gated: bool = False,
    config: GroupedConfig | None = None,
    bias: torch.Tensor | None = None,
    limit: float = 0.0,
    scales: torch.Tensor | None = None,
    pdl: bool = False,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``LayerKernels.grouped_product``. All tensors are contiguous; x, weight and bias have one floating dtype, or
    weight is FP8, int8 or four-bit with ``scales``; sums are float32. With many pairs, four-bit numbers are multiplied
    in x's dtype, and ``config`` must take a multiple of 32 inputs at a time. Current stream, no host synchronisation.
    ``pdl``: see ``rms_norm``; reads nothing before its wait."""
    num_experts, width, k = len(routing.ends), weight.shape[1], x.shape[1]
    num_pairs, size = routing.order.shape[0], width // 2 if gated else width
    assert x.is_contiguous() and weight.is_contiguous()
    groups, packed = 0, weight.dtype == torch.uint8
    assert weight.shape[2] == (k // 2 if packed else k)
    if scales is not None:
        groups = scales.shape[2]
        assert scales.is_contiguous() and scales.shape[:2] == weight.shape[:2]
    if packed:
        assert scales is not None and k % groups == 0 and k // groups in INT4_GROUPS, (groups, k)
        assert scales.dtype == (torch.uint8 if zeros is None else torch.float32)
        assert zeros is None or (zeros.is_contiguous() and zeros.shape == scales.shape)
    else:
        of_eight_bits = scales is not None and weight.dtype in (torch.float8_e4m3fn, torch.int8)
        assert (of_eight_bits or (scales is None and weight.dtype == x.dtype)) and zeros is None
        assert scales is None or groups in (1, -(-k // FP8_GROUP)), (groups, k)
    assert bias is None or (bias.is_contiguous() and bias.shape == weight.shape[:2])
    assert gated or not limit
    out = x.new_empty(num_pairs, size)
    if num_pairs == 0:
        return out
    pairs_a_row = num_pairs // x.shape[0]
    numbers = 0 if not packed else _E2M1 if zeros is None else _INT4
    kind = (num_experts, size, k, pairs_a_row, gated, bias is not None, limit > 0, groups, numbers, pdl)
    operands = (x, weight, routing.order, routing.ends, out, bias, scales, zeros)
    if config is None and num_pairs <= _FEW_PAIRS:
        variant = _product_variant(kind, None)
        grid = (num_pairs * -(-size // variant.constants["BLOCK_N"]),)
        variant.launch(grid, operands, (float(limit),))
        return out
    if config is None:
        config = grouped_config(num_pairs, num_experts, x.element_size())
    assert not packed or config.block_k % 32 == 0
    variant = _product_variant(kind, config)
    num_tiles = min(num_pairs, min(num_pairs, num_experts) + num_pairs // config.block_m)
    grid = (num_tiles * -(-size // config.block_n),)
    variant.launch(grid, operands, (float(limit),))
    return out


def combine_experts(
    y: torch.Tensor, routing: Routing, residual: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """See ``LayerKernels.combine_experts``. y and ``residual`` contiguous. Current stream, no host synchronisation.
    ``pdl``: see ``rms_norm``; reads nothing before its wait."""
    num_tokens, top_k = routing.ids.shape
    size = y.shape[1]
    out = y.new_empty(num_tokens, size) if residual is None else residual
    assert y.is_contiguous() and out.is_contiguous() and out.shape == (num_tokens, size)
    if num_tokens == 0:
        return out
    variant = _combine_variant(len(routing.ends), top_k, size, residual is not None, pdl)
    grid = (num_tokens * -(-size // variant.constants["BLOCK"]),)
    variant.launch(grid, (y, routing.ids, routing.weights, out))
    return out


# What a product's kernel depends on, but for how it is divided.
_KIND = ("NUM_EXPERTS", "SIZE", "K", "PAIRS_A_ROW", "GATED", "HAS_BIAS", "CLAMPS", "GROUPS", "NUMBERS", "PDL")


@cache
def _product_variant(kind: tuple[int | bool, ...], config: GroupedConfig | None) -> KernelVariant:
    """The kernel of tiles, or without ``config`` that of pairs."""
    constants = dict(zip(_KIND, kind, strict=True))
    constants["BLOCK_EXPERTS"] = triton.next_power_of_2(constants["NUM_EXPERTS"])
    pdl = bool(constants["PDL"])
    if config is None:
        most = 1024 if constants["NUMBERS"] else 512  # inputs at a time; four-bit numbers take twice as many
        constants |= {
            "BLOCK_N": 4 if constants["GATED"] else 8,
            "BLOCK_K": min(most, triton.next_power_of_2(constants["K"])),
        }
        return KernelVariant(_pair_kernel, constants, 4, pdl)
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    return KernelVariant(_grouped_kernel, constants, config.num_warps, pdl, config.num_stages)


@cache
def _combine_variant(num_experts: int, top_k: int, size: int, adds: bool, pdl: bool) -> KernelVariant:
    block = min(_COMBINE_BLOCK, triton.next_power_of_2(size))
    constants: dict[str, int | bool] = {
        "NUM_EXPERTS": num_experts,
        "TOP_K": top_k,
        "SIZE": size,
        "ADDS": adds,
        "BLOCK": block,
        "PDL": pdl,
    }
    return KernelVariant(_combine_kernel, constants, 4, pdl)


@triton.jit
def _gated(gate, up, limit, CLAMPS: tl.constexpr):
    """SwiGLU of gate and up, or the clamped one: see ``LayerKernels.grouped_product``."""
    if CLAMPS:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        y = gate * tl.sigmoid(_CLAMPED_ALPHA * gate) * (up + 1.0)
    else:
        y = gate * tl.sigmoid(gate) * up
    return y


@triton.jit
def _four_bit_number(bits, NUMBERS: tl.constexpr):
    """The number that four bits stand for, int32 → float32. For E2M1 it is twice that number."""
    size = bits
    if NUMBERS == _E2M1:
        size = (_TWICE_E2M1 >> (bits & 7) * 4) & 15
    # The bits of 2^23 + size as a float32; this is faster than a conversion.
    number = (size | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    if NUMBERS == _E2M1:
        number = (number.to(tl.int32, bitcast=True) ^ ((bits & 8) << 28)).to(tl.float32, bitcast=True)
    return number


@triton.jit
def _four_bit_scales(scales, zeros, places, wanted, NUMBERS: tl.constexpr):
    """The float32 scales and zero points of groups: a number's value is (number - zero) * scale."""
    if NUMBERS == _E2M1:
        exponents = tl.load(scales + places, mask=wanted, other=0).to(tl.int32)
        # 2 to the power of (exponent - 127), and half of it, since the numbers are twice theirs.
        scale = (exponents << 23).to(tl.float32, bitcast=True) * 0.5
        zero = tl.zeros(scale.shape, dtype=tl.float32)
    else:
        scale = tl.load(scales + places, mask=wanted, other=0.0)
        zero = tl.load(zeros + places, mask=wanted, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def _four_bit_part(
    weight, scales, zeros, of_bytes, of_groups, wanted, scale_wanted, low_x, high_x, NUMBERS: tl.constexpr
):  # fmt: skip
    """The sum of each byte's two numbers times their inputs, [rows, groups, bytes]."""
    scale, zero = _four_bit_scales(scales, zeros, of_groups, scale_wanted, NUMBERS)
    both = tl.load(weight + of_bytes, mask=wanted, other=0).to(tl.int32)
    part = (_four_bit_number(both & 15, NUMBERS) - zero[:, :, None]) * low_x
    part += (_four_bit_number(both >> 4, NUMBERS) - zero[:, :, None]) * high_x
    return part * scale[:, :, None]


@triton.jit
def _four_bit_sums(
    x_row, weight, scales, zeros, matrix_rows, exists,
    SIZE: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, GROUPS: tl.constexpr, NUMBERS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x_row [K] times those of ``matrix_rows`` [BLOCK_N] that ``exist``, and if GATED also those SIZE rows further."""
    bytes_each: tl.constexpr = K // GROUPS // 2  # of a group
    block_groups: tl.constexpr = BLOCK_K // 2 // bytes_each
    groups, within = tl.arange(0, block_groups), tl.arange(0, bytes_each)
    place = groups[:, None] * bytes_each + within[None, :]
    lower = groups[:, None] * (2 * bytes_each) + (within // 16 * 32 + within % 16)[None, :]
    sums = tl.zeros((BLOCK_N, block_groups, bytes_each), dtype=tl.float32)
    up_sums = tl.zeros((BLOCK_N, block_groups, bytes_each), dtype=tl.float32)
    for first in range(0, GROUPS, block_groups):
        inside = first + groups < GROUPS
        has_input = inside[:, None] & (within >= 0)[None, :]
        inputs = x_row + first * (2 * bytes_each) + lower
        low_x = tl.load(inputs, mask=has_input, other=0.0).to(tl.float32)[None, :, :]
        high_x = tl.load(inputs + 16, mask=has_input, other=0.0).to(tl.float32)[None, :, :]
        scale_wanted = exists[:, None] & inside[None, :]
        wanted = exists[:, None, None] & has_input[None, :, :]
        of_groups = matrix_rows[:, None] * GROUPS + (first + groups)[None, :]
        of_bytes = matrix_rows[:, None, None] * (K // 2) + (first * bytes_each + place)[None, :, :]
        sums += _four_bit_part(
            weight, scales, zeros, of_bytes, of_groups, wanted, scale_wanted, low_x, high_x, NUMBERS
        )  # fmt: skip
        if GATED:
            of_bytes += SIZE * (K // 2)
            of_groups += SIZE * GROUPS
            up_sums += _four_bit_part(
                weight, scales, zeros, of_bytes, of_groups, wanted, scale_wanted, low_x, high_x, NUMBERS
            )  # fmt: skip
    return tl.sum(tl.sum(sums, 2), 1), tl.sum(tl.sum(up_sums, 2), 1)


@triton.jit
def _four_bit_tiles(
    weight, scales, zeros, matrix_rows, exists, at,
    K: tl.constexpr, GROUPS: tl.constexpr, NUMBERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The numbers of those ``matrix_rows`` [BLOCK_N] that ``exist``, for BLOCK_K inputs from ``at`` on: those in the
    low halves of bytes and those in the high halves, float32 [BLOCK_K / 2, BLOCK_N] each."""
    group: tl.constexpr = K // GROUPS
    bytes_each: tl.constexpr = (BLOCK_K if group > BLOCK_K else group) // 2  # that have one scale
    block_groups: tl.constexpr = BLOCK_K // 2 // bytes_each
    groups, within = tl.arange(0, block_groups), tl.arange(0, bytes_each)
    of_group = at // group + groups
    scale_wanted = (of_group < GROUPS)[:, None] & exists[None, :]
    scale, zero = _four_bit_scales(
        scales, zeros, matrix_rows[None, :] * GROUPS + of_group[:, None], scale_wanted, NUMBERS
    )
    place = at // 2 + groups[:, None] * bytes_each + within[None, :]
    wanted = (place < K // 2)[:, :, None] & exists[None, None, :]
    of_bytes = weight + matrix_rows[None, None, :] * (K // 2) + place[:, :, None]
    both = tl.load(of_bytes, mask=wanted, other=0).to(tl.int32)
    low = (_four_bit_number(both & 15, NUMBERS) - zero[:, None, :]) * scale[:, None, :]
    high = (_four_bit_number(both >> 4, NUMBERS) - zero[:, None, :]) * scale[:, None, :]
    return tl.reshape(low, (BLOCK_K // 2, BLOCK_N)), tl.reshape(high, (BLOCK_K // 2, BLOCK_N))


@triton.jit
def _pair_kernel(
    x, weight, order, ends, out, bias, scales, zeros, limit,
    NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPS: tl.constexpr, GROUPS: tl.constexpr,
    NUMBERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    num_blocks: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    place = tl.program_id(0) // num_blocks
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    experts = tl.arange(0, BLOCK_EXPERTS)
    last = tl.load(ends + experts, mask=experts < NUM_EXPERTS, other=0x7FFFFFFF)
    pair = tl.load(order + place)
    expert = tl.sum((last <= place).to(tl.int32), 0)
    if expert >= NUM_EXPERTS:
        return  # a pair of a padded token
    columns = (tl.program_id(0) % num_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    width: tl.constexpr = 2 * SIZE if GATED else SIZE
    x_row = x + pair // PAIRS_A_ROW * K
    if NUMBERS > 0:
        y, up_y = _four_bit_sums(
            x_row, weight, scales, zeros, expert.to(tl.int64) * width + columns, columns < SIZE,
            SIZE, K, GATED, GROUPS, NUMBERS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        w_rows = weight + (expert.to(tl.int64) * width + columns)[:, None] * K
        if GROUPS > 1:
            scale_rows = scales + (expert.to(tl.int64) * width + columns)[:, None] * GROUPS
        sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        up_sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        for at in range(0, K, BLOCK_K):
            inside = at + inputs < K
            row = tl.load(x_row + at + inputs, mask=inside, other=0.0).to(tl.float32)[None, :]
            wanted = (columns < SIZE)[:, None] & inside[None, :]
            numbers = tl.load(w_rows + (at + inputs)[None, :], mask=wanted, other=0.0).to(tl.float32)
            if GROUPS > 1:
                of_group = scale_rows + ((at + inputs) // _GROUP)[None, :]
                numbers *= tl.load(of_group, mask=wanted, other=0.0)
            sums += numbers * row
            if GATED:
                up = tl.load(w_rows + SIZE * K + (at + inputs)[None, :], mask=wanted, other=0.0).to(tl.float32)
                if GROUPS > 1:
                    up *= tl.load(of_group + SIZE * GROUPS, mask=wanted, other=0.0)
                up_sums += up * row
        y = tl.sum(sums, 1)
        up_y = tl.sum(up_sums, 1)
    if GROUPS == 1 and NUMBERS == 0:
        of_row = scales + expert.to(tl.int64) * width + columns
        y *= tl.load(of_row, mask=columns < SIZE, other=0.0)
    if HAS_BIAS:
        biases = bias + expert.to(tl.int64) * width + columns
        y += tl.load(biases, mask=columns < SIZE, other=0.0).to(tl.float32)
    if GATED:
        if GROUPS == 1 and NUMBERS == 0:
            up_y *= tl.load(of_row + SIZE, mask=columns < SIZE, other=0.0)
        if HAS_BIAS:
            up_y += tl.load(biases + SIZE, mask=columns < SIZE, other=0.0).to(tl.float32)
        y = _gated(y, up_y, limit, CLAMPS)
    tl.store(out + pair * SIZE + columns, y.to(out.dtype.element_ty), mask=columns < SIZE)


@triton.jit
def _grouped_kernel(
    x, weight, order, ends, out, bias, scales, zeros, limit,
    NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPS: tl.constexpr, GROUPS: tl.constexpr,
    NUMBERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    num_blocks: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // num_blocks
    experts = tl.arange(0, BLOCK_EXPERTS)
    exists = experts < NUM_EXPERTS
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    last = tl.load(ends + experts, mask=exists, other=0)
    first = tl.load(ends + experts - 1, mask=exists & (experts > 0), other=0)
    tiles = tl.where(exists, (last - first + BLOCK_M - 1) // BLOCK_M, 0)
    before = tl.cumsum(tiles, 0) - tiles  # tiles of all preceding experts
    mine = (before <= tile) & (tile < before + tiles)
    if tl.sum(mine.to(tl.int32), 0) == 0:
        return
    expert = tl.sum(tl.where(mine, experts, 0), 0).to(tl.int64)
    start = tl.sum(tl.where(mine, first + (tile - before) * BLOCK_M, 0), 0)
    end = tl.sum(tl.where(mine, last, 0), 0)

    places = start + tl.arange(0, BLOCK_M)
    live = places < end
    pairs = tl.load(order + places, mask=live, other=0)
    columns = (tl.program_id(0) % num_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    width: tl.constexpr = 2 * SIZE if GATED else SIZE
    x_rows = x + (pairs // PAIRS_A_ROW)[:, None] * K
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if NUMBERS > 0:
        halves = tl.arange(0, BLOCK_K // 2)
        lower = halves // 16 * 32 + halves % 16  # the inputs of the bytes' low halves; the high ones' follow 16 later
        matrix_rows = expert * width + columns
        for at in range(0, K, BLOCK_K):
            wanted = live[:, None] & (at + lower < K)[None, :]
            row = tl.load(x_rows + (at + lower)[None, :], mask=wanted, other=0.0)
            high_row = tl.load(x_rows + (at + lower + 16)[None, :], mask=wanted, other=0.0)
            low, high = _four_bit_tiles(
                weight, scales, zeros, matrix_rows, columns < SIZE, at, K, GROUPS, NUMBERS, BLOCK_N, BLOCK_K
            )  # fmt: skip
            sums = tl.dot(row, low.to(row.dtype), sums, input_precision="ieee")
            sums = tl.dot(high_row, high.to(row.dtype), sums, input_precision="ieee")
            if GATED:
                low, high = _four_bit_tiles(
                    weight, scales, zeros, matrix_rows + SIZE, columns < SIZE, at, K, GROUPS, NUMBERS, BLOCK_N, BLOCK_K
                )  # fmt: skip
                up_sums = tl.dot(row, low.to(row.dtype), up_sums, input_precision="ieee")
                up_sums = tl.dot(high_row, high.to(row.dtype), up_sums, input_precision="ieee")
    else:
        w_rows = weight + (expert * width + columns)[None, :] * K
        if GROUPS > 0:
            scale_rows = scales + (expert * width + columns) * GROUPS
        for at in range(0, K, BLOCK_K):
            inside = at + inputs < K
            row = tl.load(x_rows + (at + inputs)[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            wanted = inside[:, None] & (columns < SIZE)[None, :]
            matrix = tl.load(w_rows + (at + inputs)[:, None], mask=wanted, other=0.0).to(row.dtype)
            if GROUPS > 1:  # a block of inputs lies in one group
                of_group = scale_rows + at // _GROUP
                scale = tl.load(of_group, mask=columns < SIZE, other=0.0)[None, :]
                sums += tl.dot(row, matrix, input_precision="ieee") * scale
            else:
                sums = tl.dot(row, matrix, sums, input_precision="ieee")
            if GATED:
                up = tl.load(w_rows + SIZE * K + (at + inputs)[:, None], mask=wanted, other=0.0).to(row.dtype)
                if GROUPS > 1:
                    up_scale = tl.load(of_group + SIZE * GROUPS, mask=columns < SIZE, other=0.0)[None, :]
                    up_sums += tl.dot(row, up, input_precision="ieee") * up_scale
                else:
                    up_sums = tl.dot(row, up, up_sums, input_precision="ieee")
    if GROUPS == 1 and NUMBERS == 0:
        sums *= tl.load(scale_rows, mask=columns < SIZE, other=0.0)[None, :]
        if GATED:
            up_sums *= tl.load(scale_rows + SIZE, mask=columns < SIZE, other=0.0)[None, :]
    if HAS_BIAS:
        biases = bias + expert * width + columns
        sums += tl.load(biases, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_sums += tl.load(biases + SIZE, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
    if GATED:
        sums = _gated(sums, up_sums, limit, CLAMPS)
    stored = live[:, None] & (columns < SIZE)[None, :]
    tl.store(out + pairs[:, None] * SIZE + columns[None, :], sums.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _combine_kernel(
    y, ids, weights, out,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIZE: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    num_blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(TOP_K):
        pair = token * TOP_K + j
        live = tl.load(ids + pair) < NUM_EXPERTS  # a padded token's rows were never computed
        row = tl.load(y + pair * SIZE + columns, mask=inside & live, other=0.0)
        total += row.to(tl.float32) * tl.load(weights + pair)
    places = out + token * SIZE + columns
    if ADDS:
        total += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, total.to(out.dtype.element_ty), mask=inside)
