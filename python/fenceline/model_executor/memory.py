"""How large the KV pool is."""

from __future__ import annotations

import logging

from fenceline.config.engine_config import EngineConfig
from fenceline.mem_cache.kv_pool import KVLayout
from fenceline.memory_order import Device

# A CPU serves from the memory that everything else on the machine lives in, so the default stays modest.
_CPU_KV_BYTES = 4 << 30

logger = logging.getLogger(__name__)


def check_row_bytes(config: EngineConfig, device: Device, nbytes: int) -> None:
    """Raise ``ValueError`` with the remedy where the request rows' ``nbytes`` are not there, before they are
    allocated."""
    free, _ = device.memory_info()
    if nbytes > free:
        raise ValueError(
            f"--max-running-requests {config.max_running_requests}: with --context-length"
            f" {config.model.context_length} their page tables take {nbytes / 1e9:.1f} GB, and"
            f" {free / 1e9:.1f} GB are free beside the weights; lower one of the two"
        )


def num_kv_pages(config: EngineConfig, device: Device, layout: KVLayout) -> int:
    """Pages of the KV pool, the sink page included.

    ``--max-total-tokens`` if given; else what ``--mem-fraction-static`` leaves beside weights and page tables (which
    are loaded by now), but no more than all running requests can use. Raises ``ValueError`` with the
    remedy when that is less than one request of two pages.
    """
    page_size, page_bytes = layout.page_size, layout.page_nbytes
    free, total = device.memory_info()
    if config.max_total_tokens is not None:
        num_pages = config.max_total_tokens // page_size
        if (num_pages + 1) * page_bytes > free:
            raise ValueError(
                f"--max-total-tokens {config.max_total_tokens}: the KV cache would take"
                f" {num_pages * page_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free beside the weights; give at"
                f" most {max(free // page_bytes - 1, 0) * page_size}, or leave it out"
            )
    else:
        if device.kind == "cpu":
            budget = min(int(free * config.mem_fraction_static), _CPU_KV_BYTES)
        else:
            budget = free - int(total * (1 - config.mem_fraction_static))
        useful = config.max_running_requests * -(-config.model.context_length // page_size)
        num_pages = min(budget // page_bytes, useful)
    if num_pages < 2:
        raise ValueError(
            f"no room for the KV cache: {num_pages} pages of {page_bytes} bytes; "
            "raise --mem-fraction-static or --max-total-tokens, or use a smaller model"
        )
    logger.info(
        "Sized memory: %.2f of %.2f GiB are free beside the weights, the KV cache takes %.2f GiB (%d tokens)",
        free / 2**30, total / 2**30, num_pages * page_bytes / 2**30, num_pages * page_size,
    )  # fmt: skip
    return num_pages + 1
