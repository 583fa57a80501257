"""WaitingQueue: the requests that wait, and whose turn it is, so that none waits for another body's thousands."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from fenceline.scheduler.req import Req

# A prompt of which at least this many tokens are being computed for one sample is waited for by the others.
_MIN_SHARED_TOKENS = 32


@dataclass(slots=True, eq=False)
class _Line:
    """The waiting requests of one body that have the same rank, in their order, and when it is their turn."""

    body: int
    rank: int
    turn: int
    reqs: deque[Req] = field(default_factory=deque)
    # Requests that have been admitted from here and compute a prompt that others may have as well, by that prompt.
    computing: dict[int, Req] = field(default_factory=dict)

    @property
    def place(self) -> tuple[int, int]:
        """The smallest goes first."""
        return self.rank, self.turn


class WaitingQueue:
    """Waiting requests, by the bodies that they came in.

    The bodies take turns: when a request is admitted, the next one of its body goes behind the first ones of all the
    others. A body that runs nothing goes before those that run something. So a body that is new waits for at most one
    request of each body that came before it and has not run either, and nobody waits for ever: what runs comes to an
    end. Requests that came alone are bodies of one, and go in order of arrival.

    A better rank goes first, whatever else is said here. A change costs little however many wait: only bodies are kept
    in order, and a body moves at each change of its own requests at most.
    """

    def __init__(self, page_size: int | None = None) -> None:
        """``page_size`` of the prefix cache; None if there is none, and nobody waits for another one's prompt."""
        self._page_size = page_size
        self._lines: list[_Line] = []  # in the order of their places
        self._line_of: dict[tuple[int, int | str], _Line] = {}
        self._num_running: Counter[int] = Counter()  # admitted requests of each body that is larger than one
        self._num_turns = 0
        self._num_reqs = 0
        self.num_short = 0  # see ShortShare

    def __len__(self) -> int:
        return self._num_reqs

    def __iter__(self) -> Iterator[Req]:
        """In the order in which they would be admitted."""
        return self.in_turn(lambda req: True)

    # --- changes

    def add(self, req: Req) -> None:
        """One that has arrived: behind those of its body, or a body that goes behind the others."""
        self._line(req, self._num_turns + 1).reqs.append(req)
        self._num_reqs += 1
        self.num_short += req.is_short

    def put_back(self, req: Req) -> None:
        """One that has run already: before those of its body, which goes before the others if nobody else of it waits.
        Newcomers must not pass it for ever."""
        self._line(req, -self._num_turns - 1).reqs.appendleft(req)
        self._num_reqs += 1
        self.num_short += req.is_short

    def remove(self, req: Req) -> None:
        """One that does not wait any more."""
        line = self._line_of[_key(req)]
        line.reqs.remove(req)
        self._num_reqs -= 1
        self.num_short -= req.is_short
        if not line.reqs:
            del self._line_of[_key(req)]
            del self._lines[bisect_left(self._lines, line.place, key=lambda other: other.place)]

    def admit(self, req: Req) -> None:
        """One that has a row from now on. Its body's next turn comes after everybody else's."""
        line = self._line_of[_key(req)]
        self.computes(req)
        self.remove(req)
        if line.body:
            self._num_running[line.body] += 1
        if line.reqs:
            del self._lines[bisect_left(self._lines, line.place, key=lambda other: other.place)]
            self._num_turns += 1
            line.turn = self._num_turns
            insort(self._lines, line, key=lambda other: other.place)

    def release(self, req: Req) -> None:
        """One that had been admitted has left."""
        body = req.source.body
        if body:
            self._num_running[body] -= 1
            if not self._num_running[body]:
                del self._num_running[body]

    def _line(self, req: Req, turn: int) -> _Line:
        key = _key(req)
        line = self._line_of.get(key)
        if line is None:
            self._num_turns += 1
            line = self._line_of[key] = _Line(req.source.body, req.rank, turn)
            insort(self._lines, line, key=lambda other: other.place)
        return line

    # --- whose turn it is

    def in_turn(self, may_schedule: Callable[[Req], bool]) -> Iterator[Req]:
        """Those that ``may_schedule``, in the order in which they would be admitted if each of them had room. No more
        is looked at than is asked for, and ``may_schedule`` is asked as late as possible."""
        for _, lines in groupby(self._lines, key=lambda line: line.rank):
            again: deque[Iterator[Req]] = deque()
            begun: list[Iterator[Req]] = []
            for line in lines:
                reqs: Iterator[Req] = filter(may_schedule, line.reqs)
                if self._num_running[line.body]:
                    again.append(reqs)
                    continue
                req = next(reqs, None)
                if req is not None:
                    yield req
                    if line.body:
                        begun.append(reqs)
            again.extend(begun)
            while again:
                reqs = again.popleft()
                req = next(reqs, None)
                if req is not None:
                    yield req
                    again.append(reqs)

    def newcomers(self, may_schedule: Callable[[Req], bool]) -> Iterator[Req]:
        """Of each body that runs nothing the first that ``may_schedule``, in turn."""
        for line in self._lines:
            if not self._num_running[line.body]:
                req = next(filter(may_schedule, line.reqs), None)
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
        line = self._line_of[_key(req)]
        if line.body:
            line.computing = {
                key: other for key, other in line.computing.items() if self._is_computing(other)
            }
            line.computing[id(req.prompt_ids)] = req

    def waits_for_sample(self, req: Req) -> bool:
        """Whether another sample of the same prompt computes what ``req`` would find in the cache afterwards."""
        other = self._line_of[_key(req)].computing.get(id(req.prompt_ids))
        return other is not None and other is not req and self._is_computing(other) and not req.scores_prompt

    def _is_computing(self, req: Req) -> bool:
        """Whether ``req`` is there and computes a part of its prompt, in whole pages, that is worth waiting for."""
        num_prompt, size = len(req.prompt_ids), self._page_size
        if size is None or req.left or req.committed_len >= num_prompt:
            return False
        return (num_prompt - 1) // size * size - req.shared_len >= _MIN_SHARED_TOKENS


def _key(req: Req) -> tuple[int, int | str]:
    return req.rank, req.source.body or req.rid
