"""Attention to selected blocks of tokens (``BlocksConfig``) on the device: the means of groups of keys, the blocks'
scores, and lists of the tokens to attend to.

Scores take two launches. In the first, programs of a query and key head share out the coarse means, and each leaves the
largest score of its own and the sum of their exponentials. In the second, programs share out the blocks; each merges
what the first has left, in order. A score is not negative, so its bits are an integer in the same order. A third launch
finds the least integer that is selected, as ``select_tokens`` does, and lists the slots of the tokens of all blocks
above it, and of as many equal ones as are left, in the order of positions.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fenceline.config.families import BlocksConfig
from fenceline.layers.forward_batch import BlockQueries
from fenceline.layers.kernels.triton.decode_attention import PagedRequests
from fenceline.layers.kernels.triton.select_tokens import BITS, least_selected
from fenceline.memory_order.triton_launcher import KernelVariant

_COARSE = 4  # see ``block_selection``
_ROWS = 64  # means that are scored at once
_ROWS_OF_FLOATS = 16  # of four bytes, of which fewer fit in registers
_PROGRAMS_PER_SM = 8  # that score
_FIXED_PROGRAMS = 8  # of a query and key head in a fixed order
_MOST_PROGRAMS = 64
_MIN_SIZE = 16  # of a matrix product
_CHOSEN_TILE, _COUNTED_TILE = 16, 1024  # blocks that are listed, or counted, at once
_NO_SCORE = tl.constexpr(-1.0e30)  # below every score, and finite so that differences are not NaN
_ALWAYS = tl.constexpr(0x7F800000)  # the bits of infinity


def store_means(
    keys: torch.Tensor, means: torch.Tensor, positions: torch.Tensor, out_slots: torch.Tensor, group: int
) -> None:
    """See ``LayerKernels.store_means``. keys and means are contiguous. Current stream, no host synchronisation."""
    width = keys.shape[1] * keys.shape[2]
    assert keys.is_contiguous() and means.is_contiguous() and means[0].numel() * group == width
    assert positions.dtype == out_slots.dtype == torch.int64
    if len(positions):
        _means_variant(group, width).launch((len(positions),), (keys, means, positions, out_slots))


def score_blocks(
    wanted: BlockQueries, means: torch.Tensor, requests: PagedRequests, longest: int, num_sms: int, fixed: bool
) -> torch.Tensor:
    """The scores of the blocks that T queries see with each key head, as integers of the same order: int32 [T,
    num_kv_heads, at least the blocks of ``longest`` tokens]. Blocks that a query always attends to have the highest;
    those behind its own are undefined.

    ``means``: the layer's ``index`` rows, [num_slots, num_kv_heads, head_dim / stride]. Each of ``requests`` has one
    query, its last token; none is longer than ``longest``. ``fixed``: the order of sums depends on the query alone.
    Current stream, no host synchronisation."""
    queries, blocks, num_kv_heads = wanted.queries, wanted.blocks, means.shape[1]
    num, num_heads, head_dim = queries.shape
    assert means.is_contiguous() and means.dtype == queries.dtype and means.shape[2] * blocks.stride == head_dim
    assert queries.stride(2) == 1 and queries.stride(1) == head_dim and len(requests.rows) == num
    assert requests.page_size % blocks.stride == 0
    num_blocks = -(-longest // blocks.size)
    most = _FIXED_PROGRAMS if fixed else _MOST_PROGRAMS
    programs = most if fixed else min(max(_PROGRAMS_PER_SM * num_sms // (num * num_kv_heads), 1), most, num_blocks)
    grid, group = (num, num_kv_heads, programs), num_heads // num_kv_heads
    partial = torch.empty((*grid, 2, _padded(group)), dtype=torch.float32, device=queries.device)
    keys = torch.empty((num, num_kv_heads, num_blocks), dtype=torch.int32, device=queries.device)
    rows = _ROWS if queries.element_size() <= 2 else _ROWS_OF_FLOATS
    sizes = (group, num_kv_heads, head_dim, requests.page_size, rows)
    tensors = (queries, means, requests.page_table, requests.rows, requests.seq_lens, partial)
    scalars = (wanted.scale, queries.stride(0), requests.page_table.stride(0))
    _coarse_variant(blocks, *sizes).launch(grid, tensors, scalars)
    _score_variant(blocks, most, *sizes).launch(grid, (*tensors, keys), (*scalars, num_blocks))
    return keys


def _padded(size: int) -> int:
    return max(triton.next_power_of_2(size), _MIN_SIZE)


def choose_blocks(
    keys: torch.Tensor, requests: PagedRequests, blocks: BlocksConfig, first: int, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that ``num`` queries, from the ``first`` on, attend to with each key head, by ``keys`` (see
    ``score_blocks``): for each query and head in turn their slots times the number of heads plus the head, [num *
    num_kv_heads, top_k * size] int32, and how many these are, int64; what follows them is undefined."""
    _, num_kv_heads, num_blocks = keys.shape
    lists = torch.empty((num * num_kv_heads, blocks.top_k * blocks.size), dtype=torch.int32, device=keys.device)
    counts = torch.empty(num * num_kv_heads, dtype=torch.int64, device=keys.device)
    chosen = torch.empty((num * num_kv_heads, blocks.top_k), dtype=torch.int32, device=keys.device)
    tensors = (keys, requests.page_table, requests.rows, requests.seq_lens, chosen, lists, counts)
    scalars = (first, num_blocks, requests.page_table.stride(0))
    _choose_variant(blocks, num_kv_heads, requests.page_size).launch((num, num_kv_heads), tensors, scalars)
    return lists, counts


@cache
def _means_variant(group: int, width: int) -> KernelVariant:
    constants = {"GROUP": group, "WIDTH": width, "PAD": triton.next_power_of_2(width)}
    return KernelVariant(_means_kernel, constants, 4)


def _constants(
    blocks: BlocksConfig, group: int, num_kv_heads: int, head_dim: int, page_size: int, rows: int
) -> dict[str, int | bool]:
    """The number of programs is none of them, which is another for each number of queries, but the grid's."""
    return {
        "GROUP": group,
        "HEADS_PAD": _padded(group),
        "KV_HEADS": num_kv_heads,
        "DIM": head_dim,
        "DIM_PAD": _padded(head_dim),
        "PAGE_SIZE": page_size,
        "STRIDE": blocks.stride,
        "WIDTH": blocks.width // blocks.stride,
        "ROWS": rows,
    }


@cache
def _coarse_variant(blocks: BlocksConfig, *sizes: int) -> KernelVariant:
    return KernelVariant(_coarse_kernel, {**_constants(blocks, *sizes), "COARSE": _COARSE}, 4)


@cache
def _score_variant(blocks: BlocksConfig, most_programs: int, *sizes: int) -> KernelVariant:
    constants, per_block = _constants(blocks, *sizes), blocks.size // blocks.stride
    before = (blocks.width - 1) // blocks.stride
    constants |= {"SIZE": blocks.size, "FIRST": blocks.first, "LOCAL": blocks.local, "PER_BLOCK": per_block}
    constants |= {"BEFORE": before, "EACH": triton.next_power_of_2(per_block + before)}
    constants |= {"ROWS": max(constants["ROWS"], constants["EACH"]), "MOST_PROGRAMS": most_programs}
    return KernelVariant(_score_kernel, constants, 4)


@cache
def _choose_variant(blocks: BlocksConfig, num_kv_heads: int, page_size: int) -> KernelVariant:
    constants = {
        "KV_HEADS": num_kv_heads,
        "PAGE_SIZE": page_size,
        "SIZE": blocks.size,
        "SIZE_PAD": triton.next_power_of_2(blocks.size),
        "TOP_K": blocks.top_k,
        "TILE": _CHOSEN_TILE,
        "COUNTED": _COUNTED_TILE,
        "BITS": BITS,
    }
    return KernelVariant(_choose_kernel, constants, 4)


@triton.jit
def _means_kernel(
    k_cache, means, positions, out_slots, GROUP: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """A program for each token, of which those that end no group do nothing."""
    token = tl.program_id(0)
    if (tl.load(positions + token) + 1) % GROUP == 0:
        features = tl.arange(0, PAD)
        group = tl.load(out_slots + token) // GROUP
        total = tl.zeros([PAD], tl.float32)
        for number in tl.static_range(GROUP):
            row = k_cache + (group * GROUP + number) * WIDTH + features
            total += tl.load(row, mask=features < WIDTH, other=0.0).to(tl.float32)
        mean = (total / GROUP).to(means.dtype.element_ty)
        tl.store(means + group * WIDTH + features, mean, mask=features < WIDTH)


@triton.jit
def _mean(
    means, table, groups, live, dims, head,
    COUNT: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """The means of COUNT groups each, from ``groups`` on where they are ``live``: [groups, dims] float32."""
    EACH_PAGE: tl.constexpr = PAGE_SIZE // STRIDE
    wanted = live[:, None] & (dims < DIM)[None, :]
    total = tl.zeros([groups.shape[0], dims.shape[0]], tl.float32)
    for offset in tl.static_range(COUNT):
        at = groups + offset
        page = tl.load(table + at // EACH_PAGE, mask=live, other=0).to(tl.int64)
        row = ((page * EACH_PAGE) | (at % EACH_PAGE)) * (KV_HEADS * DIM) + head * DIM  # see ``select_tokens._slots``
        total += tl.load(means + row[:, None] + dims[None, :], mask=wanted, other=0.0).to(tl.float32)
    return total / COUNT


@triton.jit
def _queries(
    queries, query, head, stride, dims,
    GROUP: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Those of the heads that share a key head, [HEADS_PAD, dims]."""
    heads = tl.arange(0, HEADS_PAD)
    rows = queries + query * stride + (head * GROUP + heads)[:, None] * DIM + dims[None, :]
    return tl.load(rows, mask=(heads < GROUP)[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["query_stride", "table_stride"])
def _coarse_kernel(
    queries, means, page_table, rows, seq_lens, partial, scale, query_stride, table_stride,
    GROUP: tl.constexpr, HEADS_PAD: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COARSE: tl.constexpr,
):  # fmt: skip
    query, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    programs = tl.num_programs(2)
    dims, heads = tl.arange(0, DIM_PAD), tl.arange(0, HEADS_PAD)
    q = _queries(queries, query, head, query_stride, dims, GROUP, HEADS_PAD, DIM)
    table = page_table + tl.load(rows + query) * table_stride
    groups = tl.load(seq_lens + query).to(tl.int32) // STRIDE  # full ones
    number = tl.maximum((groups - COARSE * WIDTH) // COARSE + 1, 0) * (groups >= COARSE * WIDTH).to(tl.int32)
    largest, total = tl.full([HEADS_PAD], _NO_SCORE, tl.float32), tl.zeros([HEADS_PAD], tl.float32)
    for tile in tl.range(part, (number + ROWS - 1) // ROWS, programs):
        at = tile * ROWS + tl.arange(0, ROWS)
        live = at < number
        k = _mean(means, table, at * COARSE, live, dims, head, COARSE * WIDTH, KV_HEADS, DIM, PAGE_SIZE, STRIDE)
        scores = tl.dot(k.to(q.dtype), tl.trans(q), input_precision="ieee") * scale
        scores = tl.where(live[:, None], scores, _NO_SCORE)
        higher = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.where(live[:, None], tl.exp(scores - higher[None, :]), 0.0)
        total = total * tl.exp(largest - higher) + tl.sum(weights, 0)
        largest = higher
    place = partial + ((query * KV_HEADS + head) * programs + part) * (2 * HEADS_PAD) + heads
    tl.store(place, largest)
    tl.store(place + HEADS_PAD, total)


@triton.jit(do_not_specialize=["query_stride", "table_stride", "num_blocks"])
def _score_kernel(
    queries, means, page_table, rows, seq_lens, partial, keys, scale, query_stride, table_stride, num_blocks,
    GROUP: tl.constexpr, HEADS_PAD: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    FIRST: tl.constexpr, LOCAL: tl.constexpr, PER_BLOCK: tl.constexpr, BEFORE: tl.constexpr, EACH: tl.constexpr,
    MOST_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A row of a tile is a mean that overlaps a block, EACH of them for one block."""
    query, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    programs = tl.num_programs(2)
    dims, heads, parts = tl.arange(0, DIM_PAD), tl.arange(0, HEADS_PAD), tl.arange(0, MOST_PROGRAMS)
    q = _queries(queries, query, head, query_stride, dims, GROUP, HEADS_PAD, DIM)
    table = page_table + tl.load(rows + query) * table_stride
    places = partial + (query * KV_HEADS + head) * (programs * 2 * HEADS_PAD) + parts[:, None] * (2 * HEADS_PAD)
    places += heads[None, :]
    of_part = (parts < programs)[:, None]
    each_largest = tl.load(places, mask=of_part, other=_NO_SCORE)
    largest = tl.max(each_largest, 0)
    each_total = tl.load(places + HEADS_PAD, mask=of_part, other=0.0)
    total = tl.sum(each_total * tl.exp(each_largest - largest[None, :]), 0)
    num_seen = tl.load(seq_lens + query).to(tl.int32)
    own = (num_seen + SIZE - 1) // SIZE - 1
    BLOCKS: tl.constexpr = ROWS // EACH
    for tile in tl.range(part, (own + BLOCKS) // BLOCKS, programs):
        lanes = tl.arange(0, ROWS)
        among = lanes % EACH
        at = (tile * BLOCKS + lanes // EACH) * PER_BLOCK - BEFORE + among
        live = (among < PER_BLOCK + BEFORE) & (at >= 0) & ((at + WIDTH) * STRIDE <= num_seen)
        k = _mean(means, table, at, live, dims, head, WIDTH, KV_HEADS, DIM, PAGE_SIZE, STRIDE)
        scores = tl.dot(k.to(q.dtype), tl.trans(q), input_precision="ieee") * scale
        counted = live[:, None] & ((heads < GROUP) & (total > 0.0))[None, :]
        divisor = tl.where(total > 0.0, total, 1.0)
        weights = tl.where(counted, tl.exp(tl.where(counted, scores - largest[None, :], 0.0)) / divisor[None, :], 0.0)
        best = tl.max(tl.reshape(tl.sum(weights, 1), (BLOCKS, EACH)), 1)
        number = tile * BLOCKS + tl.arange(0, BLOCKS)
        always = (number < FIRST) | (own - number <= LOCAL)
        key = tl.where(always, _ALWAYS, best.to(tl.int32, bitcast=True))
        tl.store(keys + (query * KV_HEADS + head) * num_blocks + number, key, mask=number <= own)


@triton.jit(do_not_specialize=["first", "num_blocks", "table_stride"])
def _choose_kernel(
    keys, page_table, rows, seq_lens, chosen, lists, counts, first, num_blocks, table_stride,
    KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, TOP_K: tl.constexpr,
    TILE: tl.constexpr, COUNTED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The numbers of the chosen blocks are put together before their tokens are listed, so that nothing is listed of
    all the others."""
    own, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query = first + own
    num_seen = tl.load(seq_lens + query).to(tl.int32)
    num = (num_seen + SIZE - 1) // SIZE
    table = page_table + tl.load(rows + query) * table_stride
    of_query = keys + (query * KV_HEADS + head) * num_blocks
    selects = num > TOP_K
    least, num_equal = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int32)
    if selects:
        least, num_equal = least_selected(of_query, num, TOP_K, COUNTED, BITS)
    numbers = chosen + (own * KV_HEADS + head) * TOP_K
    num_taken, equals = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for begin in tl.range(0, num, COUNTED):
        number = begin + tl.arange(0, COUNTED)
        live = number < num
        key = tl.load(of_query + number, mask=live & selects, other=0).to(tl.uint32, bitcast=True)
        is_equal = live & (key == least)
        rank = equals + tl.cumsum(is_equal.to(tl.int32), 0)
        taken = tl.where(selects, live & ((key > least) | (is_equal & (rank <= num_equal))), live)
        place = num_taken + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(numbers + place, number, mask=taken)
        num_taken += tl.sum(taken.to(tl.int32), 0)
        equals += tl.sum(is_equal.to(tl.int32), 0)
    tl.debug_barrier()  # before other threads read the numbers
    line = lists + (own * KV_HEADS + head) * (TOP_K * SIZE)
    offsets = tl.arange(0, SIZE_PAD)
    for begin in tl.range(0, num_taken, TILE):
        place = begin + tl.arange(0, TILE)
        is_chosen = place < num_taken
        number = tl.load(numbers + place, mask=is_chosen, other=0)
        positions = number[:, None] * SIZE + offsets[None, :]
        live = is_chosen[:, None] & (offsets < SIZE)[None, :] & (positions < num_seen)
        pages = tl.load(table + positions // PAGE_SIZE, mask=live, other=0)
        slots = (pages * PAGE_SIZE) | (positions % PAGE_SIZE)
        tl.store(line + place[:, None] * SIZE + offsets[None, :], slots * KV_HEADS + head, mask=live)
    # Its own block, the last one, is always among them; the others are whole.
    tl.store(counts + own * KV_HEADS + head, (num_taken * SIZE - (num * SIZE - num_seen)).to(tl.int64))
