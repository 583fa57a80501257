"""StorageWorker: the thread that carries pages between host memory and the storage backend.

It reads channels and the bytes of host pages that a job lends it, and nothing else of the scheduler's; what it has done
it tells by events. Before it touches a host page it waits for the transfers that may still use it (host_page_reuse).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.storage.base import PageParts, StorageBackend, num_leading
from fenceline.mem_cache.storage.prefetch import I32, Prefetch
from fenceline.memory_order import HostChannel
from fenceline.memory_order.edges import HOST_PAGE_REUSE
from fenceline.memory_order.stream import Points

logger = logging.getLogger(__name__)
T = TypeVar("T")

_NOTHING: list[bool] = []


# --- jobs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Keep ``host_pages``, readable after ``after``, under ``keys``."""

    handle: int
    keys: tuple[PageKey, ...]
    host_pages: I32
    after: Points


@dataclass(frozen=True, slots=True)
class QueryJob:
    """Ask how many of the keys are there."""

    op: Prefetch


@dataclass(frozen=True, slots=True)
class FetchJob:
    """Fill ``host_pages``, writable after ``after``, from ``keys``, in order and until the first that is missing."""

    op: Prefetch
    keys: tuple[PageKey, ...]
    host_pages: I32
    after: Points


@dataclass(frozen=True, slots=True)
class ClearJob:
    """Remove everything."""


Job = WriteJob | QueryJob | FetchJob | ClearJob

# --- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that a batch took in the backend and waiting for transfers, and whether the backend raised."""

    call_s: float = 0.0
    edge_s: float = 0.0
    crashed: bool = False


@dataclass(frozen=True, slots=True)
class Wrote:
    """``num_pages`` of a write were tried or given up, ``num_written`` of them kept; ``total`` of the write so far."""

    handle: int
    num_pages: int
    num_written: int
    total: int
    last: bool
    cost: Cost


@dataclass(frozen=True, slots=True)
class Asked:
    """The first ``num_pages`` of the keys are there."""

    op: Prefetch
    num_pages: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class Began:
    """A worker has taken up a fetch."""

    op: Prefetch


@dataclass(frozen=True, slots=True)
class Read:
    """The next ``num_pages`` are in host memory. ``short``: the one after them is not to be had."""

    op: Prefetch
    num_pages: int
    short: bool
    last: bool
    cost: Cost


@dataclass(frozen=True, slots=True)
class Cleared:
    """``num_pages`` were removed."""

    num_pages: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class Gone:
    """Worker ``number`` has ended."""

    number: int


Event = Wrote | Asked | Began | Read | Cleared | Gone


class StopFlag:
    """Tells workers to leave what is queued. Never cleared."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False


class StorageWorker:
    """Runs jobs of one channel, one after the other, until a None."""

    def __init__(
        self,
        number: int,
        backend: StorageBackend,
        host_pool: HostPool,
        jobs: HostChannel[Job | None],
        events: HostChannel[Event],
        stop: StopFlag,
        batch_pages: int,
    ) -> None:
        self._number = number
        self._backend = backend
        self._host_pool = host_pool
        self._jobs = jobs
        self._events = events
        self._stop = stop
        self._batch_pages = batch_pages
        self._has_crashed = False

    def run(self) -> None:
        """The thread's body."""
        try:
            while (job := self._jobs.get()) is not None:
                if not self._stop.is_set:
                    self._do(job)
        finally:
            self._events.put(Gone(self._number))

    def _do(self, job: Job) -> None:
        match job:
            case WriteJob():
                self._write(job)
            case QueryJob():
                self._query(job)
            case FetchJob():
                self._fetch(job)
            case ClearJob():
                num_pages, cost = self._call(self._backend.clear, 0)
                self._events.put(Cleared(num_pages, cost))

    def _write(self, job: WriteJob) -> None:
        total, rest = 0, len(job.keys)
        edge_s = self._wait(job.after)
        for batch in self._batches(len(job.keys)):
            if self._stop.is_set:
                return
            keys, parts = job.keys[batch], self._parts(job.host_pages[batch], False)
            stored, cost = self._call(partial(self._backend.set, keys, parts), [False] * len(keys), edge_s)
            edge_s = 0.0
            total += sum(stored)
            rest -= len(keys)
            # Behind a page that is not kept no prefix reaches: what is left would be read by nobody.
            last = rest == 0 or not all(stored)
            given_up = rest if last else 0
            self._events.put(Wrote(job.handle, len(keys) + given_up, sum(stored), total, last, cost))
            if last:
                return

    def _query(self, job: QueryJob) -> None:
        if job.op.cancelled:
            self._events.put(Asked(job.op, 0, Cost()))
            return
        found, cost = self._call(partial(self._backend.exists, job.op.keys), _NOTHING)
        self._events.put(Asked(job.op, num_leading(found), cost))

    def _fetch(self, job: FetchJob) -> None:
        op, rest = job.op, len(job.keys)
        self._events.put(Began(op))
        edge_s = 0.0 if op.cancelled else self._wait(job.after)
        for batch in self._batches(len(job.keys)):
            if self._stop.is_set:
                return
            if op.cancelled:
                self._events.put(Read(op, 0, False, True, Cost(edge_s=edge_s)))
                return
            keys, parts = job.keys[batch], self._parts(job.host_pages[batch], True)
            found, cost = self._call(partial(self._backend.get, keys, parts), _NOTHING, edge_s)
            edge_s = 0.0
            num_pages = num_leading(found)
            rest -= num_pages
            short = num_pages < len(keys)
            self._events.put(Read(op, num_pages, short, short or rest == 0, cost))
            if short:
                return

    def _batches(self, num_pages: int) -> Iterator[slice]:
        for first in range(0, num_pages, self._batch_pages):
            yield slice(first, min(first + self._batch_pages, num_pages))

    def _wait(self, after: Points) -> float:
        """Until no transfer uses the pages any more. Seconds that it took."""
        started = time.perf_counter()
        for point in after:
            point.stream.synchronize_from_worker(point, HOST_PAGE_REUSE)
        return time.perf_counter() - started

    def _parts(self, host_pages: I32, write: bool) -> list[PageParts]:
        """The bytes of pages that are about to be read (for storage) or written (from it)."""
        pages = host_pages.tolist()
        what = "read of a page from storage" if write else "write of a page to storage"
        for page in pages:
            self._host_pool.host_access(page, write, what)
        return [self._host_pool.page(page) for page in pages]

    def _call(self, call: Callable[[], T], otherwise: T, edge_s: float = 0.0) -> tuple[T, Cost]:
        """What the backend answers; ``otherwise`` if it breaks its promise and raises: that costs a miss, no more."""
        started = time.perf_counter()
        try:
            answer, crashed = call(), False
        except Exception:
            answer, crashed = otherwise, True
            if not self._has_crashed:  # the others are counted
                logger.exception("The storage backend failed; what it does not give is computed")
            self._has_crashed = True
        return answer, Cost(time.perf_counter() - started, edge_s, crashed)
