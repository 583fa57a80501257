"""A small KV pool and a host pool with random contents, and the expected contents after copies between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fenceline.config.kv_layout import KVLayout, KVRow, keys_and_values, latent
from fenceline.config.server_args import MemLayout
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Device

MIXED = (
    keys_and_values(2, 8, "bfloat16"),
    keys_and_values(1, 8, "bfloat16"),
    keys_and_values(1, 8, "bfloat16"),
    latent(7, "float8_e4m3fn"),
    (KVRow("k", (2, 6), "float32"), KVRow("v", (2, 4), "float32")),
    latent(5, "bfloat16"),
    keys_and_values(3, 4, "uint8"),  # a draft model's
)
"""Layers that differ in heads, number of rows, width, dtype and offsets; two adjacent ones are equal."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of both pools. ``layers``, if given, replace ``num_layers`` layers with keys and values of
    ``heads``."""

    num_device_pages: int = 12
    num_host_pages: int = 15
    page_size: int = 4
    num_layers: int = 3
    heads: tuple[int, int] = (2, 8)
    dtype: str = "bfloat16"
    layers: tuple[tuple[KVRow, ...], ...] = ()

    @property
    def layout(self) -> KVLayout:
        """The layout of a page."""
        if self.layers:
            return KVLayout(self.page_size, self.layers)
        return KVLayout.uniform(self.page_size, self.num_layers, *self.heads, self.dtype)


def ids(*numbers: int) -> np.ndarray:
    """Page numbers, int32."""
    return np.array(numbers, dtype=np.int32)


def make_pools(device: Device, mem_layout: MemLayout, shape: Shape, seed: int = 0) -> tuple[KVPool, HostPool]:
    """Pools filled with random bytes that are not NaN in any dtype; the device is idle."""
    kv_pool = KVPool(shape.num_device_pages, shape.layout, device.torch_device)
    host_pool = HostPool(device, shape.num_host_pages, kv_pool.layout, mem_layout)
    draw = np.random.default_rng(seed)
    for part in kv_pool.parts:
        part.copy_(_noise(draw, tuple(part.shape)))
    device.synchronize()
    for page in range(shape.num_host_pages):
        host_pool.host_access(page, True, "noise")
    host_pool.buffer.copy_(_noise(draw, tuple(host_pool.buffer.shape)))
    return kv_pool, host_pool


def device_pages(kv_pool: KVPool) -> torch.Tensor:
    """A copy of the device's bytes on the host: uint8 [num_pages, page_nbytes]."""
    return torch.cat([part.cpu() for part in kv_pool.parts], dim=1)


def host_pages(host_pool: HostPool) -> torch.Tensor:
    """A copy of the host's bytes in the same form as ``device_pages``, for any memory layout."""
    return torch.stack([host_page(host_pool, page) for page in range(host_pool.num_pages)])


def host_page(host_pool: HostPool, page: int) -> torch.Tensor:
    """A copy of one page's bytes, as storage reads them: uint8 [page_nbytes]."""
    return torch.from_numpy(np.concatenate(host_pool.page(page)))


def fill_host_page(host_pool: HostPool, page: int, data: np.ndarray | torch.Tensor) -> None:
    """Write a page's bytes without torch, as storage does."""
    start, flat = 0, np.asarray(data).reshape(-1)
    for piece in host_pool.page(page):
        piece[:] = flat[start : start + piece.nbytes]
        start += piece.nbytes
    assert start == flat.nbytes


def bytes_of(layout: KVLayout, layers: range) -> slice:
    """The range of ``layers`` in a page's bytes."""
    parts = [layout.parts[part] for part in layout.parts_of(layers)]
    return slice(parts[0].offset, parts[-1].offset + parts[-1].nbytes) if parts else slice(0, 0)


def _noise(draw: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(draw.integers(0, 120, shape, dtype=np.uint8))
