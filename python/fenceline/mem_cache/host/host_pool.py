"""HostPool: the host tier of the KV cache, one pinned buffer of pages, each a page of all layers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import psutil
import torch

from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Device, LeasePool

HostLayout = Literal["layer_first", "page_first"]

# Of the memory that is available: the server's own processes, the file cache and everybody else live there too.
_KEPT_FREE = 0.05
_REMEDY = "lower --hicache-size (GB) or --hicache-ratio"


class HostPool:
    """Keys and values of ``num_pages`` pages in pinned host memory, in one of two layouts.

    ``layer_first``: ``view`` is [num_layers, 2, num_pages * page_size, num_kv_heads, head_dim], so pages in
    a row are one piece for each layer and side (keys, values): large copies where pages lie in order.
    ``page_first``: ``view`` is [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim], so a page is one piece:
    what storage wants. A *part* is one page of one layer's keys or values, contiguous in both.

    ``pages`` leases page ids, none reserved. The bytes are not initialised. Whoever copies or lets storage threads
    work on a page holds its lease; the host says so with :meth:`host_access` before it touches bytes past torch.

    How the memory is pinned is the device's business (``Device.host_buffer``): there it takes seconds for 60 GB.
    """

    def __init__(self, device: Device, num_pages: int, kv_pool: KVPool, layout: HostLayout) -> None:
        """Raises ``ValueError`` with the remedy where that much memory is not there or cannot be pinned."""
        if layout not in ("layer_first", "page_first"):
            raise ValueError(f"--hicache-mem-layout {layout}: use layer_first or page_first")
        if num_pages < 1:
            raise ValueError(
                "the host tier has room for no page: raise --hicache-size (GB) or --hicache-ratio"
            )
        first = kv_pool.k(0)
        self.device = device
        self.layout: HostLayout = layout
        self.num_pages = num_pages
        self.page_size = kv_pool.page_size
        self.num_layers = kv_pool.num_layers
        self.part_nbytes = self.page_size * first[0].nbytes
        self.page_nbytes = 2 * self.num_layers * self.part_nbytes
        self.buffer = _allocate(device, num_pages * self.page_nbytes)
        device.name_memory(self.buffer, "host_pool", self.part_nbytes)
        heads = tuple(first.shape[1:])
        shape = (self.num_layers, 2, num_pages * self.page_size, *heads)
        if layout == "page_first":
            shape = (num_pages, self.num_layers, 2, self.page_size, *heads)
        self.view = self.buffer.view(first.dtype).view(shape)
        self.pages = LeasePool("host KV pages", num_pages, reserved=0)
        self._bytes: npt.NDArray[np.uint8] = self.buffer.numpy()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.nbytes

    def part(self, page: int, layer: int, kv: int) -> torch.Tensor:
        """One page of one layer's keys (``kv`` 0) or values (1): [page_size, num_kv_heads, head_dim], contiguous."""
        if self.layout == "page_first":
            return self.view[page, layer, kv]
        return self.view[layer, kv, page * self.page_size : (page + 1) * self.page_size]

    def page(self, page: int) -> torch.Tensor:
        """A page of all layers, [num_layers, 2, page_size, num_kv_heads, head_dim]; strided where ``layer_first``."""
        if self.layout == "page_first":
            return self.view[page]
        return self.view[:, :, page * self.page_size : (page + 1) * self.page_size]

    def parts(self, page: int) -> list[npt.NDArray[np.uint8]]:
        """The bytes of a page as storage takes them: one piece where ``page_first``, two for each layer elsewhere.

        Their concatenation is the same in both layouts: layer by layer, keys before values."""
        assert 0 <= page < self.num_pages, f"there is no host page {page}"
        if self.layout == "page_first":
            return [self._bytes[page * self.page_nbytes : (page + 1) * self.page_nbytes]]
        starts = ((side * self.num_pages + page) * self.part_nbytes for side in range(2 * self.num_layers))
        return [self._bytes[start : start + self.part_nbytes] for start in starts]

    def host_access(self, page: int, write: bool, what: str) -> None:
        """The calling thread reads or writes the bytes of ``page`` now. For devices that watch their memory."""
        self.device.host_access(self.page(page), write, what)


def available_host_bytes() -> int:
    """Bytes of host memory that this process can still take: the machine's, or less where its control group says so."""
    available = int(psutil.virtual_memory().available)
    for limit, usage, stat in _CGROUP_FILES:
        try:
            most, used = int(Path(limit).read_text()), int(Path(usage).read_text())
            lines = Path(stat).read_text().splitlines()
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
        reclaimable = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        available = min(available, most - used + reclaimable)
    return max(available, 0)


# (limit, usage, statistics) of the control group that a container sees as its own: version 2, version 1.
_CGROUP_FILES = (
    tuple(f"/sys/fs/cgroup/memory.{name}" for name in ("max", "current", "stat")),
    tuple(f"/sys/fs/cgroup/memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")),
)


def _allocate(device: Device, nbytes: int) -> torch.Tensor:
    room = int(available_host_bytes() * (1 - _KEPT_FREE))
    if nbytes > room:
        raise ValueError(
            f"the host tier wants {nbytes / 1e9:.1f} GB, but only {room / 1e9:.1f} GB of host memory can be taken: "
            f"{_REMEDY}"
        )
    try:
        return device.host_buffer(nbytes)
    except (RuntimeError, MemoryError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{nbytes / 1e9:.1f} GB of host memory could not be allocated and pinned ({reason}): {_REMEDY}"
        ) from error
