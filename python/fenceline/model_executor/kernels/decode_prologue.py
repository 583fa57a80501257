"""The start of a decode step: computes the model's inputs on the device from the plan and the request rows."""

from __future__ import annotations

import torch

from fenceline.memory_order.kernel import Kernel, KernelAccesses


def _accesses(
    op: KernelAccesses,
    rows: torch.Tensor,
    plan_seq_lens: torch.Tensor,
    num_steps: torch.Tensor,
    page_table: torch.Tensor,
    last_tokens: torch.Tensor,
    page_size: int,
    *outputs: torch.Tensor,
) -> None:
    op.read(plan_seq_lens)
    op.read(num_steps)
    op.read(page_table, rows)
    op.read(last_tokens, rows)
    for output in outputs:
        op.write(output)


KERNEL = Kernel("decode_prologue", _accesses)


def decode_prologue(
    rows: torch.Tensor,
    plan_seq_lens: torch.Tensor,
    num_steps: torch.Tensor,
    page_table: torch.Tensor,
    last_tokens: torch.Tensor,
    page_size: int,
    out_seq_lens: torch.Tensor,
    out_positions: torch.Tensor,
    out_slots: torch.Tensor,
    out_input_ids: torch.Tensor,
) -> None:
    """Write the inputs of a decode step of B requests. A request in row 0, the sink, is padding.

    ``rows``, ``plan_seq_lens``, ``num_steps`` [B] int64: the request rows, their lengths in the first step of the plan
    including that step's token, and the number of steps since then. ``page_table`` [R, max_pages] int32,
    ``last_tokens`` [R] int64. All outputs are [B] int64: the length (plan + steps; 1 for padding), the position
    (length - 1), the KV slot of that position, and the row's last token. ``out_seq_lens`` may be ``plan_seq_lens``
    itself. It is not checked that positions are inside the page table.

    One launch on the current stream, without host synchronisation. It may be captured.
    """
    outputs = (out_seq_lens, out_positions, out_slots, out_input_ids)
    assert all(t.shape == rows.shape for t in (plan_seq_lens, num_steps, *outputs))
    assert page_table.dtype == torch.int32 and page_table.stride(1) == 1
    if rows.is_cuda:
        from fenceline.model_executor.kernels.decode_prologue_triton import launch

        launch((rows, plan_seq_lens, num_steps), (page_table, last_tokens), page_size, outputs)
        return
    operands = (rows, plan_seq_lens, num_steps, page_table, last_tokens, page_size, *outputs)
    if rows.is_cpu:
        _derive(*operands)
    else:  # on the virtual GPU, which checks accesses to memory
        KERNEL.launch(_derive, *operands)


def _derive(
    rows: torch.Tensor,
    plan_seq_lens: torch.Tensor,
    num_steps: torch.Tensor,
    page_table: torch.Tensor,
    last_tokens: torch.Tensor,
    page_size: int,
    out_seq_lens: torch.Tensor,
    out_positions: torch.Tensor,
    out_slots: torch.Tensor,
    out_input_ids: torch.Tensor,
) -> None:
    """The reference implementation."""
    out_seq_lens.copy_(torch.where(rows == 0, 1, plan_seq_lens + num_steps))
    out_positions.copy_(out_seq_lens - 1)
    pages = page_table[rows, out_positions // page_size].long()
    out_slots.copy_(pages * page_size + out_positions % page_size)
    out_input_ids.copy_(last_tokens[rows])
