"""Causal attention of new tokens after a prefix in Triton, in one launch for requests of different lengths.

Keys and values of the prefix and of the new tokens are in the paged pool. A tile is up to ``block_m`` query rows of one
request and one KV head, where a row is one query head of one token. Heads that share a KV head are adjacent in a tile,
so that even a few new tokens fill it. The device finds a tile's request from ``query_starts``. A few new tokens after a
long prefix make too few tiles to fill a GPU. Then the keys of each tile are split as well, and a second launch merges
the results. With a window, a tile's keys begin at the first one to which its first row attends. A sink is one more
score; the first split of a row begins with it.

With segments a tile's keys are cut where those of ``decode_attention`` are, and the results are merged in the same
order, so that they are the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from fenceline.layers.attention.base import PLAIN, LayerRules
from fenceline.layers.kernels.triton.decode_attention import (
    PagedRequests,
    in_heads,
    merged,
    operand,
    padded_batch,
    padded_head_dim,
    scores_and_values,
    soft_capped,
    split_row,
    token_slots,
)
from fenceline.memory_order.triton_launcher import KernelVariant

_LOG2_E = 1.4426950408889634
_LOG2_E_IN_KERNEL = tl.constexpr(_LOG2_E)
_NO_SCORE = tl.constexpr(-1.0e30)  # below every score, and finite so that differences are not NaN


# A split has at least this many keys, because merging partial results takes memory traffic and a launch.
_SPLIT_TOKENS = 512
_MOST_PARTIAL_ROWS = 1 << 18  # of splits that are segments, all together
_MERGED_ELEMENTS = 4096  # of a program that merges splits


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """A tile has ``block_m`` query rows and reads ``block_n`` keys at a time; both are powers of two >= 16."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    segment: int = 0
    """See ``DecodeConfig``."""


@dataclass(frozen=True, slots=True)
class ExtendGrid:
    """The programs of a batch: ``num_tiles`` tiles for each KV head, with their keys in ``num_splits`` parts."""

    num_tiles: int
    num_splits: int


def extend_grid(
    query_lens_cpu: npt.NDArray[np.int64],
    seq_lens_cpu: npt.NDArray[np.int64],
    heads: tuple[int, int],
    config: ExtendConfig,
    num_sms: int,
    window: int | None = None,
) -> ExtendGrid:
    """The grid for a batch with ``heads`` = (H, Hkv). Splits leave few of ``num_sms`` idle. Segments split together."""
    if window is not None:
        seq_lens_cpu = np.minimum(seq_lens_cpu, window + config.block_m)
    group = heads[0] // heads[1]
    num_tiles = int((-(-query_lens_cpu * group // config.block_m)).sum())
    worth = -(-int(seq_lens_cpu.max()) // (config.segment or _SPLIT_TOKENS))
    num_splits = max(min(num_sms // (num_tiles * heads[1]), worth), 1)
    if config.segment and num_splits > 1:
        num_splits = worth + (window is not None)
        if num_splits * num_tiles * heads[1] * config.block_m > _MOST_PARTIAL_ROWS:
            num_splits = 1
    return ExtendGrid(num_tiles, num_splits)


def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    requests: PagedRequests,
    query_starts: torch.Tensor,
    grid: ExtendGrid,
    scale: float,
    config: ExtendConfig,
    out: torch.Tensor | None = None,
    rules: LayerRules = PLAIN,
) -> torch.Tensor:
    """Causal attention of each request's last tokens over all its tokens → contiguous [T, H, D] in q's dtype, in
    ``out`` if given.

    q [T, H, D], its heads contiguous, tokens possibly strided; the queries of request b are q[query_starts[b] :
    query_starts[b + 1]], query_starts [B + 1] int32 on the device; k_cache, v_cache [num_slots, Hkv, D], contiguous,
    in q's dtype or FP8; one tensor if ``rules.shared``. Values may have fewer features than keys, and the result's
    others are undefined then. ``grid`` must be that of this batch and ``config``; more tiles
    do no harm. Softmax statistics and sums are float32. ``rules``: see ``LayerRules``; sinks are contiguous. On the
    current stream, no host synchronisation.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    batch, group = requests.rows.shape[0], num_heads // num_kv_heads  # len() of a tensor is several times slower
    assert q.stride(2) == 1 and q.stride(1) == head_dim, q.stride()
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape[2] == head_dim
    assert k_cache.dtype == v_cache.dtype and k_cache.dtype in (q.dtype, torch.float8_e4m3fn)
    assert query_starts.shape == (batch + 1,) and requests.seq_lens.shape == (batch,)
    assert num_heads % num_kv_heads == 0
    assert rules.sinks is None or (rules.sinks.dtype == torch.float32 and rules.sinks.shape == (num_heads,))
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    value_dim, tail = split_row(head_dim, v_cache, k_cache, rules)
    partial, stats = out, out
    if grid.num_splits > 1:
        partial = torch.empty((grid.num_splits, *q.shape[:2], value_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((grid.num_splits, 2, *q.shape[:2]), dtype=torch.float32, device=q.device)
    extend, merge = _variants(
        config, num_kv_heads, group, value_dim, tail, requests.page_size, padded_batch(batch), grid.num_splits > 1,
        rules.shared, rules.window or 0, rules.soft_cap != 0, rules.sinks is not None, q.stride(0),
    )  # fmt: skip
    operands = (q, k_cache, v_cache, partial, stats, requests.page_table, requests.rows, requests.seq_lens)
    numbers = (batch, num_tokens, requests.page_table.stride(0), scale * _LOG2_E, rules.soft_cap * _LOG2_E)
    tiles = num_kv_heads, grid.num_tiles, grid.num_splits
    extend.launch(tiles, (*operands, query_starts, rules.sinks), numbers)
    if grid.num_splits > 1:
        blocks = num_tokens, -(-num_heads // merge.constants["HEADS"])
        merge.launch(blocks, (partial, stats, out, rules.sinks), (grid.num_splits, num_tokens))
    return out


@cache
def _variants(
    config: ExtendConfig, num_kv_heads: int, group: int, value_dim: int, tail: int, page_size: int, batch_pad: int,
    splits: bool, shared: bool, window: int, caps: bool, has_sinks: bool, q_stride: int,
) -> tuple[KernelVariant, KernelVariant]:  # fmt: skip
    """The kernels of tiles, and of their merge. A layer's launch takes the CPU longer than anything else of a short
    prompt, so that they are bound once."""
    dims = {"HEAD_DIM": value_dim, "DIM_PAD": padded_head_dim(value_dim), "TAIL": tail}
    constants = {
        "NUM_KV_HEADS": num_kv_heads, **dims, "TAIL_PAD": padded_head_dim(tail), "SHARED": shared, "GROUP": group,
        "PAGE_SIZE": page_size, "BATCH_PAD": batch_pad, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "SPLIT": splits, "SEGMENT": config.segment, "WINDOW": window, "CAPS": caps, "SINKS": has_sinks,
        "Q_STRIDE": q_stride,
    }  # fmt: skip
    heads = max(min(triton.next_power_of_2(group), _MERGED_ELEMENTS // dims["DIM_PAD"]), 1)
    merging = {"NUM_HEADS": num_kv_heads * group, **dims, "HEADS": heads, "SINKS": has_sinks and config.segment > 0}
    extend = KernelVariant(_extend_kernel, constants, config.num_warps, num_stages=config.num_stages)
    return extend, KernelVariant(_merge_kernel, merging, 4)


# The stride of the page table is no constant: that of new prompts is their length.
@triton.jit(do_not_specialize=["batch", "num_tokens", "table_stride"])
def _extend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr, page_table_ptr, rows_ptr, seq_lens_ptr, query_starts_ptr,
    sinks_ptr, batch, num_tokens, table_stride, scale_log2, cap_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BATCH_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    SEGMENT: tl.constexpr, WINDOW: tl.constexpr, CAPS: tl.constexpr, SINKS: tl.constexpr,
    Q_STRIDE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    # The last tiles of a request attend to the most keys, so tiles start in reverse order.
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
    query_live = (rows < num_queries * GROUP)[:, None]
    tokens = rows // GROUP
    heads = head * GROUP + rows % GROUP
    dims = tl.arange(0, DIM_PAD)
    row_live = in_heads(query_live, dims, HEAD_DIM, DIM_PAD)
    WIDTH: tl.constexpr = HEAD_DIM + TAIL  # of a head's query, key and place in the result
    q_at = q_ptr + (start + tokens).to(tl.int64)[:, None] * Q_STRIDE + heads[:, None] * WIDTH
    q = operand(tl.load(q_at + dims[None, :], mask=row_live, other=0.0), k_ptr, SHARED)
    q_tail = q
    if TAIL > 0:
        in_tail = tl.arange(0, TAIL_PAD)
        wanted = in_heads(query_live, in_tail, TAIL, TAIL_PAD)
        q_tail = operand(tl.load(q_at + (HEAD_DIM + in_tail)[None, :], mask=wanted, other=0.0), k_ptr, SHARED)

    prefix = seq_len - num_queries
    num_visible_to_all = prefix + first_row // GROUP + 1
    num_visible = tl.minimum(prefix + (first_row + BLOCK_M - 1) // GROUP + 1, seq_len)
    first_visible = 0  # to the first row
    first_block = 0
    if WINDOW > 0:
        first_visible = tl.maximum(prefix + first_row // GROUP - (WINDOW - 1), 0)
        first_block = first_visible // BLOCK_N
    last_block = (num_visible + BLOCK_N - 1) // BLOCK_N
    if SPLIT and SEGMENT == 0:
        stretch = (last_block - first_block + tl.num_programs(2) - 1) // tl.num_programs(2)
        first_block += tl.program_id(2) * stretch
        last_block = tl.minimum(first_block + stretch, last_block)
    full_end = tl.minimum(num_visible_to_all // BLOCK_N, last_block)
    k_head = k_ptr + head * WIDTH
    v_head = k_head if SHARED else v_ptr + head * HEAD_DIM
    table = page_table_ptr + table_row * table_stride
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    top = tl.full([BLOCK_M], _NO_SCORE, tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and not (SPLIT and SEGMENT > 0):  # else it comes before all segments when they are merged
        begins = tl.program_id(2) == 0
        top = tl.where(begins, tl.load(sinks_ptr + heads) * _LOG2_E_IN_KERNEL, top)
        norm += tl.where(begins, 1.0, 0.0)
    if SEGMENT > 0:
        EACH: tl.constexpr = SEGMENT // BLOCK_N
        first_segment, last_segment = first_block // EACH, (last_block + EACH - 1) // EACH
        if SPLIT:
            first_segment += tl.program_id(2)
            last_segment = tl.minimum(first_segment + 1, last_segment)
        for segment in tl.range(first_segment, last_segment):
            begin = tl.maximum(segment * EACH, first_block)
            end = tl.minimum(segment * EACH + EACH, last_block)
            part = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
            part_top = tl.full([BLOCK_M], _NO_SCORE, tl.float32)
            part_norm = tl.zeros([BLOCK_M], tl.float32)
            masked_from = begin
            if WINDOW == 0:
                masked_from = tl.minimum(tl.maximum(full_end, begin), end)
                part, part_top, part_norm = _attend(
                    q, q_tail, k_head, v_head, table, part, part_top, part_norm, prefix + tokens, begin, masked_from,
                    first_visible, num_visible, scale_log2, cap_log2,
                    NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, TAIL_PAD, SHARED, PAGE_SIZE, BLOCK_N, False, WINDOW, CAPS,
                )  # fmt: skip
            part, part_top, part_norm = _attend(
                q, q_tail, k_head, v_head, table, part, part_top, part_norm, prefix + tokens, masked_from, end,
                first_visible, num_visible, scale_log2, cap_log2,
                NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, TAIL_PAD, SHARED, PAGE_SIZE, BLOCK_N, True, WINDOW, CAPS,
            )  # fmt: skip
            if SPLIT:
                acc, top, norm = part, part_top, part_norm
            else:
                acc, top, norm = merged(acc, top, norm, part, part_top, part_norm)
    else:
        if WINDOW > 0:
            # These blocks are not in the windows of all rows, so they are masked.
            in_all_windows = tl.maximum(num_visible - WINDOW, 0)
            edge = tl.minimum((in_all_windows + BLOCK_N - 1) // BLOCK_N, last_block)
            acc, top, norm = _attend(
                q, q_tail, k_head, v_head, table, acc, top, norm, prefix + tokens, first_block, edge,
                first_visible, num_visible, scale_log2, cap_log2,
                NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, TAIL_PAD, SHARED, PAGE_SIZE, BLOCK_N, True, WINDOW, CAPS,
            )  # fmt: skip
            first_block = tl.maximum(edge, first_block)
        acc, top, norm = _attend(
            q, q_tail, k_head, v_head, table, acc, top, norm, prefix + tokens, first_block, full_end,
            first_visible, num_visible, scale_log2, cap_log2,
            NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, TAIL_PAD, SHARED, PAGE_SIZE, BLOCK_N, False, WINDOW, CAPS,
        )  # fmt: skip
        acc, top, norm = _attend(
            q, q_tail, k_head, v_head, table, acc, top, norm, prefix + tokens,
            tl.maximum(full_end, first_block), last_block, first_visible, num_visible, scale_log2, cap_log2,
            NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, TAIL_PAD, SHARED, PAGE_SIZE, BLOCK_N, True, WINDOW, CAPS,
        )  # fmt: skip
    out_rows = (start + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
    if SPLIT:
        rows_of_split = tl.program_id(2).to(tl.int64) * num_tokens * (NUM_KV_HEADS * GROUP)
        stats_at = stats_ptr + 2 * rows_of_split + out_rows
        tl.store(stats_at, top, mask=rows < num_queries * GROUP)
        tl.store(stats_at + num_tokens * (NUM_KV_HEADS * GROUP), norm, mask=rows < num_queries * GROUP)
        out_at = out_ptr + (rows_of_split + out_rows)[:, None] * HEAD_DIM + dims[None, :]
    else:
        acc = acc / norm[:, None]
        out_at = out_ptr + out_rows[:, None] * WIDTH + dims[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_live)


@triton.jit(do_not_specialize=["num_splits", "num_tokens"])
def _merge_kernel(
    partial_ptr, stats_ptr, out_ptr, sinks_ptr, num_splits, num_tokens,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of some of a token's heads. A split in which a row sees no key has weight 0."""
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = heads < NUM_HEADS
    rows = tl.program_id(0).to(tl.int64) * NUM_HEADS + heads
    dims = tl.arange(0, DIM_PAD)
    at = rows[:, None] * HEAD_DIM + dims[None, :]
    wanted = in_heads(live[:, None], dims, HEAD_DIM, DIM_PAD)
    split_rows = num_tokens.to(tl.int64) * NUM_HEADS
    acc = tl.zeros([HEADS, DIM_PAD], tl.float32)
    top = tl.full([HEADS], _NO_SCORE, tl.float32)
    norm = tl.zeros([HEADS], tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + heads, mask=live, other=0.0) * _LOG2_E_IN_KERNEL
        norm += 1.0
    for split in tl.range(0, num_splits):
        split_top = tl.load(stats_ptr + 2 * split * split_rows + rows, mask=live, other=_NO_SCORE)
        split_norm = tl.load(stats_ptr + (2 * split + 1) * split_rows + rows, mask=live, other=1.0)
        partial = tl.load(partial_ptr + split * split_rows * HEAD_DIM + at, mask=wanted, other=0.0)
        acc, top, norm = merged(acc, top, norm, partial, split_top, split_norm)
    out_at = out_ptr + rows[:, None] * (HEAD_DIM + TAIL) + dims[None, :]
    tl.store(out_at, (acc / norm[:, None]).to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def _attend(
    q, q_tail, k_ptr, v_ptr, table_ptr, acc, top, norm, last_visible, first_block, last_block, first_visible,
    num_visible, scale_log2, cap_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr, SHARED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAPS: tl.constexpr,
):  # fmt: skip
    """Attention of q [BLOCK_M, DIM_PAD], and its tail, over some blocks of keys. Row r attends to keys up to
    ``last_visible[r]``. No row attends to keys outside ``first_visible`` .. ``num_visible``; these are not read. A row
    that attends to no key in these blocks keeps ``_NO_SCORE`` as its maximum, and so has no weight in a merge."""
    AHEAD: tl.constexpr = SHARED or TAIL > 0  # see ``token_slots``
    if AHEAD:
        begin = tl.maximum(tl.minimum(first_block, last_block - 1), 0)  # there may be no blocks
        slots, live = _slots_of(table_ptr, begin, first_visible, num_visible, PAGE_SIZE, BLOCK_N, True, WINDOW)
    for block in tl.range(first_block, last_block):
        positions = block * BLOCK_N + tl.arange(0, BLOCK_N)
        following = tl.minimum(block + 1, last_block - 1) if AHEAD else block
        next_slots, next_live = _slots_of(
            table_ptr, following, first_visible, num_visible, PAGE_SIZE, BLOCK_N, MASKED, WINDOW
        )
        if not AHEAD:
            slots, live = next_slots, next_live
        scores, v = scores_and_values(
            q, q_tail, k_ptr, v_ptr, slots, live, NUM_KV_HEADS, HEAD_DIM, DIM_PAD, TAIL, TAIL_PAD, SHARED, MASKED
        )
        scores *= scale_log2
        if CAPS:
            scores = soft_capped(scores, cap_log2)
        if MASKED:
            seen = positions[None, :] <= last_visible[:, None]
            if WINDOW > 0:
                seen = seen & (positions[None, :] > last_visible[:, None] - WINDOW)
            scores = tl.where(seen, scores, _NO_SCORE)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        norm = norm * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = new_top
        if AHEAD:
            slots, live = next_slots, next_live
    return acc, top, norm


@triton.jit
def _slots_of(
    table_ptr, block, first_visible, num_visible, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """The slots of a block and which of its positions are visible to any row."""
    positions = block * BLOCK_N + tl.arange(0, BLOCK_N)
    live = positions < num_visible
    if WINDOW > 0:
        live = live & (positions >= first_visible)
    return token_slots(table_ptr, block, positions, live, PAGE_SIZE, BLOCK_N, MASKED), live
