"""Causal attention of new tokens after a prefix, both in the paged pool, in Triton: ragged requests in one launch.

A tile is up to ``block_m`` query rows of one request and one KV head, a row being one query head of one token; heads
that share a KV head are neighbours in a tile, so that even a few new tokens fill it. Which request a tile belongs to
is found on the device from ``query_starts``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from fenceline.layers.kernels.decode_attention import PagedRequests, padded_batch, token_slots

_LOG2_E = 1.4426950408889634
_NO_SCORE = tl.constexpr(-1.0e30)  # below every score, and finite: no NaN from its differences


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """``block_m`` query rows against ``block_n`` keys at a time; powers of two >= 16."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def extend_tiles(query_lens_cpu: npt.NDArray[np.int64], group: int, config: ExtendConfig) -> int:
    """Tiles of a batch for each KV head that ``group`` query heads share."""
    return int((-(-query_lens_cpu * group // config.block_m)).sum())


def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    requests: PagedRequests,
    query_starts: torch.Tensor,
    num_tiles: int,
    scale: float,
    config: ExtendConfig,
) -> torch.Tensor:
    """Attention of each request's last tokens over all its tokens up to their own → contiguous [T, H, D], q's dtype.

    q [T, H, D], its heads contiguous, tokens maybe strided; queries of request b are q[query_starts[b] :
    query_starts[b + 1]], query_starts [B + 1] int32 on the device; k_cache, v_cache [num_slots, Hkv, D], contiguous,
    in q's dtype; D a power of two >= 16. ``num_tiles`` as ``extend_tiles`` says (more is harmless). Softmax statistics
    and sums are float32. One launch on the current stream, no host synchronisation.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[1]
    batch = len(requests.rows)
    assert q.stride(2) == 1 and q.stride(1) == head_dim, q.stride()
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape[2] == head_dim
    assert k_cache.dtype == v_cache.dtype == q.dtype
    assert len(query_starts) == batch + 1 and len(requests.seq_lens) == batch
    assert num_heads % num_kv_heads == 0
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _extend_kernel[(num_kv_heads, num_tiles)](
        q, k_cache, v_cache, out, requests.page_table, requests.rows, requests.seq_lens, query_starts,
        batch, scale * _LOG2_E, q.stride(0), requests.page_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, GROUP=num_heads // num_kv_heads,
        PAGE_SIZE=requests.page_size, BATCH_PAD=padded_batch(batch), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["batch"])
def _extend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, page_table_ptr, rows_ptr, seq_lens_ptr, query_starts_ptr,
    batch, scale_log2, q_stride, page_table_stride,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BATCH_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    # Late tiles see the most keys, so they go first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    ids = tl.arange(0, BATCH_PAD)
    starts = tl.load(query_starts_ptr + ids, mask=ids < batch, other=0)
    stops = tl.load(query_starts_ptr + 1 + ids, mask=ids < batch, other=0)
    ends = tl.cumsum(((stops - starts) * GROUP + BLOCK_M - 1) // BLOCK_M, 0)
    request = tl.sum((ends <= tile).to(tl.int32), 0)
    if request >= batch:
        return
    start = tl.load(query_starts_ptr + request)
    num_queries = tl.load(query_starts_ptr + 1 + request) - start
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    table_row = tl.load(rows_ptr + request)
    first_tile = tl.max(tl.where(ids < request, ends, 0), 0)

    first_row = (tile - first_tile) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    row_live = (rows < num_queries * GROUP)[:, None]
    tokens = rows // GROUP
    heads = head * GROUP + rows % GROUP
    dims = tl.arange(0, HEAD_DIM)
    q_at = (start + tokens).to(tl.int64)[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=row_live, other=0.0)

    prefix = seq_len - num_queries
    num_visible_to_all = prefix + first_row // GROUP + 1
    num_visible = tl.minimum(prefix + (first_row + BLOCK_M - 1) // GROUP + 1, seq_len)
    num_full_blocks = num_visible_to_all // BLOCK_N
    k_head = k_ptr + head * HEAD_DIM
    v_head = v_ptr + head * HEAD_DIM
    table = page_table_ptr + table_row * page_table_stride
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    top = tl.full([BLOCK_M], _NO_SCORE, tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc, top, norm = _attend(
        q, k_head, v_head, table, acc, top, norm, prefix + tokens, 0, num_full_blocks, num_visible, scale_log2,
        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, False,
    )  # fmt: skip
    acc, top, norm = _attend(
        q, k_head, v_head, table, acc, top, norm, prefix + tokens,
        num_full_blocks, (num_visible + BLOCK_N - 1) // BLOCK_N, num_visible, scale_log2,
        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, True,
    )  # fmt: skip
    out_at = (start + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP * HEAD_DIM) + heads * HEAD_DIM
    result = (acc / norm[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at[:, None] + dims[None, :], result, mask=row_live)


@triton.jit
def _attend(
    q, k_ptr, v_ptr, table_ptr, acc, top, norm, last_visible, first_block, last_block, num_visible, scale_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """q [BLOCK_M, HEAD_DIM] over some blocks of keys, of which row r sees those up to ``last_visible`` [BLOCK_M]. The
    first block of a request, which every row sees, comes before all others."""
    dims = tl.arange(0, HEAD_DIM)
    for block in tl.range(first_block, last_block):
        positions = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if MASKED:
            live = positions < num_visible
            slots = token_slots(table_ptr, block, positions, live, PAGE_SIZE, BLOCK_N, True)
            offsets = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
            k = tl.load(k_ptr + offsets, mask=live[:, None], other=0.0)
            v = tl.load(v_ptr + offsets, mask=live[:, None], other=0.0)
        else:
            slots = token_slots(table_ptr, block, positions, positions, PAGE_SIZE, BLOCK_N, False)
            offsets = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            scores = tl.where(positions[None, :] <= last_visible[:, None], scores, _NO_SCORE)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        norm = norm * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = new_top
    return acc, top, norm
