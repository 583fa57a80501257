"""The one launch between the projections of latent attention and attention itself: it normalises and rotates the row
of each token and stores it, and rotates the queries."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from fenceline.layers.kernels.triton.rotate_store import rounded
from fenceline.memory_order.triton_launcher import KernelVariant

_TILE = 512  # features in each half of the rotated heads of a program
_NUM_WARPS = 4


def store_latent(
    queries: torch.Tensor,
    row: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    cache_rows: torch.Tensor,
    out_slots: torch.Tensor,
    pdl: bool = False,
) -> None:
    """See ``LayerKernels.store_latent``. ``out``, ``cache_rows``, table, positions and out_slots are contiguous, as are
    a token's queries and its row. The numbers of positions and out_slots must be in range (not checked); slots of
    padded tokens may repeat, and it is undefined which token's bytes stay there. Current stream, no host
    synchronisation. ``pdl``: see ``rms_norm``; reads positions, out_slots, table and the norm's weight before its
    wait."""
    num_tokens, num_heads, query_dim = queries.shape
    rank, half = len(norm_weight), table.shape[1] // 3
    width = rank + 2 * half
    assert row.shape == (num_tokens, width) and row.stride(1) == 1 and query_dim >= 2 * half
    assert queries.stride(2) == 1 and queries.stride(1) == query_dim
    assert out.shape == (num_tokens, num_heads + 1, width) and out.is_contiguous()
    assert cache_rows.shape[1:] == (1, width) and cache_rows.is_contiguous()
    rounds = cache_rows.dtype == torch.float8_e4m3fn
    assert out.dtype == queries.dtype == row.dtype and (rounds or cache_rows.dtype == out.dtype)
    assert table.dtype == torch.float32 and table.is_contiguous() and norm_weight.is_contiguous()
    assert positions.dtype == out_slots.dtype == torch.int64
    assert positions.is_contiguous() and out_slots.is_contiguous()
    if num_tokens == 0:
        return
    strides = queries.stride(0), row.stride(0)
    blocks, variant = _variant(num_heads, query_dim, rank, half, strides, rounds, pdl)
    tensors = (queries, row, norm_weight, table, positions, out, cache_rows, out_slots)
    variant.launch((num_tokens * blocks,), tensors, (eps,))


@cache
def _variant(
    num_heads: int, query_dim: int, rank: int, half: int, strides: tuple[int, int], rounds: bool, pdl: bool
) -> tuple[int, KernelVariant]:
    """The number of programs for each token, and the kernel that they run."""
    block_half = triton.next_power_of_2(half)
    block_heads = min(max(_TILE // block_half, 1), triton.next_power_of_2(num_heads))
    constants = {
        "NUM_HEADS": num_heads,
        "QUERY_DIM": query_dim,
        "RANK": rank,
        "BLOCK_RANK": triton.next_power_of_2(rank),
        "HALF": half,
        "BLOCK_HALF": block_half,
        "BLOCK_HEADS": block_heads,
        "QUERY_STRIDE": strides[0],
        "ROW_STRIDE": strides[1],
        "ROUNDS": rounds,
        "PDL": pdl,
    }
    return 1 + -(-num_heads // block_heads), KernelVariant(_store_latent_kernel, constants, _NUM_WARPS, pdl)


@triton.jit
def _store_latent_kernel(
    queries, row, norm_weight, table, positions, out, cache_rows, out_slots, eps,
    NUM_HEADS: tl.constexpr, QUERY_DIM: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, QUERY_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's first program computes its row, each of the others rotates some heads, as two tiles [heads, half]."""
    BLOCKS: tl.constexpr = 1 + (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    WIDTH: tl.constexpr = RANK + 2 * HALF
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    dtype = out.dtype.element_ty
    lanes = tl.arange(0, BLOCK_HALF)
    in_half = lanes < HALF
    angles = table + tl.load(positions + token) * (3 * HALF) + lanes
    cos = tl.load(angles, mask=in_half, other=0.0)
    sin = tl.load(angles + 2 * HALF, mask=in_half, other=0.0)
    features = tl.arange(0, BLOCK_RANK)
    in_rank = features < RANK
    is_row = block == 0
    weight = tl.load(norm_weight + features, mask=in_rank & is_row, other=0.0).to(tl.float32)
    stored = cache_rows + tl.load(out_slots + token) * WIDTH
    first_head = out + token * ((NUM_HEADS + 1) * WIDTH)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()

    if is_row:
        source = row + token * ROW_STRIDE
        target = first_head + NUM_HEADS * WIDTH
        latent = tl.load(source + features, mask=in_rank, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        normed = (latent * factor * weight).to(dtype)
        x1 = tl.load(source + RANK + lanes, mask=in_half, other=0.0).to(tl.float32)
        x2 = tl.load(source + RANK + HALF + lanes, mask=in_half, other=0.0).to(tl.float32)
        y1, y2 = (x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype)
        if ROUNDS:
            r, normed = rounded(normed, 1.0, cache_rows)
            r1, y1 = rounded(y1, 1.0, cache_rows)
            r2, y2 = rounded(y2, 1.0, cache_rows)
        else:
            r, r1, r2 = normed, y1, y2
        tl.store(stored + features, r, mask=in_rank)
        tl.store(stored + RANK + lanes, r1, mask=in_half)
        tl.store(stored + RANK + HALF + lanes, r2, mask=in_half)
        tl.store(target + features, normed, mask=in_rank)
        tl.store(target + RANK + lanes, y1, mask=in_half)
        tl.store(target + RANK + HALF + lanes, y2, mask=in_half)
    else:
        heads = (block - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        live = (heads < NUM_HEADS)[:, None] & in_half[None, :]
        first = queries + token * QUERY_STRIDE + heads[:, None] * QUERY_DIM + (QUERY_DIM - 2 * HALF) + lanes[None, :]
        q1 = tl.load(first, mask=live, other=0.0).to(tl.float32)
        q2 = tl.load(first + HALF, mask=live, other=0.0).to(tl.float32)
        rotated = first_head + heads[:, None] * WIDTH + RANK + lanes[None, :]
        tl.store(rotated, (q1 * cos[None, :] - q2 * sin[None, :]).to(dtype), mask=live)
        tl.store(rotated + HALF, (q2 * cos[None, :] + q1 * sin[None, :]).to(dtype), mask=live)
