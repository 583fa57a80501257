"""The kernels of ``speculative.step_kernels`` in Triton.

Most programs process a tile of requests with all their rows. Where pieces of a vocabulary are compared, each program
processes one request, and where hidden states are copied, a part of one row.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fenceline.layers.kernels.speculative_operands import (
    SINK_LEN,
    AcceptOutputs,
    BeginOutputs,
    NextRow,
    Pieces,
    simulated_counts,
)
from fenceline.layers.kernels.triton.sample import _row_keys
from fenceline.memory_order.triton_launcher import KernelVariant

_TILE = 128  # elements of a program's tile: requests times the rows of each
_FEATURES = 2048  # the maximum number of elements of a hidden state that a program copies

Tensor = torch.Tensor


def launch_begin(
    rows: Tensor,
    state_lens: Tensor,
    page_table: Tensor,
    last_tokens: Tensor,
    page_size: int,
    depth: int,
    outputs: BeginOutputs,
) -> None:
    size, num_rows = outputs.positions.shape
    assert page_table.dtype == torch.int32 and page_table.stride(1) == 1
    if size == 0:
        return
    tensors = (rows, state_lens, page_table, last_tokens, *outputs[:-1], outputs.is_bad.view(torch.uint8))
    assert all(t is None or t.is_contiguous() for t in tensors if t is not page_table)
    block, width = _tile(num_rows)
    variant = _paged_variant(True, page_size, block, width)
    variant.launch((-(-size // block),), tensors, (size, num_rows, depth, page_table.stride(0)))


def launch_keep(
    pieces: Pieces, is_bad: Tensor, input_ids: Tensor, column: int, vocab_size: int, following: NextRow | None
) -> None:
    size, num_pieces = pieces.best_ids.shape
    if size == 0:
        return
    at, outputs = 0, (None,) * 7
    if following is not None:
        at, *outputs = following  # type: ignore[assignment]
    tensors = (*pieces, is_bad.view(torch.uint8), input_ids, *outputs)
    assert all(t is None or t.is_contiguous() for t in tensors)
    numbers = (input_ids.shape[1], column, vocab_size, at)
    _pieces_variant(False, num_pieces).launch((size,), tensors, numbers)


def launch_place(
    rows: Tensor, lens: Tensor, first: int, page_table: Tensor, page_size: int, positions: Tensor | None, slots: Tensor
) -> None:
    size, num_rows = slots.shape
    assert page_table.dtype == torch.int32 and page_table.stride(1) == 1
    if size == 0:
        return
    assert all(t is None or t.is_contiguous() for t in (rows, lens, positions, slots))
    block, width = _tile(num_rows)
    tensors = (rows, lens, page_table, positions, slots)
    numbers = (size, num_rows, first, page_table.stride(0))
    _paged_variant(False, page_size, block, width).launch((-(-size // block),), tensors, numbers)


def launch_proposal(pieces: Pieces, rows: Tensor, counts: Tensor, kept: Tensor, ids: Tensor | None, ahead: int) -> None:
    size, num_pieces = pieces.best_ids.shape
    if size == 0:
        return
    assert all(t is None or t.is_contiguous() for t in (*pieces, rows, counts, ids))
    numbers = (kept.stride(0), 0 if ids is None else ids.shape[1], ahead)
    _pieces_variant(True, num_pieces).launch((size,), (*pieces, rows, counts, kept, ids), numbers)


def launch_accept(
    input_ids: Tensor,
    drawn: Tensor,
    is_bad: Tensor,
    may_accept: Tensor,
    rows: Tensor,
    lens: Tensor,
    accept_length: float | None,
    kept: AcceptOutputs,
) -> None:
    size, num_rows = input_ids.shape
    if size == 0:
        return
    is_behind = None if kept.is_behind is None else kept.is_behind.view(torch.uint8)
    flags = is_bad.view(torch.uint8), may_accept.view(torch.uint8)
    tensors = (input_ids, drawn, *flags, rows, lens, *kept[:-1], is_behind)
    assert all(t is None or t.is_contiguous() for t in tensors)
    block, width = _tile(num_rows)
    _accept_variant(accept_length, block, width).launch((-(-size // block),), tensors, (size, num_rows))


def launch_hidden(hidden: Tensor, counts: Tensor, rows: Tensor, kept: Tensor) -> None:
    size, features = len(rows), kept.shape[1]
    assert hidden.is_contiguous() and kept.stride(1) == 1 and hidden.dtype == kept.dtype
    if size == 0:
        return
    block = min(_FEATURES, triton.next_power_of_2(features))
    grid = (size, -(-features // block))
    numbers = (len(hidden) // size, features, kept.stride(0))
    _hidden_variant(block).launch(grid, (hidden, counts, rows, kept), numbers)


def _tile(num_rows: int) -> tuple[int, int]:
    """The number of requests in a program's tile, and the padded number of rows of each."""
    width = triton.next_power_of_2(num_rows)
    return max(_TILE // width, 1), width


@cache
def _paged_variant(begins: bool, page_size: int, block: int, width: int) -> KernelVariant:
    constants = {"PAGE_SIZE": page_size, "BLOCK": block, "WIDTH": width}
    return KernelVariant(_begin_kernel if begins else _place_kernel, constants, _num_warps(block * width))


@cache
def _pieces_variant(proposes: bool, num_pieces: int) -> KernelVariant:
    block = max(32, triton.next_power_of_2(num_pieces))
    kernel = _proposal_kernel if proposes else _keep_kernel
    return KernelVariant(kernel, {"PIECES": num_pieces, "BLOCK": block}, _num_warps(block))


@cache
def _accept_variant(accept_length: float | None, block: int, width: int) -> KernelVariant:
    min_count, extra_below = (0, 0) if accept_length is None else simulated_counts(accept_length)
    constants = {
        "MIN_COUNT": min_count,
        "EXTRA_BELOW": extra_below,
        "SINK_LEN": SINK_LEN,
        "BLOCK": block,
        "WIDTH": width,
    }
    return KernelVariant(_accept_kernel, constants, _num_warps(block * width))


@cache
def _hidden_variant(block: int) -> KernelVariant:
    return KernelVariant(_hidden_kernel, {"BLOCK": block}, 4)


def _num_warps(places: int) -> int:
    return max(1, min(4, places // 64))


@triton.jit(do_not_specialize=["size", "num_rows", "depth", "max_pages"])
def _begin_kernel(
    rows, state_lens, page_table, last_tokens, lens, seq_lens, path_lens, positions, out_slots, input_ids, is_bad,
    size, num_rows, depth, max_pages,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = req < size
    row = tl.load(rows + req, mask=inside, other=0)
    length = tl.load(state_lens + row, mask=inside, other=1)
    token = tl.load(last_tokens + row, mask=inside, other=0)
    tl.store(lens + req, length, mask=inside)
    tl.store(seq_lens + req, length - 1 + num_rows, mask=inside)
    if path_lens is not None:
        tl.store(path_lens + req, length + depth, mask=inside)
    tl.store(input_ids + req * num_rows, token, mask=inside)
    tl.store(is_bad + req, tl.zeros_like(req).to(tl.uint8), mask=inside)
    places = tl.arange(0, WIDTH)
    live = inside[:, None] & (places < num_rows)[None, :]
    position = (length - 1)[:, None] + places[None, :]
    column = position // PAGE_SIZE
    page = tl.load(page_table + row[:, None] * max_pages + column, mask=live, other=0).to(tl.int64)
    at = (req * num_rows)[:, None] + places[None, :]
    tl.store(positions + at, position, mask=live)
    tl.store(out_slots + at, page * PAGE_SIZE + (position - column * PAGE_SIZE), mask=live)


@triton.jit(do_not_specialize=["size", "num_rows", "first", "max_pages"])
def _place_kernel(
    rows, lens, page_table, positions, slots, size, num_rows, first, max_pages,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = req < size
    row = tl.load(rows + req, mask=inside, other=0)
    length = tl.load(lens + req, mask=inside, other=1)
    places = tl.arange(0, WIDTH)
    live = inside[:, None] & (places < num_rows)[None, :]
    place = (length + first)[:, None] + places[None, :]
    position = tl.maximum(place, 0)
    column = position // PAGE_SIZE
    page = tl.load(page_table + row[:, None] * max_pages + column, mask=live, other=0).to(tl.int64)
    slot = page * PAGE_SIZE + (position - column * PAGE_SIZE)
    at = (req * num_rows)[:, None] + places[None, :]
    tl.store(slots + at, tl.where(place < 0, 0, slot), mask=live)
    if positions is not None:
        tl.store(positions + at, position, mask=live)


@triton.jit(do_not_specialize=["num_rows", "column", "vocab_size", "at"])
def _keep_kernel(
    best_scores, best_ids, largest, is_bad, input_ids, lens, positions, out_slots, draft_lens, draft_ids,
    draft_positions, draft_slots, num_rows, column, vocab_size, at,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0)
    pieces = tl.arange(0, BLOCK)
    live = pieces < PIECES
    offsets = req.to(tl.int64) * PIECES + pieces
    scores = tl.load(best_scores + offsets, mask=live, other=-float("inf"))
    ids = tl.load(best_ids + offsets, mask=live, other=2147483647)
    best = tl.max(tl.load(largest + offsets, mask=live, other=-float("inf")), axis=0)
    was_bad = tl.load(is_bad + req) != 0
    first = req * num_rows
    if lens is not None:
        length = tl.load(lens + req)
        position = tl.load(positions + first + at)
        slot = tl.load(out_slots + first + at)
    token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, 2147483647), axis=0)
    usable = (best < float("inf")) & (best > -float("inf")) & (token >= 0) & (token < vocab_size)
    bad = was_bad | (usable == 0)
    token = tl.where(bad, 0, token).to(tl.int64)
    tl.store(is_bad + req, bad.to(tl.uint8))
    tl.store(input_ids + first + column, token)
    if lens is not None:
        tl.store(draft_lens + req, length + at)
        tl.store(draft_ids + req, token)
        tl.store(draft_positions + req, position)
        tl.store(draft_slots + req, slot)


@triton.jit(do_not_specialize=["kept_stride", "num_rows", "ahead"])
def _proposal_kernel(
    best_scores, best_ids, largest, rows, counts, kept, ids, kept_stride, num_rows, ahead,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0)
    pieces = tl.arange(0, BLOCK)
    live = pieces < PIECES
    offsets = req.to(tl.int64) * PIECES + pieces
    scores = tl.load(best_scores + offsets, mask=live, other=-float("inf"))
    tokens = tl.load(best_ids + offsets, mask=live, other=2147483647)
    best = tl.max(tl.load(largest + offsets, mask=live, other=-float("inf")), axis=0)
    row = tl.load(rows + req)
    token = tl.min(tl.where(scores == tl.max(scores, axis=0), tokens, 2147483647), axis=0).to(tl.int64)
    token = tl.where((best < float("inf")) & (best > -float("inf")), token, -1)
    tl.store(kept + row * kept_stride, token)
    if ids is not None:
        column = tl.load(counts + req) + ahead
        tl.store(ids + req.to(tl.int64) * num_rows + column, tl.maximum(token, 0))


@triton.jit(do_not_specialize=["size", "num_rows"])
def _accept_kernel(
    input_ids, drawn, is_bad, may_accept, rows, lens, counts, num_bad, last_tokens, state_lens, previous, is_behind,
    size, num_rows,
    MIN_COUNT: tl.constexpr, EXTRA_BELOW: tl.constexpr, SINK_LEN: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = req < size
    row = tl.load(rows + req, mask=inside, other=0)
    length = tl.load(lens + req, mask=inside, other=1)
    bad = tl.load(is_bad + req, mask=inside, other=0)
    may_go_on = (bad == 0) & (tl.load(may_accept + req, mask=inside, other=0) != 0)
    if MIN_COUNT > 0:  # simulated drafts: MIN_COUNT tokens, and one more depending on a hash
        key, _ = _row_keys(row, length - 1)
        num = MIN_COUNT + ((key & 0x7FFFFFFF).to(tl.int64) < EXTRA_BELOW).to(tl.int64)
        count = tl.where(may_go_on, tl.minimum(num, num_rows), 1)
    else:
        # The first draft that differs from the drawn token ends the step. Beyond the last draft there is none.
        places = tl.arange(0, WIDTH)
        live = inside[:, None] & (places < num_rows - 1)[None, :]
        at = (req * num_rows)[:, None] + places[None, :]
        draft = tl.load(input_ids + at + 1, mask=live, other=0)
        own = tl.load(drawn + at, mask=live, other=0)
        ends = tl.where(live & (draft == own), WIDTH, places[None, :] + 0 * at)
        first = tl.minimum(tl.min(ends, axis=1), num_rows - 1)
        count = tl.where(may_go_on, first + 1, 1).to(tl.int64)
    last = req * num_rows + count - 1
    tl.store(counts + req, count, mask=inside)
    tl.store(num_bad + req, bad.to(tl.int64), mask=inside)
    tl.store(last_tokens + row, tl.load(drawn + last, mask=inside, other=0), mask=inside)
    tl.store(state_lens + row, tl.where(row == 0, SINK_LEN, length + count), mask=inside)
    if previous is not None:
        # The token before the last: an accepted draft is equal to the token drawn for its position. If only one token
        # was drawn, it is the root.
        has_more = inside & (count > 1)
        token = tl.load(input_ids + req * num_rows, mask=inside, other=0)
        before = tl.load(drawn + last - 1, mask=has_more, other=0)
        tl.store(previous + row, tl.where(has_more, before, token), mask=inside)
    if is_behind is not None:
        tl.store(is_behind + row, (count > tl.maximum(num_rows - 1, 1)).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "features", "row_stride"])
def _hidden_kernel(hidden, counts, rows, kept, num_rows, features, row_stride, BLOCK: tl.constexpr):
    req = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < features
    source = (req * num_rows + tl.load(counts + req) - 1) * features
    target = tl.load(rows + req) * row_stride
    tl.store(kept + target + columns, tl.load(hidden + source + columns, mask=live), mask=live)
