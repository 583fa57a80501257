"""Pinned host memory of many gigabytes, within seconds.

torch's pinned allocator rounds up to a power of two and lets the driver fault in and clear page by page on one thread:
tens of seconds for 60 GB. Here the memory is an anonymous mapping that asks for huge pages, which many threads touch
first (the system clears a page when it is touched), so that registering it finds everything in place. It is not handed
to child processes: a fork would have to copy every pinned page. On a machine of several NUMA nodes the pages lie where
the threads ran: bind the process (numactl) to the GPU's node for the link's full rate.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

# Below it torch's allocator is as good, and gives memory back for reuse.
MIN_MAPPED_BYTES = 256 << 20
_TOUCH_BYTES = 256 << 20  # by one thread at a time
_MAX_THREADS = 32


class _Pinned(mmap.mmap):
    """A private mapping that is unregistered before it goes, with the last tensor that holds it."""

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister()


def pinned_buffer(
    nbytes: int, register: Callable[[int, int], None], unregister: Callable[[int], object]
) -> torch.Tensor:
    """Zeroed host memory [nbytes] uint8 that ``register(address, nbytes)`` has pinned.

    ``unregister(address)`` is called when nothing holds it any more. Raises ``OSError`` where there is no such memory,
    or what ``register`` raises."""
    mapping = _Pinned(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # Linux has both, but a kernel may refuse
        try:
            mapping.madvise(getattr(mmap, advice))
        except (AttributeError, OSError):
            continue
    _touch(np.frombuffer(mapping, dtype=np.uint8))
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    address = buffer.data_ptr()
    register(address, nbytes)
    mapping.unregister = lambda: unregister(address)
    return buffer


def pin_for_cuda(nbytes: int) -> torch.Tensor:
    """``pinned_buffer`` registered with CUDA, for all devices. Raises ``RuntimeError`` where CUDA refuses."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, size: int) -> None:
        error = runtime.cudaHostRegister(address, size, 1)  # cudaHostRegisterPortable
        if int(error) != 0:
            raise RuntimeError(f"cudaHostRegister failed with error {int(error)}")

    return pinned_buffer(nbytes, register, runtime.cudaHostUnregister)


def _touch(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Have the system back every page of ``memory``, on as many threads as it takes; numpy lets go of the GIL."""

    def touch(start: int) -> None:
        memory[start : start + _TOUCH_BYTES : mmap.PAGESIZE] = 0

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(cores, _MAX_THREADS)) as threads:
        for _ in threads.map(touch, range(0, len(memory), _TOUCH_BYTES)):
            pass
