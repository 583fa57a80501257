"""Operations, the streams that they are queued on, and the threads of the host.

Streams and threads are agents, each with a vector clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.stream import Clock, joined
from fenceline_sim.memory import NO_ACCESS, NO_BOUNDS, Accesses, Bounds
from fenceline_sim.place import Place

RELEASE = "return to the allocator"  # the label of the operation that ends a tensor's memory
DEFAULT_STREAM = "default"  # the name of the stream that exists from the start
_MAX_QUERIES = 32  # unsuccessful queries of a stream's work, after which it runs
_REMEMBERED = 1 << 17  # actions of an agent that are kept for reports


class Purpose(Protocol):
    """What operations are submitted for: an object that checks them after they have run."""

    def ran(self, op: Operation) -> None:
        """``op``, submitted for this, has just run; its accesses and their indices are still there."""
        ...


class Spin(Protocol):
    """What an operation of a kernel that works with other devices waits for, tells them, and may access there."""

    reads_what_it_waits_for: bool  # in one access with it, so that the value itself says that it is written

    @property
    def what(self) -> str:
        """What it waits for, in reports."""

    def ready(self) -> bool:
        """Whether what it spins for is there: it does not run before."""

    def begin(self, op: Operation) -> Clock:
        """``op`` is about to run: its accesses may be filled in, if they depend on what memory holds now. Returns the
        clock of what it has acquired, () if that is nothing."""

    def ran(self, op: Operation) -> None:
        """``op`` has run, with ``op.clock`` as its clock: what it releases becomes visible."""


class Operation:
    """Work on a stream. ``agent`` and ``index`` name it for vector clocks, ``seq`` is its place in program order.

    ``run`` is None for a mark or a wait. ``after`` is the mark that a wait waits for, or the operation with a kernel's
    early reads. ``bounds`` are of its indices, ``graph`` the one it was replayed with. ``starts_next``: it lets the
    next kernel begin before it has waited for the preceding ones. ``spin``: see ``Spin``. Once ``done``, what it
    needed to run is dropped; it ``ran`` when so many operations had been submitted, and if ``ran_awaited`` while the
    host was blocked.
    """

    __slots__ = (
        "after", "agent", "bounds", "capture", "clock", "done", "graph", "index", "label", "place", "purpose", "ran",
        "ran_awaited", "reads", "run", "seq", "spin", "starts_next", "stream", "where", "writes",
    )  # fmt: skip

    def __init__(
        self, label: str, place: Place, run: Callable[[], None] | None, reads: Accesses = NO_ACCESS,
        writes: Accesses = NO_ACCESS, after: Operation | None = None, bounds: Bounds = NO_BOUNDS,
        starts_next: bool = False,
    ) -> None:  # fmt: skip
        self.label = label
        self.place = place
        self.run = run
        self.reads = reads
        self.writes = writes
        self.after = after
        self.bounds = bounds
        self.starts_next = starts_next
        self.graph = ""
        self.spin: Spin | None = None
        self.purpose: Purpose | None = None  # of the thread that submitted it: see ``VirtualGpu.submitting_for``
        self.done = False
        self.ran = 0
        self.ran_awaited = False
        self.capture: object | None = None  # the Capture that it is part of; such a one never runs itself
        self.stream: VirtualStream | None = None
        self.agent = self.index = self.seq = 0
        self.where = ""  # the agent's name
        self.clock: Clock = ()

    @property
    def is_ahead(self) -> bool:
        """Whether it is the part of a kernel before its wait for the preceding one."""
        return self.stream is not None and bool(self.stream.is_ahead_of)

    @property
    def passed(self) -> Clock:
        """The clock of what happens after this operation."""
        clock = list(self.clock) + [0] * (self.agent + 1 - len(self.clock))
        clock[self.agent] = self.index
        return tuple(clock)


def who(op: Operation) -> str:
    """``op`` as in reports: its label, graph and stream, and the line that submitted it."""
    inside = f" in {op.graph}" if op.graph else ""
    return f"{op.label}{inside} on {op.where} ({op.where}#{op.index}), {op.place}"


class Agent:
    """A stream or a thread of the host: its actions are ordered.

    ``clock``: what happened before its next action, as positions of the other agents. Its own position is ``count``.
    """

    __slots__ = ("_forgotten", "_history", "clock", "count", "device", "name", "number")

    def __init__(self, number: int, name: str, device: int) -> None:
        self.number = number
        self.name = name
        self.device = device
        self.count = 0
        self.clock: Clock = ()
        self._history: list[Operation] = []
        self._forgotten = 0  # actions before those in the history

    def note(self, op: Operation) -> None:
        self.count += 1
        op.agent = self.number
        op.where = self.name
        op.index = self.count
        self._history.append(op)
        if len(self._history) > 2 * _REMEMBERED:
            del self._history[:_REMEMBERED]
            self._forgotten += _REMEMBERED

    def action(self, index: int) -> Operation:
        """The ``index``-th action, from 1; the earliest that is kept if this one is no longer kept."""
        return self._history[max(index - 1 - self._forgotten, 0)]

    def now(self) -> Clock:
        """The clock of something that happens after all that this agent has done."""
        clock = list(self.clock) + [0] * (self.number + 1 - len(self.clock))
        clock[self.number] = self.count
        return tuple(clock)


class HostThread(Agent):
    """A thread of the host, of the rank whose device is ``device``."""

    __slots__ = ("_now", "current", "purpose")

    def __init__(self, number: int, name: str, current: VirtualStream) -> None:
        super().__init__(number, name, current.device)
        self.purpose: Purpose | None = None  # of everything that it submits
        self.current = current  # the stream that torch operations of this thread go to
        self._now: Clock = self.now()

    @property
    def edge_name(self) -> str:
        return StreamName.HOST.value

    @property
    def submitting(self) -> Clock:
        """The clock of what this thread submits now; the same object until something changes."""
        return self._now

    def order_after(self, clock: Clock) -> None:
        """Everything in ``clock`` happened before what this thread does from now on."""
        self.clock = joined(self.clock, clock)
        self._now = self.now()

    def act(self, op: Operation) -> None:
        """Record an action of the thread itself, such as an access to pinned memory."""
        op.clock = self.clock
        self.note(op)
        self._now = self.now()


class VirtualStream(Agent):
    """A queue of operations, which run in order, one after the other. Streams are not ordered with each other.

    ``gained``: what has happened before its next operation because an earlier one has acquired it from another device,
    which is not known when work is submitted.

    What a kernel that is launched programmatically does before it waits for the preceding one runs on another stream,
    ``ahead``, after ``front`` and the marks ``joined``. ``front``: everything up to there has ended when the kernel
    begins, because the last one on the stream began after it. None if there is no such kernel: the next one begins
    when everything before it has ended. ``is_ahead_of``: the name of the stream that this one is the ``ahead`` of, or
    "".
    """

    __slots__ = (
        "_edge_name", "_joined_clock", "_latest", "_num_asked", "ahead", "front", "gained", "is_ahead_of",
        "is_captured", "joined", "queue",
    )  # fmt: skip

    def __init__(self, number: int, name: str, device: int = 0, edge_name: str = "") -> None:
        super().__init__(number, name, device)
        self._edge_name = edge_name or name
        self.gained: Clock = ()
        self.queue: deque[Operation] = deque()
        self.is_captured = False  # what is submitted to it goes into the graph that is being captured
        self._joined_clock: Clock | None = None
        self._num_asked = 0
        self.ahead: VirtualStream | None = None
        self.is_ahead_of = ""
        self.restart(None)

    def count_query(self) -> bool:
        """Count an unsuccessful query of whether work has run. True after every ``_MAX_QUERIES`` of them."""
        self._num_asked = (self._num_asked + 1) % _MAX_QUERIES
        return self._num_asked == 0

    def restart(self, latest: Operation | None) -> None:
        """The operation after ``latest`` begins when everything before it has ended: so it is after a graph's launch
        and for the first operation of a capture."""
        self._latest = latest
        self.front: Operation | None = None
        self.joined: list[Operation] = []

    def follow(self, op: Operation) -> None:
        """``op`` is the stream's latest, queued or captured."""
        if op.label == RELEASE:  # memory goes back to the allocator, no kernel runs
            return
        if op.run is None:
            if op.after is not None:
                self.joined.append(op.after)
        else:
            self.joined.clear()
            if not op.starts_next:
                self.front = self._latest
        self._latest = op

    @property
    def edge_name(self) -> str:
        """Its name in the table of edges: that of the kernels whose early reads it has, if it has any."""
        return self.is_ahead_of or self._edge_name

    @property
    def runnable(self) -> bool:
        if not self.queue:
            return False
        after, spin = self.queue[0].after, self.queue[0].spin
        return (after is None or after.done) and (spin is None or spin.ready())

    def append(self, op: Operation, submitter: Clock) -> None:
        """Queue ``op``, which happens after everything in ``submitter``, the clock of the thread that submits it."""
        if submitter is not self._joined_clock:
            self.clock = joined(self.clock, submitter)
            self._joined_clock = submitter
        if op.after is not None:
            self.clock = joined(self.clock, op.after.passed)
        op.stream = self
        op.clock = self.clock
        self.note(op)
        self.follow(op)
        self.queue.append(op)
