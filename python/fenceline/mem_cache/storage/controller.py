"""StorageController: the scheduler's side of the storage tier.

The scheduler thread puts jobs in queues, drains acks once a step, and never waits for a disk. Host pages that a job
names belong to its worker until the ack. Whatever goes wrong below is a miss, or a page that is not written, and is
counted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fenceline.config.engine_config import EngineConfig
from fenceline.config.hicache import HiCacheStorageConfig, storage_key
from fenceline.config.server_args import PrefetchPolicy
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.host.host_states import HostStates
from fenceline.mem_cache.page_hash import PageFingerprint, PageKey, PageRoots, page_fingerprint
from fenceline.mem_cache.storage.backend import StorageBackend, StorageStats
from fenceline.mem_cache.storage.file_backend import FileBackend
from fenceline.mem_cache.storage.page_file import header_nbytes
from fenceline.mem_cache.storage.worker import (
    I32,
    Asked,
    Began,
    Cleared,
    ClearJob,
    Event,
    FetchJob,
    Gone,
    Job,
    Lost,
    Outcome,
    Prefetch,
    QueryJob,
    Read,
    StopFlag,
    StorageWorker,
    StoredStates,
    WriteJob,
    Wrote,
)
from fenceline.memory_order import Device, HostChannel, HostWorker
from fenceline.memory_order.stream import Points

logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20
_LOOK_EVERY_S = 0.01
_PAUSE_S = 0.001


# --- acks: what StorageController.drain returns ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """The workers are done with the host pages of a ``write``; ``num_written`` of them are in storage now."""

    handle: int
    num_written: int


@dataclass(frozen=True, slots=True)
class Found:
    """Storage has the first ``num_pages`` of the keys: call ``fetch`` with that many host pages, or fewer, or
    ``cancel``. ``num_pages`` is at least 1, or 0 if the storage of another rank has none."""

    op: Prefetch
    num_pages: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """``op.host_pages[first : first + num_pages]`` hold their KV; no worker touches them any more."""

    op: Prefetch
    first: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Done:
    """Closing ack: how ``op`` ended. ``SHORT``: storage did not return all pages that it had reported; the pages before
    the first missing one are good."""

    op: Prefetch
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The request need not wait any longer, because its time is up or storage does not answer. ``op`` continues."""

    op: Prefetch


Ack = Written | Found | Fetched | Done | TimedOut


def apply(ack: Ack) -> None:
    """Update the :class:`Prefetch` of ``ack``. The receiver of acks calls it for each of them, in order: the scheduler
    learns of storage only by acks."""
    match ack:
        case Found(op, num_pages):
            op.num_found = num_pages
        case Fetched(op, _, num_pages):
            op.num_fetched += num_pages
        case Done(op, outcome):
            op.outcome = outcome
        case TimedOut(op):
            op.timed_out = True


# --- the controller ---------------------------------------------------------------------------------


@dataclass(slots=True)
class StorageTierStats:
    """Counts of what ``drain`` has returned since the start, in pages unless named otherwise. Seconds are sums."""

    backend: StorageStats = field(default_factory=StorageStats)
    prefetches: Counter[Outcome] = field(default_factory=Counter)  # that have ended, by outcome
    num_prefetching: int = 0  # that have not ended
    timeouts: int = 0  # prefetches for which a request has stopped waiting
    found: int = 0
    fetched: int = 0
    fetched_in_vain: int = 0  # after the request had continued without them
    missed: int = 0  # wanted, but missing or unreadable, or after a page that is
    written: int = 0  # in storage now, or before
    unwritten: int = 0  # tried and not kept
    dropped: int = 0  # not tried: the queue was full, or storage does not answer
    num_queued: int = 0  # pages held for writing, at this moment
    num_writes: int = 0  # calls of the backend
    write_seconds: float = 0.0
    read_seconds: float = 0.0
    crashes: int = 0  # calls in which the backend raised
    stalls: int = 0  # times that storage has stopped answering

    @property
    def errors(self) -> dict[str, int]:
        """Why pages were not read or not written, by reason: the backend's own, what was ``dropped``, and the calls
        in which it raised (``crash``)."""
        own = {reason.value: num for reason, num in self.backend.errors.items()}
        ours = {"dropped": self.dropped, "crash": self.crashes}
        return own | {reason: num for reason, num in ours.items() if num}


class _State(StrEnum):
    """The state of a prefetch according to the events that have been processed."""

    QUERYING = "querying"  # a worker asks which pages are there
    FOUND = "found"  # the caller is to call fetch or cancel
    FETCHING = "fetching"  # a worker fills host pages, which nothing else may use


@dataclass(slots=True)
class _Progress:
    """What is known of a prefetch that has not ended. This may be more than acks have told the scheduler."""

    deadline: float  # seconds of the controller's clock, like heard_at
    state: _State = _State.QUERYING
    num_found: int = 0
    num_fetched: int = 0
    timed_out: bool = False
    heard_at: float | None = None  # when the worker that fetches it was last heard from
    is_cut: bool = False  # it was asked again, for as many pages as there was room for


class _Queue:
    """Jobs of one kind: a channel that ``num_workers`` threads read, and when these threads last sent an event. Only
    the scheduler's thread uses it."""

    def __init__(self, device: Device, name: str, num_workers: int) -> None:
        self.name = name
        self.num_workers = num_workers
        self.jobs: HostChannel[Job | None] = device.make_channel()
        self.num_jobs = 0  # put and not finished
        self.is_stalled = False
        self._heard_at = 0.0

    def put(self, job: Job, now: float) -> None:
        """Queue a job. ``now``: seconds of the controller's clock."""
        if self.num_jobs == 0:
            self._heard_at = now
        self.num_jobs += 1
        self.jobs.put(job)

    def heard(self, now: float, finished: bool) -> None:
        """Note that a worker has sent an event. ``finished``: the event says that a job is done."""
        self._heard_at = now
        self.is_stalled = False
        self.num_jobs -= finished
        assert self.num_jobs >= 0, f"storage jobs to {self.name}: a job ended twice"

    def look(self, now: float, stall_s: float) -> bool:
        """Note whether there are jobs and no event has come for ``stall_s``. True if this has just become so."""
        was_stalled = self.is_stalled
        self.is_stalled = self.num_jobs > 0 and now - self._heard_at > stall_s
        return self.is_stalled and not was_stalled

    def end(self) -> None:
        """Queue a None for each worker after all jobs; a worker ends when it receives it."""
        for _ in range(self.num_workers):
            self.jobs.put(None)


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Limits on memory and time that the storage tier may take. None stands for 8 MiB for ``batch_bytes``, and for a
    share of the host pool elsewhere."""

    batch_bytes: int | None = None  # of one call to the backend; a cancelled fetch ends after the call
    max_write_pages: int | None = None  # queued or being written; a quarter of the pool
    max_fetch_pages: int | None = None  # found or being fetched; half the pool
    max_prefetches: int = 256
    # If a worker does not answer for this long, requests no longer wait for storage, and it gets no new job.
    stall_s: float = 10.0
    clear_s: float = 30.0  # the longest that clear may block
    close_s: float = 5.0  # the longest that close may block


class StorageController:
    """Write-behind and prefetch of host pages. The scheduler calls it; only ``clear`` and ``close`` block."""

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
        states: StoredStates | None = None,
    ) -> None:
        """``num_workers``: threads that move pages, of which one writes; one more answers queries. ``timeout_s``: how
        long a request waits with policy ``timeout``. ``clock``: seconds, for time-outs and stalls. ``states``:
        None for a model without recurrent layers."""
        assert num_workers >= 2, f"one worker writes, the others read: {num_workers} are too few"
        assert backend.page_nbytes == host_pool.page_nbytes, "storage and host pool differ in what a page is"
        assert (timeout_s is not None) or policy != "timeout", "policy timeout needs a time"
        self._limits = limits = StorageLimits() if limits is None else limits
        self._policy: PrefetchPolicy = policy
        self._timeout_s = float("inf") if timeout_s is None or policy != "timeout" else timeout_s
        self._backend, self._states = backend, states
        self._clock = clock
        quarter, half = (max(1, host_pool.num_pages // n) for n in (4, 2))
        self._max_write_pages = quarter if limits.max_write_pages is None else limits.max_write_pages
        self._max_fetch_pages = half if limits.max_fetch_pages is None else limits.max_fetch_pages
        self._num_write_pages = 0
        self._num_fetch_pages = 0
        self._num_clears = 0
        self._num_gone = 0
        self._active: dict[Prefetch, _Progress] = {}  # in the order of their queries
        self._own_acks: list[Ack] = []
        # What this rank's storage has gained and lost, in order, if ``note_changes`` has been called; others take it.
        self.changes: list[Wrote | Lost] | None = None
        self._next_look = 0.0
        self._stats = StorageTierStats()
        self._num_cleared = 0
        self._stop = StopFlag()
        self._events: HostChannel[Event] = device.make_channel()
        self._writes = _Queue(device, "write", 1)
        self._queries = _Queue(device, "query", 1)
        self._fetches = _Queue(device, "fetch", num_workers - 1)
        self._queues = (self._writes, self._queries, self._fetches)
        self._workers: list[HostWorker] = []
        batch_bytes = _BATCH_BYTES if limits.batch_bytes is None else limits.batch_bytes
        batch_pages = max(1, batch_bytes // host_pool.page_nbytes)
        for queue in self._queues:
            for _ in range(queue.num_workers):
                worker = StorageWorker(
                    len(self._workers), backend, host_pool, queue.jobs, self._events, self._stop, batch_pages, states
                )
                self._workers.append(device.start_worker(f"storage-{queue.name}", worker.run))

    # --- host to storage -----------------------------------------------------------------------------

    def write(
        self, keys: Sequence[PageKey], host_pages: I32, after: Points, handle: int, state: int | None = None
    ) -> None:
        """Store ``host_pages`` [n], whose transfers end at ``after``, under ``keys``, which are consecutive pages of a
        prefix. ``state``: the slot on the host of the state after them, None for none. All must stay leased and
        unchanged until :class:`Written` names ``handle``. If the queue has not enough room, the last ones are dropped.
        """
        assert len(keys) == len(host_pages), f"{len(keys)} keys for {len(host_pages)} pages"
        assert not self._stop.is_set, "storage is closed"
        room = 0 if self._writes.is_stalled else self._max_write_pages - self._num_write_pages
        num_pages = min(len(keys), max(room, 0))
        self._stats.dropped += len(keys) - num_pages
        if num_pages == 0:
            self._own_acks.append(Written(handle, 0))
            return
        self._num_write_pages += num_pages
        state = state if num_pages == len(keys) else None
        job = WriteJob(handle, tuple(keys[:num_pages]), host_pages[:num_pages].copy(), after, state)
        self._writes.put(job, self._clock())

    # --- storage to host -----------------------------------------------------------------------------

    def query(self, op: Prefetch) -> None:
        """Ask which pages of ``op`` storage has. The answer is :class:`Found`, or a closing ack if there are none."""
        assert op not in self._active and not op.over, f"{op!r} was queried before"
        assert not self._stop.is_set, "storage is closed"
        now = self._clock()
        full = len(self._active) >= self._limits.max_prefetches
        self._active[op] = _Progress(now + self._timeout_s)
        if not op.keys:
            self._end(op, Outcome.ABSENT, self._own_acks)
            return
        if full or self._num_clears or self._queries.is_stalled or self._fetches.is_stalled:
            self._end(op, Outcome.DROPPED, self._own_acks)
            return
        self._queries.put(QueryJob(op, len(op.keys)), now)

    def fetch(self, op: Prefetch, host_pages: I32, after: Points, state: int | None = None) -> None:
        """Fill ``host_pages`` [1 .. op.num_found], leased with ``after``, with the leading pages found, and ``state``
        (if ``op.ends`` is not None, and then all pages) with the state after them. Each page
        belongs to a worker until :class:`Fetched` names it, or until the closing ack."""
        progress = self._active.get(op)
        assert progress is not None and progress.state is _State.FOUND, f"{op!r} has nothing to fetch"
        assert 1 <= len(host_pages) <= progress.num_found, f"{op!r}: {len(host_pages)} host pages"
        self._num_fetch_pages -= progress.num_found - len(host_pages)
        progress.num_found = len(host_pages)
        progress.state = _State.FETCHING
        op.host_pages = host_pages.copy()
        op.after, op.state = after, state
        job = FetchJob(op, op.keys[: len(host_pages)], op.host_pages, after, state)
        self._fetches.put(job, self._clock())

    def cancel(self, op: Prefetch) -> None:
        """No request waits for ``op`` any more. The pages fetched so far stay valid; the closing ack says when its
        other pages are free. Does nothing if ``op`` has ended."""
        progress = self._active.get(op)
        if progress is None or op.cancelled:
            return
        op.cancelled = True
        if progress.state is _State.FOUND:
            self._end(op, Outcome.CANCELLED, self._own_acks)

    def may_schedule(self, op: Prefetch) -> bool:
        """Whether the policy lets the request that waits for ``op`` be scheduled now, with the pages that have come."""
        return op.over or op.timed_out or self._policy == "best_effort"

    # --- both ----------------------------------------------------------------------------------------

    def note_changes(self) -> None:
        """Note in ``changes`` what storage gains and loses from now on."""
        self.changes = []
        if isinstance(self._backend, FileBackend):
            states = None if self._states is None else self._states.backend
            beside = [states] if isinstance(states, FileBackend) else []
            self._backend.tell_removed(self._lost, beside)

    def _lost(self, keys: Sequence[PageKey]) -> None:
        """Called by workers."""
        if keys:
            self._events.put(Lost(keys))

    @property
    def num_outstanding(self) -> int:
        """Jobs and prefetches whose last ack has not been returned yet."""
        return len(self._active) + self._writes.num_jobs + len(self._own_acks)

    def drain(self) -> list[Ack]:
        """The acks of what has happened since the last call, in order. Called once a step."""
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
        backend = self._backend.stats()
        if self._states is not None:
            backend.add(self._states.backend.stats())
        return replace(
            self._stats,
            backend=backend,
            prefetches=self._stats.prefetches.copy(),
            num_prefetching=len(self._active),
            num_queued=self._num_write_pages,
        )

    def clear(self) -> int:
        """Remove all pages of this model from storage, including those that are still queued to be written. Returns how
        many were removed. Blocks for ``limits.clear_s`` at most, then raises ``ValueError``. Storage is then cleared as
        soon as it answers, and prefetches find nothing until it has been."""
        assert not self._stop.is_set, "storage is closed"
        before = self._num_cleared
        self._num_clears += 1
        self._writes.put(ClearJob(), self._clock())
        if not self._take_until(lambda: self._num_clears == 0, self._own_acks, self._limits.clear_s):
            raise ValueError(
                "the storage does not answer: it will be emptied as soon as it does, and is not read until then"
            )
        return self._num_cleared - before

    def close(self) -> None:
        """Drop what is queued and end the threads. A thread that hangs in the backend is left behind after
        ``limits.close_s``, as a daemon. Raises the error that ended a thread early, if there was one."""
        if self._stop.is_set:
            return
        self._stop.is_set = True
        for queue in self._queues:
            queue.end()
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
                self._note_change(event)
            case Asked():
                self._take_asked(event, now, acks)
            case Began():
                self._fetches.heard(now, finished=False)
                self._active[event.op].heard_at = now
            case Read():
                self._take_read(event, now, acks)
            case Cleared():
                self._writes.heard(now, finished=True)
                self._stats.crashes += event.cost.crashed
                self._num_clears -= 1
                self._num_cleared += event.num_pages
            case Lost():
                self._note_change(event)
            case Gone():
                self._num_gone += 1
                self._workers[event.number].join()  # raises the error that ended it

    def _note_change(self, event: Wrote | Lost) -> None:
        if self.changes is not None:
            self.changes.append(event)

    def _take_wrote(self, event: Wrote, now: float, acks: list[Ack]) -> None:
        self._writes.heard(now, finished=event.last)
        self._stats.write_seconds += event.cost.seconds
        self._stats.crashes += event.cost.crashed
        self._stats.num_writes += 1
        self._stats.written += event.num_written
        self._stats.unwritten += event.num_pages - event.num_written
        self._num_write_pages -= event.num_pages
        if event.last:
            acks.append(Written(event.handle, event.total))

    def _take_asked(self, event: Asked, now: float, acks: list[Ack]) -> None:
        op, room = event.op, self._max_fetch_pages - self._num_fetch_pages
        self._queries.heard(now, finished=True)
        self._stats.crashes += event.cost.crashed
        progress = self._active[op]
        if not op.cancelled and not progress.is_cut:
            self._stats.missed += len(op.keys) - event.num_pages
        if op.ends is not None and 0 < room < event.num_pages and not self._stop.is_set:
            progress.is_cut = True
            self._queries.put(QueryJob(op, room), now)  # a part is of use only if it ends with a state
            return
        if op.cancelled:
            self._end(op, Outcome.CANCELLED, acks)
        elif event.cost.crashed:
            self._end(op, Outcome.SHORT, acks)
        elif event.num_pages == 0:
            self._end(op, Outcome.DROPPED if progress.is_cut else Outcome.ABSENT, acks)
        else:
            num_found = min(event.num_pages, room)
            if num_found == 0 or (op.ends is not None and num_found < event.num_pages):
                self._end(op, Outcome.DROPPED, acks)
                return
            progress.state, progress.num_found = _State.FOUND, num_found
            self._num_fetch_pages += num_found
            self._stats.found += num_found
            acks.append(Found(op, num_found))

    def _take_read(self, event: Read, now: float, acks: list[Ack]) -> None:
        op, progress = event.op, self._active[event.op]
        self._fetches.heard(now, finished=event.last)
        self._stats.read_seconds += event.cost.seconds
        self._stats.crashes += event.cost.crashed
        progress.heard_at = now
        if op.cancelled:
            self._stats.fetched_in_vain += event.num_pages
        elif event.num_pages:
            acks.append(Fetched(op, progress.num_fetched, event.num_pages))
            progress.num_fetched += event.num_pages
            self._stats.fetched += event.num_pages
        if event.short and not op.cancelled:
            self._stats.missed += progress.num_found - progress.num_fetched
        if event.last and op.cancelled:
            self._end(op, Outcome.CANCELLED, acks)
        elif event.last:
            self._end(op, Outcome.SHORT if event.short else Outcome.COMPLETE, acks)

    def _end(self, op: Prefetch, outcome: Outcome, acks: list[Ack]) -> None:
        self._num_fetch_pages -= self._active.pop(op).num_found
        self._stats.prefetches[outcome] += 1
        acks.append(Done(op, outcome))

    # --- time ----------------------------------------------------------------------------------------

    def _look(self, now: float, acks: list[Ack]) -> None:
        """Find the prefetches that requests need not wait for any longer. This is the only place where time has an
        effect on requests, and the effect is acks, which are inputs like all others."""
        for queue in self._queues:
            if queue.look(now, self._limits.stall_s):
                self._stats.stalls += 1
                logger.warning(
                    "The storage does not answer (%s): requests do not wait for it until it does", queue.name
                )
        if self._policy == "best_effort":
            return  # no request waits
        for op, progress in self._active.items():
            if not progress.timed_out and (now >= progress.deadline or self._is_stalled(progress, now)):
                progress.timed_out = True
                self._stats.timeouts += 1
                acks.append(TimedOut(op))

    def _is_stalled(self, progress: _Progress, now: float) -> bool:
        if progress.state is _State.QUERYING:
            return self._queries.is_stalled
        if progress.state is not _State.FETCHING:
            return False
        if progress.heard_at is None:  # no worker has begun it yet
            return self._fetches.is_stalled
        return now - progress.heard_at > self._limits.stall_s


# --- from the flags ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Storage:
    """A running storage: its controller, and the root keys, from which the keys of a namespace's pages are computed."""

    controller: StorageController
    root_key: PageRoots


def make_storage(
    device: Device,
    host_pool: HostPool,
    config: EngineConfig,
    clock: Callable[[], float] = time.monotonic,
    rank: int = 0,
    states: HostStates | None = None,
) -> Storage | None:
    """The storage that ``config`` asks for, its threads running; None if it asks for none. The caller closes it.
    ``clock``: seconds, for time-outs; a run that has to be repeatable gives one that counts its steps. ``rank``: the
    rank whose part of a page the pool holds. ``states``: those of recurrent layers on the host. Raises ``ValueError``
    with the remedy for a directory that cannot be used or holds not even one page."""
    storage = None if config.hicache is None else config.hicache.storage
    if storage is None:
        return None
    fingerprint, key = page_fingerprint(config, host_pool.layout, rank), config.server_args.hicache_storage_key
    stored = None
    if states is not None:
        of_states = replace(fingerprint, layout=states.description, page_nbytes=states.nbytes)
        stored = StoredStates(states, _backend(storage, key, of_states))
    controller = StorageController(
        device,
        host_pool,
        _backend(storage, key, fingerprint),
        config.server_args.hicache_storage_prefetch_policy,
        storage.prefetch_timeout_s,
        clock=clock,
        states=stored,
    )
    return Storage(controller, PageRoots(fingerprint))


def _backend(storage: HiCacheStorageConfig, key: str | None, fingerprint: PageFingerprint) -> FileBackend:
    secret = None if key is None else storage_key(key)
    file_nbytes = header_nbytes(secret) + fingerprint.page_nbytes
    if storage.max_bytes < file_nbytes:
        raise ValueError(
            f"--hicache-storage-size of {storage.max_bytes / 1e9:g} GB holds not even one page of {file_nbytes} bytes: "
            f"give at least {file_nbytes / 1e9:.6f}"
        )
    try:
        return FileBackend(storage.directory, fingerprint, storage.max_bytes, secret=secret)
    except ValueError as error:
        raise ValueError(f"--hicache-storage-dir: {error}") from error
