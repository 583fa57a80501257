"""Tags of recurrent states: the prefix of whose tokens each slot carries the state, part by part.

What a step must find in a row's slot, and leave in a snapshot, follows from its requests alone. So a state of another
request, or after too few or too many tokens, is reported at the operation that takes it for the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fenceline.memory_order.edges import COMMITTED_STATE, ENDS_AT_STATE, ROW_STATE, SNAPSHOT_AFTER, Guard
from fenceline_sim.accounts import NOTHING, Seq
from fenceline_sim.image_tags import Report
from fenceline_sim.memory import Access, Tag, row_values
from fenceline_sim.streams import Operation

SINK_SLOT = 0
_MEMORY = "states"


class StateTags:
    """Those of one engine, whose model has recurrent layers."""

    def __init__(self, carried: Tag, nbytes: int, grid: int, describe: Callable[[int], str], report: Report) -> None:
        """``carried``: the memory of the slots, each of ``nbytes``. ``describe`` names a prefix."""
        self.carried, self.grid, self.report = carried, grid, report
        self._nbytes, self._describe = nbytes, describe
        self._held: dict[int, dict[int, int]] = {}  # by where a part lies in a slot, and by slot
        self.begun: set[int] = set()  # rows that got the state of a prefix

    def at(self, seq: Seq, length: int) -> int:
        """The prefix whose state its slot carries when the request has ``length`` tokens."""
        absorbed = length // self.grid * self.grid
        return seq.account.ends[absorbed - 1] if absorbed else NOTHING

    def slot_of(self, access: Access) -> int:
        """The slot that a copy accesses."""
        return access.layout.offset * access.layout.form.itemsize // self._nbytes

    def part_of(self, access: Access) -> dict[int, int]:
        """By slot, what the part of a layer holds."""
        first = access.layout.offset * access.layout.form.itemsize % self._nbytes
        return self._held.setdefault(first, {})

    def copied(self, source: int, slot: int) -> None:
        for held in self._held.values():
            held[slot] = held.get(source, NOTHING)

    def check(self, op: Operation, held: Mapping[int, int], slot: int, right: int, what: str, guard: Guard) -> None:
        """``slot`` must hold the state of the prefix ``right``."""
        found = held.get(slot, NOTHING)
        if found != right:
            states = [f"that after {self._describe(end)}" if end else "none" for end in (found, right)]
            text = f"states slot {slot} holds {states[0]}, and must hold {states[1]}, {what}\n  by"
            self.report(op, _MEMORY, text, guard.name)

    def check_slot(self, op: Operation, slot: int, right: int, what: str, guard: Guard) -> None:
        for held in self._held.values():
            self.check(op, held, slot, right, what, guard)


class StepStates:
    """The states of a step."""

    def __init__(self, states: StateTags, seqs: Sequence[Seq], snapshots: Collection[tuple[int, int]]) -> None:
        """``snapshots``: those that it makes of its rows, (row, slot)."""
        self._states, self._by_row, self._snapshots = states, {seq.row: seq for seq in seqs}, snapshots
        states.begun -= {seq.row for seq in seqs if seq.first == 0}

    def ran(self, op: Operation, access: Access, writes: bool) -> None:
        """``op`` has accessed memory."""
        states = self._states
        if access.tag is not states.carried:
            return
        if access.rows is not None:
            held = states.part_of(access)
            for slot in set(row_values(access.rows).tolist()) - {SINK_SLOT}:
                seq = self._by_row[slot]
                if writes:
                    held[slot] = states.at(seq, seq.length)
                elif seq.first >= states.grid:
                    guard = ROW_STATE if slot in states.begun else ENDS_AT_STATE
                    what = f"read for token {seq.first} of {seq.account.name}"
                    states.check(op, held, slot, states.at(seq, seq.first), what, guard)
        elif writes:
            source, slot = states.slot_of(op.reads[0]), states.slot_of(access)
            states.copied(source, slot)
            if (source, slot) in self._snapshots:
                right = states.at(self._by_row[source], self._by_row[source].length)
                states.check_slot(op, slot, right, "a snapshot of its step", SNAPSHOT_AFTER)


class StateCopy:
    """The purpose of a copy of a state beside the steps."""

    def __init__(self, states: StateTags, source: int, slot: int, right: int | None) -> None:
        """``right``: the prefix whose state ``slot`` must have; None: its reader knows."""
        self._states, self._source, self._slot, self._right = states, source, slot, right
        states.begun.add(slot)

    def ran(self, op: Operation) -> None:
        states = self._states
        if not any(write.tag is states.carried for write in op.writes):
            return
        states.copied(self._source, self._slot)
        if self._right is not None:
            states.check_slot(op, self._slot, self._right, "the last of a request that has left", COMMITTED_STATE)
