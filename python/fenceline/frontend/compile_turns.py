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
        self._lines: dict[bool, dict[int, OrderedDict[str, deque[asyncio.Future[None]]]]] = {
            False: {},
            True: {},
        }

    @asynccontextmanager
    async def turn(self, party: Party, is_long: bool) -> AsyncIterator[None]:
        """Inside, it is the turn of one grammar of ``party``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._lines[is_long].setdefault(party.rank, OrderedDict()).setdefault(party.extra_key, deque())
        line.append(future)
        self._begin()
        try:
            await future
            yield
        finally:
            if future.cancelled():
                self._leave(party, is_long, future)
            else:
                self._num_taken[is_long] -= 1
            self._begin()

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
        """Whose turn it is, taken out of its line."""
        lines = self._lines[is_long]
        rank = min(lines)
        extra_key, line = next(iter(lines[rank].items()))
        future = line.popleft()
        lines[rank].move_to_end(extra_key)
        self._drop_empty(rank, extra_key, is_long)
        return future

    def _leave(self, party: Party, is_long: bool, future: asyncio.Future[None]) -> None:
        """One that has waited in vain; if it is still in line."""
        line = self._lines[is_long].get(party.rank, OrderedDict()).get(party.extra_key, ())
        if future in line:
            self._lines[is_long][party.rank][party.extra_key].remove(future)
            self._drop_empty(party.rank, party.extra_key, is_long)

    def _drop_empty(self, rank: int, extra_key: str, is_long: bool) -> None:
        lines = self._lines[is_long]
        if not lines[rank][extra_key]:
            del lines[rank][extra_key]
            if not lines[rank]:
                del lines[rank]
