"""SchedulerStats: counters, batch log lines in SGLang's style, and the state that is reported to the front end."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from fenceline.ipc.io_struct import CudaGraphState, HiCacheState, InternalState, Stage, StagesReport, TransferState
from fenceline.mem_cache.host.cache_controller import TransferCounts
from fenceline.mem_cache.storage.backend import StorageStats
from fenceline.mem_cache.storage.controller import StorageTierStats
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.model_executor.graph_runner import GraphStats
from fenceline.model_executor.step import Worker
from fenceline.scheduler.prefill import PrefillPlan
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import RequestMemory

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 1.0
_PREFILL_LOG_INTERVAL_S = 5.0
_MAX_NAMES = 8
_NO_STORAGE = StorageTierStats(backend=StorageStats())


class SchedulerStats:
    """Counts what happens. The clock is read only for rates, reports and waiting times; no decision depends on it."""

    def __init__(
        self,
        memory: RequestMemory,
        worker: Worker,
        decode_log_interval: int,
        trace: Callable[[StagesReport], None] | None = None,
    ) -> None:
        """``trace`` is told the stages of requests; None if they are not traced."""
        self._trace = trace
        self._loads: dict[Ticket, list[tuple[str, Stage]]] = {}  # that have not ended, with their requests
        self._memory = memory
        self._memory_bytes = worker.memory_bytes
        self._graphs = worker.graph_stats
        self._prefill_graphs = worker.prefill_graph_stats
        self._decode_log_interval = decode_log_interval
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_verified = 0  # decode steps, counted for each request, if the engine speculates
        self.num_accepted = 0  # draft tokens that were accepted in them
        self.num_bad_drafts = 0
        self.num_mixed_steps = 0  # with prompts and rows that decode
        self._speculates = worker.max_step_tokens > 1
        self.num_steps_by_depth: Counter[int] = Counter()  # decode steps by the depth of their draft
        self.num_retractions = 0
        self.num_aborts = 0
        self.num_computed_prompt_tokens = 0
        self._num_decode_steps = 0
        self._throughput = 0.0
        self._last_log = self._last_report = time.perf_counter()
        self._last_generated = 0
        # What the next line of prefill says: requests, and tokens since these numbers.
        self._unlogged: set[str] = set()
        self._unlogged_since, self._last_computed, self._last_cached = self._last_log, 0, 0
        self._last_fallbacks = 0

    @property
    def token_usage(self) -> float:
        """Share of the KV pool that requests use, 0 to 1. Cached pages that could be evicted do not count."""
        return self._num_used_pages / self._memory.num_pages

    @property
    def _num_used_pages(self) -> int:
        return self._memory.pages.num_leased - self._memory.tree.num_evictable_pages

    @property
    def accept_length(self) -> float:
        """Mean number of tokens that a decode step has yielded for a request, since the start; 0 before the first."""
        return 1 + self.num_accepted / self.num_verified if self.num_verified else 0.0

    def arrived(self, req: Req) -> None:
        self.num_prompt_tokens += len(req.prompt_ids)
        req.arrived_at = req.queued_since = time.perf_counter()
        if self._trace is not None:
            req.stages = []

    def verified(self, req: Req, num_accepted: int, num_drafts: int) -> None:
        """A decode step of ``req`` verified ``num_drafts`` draft tokens and accepted ``num_accepted`` of them."""
        req.num_verified += 1
        req.num_drafts += num_drafts
        req.num_accepted += num_accepted
        self.num_verified += 1
        self.num_accepted += num_accepted

    def bad_drafts(self, reqs: Sequence[Req]) -> None:
        """The draft model proposed unusable tokens for ``reqs``. They were rejected, so the output is not affected."""
        self.num_bad_drafts += len(reqs)
        for req in reqs:
            if not req.has_bad_draft:
                req.has_bad_draft = True
                logger.warning(
                    "Unusable drafts for request %s: logits are not finite, or token ids are out of range", req.rid
                )

    def prefill(self, plan: PrefillPlan, num_decodes: int, num_running: int, num_queued: int) -> None:
        """A step with prompts was launched, beside which ``num_decodes`` requests decode."""
        self.num_mixed_steps += num_decodes > 0
        self.num_cached_tokens += plan.num_cached_tokens
        self.num_computed_prompt_tokens += plan.num_new_tokens
        now = time.perf_counter()
        for req in plan.reqs:
            if req.queue_time_s is None:
                req.queue_time_s = now - req.arrived_at
            if self._trace is not None and req.stages is not None:
                self._tell_stages(self._trace, req, req.stages, plan.batch.loads, now)
        if not self._decode_log_interval or not logger.isEnabledFor(logging.INFO):
            return
        if not self._unlogged:
            self._unlogged_since = now
        self._unlogged.update(req.rid for req in plan.reqs)
        # The steps of a prompt, which are short and many on a CPU, are one line: at its end, or after a while.
        if plan.reqs == (plan.chunked,) and now - self._unlogged_since < _PREFILL_LOG_INTERVAL_S:
            return
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d",
            len(self._unlogged),
            self.num_computed_prompt_tokens - self._last_computed,
            self.num_cached_tokens - self._last_cached,
            self.token_usage,
            num_running,
            num_queued,
        )
        self._unlogged.clear()
        self._last_computed, self._last_cached = self.num_computed_prompt_tokens, self.num_cached_tokens

    def _tell_stages(
        self, trace: Callable[[StagesReport], None], req: Req, begun: list[Stage], loads: Sequence[Ticket], now: float
    ) -> None:
        """``req`` is in a prefill step, which has been launched and waits for ``loads``."""
        over: list[Stage] = []
        if req.queued_since:
            over.append(Stage("retraction" if req.num_retractions else "queue", req.queued_since, now))
            req.queued_since = 0.0
        for stage in begun:
            if stage.start:
                over.append(stage)
                continue
            stage.start = now
            for ticket in loads:
                self._loads.setdefault(ticket, []).append((req.rid, stage))
        begun.clear()
        if over:
            trace(StagesReport(rid=req.rid, stages=over))

    def loaded(self, tickets: Sequence[Ticket]) -> None:
        """The transfers ``tickets`` have ended."""
        if self._trace is not None and self._loads:
            now = time.perf_counter()
            for ticket in tickets:
                for rid, stage in self._loads.pop(ticket, ()):
                    stage.end = now
                    self._trace(StagesReport(rid=rid, stages=[stage]))

    def decode(self, depth: int) -> bool:
        """A decode step with a draft of ``depth`` was planned. Returns whether :meth:`log_decode` is due, which is the
        case after every ``decode_log_interval`` such steps."""
        self._num_decode_steps += 1
        self.num_steps_by_depth[depth] += 1
        return self._decode_log_interval > 0 and self._num_decode_steps % self._decode_log_interval == 0

    def log_decode(self, num_tokens: int, num_running: int, num_queued: int, depth: int) -> None:
        """Log the state of decoding, with the rate of generated tokens since the last such line."""
        now = time.perf_counter()
        generated = self.num_generated_tokens - self._last_generated
        self._throughput = generated / max(now - self._last_log, 1e-9)
        self._last_log, self._last_generated = now, self.num_generated_tokens
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, cuda graph: %s, "
            "gen throughput (token/s): %.2f, #queue-req: %d%s",
            num_running,
            num_tokens,
            self.token_usage,
            self._all_replayed(),
            self._throughput,
            num_queued,
            f", accept len: {self.accept_length:.2f}, draft depth: {depth}" if self._speculates else "",
        )

    def _all_replayed(self) -> bool:
        """Whether every decode step since the last log line was replayed from a graph."""
        if self._graphs is None:
            return False
        before, self._last_fallbacks = self._last_fallbacks, sum(self._graphs.fallbacks.values())
        return self._last_fallbacks == before

    def retracted(self, rids: Sequence[str], ratio: float) -> None:
        """Memory ran short and the requests ``rids`` were retracted."""
        self.num_retractions += len(rids)
        logger.warning("KV cache full: retracted %s, #new-token-ratio: %.3f", _names(rids), ratio)

    def preempted(self, rids: Sequence[str]) -> None:
        """The requests ``rids`` were retracted for others of a higher priority."""
        self.num_retractions += len(rids)
        logger.info("retracted %s for waiting requests of a higher priority", _names(rids))

    def report_is_due(self) -> bool:
        """Whether a report to the front end is due; True about once a second."""
        now = time.perf_counter()
        if now - self._last_report < _REPORT_INTERVAL_S:
            return False
        self._last_report = now
        return True

    def state(self, num_running: int, num_waiting: int, new_token_ratio: float, paused: bool) -> InternalState:
        """The present state. The arguments are values that only the scheduler knows."""
        prompt = self.num_cached_tokens + self.num_computed_prompt_tokens
        return InternalState(
            num_running_reqs=num_running,
            num_queue_reqs=num_waiting,
            num_used_tokens=self._num_used_pages * self._memory.page_size,
            num_evictable_tokens=self._memory.tree.num_evictable_pages * self._memory.page_size,
            max_total_num_tokens=self._memory.num_pages * self._memory.page_size,
            token_usage=self.token_usage,
            cache_hit_rate=self.num_cached_tokens / prompt if prompt else 0.0,
            gen_throughput=self._throughput if num_running else 0.0,
            last_gen_throughput=self._throughput,
            num_retractions=self.num_retractions,
            num_mixed_steps=self.num_mixed_steps,
            num_aborts=self.num_aborts,
            num_generated_tokens=self.num_generated_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            new_token_ratio=new_token_ratio,
            paused=paused,
            memory_bytes=self._memory_bytes,
            cuda_graphs=_graph_state(self._graphs),
            piecewise_cuda_graphs=_graph_state(self._prefill_graphs),
            hicache=_hicache_state(self._memory),
            avg_spec_accept_length=self.accept_length if self._speculates else None,
            spec_steps_by_depth=self._steps_by_depth() if self._speculates else None,
        )

    def _steps_by_depth(self) -> dict[str, int]:
        return {str(depth): num for depth, num in sorted(self.num_steps_by_depth.items())}


def _graph_state(stats: GraphStats | None) -> CudaGraphState | None:
    return None if stats is None else msgspec.convert(stats, CudaGraphState, from_attributes=True)


def _hicache_state(memory: RequestMemory) -> HiCacheState | None:
    """The state of the lower tiers of the prefix cache; None if the device is the only tier."""
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
            "device": tree.num_pages - tree.host.num_both_pages,
            "host": tree.host.num_pages - tree.host.num_both_pages,
            "both": tree.host.num_both_pages,
            "in_transit": tree.transit.num_pages,
        },
        num_locked_nodes=tree.num_locked_nodes + tree.host.num_holds,
        evicted_tokens={"device": memory.num_evicted_pages * size, "host": tree.host.num_evicted_pages * size},
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


def _names(rids: Sequence[str]) -> str:
    others = len(rids) - _MAX_NAMES
    return ", ".join(rids[:_MAX_NAMES]) + (f" and {others} more" if others > 0 else "")
