"""The one launch between the projections of an indexer and its scores: it normalises the key of each token, rotates it
and the queries, rounds both if the pool keeps keys in FP8, and stores the key."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.layers.kernels.triton.rotate_store import rounded
from fenceline.memory_order.triton_launcher import KernelVariant

_BLOCK_HEADS = 16  # that a program has, the fewest rows of a matrix product
_NUM_WARPS = 4
_SCALE_BYTES = 4  # at the end of a row in FP8


def store_index(
    queries: torch.Tensor,
    key: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    out_weights: torch.Tensor,
    cache_rows: torch.Tensor,
    out_slots: torch.Tensor,
    pdl: bool = False,
) -> None:
    """See ``LayerKernels.store_index``. All tensors are contiguous. The numbers of positions and out_slots must be in
    range (not checked); slots of padded tokens may repeat, and it is undefined which token's bytes stay there. Current
    stream, no host synchronisation. ``pdl``: see ``rms_norm``; reads positions, out_slots, table and the norm's weight
    and bias before its wait."""
    num_tokens, num_heads, head_dim = queries.shape
    half = table.shape[1] // 3
    assert key.shape == (num_tokens, head_dim) and 2 * half <= head_dim
    assert out.shape == queries.shape and weights.shape == out_weights.shape == (num_tokens, num_heads)
    assert all(t.is_contiguous() for t in (queries, key, table, weights, out, out_weights, cache_rows, norm_weight))
    assert norm_bias.is_contiguous() and positions.is_contiguous() and out_slots.is_contiguous()
    assert out.dtype == queries.dtype == key.dtype and weights.dtype == out_weights.dtype == torch.float32
    assert table.dtype == torch.float32 and positions.dtype == out_slots.dtype == torch.int64
    rounds, scales = cache_rows.dtype == torch.uint8, None
    assert cache_rows.shape[1:] == (1, head_dim + rounds * _SCALE_BYTES)
    if rounds:
        scales, cache_rows = cache_rows.view(torch.float32), cache_rows.view(torch.float8_e4m3fn)
    assert rounds or cache_rows.dtype == out.dtype
    if num_tokens == 0:
        return
    blocks, variant = _variant(num_heads, head_dim, half, rounds, pdl)
    operands = (queries, key, norm_weight, norm_bias, table, positions, weights, out, out_weights, cache_rows)
    variant.launch((num_tokens * blocks,), (*operands, scales, out_slots), (eps, scale))


@cache
def _variant(num_heads: int, head_dim: int, half: int, rounds: bool, pdl: bool) -> tuple[int, KernelVariant]:
    """The number of programs for each token, and the kernel that they run."""
    constants = {
        "HEADS": num_heads,
        "DIM": head_dim,
        "DIM_PAD": max(triton.next_power_of_2(head_dim), 16),
        "HALF": half,
        "BLOCK_HEADS": _BLOCK_HEADS,
        "ROUNDS": rounds,
        "PDL": pdl,
    }
    return 1 + -(-num_heads // _BLOCK_HEADS), KernelVariant(_store_index_kernel, constants, _NUM_WARPS, pdl)


@triton.jit
def _store_index_kernel(
    queries, key, norm_weight, norm_bias, table, positions, weights, out, out_weights, cache_rows, scales, out_slots,
    eps, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's first program has its key, each of the others some heads of its queries: [BLOCK_HEADS, features], of
    which the key is one row."""
    BLOCKS: tl.constexpr = 1 + (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    ROW: tl.constexpr = DIM + 4 if ROUNDS else DIM
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    is_key = tl.program_id(0) % BLOCKS == 0
    dtype = out.dtype.element_ty
    dims, rows = tl.arange(0, DIM_PAD), tl.arange(0, BLOCK_HEADS)
    # A rotated feature is x cos + (its partner) sin, in the first half of them with the other sign.
    rotates = dims < 2 * HALF
    partners = tl.where(dims < HALF, dims + HALF, tl.where(rotates, dims - HALF, dims))
    angles = table + tl.load(positions + token) * (3 * HALF) + dims % HALF
    cos = tl.load(angles, mask=rotates, other=1.0)
    sin = tl.load(angles + 2 * HALF, mask=rotates, other=0.0)
    sin = tl.where(dims < HALF, -sin, sin)
    inside = dims < DIM
    weight, bias = (
        tl.load(norm_weight + dims, mask=inside, other=0.0),
        tl.load(norm_bias + dims, mask=inside, other=0.0),
    )
    of_partner = tl.load(norm_weight + partners, mask=inside, other=0.0)
    bias_of_partner = tl.load(norm_bias + partners, mask=inside, other=0.0)
    slot = tl.load(out_slots + token)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()

    heads = (tl.program_id(0) % BLOCKS - 1) * BLOCK_HEADS + rows
    live = tl.where(is_key, rows == 0, (heads >= 0) & (heads < HEADS))
    wanted = live[:, None] & inside[None, :]
    if is_key:
        x = tl.load(key + token * DIM + rows[:, None] * 0 + dims[None, :], mask=wanted, other=0.0).to(tl.float32)
        partner = tl.load(key + token * DIM + rows[:, None] * 0 + partners[None, :], mask=wanted, other=0.0)
        mean = (tl.sum(x, 1) / DIM)[:, None]
        off = tl.where(wanted, x - mean, 0.0)
        factor = tl.rsqrt(tl.sum(off * off, 1) / DIM + eps)[:, None]
        x = (off * factor * weight[None, :] + bias[None, :]).to(dtype).to(tl.float32)
        other = (partner.to(tl.float32) - mean) * factor
        other = (other * of_partner[None, :] + bias_of_partner[None, :]).to(dtype).to(tl.float32)
    else:
        first = queries + token * (HEADS * DIM) + heads[:, None] * DIM
        x = tl.load(first + dims[None, :], mask=wanted, other=0.0).to(tl.float32)
        other = tl.load(first + partners[None, :], mask=wanted, other=0.0).to(tl.float32)
    turned = (x * cos[None, :] + other * sin[None, :]).to(dtype)
    turned = tl.where(wanted, turned, 0.0).to(dtype)
    gain = tl.full([BLOCK_HEADS], 1.0, tl.float32)
    if ROUNDS:
        # The Hadamard matrix of Sylvester's construction: -1 where the indices have an odd number of common bits.
        common = dims[:, None] & dims[None, :]
        common = common ^ (common >> 8)
        common = common ^ (common >> 4)
        common = common ^ (common >> 2)
        common = common ^ (common >> 1)
        matrix = (1 - 2 * (common & 1)).to(dtype)
        spread = tl.dot(turned, matrix, input_precision="ieee") * (1.0 / tl.sqrt(tl.full([], DIM, tl.float32)))
        gain = tl.maximum(tl.max(tl.abs(spread), 1), 1e-4) / 448.0
        numbers, turned_32 = rounded(spread, gain[:, None], cache_rows)
        turned = turned_32.to(dtype)
    else:
        numbers = turned
    if is_key:
        tl.store(cache_rows + slot * ROW + rows[:, None] * 0 + dims[None, :], numbers, mask=wanted)
        if ROUNDS:
            tl.store(scales + slot * (ROW // 4) + DIM // 4 + rows * 0, gain, mask=live)
    else:
        tl.store(out + token * (HEADS * DIM) + heads[:, None] * DIM + dims[None, :], turned, mask=wanted)
        at = token * HEADS + heads
        tl.store(out_weights + at, tl.load(weights + at, mask=live, other=0.0) * scale * gain, mask=live)
