"""The sums of a softmax over the vocabulary in Triton, in an order that only the vocabulary determines. That of torch's
operator depends on where a row begins in memory."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fenceline.memory_order.triton_launcher import KernelVariant

_BLOCK = 4096
_NUM_WARPS = 8


def log_sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of ``logits`` [N, V], contiguous, and the logarithm of the row's sum of exp(logit -
    largest), both [N] float32. The latter is NaN for a row that has a NaN. Current stream, no host synchronisation."""
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous()
    largest, sums = logits.new_empty(2, num_rows, dtype=torch.float32)
    if num_rows:
        _variant(vocab_size).launch((num_rows,), (logits, largest, sums))
    return largest, sums


@cache
def _variant(vocab_size: int) -> KernelVariant:
    return KernelVariant(_log_sums_kernel, {"VOCAB": vocab_size, "BLOCK": _BLOCK}, _NUM_WARPS)


# Rows that begin at any address are added up by the same machine code.
@triton.jit(do_not_specialize_on_alignment=["logits", "largest", "sums"])
def _log_sums_kernel(logits, largest, sums, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = logits + row * VOCAB + columns
    tops = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        part = tl.load(values + start, mask=start + columns < VOCAB, other=-float("inf")).to(tl.float32)
        tops = tl.maximum(tops, part)
    top = tl.max(tops, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        part = tl.load(values + start, mask=start + columns < VOCAB, other=-float("inf")).to(tl.float32)
        total += tl.exp(part - top)
    tl.store(largest + row, top)
    tl.store(sums + row, tl.log(tl.sum(total, 0)))
