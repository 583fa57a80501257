"""The kernels of ``speculative.token_lookup`` in Triton.

The tokens of a request are divided among programs, each of which looks for matches in every ``_PARTS``-th block. A
second kernel takes the best match of all, and proposes what follows it.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fenceline.memory_order.triton_launcher import KernelVariant

_PARTS, _BLOCK = 16, 512  # programs of a request, and tokens that one compares at once
_TILE = 128  # drawn tokens that a program keeps

Tensor = torch.Tensor


def launch_look_up(rows: Tensor, lens: Tensor, tokens: Tensor, least: int, most: int, input_ids: Tensor) -> None:
    size, num_rows = input_ids.shape
    assert tokens.dtype == torch.int32 and tokens.stride(1) == 1
    assert all(t.is_contiguous() for t in (rows, lens, input_ids))
    if size == 0:
        return
    best, stride = lens.new_empty(size, _PARTS), tokens.stride(0)
    _match_variant().launch((size, _PARTS), (rows, lens, tokens, best), (stride, least, most))
    width = triton.next_power_of_2(num_rows)
    _propose_variant(width).launch((size,), (rows, lens, tokens, best, input_ids), (stride, num_rows))


def launch_keep(rows: Tensor, lens: Tensor, drawn: Tensor, tokens: Tensor) -> None:
    size, num_rows = drawn.shape
    assert tokens.dtype == torch.int32 and tokens.stride(1) == 1
    assert all(t.is_contiguous() for t in (rows, lens, drawn))
    if size == 0:
        return
    width = triton.next_power_of_2(num_rows)
    block = max(_TILE // width, 1)
    _keep_variant(block, width).launch(
        (-(-size // block),), (rows, lens, drawn, tokens), (size, num_rows, tokens.stride(0))
    )


@cache
def _match_variant() -> KernelVariant:
    return KernelVariant(_match_kernel, {"PARTS": _PARTS, "BLOCK": _BLOCK}, 4)


@cache
def _propose_variant(width: int) -> KernelVariant:
    return KernelVariant(_propose_kernel, {"PARTS": _PARTS, "WIDTH": width}, 1)


@cache
def _keep_variant(block: int, width: int) -> KernelVariant:
    return KernelVariant(_keep_kernel, {"BLOCK": block, "WIDTH": width}, 2)


@triton.jit(do_not_specialize=["stride", "least", "most"])
def _match_kernel(rows, lens, tokens, best, stride, least, most, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    req, part = tl.program_id(0), tl.program_id(1)
    own = tokens + tl.load(rows + req) * stride
    last = (tl.load(lens + req) - 1).to(tl.int32)
    found = tl.full([BLOCK], -1, tl.int64)
    for first in range(part * BLOCK, last, PARTS * BLOCK):
        ends = first + tl.arange(0, BLOCK)
        matches = ends < last
        sizes = tl.zeros([BLOCK], tl.int64)
        for back in range(most):
            token = tl.load(own + (last - back), mask=back <= last, other=-1)
            before = tl.load(own + (ends - back), mask=matches & (ends >= back), other=-2)
            matches = matches & (before == token) & (token >= 0)
            sizes += matches.to(tl.int64)
        # The longest match is the best one, and of several the latest.
        found = tl.maximum(found, tl.where(sizes >= least, (sizes << 32) + ends, -1))
    tl.store(best + req * PARTS + part, tl.max(found, axis=0))


@triton.jit(do_not_specialize=["stride", "num_rows"])
def _propose_kernel(
    rows, lens, tokens, best, input_ids, stride, num_rows, PARTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    req = tl.program_id(0)
    own = tokens + tl.load(rows + req) * stride
    last = tl.load(lens + req) - 1
    found = tl.max(tl.load(best + req * PARTS + tl.arange(0, PARTS)), axis=0)
    end = tl.where(found >= 0, found & 0xFFFFFFFF, last - 1)
    ahead = tl.arange(0, WIDTH)
    live = ahead < num_rows - 1
    drafts = tl.load(own + end + 1 + ahead % (last - end), mask=live, other=0)
    tl.store(input_ids + req * num_rows + 1 + ahead, tl.maximum(drafts, 0).to(tl.int64), mask=live)


@triton.jit(do_not_specialize=["size", "num_rows", "stride"])
def _keep_kernel(rows, lens, drawn, tokens, size, num_rows, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = req < size
    row = tl.load(rows + req, mask=inside, other=0)
    first = row * stride + tl.load(lens + req, mask=inside, other=0)
    places = tl.arange(0, WIDTH)
    live = (row > 0)[:, None] & (places < num_rows)[None, :]
    values = tl.load(drawn + (req * num_rows)[:, None] + places[None, :], mask=live, other=0)
    tl.store(tokens + first[:, None] + places[None, :], values.to(tl.int32), mask=live)
