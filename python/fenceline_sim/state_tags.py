"""Tags of recurrent states: the prefix of whose tokens each slot carries the state, part by part.

What a step must find in a row's slot, and leave in a snapshot, follows from its requests alone. So a state of another
request, or after too few or too many tokens, is reported at the operation that takes it for the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from fenceline.memory_order.edges import ACCEPTED_STATE, ENDS_AT_STATE, LOADED_STATE, ROW_STATE, SNAPSHOT_AFTER, Guard
from fenceline_sim.accounts import NOTHING, Seq
from fenceline_sim.image_tags import Report
from fenceline_sim.memory import Access, Tag, row_values
from fenceline_sim.streams import Operation

SINK_SLOT = 0
NOT_KEPT = " of tokens that may be rejected"  # at the end of a kernel's label
_MEMORY = "states"


class StatePart(NamedTuple):
    """A request's part of a step, in which its state goes from that after ``first`` tokens to that after ``length``.
    ``ends``: its prefixes by token."""

    name: str
    first: int
    length: int
    ends: Sequence[int]


class StateTags:
    def __init__(self, carried: Tag, nbytes: int, grid: int, describe: Callable[[int], str], report: Report) -> None:
        """``carried``: the memory of the slots, each of ``nbytes``. ``describe`` names a prefix."""
        self.carried, self.grid, self.report = carried, grid, report
        self._nbytes, self._describe = nbytes, describe
        self._held: dict[int, dict[int, int]] = {}  # by where a part lies in a slot, and by slot
        self.begun: set[int] = set()  # rows that got the state of a prefix from a snapshot
        self.loaded: set[int] = set()  # from the host
        self.absorbed: dict[int, int] = {}  # by row: how many tokens its state must have absorbed
        self.host: Tag | None = None  # the memory of the slots on the host
        self.on_host: dict[int, dict[int, int]] = {}  # by slot there, what each part holds

    def at(self, part: StatePart, length: int) -> int:
        """The prefix whose state its slot carries when the request has ``length`` tokens."""
        absorbed = length // self.grid * self.grid
        return part.ends[absorbed - 1] if absorbed else NOTHING

    def slot_of(self, access: Access) -> int:
        return access.layout.offset * access.layout.form.itemsize // self._nbytes

    def part_of(self, access: Access) -> dict[int, int]:
        """By slot, what the part of a layer holds."""
        first = access.layout.offset * access.layout.form.itemsize % self._nbytes
        return self._held.setdefault(first, {})

    def copied(self, source: int, slot: int) -> None:
        for held in self._held.values():
            held[slot] = held.get(source, NOTHING)

    def moved(self, op: Operation) -> bool:
        """Whether ``op``, of a transfer, has copied a state from one tier to the other."""
        read, write = op.reads[0], op.writes[0]
        if self.host is None or self.host not in (read.tag, write.tag):
            return False
        source, slot = self.slot_of(read), self.slot_of(write)
        if write.tag is self.host:
            self.on_host[slot] = {first: held.get(source, NOTHING) for first, held in self._held.items()}
        else:
            for first, end in self.on_host.get(source, {}).items():
                self._held[first][slot] = end
        return True

    def audit(self, end: int, slot: int, host_slot: int | None) -> None:
        """The tree has these slots for the state of the prefix ``end``."""
        held = {end if not slot else of_part.get(slot, NOTHING) for of_part in self._held.values()}
        held |= set() if host_slot is None else set(self.on_host.get(host_slot, {0: NOTHING}).values())
        assert held <= {end}, f"tags: states slot {slot}, host slot {host_slot} are not after {self._describe(end)}"

    def check(self, op: Operation, held: Mapping[int, int], slot: int, right: int, what: str, guard: Guard) -> None:
        found = held.get(slot, NOTHING)
        if found != right:
            states = [f"that after {self._describe(end)}" if end else "none" for end in (found, right)]
            text = f"states slot {slot} holds {states[0]}, and must hold {states[1]}, {what}\n  by"
            self.report(op, _MEMORY, text, guard.name)

    def check_slot(self, op: Operation, slot: int, right: int, what: str, guard: Guard) -> None:
        for held in self._held.values():
            self.check(op, held, slot, right, what, guard)


class StepStates:
    def __init__(self, states: StateTags, seqs: Sequence[Seq], snapshots: Collection[tuple[int, int]]) -> None:
        """``snapshots``: those that it makes of its rows, (row, slot)."""
        self._states, self._by_row, self._snapshots = states, {seq.row: seq for seq in seqs}, snapshots
        # Of a step that verifies drafts: by row each request's part, if it absorbs these or not, when it runs.
        self.verified: Callable[[bool], Mapping[int, StatePart]] | None = None
        self._parts: Mapping[int, StatePart] = {}
        first = {seq.row for seq in seqs if seq.first == 0}
        states.begun -= first
        states.loaded -= first

    def ran(self, op: Operation, access: Access, writes: bool) -> None:
        states = self._states
        if access.tag is not states.carried:
            return
        if access.rows is not None:
            held = states.part_of(access)
            if self.verified is not None and not self._parts:
                self._parts = self.verified(not op.label.endswith(NOT_KEPT))
            for slot in set(row_values(access.rows).tolist()) - {SINK_SLOT}:
                part = self._part(slot)
                if writes:
                    held[slot] = states.at(part, part.length)
                    if self.verified is None:
                        states.absorbed[slot] = part.length // states.grid * states.grid
                elif part.first >= states.grid:
                    guard = ROW_STATE if slot in states.begun else ENDS_AT_STATE
                    guard = LOADED_STATE if slot in states.loaded else guard
                    guard = guard if self.verified is None else ACCEPTED_STATE
                    what = f"read for token {part.first} of {part.name}"
                    states.check(op, held, slot, states.at(part, part.first), what, guard)
        elif writes:
            source, slot = states.slot_of(op.reads[0]), states.slot_of(access)
            states.copied(source, slot)
            if (source, slot) in self._snapshots:
                part = self._part(source)
                right = states.at(part, part.length)
                states.check_slot(op, slot, right, "a snapshot of its step", SNAPSHOT_AFTER)

    def _part(self, row: int) -> StatePart:
        if self.verified is not None:
            return self._parts[row]
        seq = self._by_row[row]
        return StatePart(seq.account.name, seq.first, seq.length, seq.account.ends)


class StateCopy:
    """The purpose of a copy of a state beside the steps."""

    def __init__(self, states: StateTags, source: int, slot: int, right: int | None, guard: Guard) -> None:
        """``right``: the prefix whose state ``slot`` must have; None: its reader knows. ``guard``: it ensures that."""
        self._states, self._source, self._slot, self._right, self._guard = states, source, slot, right, guard
        states.begun.add(slot)
        states.loaded.discard(slot)

    def ran(self, op: Operation) -> None:
        states = self._states
        if not any(write.tag is states.carried for write in op.writes):
            return
        states.copied(self._source, self._slot)
        if self._right is not None:
            states.check_slot(op, self._slot, self._right, "the state of a request's row", self._guard)
