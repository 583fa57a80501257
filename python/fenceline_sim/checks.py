"""Checks for what happens-before cannot detect: memory used in the right order but in the wrong way.

* freshness: after ``begin_fill``, rows that are read must have been written since, and not by an earlier batch;
* generation: a leased view of such memory is valid until the next ``begin_fill``;
* protection: no graph may write memory that only the host's plan may write;
* bounds: an index names an existing row. Torch counts negative ones from the end, where another request's row is.

The checks follow the order of the program, each operation's ``seq``, and not the order of the schedule. Except bounds,
they apply to memory for which the program has asked for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fenceline.memory_order.access import row_numbers
from fenceline_sim.errors import BoundsError, CheckError, FreshnessError, GenerationError, ProtectionError
from fenceline_sim.findings import Findings
from fenceline_sim.memory import Access, Bound, Tag, rows_of
from fenceline_sim.place import Place, here
from fenceline_sim.shadow import Rows, units_of
from fenceline_sim.streams import Agent, Operation, who

_DEFAULT_UNIT_BYTES = 16
_MAX_FILLS = 256  # fills that are kept; operations in flight are much younger
_MAX_SHOWN = 6


class Checks:
    """The checks of one virtual GPU. ``moment`` returns a number less than the ``seq`` of all later operations."""

    def __init__(self, findings: Findings, moment: Callable[[], int], agents: Sequence[Agent], enabled: bool) -> None:
        self.enabled = enabled
        self._findings = findings
        self._moment = moment
        self._agents = agents
        self._watches: dict[Tag, Watch] = {}  # of memory of which something is asked

    def begin_fill(self, tensors: Sequence[torch.Tensor], guard: str = "") -> None:
        """From now on reads of ``tensors`` must find values written from now on; leased views of them become invalid.

        ``guard`` is the name in reports of the mechanism that ensures this.
        """
        if self.enabled:
            fill = Fill(self._moment(), here(), guard)
            for tensor in tensors:
                self._watch(tensor).begin_fill(fill)

    def protect_from_graphs(self, tensor: torch.Tensor, guard: str = "") -> None:
        """No graph may write the memory of ``tensor``, or ``ProtectionError`` is raised at capture or replay."""
        if self.enabled:
            self._watch(tensor).protected_by = guard

    def lease(self, tensor: torch.Tensor) -> None:
        """``tensor`` and views made of it are valid until the next ``begin_fill`` of their memory."""
        if self.enabled:
            tensor.generation = self._watch(tensor).generation  # type: ignore[attr-defined]

    def run(self, op: Operation) -> None:
        """``op`` is about to run: report its errors and record its writes."""
        if self.enabled:
            errors = self._check(op)
            if errors:
                self._findings.add_errors(errors)

    def use(self, tag: Tag, generation: int) -> None:
        watch = self._watches.get(tag)
        if watch is not None and watch.generation != generation:
            fill, place = watch.fill, here()
            lines = [
                f"generation: {tag}, leased in generation {generation}, is used in generation {watch.generation}",
                f"  used at {place}",
                f"  that generation began at {fill.place}",
            ]
            self.found(GenerationError("\n".join(lines), "", str(tag), (str(fill.place), str(place))))

    def graph_write(self, op: Operation, tag: Tag, graph: str) -> None:
        watch = self._watches.get(tag)
        if watch is not None and watch.protected_by is not None:
            text = f"protection: no graph may write {tag}, and every replay of {graph} does"
            place = str(op.place)
            text += f"\n  captured: {op.label} at {place}"
            self.found(ProtectionError(text, watch.protected_by, str(tag), (place,), op.seq))

    def found(self, error: CheckError) -> None:
        """Raise ``error``, or keep it."""
        if self.enabled:
            self._findings.add_errors([error])

    def _watch(self, tensor: torch.Tensor) -> Watch:
        tag: Tag = tensor.allocation.tag  # type: ignore[attr-defined]
        watch = self._watches.get(tag)
        if watch is None:
            watch = self._watches[tag] = Watch(tag, self._agents)
        return watch

    def _check(self, op: Operation) -> list[CheckError]:
        watches = self._watches
        found: list[CheckError] = []
        for access in op.reads:
            watch = watches.get(access.tag)
            if watch is not None:
                error = watch.check_read(op, access)
                if error is not None:
                    found.append(error)
        for access in op.writes:
            watch = watches.get(access.tag)
            if watch is not None:
                watch.note_write(op, access)
        for bound in op.bounds:
            values = bound.values.numpy()
            if values.size and (np.minimum.reduce(values, None) < 0 or np.maximum.reduce(values, None) >= bound.size):
                source = bound.source
                watch = None if source is None else watches.get(source.tag)
                writer = None if source is None or watch is None else watch.last_writer(source)
                found.append(_out_of_bounds(op, bound, values.reshape(-1), writer))
        return found


class Fill(NamedTuple):
    """A fill: it begins at ``seq`` in the program, and a guard ensures that all rows are written."""

    seq: int
    place: Place
    guard: str


class Watch:
    """The checks of one allocation of memory, and the last writers of its units as positions in the agents' orders."""

    __slots__ = ("_agents", "_fills", "_seqs", "_tag", "_unit", "_writers", "generation", "protected_by")

    def __init__(self, tag: Tag, agents: Sequence[Agent]) -> None:
        self._tag = tag
        self._agents = agents
        self._unit = tag.row_bytes or _DEFAULT_UNIT_BYTES
        num_units = -(-tag.region.capacity // self._unit)
        self._seqs = np.zeros(num_units, np.int64)
        self._writers = np.zeros((num_units, 2), np.int32)  # agent, and index from 1, 0: none
        self._fills: list[Fill] = []
        self.generation = 0  # how often a fill has begun
        self.protected_by: str | None = None  # the guard that keeps graphs from writing it; None if they may

    def begin_fill(self, fill: Fill) -> None:
        self.generation += 1
        self._fills.append(fill)
        if len(self._fills) > 2 * _MAX_FILLS:
            del self._fills[:_MAX_FILLS]

    @property
    def fill(self) -> Fill:
        return self._fills[-1]

    def note_write(self, op: Operation, access: Access) -> None:
        units = units_of(access.layout, rows_of(access), self._unit)
        self._seqs[units] = op.seq
        self._writers[units] = op.agent, op.index

    def check_read(self, op: Operation, access: Access) -> CheckError | None:
        position = bisect_left(self._fills, op.seq, key=lambda fill: fill.seq)
        if position == 0:
            return None
        fill = self._fills[position - 1]
        units = units_of(access.layout, rows_of(access), self._unit)
        stale = self._seqs[units] <= fill.seq
        if not stale.any():
            return None
        found = np.unique(np.arange(len(self._seqs))[units][stale])
        return self._stale(op, fill, found)

    def last_writer(self, access: Access) -> Operation | None:
        """The last writer of the first unit there; None if that was before the memory was checked."""
        units = np.arange(len(self._seqs))[units_of(access.layout, None, self._unit)]
        return self._writer(units[0]) if len(units) else None

    def _writer(self, unit: int) -> Operation | None:
        agent, index = self._writers[unit].tolist()
        return self._agents[agent].action(index) if index else None

    def _stale(self, op: Operation, fill: Fill, units: npt.NDArray[np.int64]) -> FreshnessError:
        memory = self._name(units)
        writer = self._writer(units[0])
        written = "never written since it is watched" if writer is None else f"last written by {who(writer)}"
        lines = [
            f"freshness: {memory} read, but not written since the fill began", f"  read by {who(op)}", f"  {written}",
            f"  the fill began at {fill.place}",
        ]  # fmt: skip
        places = tuple(str(place) for place in (None if writer is None else writer.place, op.place) if place)
        return FreshnessError("\n".join(lines), fill.guard, memory, places, op.seq)

    def _name(self, units: npt.NDArray[np.int64]) -> str:
        if self._tag.row_bytes:
            return f"{self._tag} row{'s' * (len(units) > 1)} {row_numbers(units)}"
        return f"{self._tag} bytes {units[0] * self._unit}..{(units[-1] + 1) * self._unit}"


def _out_of_bounds(op: Operation, bound: Bound, values: Rows, writer: Operation | None) -> BoundsError:
    wrong = np.flatnonzero((values < 0) | (values >= bound.size))
    shown = ", ".join(str(values[i]) for i in wrong[:_MAX_SHOWN]) + (", ..." if len(wrong) > _MAX_SHOWN else "")
    writes = any(access.tag is bound.tag for access in op.writes)
    axis = "rows" if bound.axis == 0 else f"axis {bound.axis}"
    memory = f"{bound.tag} {axis}"
    lines = [
        f"bounds: {memory} 0-{bound.size - 1} indexed with {shown}",
        f"  {'written' if writes else 'read'} by {who(op)}",
    ]
    if bound.source is not None:
        source = bound.source
        lines.append(f"  the index is {source.tag}, element{'s' * (len(wrong) > 1)} {row_numbers(wrong)}")
        if writer is not None:
            lines.append(f"  written by {who(writer)}")
    negative = bool((values < 0).any())
    if negative:
        lines.append("  torch counts negative indices from the end; padding names a row that is reserved for it")
    return BoundsError("\n".join(lines), "sink" if negative else "", memory, (str(op.place),), op.seq)
