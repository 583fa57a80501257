"""What operations read and write: declared once, by the code that submits them, and read by every checker.

Memory that outlives an operation is a :class:`Memory`. Just before an operation is submitted its accesses are declared,
by a function that names them one after the other::

    def backup(op: Accesses, device_pages: Rows, host_pages: Rows) -> None:
        op.read(self._kv_pages, device_pages)
        op.write(self._host_pages, host_pages)

    device.declare(StreamName.STORE, "backup of KV pages", backup, device_pages, host_pages)

Readers of declarations call that function: the checker (``--memory-check order``) compares order, and the virtual GPU
learns what the host does outside torch and which operations hold the multiprocessors. Without a reader the function is
not called, so a declaration costs one call. (The flight recorder does not read declarations: it records a step's
batch, from which the pages can be derived.)

A Memory holds what the checker knows about it: which agent accessed which rows last, and when. An agent is the host or
a stream, as a number (see ``checker``); its operations are numbered from 1, and such a number is a ``tick``. Of an
agent's accesses to a row only the last one is kept: what is ordered after it is ordered after the earlier ones.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.stream import Clock

Rows = npt.NDArray[np.integer]
_Ticks = npt.NDArray[np.int64]

_MAX_LOG = 256
_MAX_RUNS = 6  # runs of consecutive rows that a report names
NUMBERS = {name: number for number, name in enumerate(StreamName)}  # each agent's number


class Accesses(Protocol):
    """Takes the accesses of an operation that is about to be submitted. ``rows`` [N]; None means all rows. The caller
    must not change an array later. With the checker all methods raise ``OrderError``."""

    def read(self, memory: Memory, rows: Rows | None = None) -> None:
        """The operation reads ``rows``."""

    def write(self, memory: Memory, rows: Rows | None = None) -> None:
        """The operation writes ``rows``, and may read them."""

    def read_pages(self, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        """The operation reads the first ``lengths`` [N] tokens of the distinct ``rows`` [N] through the page table."""

    def append_pages(self, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        """:meth:`read_pages`; the operation also writes the last token of each row, whose page is in the table."""

    def write_table(self, memory: PagedMemory, rows: Rows, columns: Rows, pages: Rows) -> None:
        """The operation writes ``page_table[rows, columns] = pages``, all [N]."""

    def release(self, memory: Memory) -> None:
        """The host gives the memory back to its allocator, which may hand it out again."""

    def occupy_sm(self) -> None:
        """The operation occupies all multiprocessors from now on, until another stream is ordered after it (F2)."""


def reads(op: Accesses, memory: Memory) -> None:
    """The operation reads all of ``memory``."""
    op.read(memory)


def writes(op: Accesses, memory: Memory) -> None:
    """The operation writes all of ``memory``."""
    op.write(memory)


def copies(op: Accesses, source: Memory, target: Memory) -> None:
    """The operation copies all of ``source`` to ``target``."""
    op.read(source)
    op.write(target)


def releases(op: Accesses, *memories: Memory) -> None:
    """The host gives ``memories`` back to their allocators."""
    for memory in memories:
        op.release(memory)


def occupies_sm(op: Accesses) -> None:
    """The operation occupies all multiprocessors: persistent attention, or page copies by kernels."""
    op.occupy_sm()


class Past(NamedTuple):
    """An earlier access to ``rows`` (None: to all of them) that nothing orders before the present one."""

    agent: int
    tick: int
    was_write: bool
    rows: npt.NDArray[np.int64] | None


class Memory:
    """Memory of ``num_rows`` rows under the name that reports give it; with one row it is watched as a whole.
    ``tensor`` is the memory itself if it is used as a whole, else None. ``last_reads`` and ``last_writes`` hold each
    agent's latest tick over all rows, which is enough to show that most accesses are ordered. While accesses repeat
    with the same array of rows, only their tick is updated; the tables of rows are written when another array comes."""

    def __init__(self, name: str, num_rows: int = 1, row_name: str = "row", tensor: torch.Tensor | None = None) -> None:
        self.name = name
        self.num_rows = num_rows
        self.row_name = row_name
        self.tensor = tensor
        self.is_exclusive = False  # True: not memory, but a resource for one user at a time
        self.last_reads: dict[int, int] = {}
        self.last_writes: dict[int, int] = {}
        self._reads: dict[int, _Ticks] = {}  # agent → [num_rows], made at the agent's first access
        self._writes: dict[int, _Ticks] = {}
        self._pending: tuple[int, bool, Rows] | None = None  # not yet in the tables, nor is its tick
        self._pending_tick = 0

    def note(self, agent: int, tick: int, write: bool, rows: Rows | None) -> None:
        """Remember an access to ``rows``, to all of them if None. The caller must not change the array later."""
        (self.last_writes if write else self.last_reads)[agent] = tick
        if self.num_rows == 1:
            return
        pending = self._pending
        if pending is not None:
            if pending[2] is rows and pending[0] == agent and pending[1] is write:
                self._pending_tick = tick
                return
            self._write_out()
        if rows is None:
            self._table(agent, write).fill(tick)
        else:
            self._pending, self._pending_tick = (agent, write, rows), tick

    def _write_out(self) -> None:
        """Write the pending access to the tables."""
        if self._pending is not None:
            (agent, write, rows), self._pending = self._pending, None
            self._table(agent, write)[rows] = self._pending_tick

    def unordered(self, agent: int, clock: Clock, write: bool, rows: Rows | None) -> Past | None:
        """An access to ``rows`` by another agent that conflicts with this one and is not before ``clock``; None if
        there is none. Writes are looked at before reads, and of one agent's accesses the earliest is returned."""
        self._write_out()
        kinds = [(True, self.last_writes)] + ([(False, self.last_reads)] if write else [])
        for was_write, latest in kinds:
            for other, last in latest.items():
                if other == agent or last <= clock[other]:
                    continue
                if self.num_rows == 1:
                    return Past(other, last, was_write, None)
                past = self._earliest(other, was_write, clock[other], rows)
                if past is not None:
                    return past
        return None

    def describe(self, rows: npt.NDArray[np.int64] | None) -> str:
        """The memory and ``rows`` as reports name them, for example ``kv_pool pages 17-32``."""
        if rows is None:
            return self.name
        return f"{self.name} {self.row_name}{'s' * (len(rows) > 1)} {row_numbers(rows)}"

    def _earliest(self, other: int, was_write: bool, known: int, rows: Rows | None) -> Past | None:
        table = self._table(other, was_write)
        touched = np.arange(self.num_rows) if rows is None else np.unique(rows)
        ticks = table[touched]
        late = ticks > known
        if not late.any():
            return None
        first = int(ticks[late].min())
        return Past(other, first, was_write, touched[ticks == first].astype(np.int64))

    def _table(self, agent: int, write: bool) -> _Ticks:
        tables = self._writes if write else self._reads
        table = tables.get(agent)
        if table is None:
            table = tables[agent] = np.zeros(self.num_rows, dtype=np.int64)
        return table


class PagedMemory(Memory):
    """Pages of ``page_size`` tokens that ``reader`` reads through a page table of shape ``table``. A step reads all
    pages of its rows, too many to note each time. So a step's accesses are kept as rows and lengths, and are noted at
    the pages themselves only when the table changes there or when another agent's access has to be compared. The table
    here is the host's copy of the device's."""

    def __init__(self, name: str, num_pages: int, page_size: int, table: tuple[int, int], reader: StreamName) -> None:
        super().__init__(name, num_pages, "page")
        self._page_size = page_size
        self._reader = NUMBERS[reader]
        self._shape = table
        self._made: npt.NDArray[np.int32] | None = None
        self._covered = np.zeros(table[0], dtype=np.int64)  # pages of the row that were read at its tick
        self._row_ticks = np.zeros(table[0], dtype=np.int64)
        self._latest: tuple[int, Rows, Rows] | None = None  # tick, rows, lengths: not yet entered above
        self._log: list[tuple[int, Rows, Rows]] = []  # the same of each decode step, which writes last tokens

    @property
    def _page_table(self) -> npt.NDArray[np.int32]:
        """Zeros at first. It is large, so it is made at its first use: only a checker uses it."""
        if self._made is None:
            self._made = np.zeros(self._shape, dtype=np.int32)
        return self._made

    def write_table(self, rows: Rows, columns: Rows, pages: Rows) -> None:
        """The reader writes ``page_table[rows, columns] = pages``, all [N]."""
        self._cover()
        changed = columns < self._covered[rows]
        if changed.any():
            self._settle(np.unique(rows[changed]))
        self._page_table[rows, columns] = pages

    def note(self, agent: int, tick: int, write: bool, rows: Rows | None) -> None:
        self._write_log()
        super().note(agent, tick, write, rows)
        self._write_out()

    def note_rows(self, tick: int, rows: Rows, lengths: Rows, writes_last: bool) -> None:
        """The reader reads the first ``lengths`` [N] tokens of the distinct ``rows`` [N], and may write the last ones.
        The caller must not change either array later. If ``rows`` is the same array as in the last call, no length may
        be smaller than it was then."""
        self.last_reads[self._reader] = tick
        if self._latest is not None and self._latest[1] is not rows:
            self._cover()
        self._latest = (tick, rows, lengths)
        if writes_last:
            self.last_writes[self._reader] = tick
            self._log.append(self._latest)
            if len(self._log) == _MAX_LOG:
                self._write_log()

    def pages_of(self, rows: Rows, lengths: Rows) -> npt.NDArray[np.int32]:
        """The pages of the first ``lengths`` [N] tokens of ``rows`` [N], one row's after the other's."""
        num_pages = -(-lengths // self._page_size)
        live = np.arange(self._page_table.shape[1]) < num_pages[:, None]
        return self._page_table[rows][live]

    def pages_between(self, rows: Rows, first: Rows, lengths: Rows) -> npt.NDArray[np.int32]:
        """The pages of tokens ``first`` to ``lengths - 1``, both [N], of ``rows`` [N], one row's after the other's."""
        num_pages = -(-lengths // self._page_size)
        columns = np.arange(self._page_table.shape[1])
        return self._page_table[rows][(columns >= (first // self._page_size)[:, None]) & (columns < num_pages[:, None])]

    def last_pages_of(self, rows: Rows, lengths: Rows) -> npt.NDArray[np.int32]:
        """The page [N] of token ``lengths - 1`` of each row."""
        pages: npt.NDArray[np.int32] = self._page_table[rows, (lengths - 1) // self._page_size]
        return pages

    def unordered(self, agent: int, clock: Clock, write: bool, rows: Rows | None) -> Past | None:
        if agent != self._reader:
            self._cover()
            self._settle(np.flatnonzero(self._covered))
        return super().unordered(agent, clock, write, rows)

    def _cover(self) -> None:
        """Enter the latest read in ``_covered`` and ``_row_ticks``."""
        if self._latest is None:
            return
        (tick, rows, lengths), self._latest = self._latest, None
        num_pages = -(-lengths // self._page_size)
        shrunk = self._covered[rows] > num_pages
        if shrunk.any():
            self._settle(rows[shrunk])
        self._covered[rows] = num_pages
        self._row_ticks[rows] = tick

    def _settle(self, rows: Rows) -> None:
        """Note the reads of ``rows`` at their pages, and all writes."""
        self._write_log()
        table = self._table(self._reader, False)
        for row in rows.tolist():
            pages = self._page_table[row, : self._covered[row]]
            table[pages] = np.maximum(table[pages], self._row_ticks[row])
            self._covered[row] = 0

    def _write_log(self) -> None:
        """Note the decode steps' writes at the pages; the table is still as it was then (see write_table)."""
        if self._log:
            log, self._log = self._log, []
            pages = [self.last_pages_of(rows, lengths) for _, rows, lengths in log]
            ticks = np.repeat([tick for tick, _, _ in log], [len(ids) for ids in pages])
            self._table(self._reader, True)[np.concatenate(pages)] = ticks  # of a page named twice: the last tick


def row_numbers(rows: npt.NDArray[np.int64]) -> str:
    """Ascending numbers as ranges, for example ``17-32, 40``."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    runs = [(int(run[0]), int(run[-1])) for run in np.split(rows, breaks) if len(run)]
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_MAX_RUNS]]
    return ", ".join(shown) + (f" and {len(runs) - _MAX_RUNS} more runs" if len(runs) > _MAX_RUNS else "")
