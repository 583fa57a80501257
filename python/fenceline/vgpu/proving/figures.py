"""The engine's figures at the end of a run, compared with counts that the proof makes from outside.

The figures are those of ``/get_server_info`` and ``/metrics``. The counts come from the steps and
transfers that were launched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from fenceline.config.engine_config import EngineConfig
from fenceline.ipc.io_struct import CudaGraphState, HiCacheState, InternalState, TransferState
from fenceline.mem_cache.storage.controller import StorageTierStats
from fenceline.mem_cache.transfer import TransferKind
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import RadixCache, TreeNode
from fenceline.memory_order.checker import OrderChecker
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.vgpu.proving.decisions import Decision, Event, Transfer
from fenceline.vgpu.proving.events import around
from fenceline.vgpu.proving.recorded_worker import RecordedStorage
from fenceline.vgpu.proving.storage_jobs import StorageJobs
from fenceline.vgpu.proving.storage_record import StorageRecord


class Evictions:
    """Counts the pages that leave ``tree``, which holds those of the device, to make room; they must be those that
    have not been used for longest, and no more than are needed."""

    def __init__(self, tree: RadixCache) -> None:
        self.num_pages = 0
        before = 0
        leaving: list[int] = []  # pages

        def begin(num_pages: int) -> None:
            nonlocal before
            before = tree.num_pages
            leaving[:] = _least_recently_used(tree, num_pages)

        def end(num_evicted: int, num_pages: int) -> None:
            gone = before - tree.num_pages
            self.num_pages += gone
            left = set(tree.all_pages().tolist()) & set(leaving)
            assert gone == len(leaving) and not left, (
                f"{gone} pages are evicted for {num_pages}, {len(leaving)} are right, of which {len(left)} stay"
            )
            assert num_evicted == gone, (
                f"{num_evicted} pages are said to be evicted, and {gone} have left the tree"
            )

        around(tree, "evict", before=begin, after=end)


def _least_recently_used(tree: RadixCache, num_pages: int) -> list[int]:
    """The pages of whole nodes that leave the device for ``num_pages``: of the nodes below which none is left, and
    which nobody uses, always the one that has not been used for longest; of equally old ones the one made first."""
    nodes = [node for node in tree._nodes() if node.on_device]
    pages: list[int] = []
    while len(pages) < num_pages:
        parents = {id(node.parent) for node in nodes}
        free = [node for node in nodes if node.lock_ref == 0 and id(node) not in parents]
        if not free:
            break
        node = min(free, key=lambda node: (node.last_access, node.id))
        nodes.remove(node)
        pages += node.pages.tolist()
    return pages


class HostEvictions:
    """Counts the pages that leave the host to make room in ``tree``: those of whole nodes that nobody uses and below
    which none is on the host, the least recently used first, and no more than are needed."""

    def __init__(self, tree: HiRadixCache) -> None:
        self.tree = tree
        self.num_pages = 0
        self._before: list[int] = []
        self._leaving: list[int] = []
        around(tree._host, "alloc", before=self._begin, after=self._end)

    def _begin(self, num_pages: int, protected: Collection[TreeNode]) -> None:
        self._before = self.tree.all_host_pages().tolist()
        self._leaving = []
        num_missing = num_pages - self.tree._host.pool.num_free
        nodes = [node for node in self.tree._nodes() if node.host_pages is not None]
        while len(self._leaving) < num_missing:
            above = {id(node.parent) for node in nodes}
            free = [
                node
                for node in nodes
                if node.lock_ref == 0
                and not node.host_holds
                and id(node) not in above
                and node not in protected
            ]
            if not free:
                self._leaving = []  # not enough, so none leaves
                return
            node = min(free, key=lambda node: (node.last_access, node.id))
            nodes.remove(node)
            assert node.host_pages is not None, "it is on the host"
            self._leaving += node.host_pages.tolist()

    def _end(self, leased: object, num_pages: int, protected: Collection[TreeNode]) -> None:
        gone = set(self._before) - set(self.tree.all_host_pages().tolist())
        assert gone == set(self._leaving), (
            f"{len(gone)} pages are evicted from the host for {num_pages}, {len(self._leaving)} are right, of which "
            f"{len(set(self._leaving) - gone)} stay"
        )
        self.num_pages += len(gone)


def compare_figures(
    config: EngineConfig,
    state: InternalState,
    runner: ModelRunner,
    events: Sequence[Event],
    evictions: Evictions,
    host_evictions: HostEvictions | None,
    elapsed_s: float,
) -> str:
    """The first figure that is not right, "" if all are. All requests have ended and all transfers too. ``elapsed_s``:
    seconds since before the engine was made."""
    batches = [event.batch for event in events if isinstance(event, Decision)]
    wrong = _Wrong()
    checker = runner.device.checker
    if isinstance(checker, OrderChecker):
        wrong.compare("steps of --memory-check order", checker.step, len(batches))
    wrong.compare("used tokens", state.num_used_tokens, 0)
    wrong.compare("requests", state.num_running_reqs + state.num_queue_reqs, 0)
    most, page_size = config.server_args.max_total_tokens, config.server_args.page_size
    # Without --max-total-tokens no more than the running requests can use, for which there is memory in each run.
    num_useful = config.max_running_requests * math.ceil(config.model.context_length / page_size)
    num_pages = num_useful if most is None else most // page_size
    held = {"kv_cache": sum(part.nbytes for part in runner.kv_pool.parts)}
    if runner.hicache is not None:
        held["host_kv_cache"] = runner.hicache.host_pool.buffer.nbytes
    wrong.compare("bytes of the cache", {name: runner.memory_bytes.get(name) for name in held}, held)
    wrong.compare("capacity", state.max_total_num_tokens, num_pages * page_size)
    decodes = [len(batch.rows) for batch in batches if batch.is_decode]
    has_padding = not config.server_args.disable_cuda_graph_padding
    _compare_graphs("decode", state.cuda_graphs, config.cuda_graph_bs, has_padding, decodes, wrong)
    sizes = config.piecewise_cuda_graph_tokens
    tokens = [batch.num_prompt_tokens for batch in batches if batch.chunks]
    within = [num for num in tokens if num <= max(sizes, default=0)]
    _compare_graphs("prefill", state.piecewise_cuda_graphs, sizes, True, within, wrong)
    if state.hicache is not None:
        _compare_tiers(state.hicache, runner, events, wrong)
        assert config.hicache is not None and host_evictions is not None, "there is a host tier"
        evicted = {"device": evictions.num_pages * page_size, "host": host_evictions.num_pages * page_size}
        wrong.compare("tokens evicted", state.hicache.evicted_tokens, evicted)
        page_bytes = page_size * sum(row.nbytes for layer in runner.kv_pool.layout.layers for row in layer)
        host_bytes = config.hicache.host_bytes
        most_on_host = num_pages * config.server_args.hicache_ratio
        if host_bytes is not None:
            most_on_host = host_bytes / page_bytes
        wrong.compare(
            "tokens of the host tier", state.hicache.num_host_tokens, math.floor(most_on_host) * page_size
        )
        tree = host_evictions.tree
        wrong.compare(
            "tokens on the host", state.hicache.num_used_host_tokens, len(tree.all_host_pages()) * page_size
        )
    _compare_times(state, elapsed_s, wrong)
    return wrong.first


def _compare_times(state: InternalState, elapsed_s: float, wrong: _Wrong) -> None:
    """Nothing took less than no time, or longer than everything together."""
    tiers = state.hicache
    times = [
        ("captures", graphs.capture_s)
        for graphs in (state.cuda_graphs, state.piecewise_cuda_graphs)
        if graphs is not None
    ]
    if tiers is not None:
        times += [("loads", tiers.load.seconds), ("stores", tiers.store.seconds)]
    for what, seconds in times:
        within = seconds if 0 <= seconds <= elapsed_s else f"between 0 and {elapsed_s}"
        wrong.compare(f"seconds of {what}", seconds, within)


class _Wrong:
    def __init__(self) -> None:
        self.first = ""

    def compare(self, what: str, said: object, right: object) -> None:
        if said != right and not self.first:
            self.first = f"figures: {what}: {said} is reported, {right} is right"


def _compare_graphs(
    kind: str,
    said: CudaGraphState | None,
    sizes: Sequence[int],
    has_padding: bool,
    nums: Sequence[int],
    wrong: _Wrong,
) -> None:
    """``sizes``: those that are to be captured, ascending. ``nums``: requests or tokens of each step that may be
    replayed. All of this is known without what the engine says."""
    wrong.compare(f"graphs for {kind}", said is not None, bool(sizes))
    if said is None or not sizes:
        return
    replays, fallbacks = Counter[str](), Counter[str]()
    for num in nums:
        size = next((size for size in sizes if num == size or (has_padding and num < size)), None)
        if size is not None:
            replays[str(size)] += 1
        else:
            fallbacks["size" if num > sizes[-1] else "padding"] += 1
    wrong.compare(f"{kind} steps", said.eligible_steps, len(nums))
    wrong.compare(f"{kind} replays", said.replays, replays.total())
    wrong.compare(f"{kind} replays by size", {k: v for k, v in said.replays_by_size.items() if v}, replays)
    wrong.compare(f"{kind} steps without a graph", said.fallbacks, fallbacks)
    wrong.compare(f"repairs of {kind} steps", said.repairs, {})


def _compare_tiers(said: HiCacheState, runner: ModelRunner, events: Sequence[Event], wrong: _Wrong) -> None:
    pool, size = runner.kv_pool, runner.kv_pool.page_size
    page_bytes = sum(part[1].nbytes for part in pool.parts)
    transfers = [event for event in events if isinstance(event, Transfer) and len(event.device_pages)]
    for kind, state in ((TransferKind.LOAD, said.load), (TransferKind.STORE, said.store)):
        nums = [len(event.device_pages) for event in transfers if event.kind is kind]
        _compare_transfers(kind.value, state, nums, size, page_bytes, wrong)


def compare_storage(
    said: StorageTierStats,
    record: StorageRecord,
    recorded: RecordedStorage,
    jobs: StorageJobs,
    num_kept: int,
    num_fetched: int,
) -> str:
    """The first figure of the storage that is not right, "" if all are. ``num_kept``: pages that it was to keep;
    ``num_fetched``: those that came from it. No job is left."""
    wrong = _Wrong()
    wrong.compare("pages queued for storage", (said.num_queued, said.num_prefetching), (0, 0))
    wrong.compare("pages in storage", said.written, record.num_stored)
    wrong.compare("pages not in storage", said.unwritten + said.dropped, num_kept - record.num_stored)
    # A write ends at its first failure, so pages behind it are given up and not tried.
    untried = num_kept - record.num_tried
    right = untried if record.num_failed_writes == 0 else min(said.dropped, untried)
    wrong.compare("pages dropped before storage", said.dropped, right)
    wrong.compare("writes to storage", said.num_writes, record.num_calls["set"])
    wrong.compare("crashes of storage", said.crashes, record.num_crashes)
    wrong.compare("stalls of storage", said.stalls, jobs.num_stalls)
    wrong.compare("pages that were wanted from storage and missed", said.missed, jobs.num_missed)
    wrong.compare("pages found in storage", said.found, recorded.num_found)
    wrong.compare("pages read from storage", said.fetched, num_fetched)
    read = said.fetched + said.fetched_in_vain
    # Of a batch those are in vain that lie behind a missing one.
    wrong.compare("pages read from storage, in vain or not", read, record.num_read)
    wrong.compare("prefetches by outcome", dict(said.prefetches), dict(recorded.outcomes))
    wrong.compare("prefetches out of time", said.timeouts, recorded.num_timeouts)
    return wrong.first


def _compare_transfers(
    kind: str, said: TransferState, nums: Sequence[int], page_size: int, page_bytes: int, wrong: _Wrong
) -> None:
    told = (said.num_transfers, said.num_tokens, said.num_bytes)
    wrong.compare(
        f"{kind}s, their tokens and bytes", told, (len(nums), sum(nums) * page_size, sum(nums) * page_bytes)
    )
