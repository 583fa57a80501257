"""HostPool: the host tier of the KV cache, one pinned buffer of pages, each a page of all layers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import torch

from fenceline.config.kv_layout import KVLayout, Part
from fenceline.config.server_args import MemLayout
from fenceline.memory_order import Device, LeasePool

# Share of the available memory that is left free for the server's other processes, the file cache and other programs.
_KEPT_FREE = 0.05
_REMEDY = "lower --hicache-size (GB) or --hicache-ratio"


class HostPool:
    """``num_pages`` pages of one :class:`KVLayout` in pinned host memory, as bytes.

    ``mem_layout`` says how the parts of all pages lie:

    * ``layer_first``: the same part of all pages together. Consecutive pages are then one piece for each part, so
      copies of them are large.
    * ``page_first``: all parts of a page together. A page is then one piece, which is best for storage.

    ``pages`` leases page ids, of which none is reserved. The bytes are not initialised. Whoever copies a page, or lets
    storage threads work on it, must hold its lease. A thread of the host calls :meth:`host_access` before it accesses
    bytes without torch.

    The memory is pinned by ``Device.host_buffer``, which takes seconds for 60 GB.
    """

    def __init__(
        self, device: Device, num_pages: int, layout: KVLayout, mem_layout: MemLayout, room: int | None = None
    ) -> None:
        """``room``: bytes of host memory available for it; None: all that this process can still take. Raises
        ``ValueError`` with the remedy if there is not enough memory or it cannot be pinned."""
        if mem_layout not in ("layer_first", "page_first"):
            raise ValueError(f"--hicache-mem-layout {mem_layout}: use layer_first or page_first")
        if num_pages < 1:
            raise ValueError("the host tier has room for no page: raise --hicache-size (GB) or --hicache-ratio")
        self.device = device
        self.layout = layout
        self.mem_layout: MemLayout = mem_layout
        self.num_pages = num_pages
        self.page_nbytes = layout.page_nbytes
        self.buffer = allocate_host(device, num_pages * self.page_nbytes, room)
        # Each part of the layout, all pages: uint8 [num_pages, nbytes of the part], one page's contiguous.
        self.parts = [self._part(part) for part in layout.parts]
        self._areas = self._make_areas()
        # A row, by which accesses are watched and reported, has bytes of one page only: one part if all are equally
        # large, else what divides all parts, or a whole page where its parts lie together.
        sizes = {part.nbytes for part in layout.parts}
        whole = mem_layout == "page_first" and len(sizes) > 1
        device.name_memory(self.buffer, "host_pool", self.page_nbytes if whole else math.gcd(*sizes))
        self.pages = LeasePool("host KV pages", num_pages, reserved=0)
        self._bytes: npt.NDArray[np.uint8] = self.buffer.numpy()

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def page(self, page: int) -> list[npt.NDArray[np.uint8]]:
        """The bytes of a page as storage takes them: with ``page_first`` one piece, else one piece for each part. Their
        concatenation is the same for both: the parts in the layout's order."""
        assert 0 <= page < self.num_pages, f"there is no host page {page}"
        if self.mem_layout == "page_first":
            return [self._bytes[page * self.page_nbytes : (page + 1) * self.page_nbytes]]
        starts = ((part.offset * self.num_pages + page * part.nbytes, part.nbytes) for part in self.layout.parts)
        return [self._bytes[start : start + nbytes] for start, nbytes in starts]

    def host_access(self, page: int, write: bool, what: str) -> None:
        """Declare that the calling thread reads or writes the bytes of ``page`` now. Costs nothing on a device that
        does not watch the host."""
        for area in self._areas if self.device.watches_host else ():
            self.device.host_access(area[:, page], write, what)

    def _part(self, part: Part) -> torch.Tensor:
        if self.mem_layout == "page_first":
            return self.buffer.view(self.num_pages, -1)[:, part.offset : part.offset + part.nbytes]
        start = part.offset * self.num_pages
        return self.buffer[start : start + part.nbytes * self.num_pages].view(self.num_pages, part.nbytes)

    def _make_areas(self) -> list[torch.Tensor]:
        """Views [n, num_pages, nbytes]; a page is ``area[:, page]`` of all of them. There is one view if all parts are
        equally large."""
        if self.mem_layout == "page_first":
            return [self.buffer.view(1, self.num_pages, self.page_nbytes)]
        areas = []
        for nbytes, group in itertools.groupby(self.layout.parts, key=lambda part: part.nbytes):
            parts = list(group)
            start = parts[0].offset * self.num_pages
            area = self.buffer[start : start + len(parts) * nbytes * self.num_pages]
            areas.append(area.view(len(parts), self.num_pages, nbytes))
        return areas


def available_host_bytes() -> int:
    """Bytes of host memory that this process can still take: what the machine has, or its control group allows."""
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


def allocate_host(device: Device, nbytes: int, room: int | None) -> torch.Tensor:
    """Pinned memory [nbytes] uint8; see ``HostPool``."""
    most = int((available_host_bytes() if room is None else room) * (1 - _KEPT_FREE))
    if nbytes > most:
        raise ValueError(
            f"the host tier needs {nbytes / 1e9:.1f} GB, but only {most / 1e9:.1f} GB of host memory are available: "
            f"{_REMEDY}"
        )
    try:
        return device.host_buffer(nbytes)
    except (RuntimeError, MemoryError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{nbytes / 1e9:.1f} GB of host memory could not be allocated and pinned ({reason}): {_REMEDY}"
        ) from error
