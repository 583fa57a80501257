"""A plain record of everything that operations have declared, with which the checker of ``--memory-check order`` is
compared.

The checker keeps the last accesses of each agent in tables that it fills when it must. This record writes down
each access at its rows at once. After every few declarations the checker is asked what it would say of an access by an
agent that has waited for nothing, or only for some: to all rows, to each of those used lately, or to those of some
requests by the page table. Its answer must be the record's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fenceline.memory_order.access import Memory, PagedMemory, Rows
from fenceline.memory_order.checker import Operation, OrderChecker, OrderError
from fenceline.memory_order.edges import EDGES, Hazard, StreamName
from fenceline.memory_order.stream import Clock
from fenceline_sim.errors import FootprintError

_AGENTS = tuple(StreamName)
_EVERY = 7  # declarations between two questions
_LATELY = 16  # rows that count as used lately
_NEVER_ORDERED = (0,) * len(_AGENTS)


@dataclass(slots=True)
class _Kept:
    """The record of one memory: by row, agent and kind of access (True: a write), the number of the last such
    access."""

    memory: Memory
    last: dict[int, dict[tuple[int, bool], int]] = field(default_factory=dict)
    table: dict[tuple[int, int], int] = field(default_factory=dict)  # (row of requests, column) → page
    replaced: deque[int] = field(
        default_factory=lambda: deque(maxlen=_LATELY)
    )  # pages that left the table lately
    lately: deque[int] = field(
        default_factory=lambda: deque(maxlen=_LATELY)
    )  # rows that were accessed lately

    def note(self, agent: int, tick: int, write: bool, rows: Iterable[int]) -> None:
        for row in rows:
            self.last.setdefault(row, {})[agent, write] = tick
            self.lately.append(row)

    def write_table(self, rows: Iterable[int], columns: Iterable[int], pages: Iterable[int]) -> None:
        for row, column, page in zip(rows, columns, pages, strict=True):
            before = self.table.get((row, column), page)
            if before != page and before in self.last:
                self.replaced.append(before)
            self.table[row, column] = page

    def pages_of(self, row: int, length: int, page_size: int) -> list[int]:
        """Those of the first ``length`` tokens of a request."""
        return [self.table.get((row, column), 0) for column in range((length + page_size - 1) // page_size)]

    def after_writes(self, row: int) -> Clock:
        """The clock of what has waited for all writes of ``row``, and for no later read."""
        last = self.last[row]
        return tuple(last.get((agent, True), 0) for agent in range(len(_AGENTS)))

    def conflicts(
        self, agent: int, clock: Clock, write: bool, rows: Iterable[int]
    ) -> dict[tuple[int, bool], dict[int, int]]:
        """By agent and kind of earlier accesses that conflict and are not in ``clock``: the last one of each row."""
        found: dict[tuple[int, bool], dict[int, int]] = {}
        for row in rows:
            for (other, wrote), tick in self.last.get(row, {}).items():
                if other != agent and tick > clock[other] and (write or wrote):
                    found.setdefault((other, wrote), {})[row] = tick
        return found


class _Declared:
    """Notes the accesses of one operation: see ``memory_order.access.Accesses``."""

    def __init__(self, record: OrderRecord, agent: int, tick: int) -> None:
        self._record = record
        self._agent = agent
        self._tick = tick

    def read(self, memory: Memory, rows: Rows | None = None) -> None:
        self._note(memory, False, rows)

    def write(self, memory: Memory, rows: Rows | None = None) -> None:
        self._note(memory, True, rows)

    def read_pages(self, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        kept, size = self._record.kept(memory), memory._page_size
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            kept.note(self._agent, self._tick, False, kept.pages_of(row, length, size))

    def append_pages(self, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        self.read_pages(memory, rows, lengths)
        kept, size = self._record.kept(memory), memory._page_size
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            kept.note(self._agent, self._tick, True, kept.pages_of(row, length, size)[-1:])

    def write_table(self, memory: PagedMemory, rows: Rows, columns: Rows, pages: Rows) -> None:
        self._record.kept(memory).write_table(rows.tolist(), columns.tolist(), pages.tolist())

    def release(self, memory: Memory) -> None:
        self.write(memory)

    def occupy_sm(self) -> None:
        self.write(self._record.sm)

    def _note(self, memory: Memory, write: bool, rows: Rows | None) -> None:
        kept = self._record.kept(memory)
        kept.note(self._agent, self._tick, write, numbers(memory, rows))


def numbers(memory: Memory, rows: Rows | None) -> list[int]:
    """The rows of ``memory`` that ``rows`` names, in ascending order."""
    return list(range(memory.num_rows)) if rows is None else sorted(set(np.asarray(rows).tolist()))


class OrderRecord:
    """Reads the declarations of a device beside its ``checker``, whose answers it compares with its own."""

    def __init__(self, checker: OrderChecker) -> None:
        self.sm = checker.sm
        self._checker = checker
        self._kept: dict[int, _Kept] = {}  # by the memory's identity
        self._ticks = [0] * len(_AGENTS)
        self._known: list[dict[int, int]] = [
            {} for _ in _AGENTS
        ]  # of each agent: what is ordered before its next
        self._labels: dict[tuple[int, int], tuple[str, int]] = {}  # of each operation, with its step
        self._num_steps = self._num_declared = 0
        self._follow()

    def kept(self, memory: Memory) -> _Kept:
        """What is known of ``memory``."""
        return self._kept.setdefault(id(memory), _Kept(memory))

    def declared(
        self, stream: StreamName, label: str, accesses: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Reads a declaration, after the checker has."""
        agent = _AGENTS.index(stream)
        self._submitted(agent)
        self._ticks[agent] += 1
        tick = self._ticks[agent]
        self._labels[agent, tick] = label, self._num_steps
        accesses(_Declared(self, agent, tick), *args, **kwargs)
        self._num_declared += 1
        if self._num_declared % _EVERY == 0:
            self._ask()

    # --- order, as the checker is told of it

    def _follow(self) -> None:
        """Intercept the calls to the checker, before the checker gets them."""
        checker: Any = self._checker
        for name in ("begin_step", "wait", "host_waited", "host_waited_for_all"):
            own, theirs = getattr(self, f"_{name}"), getattr(checker, name)

            def told(*args: Any, own: Any = own, theirs: Any = theirs) -> None:
                own(*args)
                theirs(*args)

            setattr(checker, name, told)
        record = checker.record

        def recorded(name: StreamName) -> Clock:
            clock: Clock = record(name)
            agent = _AGENTS.index(name)
            self._submitted(agent)
            mine = tuple(self._known[agent].get(i, 0) for i in range(len(_AGENTS)))
            mine = (*mine[:agent], self._ticks[agent], *mine[agent + 1 :])
            if clock != mine:
                raise FootprintError(
                    f"footprint: a Point on {name.value} has the clock {clock}, {mine} is right"
                )
            return clock

        checker.record = recorded

    def _begin_step(self) -> None:
        self._num_steps += 1

    def _wait(self, name: StreamName, clock: Clock) -> None:
        self._learn(_AGENTS.index(name), clock)

    def _host_waited(self, clock: Clock) -> None:
        self._learn(_AGENTS.index(StreamName.HOST), clock)

    def _host_waited_for_all(self) -> None:
        for agent, tick in enumerate(self._ticks):
            host = self._known[_AGENTS.index(StreamName.HOST)]
            host[agent] = max(host.get(agent, 0), tick)

    def _learn(self, agent: int, clock: Clock) -> None:
        known = self._known[agent]
        for other, tick in enumerate(clock):
            known[other] = max(known.get(other, 0), tick)

    def _submitted(self, agent: int) -> None:
        """What is submitted now happens after all that the host has done, and has waited for."""
        host = _AGENTS.index(StreamName.HOST)
        if agent != host:
            known = {**self._known[host], host: self._ticks[host]}
            self._learn(agent, tuple(known.get(i, 0) for i in range(len(_AGENTS))))

    # --- questions

    def _ask(self) -> None:
        """Ask of each memory about accesses that nothing orders, and about accesses after some of the earlier ones."""
        for number, kept in enumerate(list(self._kept.values())):
            if not kept.last:
                continue
            # Each of the digits goes through all of its values beside each value of the others. The memories begin at
            # different places.
            choice, write = divmod(self._num_declared // _EVERY + number * len(_AGENTS), 2)
            choice, agent = divmod(choice, len(_AGENTS))
            choice, order = divmod(choice, 3)
            first = choice % 2
            rows = sorted(kept.last)[first :: 1 + first] or list(kept.last)
            asked = None if kept.memory.num_rows == 1 else np.array(rows)
            clock = self._clock(agent, order)
            self._compare(kept, Operation(agent, 1 << 40, clock, "question", 0), bool(write), rows, asked)
            if asked is not None:
                self._ask_each(kept, agent)
            if kept.table:
                self._ask_by_table(kept, order, bool(write))

    def _ask_each(self, kept: _Kept, agent: int) -> None:
        """Ask about single rows that have been used lately, or have left the page table: of each the last write and,
        after all writes, the last reads must be known exactly."""
        for row in {*kept.lately, *kept.replaced}:
            for clock in (_NEVER_ORDERED, kept.after_writes(row)):
                op = Operation(agent, 1 << 40, clock, "question", 0)
                self._compare(kept, op, True, [row], np.array([row]))

    def _clock(self, agent: int, order: int) -> Clock:
        """Of an access that follows nothing, the first half of everything, or what the agent knows."""
        if order == 0:
            return _NEVER_ORDERED
        known = self._known[agent]
        return tuple(tick // 2 if order == 1 else known.get(i, 0) for i, tick in enumerate(self._ticks))

    def _ask_by_table(self, kept: _Kept, order: int, is_append: bool) -> None:
        """Ask about a step that reads the pages of some requests by the page table, and writes the last of them."""
        memory, agent = kept.memory, _AGENTS.index(StreamName.FORWARD)
        assert isinstance(memory, PagedMemory), "only these have a page table"
        size, every = memory._page_size, self._num_declared // _EVERY
        rows = sorted({row for row, _ in kept.table})[every % 2 :: 2] or [min(kept.table)[0]]
        most = [size * (1 + max(column for one, column in kept.table if one == row)) for row in rows]
        lengths = [1 + every * 7 % length for length in most]
        pages = [kept.pages_of(row, length, size) for row, length in zip(rows, lengths, strict=True)]
        read, written = (
            sorted({page for part in pages for page in part}),
            sorted({part[-1] for part in pages}),
        )
        op = Operation(agent, 1 << 40, self._clock(agent, order), "question", 0)
        expected, write, asked = kept.conflicts(agent, op.clock, False, read), False, read
        if is_append and not expected:
            expected, write, asked = kept.conflicts(agent, op.clock, True, written), True, written
        if not expected:
            self._compare(kept, op, write, asked, np.array(asked))
            return
        ask = self._checker.append_pages if is_append else self._checker.read_pages
        try:
            ask(op, memory, np.array(rows), np.array(lengths))
        except OrderError as error:
            self._check_report(error, kept, op, write, expected)
            return
        self._wrong(f"does not find that pages {asked} are used too early by a step, after {expected}")

    def _compare(self, kept: _Kept, op: Operation, write: bool, rows: list[int], asked: Rows | None) -> None:
        expected = kept.conflicts(op.agent, op.clock, write, rows)
        memory, checker = kept.memory, self._checker
        if not expected:
            # It would remember an access that it finds clean, so only the comparison is made.
            if memory.unordered(op.agent, op.clock, write, asked) is not None:
                self._wrong(f"finds that {memory.name} is used too early, and nothing conflicts")
            return
        try:
            (checker.write if write else checker.read)(op, memory, asked)
        except OrderError as error:
            self._check_report(error, kept, op, write, expected)
            return
        self._wrong(f"does not find that {memory.name} rows {rows} are used too early, after {expected}")

    def _check_report(
        self,
        error: OrderError,
        kept: _Kept,
        op: Operation,
        write: bool,
        expected: Mapping[tuple[int, bool], Mapping[int, int]],
    ) -> None:
        """The report is of one of the conflicts, of a write if there is one; it names the earliest operation and all of
        its rows, the hazard, and the edges that would order the two."""
        among = {key: ticks for key, ticks in expected.items() if key[1]} or expected
        text = str(error)
        for (other, wrote), ticks in among.items():
            first = min(ticks.values())
            label, step = self._labels[other, first]
            source, waiter = _AGENTS[other], _AGENTS[op.agent]
            if kept.memory.is_exclusive:
                hazard = Hazard.EXCLUSIVE
            else:
                hazard = {(True, False): Hazard.RAW, (False, True): Hazard.WAR}.get(
                    (wrote, write), Hazard.WAW
                )
            verb = "writes" if wrote else "reads"
            named = [
                edge.name for edge in EDGES.values()
                if hazard in edge.hazards and (waiter, source) in edge.pairs
            ]  # fmt: skip
            rows = sorted(row for row, tick in ticks.items() if tick == first)
            told = (
                f"1. {label} {verb} it on {source.value} ({source.value}#{first}, step {step})" in text
                and f"2. question {'writes' if write else 'reads'} it on {waiter.value}" in text
                and error.hazard is hazard
                and sorted(error.edges) == sorted(named)
                and _names(error.memory, kept.memory, rows)
            )
            if told:
                return
        self._wrong(f"reports something else than {among} of {kept.memory.name}: {text}")

    def _wrong(self, what: str) -> None:
        raise FootprintError(f"footprint: --memory-check order {what}")


def _names(said: str, memory: Memory, rows: list[int]) -> bool:
    """Whether a report that says ``said`` means these rows of ``memory``. It leaves out what comes after six runs."""
    if memory.num_rows == 1:
        return said == memory.name
    what, _, numbers = said.removeprefix(memory.name).strip().partition(" ")
    numbers, _, more = numbers.partition(" and ")
    found: list[int] = []
    for run in numbers.split(", "):
        first, _, last = run.partition("-")
        if found and int(first) == found[-1] + 1:
            return False  # one run is given as two
        found += range(int(first), int(last or first) + 1)
    is_plural = what == f"{memory.row_name}s"
    rest = [row for row in rows if row > found[-1]]
    return found == rows[: len(found)] and bool(rest) == bool(more) and is_plural == (len(rows) > 1)
