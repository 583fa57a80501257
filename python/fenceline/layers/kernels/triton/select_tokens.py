"""The tokens to which sparse attention attends, selected on the device: two launches, whatever the lengths.

The first computes the score that an indexer gives each token a query sees (``IndexQueries``), as an unsigned integer in
the same order. The second has a program for each query. It finds the least integer that is selected by radix, most
significant bits first: each pass counts the tokens by some bits, of those that agree in the bits before. Then it writes
the slots of all tokens above that integer, and of as many equal ones as are left, in the order of positions. Whole
numbers are counted and nothing depends on time, so a query selects the same tokens whatever is computed beside it.

A query that sees no more than are to be selected attends to all of them; its scores are not computed.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fenceline.layers.forward_batch import IndexQueries, QueryTree
from fenceline.layers.kernels.triton.decode_attention import PagedRequests, converted
from fenceline.memory_order.triton_launcher import KernelVariant

_MOST_SCORES = 1 << 24  # that are kept at once, four bytes each
_BLOCK = 128  # tokens that are scored at once
_BLOCK_OF_FLOATS = 16  # of four bytes, of which fewer fit in registers
_PROGRAMS_PER_SM = 8  # that score tokens
_SELECT_BLOCK, _SELECT_WARPS = 8192, 32
BITS = 6  # by which tokens are counted in a pass; counting by more takes longer than a pass that it spares
_MIN_SIZE = 16  # of a matrix product
_SCALE_BYTES = 4  # at the end of a row in FP8
_LOWEST = tl.constexpr(-(1 << 31))


def select_tokens(
    index: IndexQueries, cache_rows: torch.Tensor, requests: PagedRequests, tree: QueryTree, longest: int, num_sms: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of T queries the slots that it attends to, in the order of positions, [T, top_k] int32, and how many
    these are, [T] int64; what follows them is undefined.

    ``cache_rows`` [num_slots, 1, features]: the layer's ``index`` rows (see ``index_rows.packed``). The queries of
    ``requests`` are as ``tree`` says, one request after the other; no length exceeds ``longest``. Current stream, no
    host synchronisation."""
    num, top_k = len(index.queries), index.top_k
    slots = torch.empty((num, top_k), dtype=torch.int32, device=cache_rows.device)
    counts = torch.empty(num, dtype=torch.int64, device=cache_rows.device)
    step = max(_MOST_SCORES // (longest + _BLOCK) // 4, 1) * 4  # parts of operands begin at 16 bytes
    for first in range(0, num, step):
        rows = slice(first, min(first + step, num))
        queries, weights = index.queries[rows], index.weights[rows]
        keys = score_keys(queries, weights, cache_rows, requests, tree, top_k, longest, first, num_sms)
        select_best(keys, requests, tree, first, slots[rows], counts[rows])
    return slots, counts


def score_keys(
    queries: torch.Tensor,
    weights: torch.Tensor,
    cache_rows: torch.Tensor,
    requests: PagedRequests,
    tree: QueryTree,
    top_k: int,
    longest: int,
    first: int,
    num_sms: int,
) -> torch.Tensor:
    """The scores of the tokens that some queries see, from the ``first`` of the batch on, as unsigned numbers: int32
    [queries, at least ``longest``]. A NaN is as high or low as its sign says, and a token that is not seen among others
    is 0. Queries that see no more than ``top_k`` get none. Operands: see ``select_tokens``."""
    num, num_heads, head_dim = queries.shape
    assert queries.is_contiguous() and weights.is_contiguous() and weights.shape == (num, num_heads)
    assert weights.dtype == torch.float32 and cache_rows.is_contiguous() and cache_rows.shape[1] == 1
    scales = None
    if cache_rows.dtype == torch.uint8:
        assert cache_rows.shape[2] == head_dim + _SCALE_BYTES
        scales, cache_rows = cache_rows.view(torch.float32), cache_rows.view(torch.float8_e4m3fn)
    else:
        assert cache_rows.shape[2] == head_dim and cache_rows.dtype == queries.dtype
    block = _BLOCK if queries.element_size() <= 2 else _BLOCK_OF_FLOATS
    num_blocks = -(-longest // block)
    keys = torch.empty((num, num_blocks * block), dtype=torch.int32, device=cache_rows.device)
    variant = _score_variant(
        num_heads, head_dim, cache_rows.shape[2], scales is not None, top_k, requests.page_size, block, *_sizes(tree)
    )
    programs = min(max(_PROGRAMS_PER_SM * num_sms // num, 1), num_blocks)
    tensors = (queries, weights, cache_rows, scales, *_tensors(requests, tree), keys)
    variant.launch((num, programs), tensors, (first, num_blocks, requests.page_table.stride(0)))
    return keys


def select_best(
    keys: torch.Tensor, requests: PagedRequests, tree: QueryTree, first: int, slots: torch.Tensor, counts: torch.Tensor
) -> None:
    """Write the slots of the tokens with the highest ``keys`` (see ``score_keys``), of equal ones the first: ``slots``
    [queries, top_k] and their number, ``counts`` [queries]."""
    num, top_k = slots.shape
    assert keys.is_contiguous() and slots.is_contiguous() and len(keys) == len(counts) == num
    assert slots.dtype == torch.int32 and counts.dtype == torch.int64
    unit = _BLOCK_OF_FLOATS
    assert keys.shape[1] % unit == 0
    tensors = (keys, *_tensors(requests, tree), slots, counts)
    scalars = (first, keys.shape[1] // unit, requests.page_table.stride(0))
    _select_variant(top_k, requests.page_size, unit, *_sizes(tree)).launch((num,), tensors, scalars)


def _tensors(requests: PagedRequests, tree: QueryTree) -> tuple[torch.Tensor | None, ...]:
    tree.check(len(requests.rows))
    assert requests.page_table.dtype == torch.int32 and requests.page_table.stride(1) == 1
    assert requests.rows.dtype == requests.seq_lens.dtype == torch.int64
    assert requests.rows.is_contiguous() and requests.seq_lens.is_contiguous()
    return requests.page_table, requests.rows, requests.seq_lens, tree.ancestors


def _sizes(tree: QueryTree) -> tuple[int, int, bool]:
    return tree.num_queries, tree.num_nodes, tree.ancestors is not None


@cache
def _score_variant(
    num_heads: int,
    head_dim: int,
    row: int,
    in_fp8: bool,
    top_k: int,
    page_size: int,
    block: int,
    num_queries: int,
    num_nodes: int,
    is_tree: bool,
) -> KernelVariant:
    constants = {
        "HEADS": num_heads,
        "HEADS_PAD": max(triton.next_power_of_2(num_heads), _MIN_SIZE),
        "DIM": head_dim,
        "DIM_PAD": max(triton.next_power_of_2(head_dim), _MIN_SIZE),
        "ROW": row,
        "SCALED": in_fp8,
        "TOP_K": top_k,
        "PAGE_SIZE": page_size,
        "BLOCK": block,
        "NUM_QUERIES": num_queries,
        "NUM_NODES": num_nodes,
        "TREE": is_tree,
    }
    return KernelVariant(_score_kernel, constants, 4, num_stages=3)


@cache
def _select_variant(
    top_k: int, page_size: int, unit: int, num_queries: int, num_nodes: int, is_tree: bool
) -> KernelVariant:
    constants = {
        "TOP_K": top_k,
        "PAGE_SIZE": page_size,
        "UNIT": unit,
        "BLOCK": _SELECT_BLOCK,
        "BITS": BITS,
        "NUM_QUERIES": num_queries,
        "NUM_NODES": num_nodes,
        "TREE": is_tree,
    }
    return KernelVariant(_select_kernel, constants, _SELECT_WARPS)


@triton.jit(do_not_specialize=["first", "num_blocks", "table_stride"])
def _score_kernel(
    queries, weights, cache_rows, scales, page_table, rows, seq_lens, ancestors, keys, first, num_blocks, table_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROW: tl.constexpr,
    SCALED: tl.constexpr, TOP_K: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    NUM_QUERIES: tl.constexpr, NUM_NODES: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """A program scores every n-th block of the tokens that one query sees."""
    own = tl.program_id(0).to(tl.int64)
    query = first + own
    end, start, path, num_seen = _sight(seq_lens, ancestors, query, NUM_QUERIES, NUM_NODES, TREE)
    if num_seen <= TOP_K:
        return
    heads, dims = tl.arange(0, HEADS_PAD), tl.arange(0, DIM_PAD)
    of_heads = queries + own * (HEADS * DIM) + heads[:, None] * DIM + dims[None, :]
    q = tl.load(of_heads, mask=(heads < HEADS)[:, None] & (dims < DIM)[None, :], other=0.0)
    if SCALED:  # both are numbers of E4M3, which one instruction converts to float16 but several to bfloat16
        q = q.to(tl.float16)
    weight = tl.load(weights + own * HEADS + heads, mask=heads < HEADS, other=0.0)
    table = page_table + tl.load(rows + query // NUM_QUERIES) * table_stride
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = positions < end
    slots = _slots(table, positions, live, PAGE_SIZE)
    for _ in tl.range(tl.program_id(1), (end + BLOCK - 1) // BLOCK, tl.num_programs(1)):
        # So no copy of keys waits for a page's number: see ``decode_attention.token_slots``.
        following = positions + tl.num_programs(1) * BLOCK
        next_live = following < end
        next_slots = _slots(table, following, next_live, PAGE_SIZE)
        wanted = live[:, None] & (dims < DIM)[None, :]
        k = converted(tl.load(cache_rows + slots[:, None] * ROW + dims[None, :], mask=wanted, other=0.0), q)
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
        scores = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
        if SCALED:
            scores *= tl.load(scales + slots * (ROW // 4) + DIM // 4, mask=live, other=0.0)
        bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # the zeros of either sign are equal
        found = tl.where(bits < 0, ~bits, bits | _LOWEST)
        found = tl.where(found == 0, 1, found)
        if TREE:
            found = tl.where(_sees(positions, end, start, path, TREE), found, 0)
        tl.store(keys + own * num_blocks * BLOCK + positions, found, mask=live)
        positions, live, slots = following, next_live, next_slots


@triton.jit(do_not_specialize=["first", "num_units", "table_stride"])
def _select_kernel(
    keys, page_table, rows, seq_lens, ancestors, selected, counts, first, num_units, table_stride,
    TOP_K: tl.constexpr, PAGE_SIZE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    NUM_QUERIES: tl.constexpr, NUM_NODES: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    query = first + own
    end, start, path, num_seen = _sight(seq_lens, ancestors, query, NUM_QUERIES, NUM_NODES, TREE)
    table = page_table + tl.load(rows + query // NUM_QUERIES) * table_stride
    of_query = keys + own * num_units * UNIT
    selects = num_seen > TOP_K
    least, num_equal = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int32)
    if selects:
        least, num_equal = least_selected(of_query, end, TOP_K, BLOCK, BITS)
    num_taken, equals = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for begin in tl.range(0, end, BLOCK):
        positions = begin + tl.arange(0, BLOCK)
        live = positions < end
        key = tl.load(of_query + positions, mask=live & selects, other=0).to(tl.uint32, bitcast=True)
        is_equal = live & (key == least)
        rank = equals + tl.cumsum(is_equal.to(tl.int32), 0)
        best = live & ((key > least) | (is_equal & (rank <= num_equal)))
        taken = tl.where(selects, best, _sees(positions, end, start, path, TREE))
        place = num_taken + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(selected + own * TOP_K + place, _slots(table, positions, taken, PAGE_SIZE).to(tl.int32), mask=taken)
        num_taken += tl.sum(taken.to(tl.int32), 0)
        equals += tl.sum(is_equal.to(tl.int32), 0)
    tl.store(counts + own, num_taken.to(tl.int64))


@triton.jit
def least_selected(keys, end, TOP_K: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """The least of the TOP_K highest of ``end`` keys, and how many of those equal to it are among them."""
    least, missing = tl.full([], 0, tl.uint32), tl.full([], TOP_K, tl.int32)
    PASSES: tl.constexpr = (32 + BITS - 1) // BITS
    for number in tl.static_range(PASSES):
        high = 32 - number * BITS  # the bits above are known
        low = high - BITS if high > BITS else 0
        histogram = tl.zeros([1 << BITS], tl.int32)
        for begin in tl.range(0, end, BLOCK):
            positions = begin + tl.arange(0, BLOCK)
            counted = positions < end
            key = tl.load(keys + positions, mask=counted, other=0).to(tl.uint32, bitcast=True)
            if number > 0:
                counted = counted & ((key >> high) == least)
            digit = ((key >> low) & ((1 << (high - low)) - 1)).to(tl.int32)
            histogram += tl.histogram(digit, 1 << BITS, mask=counted)
        higher = tl.sum(histogram, 0) - tl.cumsum(histogram, 0)  # keys with a higher digit than each
        missing_there = higher >= missing
        least = (least << (high - low)) | tl.sum(missing_there.to(tl.int32), 0).to(tl.uint32)
        missing -= tl.max(tl.where(missing_there, 0, higher), 0)
    return least, missing


@triton.jit
def _slots(table, positions, live, PAGE_SIZE: tl.constexpr):
    """The slots of those ``positions`` that are ``live``, int64. Joined by bits, because Triton 3.6 takes the sum of
    page * PAGE_SIZE and a remainder for a multiple of PAGE_SIZE, and reads rows of any size as if they were aligned."""
    pages = tl.load(table + positions // PAGE_SIZE, mask=live, other=0)
    return (pages.to(tl.int64) * PAGE_SIZE) | (positions % PAGE_SIZE)


@triton.jit
def _sight(seq_lens, ancestors, query, NUM_QUERIES: tl.constexpr, NUM_NODES: tl.constexpr, TREE: tl.constexpr):
    """What a query sees, see ``QueryTree``: the positions in front of ``start`` and those nodes behind it that are bits
    of ``path``, all in front of ``end``; and their number. One in front of the first token sees that one."""
    seq_len = tl.load(seq_lens + query // NUM_QUERIES).to(tl.int32)
    own = NUM_NODES - NUM_QUERIES + (query % NUM_QUERIES).to(tl.int32)
    start = seq_len - NUM_NODES
    path = tl.full([], 0, tl.int64)
    if TREE:
        path = tl.load(ancestors + query) | (tl.full([], 1, tl.int64) << own.to(tl.int64))
        nodes = tl.arange(0, 64)
        on_path = (((path >> nodes.to(tl.int64)) & 1) != 0) & (nodes < NUM_NODES) & (start + nodes >= 0)
        if start + own < 0:
            path, start = tl.full([], 0, tl.int64), tl.full([], 1, tl.int32)
        end = tl.maximum(seq_len, 1)
        num_seen = tl.maximum(tl.maximum(start, 0) + tl.sum(on_path.to(tl.int32), 0), 1)
    else:
        end = start + own + 1
        if NUM_QUERIES > 1:
            end = tl.maximum(end, 1)
        num_seen = end
    return end, start, path, num_seen


@triton.jit
def _sees(positions, end, start, path, TREE: tl.constexpr):
    """Which of the ``positions`` are seen, see ``_sight``."""
    seen = positions < end
    if TREE:
        nodes = tl.minimum(tl.maximum(positions - start, 0), 63).to(tl.int64)
        seen = seen & ((positions < start) | (((path >> nodes) & 1) != 0))
    return seen
