"""CompileTurns: whose grammar is compiled next, so that nobody waits for another client's thousands."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple


class Party(NamedTuple):
    """Who takes turns with others: the requests of one priority with the same ``extra_key`` (or ``cache_salt``), by
    which a proxy tells tenants apart. The smallest ``rank`` goes first."""

    rank: int = 0
    extra_key: str = ""


class Place:
    """The place of one grammar in the lines of all parties that ask for it, ``parties``. It comes when the first of
    them is at its turn, and leaves the other lines then."""

    __slots__ = ("future", "is_long", "parties")

    def __init__(self, party: Party) -> None:
        self.parties = {party}
        self.is_long = False
        self.future: asyncio.Future[None] | None = None  # while it waits, and after


class CompileTurns:
    """So many grammars are compiled at a time. Lives on one event loop.

    Most take milliseconds, and a hostile one as long as it may. So each has a short turn first, and only those that
    need more wait again, for a long one. While both kinds wait, one turn at a time is a long one. Within a kind, the
    parties of the best rank take turns."""

    def __init__(self, num_turns: int) -> None:
        """``num_turns`` at a time, two at least: one of them is never a long one."""
        assert num_turns >= 2, num_turns
        self._num_turns = num_turns
        self._num_taken = {False: 0, True: 0}  # by whether they are long ones
        self._lines: dict[bool, dict[int, OrderedDict[str, deque[Place]]]] = {False: {}, True: {}}

    @asynccontextmanager
    async def turn(self, place: Place, is_long: bool) -> AsyncIterator[None]:
        """Inside, it is the turn of the grammar of ``place``, which has no turn and waits for none outside."""
        future = place.future = asyncio.get_running_loop().create_future()
        place.is_long = is_long
        for party in place.parties:
            self._line_up(place, party)
        self._begin()
        try:
            await future
            yield
        finally:
            place.future = None
            if future.cancelled():
                for party in place.parties:
                    self._leave_line(place, party)
            else:
                self._num_taken[is_long] -= 1
            self._begin()

    def join(self, place: Place, party: Party) -> None:
        """``party`` asks for it too."""
        if party not in place.parties:
            place.parties.add(party)
            if place.future is not None and not place.future.done():
                self._line_up(place, party)

    def leave(self, place: Place, party: Party) -> None:
        """``party`` does not ask for it any more; if it waits, another one does."""
        place.parties.discard(party)
        self._leave_line(place, party)

    def _begin(self) -> None:
        """Begin all turns that there are."""
        while sum(self._num_taken.values()) < self._num_turns:
            is_long = bool(self._lines[True]) and (not self._lines[False] or not self._num_taken[True])
            if not self._lines[is_long] or (is_long and self._num_taken[True] == self._num_turns - 1):
                return
            future = self._next(is_long)
            if not future.done():  # one who has left is in line until its task has been told
                self._num_taken[is_long] += 1
                future.set_result(None)

    def _next(self, is_long: bool) -> asyncio.Future[None]:
        """Whose turn it is, taken out of its lines."""
        lines = self._lines[is_long]
        rank = min(lines)
        extra_key, line = next(iter(lines[rank].items()))
        lines[rank].move_to_end(extra_key)
        place = line[0]
        for party in place.parties:
            self._leave_line(place, party)
        assert place.future is not None
        return place.future

    def _line_up(self, place: Place, party: Party) -> None:
        lines = self._lines[place.is_long].setdefault(party.rank, OrderedDict())
        lines.setdefault(party.extra_key, deque()).append(place)

    def _leave_line(self, place: Place, party: Party) -> None:
        """Out of the line of ``party``, if it is there."""
        lines = self._lines[place.is_long]
        line = lines.get(party.rank, OrderedDict()).get(party.extra_key, ())
        if place in line:
            lines[party.rank][party.extra_key].remove(place)
            if not lines[party.rank][party.extra_key]:
                del lines[party.rank][party.extra_key]
            if not lines[party.rank]:
                del lines[party.rank]
