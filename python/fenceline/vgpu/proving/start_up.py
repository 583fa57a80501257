"""What an engine decides at its start: how much memory it takes, on devices with other amounts of it than the virtual
GPU has, how small a storage it accepts, and under which identity of the model pages are kept.

Whether an engine starts, and with how large a cache, is asked of the functions that decide it, with amounts at which
the decision changes, and random ones. What is right is computed here from the flags, as docs/server_arguments.md
describes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from tempfile import TemporaryDirectory
from typing import cast
from unittest.mock import patch

import numpy as np

from fenceline.config.engine_config import EngineConfig
from fenceline.mem_cache import kv_pool
from fenceline.mem_cache.host import cache_controller, host_pool
from fenceline.mem_cache.host.cache_controller import num_host_pages
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.kv_pool import KVLayout, check_row_bytes, num_kv_pages
from fenceline.mem_cache.page_hash import model_id, page_fingerprint
from fenceline.mem_cache.storage import controller
from fenceline.memory_order import Device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.vgpu.device import VgpuDevice

_HEADER_NBYTES, _KEYED_HEADER_NBYTES = 64, 96  # of a page's file
_KEPT_FREE = 0.05  # of the host's memory


class _OtherDevice:
    """A device of ``kind`` with so many bytes, as the functions see it."""

    def __init__(self, kind: str, free: int, total: int) -> None:
        self.kind = kind
        self._info = free, total

    def memory_info(self) -> tuple[int, int]:
        return self._info


def compare_start(config: EngineConfig, runner: ModelRunner, random: Random) -> str:
    """What is wrong with the decisions about memory, "" if nothing is."""
    layout = runner.kv_pool.layout
    return (
        _rows(config, runner)
        or _pages(config, layout, random)
        or _host(config, runner, random)
        or _copies(config, runner)
        or _storage(config, runner)
        or _identities(config)
        or _chosen(config, runner)
    )


def _refuses(call: Callable[..., object], *args: object) -> bool:
    try:
        call(*args)
    except ValueError:
        return True
    return False


def _device(kind: str, free: int, total: int) -> Device:
    return cast(Device, _OtherDevice(kind, free, total))


def _rows(config: EngineConfig, runner: ModelRunner) -> str:
    """Each row has a page table of int32 and a last token of int64."""
    num_rows, num_columns = runner.req_pool.page_table.shape
    needed = 4 * num_rows * num_columns + 8 * num_rows
    for free in (needed - 1, needed):
        device = _device("vgpu", free, 2 * needed)
        if _refuses(check_row_bytes, config, device, num_rows, num_columns) != (free < needed):
            return f"start: request rows of {needed} bytes are wrongly judged with {free} bytes free"
    return ""


def _pages(config: EngineConfig, layout: KVLayout, random: Random) -> str:
    """The cache has what --max-total-tokens says, or the part of the memory that --mem-fraction-static leaves, but no
    more than the running requests can use; on a CPU that part of the free memory, 4 GiB at most, divided among the
    ranks."""
    page_bytes = layout.page_size * sum(row.nbytes for rows in layout.layers for row in rows)
    longest = config.model.context_length + random.choice((0, 1, random.randrange(layout.page_size)))
    config = replace(config, model=replace(config.model, context_length=longest))
    most_useful = config.max_running_requests * math.ceil(longest / layout.page_size)
    for kind in ("vgpu", "cpu"):
        num_ranks = random.choice((1, 2, 3)) if kind == "cpu" else 1
        share = random.choice((0.25, 0.5, 0.875))
        num_wanted = random.choice((1, 2, 3, random.randrange(2, 2 * most_useful + 2), 2 * most_useful))
        for tokens in (None, num_wanted * layout.page_size + random.randrange(layout.page_size)):
            for change in (-1, 0, random.randrange(page_bytes)):
                free, total = _memory(
                    kind, num_wanted, page_bytes, share, num_ranks, tokens is not None, change
                )
                asked = replace(config, max_total_tokens=tokens, mem_fraction_static=share)
                if tokens is not None:
                    fits, right = free >= (num_wanted + 1) * page_bytes, num_wanted
                else:
                    budget = free - (total - int(total * share))
                    if kind == "cpu":
                        budget = min(int(free * share), kv_pool._CPU_KV_BYTES) // num_ranks
                    fits, right = True, min(budget // page_bytes, most_useful)
                got = _num_pages(asked, _device(kind, free, total), layout, num_ranks)
                expected = right + 1 if fits and right >= 2 else None
                if got != expected:
                    return (
                        f"start: {got} pages with {free} of {total} bytes free ({kind}), {expected} are right"
                    )
    return ""


def _memory(
    kind: str, num_pages: int, page_bytes: int, share: float, num_ranks: int, is_given: bool, change: int
) -> tuple[int, int]:
    """(free, total): as much as just suffices for ``num_pages``, and ``change`` more."""
    if is_given:
        free = (num_pages + 1) * page_bytes + change
        return free, 2 * free
    if kind == "cpu":
        free = math.ceil((num_pages * page_bytes * num_ranks + change) / share)
        return free, 2 * free
    total = 8 * num_pages * page_bytes
    return total - int(total * share) + num_pages * page_bytes + change, total


def _num_pages(config: EngineConfig, device: Device, layout: KVLayout, num_ranks: int) -> int | None:
    said: list[tuple[object, ...]] = []
    with patch.object(kv_pool.logger, "info", lambda text, *args: said.append(args)):
        try:
            num_pages = num_kv_pages(config, device, layout, num_ranks)
        except ValueError:
            return None
    # The log says how large the cache is, without the sink.
    nbytes = (num_pages - 1) * layout.page_size * sum(row.nbytes for rows in layout.layers for row in rows)
    free, total = device.memory_info()
    right = (free / 2**30, total / 2**30, nbytes / 2**30, (num_pages - 1) * layout.page_size)
    return num_pages if said == [right] else -1


def _host(config: EngineConfig, runner: ModelRunner, random: Random) -> str:
    """The host tier has as many bytes as --hicache-size says; it may take 95 percent of what the host has available."""
    if config.hicache is None:
        return ""
    page_bytes = runner.kv_pool.layout.page_nbytes
    num_pages = random.randrange(1, 20)
    host_bytes = num_pages * page_bytes + random.randrange(page_bytes)
    asked = replace(config, hicache=replace(config.hicache, host_bytes=host_bytes))
    got = num_host_pages(asked, runner.kv_pool)
    if got != num_pages:
        return f"start: {got} host pages of {page_bytes} bytes in {host_bytes}, {num_pages} are right"
    if not _refuses(HostPool, runner.device, 0, runner.kv_pool.layout, "page_first"):
        return "start: a host tier without a page is accepted"
    nbytes, cpu = num_pages * page_bytes, cast(Device, _HostMemory())
    for available in (math.floor(nbytes / (1 - _KEPT_FREE)) - 2, math.ceil(nbytes / (1 - _KEPT_FREE)) + 2):
        fits = int(available * (1 - _KEPT_FREE)) >= nbytes
        if _refuses(host_pool._allocate, cpu, nbytes, available) == fits:
            return f"start: a host tier of {nbytes} bytes is wrongly judged with {available} available"
    return ""


def _copies(config: EngineConfig, runner: ModelRunner) -> str:
    """Pages that do not exist are not copied. The first copies, at the start, are ordered with what comes before and
    after them on the default stream. Not asked of an engine with a thread of its own, whose virtual GPU knows only
    that one."""
    if config.hicache is None:
        return ""
    if isinstance(runner.device, VgpuDevice) and not runner.device.gpu.rotation.knows_caller:
        return ""
    assert runner.hicache is not None, "there is a host tier"
    copier, device, pool = runner.hicache._copier, runner.device, runner.kv_pool
    sizes = {"device": pool.num_pages, "host": runner.hicache.host_pool.num_pages}
    for side, num_pages in sizes.items():
        for page in (-1, num_pages):
            pages = {name: np.array([page if name == side else 0], dtype=np.int32) for name in sizes}
            layers = range(pool.num_layers)
            if not _refuses(copier.to_host, device.store, pages["device"], pages["host"]) or not _refuses(
                copier.to_device, device.load, pages["host"], pages["device"], layers
            ):
                return f"start: page {page} of {num_pages} on the {side} is copied"
    for _ in range(2):
        pool.parts[0][0] = 0
        cache_controller._warm_up(device, copier, pool.num_layers)
    pool.parts[0][0] = 0
    device.synchronize()
    return ""


def _chosen(config: EngineConfig, runner: ModelRunner) -> str:
    """FORWARD itself writes small results to the host if backups use the copy engine. A draft whose heads are the
    target's shares its attention, and what the device keeps of each request between two steps has no room to spare."""
    is_direct = config.hicache is not None and config.hicache.io_backend == "direct"
    if runner._results._small_by_forward != is_direct:
        return f"start: small results are {'not ' * is_direct}written to the host by FORWARD"
    if config.speculative is None or runner.speculative is None:
        return ""
    draft, wanted = config.speculative.draft.model, config.speculative.draft_attention_backend
    heads = [(one.num_heads, one.num_kv_heads, one.head_dim) for one in (config.model, draft)]
    is_shared, alike = runner._draft_attention is runner._attention, heads[0] == heads[1] and wanted is None
    if is_shared != alike:
        return f"start: attention of heads {heads} is {'not ' * alike}shared"
    state, num_steps = runner.speculative.state, config.speculative.num_steps
    num_kept = num_steps - 1 if runner.speculative._num_layers > 1 else 1
    if state.hidden.shape[1] != num_kept:
        return f"start: {state.hidden.shape[1]} hidden states of each request are kept, {num_kept} are needed"
    return ""


def _storage(config: EngineConfig, runner: ModelRunner) -> str:
    """A storage is refused if it has no room for one page with its header, and the flag is named."""
    storage = None if config.hicache is None else config.hicache.storage
    if storage is None:
        return ""
    key = config.server_args.hicache_storage_key
    fingerprint = page_fingerprint(config, runner.kv_pool.layout)
    least = runner.kv_pool.layout.page_nbytes + (_HEADER_NBYTES if key is None else _KEYED_HEADER_NBYTES)
    with TemporaryDirectory(prefix="fenceline-prove-") as folder:
        for nbytes in (least - 1, least):
            said = ""
            try:
                asked = replace(storage, directory=folder, max_bytes=nbytes)
                controller._backend(asked, key, fingerprint)
            except ValueError as error:
                said = str(error)
            if (nbytes < least) != said.startswith("--hicache-storage-size"):
                return f"start: storage of {nbytes} bytes for pages of {least}: {said!r}"
    return ""


def _identities(config: EngineConfig) -> str:
    """Pages in storage have other keys if anything differs on which their bytes depend."""
    if config.hicache is None or config.hicache.storage is None:
        return ""
    args, model = config.server_args, config.model
    others = [
        config,
        replace(config, server_args=replace(args, weight_version="another")),
        replace(config, model=replace(model, rope_theta=model.rope_theta + 1)),
        replace(config, model=replace(model, model_path=f"{model.model_path}/..")),
    ]
    if config.speculative is not None:
        speculative, draft = config.speculative, config.speculative.draft
        drafts = [
            replace(draft, model=replace(draft.model, model_path=f"{draft.model.model_path}/..")),
            replace(draft, model=replace(draft.model, rope_theta=draft.model.rope_theta + 1)),
        ]
        others += [replace(config, speculative=replace(speculative, draft=draft)) for draft in drafts]
        others.append(replace(config, speculative=None))
    ids = [model_id(other) for other in others]
    same = [index for index, id in enumerate(ids) if id in ids[:index]]
    return f"start: models that differ have one identity: number {same[0]}" if same else ""


class _HostMemory:
    """A device that allocates nothing."""

    def host_buffer(self, nbytes: int) -> None:
        return None
