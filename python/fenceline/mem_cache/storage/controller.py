"""StorageController: the scheduler's side of the storage tier.

The scheduler thread puts jobs and drains acks, once a step, and never waits for a disk. Host pages that a job names
belong to its worker until the ack. Everything that can go wrong below costs a miss and is counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fenceline.config.server_args import PrefetchPolicy
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.storage.base import StorageBackend
from fenceline.mem_cache.storage.lane import Lane
from fenceline.mem_cache.storage.prefetch import (
    I32,
    Ack,
    Done,
    Failed,
    Fetched,
    Found,
    Outcome,
    Prefetch,
    PrefetchState,
    TimedOut,
    Written,
)
from fenceline.mem_cache.storage.tier_stats import StorageTierStats, TierTally
from fenceline.mem_cache.storage.worker import (
    Asked,
    Began,
    Cleared,
    ClearJob,
    Cost,
    Event,
    FetchJob,
    Gone,
    QueryJob,
    Read,
    StopFlag,
    StorageWorker,
    WriteJob,
    Wrote,
)
from fenceline.memory_order import Device, HostChannel, HostWorker
from fenceline.memory_order.stream import Points

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.01
_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """How much the storage tier may hold up. None: a share of the host pool."""

    batch_bytes: int = 8 << 20  # of one call to the backend: how long a cancelled fetch goes on
    max_write_pages: int | None = None  # queued or being written; a quarter of the pool
    max_fetch_pages: int | None = None  # found or being fetched; half the pool
    max_prefetches: int = 256
    stall_s: float = 10.0  # without a sign of a worker: nobody waits for storage any more, nothing is put
    clear_s: float = 30.0  # that clear may block
    close_s: float = 5.0  # that close may block


class StorageController:
    """Write-behind and prefetch of host pages. Every method is the scheduler thread's, and none but ``clear`` and
    ``close`` blocks."""

    def __init__(
        self,
        device: Device,
        host_pool: HostPool,
        backend: StorageBackend,
        policy: PrefetchPolicy,
        timeout_s: float | None,
        num_workers: int = 2,
        limits: StorageLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``num_workers``: threads that move pages, of which one writes; one more answers queries. ``timeout_s``: of
        policy ``timeout``. ``clock``: seconds, of timeouts and figures."""
        assert num_workers >= 2, f"one worker writes, the others read: {num_workers} are too few"
        assert backend.page_nbytes == host_pool.page_nbytes, "storage and host pool differ in what a page is"
        assert (timeout_s is not None) or policy != "timeout", "policy timeout needs a time"
        self._limits = limits = StorageLimits() if limits is None else limits
        self._policy: PrefetchPolicy = policy
        self._timeout_s = float("inf") if timeout_s is None or policy != "timeout" else timeout_s
        self._backend = backend
        self._clock = clock
        quarter, half = (max(1, host_pool.num_pages // n) for n in (4, 2))
        self._max_write_pages = quarter if limits.max_write_pages is None else limits.max_write_pages
        self._max_fetch_pages = half if limits.max_fetch_pages is None else limits.max_fetch_pages
        self._num_write_pages = 0
        self._num_fetch_pages = 0
        self._num_clears = 0
        self._num_gone = 0
        self._active: dict[Prefetch, None] = {}  # in order of their queries
        self._own_acks: list[Ack] = []
        self._next_look = 0.0
        self._tally = TierTally()
        self._stop = StopFlag()
        self._events: HostChannel[Event] = device.make_channel()
        self._writes = Lane(device, "write", 1)
        self._queries = Lane(device, "query", 1)
        self._fetches = Lane(device, "fetch", num_workers - 1)
        self._lanes = (self._writes, self._queries, self._fetches)
        self._workers: list[HostWorker] = []
        batch_pages = max(1, limits.batch_bytes // host_pool.page_nbytes)
        for lane in self._lanes:
            for _ in range(lane.num_workers):
                worker = StorageWorker(
                    len(self._workers), backend, host_pool, lane.jobs, self._events, self._stop, batch_pages
                )
                self._workers.append(device.start_worker(f"storage-{lane.name}", worker.run))

    # --- host to storage -----------------------------------------------------------------------------

    def write(self, keys: Sequence[PageKey], host_pages: I32, after: Points, handle: int) -> None:
        """Keep ``host_pages`` [n], whose transfers end at ``after``, under ``keys``, a piece of a prefix in order.

        They must stay leased and unchanged until :class:`Written` names ``handle``. What the queue has no room for is
        dropped, from the end."""
        assert len(keys) == len(host_pages), f"{len(keys)} keys for {len(host_pages)} pages"
        assert not self._stop.is_set, "storage is closed"
        room = 0 if self._writes.is_stalled else self._max_write_pages - self._num_write_pages
        num_pages = min(len(keys), max(room, 0))
        self._tally.counts["dropped"] += len(keys) - num_pages
        if num_pages == 0:
            self._own_acks.append(Written(handle, 0))
            return
        self._num_write_pages += num_pages
        job = WriteJob(handle, tuple(keys[:num_pages]), host_pages[:num_pages].copy(), after)
        self._writes.put(job, self._clock())

    # --- storage to host -----------------------------------------------------------------------------

    def query(self, op: Prefetch) -> None:
        """Ask which pages of ``op`` are there: :class:`Found`, or a closing ack if it comes to nothing."""
        assert op.state is PrefetchState.NEW, f"{op!r} was queried before"
        assert not self._stop.is_set, "storage is closed"
        op.started_at = now = self._clock()
        op.deadline = now + self._timeout_s
        full = len(self._active) >= self._limits.max_prefetches
        self._active[op] = None
        if not op.keys:
            self._end(op, Outcome.ABSENT, now, self._own_acks)
            return
        if full or self._num_clears or self._queries.is_stalled or self._fetches.is_stalled:
            self._end(op, Outcome.DROPPED, now, self._own_acks)
            return
        op.state = PrefetchState.QUERYING
        self._queries.put(QueryJob(op), now)

    def fetch(self, op: Prefetch, host_pages: I32, after: Points) -> None:
        """Fill ``host_pages`` [1 .. op.num_found], leased with ``after``, with the leading pages found.

        They belong to a worker until the closing ack, but for those that :class:`Fetched` names."""
        assert op.state is PrefetchState.FOUND, f"{op!r} has nothing to fetch"
        assert 1 <= len(host_pages) <= op.num_found, f"{op!r}: {len(host_pages)} host pages"
        self._num_fetch_pages -= op.num_found - len(host_pages)
        op.num_found = len(host_pages)
        op.host_pages = host_pages.copy()
        op.after = after
        op.state = PrefetchState.FETCHING
        job = FetchJob(op, op.keys[: op.num_found], op.host_pages, after)
        self._fetches.put(job, self._clock())

    def cancel(self, op: Prefetch) -> None:
        """Nobody waits for ``op`` any more. What it has fetched until now stays good; the closing ack tells when its
        other pages are free. Nothing happens to one that is over."""
        if op.over or op.cancelled:
            return
        op.cancelled = True
        if op.state is PrefetchState.FOUND:
            self._end(op, Outcome.CANCELLED, self._clock(), self._own_acks)

    def may_schedule(self, op: Prefetch) -> bool:
        """Whether the policy lets the request that waits for ``op`` be scheduled now, with what is there."""
        return op.over or op.timed_out or self._policy == "best_effort"

    # --- both ----------------------------------------------------------------------------------------

    @property
    def num_outstanding(self) -> int:
        """Jobs and prefetches of which an ack is still to come."""
        return len(self._active) + self._writes.num_jobs + len(self._own_acks)

    def drain(self) -> list[Ack]:
        """What has happened since the last call, in the order in which it did. Once a step."""
        acks, self._own_acks = self._own_acks, []
        if not self._active and not self._writes.num_jobs:
            return acks
        now = self._clock()
        while (event := self._events.poll()) is not None:
            self._take(event, now, acks)
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            self._look(now, acks)
        return acks

    def stats(self) -> StorageTierStats:
        """Counts since the start."""
        return self._tally.snapshot(self._backend.stats(), len(self._active), self._num_write_pages)

    def clear(self) -> int:
        """Empty storage of this model, whatever is still queued for it included. Returns how many pages were removed.

        Blocks for ``limits.clear_s`` at most, then raises ``ValueError``: storage is cleared all the same as soon as it
        answers, and prefetches find nothing until it is."""
        assert not self._stop.is_set, "storage is closed"
        before = self._tally.counts["cleared"]
        self._num_clears += 1
        self._writes.put(ClearJob(), self._clock())
        if not self._take_until(lambda: self._num_clears == 0, self._own_acks, self._limits.clear_s):
            raise ValueError(
                "the storage does not answer: it will be emptied as soon as it does, and is not read until then"
            )
        return self._tally.counts["cleared"] - before

    def close(self) -> None:
        """Leave what is queued, end the threads. One that hangs in the backend is left behind after ``limits.close_s``:
        it is a daemon. Raises what ended a thread before its time."""
        if self._stop.is_set:
            return
        self._stop.is_set = True
        for lane in self._lanes:
            lane.send_home()
        if not self._take_until(lambda: self._num_gone == len(self._workers), [], self._limits.close_s):
            num_left = len(self._workers) - self._num_gone
            logger.warning("The storage does not answer: %d of its threads are left behind", num_left)

    def _take_until(self, ready: Callable[[], bool], acks: list[Ack], timeout_s: float) -> bool:
        """Block until ``ready``; False if that takes longer than ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            event = self._events.poll()
            if event is not None:
                self._take(event, self._clock(), acks)
            elif time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
            else:
                return False
        return True

    # --- events --------------------------------------------------------------------------------------

    def _take(self, event: Event, now: float, acks: list[Ack]) -> None:
        match event:
            case Wrote():
                self._take_wrote(event, now, acks)
            case Asked():
                self._take_asked(event, now, acks)
            case Began():
                self._fetches.heard(now, finished=False)
                event.op.heard_at = now
            case Read():
                self._take_read(event, now, acks)
            case Cleared():
                self._writes.heard(now, finished=True)
                self._charge("write", event.cost)
                self._num_clears -= 1
                self._tally.counts["cleared"] += event.num_pages
            case Gone():
                self._num_gone += 1
                self._workers[event.number].join()  # raises what it died of

    def _take_wrote(self, event: Wrote, now: float, acks: list[Ack]) -> None:
        self._writes.heard(now, finished=event.last)
        self._charge("write", event.cost)
        self._tally.counts["num_writes"] += 1
        self._tally.counts["written"] += event.num_written
        self._tally.counts["unwritten"] += event.num_pages - event.num_written
        self._num_write_pages -= event.num_pages
        if event.last:
            acks.append(Written(event.handle, event.total))

    def _take_asked(self, event: Asked, now: float, acks: list[Ack]) -> None:
        op = event.op
        self._queries.heard(now, finished=True)
        self._charge("query", event.cost)
        if not op.cancelled:
            self._tally.counts["missed"] += len(op.keys) - event.num_pages
        if op.cancelled:
            self._end(op, Outcome.CANCELLED, now, acks)
        elif event.cost.crashed:
            self._end(op, Outcome.SHORT, now, acks)
        elif event.num_pages == 0:
            self._end(op, Outcome.ABSENT, now, acks)
        else:
            op.num_found = min(event.num_pages, self._max_fetch_pages - self._num_fetch_pages)
            if op.num_found == 0:
                self._end(op, Outcome.DROPPED, now, acks)
                return
            op.state = PrefetchState.FOUND
            self._num_fetch_pages += op.num_found
            self._tally.counts["found"] += op.num_found
            acks.append(Found(op, op.num_found))

    def _take_read(self, event: Read, now: float, acks: list[Ack]) -> None:
        op = event.op
        self._fetches.heard(now, finished=event.last)
        self._charge("read", event.cost)
        op.heard_at = now
        self._tally.counts["num_reads"] += 1
        if op.cancelled:
            self._tally.counts["fetched_in_vain"] += event.num_pages
        elif event.num_pages:
            acks.append(Fetched(op, op.num_fetched, event.num_pages))
            op.num_fetched += event.num_pages
            self._tally.counts["fetched"] += event.num_pages
        if event.short and not op.cancelled:
            self._tally.counts["missed"] += op.num_found - op.num_fetched
        if event.last and op.cancelled:
            self._end(op, Outcome.CANCELLED, now, acks)
        elif event.last:
            self._end(op, Outcome.SHORT if event.short else Outcome.COMPLETE, now, acks)

    def _end(self, op: Prefetch, outcome: Outcome, now: float, acks: list[Ack]) -> None:
        self._num_fetch_pages -= op.num_found
        op.state = PrefetchState.OVER
        op.outcome = outcome
        del self._active[op]
        self._tally.outcomes[outcome] += 1
        self._tally.seconds["prefetch"] += now - op.started_at
        acks.append(Failed(op) if outcome is Outcome.SHORT else Done(op))

    def _charge(self, call: str, cost: Cost) -> None:
        self._tally.seconds[call] += cost.call_s
        self._tally.seconds["edge"] += cost.edge_s
        self._tally.counts["crashes"] += cost.crashed

    # --- time ----------------------------------------------------------------------------------------

    def _look(self, now: float, acks: list[Ack]) -> None:
        """Who need not wait any longer. The wall clock enters here alone, as acks: inputs like the others."""
        for lane in self._lanes:
            if lane.look(now, self._limits.stall_s):
                self._tally.counts["stalls"] += 1
                logger.warning(
                    "The storage does not answer (%s): nobody waits for it until it does", lane.name
                )
        if self._policy == "best_effort":
            return  # nobody waits
        for op in self._active:
            if not op.timed_out and (now >= op.deadline or self._is_stalled(op, now)):
                op.timed_out = True
                self._tally.counts["timeouts"] += 1
                acks.append(TimedOut(op))

    def _is_stalled(self, op: Prefetch, now: float) -> bool:
        if op.state is PrefetchState.QUERYING:
            return self._queries.is_stalled
        if op.state is not PrefetchState.FETCHING:
            return False
        if op.heard_at is None:  # its turn has not come
            return self._fetches.is_stalled
        return now - op.heard_at > self._limits.stall_s
