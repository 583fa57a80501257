"""What must come of the jobs that storage is given, by what its workers have said.

The record does what docs/storage.md says of the controller: how much may be held for writing and fetched at once, how a
prefetch ends, when storage counts as not answering, and which acks the scheduler gets. It keeps every word of the
workers and no counts; each answer of the controller is compared with what follows from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.storage.controller import (
    Ack,
    Done,
    Fetched,
    Found,
    StorageController,
    TimedOut,
    Written,
)
from fenceline.mem_cache.storage.worker import (
    I32,
    Asked,
    Began,
    Cleared,
    Event,
    FetchJob,
    Job,
    Outcome,
    Prefetch,
    QueryJob,
    Read,
    WriteJob,
    Wrote,
)
from fenceline.memory_order import Points
from fenceline.vgpu.proving.events import around

# Seconds without news after which storage counts as stalled: more than five steps of the loop and less than six, since
# a step takes 0.01 s.
_SHORT_PATIENCE_S = 0.055
_LOOK_S = 0.01  # seconds after which the time is compared again


@dataclass(slots=True)
class _Queue:
    """The jobs of one kind of workers: how many are open, and since when nothing has been heard of them."""

    since: float = 0.0
    num_open: int = 0
    is_stalled: bool = False

    def put(self, now: float) -> None:
        self.since = now if self.num_open == 0 else self.since
        self.num_open += 1

    def heard(self, now: float, ends: bool) -> None:
        self.since, self.is_stalled = now, False
        self.num_open -= ends


@dataclass(slots=True)
class _Open:
    """A prefetch that has not ended."""

    asked_at: float
    num_found: int = 0  # pages that the scheduler was told of
    num_wanted: int | None = None  # of these, the pages for which it has given host pages
    came: list[int] = field(default_factory=list)  # pages that each read has brought
    heard_at: float | None = None  # when the worker that fetches it was last heard of
    timed_out: bool = False

    @property
    def num_pages(self) -> int:
        return self.num_found if self.num_wanted is None else self.num_wanted


class StorageJobs:
    """Compares what ``controller`` does with what it must do. ``wrong``: the differences. ``num_missed``: pages that
    were wanted and did not come; ``num_stalls``: how often workers have stopped answering."""

    def __init__(self, controller: StorageController, num_host_pages: int, bad_days: int | None) -> None:
        """The controller has not been asked for anything yet. With ``bad_days``, a seed, storage counts as not
        answering after a few steps, and in half of these runs few pages are written or fetched at once."""
        limits = controller._limits
        if bad_days is not None:
            limits = controller._limits = replace(limits, stall_s=_SHORT_PATIENCE_S)
        if bad_days is not None and bad_days % 2 == 0:
            limits = controller._limits = replace(
                limits, max_write_pages=3, max_fetch_pages=3, max_prefetches=2
            )
            controller._max_write_pages = controller._max_fetch_pages = 3
        self.wrong: list[str] = []
        self.num_missed = self.num_stalls = self.num_polls = 0
        self._controller, self._limits = controller, limits
        self._most_written = limits.max_write_pages or max(num_host_pages // 4, 1)
        self._most_fetched = limits.max_fetch_pages or max(num_host_pages // 2, 1)
        self._due: list[Ack] = []  # acks that the scheduler must get next
        self._open: dict[Prefetch, _Open] = {}
        self._held: dict[int, int] = {}  # pages that each write still holds, by its handle
        self._stored: dict[int, int] = {}  # pages of it that are stored
        self._num_clears = self._num_gone = 0
        self._queues = {"write": _Queue(), "query": _Queue(), "fetch": _Queue()}
        self._handles = {"write": 0, "prefetch": 0}
        self._now = self._looked_at = 0.0
        self._was_idle = True
        self._put: list[Job | None] = []
        # One thread writes, one answers queries, and one reads.
        self._check(len(controller._workers) == 3, f"storage has {len(controller._workers)} threads, not 3")
        clock = controller._clock

        def noted_clock() -> float:
            self._now = clock()
            return self._now

        controller._clock = noted_clock
        for queue in controller._queues:
            around(queue.jobs, "put", before=self._put.append)
        around(controller._events, "poll", after=self._hears)
        around(controller, "write", before=self._begin, after=self._written)
        around(controller, "query", before=self._begin, after=self._queried)
        around(controller, "fetch", before=self._begin, after=self._fetched)
        around(controller, "cancel", before=self._cancels, after=lambda *args: self._compare_outstanding())
        around(controller, "clear", before=self._clears)
        # It always answers in time, so whoever blocks on it hears of it.
        around(
            controller, "_take_until", after=lambda answers, *args: self._check(answers, "no answer is heard")
        )
        around(controller, "drain", before=self._drains, after=self._drained)

    # --- what the scheduler asks

    def _begin(self, *args: object) -> None:
        self._put.clear()

    def _written(
        self, result: None, keys: Sequence[PageKey], host_pages: I32, after: Points, handle: int
    ) -> None:
        """At most a quarter of the host's pages are held for writing, none if storage does not answer."""
        self._number("write", handle)
        queue = self._queues["write"]
        room = 0 if queue.is_stalled else self._most_written - sum(self._held.values())
        num_pages = max(0, min(room, len(keys)))
        put = [list(job.keys) for job in self._put if isinstance(job, WriteJob)]
        right = [list(keys)[:num_pages]] if num_pages else []
        self._check(
            put == right, f"{[len(keys) for keys in put]} pages are to be written, {num_pages} are right"
        )
        if num_pages:
            queue.put(self._now)
            self._held[handle], self._stored[handle] = num_pages, 0
        else:
            self._due.append(Written(handle, 0))
        self._compare_outstanding()

    def _queried(self, result: None, op: Prefetch) -> None:
        """At most so many prefetches at once, and none while storage is cleared or does not answer."""
        self._number("prefetch", op.handle)
        is_full = len(self._open) >= self._limits.max_prefetches
        is_away = self._num_clears or any(self._queues[name].is_stalled for name in ("query", "fetch"))
        self._open[op] = _Open(self._now)
        is_asked = any(isinstance(job, QueryJob) and job.op is op for job in self._put)
        right = bool(op.keys) and not is_full and not is_away
        self._check(is_asked == right, f"{op!r} is {'' if is_asked else 'not '}asked for")
        if right:
            self._queues["query"].put(self._now)
        else:
            self._ends(op, Outcome.DROPPED if op.keys else Outcome.ABSENT)
        self._compare_outstanding()

    def _fetched(self, result: None, op: Prefetch, host_pages: I32, after: Points) -> None:
        jobs = [job for job in self._put if isinstance(job, FetchJob)]
        right = len(jobs) == 1 and jobs[0].keys == op.keys[: len(host_pages)]
        self._check(
            right and jobs[0].host_pages.tolist() == host_pages.tolist(), f"{op!r} fetches other pages"
        )
        job = self._open.get(op)
        self._check(job is not None, f"{op!r} is fetched, and it has ended")
        if job is not None:
            job.num_wanted = len(host_pages)
        self._queues["fetch"].put(self._now)

    def _cancels(self, op: Prefetch) -> None:
        job = self._open.get(op)
        if job is not None and not op.cancelled and job.num_found and job.num_wanted is None:
            self._ends(op, Outcome.CANCELLED)

    def _clears(self) -> None:
        self._num_clears += 1
        self._queues["write"].put(self._now)

    def _number(self, kind: str, handle: int) -> None:
        """Ranks tell each other of jobs by their numbers, so these go up by one everywhere."""
        right = self._handles[kind] = self._handles[kind] + 1
        self._check(handle == right, f"a {kind} is number {handle}, {right} is right")

    # --- what the workers say

    def _hears(self, event: Event | None) -> None:
        self.num_polls += 1
        match event:
            case Wrote():
                self._hears_of_write(event)
            case Asked():
                self._hears_answer(event)
            case Began():
                self._queues["fetch"].heard(self._now, ends=False)
                self._open[event.op].heard_at = self._now
            case Read():
                self._hears_of_read(event)
            case Cleared():
                self._queues["write"].heard(self._now, ends=True)
                self._num_clears -= 1

    def _hears_of_write(self, event: Wrote) -> None:
        self._queues["write"].heard(self._now, ends=event.last)
        if event.handle not in self._held:
            self._check(False, f"write {event.handle} was not to be begun")
            return
        self._held[event.handle] -= event.num_pages
        self._stored[event.handle] += event.num_written
        if event.last:
            left = self._held.pop(event.handle)
            self._check(left == 0, f"write {event.handle} ends with {left} pages untold")
            self._due.append(Written(event.handle, self._stored.pop(event.handle)))

    def _hears_answer(self, event: Asked) -> None:
        op, job = event.op, self._open.get(event.op)
        if job is None:
            self._check(False, f"{op!r} was not to be asked for")
            return
        self._queues["query"].heard(self._now, ends=True)
        if op.cancelled:
            self._ends(op, Outcome.CANCELLED)
            return
        self.num_missed += len(op.keys) - event.num_pages
        room = self._most_fetched - sum(other.num_pages for other in self._open.values())
        if event.cost.crashed:
            self._ends(op, Outcome.SHORT)
        elif event.num_pages == 0:
            self._ends(op, Outcome.ABSENT)
        elif room <= 0:
            self._check(room == 0, f"{-room} pages too many are fetched at once")
            self._ends(op, Outcome.DROPPED)
        else:
            job.num_found = min(room, event.num_pages)
            self._due.append(Found(op, job.num_found))

    def _hears_of_read(self, event: Read) -> None:
        op, job = event.op, self._open[event.op]
        self._queues["fetch"].heard(self._now, ends=event.last)
        job.heard_at = self._now
        if not op.cancelled:
            if event.num_pages:
                self._due.append(Fetched(op, sum(job.came), event.num_pages))
            job.came.append(event.num_pages)
            if event.last:
                self.num_missed += job.num_pages - sum(job.came)
        if event.last:
            whole = Outcome.COMPLETE if sum(job.came) == job.num_pages else Outcome.SHORT
            self._ends(op, Outcome.CANCELLED if op.cancelled else whole)

    def _ends(self, op: Prefetch, outcome: Outcome) -> None:
        del self._open[op]
        self._due.append(Done(op, outcome))

    # --- what the scheduler gets

    def _drains(self) -> None:
        self._was_idle = not self._open and not self._queues["write"].num_open

    def _drained(self, acks: Sequence[Ack]) -> None:
        if not self._was_idle and self._now >= self._looked_at + _LOOK_S:
            self._looked_at = self._now
            self._look(self._now)
        due, self._due = self._due, []
        self._check(list(acks) == due, f"{list(acks)} is said to have happened, {due} has")
        self._compare_outstanding()

    def _look(self, now: float) -> None:
        """Nobody waits longer than the policy allows, nor for workers of which nothing is heard."""
        for queue in self._queues.values():
            is_stalled = queue.num_open > 0 and now - queue.since > self._limits.stall_s
            self.num_stalls += is_stalled and not queue.is_stalled
            queue.is_stalled = is_stalled
        if self._controller._policy == "best_effort":
            return
        for op, job in self._open.items():
            is_late = now >= job.asked_at + self._controller._timeout_s
            if job.num_found == 0:
                is_away = self._queues["query"].is_stalled
            elif job.num_wanted is None:
                is_away = False
            elif job.heard_at is None:
                is_away = self._queues["fetch"].is_stalled
            else:
                is_away = now - job.heard_at > self._limits.stall_s
            if (is_late or is_away) and not job.timed_out:
                job.timed_out = True
                self._due.append(TimedOut(op))

    def _compare_outstanding(self) -> None:
        """Something is outstanding as long as a job has not ended or the scheduler has not been told."""
        num = len(self._open) + len(self._held) + self._num_clears + len(self._due)
        said = self._controller.num_outstanding
        self._check(said == num, f"{said} jobs are said to be outstanding, {num} are")

    def _check(self, holds: bool, text: str) -> None:
        if not holds and len(self.wrong) < 5:
            self.wrong.append(f"storage's jobs: {text}")
