"""Stream and Point: the sole owners of raw streams and events.

A Point is a moment on a stream; ``stream.wait(point, edge)`` makes the edge. Nothing else in the package
orders work across streams.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from fenceline.memory_order.edges import Edge, StreamName, pages_edge

# What has happened before: a number of operations for each agent (a stream, or the host); () without a checker.
Clock = tuple[int, ...]


class NoChecker:
    """``--memory-check off``: nothing is compared, Points carry no clocks."""

    step = 0

    def begin_step(self) -> None:
        """See :class:`OrderChecker`, also for the other methods."""

    def record(self, name: StreamName) -> Clock:
        return ()

    def wait(self, name: StreamName, clock: Clock) -> None:
        return

    def host_waited(self, clock: Clock) -> None:
        return

    def host_waited_for_all(self) -> None:
        return


class Stream(ABC):
    """One named, in-order queue of device work. ``serial`` counts the Points recorded; ``passed_serial`` is the last
    one the host knows to have passed, learned from waits it had to make anyway and from :meth:`learn`, once a step.
    Only the scheduler thread changes them, because the pages that it hands out depend on them."""

    def __init__(self, name: StreamName, severed: frozenset[str]) -> None:
        self.name = name
        self.serial = 0
        self.passed_serial = 0
        self._severed = severed  # edges that a test has severed; empty in production
        self.checker = NoChecker()

    def record(self) -> Point:
        """A Point after all work submitted to this stream so far."""
        self.serial += 1
        return Point(self, self.serial, self._record_event(), self.checker.record(self.name))

    def wait(self, after: Point | Points, edge: Edge) -> None:
        """Work submitted to this stream from now on runs after ``after``. The host does not block. The edge must be
        declared between these two streams. Points on this stream itself cost nothing: program order already holds."""
        for point in after.points if isinstance(after, Points) else (after,):
            if point.stream is self:
                continue
            assert (self.name, point.stream.name) in edge.pairs, (
                f"{edge.name} does not join {self.name.value} ← {point.stream.name.value}"
            )
            if self._is_cut(edge, self.name, point.stream.name):
                continue
            self.checker.wait(self.name, point.clock)
            if not point.passed:
                self._wait_event(point)

    def synchronize(self, point: Point, edge: Edge) -> None:
        """Block the scheduler thread until ``point``, which is on this stream, has passed."""
        self._check_host_edge(point, edge)
        if self._is_cut(edge, StreamName.HOST, self.name):
            return
        self.checker.host_waited(point.clock)
        if point.passed:
            return
        self._block(point)
        self.note_passed(point)

    def synchronize_from_worker(self, point: Point, edge: Edge) -> None:
        """Block the calling thread, one of :meth:`Device.start_worker`, until ``point`` on this stream has passed. The
        scheduler does not learn of it: what it hands out must not depend on a worker's timing. The worker waits also
        for a Point that the scheduler knows to have passed, because it does not know that itself."""
        self._check_host_edge(point, edge)
        if not self._is_cut(edge, StreamName.HOST, self.name):
            self._block(point)

    def ask(self, point: Point) -> bool:
        """Ask the device, once, whether ``point``, which is on this stream, has passed. Nothing may depend on the
        answer before a wait or :meth:`learn`, with several ranks when the Point has passed on all of them."""
        assert point.stream is self, "a Point is asked for on its own stream"
        return point.passed or self._query(point)

    def learn(self, point: Point) -> None:
        """Note that ``point``, for which :meth:`ask` has returned True, has passed: the host knows it from now on."""
        self.note_passed(point)
        self.checker.host_waited(point.clock)

    def _is_cut(self, edge: Edge, waiter: StreamName, source: StreamName) -> bool:
        """Whether a test has severed ``edge``, its part between these streams, or its use by the calling function."""
        severed = self._severed
        if not severed:
            return False
        site = applied_at()
        return not severed.isdisjoint(
            (edge.name, edge.part(waiter, source), f"{edge.name}@{site}", edge.part(waiter, source, site))
        )

    def _check_host_edge(self, point: Point, edge: Edge) -> None:
        assert (StreamName.HOST, self.name) in edge.pairs, f"{edge.name} does not join host ← {self.name.value}"
        assert point.stream is self, "a Point is waited for on its own stream"

    def note_passed(self, point: Point) -> None:
        """Record that the host has learned, by other means than :meth:`synchronize`, that ``point`` passed."""
        assert point.stream is self, "a Point is noted on its own stream"
        self.passed_serial = max(self.passed_serial, point.serial)

    def seconds_between(self, first: Point, last: Point) -> float | None:
        """Seconds of the device's clock that this stream took from ``first`` to ``last``, which are both on it and have
        passed; None if the device has no clock."""
        return None

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """Inside, torch operations of this thread are submitted to this stream."""

    @property
    @abstractmethod
    def is_current(self) -> bool:
        """Whether torch operations of this thread are submitted to this stream."""

    @abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Submit ``dst.copy_(src)`` without blocking the host. Host memory must be leased (see staging)."""

    @abstractmethod
    def _record_event(self) -> object: ...

    @abstractmethod
    def _wait_event(self, point: Point) -> None: ...

    @abstractmethod
    def _block(self, point: Point) -> None: ...

    def _query(self, point: Point) -> bool:
        """Ask the device. A stream without a device to ask returns what the host knows."""
        return point.passed


@dataclass(frozen=True, slots=True, eq=True)
class Point:
    """A moment on a stream: passed once all work submitted to the stream before it has run."""

    stream: Stream
    serial: int
    event: object = field(compare=False, repr=False)
    clock: Clock = field(default=(), compare=False, repr=False)  # of what happens after it; for the checker

    @property
    def passed(self) -> bool:
        """Whether the host already knows this Point to have passed. Never asks the device."""
        return self.stream.passed_serial >= self.serial

    def __repr__(self) -> str:
        return f"{self.stream.name.value}@{self.serial}"


@dataclass(frozen=True, slots=True)
class Points:
    """A set of Points with at most one per stream: the latest, which implies the earlier ones."""

    points: tuple[Point, ...] = ()

    @staticmethod
    def none() -> Points:
        """No Points: nothing to wait for."""
        return _NONE

    @staticmethod
    def of(*points: Point) -> Points:
        """The given Points, joined."""
        if len(points) == 1:
            return _NONE if points[0].passed else Points(points)
        latest: dict[StreamName, Point] = {}
        for point in points:
            if point.passed:
                continue
            known = latest.get(point.stream.name)
            assert known is None or known.stream is point.stream, "Points of two devices do not join"
            if known is None or known.serial < point.serial:
                latest[point.stream.name] = point
        if not latest:
            return _NONE
        return Points(tuple(latest[name] for name in sorted(latest, key=lambda n: n.value)))

    def join(self, other: Points) -> Points:
        """Both sets' Points, the later one where both have one on a stream. Passed Points are dropped."""
        if not other.points:
            return self
        if not self.points:
            return other
        return Points.of(*self.points, *other.points)

    @property
    def passed(self) -> bool:
        """Whether the host knows all of them to have passed. Never asks the device."""
        return all(point.passed for point in self.points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)


_NONE = Points()


def joined(a: Clock, b: Clock) -> Clock:
    """What has happened before one of two clocks: the element-wise maximum. ``a`` itself if ``b`` adds nothing."""
    if a is b or not b:
        return a
    if len(a) < len(b):
        a, b = b, a
    result = tuple([x if x > y else y for x, y in zip(a, b, strict=False)])
    if len(a) > len(b):
        result += a[len(b) :]
    return a if result == a else result


def wait_for_pages(stream: Stream, after: Points) -> None:
    """Make ``stream`` wait before it first accesses KV pages, or host pages, that were leased with ``after``. Applies
    one edge for each Point. Points of ``stream`` itself need none. Raises ``KeyError`` for a Point on a stream that
    accesses no pages."""
    for point in after.points:
        if point.stream is not stream:
            stream.wait(point, pages_edge(stream.name, point.stream.name))


def applied_at() -> str:
    """The function, as ``Class.name``, that applies the edge, for tests: the innermost caller outside this file.
    Methods of ``Slot`` are shared by several rings; for these it is the ring's function."""
    frame = sys._getframe(1)
    while (
        frame.f_code.co_filename == __file__
        or frame.f_code.co_name == "_is_cut"
        or frame.f_code.co_qualname.startswith("Slot.")
    ):
        assert frame.f_back is not None, "a test or the engine has applied the edge"
        frame = frame.f_back
    return frame.f_code.co_qualname.partition(".<locals>")[0]
