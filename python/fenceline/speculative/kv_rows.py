"""The KV rows of a step's nodes: their slots, and how the rows of accepted nodes are moved to their tokens' slots.

Node n of a request is computed at the slot of token ``seq_len + n``, whatever its depth. The tokens of an accepted path
have consecutive slots, so token i of the path moves from the slot of its node to that of token ``seq_len + i``, in
all layers, including those of a draft model. Slots are computed on the device in the step that uses them, so that they
are never used after the page table has changed (F5).

The move has a reference implementation in torch operators (without a GPU) and a Triton kernel (cuda), which is imported
when it is first used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fenceline.memory_order.kernel import Kernel, KernelAccesses

_WORD = 4  # bytes, the unit of a move


def node_slots(
    page_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, num_nodes: int, page_size: int
) -> torch.Tensor:
    """KV slots [B * num_nodes] int64 of the next ``num_nodes`` tokens of each request, request after request.
    ``page_table`` [R, max_pages] int32 must have columns for ``seq_lens`` + num_nodes tokens; torch reports an index
    beyond it. ``rows`` [B] int64; row 0 is the sink, the row of padding. ``seq_lens`` [B] int64: committed tokens."""
    positions = seq_lens[:, None] + torch.arange(num_nodes, device=seq_lens.device)
    return slots_at(page_table, rows, positions, page_size).flatten()


def slots_at(page_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """KV slots [B, N] int64 of tokens at ``positions`` [B, N] int64; for the rest see :func:`node_slots`. A negative
    position has the sink's slot 0."""
    pages = page_table[rows[:, None], positions.clamp(min=0) // page_size].long()
    return (pages * page_size + positions % page_size).masked_fill(positions < 0, 0)


def _accesses(
    op: KernelAccesses, slots: torch.Tensor, path: torch.Tensor, counts: torch.Tensor, *parts: torch.Tensor
) -> None:
    op.read(path)
    op.read(counts)
    for part in parts:
        op.read(part, slots)
        op.write(part, slots)


KERNEL = Kernel("move_accepted", _accesses)


class KVMover:
    """Moves rows of the tensors of a KV pool. It keeps a reference to these tensors. ``parts`` are contiguous tensors
    [num_slots, ...] on one device, whose rows have a multiple of 4 bytes: ``[tensor for _, tensor in
    pool.tensors()]``."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        assert parts and all(part.is_contiguous() for part in parts)
        assert all(_row_bytes(part) % _WORD == 0 for part in parts), "rows of whole words"
        self._parts = tuple(parts)
        device = parts[0].device
        # Operands of the kernel: each part's address, and the number of 4-byte words in one of its rows.
        self._addresses = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=device)
        num_words = [_row_bytes(part) // _WORD for part in parts]
        self._num_words = torch.tensor(num_words, dtype=torch.int64, device=device)
        self._most_words = max(num_words)

    def move(self, slots: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> None:
        """Copy row ``slots[b * N + path[b, i]]`` to row ``slots[b * N + i]`` for all b and i < ``counts[b]``.

        ``slots`` [B * N] int64 as from :func:`node_slots`, ``path`` [B, W] int64 and ``counts`` [B] int64 as in
        ``Accepted``, W <= N. All rows of a request are read before any is written, so sources and targets may overlap
        in any order. The slots of different requests must be distinct, except for the sink's. Chains need no move.

        It is submitted to the current stream, on CUDA as one launch whose size depends only on B. There is no host
        synchronisation, and it may be captured.
        """
        assert path.shape[0] == counts.shape[0] and slots.shape[0] % path.shape[0] == 0
        assert path.shape[1] <= slots.shape[0] // path.shape[0], (path.shape, slots.shape)
        if slots.is_cuda:
            from fenceline.layers.kernels.triton.kv_rows import launch

            launch(slots, path, counts, self._addresses, self._num_words, self._most_words)
        else:
            KERNEL.launch(_move, slots, path, counts, *self._parts)


def _row_bytes(part: torch.Tensor) -> int:
    return part[0].numel() * part.element_size()


def _move(slots: torch.Tensor, path: torch.Tensor, counts: torch.Tensor, *parts: torch.Tensor) -> None:
    batch, width = path.shape
    by_request = slots.view(batch, -1)
    steps = torch.arange(width, device=path.device)
    nodes = torch.where(steps < counts[:, None], path, steps)
    source, target = by_request.gather(1, nodes).flatten(), by_request[:, :width].flatten()
    for part in parts:
        part.index_copy_(0, target, part.index_select(0, source))
