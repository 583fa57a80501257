"""WaitingQueue: waiting requests, in turn by HTTP body, so that a body of thousands does not delay the others."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice

from fenceline.scheduler.admission import Holdings
from fenceline.scheduler.req import Req


@dataclass(slots=True, eq=False)
class _BodyQueue:
    """The waiting requests of one HTTP body that have the same rank, in order. ``turn`` says when it is their turn."""

    body: int
    rank: int
    turn: int
    reqs: deque[Req] = field(default_factory=deque)

    @property
    def precedence(self) -> tuple[int, int]:
        """The order of the bodies: the smallest goes first."""
        return self.rank, self.turn


class WaitingQueue:
    """Waiting requests, grouped by the HTTP bodies that they came in.

    The bodies take turns: when a request is admitted, the next one of its body goes behind the first ones of all other
    bodies. Bodies that run nothing go before those that run something. A new body therefore waits for at most one
    request of each earlier body that runs nothing either, and no request waits for ever, since running ones end.
    A request that came alone is a body of one; such requests go in order of arrival.

    At most ``max_of_body`` requests of a body run, if that is given, since each makes every decode step longer.

    A better rank goes first in any case. Changes are cheap however many requests wait: only the bodies are kept in
    order, and a body moves only when its own requests change.
    """

    def __init__(self, holdings: Holdings, max_of_body: int | None = None) -> None:
        self.holdings = holdings  # of the admitted requests
        self._max_of_body = max_of_body
        self._queues: list[_BodyQueue] = []  # sorted by precedence
        self._queue_of: dict[tuple[int, int | str], _BodyQueue] = {}
        self._num_turns = 0
        self.num_reqs = 0

    def __len__(self) -> int:
        return self.num_reqs

    def __iter__(self) -> Iterator[Req]:
        """All, in the order in which they would be admitted."""
        return self._ordered(lambda req: True, None)

    # --- changes

    def add(self, req: Req) -> None:
        """Add a request that has arrived: behind those of its body, or as a new body behind the others."""
        self._queue(req, self._num_turns + 1).reqs.append(req)
        self.num_reqs += 1

    def put_back(self, req: Req) -> None:
        """Add a request that was retracted: before the others of its body. If none of them waits, the body goes before
        the other bodies, so that newcomers cannot pass the request for ever."""
        self._queue(req, -self._num_turns - 1).reqs.appendleft(req)
        self.num_reqs += 1

    def remove(self, req: Req) -> None:
        """Remove a request that does not wait any more."""
        assert len(req.output_ids) == req.num_kept, f"{req.rid} got a token that was in flight at its retraction"
        key = _key(req)
        queue = self._queue_of[key]
        queue.reqs.remove(req)
        self.num_reqs -= 1
        if not queue.reqs:
            del self._queue_of[key]
            del self._queues[bisect_left(self._queues, queue.precedence, key=lambda other: other.precedence)]

    def admit(self, req: Req) -> None:
        """Remove a request that has got a row. The next turn of its body comes after those of all other bodies."""
        queue = self._queue_of[_key(req)]
        self.remove(req)
        self.holdings.admit(req, req.in_reserve)
        if queue.reqs:
            del self._queues[bisect_left(self._queues, queue.precedence, key=lambda other: other.precedence)]
            self._num_turns += 1
            queue.turn = self._num_turns
            insort(self._queues, queue, key=lambda other: other.precedence)

    def _queue(self, req: Req, turn: int) -> _BodyQueue:
        key = _key(req)
        queue = self._queue_of.get(key)
        if queue is None:
            self._num_turns += 1
            queue = self._queue_of[key] = _BodyQueue(req.source.body, req.rank, turn)
            insort(self._queues, queue, key=lambda other: other.precedence)
        return queue

    # --- whose turn it is

    def in_turn(self, may_schedule: Callable[[Req], bool]) -> Iterator[Req]:
        """Yield the requests that ``may_schedule``, in the order in which they are admitted if all of them fit. Lazy:
        ``may_schedule`` is called as late as possible, and for no more requests than are taken."""
        return self._ordered(may_schedule, self._max_of_body)

    def _ordered(self, may_schedule: Callable[[Req], bool], max_of_body: int | None) -> Iterator[Req]:
        for _, queues in groupby(self._queues, key=lambda queue: queue.rank):
            again: deque[Iterator[Req]] = deque()
            begun: list[Iterator[Req]] = []
            for queue in queues:
                reqs: Iterator[Req] = filter(may_schedule, queue.reqs)
                num_running = self.holdings.rows.get(queue.body, 0)
                if max_of_body is not None:
                    reqs = islice(reqs, max(max_of_body - num_running, 0))
                if num_running:
                    again.append(reqs)
                    continue
                req = next(reqs, None)
                if req is not None:
                    yield req
                    if queue.body:
                        begun.append(reqs)
            again.extend(begun)
            while again:
                reqs = again.popleft()
                req = next(reqs, None)
                if req is not None:
                    yield req
                    again.append(reqs)


def _key(req: Req) -> tuple[int, int | str]:
    return req.rank, req.source.body or req.rid
