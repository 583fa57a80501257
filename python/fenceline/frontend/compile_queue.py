"""CompileQueue: the order in which grammars are compiled."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class CompileQueue:
    """Limits how many grammars are compiled at a time. Belongs to one event loop.

    Most grammars take milliseconds, but a hostile one takes as long as it is allowed. So each has a short turn first,
    and those that need more time wait again for a long turn. While both kinds wait, one turn at a time is a long one.
    Within a kind the smallest rank goes first, and then whoever came first."""

    def __init__(self, num_turns: int) -> None:
        """``num_turns``: how many at a time, at least two, since one of them is never a long turn."""
        assert num_turns >= 2, num_turns
        self._num_turns = num_turns
        self._num_taken = {False: 0, True: 0}  # by whether they are long ones
        self._waiting: dict[bool, list[tuple[int, int, asyncio.Future[None]]]] = {False: [], True: []}
        self._count = itertools.count()

    @asynccontextmanager
    async def turn(self, rank: int, is_long: bool) -> AsyncIterator[None]:
        """Inside the context the caller has its turn."""
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[is_long], (rank, next(self._count), future))
        self._begin()
        try:
            await future
            yield
        finally:
            if not future.cancelled():
                self._num_taken[is_long] -= 1
            self._begin()

    def _begin(self) -> None:
        while sum(self._num_taken.values()) < self._num_turns:
            for waiting in self._waiting.values():
                while waiting and waiting[0][2].cancelled():
                    heapq.heappop(waiting)
            is_long = bool(self._waiting[True]) and (not self._waiting[False] or not self._num_taken[True])
            if not self._waiting[is_long] or (is_long and self._num_taken[True] == self._num_turns - 1):
                return
            self._num_taken[is_long] += 1
            heapq.heappop(self._waiting[is_long])[2].set_result(None)
