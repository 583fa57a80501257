"""PageCopier: moves KV pages of all layers between the device's pool and the host's.

A copier only submits copies. The cache controller holds the pages, makes the stream wait for their last users, and
records the Points of the copies.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fenceline.config.hicache import IoBackend
from fenceline.config.kv_layout import KVRow
from fenceline.config.server_args import MemLayout
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Device, Stream, loaded_parts
from fenceline.memory_order.access import occupies_sm
from fenceline.memory_order.kernel import KernelAccesses, declare_kernel, is_watched

if TYPE_CHECKING:
    import fenceline_kernel

logger = logging.getLogger(__name__)

Pages = npt.NDArray[np.int32]
PageIds = npt.NDArray[np.int64]


class PageCopier(ABC):
    """Copies pages pairwise: ``device_pages[i]`` and ``host_pages[i]`` become equal, or of a replicated row (``KVRow``)
    the rank's share. Lists are int32 [n] and are read during the call; no page may be named twice as a destination.
    ``uses_sm``: copies run on SMs (edge sm_exclusive), not on a copy engine."""

    uses_sm: bool

    @abstractmethod
    def to_host(self, stream: Stream, device_pages: Pages, host_pages: Pages) -> None:
        """Submit copies of whole pages, all layers, to the host. Raises ``ValueError`` for pages out of bounds."""

    @abstractmethod
    def to_device(self, stream: Stream, host_pages: Pages, device_pages: Pages, layers: range) -> None:
        """Submit copies of ``layers`` (step 1) of the pages to the device. Raises ``ValueError`` as above."""


class Run(NamedTuple):
    """``num_pages`` pages that are consecutive on both sides."""

    device_page: int
    host_page: int
    num_pages: int


def runs_of(device_pages: Pages, host_pages: Pages) -> Iterator[Run]:
    """The pairs in their order, combined into as few runs as possible."""
    if len(device_pages) == 0:
        return
    breaks = np.flatnonzero((np.diff(device_pages) != 1) | (np.diff(host_pages) != 1)) + 1
    starts = [0, *breaks.tolist(), len(device_pages)]
    for start, stop in zip(starts, starts[1:], strict=False):
        yield Run(int(device_pages[start]), int(host_pages[start]), stop - start)


class RunCopier(PageCopier):
    """One ``stream.copy`` for each run of pages and each part. Works on any device and needs only torch. ``strided``:
    consecutive pages of a page_first host pool are one strided copy. torch's CUDA copies of strided host memory go
    through pageable memory, so there each page has to be a separate copy. ``rank``: whose share of replicated rows."""

    def __init__(
        self, device: Device, kv_pool: KVPool, host_pool: HostPool, uses_sm: bool, strided: bool, rank: int = 0
    ) -> None:
        self.uses_sm = uses_sm
        self._device = device
        self._kv_pool = kv_pool
        self._host_pool = host_pool
        # Of each part what the host keeps: uint8 [num_pages, nbytes of the host's part].
        self._parts = [part[:, rank % part.shape[1]] for part in kv_pool.shares(host_pool.layout)]
        self._whole_runs = strided or host_pool.mem_layout == "layer_first"

    def to_host(self, stream: Stream, device_pages: Pages, host_pages: Pages, layers: range | None = None) -> None:
        if self.uses_sm:
            # Loads do not declare it: they may run at the same time as persistent attention.
            self._device.declare(stream.name, "backup of KV pages by kernels", occupies_sm)
        layers = range(self._kv_pool.num_layers) if layers is None else layers
        self._submit(stream, device_pages, host_pages, layers, to_host=True)

    def to_device(self, stream: Stream, host_pages: Pages, device_pages: Pages, layers: range) -> None:
        self._submit(stream, device_pages, host_pages, layers, to_host=False)

    def _submit(self, stream: Stream, device_pages: Pages, host_pages: Pages, layers: range, to_host: bool) -> None:
        layout = self._kv_pool.layout
        every = layout.parts_of(layers)
        parts = every if to_host else loaded_parts(self._device, layout, every)
        for device_bytes, host_bytes in self._pieces(device_pages, host_pages, parts):
            if to_host:
                stream.copy(host_bytes, device_bytes)
            else:
                stream.copy(device_bytes, host_bytes)

    def _check(self, device_pages: Pages, host_pages: Pages) -> None:
        _check(device_pages, self._kv_pool.num_pages, "device")
        _check(host_pages, self._host_pool.num_pages, "host")
        if len(device_pages) != len(host_pages):
            raise ValueError(f"{len(device_pages)} device pages but {len(host_pages)} host pages: they go in pairs")

    def _pieces(
        self, device_pages: Pages, host_pages: Pages, parts: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(device, host) views uint8 [n, nbytes of a part] that make up the copy."""
        self._check(device_pages, host_pages)
        runs = [one for run in runs_of(device_pages, host_pages) for one in self._cut(run)]
        for part in parts:
            device_part, host_part = self._parts[part], self._host_pool.parts[part]
            for device_page, host_page, num_pages in runs:
                yield (device_part[device_page : device_page + num_pages], host_part[host_page : host_page + num_pages])

    def _cut(self, run: Run) -> list[Run]:
        if self._whole_runs:
            return [run]
        return [Run(run.device_page + i, run.host_page + i, 1) for i in range(run.num_pages)]


def _check(pages: Pages, num_pages: int, side: str) -> None:
    if len(pages) > 0 and not 0 <= int(pages.min()) <= int(pages.max()) < num_pages:
        raise ValueError(f"{side} pages {int(pages.min())}..{int(pages.max())} are not all in 0..{num_pages - 1}")


@declare_kernel
def copy_pages(
    op: KernelAccesses, to_host: bool, device_pages: PageIds, host_pages: PageIds, *parts: torch.Tensor
) -> None:
    """fenceline_kernel's ``PagePools.copy`` by SMs: one launch, which has the lists of pages as arguments. ``parts``:
    for each layer's keys, then its values, the pages [n, bytes] on the device and those on the host."""
    for device_part, host_part in zip(parts[::2], parts[1::2], strict=True):
        if to_host:
            op.read(device_part, device_pages)
            op.write(host_part, host_pages)
        else:
            op.read(host_part, host_pages)
            op.write(device_part, device_pages)


class WatchedPools:
    """In the place of ``fenceline_kernel.PagePools`` on a device that watches its memory (the virtual GPU): the same
    arguments, and one launch by SMs for each transfer."""

    def __init__(
        self,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        host: torch.Tensor,
        page_size: int,
        layout: MemLayout,
    ) -> None:
        """As ``PagePools`` takes them: ``k[i]``, ``v[i]`` [num_slots, 1, width]; ``host`` [num_layers, 2, num_slots, 1,
        width] with layout layer_first, [num_pages, num_layers, 2, page_size, 1, width] with page_first."""
        self.chunk_bytes = page_size * k[0][0].nbytes
        self._num_pages = len(k[0]) // page_size, host.nbytes // (2 * len(k) * self.chunk_bytes)
        self._num_layers = len(k)
        # For each layer's keys, then its values, the pages [n, bytes] on the device and those on the host.
        self._parts: list[torch.Tensor] = []
        for layer, pair in enumerate(zip(k, v, strict=True)):
            for half, side in enumerate(pair):
                part = host[layer, half] if layout == "layer_first" else host[:, layer, half]
                shape = (self._num_pages[1], page_size, 1, side.shape[2])
                assert part.numel() == np.prod(shape), f"host memory {tuple(host.shape)} is not for {layout}"
                self._parts += [side.view(self._num_pages[0], -1), part.view(shape).flatten(1)]

    def copy(
        self, device_pages: Pages, host_pages: Pages, *, to_host: bool, layers: range | None = None, num_ctas: int = 1
    ) -> None:
        """See ``PagePools``; the launch is on the current stream."""
        layers = range(self._num_layers) if layers is None else layers
        assert layers.step == 1 and 0 <= layers.start < layers.stop <= self._num_layers, f"layers is {layers}"
        assert num_ctas >= 1, "a launch has a block"
        _check(device_pages, self._num_pages[0], "device")
        _check(host_pages, self._num_pages[1], "host")
        if len(device_pages) == 0:
            return

        def compute(to_host: bool, device_pages: PageIds, host_pages: PageIds, *parts: torch.Tensor) -> None:
            for device_part, host_part in zip(parts[::2], parts[1::2], strict=True):
                if to_host:
                    host_part[host_pages] = device_part[device_pages]
                else:
                    device_part[device_pages] = host_part[host_pages]

        lists = device_pages.astype(np.int64), host_pages.astype(np.int64)
        copy_pages.launch(compute, to_host, *lists, *self._parts[4 * layers.start : 4 * layers.stop])


class CudaCopier(PageCopier):
    """Copies by fenceline_kernel, on the virtual GPU by ``WatchedPools``: one call for each transfer, an SM kernel's
    launch or a batch for the copy engine. The page lists travel with the call, so nothing is uploaded. The kernels take
    neighbouring layers of two rows that are equally large, such as keys and values, and whole on this rank. Where
    layers differ, each range of layers that are alike takes a call of its own, and layers of other rows (a latent) are
    copied by torch, one copy for each page or run of pages."""

    def __init__(
        self,
        device: Device,
        kv_pool: KVPool,
        host_pool: HostPool,
        io_backend: IoBackend,
        library: fenceline_kernel.KernelLibrary | None = None,
        rank: int = 0,
    ) -> None:
        """``library``: the kernels; None: those for the device. ``rank``: see ``RunCopier``. Raises ``ImportError`` or
        ``RuntimeError`` if there are none."""
        self.uses_sm = io_backend == "kernel"
        self._device = device
        self._pools: list[tuple[range, fenceline_kernel.PagePools | WatchedPools, int]] = []
        self._others: list[range] = []
        self._run_copier = RunCopier(device, kv_pool, host_pool, uses_sm=False, strided=False, rank=rank)
        for layers in kv_pool.layout.alike:
            rows = kv_pool.layout.layers[layers.start]
            if not _has_pairs(rows) or host_pool.layout.layers[layers.start] != rows:
                self._others.append(layers)
                continue
            pools = make_page_pools(kv_pool, host_pool, layers, io_backend, library)
            # A product of 4096³ takes 3.5 times as long beside backups by 4 CTAs, 5 times beside 8; 2 are enough for
            # the link unless the pieces are small.
            self._pools.append((layers, pools, 2 if pools.chunk_bytes >= _LARGE_CHUNK else 4))

    def to_host(self, stream: Stream, device_pages: Pages, host_pages: Pages) -> None:
        if self.uses_sm:
            self._device.declare(stream.name, "backup of KV pages by kernels", occupies_sm)
        with stream.active():
            for _, pools, num_ctas in self._pools:
                pools.copy(device_pages, host_pages, to_host=True, num_ctas=num_ctas)
        for layers in self._others:
            self._run_copier.to_host(stream, device_pages, host_pages, layers)

    def to_device(self, stream: Stream, host_pages: Pages, device_pages: Pages, layers: range) -> None:
        with stream.active():
            for own, pools, _ in self._pools:
                some = _within(layers, own, own.start)
                if some:
                    pools.copy(device_pages, host_pages, to_host=False, layers=some)
        for own in self._others:
            some = _within(layers, own)
            if some:
                self._run_copier.to_device(stream, host_pages, device_pages, some)


_LARGE_CHUNK = 16 << 10  # bytes of one page of one layer's keys


def _has_pairs(rows: Sequence[KVRow]) -> bool:
    """Whether the kernels take layers of these rows."""
    return len(rows) == 2 and rows[0].nbytes == rows[1].nbytes


def _within(layers: range, own: range, first: int = 0) -> range:
    """Those of ``layers`` that are in ``own``, counted from ``first``; may be empty."""
    return range(max(layers.start, own.start) - first, min(layers.stop, own.stop) - first)


def make_page_pools(
    kv_pool: KVPool,
    host_pool: HostPool,
    layers: range,
    io_backend: IoBackend,
    library: fenceline_kernel.KernelLibrary | None = None,
) -> fenceline_kernel.PagePools | WatchedPools:
    """Both ends of copies of ``layers``, which are alike, as fenceline_kernel takes them: as bytes, with one head that
    is as wide as a row. Raises ``ImportError`` or ``RuntimeError`` if there are no kernels."""
    parts = kv_pool.layout.parts_of(layers)
    first, num_slots = host_pool.layout.parts[parts.start], kv_pool.num_pages * kv_pool.page_size
    width = first.row.nbytes
    sides = [kv_pool.parts[part].view(num_slots, 1, width) for part in parts]
    length = len(parts) * first.nbytes
    if host_pool.mem_layout == "page_first":
        host = host_pool.buffer.view(host_pool.num_pages, -1)[:, first.offset : first.offset + length]
        host = host.view(host_pool.num_pages, len(layers), 2, kv_pool.page_size, 1, width)
    else:
        start = first.offset * host_pool.num_pages
        host = host_pool.buffer[start : start + length * host_pool.num_pages]
        host = host.view(len(layers), 2, host_pool.num_pages * kv_pool.page_size, 1, width)
    if is_watched(kv_pool.parts[0].device):
        return WatchedPools(sides[::2], sides[1::2], host, kv_pool.page_size, host_pool.mem_layout)
    import fenceline_kernel

    return fenceline_kernel.PagePools(
        sides[::2], sides[1::2], host, kv_pool.page_size, host_pool.mem_layout, io_backend, library
    )


def make_page_copier(
    device: Device, kv_pool: KVPool, host_pool: HostPool, io_backend: IoBackend, rank: int = 0
) -> PageCopier:
    """The copier of ``--hicache-io-backend``: ``kernel`` copies by SMs, ``direct`` by the copy engine. ``rank``: whose
    share of replicated rows ``host_pool`` keeps. On a GPU both need fenceline_kernel; without it ``direct`` falls back
    to torch's copies, one for each run of pages and part, and ``kernel`` raises ``ValueError`` with the remedy. On the
    CPU both copy in the same way. On a device that watches its memory ``kernel`` is one launch for each transfer, and a
    backup occupies the resource ``sm``."""
    uses_sm = io_backend == "kernel"
    if uses_sm and is_watched(device.torch_device):
        return CudaCopier(device, kv_pool, host_pool, io_backend, rank=rank)
    if device.kind != "cuda":
        return RunCopier(device, kv_pool, host_pool, uses_sm, strided=True, rank=rank)
    try:
        return CudaCopier(device, kv_pool, host_pool, io_backend, rank=rank)
    except (ImportError, RuntimeError) as error:  # KernelUnavailable is a RuntimeError
        if uses_sm:
            raise ValueError(
                f"--hicache-io-backend kernel needs fenceline_kernel ({error}): "
                "install it (pip install --no-deps -e sgl-kernel/), or use --hicache-io-backend direct"
            ) from error
        logger.warning("Transfers of pages are slower without fenceline_kernel: %s", error)
        return RunCopier(device, kv_pool, host_pool, uses_sm, strided=False, rank=rank)
