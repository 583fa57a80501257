"""How the tiers under the prefix cache stand, as the front end is told."""

from __future__ import annotations

from fenceline.ipc.io_struct import HiCacheState, TransferState
from fenceline.mem_cache.host.cache_controller import TransferCounts
from fenceline.mem_cache.host.transfer import TransferKind
from fenceline.mem_cache.storage.base import StorageStats
from fenceline.mem_cache.storage.tier_stats import StorageTierStats
from fenceline.scheduler.request_memory import RequestMemory

_NO_STORAGE = StorageTierStats(backend=StorageStats())


def hicache_state(memory: RequestMemory) -> HiCacheState | None:
    """None where the device is the only tier."""
    tiers, size = memory.tiers, memory.page_size
    if tiers is None:
        return None
    tree, host_pages = tiers.tree, tiers.host_pages
    storage = _NO_STORAGE if tiers.storage is None else tiers.storage.stats()
    return HiCacheState(
        cached_tokens={tier: memory.cached_tokens[tier] for tier in ("device", "host", "storage")},
        num_host_tokens=(host_pages.size - host_pages.reserved) * size,
        num_used_host_tokens=host_pages.num_leased * size,
        pages={
            "device": tree.num_pages - tree.num_both_pages,
            "host": tree.num_host_pages - tree.num_both_pages,
            "both": tree.num_both_pages,
            "in_transit": tree.num_in_transit_pages,
        },
        num_locked_nodes=tree.num_locked_nodes + tree.num_host_holds,
        evicted_tokens={
            "device": memory.num_evicted_pages * size,
            "host": tree.num_evicted_host_pages * size,
        },
        load=_transfers(tiers.counts[TransferKind.LOAD], size),
        store=_transfers(tiers.counts[TransferKind.STORE], size),
        storage_read=TransferState(
            num_transfers=sum(storage.prefetches.values()),
            num_tokens=storage.fetched * size,
            num_bytes=storage.backend.read_bytes,
            seconds=storage.read_seconds,
        ),
        storage_write=TransferState(
            num_transfers=storage.num_writes,
            num_tokens=storage.written * size,
            num_bytes=storage.backend.written_bytes,
            seconds=storage.write_seconds,
        ),
        prefetches={str(outcome): count for outcome, count in storage.prefetches.items()},
        recomputes=dict(memory.recomputes),
        num_storage_misses=storage.missed,
        storage_errors={str(reason): count for reason, count in storage.backend.errors.items()}
        | {"dropped": storage.dropped, "stalled": storage.stalls, "crashed": storage.crashes},
    )


def _transfers(counts: TransferCounts, page_size: int) -> TransferState:
    return TransferState(
        num_transfers=counts.num_transfers,
        num_tokens=counts.num_pages * page_size,
        num_bytes=counts.num_bytes,
        seconds=counts.seconds,
    )
