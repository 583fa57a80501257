"""The happens-before detector: finds two accesses to the same memory that nothing orders, on any schedule.

Clocks are computed when work is submitted (``streams``); accesses are compared when it runs, when index values
are known. One run finds a race whichever of the two operations the schedule put first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fenceline_sim.errors import RaceError
from fenceline_sim.layout import Layout, layout_of
from fenceline_sim.memory import Tag, rows_of
from fenceline_sim.pairs import PairsMet
from fenceline_sim.report import Conflict, race_error
from fenceline_sim.shadow import Rows, Shadow
from fenceline_sim.streams import RELEASE, HostThread, Operation, VirtualStream

_NONE: Sequence[RaceError] = ()


class Detector:
    """Checks every access of ``agents``, by their numbers, against the region's shadow."""

    def __init__(self, agents: Sequence[VirtualStream | HostThread]) -> None:
        self._agents = agents
        self.pairs: PairsMet | None = None  # if they are to be noted
        self.num_accesses = 0
        # By two agents, whether each of them writes, and whether the memory may have one user at a time.
        self._joined: dict[tuple[int, int, bool, bool, bool], bool] = {}

    def check(self, op: Operation) -> Sequence[RaceError]:
        """Compare and record the accesses of ``op``, just before it runs, when its index values are known."""
        conflicts: list[Conflict] = []
        for access in op.reads:
            self._touch(op, access.tag, access.layout, rows_of(access), False, conflicts)
        if op.spin is not None and op.spin.reads_what_it_waits_for:
            conflicts.clear()  # it has seen that what it reads is written
        for access in op.writes:
            self._touch(op, access.tag, access.layout, rows_of(access), True, conflicts)
        return [race_error(conflict) for conflict in conflicts] if conflicts else _NONE

    def look_ahead(self, op: Operation) -> list[RaceError]:
        """Compare and record those accesses of ``op``, which has not run, that depend on no index."""
        conflicts: list[Conflict] = []
        for accesses, write in ((op.reads, False), (op.writes, True)):
            for tag, layout, index in accesses:
                if index is None:
                    self._touch(op, tag, layout, None, write, conflicts)
        return [race_error(conflict) for conflict in conflicts]

    def host_access(self, op: Operation, tag: Tag, tensor: torch.Tensor, write: bool) -> list[RaceError]:
        """Compare and record an access that the host makes now, as its action ``op``."""
        conflicts: list[Conflict] = []
        self._touch(op, tag, layout_of(tensor), None, write, conflicts)
        return [race_error(conflict) for conflict in conflicts]

    def _touch(
        self, op: Operation, tag: Tag, layout: Layout, rows: Rows | None, write: bool, conflicts: list[Conflict]
    ) -> None:
        region, agent, clock = tag.region, op.agent, op.clock
        shadow = region.shadow
        if shadow is None:
            shadow = region.shadow = Shadow(region.capacity)
        self.num_accesses += 1
        writers, readers = shadow.last_writes, shadow.last_reads
        if self.pairs is not None and (
            self._may_pair(self.pairs, op, write, tag, writers, True)
            or (write and self._may_pair(self.pairs, op, write, tag, readers, False))
        ):
            for number, action, was_write in shadow.conflicting(agent, write, layout, rows, tag.row_bytes):
                self.pairs.note(self._agents[number].action(action), was_write, op, write, tag)
        doubtful = (len(writers) > (agent in writers) and _beyond(writers, agent, clock)) or (
            write and len(readers) > (agent in readers) and _beyond(readers, agent, clock)
        )
        if doubtful:
            for past in shadow.unordered(agent, clock, write, layout, rows, tag.row_bytes):
                other = self._agents[past.agent].action(past.action)
                if other.label == RELEASE and op.is_ahead:
                    # The memory was freed to its stream since: report the operation that wrote it there.
                    other = self._agents[past.agent].action(writers.get(past.agent, past.action))
                elif op.label == RELEASE and other.is_ahead and other.seq > op.seq:
                    continue  # the same in the other order: the operation that writes the memory will be reported
                conflicts.append(Conflict(op, write, other, past.was_write, tag, past.units, shadow.unit_bytes))
        elif write and layout is region.whole:
            shadow.forget_before(agent, op.index, layout)
            return
        shadow.note(agent, op.index, write, layout, rows, tag.row_bytes)

    def _may_pair(
        self, pairs: PairsMet, op: Operation, write: bool, tag: Tag, latest: Mapping[int, int], wrote: bool
    ) -> bool:
        """Whether an edge joins the stream of ``op`` and that of another agent in ``latest``, which ``wrote`` or
        read. Most memory is used by streams that none joins, and which units of it were used costs more to find out."""
        agent = op.agent
        for other in latest:
            if other == agent:
                continue
            key = (agent, other, wrote, write, tag.is_exclusive)
            joined = self._joined.get(key)
            if joined is None:
                source, mine = self._agents[other], self._agents[agent]
                may_join = source.device == mine.device and pairs.may_join(source.edge_name, wrote, op, write, tag)
                joined = self._joined[key] = may_join
            if joined:
                return True
        return False


def _beyond(latest: dict[int, int], agent: int, clock: tuple[int, ...]) -> bool:
    """Whether some other agent's latest access is not in ``clock``."""
    for other, index in latest.items():  # noqa: SIM110 - any() takes twice as long here
        if other != agent and (other >= len(clock) or index > clock[other]):
            return True
    return False
