"""The workers that move pages between host memory and the storage backend: their threads, jobs, events and prefetches.

Of the scheduler's data a worker accesses only its channels and the host pages that a job names. It sends events to say
what it has done. Before it accesses a host page it waits for the transfers that may still use the page
(host_page_reuse).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.host.host_states import HostStates
from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.storage.backend import PageParts, StorageBackend, num_leading
from fenceline.memory_order import HostChannel
from fenceline.memory_order.edges import HOST_PAGE_REUSE
from fenceline.memory_order.stream import Points

logger = logging.getLogger(__name__)
I32 = npt.NDArray[np.int32]
T = TypeVar("T")

_NOTHING: list[bool] = []


# --- prefetches --------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """How a prefetch ended."""

    COMPLETE = "complete"  # every page asked for is there
    ABSENT = "absent"  # storage has no page of the prefix
    SHORT = "short"  # a page was gone, damaged or could not be read: a shorter prefix
    CANCELLED = "cancelled"  # the request did not wait for the rest
    DROPPED = "dropped"  # not tried: too many at once, storage does not answer, or is being cleared


class Prefetch:
    """The part of a waiting request's prefix that is looked for in storage. Its fields show what the acks of
    ``StorageController.drain`` have said; ``controller.apply`` updates them when an ack is processed.

    ``keys``: of the pages wanted, in order; the first is the page after those that device and host have. Pages come in
    order, so at any time ``host_pages[:num_fetched]`` hold their KV. ``ends``: for a model with recurrent layers, after
    how many of the pages there may be a state; then those found end with one, which comes to the slot ``state`` on the
    host before the pages. After ``cancel`` no further page comes. All of
    ``host_pages`` stay leased until the closing ack (:class:`Done`). The unused ones are then retired with ``after``,
    for which the worker may not have waited. The used ones keep ``after`` too: the worker has waited, but the streams
    that access them next have not.
    """

    __slots__ = (
        "after", "cancelled", "ended_at", "ends", "handle", "host_pages", "keys", "num_fetched", "num_found", "outcome",
        "state", "timed_out",
    )  # fmt: skip

    def __init__(self, handle: int, keys: Sequence[PageKey], ends: Sequence[int] | None = None) -> None:
        """``handle``: the number by which the caller knows this prefetch."""
        self.handle = handle
        self.keys = tuple(keys)
        self.ends = ends
        self.state: int | None = None  # set by ``fetch``
        self.num_found = 0  # pages that may be fetched
        self.num_fetched = 0
        self.timed_out = False
        self.outcome: Outcome | None = None  # set by the closing ack
        self.host_pages: I32 = np.empty(0, dtype=np.int32)  # set by ``fetch``, like ``after``
        self.after = Points.none()
        self.cancelled = False  # the only changing field that a worker reads; it does so between batches
        self.ended_at = 0.0  # ``time.perf_counter()`` when its end was noticed; no decision depends on it

    @property
    def over(self) -> bool:
        """Whether no worker touches ``host_pages`` any more."""
        return self.outcome is not None

    def __repr__(self) -> str:
        state = "under way" if self.outcome is None else self.outcome.value
        return f"prefetch {self.handle} ({state}, {self.num_fetched} of {self.num_found} pages)"


# --- jobs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Store ``host_pages``, which may be read after ``after``, under ``keys``, and the host's ``state`` after them, if
    there is one, under the last key."""

    handle: int
    keys: tuple[PageKey, ...]
    host_pages: I32
    after: Points
    state: int | None = None


@dataclass(frozen=True, slots=True)
class QueryJob:
    """Find out how many of the first keys are in storage, of ``most`` at most."""

    op: Prefetch
    most: int


@dataclass(frozen=True, slots=True)
class FetchJob:
    """Fill ``host_pages``, which may be written after ``after``, with the pages of ``keys``, in order, and stop at the
    first one that is missing. The slot ``state`` is filled before them; without it none is of use."""

    op: Prefetch
    keys: tuple[PageKey, ...]
    host_pages: I32
    after: Points
    state: int | None = None


@dataclass(frozen=True, slots=True)
class ClearJob:
    """Remove all pages of this model."""


Job = WriteJob | QueryJob | FetchJob | ClearJob

# --- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that a batch took in the backend, and in how many of its calls the backend raised."""

    seconds: float = 0.0
    crashed: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.crashed + other.crashed)


@dataclass(frozen=True, slots=True)
class Wrote:
    """``num_pages`` pages of a write have been tried or given up; ``num_written`` of them are stored, ``num_leading``
    of these before the first that is not. ``total`` counts the stored ones since the write began. ``last``: the write
    has ended."""

    handle: int
    num_pages: int
    num_written: int
    num_leading: int
    total: int
    last: bool
    cost: Cost


@dataclass(frozen=True, slots=True)
class Asked:
    """The first ``num_pages`` of the keys are in storage."""

    op: Prefetch
    num_pages: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class Began:
    """A worker has begun a fetch."""

    op: Prefetch


@dataclass(frozen=True, slots=True)
class Read:
    """The next ``num_pages`` are in host memory. ``short``: the next could not be read. ``last``: it has ended."""

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
class Lost:
    """The pages ``keys`` have been removed from storage."""

    keys: Sequence[PageKey]


@dataclass(frozen=True, slots=True)
class Gone:
    """Worker ``number`` has ended."""

    number: int


Event = Wrote | Asked | Began | Read | Cleared | Lost | Gone


@dataclass(frozen=True, slots=True)
class StoredStates:
    """The states on the host, and where they are kept: files of their own, each under the key of the last page before
    the state."""

    host: HostStates
    backend: StorageBackend

    def set(self, key: PageKey, slot: int) -> bool:
        return self.backend.set([key], [[self.host.piece(slot, False, "write of a state to storage")]])[0]

    def get(self, key: PageKey, slot: int) -> bool:
        return self.backend.get([key], [[self.host.piece(slot, True, "read of a state from storage")]])[0]

    def last_end(self, op: Prefetch, num_pages: int) -> int:
        """After how many of the first ``num_pages`` pages of ``op`` there is the last state, 0 for none."""
        ends = (end for end in reversed(op.ends or ()) if end <= num_pages)
        return next((end for end in ends if self.backend.exists([op.keys[end - 1]])[0]), 0)


class StopFlag:
    """Tells workers not to begin any further job. It is never cleared."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False


class StorageWorker:
    """Runs the jobs of one channel, one after the other, until it receives None."""

    def __init__(
        self,
        number: int,
        backend: StorageBackend,
        host_pool: HostPool,
        jobs: HostChannel[Job | None],
        events: HostChannel[Event],
        stop: StopFlag,
        batch_pages: int,
        states: StoredStates | None = None,
    ) -> None:
        self._states = states
        self._number = number
        self._backend = backend
        self._host_pool = host_pool
        self._jobs = jobs
        self._events = events
        self._stop = stop
        self._batch_pages = batch_pages
        self._has_crashed = False

    def run(self) -> None:
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
                if self._states is not None:
                    cost += self._call(self._states.backend.clear, 0)[1]
                self._events.put(Cleared(num_pages, cost))

    def _write(self, job: WriteJob) -> None:
        total, rest = 0, len(job.keys)
        self._wait(job.after)
        for batch in self._batches(len(job.keys)):
            if self._stop.is_set:
                return
            keys, parts = job.keys[batch], self._parts(job.host_pages[batch], False)
            stored, cost = self._call(partial(self._backend.set, keys, parts), [False] * len(keys))
            total += sum(stored)
            rest -= len(keys)
            # A prefix ends before the first page that is not stored, so later pages would never be read.
            last = rest == 0 or not all(stored)
            if self._states is not None and job.state is not None and rest == 0 and all(stored):
                cost += self._call(partial(self._states.set, job.keys[-1], job.state), False)[1]
            given_up = rest if last else 0
            num_pages, num_written = len(keys) + given_up, sum(stored)
            self._events.put(Wrote(job.handle, num_pages, num_written, num_leading(stored), total, last, cost))
            if last:
                return

    def _query(self, job: QueryJob) -> None:
        if job.op.cancelled:
            self._events.put(Asked(job.op, 0, Cost()))
            return
        found, cost = self._call(partial(self._backend.exists, job.op.keys[: job.most]), _NOTHING)
        num_pages = num_leading(found)
        if self._states is not None:
            num_pages, of_states = self._call(partial(self._states.last_end, job.op, num_pages), 0)
            cost += of_states
        self._events.put(Asked(job.op, num_pages, cost))

    def _fetch(self, job: FetchJob) -> None:
        op, rest, of_state = job.op, len(job.keys), Cost()
        self._events.put(Began(op))
        if not op.cancelled:
            self._wait(job.after)
            if self._states is not None and job.state is not None:
                there, of_state = self._call(partial(self._states.get, job.keys[-1], job.state), False)
                if not there:
                    self._events.put(Read(op, 0, True, True, of_state))
                    return
        for batch in self._batches(len(job.keys)):
            if self._stop.is_set:
                return
            if op.cancelled:
                self._events.put(Read(op, 0, False, True, of_state))
                return
            keys, parts = job.keys[batch], self._parts(job.host_pages[batch], True)
            found, cost = self._call(partial(self._backend.get, keys, parts), _NOTHING)
            num_pages = num_leading(found)
            rest -= num_pages
            short = num_pages < len(keys)
            self._events.put(Read(op, num_pages, short, short or rest == 0, cost + of_state))
            of_state = Cost()
            if short:
                return

    def _batches(self, num_pages: int) -> Iterator[slice]:
        for first in range(0, num_pages, self._batch_pages):
            yield slice(first, min(first + self._batch_pages, num_pages))

    def _wait(self, after: Points) -> None:
        """Wait until no transfer uses the pages any more."""
        for point in after:
            point.stream.synchronize_from_worker(point, HOST_PAGE_REUSE)

    def _parts(self, host_pages: I32, write: bool) -> list[PageParts]:
        """The bytes of pages that are about to be read (for storage) or written (from it)."""
        pages = host_pages.tolist()
        what = "read of a page from storage" if write else "write of a page to storage"
        for page in pages:
            self._host_pool.host_access(page, write, what)
        return [self._host_pool.page(page) for page in pages]

    def _call(self, call: Callable[[], T], otherwise: T) -> tuple[T, Cost]:
        """The result of ``call``, or ``otherwise`` if the backend raises, in spite of its contract: the pages are then
        treated as missing. Also its cost."""
        started = time.perf_counter()
        try:
            answer, crashed = call(), 0
        except Exception:
            answer, crashed = otherwise, 1
            if not self._has_crashed:  # the others are only counted
                logger.exception("The storage backend raised an error; pages that it does not return are computed")
            self._has_crashed = True
        return answer, Cost(time.perf_counter() - started, crashed)
