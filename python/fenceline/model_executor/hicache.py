"""Makes the host tier of a model runner: its pages, what copies them, and the controller that submits the copies."""

from __future__ import annotations

import logging

import numpy as np

from fenceline.config.engine_config import EngineConfig
from fenceline.config.hicache import DIRECT_PAGE_SIZE
from fenceline.mem_cache.host.cache_controller import CacheController
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.host.page_copy import PageCopier, make_page_copier
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Device
from fenceline.memory_order.access import Memory

logger = logging.getLogger(__name__)


def make_cache_controller(
    config: EngineConfig, device: Device, kv_pool: KVPool, pages: Memory
) -> CacheController:
    """A host tier for ``kv_pool``, whose ``pages`` steps declare.

    Copies the sink page there and back on a GPU, so that nothing is compiled or loaded while a request waits. Waits for
    the device. Raises ``ValueError`` with the remedy where the host has no room for it.
    """
    assert config.hicache is not None
    io_backend = config.hicache.io_backend
    if device.kind == "cuda" and io_backend == "direct" and kv_pool.page_size < DIRECT_PAGE_SIZE:
        logger.warning(
            "HiCache moves pages of %d token(s) by the copy engine, at a few percent of its rate: give --page-size 64",
            kv_pool.page_size,
        )
    host_pool = HostPool(
        device, num_host_pages(config, kv_pool), kv_pool.layout, config.server_args.hicache_mem_layout
    )
    copier = make_page_copier(device, kv_pool, host_pool, io_backend)
    if device.kind == "cuda":
        _warm_up(device, copier, kv_pool.num_layers)
    return CacheController(device, kv_pool, host_pool, copier, pages)


def num_host_pages(config: EngineConfig, kv_pool: KVPool) -> int:
    """Pages of the host tier: as many as fit ``host_bytes`` if that is given, else --hicache-ratio times as many as
    the device has."""
    assert config.hicache is not None
    if config.hicache.host_bytes is None:
        return int((kv_pool.num_pages - 1) * config.server_args.hicache_ratio)
    return config.hicache.host_bytes // kv_pool.layout.page_nbytes


def _warm_up(device: Device, copier: PageCopier, num_layers: int) -> None:
    sink, first = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    device.synchronize()  # the pool was written on the default stream
    copier.to_host(device.store, sink, first)
    device.synchronize()
    copier.to_device(device.load, first, sink, range(num_layers))
    device.synchronize()
