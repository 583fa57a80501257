"""Page copies between the device's KV pool and pinned host memory (include/fenceline/page_copy.h).

SMs read and write host memory through unified addressing: all layers of a set of pages in one launch, however the pages
lie. ``num_ctas`` bounds the SMs that a copy holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal

import torch

from fenceline_kernel.library import KernelLibrary, PageCopyRequestC, load

HostLayout = Literal["layer_first", "page_first"]
DEFAULT_NUM_CTAS = 8
MAX_NUM_CTAS = 1024


class PagePools:
    """The two ends of page copies, checked once: per-layer device tensors and one pinned host tensor.

    ``k[i]``, ``v[i]``: [num_slots, num_kv_heads, head_dim] on one GPU, contiguous; slot = page * page_size + offset.
    ``host``: pinned, same dtype, either ``layer_first`` [num_layers, 2, num_host_slots, num_kv_heads, head_dim] or
    ``page_first`` [num_host_pages, num_layers, 2, page_size, num_kv_heads, head_dim]; a page of one layer's keys or
    values is contiguous, the strides around it are free (target and draft may share a page_first buffer).
    Keeps the tensors alive; owns no page: whoever copies holds the leases of the pages it names.
    """

    def __init__(
        self,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        host: torch.Tensor,
        page_size: int,
        layout: HostLayout,
        library: KernelLibrary | None = None,
    ) -> None:
        """Raises ValueError naming the remedy; KernelUnavailable if there are no kernels."""
        if len(k) == 0 or len(k) != len(v):
            raise ValueError(f"k and v need one tensor for each layer, got {len(k)} and {len(v)}")
        self.device, self.page_size, self.num_layers = k[0].device, page_size, len(k)
        self.library = library if library is not None else load(self.device)
        _check_pool([*k, *v], page_size, self.library.device_type)
        self.host_page_stride, self.host_layer_stride, self.host_kv_stride = _host_strides(
            k, host, page_size, layout
        )
        _check_host(host, k[0], self.library.device_type)
        self.num_device_pages = len(k[0]) // page_size
        self.num_host_pages = host.shape[2] // page_size if layout == "layer_first" else len(host)
        self.chunk_bytes = page_size * k[0][0].nbytes
        self.host = host
        self._tensors = [tensor for pair in zip(k, v, strict=True) for tensor in pair]
        self._pointers = (ctypes.c_void_p * len(self._tensors))(*(t.data_ptr() for t in self._tensors))

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        return 2 * self.num_layers * self.chunk_bytes

    def copy(
        self,
        device_pages: torch.Tensor,
        host_pages: torch.Tensor,
        to_host: bool,
        layers: range | None,
        num_ctas: int,
        num_rejected: torch.Tensor | None,
        stream: int | None,
    ) -> None:
        """What gather_pages and scatter_pages share."""
        layers = range(self.num_layers) if layers is None else layers
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= self.num_layers:
            raise ValueError(f"layers is {layers}: give a range within the pool's {self.num_layers} layers")
        if not 1 <= num_ctas <= MAX_NUM_CTAS:
            raise ValueError(f"num_ctas is {num_ctas}: give 1 to {MAX_NUM_CTAS}")
        _check_pages(device_pages, host_pages, self.device)
        _check_counter(num_rejected, self.device)
        if len(device_pages) == 0:
            return
        pointer_bytes = ctypes.sizeof(ctypes.c_void_p)
        request = PageCopyRequestC(
            buffers=ctypes.addressof(self._pointers) + 2 * layers.start * pointer_bytes,
            host=self.host.data_ptr() + layers.start * self.host_layer_stride,
            device_pages=device_pages.data_ptr(),
            host_pages=host_pages.data_ptr(),
            num_rejected=num_rejected.data_ptr() if num_rejected is not None else None,
            host_page_stride=self.host_page_stride,
            host_layer_stride=self.host_layer_stride,
            host_kv_stride=self.host_kv_stride,
            chunk_bytes=self.chunk_bytes,
            num_device_pages=self.num_device_pages,
            num_host_pages=self.num_host_pages,
            num_pages=len(device_pages),
            num_layers=len(layers),
            index_bytes=device_pages.element_size(),
            num_ctas=num_ctas,
            to_host=int(to_host),
        )
        self.library.copy_pages(request, self.device, stream)


def gather_pages(
    pools: PagePools,
    device_pages: torch.Tensor,
    host_pages: torch.Tensor,
    *,
    layers: range | None = None,
    num_ctas: int = DEFAULT_NUM_CTAS,
    num_rejected: torch.Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Device to host: host page ``host_pages[i]`` becomes device page ``device_pages[i]``, for ``layers`` (None: all).

    Both lists: [n], int32 or int64 alike, on the pool's GPU; read when the kernel runs. Enqueued on ``stream`` (a
    cudaStream_t; None: torch's current one); the host may read once that stream has passed it. Page numbers out of
    bounds are skipped and counted in ``num_rejected`` [1] int32 on the GPU. Raises ValueError, RuntimeError if the
    launch fails.
    """
    pools.copy(device_pages, host_pages, True, layers, num_ctas, num_rejected, stream)


def scatter_pages(
    pools: PagePools,
    host_pages: torch.Tensor,
    device_pages: torch.Tensor,
    *,
    layers: range | None = None,
    num_ctas: int = DEFAULT_NUM_CTAS,
    num_rejected: torch.Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Host to device: device page ``device_pages[i]`` becomes host page ``host_pages[i]``; else as ``gather_pages``.

    The host pages must hold their bytes when this is called, and keep them until the stream has passed it.
    """
    pools.copy(device_pages, host_pages, False, layers, num_ctas, num_rejected, stream)


def _check_pool(tensors: Sequence[torch.Tensor], page_size: int, device_type: str) -> None:
    first = tensors[0]
    for tensor in tensors:
        if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError("k and v of all layers must be alike in shape, dtype and device")
        if tensor.device.type != device_type or not tensor.is_contiguous():
            raise ValueError(
                f"k and v must be contiguous on a {device_type} device, got one on {tensor.device}"
            )
    if first.dim() != 3 or page_size < 1 or len(first) % page_size != 0:
        raise ValueError(
            f"k must be [num_pages * {page_size}, num_kv_heads, head_dim], got {tuple(first.shape)}"
        )


def _host_strides(
    k: Sequence[torch.Tensor], host: torch.Tensor, page_size: int, layout: HostLayout
) -> tuple[int, int, int]:
    """Bytes between pages, layers, and keys and values of ``host``; ValueError if its shape is another."""
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


def _check_pages(device_pages: torch.Tensor, host_pages: torch.Tensor, device: torch.device) -> None:
    for name, pages in (("device_pages", device_pages), ("host_pages", host_pages)):
        if pages.device != device or pages.dim() != 1 or not pages.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous [n] on {device}, got {tuple(pages.shape)} on {pages.device}"
            )
        if pages.dtype not in (torch.int32, torch.int64) or pages.dtype != device_pages.dtype:
            raise ValueError(f"{name} is {pages.dtype}: both lists must be int32 or both int64")
    if len(device_pages) != len(host_pages):
        raise ValueError(
            f"{len(device_pages)} device pages but {len(host_pages)} host pages: the lists go in pairs"
        )


def _check_counter(num_rejected: torch.Tensor | None, device: torch.device) -> None:
    if num_rejected is None:
        return
    if num_rejected.dtype != torch.int32 or num_rejected.numel() != 1 or num_rejected.device != device:
        raise ValueError(f"num_rejected must be one int32 on {device}")
