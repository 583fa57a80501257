"""Access to the memory of a rank of the compiled all-reduce (include/fenceline/all_reduce.h)."""

from __future__ import annotations

import torch
from fenceline_kernel.all_reduce import PeerAllReduce

NEAR_THE_END = (1 << 32) - 20  # launches after which the generation's last 32 bits will soon be 0 again
_BLOCKS, _FLAGS_BYTES = 128, 128 * 8 + 2 * 128 * 8 * 8
_OLD = 0x55555555


class _Memory:
    """``count`` integers of 64 bits at ``address``, for ``torch.as_tensor``."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "<i8", "data": (address, False), "version": 3}


def begin_at(own: PeerAllReduce, launches: int) -> None:
    """Make the rank as it would be after ``launches`` launches: it has counted them, and no word of its memory is as it
    was at first, since all have been rewritten since. To be called on all ranks before the next launch of any."""
    torch.cuda.synchronize(own.device)
    words = 2 * own.size * 2 * (own.one_shot_bytes // 16) * 2
    memory = torch.as_tensor(_Memory(own._own, _FLAGS_BYTES // 8 + words), device=own.device)
    assert memory.data_ptr() == own._own, "it is not a copy"
    memory[:_BLOCKS] = launches
    memory[_FLAGS_BYTES // 8 :] = _OLD << 32
    torch.cuda.synchronize(own.device)


def launches_of(own: PeerAllReduce) -> int:
    """How many launches the rank has counted, which all blocks must agree on. Waits for the device."""
    torch.cuda.synchronize(own.device)
    counted = torch.as_tensor(_Memory(own._own, _BLOCKS), device=own.device).unique().tolist()
    assert len(counted) == 1, f"blocks have counted differently: {counted}"
    return int(counted[0])
