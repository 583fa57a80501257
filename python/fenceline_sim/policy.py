"""Policies decide what runs next: the host or the head of one of the streams. Each is a function of its seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from fenceline_sim.streams import Operation, VirtualStream


class Policy(ABC):
    """Chooses the schedule. ``switch_odds``: the probability that another host thread runs at a call."""

    switch_odds = 0.0

    def asked(self, mark: Operation, moment: int) -> bool:
        """The host asks whether ``mark`` has run, at ``moment`` of its program. If true, it runs now if it has not."""
        return False

    @abstractmethod
    def pick(self, runnable: Sequence[VirtualStream], needed: VirtualStream | None) -> VirtualStream | None:
        """The stream whose head runs next, or None if the host continues.

        ``needed`` is None while the host can continue. Otherwise the host is blocked, one of ``runnable`` must be
        chosen, and running ``needed`` brings the host closer to continuing. ``runnable`` is never empty.
        """


class InOrder(Policy):
    """In the order of submission: when the host waits, or ``at_once``, as on a device that is infinitely fast."""

    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once

    def pick(self, runnable: Sequence[VirtualStream], needed: VirtualStream | None) -> VirtualStream | None:
        return None if needed is None and not self._at_once else min(runnable, key=lambda stream: stream.queue[0].seq)


class Laziest(Policy):
    """Only operations that the host needs."""

    def pick(self, runnable: Sequence[VirtualStream], needed: VirtualStream | None) -> VirtualStream | None:
        return needed


class Answers(NamedTuple):
    """The answers when the host asks whether work has run: ``usual``, except to the queries with the numbers
    ``others`` (from 0, ascending), which get the opposite. Queries with one possible answer are not counted, nor those
    that are repeated before anything else has happened."""

    usual: bool
    others: tuple[int, ...] = ()


class Answering(Laziest):
    """Like ``laziest``, except for the answers to the host's queries. ``num_questions``: the queries counted so far."""

    def __init__(self, answers: Answers) -> None:
        self.num_questions = 0
        self._usual, self._others = answers.usual, frozenset(answers.others)
        self._asked: dict[int, int] = {}  # when last, by the mark's place in the program

    def asked(self, mark: Operation, moment: int) -> bool:
        if mark.done or self._asked.get(mark.seq) == moment:
            return self._usual
        self._asked[mark.seq] = moment
        self.num_questions += 1
        return self._usual != (self.num_questions - 1 in self._others)


class Uniform(Policy):
    """Any stream, with weights drawn from the seed, so that some runs prefer a stream strongly."""

    switch_odds = 0.3

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._host = self._random.choice((0.1, 0.5, 0.8, 0.95, 1.0))
        self._weights: dict[int, float] = {}

    def pick(self, runnable: Sequence[VirtualStream], needed: VirtualStream | None) -> VirtualStream | None:
        if needed is None and self._random.random() < self._host:
            return None
        if len(runnable) == 1:
            return runnable[0]
        weights = [self._weight(stream.number) for stream in runnable]
        return self._random.choices(runnable, weights)[0]

    def _weight(self, number: int) -> float:
        weight = self._weights.get(number)
        if weight is None:
            weight = self._weights[number] = 10.0 ** self._random.uniform(-2, 0)
        return weight


class Pct(Policy):
    """Priorities with two changes: finds any bug of three ordering constraints with a known probability.

    Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010. The number
    of choices of a run is not known, so the changes are spread evenly over its order of magnitude, up to 10,000.
    """

    switch_odds = 0.1

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._priorities: dict[int, float] = {}
        self._changes = {int(10_000 ** self._random.random()) for _ in range(2)}
        self._lowest = 0.0
        self._step = 0

    def pick(self, runnable: Sequence[VirtualStream], needed: VirtualStream | None) -> VirtualStream | None:
        best = max(runnable, key=lambda stream: self._priority(stream.number))
        host_first = needed is None and self._priority(-1) > self._priority(best.number)
        self._step += 1
        if self._step in self._changes:
            self._lowest -= 1.0
            self._priorities[-1 if host_first else best.number] = self._lowest
        return None if host_first else best

    def _priority(self, number: int) -> float:
        priority = self._priorities.get(number)
        if priority is None:
            priority = self._priorities[number] = self._random.random()
        return priority


_MAKERS: dict[str, Callable[[int], Policy]] = {  # from the seed
    "fifo": lambda seed: InOrder(at_once=False), "eager": lambda seed: InOrder(at_once=True),
    "laziest": lambda seed: Laziest(), "random": Uniform, "pct": Pct,
}  # fmt: skip
POLICIES = tuple(_MAKERS)


def make_policy(name: str, seed: int) -> Policy:
    if name not in _MAKERS:
        raise ValueError(f"unknown policy {name!r}: use one of {', '.join(POLICIES)}")
    return _MAKERS[name](seed)
