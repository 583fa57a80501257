"""WaitingQueue: waiting requests, in turn by HTTP body, so that a body of thousands does not delay the others."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice

from fenceline.scheduler.req import Req

# While one sample computes at least this many tokens of a prompt, the other samples of the prompt wait for it.
_MIN_SHARED_TOKENS = 32


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

    def __init__(self, page_size: int | None = None, max_of_body: int | None = None) -> None:
        """``page_size``: of the prefix cache, None if it is disabled; then no sample waits for another's prompt."""
        self._page_size = page_size
        self._max_of_body = max_of_body
        self._queues: list[_BodyQueue] = []  # sorted by precedence
        self._queue_of: dict[tuple[int, int | str], _BodyQueue] = {}
        self._num_running: Counter[int] = Counter()  # admitted requests of each body that is larger than one
        # Of each such body, the admitted requests that compute a prompt which others of it may share, by their rank and
        # the id of that prompt. Several compute one prompt if some of them ask for its logprobs, for these do not wait.
        # Some may have computed it by now. The body may have no request that waits: its next sample may not have
        # arrived yet.
        self._computing: dict[int, dict[tuple[int, int], list[Req]]] = {}
        self._num_turns = 0
        self.num_reqs = 0
        self.num_short = 0  # see ShortShare

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
        self.num_short += req.is_short

    def put_back(self, req: Req) -> None:
        """Add a request that was retracted: before the others of its body. If none of them waits, the body goes before
        the other bodies, so that newcomers cannot pass the request for ever."""
        self._queue(req, -self._num_turns - 1).reqs.appendleft(req)
        self.num_reqs += 1
        self.num_short += req.is_short

    def remove(self, req: Req) -> None:
        """Remove a request that does not wait any more."""
        assert len(req.output_ids) == req.num_kept, (
            f"{req.rid} got a token that was in flight at its retraction"
        )
        key = _key(req)
        queue = self._queue_of[key]
        queue.reqs.remove(req)
        self.num_reqs -= 1
        self.num_short -= req.is_short
        if not queue.reqs:
            del self._queue_of[key]
            del self._queues[bisect_left(self._queues, queue.precedence, key=lambda other: other.precedence)]

    def admit(self, req: Req) -> None:
        """Remove a request that has got a row. The next turn of its body comes after those of all other bodies."""
        queue = self._queue_of[_key(req)]
        self.computes(req)
        self.remove(req)
        if queue.body:
            self._num_running[queue.body] += 1
        if queue.reqs:
            del self._queues[bisect_left(self._queues, queue.precedence, key=lambda other: other.precedence)]
            self._num_turns += 1
            queue.turn = self._num_turns
            insort(self._queues, queue, key=lambda other: other.precedence)

    def release(self, req: Req) -> None:
        """Note that an admitted request has left."""
        body = req.source.body
        if body:
            self._num_running[body] -= 1
            self._note_computing(req, list(self._others_computing(req)))
            if not self._num_running[body]:
                del self._num_running[body]
                self._computing.pop(body, None)

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

    def in_turn_if_admitted(
        self, may_schedule: Callable[[Req], bool], num_shared: Callable[[Req], int]
    ) -> Iterator[Req]:
        """Like :meth:`in_turn`, as if each request had been admitted when the next one is asked for: other samples of
        its prompt, which would then wait for it, are left out. ``num_shared``: the leading tokens of a request's
        prompt whose pages are cached."""
        computed: set[tuple[int, int, int]] = set()

        def may(req: Req) -> bool:
            waits = bool(computed) and not req.scores_prompt and _sample_of(req) in computed
            return not waits and may_schedule(req)

        for req in self.in_turn(may):
            yield req
            if req.source.body and self._is_worth_waiting(req, num_shared(req)):
                computed.add(_sample_of(req))

    def _ordered(self, may_schedule: Callable[[Req], bool], max_of_body: int | None) -> Iterator[Req]:
        for _, queues in groupby(self._queues, key=lambda queue: queue.rank):
            again: deque[Iterator[Req]] = deque()
            begun: list[Iterator[Req]] = []
            for queue in queues:
                reqs: Iterator[Req] = filter(may_schedule, queue.reqs)
                num_running = self._num_running[queue.body]
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

    def newcomers(self, may_schedule: Callable[[Req], bool]) -> Iterator[Req]:
        """Yield, for each body that runs nothing, its first request that ``may_schedule``; the bodies in turn."""
        for queue in self._queues:
            if not self._num_running[queue.body]:
                req = next(filter(may_schedule, queue.reqs), None)
                if req is not None:
                    yield req

    def num_running(self, req: Req) -> int:
        """Admitted requests of ``req``'s body."""
        return self._num_running[req.source.body] or 1

    @property
    def is_shared(self) -> bool:
        """Whether some body runs more than one request."""
        return any(num > 1 for num in self._num_running.values())

    # --- samples of one prompt

    def computes(self, req: Req) -> None:
        """``req`` has just been admitted: the other samples of its prompt should wait until it is cached."""
        if req.source.body:
            self._note_computing(req, [*self._others_computing(req), req])

    def waits_for_sample(self, req: Req) -> bool:
        """Whether another sample of the same prompt computes what ``req`` would find in the cache afterwards. A request
        whose prompt is scored does not wait: it computes the prompt itself."""
        return not req.scores_prompt and any(True for _ in self._others_computing(req))

    def _others_computing(self, req: Req) -> Iterator[Req]:
        """The other requests that compute its prompt; none for a request that came alone."""
        others = self._computing.get(req.source.body, {}).get(_prompt_of(req), ())
        return (other for other in others if other is not req and self._is_computing(other))

    def _note_computing(self, req: Req, reqs: list[Req]) -> None:
        """``reqs`` compute the prompt of ``req``."""
        of_body = self._computing.setdefault(req.source.body, {})
        if reqs:
            of_body[_prompt_of(req)] = reqs
        else:
            of_body.pop(_prompt_of(req), None)

    def _is_computing(self, req: Req) -> bool:
        """Whether ``req`` is still computing its prompt, and enough whole pages of it that waiting is worthwhile."""
        is_done = req.left or req.committed_len >= len(req.prompt_ids)
        return not is_done and self._is_worth_waiting(req, req.shared_len)

    def _is_worth_waiting(self, req: Req, num_shared: int) -> bool:
        """Whether the other samples of its prompt wait if ``req`` computes it behind the ``num_shared`` leading tokens
        whose pages are cached."""
        size = self._page_size
        return (
            size is not None and (len(req.prompt_ids) - 1) // size * size - num_shared >= _MIN_SHARED_TOKENS
        )


def _prompt_of(req: Req) -> tuple[int, int]:
    return req.rank, id(req.prompt_ids)


def _sample_of(req: Req) -> tuple[int, int, int]:
    """What the samples of a prompt have in common that may wait for one another: body, rank and prompt."""
    return req.source.body, *_prompt_of(req)


def _key(req: Req) -> tuple[int, int | str]:
    return req.rank, req.source.body or req.rid
