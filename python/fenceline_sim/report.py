"""Reports of the detector: both operations, the memory, the hazard and the missing edge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fenceline.memory_order.access import row_numbers
from fenceline.memory_order.checker import fitting_edges, hazard_of, missing_edge
from fenceline.memory_order.edges import Edge, Hazard
from fenceline_sim.errors import RaceError
from fenceline_sim.memory import Tag
from fenceline_sim.pairs import stream_name
from fenceline_sim.streams import RELEASE, Operation


@dataclass(frozen=True, slots=True)
class Conflict:
    """``op`` and ``other`` access ``units`` (of ``unit_bytes`` each) of ``tag``'s memory and nothing orders them."""

    op: Operation
    op_writes: bool
    other: Operation
    other_wrote: bool
    tag: Tag
    units: npt.NDArray[np.int64]
    unit_bytes: int

    @property
    def in_program_order(self) -> tuple[tuple[Operation, bool], tuple[Operation, bool]]:
        """The two in the order in which they were submitted, each with whether it writes."""
        pair = ((self.other, self.other_wrote), (self.op, self.op_writes))
        return pair if self.other.seq < self.op.seq else (pair[1], pair[0])

    @property
    def hazard(self) -> Hazard:
        if self.tag.is_exclusive:
            return Hazard.EXCLUSIVE
        (_, first_writes), (_, second_writes) = self.in_program_order
        return hazard_of(first_writes, second_writes)

    @property
    def edges(self) -> list[Edge]:
        (first, _), (second, _) = self.in_program_order
        if self.tag.guards:
            return []
        if first.stream is not None and second.stream is not None and first.stream.device != second.stream.device:
            return []
        return fitting_edges(self.hazard, stream_name(first), stream_name(second))

    @property
    def memory(self) -> str:
        """The memory's name, with its rows, or with bytes if it has no rows."""
        if self.tag.is_exclusive:
            return f"resource {self.tag.name}"
        if self.tag.row_bytes == self.unit_bytes:
            return f"{self.tag} row{'s' * (len(self.units) > 1)} {row_numbers(self.units)}"
        first, last = int(self.units[0]) * self.unit_bytes, (int(self.units[-1]) + 1) * self.unit_bytes
        return f"{self.tag} bytes {first}..{last}"


def race_error(conflict: Conflict) -> RaceError:
    (first, first_writes), (second, second_writes) = conflict.in_program_order
    edges = conflict.edges
    guards = conflict.tag.guards.get(conflict.hazard, ())
    lines = _wrong_stream(conflict) or [
        f"race: {conflict.hazard.value} on {conflict.memory}", f"  1. {_describe(conflict, first, first_writes)}",
        f"  2. {_describe(conflict, second, second_writes)}", f"  {_missing(conflict, guards)}",
    ]  # fmt: skip
    return RaceError(
        "\n".join(lines), edge=edges[0].name if edges else "", edges=tuple(edge.name for edge in edges) or guards,
        hazard=conflict.hazard.value, memory=conflict.memory, places=(str(first.place), str(second.place)),
        order=(second.seq, first.seq),
    )  # fmt: skip


def _missing(conflict: Conflict, guards: tuple[str, ...]) -> str:
    (first, _), (second, _) = conflict.in_program_order
    if guards:
        return f"nothing orders them; missing guard: {' or '.join(guards)}"
    if _where(first) == _where(second):
        return "nothing orders them: 2 may begin before 1 ends; read after the wait, or let another kernel come first"
    return missing_edge(conflict.edges, _where(first), _where(second))


def _wrong_stream(conflict: Conflict) -> list[str]:
    """The report if the second operation is the release of a tensor. The mistake is then that the tensor was used on a
    stream that its memory does not belong to, and not that its memory is allocated again."""
    (use, writes), (release, _) = conflict.in_program_order
    if release.label != RELEASE:
        return []
    return [
        f"wrong stream: {conflict.memory} belongs to {release.where}, and is used on {use.where}",
        f"  1. {_describe(conflict, use, writes)}",
        f"  2. its last tensor is dropped, so it goes back to {release.where} ({release.where}#{release.index}); "
        f"allocated there at {release.place}",
        f"  nothing orders them: do 1 on {release.where}, or let {release.where} wait for it before 2",
    ]


def _where(op: Operation) -> str:
    """The agent, or for a kernel's early reads the kernel's stream."""
    return op.where if op.stream is None else op.stream.is_ahead_of or op.where


def _describe(conflict: Conflict, op: Operation, writes: bool) -> str:
    verb = "occupies" if conflict.tag.is_exclusive else "writes" if writes else "reads"
    return f"{op.label} {verb} it on {_where(op)} ({op.where}#{op.index}), {op.place}"
