"""Shadow: the last accesses to each byte of a region, as positions in the agents' own orders.

Most memory is accessed by one agent, or in an order that the agents' latest accesses show, so accesses are only logged
together with the latest of each agent. If that does not suffice, the log is entered into per-unit arrays.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fenceline.memory_order.stream import Clock
from fenceline_sim.layout import Layout

Units = slice | npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]

_DEFAULT_UNIT_BYTES = 16
_MAX_UNITS = 1 << 18
_MAX_LOG = 512


# Agent, its action, whether it wrote, and where.
_Entry = tuple[int, int, bool, Layout, Rows | None]


class Past(NamedTuple):
    """An access that is not known to have happened before: the ``action``-th of ``agent``, to ``units``."""

    agent: int
    action: int
    was_write: bool
    units: npt.NDArray[np.int64]


class Shadow:
    __slots__ = ("_past", "_plain", "_reads", "_rows", "_writes", "capacity", "last_reads", "last_writes", "unit_bytes")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.unit_bytes = 0  # chosen when the arrays are made
        self.last_reads: dict[int, int] = {}  # agent → its latest action that read
        self.last_writes: dict[int, int] = {}
        # The log: an access to the same bytes by the same agent replaces its earlier ones.
        self._plain: dict[tuple[int, bool, Layout], int] = {}
        self._rows: list[_Entry] = []
        self._past: deque[_Entry] = deque(maxlen=_MAX_LOG)  # needed only for reports
        self._reads: npt.NDArray[np.int32] | None = None  # [agents, units]
        self._writes: npt.NDArray[np.int32] | None = None

    def note(self, agent: int, index: int, write: bool, layout: Layout, rows: Rows | None, unit: int) -> None:
        (self.last_writes if write else self.last_reads)[agent] = index
        if rows is not None:
            self._rows.append((agent, index, write, layout, rows))
            if len(self._rows) > _MAX_LOG:
                self._spread(unit)
            return
        key = (agent, write, layout)
        former = self._plain.get(key)
        if former is not None:
            self._past.append((agent, former, write, layout, None))
        elif len(self._plain) > _MAX_LOG:
            self._spread(unit)
        self._plain[key] = index

    def forget_before(self, agent: int, index: int, whole: Layout) -> None:
        """``agent``'s action ``index`` wrote everything after all earlier accesses, so it replaces them."""
        self.last_reads.clear()
        self.last_writes.clear()
        self.last_writes[agent] = index
        self._plain.clear()
        self._plain[(agent, True, whole)] = index
        self._rows.clear()
        self._past.clear()
        if self._writes is not None and self._reads is not None:
            self._reads.fill(0)
            self._writes.fill(0)

    def unordered(
        self, agent: int, clock: Clock, write: bool, layout: Layout, rows: Rows | None, unit: int
    ) -> list[Past]:
        """Conflicting accesses to the same units that are not before ``clock``; ``unit``: see ``note``."""
        others = self._others(agent, write, unit)
        units = self._units(layout, rows)
        found = []
        for other, last, was_write, actions in others:
            known = clock[other] if other < len(clock) else 0
            if last <= known:
                continue
            mask = actions[units] > known
            if mask.any():
                numbers = np.arange(len(actions))[units][mask]
                found.append(self._earliest(other, known, was_write, np.unique(numbers)))
        return found

    def conflicting(
        self, agent: int, write: bool, layout: Layout, rows: Rows | None, unit: int
    ) -> list[tuple[int, int, bool]]:
        """The latest accesses of the other agents to any of these units that conflict with one of ``agent``, each with
        its agent, its action and whether it wrote; ``unit``: see ``note``."""
        others = self._others(agent, write, unit)
        units = self._units(layout, rows)
        found = []
        for other, _, was_write, actions in others:
            found += [(other, action, was_write) for action in set(actions[units].tolist()) if action]
        return found

    def _others(self, agent: int, write: bool, unit: int) -> list[tuple[int, int, bool, npt.NDArray[np.int32]]]:
        """The other agents whose accesses conflict with one of ``agent``, first those that wrote: each with its latest
        action, whether that kind wrote, and its actions by unit. Enters the log into the arrays."""
        self._spread(unit)
        assert self._reads is not None and self._writes is not None
        kinds = [(True, self.last_writes, self._writes)]
        if write:
            kinds.append((False, self.last_reads, self._reads))
        return [
            (other, last, was_write, table[other])
            for was_write, latest, table in kinds
            for other, last in latest.items()
            if other != agent
        ]

    def _earliest(self, agent: int, known: int, was_write: bool, units: npt.NDArray[np.int64]) -> Past:
        """The first of ``agent``'s accesses after ``known`` to any of ``units``, which is nearest to the cause."""
        table = self._writes if was_write else self._reads
        assert table is not None, "the arrays have been made"
        for other, action, write, layout, rows in sorted(self._past, key=lambda entry: entry[1]):
            if other == agent and action > known and write == was_write:
                met = np.intersect1d(units, np.arange(table.shape[1])[self._units(layout, rows)])
                if len(met):
                    return Past(agent, action, was_write, met)
        latest = table[agent][units]  # it is no longer logged: take the earliest of those that replaced it
        return Past(agent, int(latest.min()), was_write, units[latest == latest.min()])

    def _spread(self, unit: int) -> None:
        if self._writes is not None and not self._plain and not self._rows:
            return
        log: list[_Entry] = [
            (agent, index, write, layout, None) for (agent, write, layout), index in self._plain.items()
        ]
        log = sorted(log + self._rows, key=lambda entry: entry[1])
        agents = 1 + max((entry[0] for entry in log), default=0)
        if self._reads is None or self._writes is None:
            self.unit_bytes = unit or _DEFAULT_UNIT_BYTES
            while self.capacity // self.unit_bytes > _MAX_UNITS:
                self.unit_bytes *= 2
            num_units = -(-self.capacity // self.unit_bytes)
            self._reads = np.zeros((agents, num_units), np.int32)
            self._writes = np.zeros((agents, num_units), np.int32)
        if self._reads.shape[0] < agents:
            more = np.zeros((agents, self._reads.shape[1]), np.int32)  # twice as many, or all that there are
            self._reads, self._writes = (np.concatenate((self._reads, more)), np.concatenate((self._writes, more)))
        for agent, index, write, layout, rows in log:
            (self._writes if write else self._reads)[agent][self._units(layout, rows)] = index
        self._past.extend(log)
        self._plain.clear()
        self._rows.clear()

    def _units(self, layout: Layout, rows: Rows | None) -> Units:
        return units_of(layout, rows, self.unit_bytes)


def units_of(layout: Layout, rows: Rows | None, unit: int) -> Units:
    """The units of ``unit`` bytes that ``layout``, or its ``rows``, covers in part or whole."""
    if rows is not None:
        return _row_units(layout, rows, unit)
    pieces = [(start // unit, -(-end // unit)) for start, end in layout.ranges]
    if len(pieces) == 1:
        return slice(*pieces[0])
    if not pieces:
        return slice(0, 0)
    return np.concatenate([np.arange(first, last) for first, last in pieces])


def _row_units(layout: Layout, rows: Rows, unit: int) -> Units:
    form = layout.form
    num_rows = form.shape[0]
    rows = np.where(rows < 0, rows + num_rows, rows)
    rows = rows[(rows >= 0) & (rows < num_rows)]  # the bounds check reports the others
    step = form.stride[0] * form.itemsize
    starts = layout.offset * form.itemsize + rows * step
    span = form.nbytes - (num_rows - 1) * step
    if span <= unit and step % unit == 0 and layout.offset * form.itemsize % unit == 0:
        return starts // unit
    first, last = starts // unit, -(-(starts + span) // unit)
    width = int((last - first).max(initial=0))
    units = np.minimum(first[:, None] + np.arange(width), last[:, None] - 1)
    return np.unique(units)
