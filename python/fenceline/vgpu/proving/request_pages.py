"""What requests get from their memory (``RequestMemory``) and give back, followed call by call.

A step waits for all Points with which memory of its requests was leased. A page-table row is written once for each
change of its pages, never again. What was found for a waiting request is found again only if the tree has changed. A
request that comes back computes no token whose KV was kept for it. Nobody waits for pages from storage on behalf of a
request that runs, has left, or may not use them any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fenceline.memory_order import Points
from fenceline.memory_order.stream import Point
from fenceline.model_executor.step import StepBatch
from fenceline.scheduler.req import Prefix, QueuedMatch, Req
from fenceline.scheduler.request_memory import Remap
from fenceline.scheduler.scheduler import Scheduler
from fenceline.vgpu.proving.events import around


class RequestPages:
    """Follows the memory of ``scheduler``. ``wrong``: what was given or taken wrongly."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.wrong: list[str] = []
        self._memory = memory = scheduler.memory
        self._owed: list[Point] = []  # of memory that the next step is the first to use
        self._queued: QueuedMatch | None = None
        self._num_stale = 0
        self._fetching: list[Any] = []  # prefetches that are to end
        self._forgotten: list[Req] = []
        self._old: set[int] = set()  # prefetches of prefixes that were asked for under other weights
        self._settled: int | None = None  # the prefetch of which pages have just arrived
        around(memory, "admit", before=self._admits, after=self._admitted)
        around(memory, "grow", after=lambda got, req, num: self._owes(got[1]))
        around(scheduler, "launch", before=self._launches)
        around(memory, "match", before=self._looks, after=self._found)
        around(memory, "cache_prompt", after=self._cached)
        around(memory, "release", before=self._note_fetch, after=lambda *args: self._check_fetches())
        around(memory, "forget", before=self._forgets, after=lambda *args: self._forgot())
        tiers = memory.tiers
        self._storage = None if tiers is None else tiers.storage
        if tiers is not None and self._storage is not None:
            around(self._storage, "_settle", before=self._settles)
            around(tiers.tree, "insert_host", before=self._inserts)

    def _owes(self, after: Points) -> None:
        self._owed += after

    def _admits(self, req: Req, prefix: Prefix) -> None:
        self._note_fetch(req)
        known = prefix.match.num_tokens + prefix.match.num_host_tokens
        tail, limit = req.tail, req.num_tokens - 1
        if req.scores_prompt:
            limit = min(limit, req.source.logprob_start_len)
        is_next = tail is not None and known <= tail.num_tokens < known + self._memory.page_size
        right = min(tail.num_tokens, limit) if tail is not None and is_next else known
        self._check(
            prefix.num_tokens == right,
            f"{req.rid} is to compute all but {prefix.num_tokens}, {right} are kept",
        )

    def _admitted(self, after: Points, req: Req, prefix: Prefix) -> None:
        self._owes(after)
        self._check_fetches()

    def _launches(self, batch: StepBatch, reqs: Sequence[Req]) -> None:
        for point in self._owed:
            is_covered = point.passed or any(
                other.stream is point.stream and other.serial >= point.serial for other in batch.after
            )
            self._check(
                is_covered, f"a step does not wait for {point.stream.name.value}, which uses its memory"
            )
        self._owed = []

    def _looks(self, req: Req) -> None:
        self._queued = req.queued_match

    def _found(self, prefix: Prefix, req: Req) -> None:
        queued, self._queued = self._queued, None
        if queued is not None and prefix is not queued.prefix:
            # Nodes were added, or those that it had have moved.
            self._num_stale += queued.num_created == self._memory.tree.num_created

    def _cached(self, remap: Remap | None, req: Req) -> None:
        size = self._memory.page_size
        shared = (
            [] if req.node is None else [page for node in req.node.path() for page in node.pages.tolist()]
        )
        mine = req.pages[: req.shared_len // size].tolist()
        self._check(mine == shared, f"{req.rid} shares pages {mine}, the tree has {shared}")
        if remap is not None:
            first, pages = remap.first_column, remap.pages.tolist()
            is_right = bool(pages) and mine[first : first + len(pages)] == pages
            self._check(is_right, f"{req.rid} moves onto {pages} from column {first} on, of {mine}")

    def _note_fetch(self, req: Req) -> None:
        self._fetching = [] if req.prefetch is None else [req.prefetch]

    def _check_fetches(self) -> None:
        for op in self._fetching:
            # One that has ended is not cancelled, although the scheduler may learn of its end later.
            recorded: Any = None if self._storage is None else self._storage._controller
            goes_on = op in recorded._controller._active and not op.over and not op.cancelled
            self._check(not goes_on, "pages are fetched for a request that does not wait for them")
        self._fetching = []

    def _forgets(self, waiting: Iterable[Req]) -> None:
        self._forgotten = list(waiting)
        self._fetching = [req.prefetch for req in self._forgotten if req.prefetch is not None]

    def _forgot(self) -> None:
        self._check_fetches()
        for req in self._forgotten:
            kept = [req.tail, req.prefetch, req.queued_match]
            self._check(kept == [None] * 3, f"{req.rid} keeps {kept}, of weights that have been replaced")
        self._forgotten = []
        if self._storage is not None:
            self._old = set(self._storage._wanted)

    def _settles(self, op: Any, num_pages: int) -> None:
        self._settled = op.handle

    def _inserts(self, *args: Any, **kwargs: Any) -> None:
        self._check(
            self._settled not in self._old, "the tree is given pages that other weights have computed"
        )

    def compare(self) -> None:
        """At the end of a run: the figures."""
        said, right = self._memory.recomputes, {"queued_match": self._num_stale, "page_table": 0}
        self._check(said == right, f"{said} values were computed again, {right} are right")
        behind = self._memory.tables._behind
        self._check(not behind, f"rows {sorted(behind)} are said to be behind, and nobody has them")

    def _check(self, holds: bool, text: str) -> None:
        if not holds and len(self.wrong) < 5:
            self.wrong.append(f"memory of requests: {text}")
