"""The kernels of ``page_tags`` in Triton. A few programs share a row's pages; one adds up a moved page."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fenceline.mem_cache.page_tag_operands import BegunTags, MovedPages, Visit
from fenceline.memory_order.triton_launcher import KernelVariant

_BLOCK = 128  # pages that a program compares at once
_PARTS = 8  # programs of a row
_WORDS = 1024  # of a page that a program adds up at once


def launch_begin(operands: BegunTags) -> None:
    """See ``page_tags.begin_tags``."""
    num_written, num_retired = operands.rows.shape[0], operands.retired.shape[1]
    grid = (-(-max(num_written, num_retired) // _BLOCK),)
    _begin_variant().launch(grid, operands, (num_written, num_retired, operands.expected.shape[1]))


def launch_visit(operands: Visit) -> None:
    """See ``PageTags.visit``."""
    size = operands.rows.shape[0]
    if size == 0:
        return
    tensors = operands[:11]
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    num_pages, (num_findings, fields) = operands.tags.shape[0], operands.findings.shape
    sizes = (operands.slots.shape[0] // size, operands.page_table.shape[1], num_pages, num_findings - 1)
    _visit_variant(operands.arrived.shape[0], fields).launch((size, _PARTS), tensors, (*operands[11:], *sizes))


def launch_seal(moved: MovedPages, words: torch.Tensor, by_bytes: bool) -> None:
    """See ``page_tags.seal_pages``. ``words`` [4, P] int64: of each part its address, its words of a page, of a byte or
    four, those before it, and the words from one page to the next."""
    last = moved.arrived.numel() - moved.arrived.shape[1]
    _moved_variant(False, by_bytes).launch((moved.pages.shape[0],), (*moved, words), (words.shape[1], last))


def launch_arrive(moved: MovedPages, words: torch.Tensor, writer: int, layer: int, by_bytes: bool) -> None:
    """See ``page_tags.arrive_pages``; ``words`` as for :func:`launch_seal`."""
    num_layers, num_pages = moved.arrived.shape
    numbers = (words.shape[1], layer * num_pages, writer, int(layer == num_layers - 1))
    _moved_variant(True, by_bytes).launch((moved.pages.shape[0],), (*moved, words), numbers)


@cache
def _begin_variant() -> KernelVariant:
    return KernelVariant(_begin_kernel, {"BLOCK": _BLOCK}, num_warps=4)


@cache
def _visit_variant(num_layers: int, fields: int) -> KernelVariant:
    constants = {"NUM_LAYERS": num_layers, "FIELDS": fields, "BLOCK": _BLOCK, "PARTS": _PARTS}
    return KernelVariant(_visit_kernel, constants, num_warps=4)


@cache
def _moved_variant(arrives: bool, by_bytes: bool) -> KernelVariant:
    kernel = _arrive_kernel if arrives else _seal_kernel
    return KernelVariant(kernel, {"BY_BYTES": by_bytes, "BLOCK": _WORDS}, num_warps=4)


@triton.jit(do_not_specialize=["num_written", "num_retired", "max_pages"])
def _begin_kernel(
    expected, tags, rows, columns, leases, retired, num_written, num_retired, max_pages, BLOCK: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    written, ended = index < num_written, index < num_retired
    place = tl.load(rows + index, mask=written, other=0) * max_pages + tl.load(columns + index, mask=written, other=0)
    tl.store(expected + place, tl.load(leases + index, mask=written, other=0).to(tl.int32), mask=written)
    page = tl.load(retired + index, mask=ended, other=0)
    tl.store(tags + page * 3, -tl.load(retired + num_retired + index, mask=ended, other=0).to(tl.int32), mask=ended)


_NUMBERS = ["back", "page_size", "when", "layer", "num_each", "max_pages", "num_pages", "max_findings"]


@triton.jit(do_not_specialize=_NUMBERS)
def _visit_kernel(
    rows, starts, ends, slots, query_starts, page_table, expected, tags, arrived, clock, findings,
    back, page_size, when, layer, num_each, max_pages, num_pages, max_findings,
    NUM_LAYERS: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    req, part = tl.program_id(0), tl.program_id(1)
    # A step counts itself: before its forward into the second number, and into the first when all have been compared.
    step = tl.load(clock + (when == 3).to(tl.int32)) + (when != 3).to(tl.int32)
    if (req == 0) & (part == 0) & (when != 2):
        tl.store(clock + (when == 1).to(tl.int32), step)
    row = tl.load(rows + req)
    start = tl.load(starts + req) - back
    num = tl.minimum((tl.load(ends + req) + page_size - 1) // page_size, max_pages).to(tl.int32)
    first_slot = req.to(tl.int64) * num_each
    if query_starts is not None:
        first_slot = tl.load(query_starts + req).to(tl.int64)
    if row == 0:
        return
    for first in range(part * BLOCK, num, PARTS * BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < num
        page = tl.load(page_table + row * max_pages + columns, mask=inside, other=0)
        want = tl.load(expected + row * max_pages + columns, mask=inside, other=0)
        named = inside & (page > 0) & (page < num_pages)
        tag = tags + page.to(tl.int64) * 3
        of_page = arrived + page
        of_layer = tl.load(of_page + layer.to(tl.int64) * num_pages, mask=named, other=0)
        compared = named & (when != 2)  # before a layer, a load may be writing the tags
        lease = tl.load(tag, mask=compared, other=0)
        held = tl.load(tag + 1, mask=compared, other=0)
        right = named & (of_layer == want)
        right = right & ((when == 2) | ((lease == want) & ((held == columns) | (held == -1))))
        old = inside & (columns * page_size < start)
        checked = old
        if when != 1:
            checked = old | (inside & (page != 0))
        wrong = checked & (right == 0)
        new = inside & (when == 1) & ((columns + 1) * page_size > start)
        wrong = wrong | (new & named & ((lease == -want) | (tl.abs(lease) > want)))  # retired, or a later lease's
        # Where the first of the step's tokens in each page goes.
        position = tl.maximum((columns * page_size).to(tl.int64), start)
        slot = tl.load(slots + first_slot + position - start, mask=new, other=0)
        target = (slot // page_size).to(tl.int32)
        offset = position - columns.to(tl.int64) * page_size
        astray = new & ((target != page) | (slot - target.to(tl.int64) * page_size != offset))
        was_right = wrong == 0
        wrong = wrong | astray
        if tl.sum(wrong.to(tl.int32), 0) > 0:
            writer = tl.load(tag + 2, mask=compared, other=0)
            none = tl.zeros_like(columns)
            number = tl.atomic_add(findings + none, none + 1, mask=wrong) + 1
            kept = wrong & (number <= max_findings)
            out = findings + number * FIELDS
            tl.store(out, none + when, mask=kept)
            tl.store(out + 1, none + step, mask=kept)
            tl.store(out + 2, none + row.to(tl.int32), mask=kept)
            tl.store(out + 3, columns, mask=kept)
            tl.store(out + 4, tl.where(was_right & astray, target, page), mask=kept)
            tl.store(out + 5, want, mask=kept)
            tl.store(out + 6, lease, mask=kept)
            tl.store(out + 7, held, mask=kept)
            tl.store(out + 8, of_layer, mask=kept)
            tl.store(out + 9, writer, mask=kept)
            tl.store(out + 10, none + layer, mask=kept)
        if (when == 1) & ((first + BLOCK) * page_size > start):
            written = new & (target > 0) & (target < num_pages)
            tag = tags + target.to(tl.int64) * 3
            of_page = arrived + target
            tl.store(tag, want, mask=written)
            tl.store(tag + 1, columns, mask=written)
            tl.store(tag + 2, tl.zeros_like(columns) + step, mask=written)
            for _ in range(NUM_LAYERS):
                tl.store(of_page, want, mask=written)
                of_page += num_pages


@triton.jit
def _added_up(words, num_parts, page, BY_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the words of a page's parts, each by an odd weight of its own."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    for part in range(num_parts):
        size = tl.load(words + num_parts + part)
        first = tl.load(words + 2 * num_parts + part)
        of_page = page * tl.load(words + 3 * num_parts + part)
        if BY_BYTES:
            of_part = tl.load(words + part).to(tl.pointer_type(tl.int8))
        else:
            of_part = tl.load(words + part).to(tl.pointer_type(tl.int32))
        for start in range(0, size, BLOCK):
            at = start + lanes
            word = tl.load(of_part + of_page + at, mask=at < size, other=0).to(tl.int64)
            total += word * (2 * (first + at) + 1)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["num_parts", "last"])
def _seal_kernel(
    pages, host_pages, leases, known, sums, host, tags, arrived, words, num_parts, last,
    BY_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    page = tl.load(pages + index)
    lease = tl.load(leases + index)
    right = (tl.load(tags + page * 3) == lease) & (tl.load(arrived + last + page) == lease)
    position = tl.load(tags + page * 3 + 1).to(tl.int64)
    beside = host + tl.load(host_pages + index) * 2
    tl.store(beside, _added_up(words, num_parts, page, BY_BYTES, BLOCK))
    tl.store(beside + 1, tl.where(right, position, -2))


@triton.jit(do_not_specialize=["num_parts", "before", "writer", "is_last"])
def _arrive_kernel(
    pages, host_pages, leases, known, sums, host, tags, arrived, words, num_parts, before, writer, is_last,
    BY_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    page = tl.load(pages + index)
    lease = tl.load(leases + index).to(tl.int32)
    total = tl.load(sums + index) + _added_up(words, num_parts, page, BY_BYTES, BLOCK)
    tl.store(sums + index, total)
    of_layer = arrived + before + page
    if is_last != 0:
        beside = host + tl.load(host_pages + index) * 2
        is_known = tl.load(known + index) != 0
        position = tl.load(beside + 1)
        wrong = is_known & ((tl.load(beside) != total) | (position == -2))
        tl.store(of_layer, tl.where(wrong, -1, lease))
        tag = tags + page * 3
        tl.store(tag, lease)
        tl.store(tag + 1, tl.where(is_known, position, -1).to(tl.int32))
        tl.store(tag + 2, lease * 0 + writer)
    else:
        tl.store(of_layer, lease)
