"""The happens-before checker of ``--memory-check order``: races are refused when the work is submitted.

The host and each stream have a vector clock. A stream's clock takes over the host's whenever work is submitted to it,
and another stream's where an edge is *applied* (``Stream.wait``); the host's takes over a stream's where the host waits
for it (``Stream.synchronize``). Nothing else counts: a Point that has passed orders nothing unless the host waited for
it. So a missing edge is found on a fast device too, and on a synchronous one.

It reads the declarations of all operations (``access``), just before they are submitted, and raises where nothing
orders an access after the last one that it conflicts with. One host thread submits. Accesses are compared with the
last ones of each agent, and noted if they are clean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, NamedTuple, ParamSpec

from fenceline.memory_order.access import NUMBERS, Accesses, Memory, PagedMemory, Past, Rows
from fenceline.memory_order.edges import EDGES, Edge, Hazard, StreamName
from fenceline.memory_order.stream import Clock, NoChecker, joined

_NAMES = tuple(StreamName)
_HOST = NUMBERS[StreamName.HOST]
P = ParamSpec("P")
_NEVER: Clock = (0,) * len(_NAMES)
_REMEMBERED = 1 << 12  # operations of each agent that a report can name


class OrderError(RuntimeError):
    """Two accesses to the same memory that nothing orders; the second was not submitted. ``edges``: names of the
    declared edges that would order them, ``edge`` the first of these, "" where none fits."""

    def __init__(self, message: str, edges: tuple[str, ...], hazard: Hazard, memory: str) -> None:
        super().__init__(message)
        self.edges = edges
        self.edge = edges[0] if edges else ""
        self.hazard = hazard
        self.memory = memory


class Operation(NamedTuple):
    """Something an agent does: its ``tick``-th operation, after everything in ``clock``, in the loop's ``step``."""

    agent: int
    tick: int
    clock: Clock
    label: str
    step: int

    def describe(self, writes: bool) -> str:
        """A line of a report, for example ``pack of inputs writes it on host (host#7, step 3)``."""
        where = _NAMES[self.agent].value
        verb = "writes" if writes else "reads"
        return f"{self.label} {verb} it on {where} ({where}#{self.tick}, step {self.step})"


class _Agent:
    """The host or a stream: its operations, and in ``clock`` those of the others that happened before its next one.
    Its own position is ``count``."""

    __slots__ = ("clock", "count", "history", "host_clock", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock = _NEVER
        self.count = 0
        self.host_clock: Clock | None = None  # the clock of the host that was joined last
        self.history: list[Operation | None] = [None] * _REMEMBERED

    def now(self) -> Clock:
        """The clock of what happens after all that this agent has done."""
        return (*self.clock[: self.number], self.count, *self.clock[self.number + 1 :])


class OrderChecker(NoChecker):
    """The clocks of one device's streams and of the host thread that submits to them."""

    def __init__(self) -> None:
        self.step = 0
        self._agents = [_Agent(number) for number in range(len(_NAMES))]
        self._host = self._agents[_HOST]
        self._submitting = _NEVER  # the host's clock now; the same object until it changes
        self.sm = Memory("resource sm")  # the multiprocessors: see Accesses.occupy_sm
        self.sm.is_exclusive = True

    # --- order ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin the next step of the loop: reports give the number of an operation's step, counted from 1."""
        self.step += 1

    def record(self, name: StreamName) -> Clock:
        """The clock of a Point recorded on a stream now."""
        return self._submitted(NUMBERS[name]).now()

    def wait(self, name: StreamName, clock: Clock) -> None:
        """Note that what is submitted to the stream from now on happens after everything in ``clock``."""
        agent = self._agents[NUMBERS[name]]
        agent.clock = joined(agent.clock, clock)

    def host_waited(self, clock: Clock) -> None:
        """Note that the host has waited for everything in ``clock``."""
        host = self._host
        after = joined(host.clock, clock)
        if after is not host.clock:
            host.clock = after
            self._submitting = host.now()

    def host_waited_for_all(self) -> None:
        """Note that the host has waited for everything that was submitted."""
        for agent in self._agents:
            self.host_waited(agent.now())

    # --- accesses ------------------------------------------------------------------------------------

    def declare(
        self,
        name: StreamName,
        label: str,
        accesses: Callable[Concatenate[Accesses, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Compare and note the accesses of an operation that is about to be submitted to the stream, or done by the
        host. Raises :class:`OrderError`."""
        accesses(_Compared(self, self.begin(name, label)), *args, **kwargs)

    def begin(self, name: StreamName, label: str) -> Operation:
        """Begin the next operation of a stream, which is about to be submitted, or of the host."""
        agent = self._submitted(NUMBERS[name])
        agent.count += 1
        op = Operation(agent.number, agent.count, agent.clock, label, self.step)
        agent.history[agent.count % _REMEMBERED] = op
        if agent is self._host:
            self._submitting = agent.now()
        return op

    def read(self, op: Operation, memory: Memory, rows: Rows | None = None) -> None:
        """Compare and note that ``op`` reads ``rows`` [N] (None: all) of ``memory``. Raises :class:`OrderError`."""
        if _beyond(memory.last_writes, op):
            self._compare(op, memory, False, rows)
        memory.note(op.agent, op.tick, False, rows)

    def write(self, op: Operation, memory: Memory, rows: Rows | None = None) -> None:
        """Compare and note that ``op`` writes ``rows`` [N] (None: all) of ``memory``. Raises :class:`OrderError`."""
        if _beyond(memory.last_writes, op) or _beyond(memory.last_reads, op):
            self._compare(op, memory, True, rows)
        memory.note(op.agent, op.tick, True, rows)

    def read_pages(self, op: Operation, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        """Compare and note that ``op``, which runs on the pages' reader, reads the first ``lengths`` [N] tokens of the
        distinct ``rows`` [N]. Raises :class:`OrderError`. See :meth:`PagedMemory.note_rows` for the arrays."""
        if _beyond(memory.last_writes, op):
            self._compare(op, memory, False, memory.pages_of(rows, lengths))
        memory.note_rows(op.tick, rows, lengths, False)

    def append_pages(self, op: Operation, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        """:meth:`read_pages`; ``op`` also writes the last token of each row, whose page is in the table."""
        if _beyond(memory.last_writes, op) or _beyond(memory.last_reads, op):
            self._compare(op, memory, False, memory.pages_of(rows, lengths))
            self._compare(op, memory, True, memory.last_pages_of(rows, lengths))
        memory.note_rows(op.tick, rows, lengths, True)

    # --- internals -----------------------------------------------------------------------------------

    def _submitted(self, number: int) -> _Agent:
        """The agent, whose clock has everything that the host has done until now."""
        agent = self._agents[number]
        if agent.host_clock is not self._submitting and agent is not self._host:
            agent.clock = joined(agent.clock, self._submitting)
            agent.host_clock = self._submitting
        return agent

    def _compare(self, op: Operation, memory: Memory, write: bool, rows: Rows | None) -> None:
        past = memory.unordered(op.agent, op.clock, write, rows)
        if past is not None:
            raise self._error(op, memory, write, past)

    def _error(self, op: Operation, memory: Memory, write: bool, past: Past) -> OrderError:
        first, second = _NAMES[past.agent].value, _NAMES[op.agent].value
        former = self._agents[past.agent].history[past.tick % _REMEMBERED]
        if former is None or former.tick != past.tick:
            earlier = f"an operation too long ago to be named, {first}#{past.tick}"
        else:
            earlier = former.describe(past.was_write)
        hazard = Hazard.EXCLUSIVE if memory.is_exclusive else hazard_of(past.was_write, write)
        edges = fitting_edges(hazard, first, second)
        where = memory.describe(past.rows)
        message = (
            f"memory order: {hazard.value} on {where}\n  1. {earlier}\n  2. {op.describe(write)}\n"
            f"  {missing_edge(edges, first, second)}"
        )
        return OrderError(message, tuple(edge.name for edge in edges), hazard, where)


def _beyond(latest: dict[int, int], op: Operation) -> bool:
    """Whether some other agent's latest access is not before ``op``."""
    for other, tick in latest.items():  # noqa: SIM110 - any() takes twice as long here
        if tick > op.clock[other] and other != op.agent:
            return True
    return False


class _Compared:
    """Compares and notes the accesses of ``op`` that a declaration names: see :class:`Accesses`."""

    __slots__ = ("_checker", "_op")

    def __init__(self, checker: OrderChecker, op: Operation) -> None:
        self._checker = checker
        self._op = op

    def read(self, memory: Memory, rows: Rows | None = None) -> None:
        self._checker.read(self._op, memory, rows)

    def write(self, memory: Memory, rows: Rows | None = None) -> None:
        self._checker.write(self._op, memory, rows)

    def read_pages(self, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        self._checker.read_pages(self._op, memory, rows, lengths)

    def append_pages(self, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        self._checker.append_pages(self._op, memory, rows, lengths)

    def write_table(self, memory: PagedMemory, rows: Rows, columns: Rows, pages: Rows) -> None:
        memory.write_table(rows, columns, pages)

    def release(self, memory: Memory) -> None:
        self._checker.write(self._op, memory)

    def occupy_sm(self) -> None:
        self._checker.write(self._op, self._checker.sm)


# --- what a report of two unordered accesses says -----------------------------------------------------


def hazard_of(first_writes: bool, second_writes: bool) -> Hazard:
    """What may go wrong between two accesses to the same memory, given in program order. At least one is a write."""
    if first_writes:
        return Hazard.WAW if second_writes else Hazard.RAW
    return Hazard.WAR


def fitting_edges(hazard: Hazard, first: str, second: str) -> list[Edge]:
    """Declared edges that would have ordered an access on stream ``first`` before one on ``second``. An exclusive
    resource may be held by either of the two first."""
    return [edge for edge in EDGES.values() if hazard in edge.hazards and _fits(edge, hazard, first, second)]


def _fits(edge: Edge, hazard: Hazard, first: str, second: str) -> bool:
    pairs = [(waiter.value, source.value) for waiter, source in edge.pairs]
    return (second, first) in pairs or (hazard is Hazard.EXCLUSIVE and (first, second) in pairs)


def missing_edge(edges: list[Edge], first: str, second: str) -> str:
    """The last line of a report; ``first`` and ``second`` are where the two accesses were made."""
    if edges:
        return f"nothing orders them; missing edge: {' or '.join(edge.name for edge in edges)}"
    return (
        "nothing orders them; no edge of memory_order/edges.py fits: "
        f"{second} has to wait, before 2, for {first} after 1"
    )
