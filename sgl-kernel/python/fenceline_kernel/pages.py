"""Page copies between the device's KV pool and pinned host memory (include/fenceline/page_copy.h).

``kernel``: SMs read and write host memory through unified addressing: all layers of any set of pages in one launch;
``num_ctas`` bounds the SMs that a copy uses. ``direct``: the copy engine; pages that are consecutive on both sides are
copied together, and all others are submitted as one batch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from fenceline_kernel.library import KernelLibrary, load

HostLayout = Literal["layer_first", "page_first"]
IoBackend = Literal["kernel", "direct"]
Pages = npt.NDArray[np.int32]
# This many reach over 92 % of the link's rate; more would take SMs from kernels that run at the same time.
DEFAULT_NUM_CTAS = 4
MAX_NUM_CTAS = 1024
# From this many consecutive pages on, one strided copy takes less time than as many plain ones of a batch.
DEFAULT_MIN_ROWS = 16
# io backend -> (unit, function)
_FUNCTIONS = {"kernel": ("page_copy", "fenceline_copy_pages"), "direct": ("page_direct", "fenceline_copy_pages_direct")}


class PageCopyRequestC(ctypes.Structure):
    """fenceline::PageCopyRequest."""

    _fields_ = (
        ("buffers", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        ("device_pages", ctypes.c_void_p),
        ("host_pages", ctypes.c_void_p),
        ("host_page_stride", ctypes.c_int64),
        ("host_layer_stride", ctypes.c_int64),
        ("host_kv_stride", ctypes.c_int64),
        ("chunk_bytes", ctypes.c_int64),
        ("num_device_pages", ctypes.c_int64),
        ("num_host_pages", ctypes.c_int64),
        ("num_pages", ctypes.c_int64),
        ("bad_pair", ctypes.c_int64),
        ("num_layers", ctypes.c_int32),
        ("num_ctas", ctypes.c_int32),
        ("to_host", ctypes.c_int32),
        ("min_rows", ctypes.c_int32),
    )


class PagePools:
    """The two ends of page copies, checked once: per-layer device tensors and one pinned host tensor.

    ``k[i]``, ``v[i]``: [num_slots, num_kv_heads, head_dim] on one GPU, contiguous; slot = page * page_size + offset.
    ``host``: pinned, same dtype, either ``layer_first`` [num_layers, 2, num_host_slots, num_kv_heads, head_dim] or
    ``page_first`` [num_host_pages, num_layers, 2, page_size, num_kv_heads, head_dim]; a page of one layer's keys or
    values is contiguous, all other strides are free (target and draft may share a page_first buffer).
    It keeps the tensors alive but owns no page: callers of ``copy`` must hold the leases of the pages that they pass.
    """

    def __init__(
        self,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        host: torch.Tensor,
        page_size: int,
        layout: HostLayout,
        io_backend: IoBackend = "kernel",
        library: KernelLibrary | None = None,
    ) -> None:
        """Raises ValueError naming the remedy; KernelUnavailable if there are no kernels."""
        if len(k) == 0 or len(k) != len(v):
            raise ValueError(f"k and v need one tensor for each layer, got {len(k)} and {len(v)}")
        self.device, self.page_size, self.num_layers = k[0].device, page_size, len(k)
        self.library = library if library is not None else load(self.device)
        _check_pool([*k, *v], page_size, self.library.device_type)
        self.host_page_stride, self.host_layer_stride, self.host_kv_stride = _host_strides(k, host, page_size, layout)
        _check_host(host, k[0], self.library.device_type)
        self.num_device_pages = len(k[0]) // page_size
        self.num_host_pages = host.shape[2] // page_size if layout == "layer_first" else len(host)
        self.chunk_bytes = page_size * k[0][0].nbytes
        self.host = host
        self._tensors = [tensor for pair in zip(k, v, strict=True) for tensor in pair]
        self._pointers = (ctypes.c_void_p * len(self._tensors))(*(t.data_ptr() for t in self._tensors))
        self._first_buffer = ctypes.addressof(self._pointers)
        self._function = self.library.function(*_FUNCTIONS[io_backend])
        self._function.argtypes = (ctypes.POINTER(PageCopyRequestC), ctypes.c_void_p)

    def copy(
        self,
        device_pages: Pages,
        host_pages: Pages,
        *,
        to_host: bool,
        layers: range | None = None,
        num_ctas: int = DEFAULT_NUM_CTAS,
        min_rows: int = DEFAULT_MIN_ROWS,
        stream: int | None = None,
    ) -> None:
        """Device page ``device_pages[i]`` and host page ``host_pages[i]`` become equal, for ``layers`` (None: all).

        Both lists: int32 [n], contiguous, read before this returns. ``to_host``: which side is written. Enqueued on
        ``stream`` (a cudaStream_t; None: torch's current one): the host may read what was written, and write what was
        read, once that stream has passed it. ``num_ctas``: the most SMs that a ``kernel`` copy uses. ``min_rows``: a
        ``direct`` copy makes one strided copy of at least this many consecutive pieces: pages, or the layers of a page
        if they are evenly spaced on the device. Raises ValueError before anything is copied, naming the remedy or
        the pages out of bounds; RuntimeError if CUDA refuses.
        """
        layers = range(self.num_layers) if layers is None else layers
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= self.num_layers:
            raise ValueError(f"layers is {layers}: give a range within the pool's {self.num_layers} layers")
        if not 1 <= num_ctas <= MAX_NUM_CTAS:
            raise ValueError(f"num_ctas is {num_ctas}: give 1 to {MAX_NUM_CTAS}")
        if min_rows < 1:
            raise ValueError(f"min_rows is {min_rows}: give 1 or more")
        _check_lists(device_pages, host_pages)
        if len(device_pages) == 0:
            return
        request = self._request(device_pages, host_pages, to_host, layers, num_ctas, min_rows)
        try:
            self.library.call(
                "page copy", functools.partial(self._function, ctypes.byref(request)), self.device, stream
            )
        except RuntimeError as error:
            if request.bad_pair < 0:
                raise
            pair = int(device_pages[request.bad_pair]), int(host_pages[request.bad_pair])
            raise ValueError(
                f"pair {request.bad_pair} is device page {pair[0]} of {self.num_device_pages} and host page {pair[1]} "
                f"of {self.num_host_pages}: both count from 0"
            ) from error

    def _request(
        self, device_pages: Pages, host_pages: Pages, to_host: bool, layers: range, num_ctas: int, min_rows: int
    ) -> PageCopyRequestC:
        return PageCopyRequestC(
            self._first_buffer + 2 * layers.start * ctypes.sizeof(ctypes.c_void_p),
            self.host.data_ptr() + layers.start * self.host_layer_stride,
            device_pages.ctypes.data,
            host_pages.ctypes.data,
            self.host_page_stride,
            self.host_layer_stride,
            self.host_kv_stride,
            self.chunk_bytes,
            self.num_device_pages,
            self.num_host_pages,
            len(device_pages),
            -1,
            len(layers),
            num_ctas,
            to_host,
            min_rows,
        )


def _check_pool(tensors: Sequence[torch.Tensor], page_size: int, device_type: str) -> None:
    first = tensors[0]
    for tensor in tensors:
        if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError("k and v of all layers must be alike in shape, dtype and device")
        if tensor.device.type != device_type or not tensor.is_contiguous():
            raise ValueError(f"k and v must be contiguous on a {device_type} device, got one on {tensor.device}")
    if first.dim() != 3 or page_size < 1 or len(first) % page_size != 0:
        raise ValueError(f"k must be [num_pages * {page_size}, num_kv_heads, head_dim], got {tuple(first.shape)}")


def _host_strides(
    k: Sequence[torch.Tensor], host: torch.Tensor, page_size: int, layout: HostLayout
) -> tuple[int, int, int]:
    """Bytes between pages, layers, and keys and values of ``host``. Raises ValueError for a wrong shape."""
    heads, size = tuple(k[0].shape[1:]), host.element_size()
    if layout == "layer_first":
        fits = host.dim() == 5 and tuple(host.shape[:2]) == (len(k), 2) and tuple(host.shape[3:]) == heads
        if not fits or host.shape[2] % page_size != 0 or not host[0, 0].is_contiguous():
            raise ValueError(
                f"layer_first host memory must be [{len(k)}, 2, num_host_pages * {page_size}, {heads[0]}, {heads[1]}]"
                f" with contiguous slots, got {tuple(host.shape)}"
            )
        return page_size * host.stride(2) * size, host.stride(0) * size, host.stride(1) * size
    if layout == "page_first":
        inner = (len(k), 2, page_size, *heads)
        if host.dim() != 6 or tuple(host.shape[1:]) != inner or not host[0, 0, 0].is_contiguous():
            raise ValueError(
                f"page_first host memory must be [num_host_pages, {', '.join(map(str, inner))}] with contiguous"
                f" pages of a layer, got {tuple(host.shape)}"
            )
        return host.stride(0) * size, host.stride(1) * size, host.stride(2) * size
    raise ValueError(f"layout is {layout!r}: use layer_first or page_first")


def _check_host(host: torch.Tensor, k: torch.Tensor, device_type: str) -> None:
    if host.dtype != k.dtype:
        raise ValueError(f"host is {host.dtype}, the pool is {k.dtype}: make them equal")
    if host.device.type != "cpu" or (device_type == "cuda" and not host.is_pinned()):
        raise ValueError("host must be pinned CPU memory: allocate it with pin_memory=True")


def _check_lists(device_pages: Pages, host_pages: Pages) -> None:
    for name, pages in (("device_pages", device_pages), ("host_pages", host_pages)):
        if pages.dtype != np.int32 or pages.ndim != 1 or not pages.flags.c_contiguous:
            raise ValueError(f"{name} must be contiguous int32 [n], got {pages.dtype} {list(pages.shape)}")
    if len(device_pages) != len(host_pages):
        raise ValueError(f"{len(device_pages)} device pages but {len(host_pages)} host pages: the lists go in pairs")
