"""``KVMover.move`` in Triton: a program for each request, part and piece of a row."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fenceline.memory_order.triton_launcher import KernelVariant

_MAX_ELEMENTS = 4096  # that a program holds in registers at once
_NUM_WARPS = 4


def launch(
    slots: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    addresses: torch.Tensor,
    num_words: torch.Tensor,
    most_words: int,
) -> None:
    """See ``KVMover``. ``addresses`` [P] and ``num_words`` [P] int64 describe the parts; ``most_words`` is the largest
    of ``num_words``."""
    tensors = (slots, path, counts, addresses, num_words)
    assert all(t.dtype == torch.int64 and t.is_contiguous() for t in tensors)
    batch, width = path.shape
    if batch == 0:
        return
    steps = triton.next_power_of_2(width)
    block = min(triton.next_power_of_2(most_words), _MAX_ELEMENTS // steps)
    grid = (batch, addresses.shape[0], -(-most_words // block))
    _variant(steps, block).launch(grid, tensors, (slots.shape[0] // batch, width))


@cache
def _variant(steps: int, block: int) -> KernelVariant:
    return KernelVariant(_move_kernel, {"STEPS": steps, "BLOCK": block}, _NUM_WARPS)


@triton.jit(do_not_specialize=["num_nodes", "width"])
def _move_kernel(slots, path, counts, addresses, num_words, num_nodes, width, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    steps = tl.arange(0, STEPS)
    inside = steps < tl.minimum(tl.load(counts + request), width)
    nodes = tl.load(path + request * width + steps, mask=inside, other=0)
    moves = inside & (nodes != steps)
    if tl.sum(moves.to(tl.int32), 0) == 0:
        return
    source = tl.load(slots + request * num_nodes + nodes, mask=moves, other=0)
    target = tl.load(slots + request * num_nodes + steps, mask=moves, other=0)
    words = tl.load(num_words + part)
    rows = tl.load(addresses + part).to(tl.pointer_type(tl.int32))
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    live = moves[:, None] & (columns < words)[None, :]
    values = tl.load(rows + source[:, None] * words + columns[None, :], mask=live, other=0)
    # One thread's target may be another thread's source, so all threads read before any writes.
    tl.debug_barrier()
    tl.store(rows + target[:, None] * words + columns[None, :], values, mask=live)
