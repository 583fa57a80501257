"""A small KV pool and a host pool of noise, and what copies between them must leave behind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fenceline.mem_cache.host.host_pool import HostLayout, HostPool
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Device


@dataclass(frozen=True, slots=True)
class Shape:
    """Of both pools."""

    num_device_pages: int = 12
    num_host_pages: int = 15
    page_size: int = 4
    num_layers: int = 3
    heads: tuple[int, int] = (2, 8)
    dtype: torch.dtype = torch.bfloat16


def make_pools(device: Device, layout: HostLayout, shape: Shape, seed: int = 0) -> tuple[KVPool, HostPool]:
    """Pools full of noise; the device is idle."""
    kv_pool = KVPool(
        shape.num_device_pages,
        shape.page_size,
        shape.num_layers,
        *shape.heads,
        shape.dtype,
        device.torch_device,
    )
    host_pool = HostPool(device, shape.num_host_pages, kv_pool, layout)
    draw = np.random.default_rng(seed)
    for tensor in device_tensors(kv_pool):
        tensor.copy_(_noise(draw, tuple(tensor.shape), shape.dtype))
    device.synchronize()
    for page in range(shape.num_host_pages):
        host_pool.host_access(page, True, "noise")
    host_pool.view.copy_(_noise(draw, tuple(host_pool.view.shape), shape.dtype))
    return kv_pool, host_pool


def device_tensors(kv_pool: KVPool) -> list[torch.Tensor]:
    """k0, v0, k1, v1, ..."""
    return [tensor for layer in range(kv_pool.num_layers) for tensor in (kv_pool.k(layer), kv_pool.v(layer))]


def device_pages(kv_pool: KVPool) -> torch.Tensor:
    """A copy of the device's bytes on the host: [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]."""
    tensors = device_tensors(kv_pool)
    heads = tuple(tensors[0].shape[1:])
    parts = [tensor.cpu().view(kv_pool.num_pages, kv_pool.page_size, *heads) for tensor in tensors]
    return torch.stack(parts, dim=1).view(kv_pool.num_pages, kv_pool.num_layers, 2, kv_pool.page_size, *heads)


def host_pages(host_pool: HostPool) -> torch.Tensor:
    """A copy of the host's bytes in the same form, whatever the layout."""
    return torch.stack([host_pool.page(page).clone() for page in range(host_pool.num_pages)])


def _noise(draw: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(draw.integers(0, 120, shape, dtype=np.uint8)).to(dtype)
