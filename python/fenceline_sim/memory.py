"""Device memory with a caching allocator, and the host memory that asynchronous copies can use.

A Region is memory. An Allocation is one use of it by tensors, which ends when Python frees the last of them, as in
torch. As with torch's allocator without ``record_stream``, freed memory goes back to the pool of the stream it was
allocated on and can be allocated there at once, whatever other streams still do with it. New memory is poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fenceline.memory_order.edges import Hazard
from fenceline_sim.layout import Layout, contiguous_form, layout_at
from fenceline_sim.place import Place, here

if TYPE_CHECKING:
    from fenceline_sim.shadow import Shadow

# In every type of two bytes or more: NaN, or a number far outside any index range.
_POISON = 0x7FF8
_MIN_BYTES = 512
ALIGN = 64  # as torch's CPU allocator, so that kernels take the same path as on plain CPU tensors


class Region:
    """A piece of memory, on the device or pinned on the host. ``shadow`` is the detector's."""

    __slots__ = ("_halves", "_views", "bytes", "capacity", "number", "shadow", "storage", "tenant", "whole")

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.bytes = torch.empty(capacity, dtype=torch.uint8)
        self.storage = self.bytes.untyped_storage()
        # A view of numpy, whose fill is faster than torch's.
        self._halves = self.bytes.numpy()[: capacity // 2 * 2].view(np.int16)
        self._views: dict[Layout, torch.Tensor] = {}
        self.whole = layout_at(contiguous_form((capacity,), torch.uint8), 0)
        self.shadow: Shadow | None = None
        self.tenant: Tag | None = None  # the latest
        self.poison()

    def poison(self) -> None:
        """Overwrite everything with values that are wrong in every type."""
        self._halves.fill(_POISON)

    def view(self, layout: Layout) -> torch.Tensor:
        tensor = self._views.get(layout)
        if tensor is None:
            with torch.inference_mode(False):
                form = layout.form
                tensor = torch.empty(0, dtype=form.dtype)
                tensor.set_(self.storage, layout.offset, form.shape, form.stride)  # type: ignore[call-overload]
            self._views[layout] = tensor
        return tensor


class Tag:
    """One use of a region by an allocation: its name in reports, and the rows that its memory is divided into."""

    __slots__ = (
        "captured", "device", "ended", "guards", "is_exclusive", "is_host", "name", "place", "pool",
        "region", "row_bytes", "shape",
    )  # fmt: skip

    def __init__(self, region: Region, place: Place, shape: tuple[int, ...], is_host: bool = False) -> None:
        self.region = region
        self.place = place
        self.shape = shape
        self.name = ""
        self.row_bytes = 0
        self.is_host = is_host
        self.pool = ""
        self.ended = False
        self.captured = False  # allocated during a capture
        self.device = 0  # whose memory it is, of several
        # By hazard, the guards without which accesses to it are not ordered; for memory that no edge protects.
        self.guards: Mapping[Hazard, tuple[str, ...]] = {}
        self.is_exclusive = False  # a resource that allows one user at a time, not memory

    def __str__(self) -> str:
        if self.name:
            return self.name
        kind = "pinned memory" if self.is_host else "tensor"
        return f"{kind} {list(self.shape)} allocated at {self.place}"


# Rows [N] that follow from memory, read when the operation is about to run.
RowsOf = Callable[[], npt.NDArray[np.int64]]


class Access(NamedTuple):
    """Memory that an operation accesses: the bytes of ``layout``, or of its rows with the ids ``rows`` when it runs."""

    tag: Tag
    layout: Layout
    rows: torch.Tensor | RowsOf | None = None


def row_values(rows: torch.Tensor | RowsOf) -> npt.NDArray[np.int64]:
    """The numbers of an access's rows at this moment, [N], a copy."""
    if not isinstance(rows, torch.Tensor):
        return rows()
    values: npt.NDArray[np.int64] = rows.numpy().astype(np.int64).reshape(-1)  # in a fraction of torch's time
    return values


def rows_of(access: Access) -> npt.NDArray[np.int64] | None:
    return None if access.rows is None else row_values(access.rows)


class Bound(NamedTuple):
    """``values`` index ``axis`` of ``tag``'s memory, which has ``size`` there. ``source``: the memory they lie in."""

    tag: Tag
    axis: int
    size: int
    values: torch.Tensor
    source: Access | None


Accesses = Sequence[Access]
Bounds = Sequence[Bound]
NO_ACCESS: Accesses = ()
NO_BOUNDS: Bounds = ()


class Pool:
    """Free device memory by pool (a stream, or a graph) and size. What was freed last is allocated first."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self._free: dict[tuple[str, int], list[Region]] = {}
        self._num_regions = 0

    def take(self, pool: str, nbytes: int) -> Region:
        """Memory for at least ``nbytes``, of that pool. Raises ``torch.OutOfMemoryError``."""
        capacity = max(_MIN_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)
        free = self._free.get((pool, capacity))
        if free:
            return free.pop()
        if self.used_bytes + capacity > self.total_bytes:
            raise torch.OutOfMemoryError(
                f"vgpu is out of memory: {capacity} bytes wanted, {self.total_bytes - self.used_bytes} of "
                f"{self.total_bytes} left; give VirtualGpu more total_bytes"
            )
        self.used_bytes += capacity
        self._num_regions += 1
        return Region(self._num_regions, capacity)

    def put(self, pool: str, region: Region) -> None:
        self._free.setdefault((pool, region.capacity), []).append(region)


class PinnedMemory:
    """Host memory allocated by :meth:`buffer`, which is found again by the address of its storage."""

    def __init__(self) -> None:
        self._tags: dict[int, Tag] = {}

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Poisoned host memory [nbytes] uint8, which asynchronous copies can use."""
        region = Region(-1 - len(self._tags), max(ALIGN, nbytes + (-nbytes) % ALIGN))
        self._tags[region.storage.data_ptr()] = Tag(region, here(), (nbytes,), is_host=True)
        return region.view(layout_at(contiguous_form((nbytes,), torch.uint8), 0))

    def find(self, tensor: torch.Tensor) -> Tag | None:
        """The memory that ``tensor`` is in; None if it is pageable."""
        return self._tags.get(tensor.untyped_storage().data_ptr())


def whole(tag: Tag) -> Access:
    return Access(tag, tag.region.whole)
