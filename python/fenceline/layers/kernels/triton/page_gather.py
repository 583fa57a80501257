"""Gathers the batch's page ids on the device in one launch, in the layouts that attention libraries take.

The page table and the current lengths are only on the device, so the host cannot do this. In a graph the launch is
part of each replay and reads the values of that replay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fenceline.memory_order.triton_launcher import launched_ahead

_BLOCK = 512  # page ids that a program copies at a time
_MAX_PROGRAMS = 1024


@launched_ahead
@triton.jit(do_not_specialize=["out_stride"])
def _gather_kernel(
    page_table, rows, seq_lens, out, starts, last_page_lens, seq_lens_32, table_stride, out_stride,
    PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    num_pages = (seq_len + PAGE_SIZE - 1) // PAGE_SIZE
    if RAGGED:
        # Each program counts the pages of the requests before its own: a few loads are cheaper than a separate scan.
        start = request * 0
        first = request * 0
        while first < request:
            others = first + tl.arange(0, REQUESTS)
            lens = tl.load(seq_lens + others, mask=others < request, other=0).to(tl.int32)
            start += tl.sum((lens + PAGE_SIZE - 1) // PAGE_SIZE)
            first += REQUESTS
        if tl.program_id(1) == 0:
            if request == 0:
                tl.store(starts, 0)
            tl.store(starts + request + 1, start + num_pages)
            tl.store(last_page_lens + request, seq_len - (num_pages - 1) * PAGE_SIZE)
        target = out + start
    else:
        if tl.program_id(1) == 0:
            tl.store(seq_lens_32 + request, seq_len)
        target = out + request.to(tl.int64) * out_stride
    source = page_table + tl.load(rows + request) * table_stride
    column = tl.program_id(1) * BLOCK
    while column < num_pages:
        columns = column + tl.arange(0, BLOCK)
        pages = tl.load(source + columns, mask=columns < num_pages, other=0)
        if RAGGED:
            tl.store(target + columns, pages, mask=columns < num_pages)
        else:  # the sink page after the last one, because the attention kernel reads page ids a tile at a time
            tl.store(target + columns, pages, mask=columns < out_stride)
        column += tl.num_programs(1) * BLOCK


def gather_page_indices(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    max_pages: int,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_lens: torch.Tensor,
) -> None:
    """Gather the batch's page ids in FlashInfer's layout, one request after the other. On the current stream. Reads
    page_table [num_rows, columns] int32, rows and seq_lens [B] int64; every length is at least 1 and needs at most
    ``max_pages`` pages. Writes indptr [B + 1], indices [the sum of pages] and last_page_lens [B], all int32."""
    _launch(page_table, rows, seq_lens, page_size, max_pages, indices, (indptr, last_page_lens), None)


def gather_page_rows(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    out: torch.Tensor,
    seq_lens_32: torch.Tensor,
) -> None:
    """Gather the batch's rows of the page table, as FlashAttention takes them. On the current stream. page_table, rows
    and seq_lens as in ``gather_page_indices``. Writes out [B, pages] int32: a request's pages, then the sink page up to
    a multiple of 512 columns. Later columns are not written and must not be read. Also writes the lengths as int32 to
    seq_lens_32 [B]."""
    _launch(page_table, rows, seq_lens, page_size, out.shape[1], out, None, seq_lens_32)


def _launch(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    max_pages: int,
    out: torch.Tensor,
    ragged: tuple[torch.Tensor, torch.Tensor] | None,
    seq_lens_32: torch.Tensor | None,
) -> None:
    num_requests = len(rows)
    assert page_table.stride(1) == 1, "a row of the page table is contiguous"
    programs = min(-(-max_pages // _BLOCK), max(_MAX_PROGRAMS // num_requests, 1))
    starts, last_page_lens = (out, out) if ragged is None else ragged
    _gather_kernel[(num_requests, programs)](
        page_table,
        rows,
        seq_lens,
        out,
        starts,
        last_page_lens,
        out if seq_lens_32 is None else seq_lens_32,
        page_table.stride(0),
        0 if ragged is not None else out.stride(0),
        PAGE_SIZE=page_size,
        RAGGED=ragged is not None,
        BLOCK=_BLOCK,
        REQUESTS=256,
    )
