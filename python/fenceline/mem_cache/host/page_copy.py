"""PageCopier: moves KV pages of all layers between the device's pool and the host's.

A copier only submits. Which Points the stream has waited for, who holds the pages, and the Points of the copies are the
cache controller's.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Device, Stream

if TYPE_CHECKING:
    import fenceline_kernel

logger = logging.getLogger(__name__)

Pages = npt.NDArray[np.int32]
IoBackend = Literal["kernel", "direct"]


class PageCopier(ABC):
    """Copies pages pairwise: ``device_pages[i]`` and ``host_pages[i]`` become equal.

    Lists are int32 [n], read during the call; no page is named twice as a destination. ``uses_sm``: copies are work of
    SMs (edge sm_exclusive), not of a copy engine.
    """

    uses_sm: bool

    @abstractmethod
    def to_host(self, stream: Stream, device_pages: Pages, host_pages: Pages) -> None:
        """Submit copies of whole pages, all layers, to the host. Raises ``ValueError`` for pages out of bounds."""

    @abstractmethod
    def to_device(self, stream: Stream, host_pages: Pages, device_pages: Pages, layers: range) -> None:
        """Submit copies of ``layers`` (step 1) of the pages to the device. Raises ``ValueError`` as above."""


class Run(NamedTuple):
    """``num_pages`` pages that follow each other on both sides."""

    device_page: int
    host_page: int
    num_pages: int


def runs_of(device_pages: Pages, host_pages: Pages) -> Iterator[Run]:
    """The pairs, in order, as few runs."""
    if len(device_pages) == 0:
        return
    breaks = np.flatnonzero((np.diff(device_pages) != 1) | (np.diff(host_pages) != 1)) + 1
    starts = [0, *breaks.tolist(), len(device_pages)]
    for start, stop in zip(starts, starts[1:], strict=False):
        yield Run(int(device_pages[start]), int(host_pages[start]), stop - start)


class RunCopier(PageCopier):
    """One ``stream.copy`` for each run of pages, layer and side: on any device, with nothing but torch.

    ``strided``: pages in a row of a page_first host pool are one strided copy. torch's CUDA copies of strided host
    memory go through pageable memory, so there each page is a copy of its own.
    """

    def __init__(
        self, device: Device, kv_pool: KVPool, host_pool: HostPool, uses_sm: bool, strided: bool
    ) -> None:
        self.uses_sm = uses_sm
        self._device = device
        self._kv_pool = kv_pool
        self._host_pool = host_pool
        self._strided = strided or host_pool.layout == "layer_first"

    def to_host(self, stream: Stream, device_pages: Pages, host_pages: Pages) -> None:
        layers = range(self._kv_pool.num_layers)
        if self.uses_sm and len(device_pages) > 0:
            with stream.active():
                self._device.occupy_sm()  # loads do not: they run beside persistent attention
        for device_part, host_part in self._pieces(stream, device_pages, host_pages, layers):
            stream.copy(host_part, device_part)

    def to_device(self, stream: Stream, host_pages: Pages, device_pages: Pages, layers: range) -> None:
        for device_part, host_part in self._pieces(stream, device_pages, host_pages, layers):
            stream.copy(device_part, host_part)

    def _pieces(
        self, stream: Stream, device_pages: Pages, host_pages: Pages, layers: range
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(device, host) views of the same shape that make up the copy."""
        _check(device_pages, self._kv_pool.num_pages, "device")
        _check(host_pages, self._host_pool.num_pages, "host")
        if len(device_pages) != len(host_pages):
            raise ValueError(
                f"{len(device_pages)} device pages but {len(host_pages)} host pages: they go in pairs"
            )
        runs = [one for run in runs_of(device_pages, host_pages) for one in self._cut(run)]
        for layer in layers:
            for kv, tensor in enumerate((self._kv_pool.k(layer), self._kv_pool.v(layer))):
                for run in runs:
                    yield self._device_view(tensor, run), self._host_view(layer, kv, run)

    def _cut(self, run: Run) -> list[Run]:
        if self._strided:
            return [run]
        return [Run(run.device_page + i, run.host_page + i, 1) for i in range(run.num_pages)]

    def _device_view(self, tensor: torch.Tensor, run: Run) -> torch.Tensor:
        size = self._kv_pool.page_size
        slots = tensor[run.device_page * size : (run.device_page + run.num_pages) * size]
        if self._host_pool.layout == "layer_first":
            return slots
        return slots.view(run.num_pages, size, *tensor.shape[1:])

    def _host_view(self, layer: int, kv: int, run: Run) -> torch.Tensor:
        pool = self._host_pool
        if pool.layout == "page_first":
            return pool.view[run.host_page : run.host_page + run.num_pages, layer, kv]
        return pool.view[
            layer, kv, run.host_page * pool.page_size : (run.host_page + run.num_pages) * pool.page_size
        ]


def _check(pages: Pages, num_pages: int, side: str) -> None:
    if len(pages) > 0 and not 0 <= int(pages.min()) <= int(pages.max()) < num_pages:
        raise ValueError(
            f"{side} pages {int(pages.min())}..{int(pages.max())} are not all in 0..{num_pages - 1}"
        )


class CudaCopier(PageCopier):
    """One call into fenceline_kernel for each transfer: an SM kernel's launch, or a batch for the copy engine. The page
    lists travel with the call, so nothing is uploaded."""

    def __init__(self, device: Device, pools: fenceline_kernel.PagePools, uses_sm: bool) -> None:
        self.uses_sm = uses_sm
        self._device = device
        self._pools = pools
        # A product of 4096³ takes 3.5 times as long beside backups by 4 CTAs, 5 times beside 8; 2 are enough for the
        # link unless the pieces are small.
        self._store_ctas = 2 if pools.chunk_bytes >= _LARGE_CHUNK else 4

    def to_host(self, stream: Stream, device_pages: Pages, host_pages: Pages) -> None:
        with stream.active():
            if self.uses_sm and len(device_pages) > 0:
                self._device.occupy_sm()  # loads do not: see RunCopier
            self._pools.copy(device_pages, host_pages, to_host=True, num_ctas=self._store_ctas)

    def to_device(self, stream: Stream, host_pages: Pages, device_pages: Pages, layers: range) -> None:
        with stream.active():
            self._pools.copy(device_pages, host_pages, to_host=False, layers=layers)


_LARGE_CHUNK = 16 << 10  # bytes of one page of one layer's keys


def make_page_copier(
    device: Device, kv_pool: KVPool, host_pool: HostPool, io_backend: IoBackend
) -> PageCopier:
    """The copier of ``--hicache-io-backend``: ``kernel`` copies by SMs, ``direct`` by the copy engine.

    On a GPU both need fenceline_kernel; without it ``direct`` falls back to torch's copies, one for each run of pages,
    layer and side, and ``kernel`` raises ``ValueError`` with the remedy. Elsewhere both copy alike, and ``kernel``
    occupies the resource ``sm`` where one is watched.
    """
    uses_sm = io_backend == "kernel"
    if device.kind != "cuda":
        return RunCopier(device, kv_pool, host_pool, uses_sm, strided=True)
    layers = range(kv_pool.num_layers)
    k, v = [kv_pool.k(layer) for layer in layers], [kv_pool.v(layer) for layer in layers]
    try:
        import fenceline_kernel

        pools = fenceline_kernel.PagePools(
            k, v, host_pool.view, host_pool.page_size, host_pool.layout, io_backend
        )
    except (ImportError, RuntimeError) as error:  # KernelUnavailable is a RuntimeError
        if uses_sm:
            raise ValueError(
                f"--hicache-io-backend kernel needs fenceline_kernel ({error}): "
                "install it (pip install --no-deps -e sgl-kernel/), or use --hicache-io-backend direct"
            ) from error
        logger.warning("Transfers of pages are slower without fenceline_kernel: %s", error)
        return RunCopier(device, kv_pool, host_pool, uses_sm, strided=False)
    return CudaCopier(device, pools, uses_sm)
