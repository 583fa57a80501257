"""``decode_prologue`` in Triton: one thread for each request."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fenceline.memory_order.triton_launcher import KernelVariant

_MAX_BLOCK = 128


def launch(
    plan: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    state: tuple[torch.Tensor, torch.Tensor],
    page_size: int,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """See ``decode_runner.decode_prologue``. ``plan`` is its rows, plan lengths and steps, ``state`` its page table and
    last tokens, ``outputs`` its four outputs."""
    page_table, last_tokens = state
    size = outputs[0].shape[0]
    assert all(t.dtype == torch.int64 and t.is_contiguous() for t in (*plan, last_tokens, *outputs))
    if size == 0:
        return
    block = min(_MAX_BLOCK, max(32, triton.next_power_of_2(size)))
    tensors = (*plan, page_table, last_tokens, *outputs)
    _variant(page_size, block).launch((-(-size // block),), tensors, (size, page_table.stride(0)))


@cache
def _variant(page_size: int, block: int) -> KernelVariant:
    return KernelVariant(_decode_prologue_kernel, {"PAGE_SIZE": page_size, "BLOCK": block}, block // 32)


# Behind the inputs of prompts those of rows that decode have any address.
@triton.jit(
    do_not_specialize=["size", "max_pages"],
    do_not_specialize_on_alignment=[
        "rows", "plan_seq_lens", "out_seq_lens", "out_positions", "out_slots", "out_input_ids",
    ],
)  # fmt: skip
def _decode_prologue_kernel(
    rows, plan_seq_lens, num_steps, page_table, last_tokens, out_seq_lens, out_positions, out_slots, out_input_ids,
    size, max_pages,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    row = tl.load(rows + index, mask=inside, other=0)
    seq_lens = tl.load(plan_seq_lens + index, mask=inside, other=0)
    seq_lens = tl.where(row == 0, 1, seq_lens + tl.load(num_steps + index, mask=inside, other=0))
    positions = seq_lens - 1
    columns = positions // PAGE_SIZE
    pages = tl.load(page_table + row * max_pages + columns, mask=inside, other=0).to(tl.int64)
    tokens = tl.load(last_tokens + row, mask=inside, other=0)
    tl.store(out_seq_lens + index, seq_lens, mask=inside)
    tl.store(out_positions + index, positions, mask=inside)
    tl.store(out_slots + index, pages * PAGE_SIZE + (positions - columns * PAGE_SIZE), mask=inside)
    tl.store(out_input_ids + index, tokens, mask=inside)
