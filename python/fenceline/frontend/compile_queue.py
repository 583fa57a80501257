"""CompileQueue: the order in which grammars are compiled, so that no client waits for thousands of another client's."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple


class Tenant(NamedTuple):
    """The unit that takes turns: all requests of one priority with the same ``extra_key`` (or ``cache_salt``), by which
    a proxy distinguishes its tenants. The smallest ``rank`` goes first."""

    rank: int = 0
    extra_key: str = ""


class QueuedGrammar:
    """A grammar to be compiled. It waits in the queues of all ``tenants`` that ask for it, gets its turn with the first
    of them, and then leaves the other queues."""

    __slots__ = ("future", "is_long", "tenants")

    def __init__(self, tenant: Tenant) -> None:
        self.tenants = {tenant}
        self.is_long = False
        self.future: asyncio.Future[None] | None = None  # while it waits, and after


class CompileQueue:
    """Limits how many grammars are compiled at a time. Belongs to one event loop.

    Most grammars take milliseconds, but a hostile one takes as long as it is allowed. So each has a short turn first,
    and those that need more time wait again for a long turn. While both kinds wait, one turn at a time is a long one.
    Within a kind, the tenants of the best rank take turns."""

    def __init__(self, num_turns: int) -> None:
        """``num_turns``: how many at a time, at least two, since one of them is never a long turn."""
        assert num_turns >= 2, num_turns
        self._num_turns = num_turns
        self._num_taken = {False: 0, True: 0}  # by whether they are long ones
        self._queues: dict[bool, dict[int, OrderedDict[str, deque[QueuedGrammar]]]] = {False: {}, True: {}}

    @asynccontextmanager
    async def turn(self, grammar: QueuedGrammar, is_long: bool) -> AsyncIterator[None]:
        """Inside the context ``grammar`` has its turn; outside it neither has one nor waits for one."""
        future = grammar.future = asyncio.get_running_loop().create_future()
        grammar.is_long = is_long
        for tenant in grammar.tenants:
            self._enqueue(grammar, tenant)
        self._begin()
        try:
            await future
            yield
        finally:
            grammar.future = None
            if future.cancelled():
                for tenant in grammar.tenants:
                    self._dequeue(grammar, tenant)
            else:
                self._num_taken[is_long] -= 1
            self._begin()

    def join(self, grammar: QueuedGrammar, tenant: Tenant) -> None:
        """``tenant`` asks for ``grammar`` too."""
        if tenant not in grammar.tenants:
            grammar.tenants.add(tenant)
            if grammar.future is not None and not grammar.future.done():
                self._enqueue(grammar, tenant)

    def leave(self, grammar: QueuedGrammar, tenant: Tenant) -> None:
        """``tenant`` does not ask for ``grammar`` any more; if it waits, another tenant does."""
        grammar.tenants.discard(tenant)
        self._dequeue(grammar, tenant)

    def _begin(self) -> None:
        """Begin as many turns as are free."""
        while sum(self._num_taken.values()) < self._num_turns:
            is_long = bool(self._queues[True]) and (not self._queues[False] or not self._num_taken[True])
            if not self._queues[is_long] or (is_long and self._num_taken[True] == self._num_turns - 1):
                return
            future = self._next(is_long)
            if not future.done():  # one that was cancelled is queued until its task has been told
                self._num_taken[is_long] += 1
                future.set_result(None)

    def _next(self, is_long: bool) -> asyncio.Future[None]:
        """The grammar whose turn it is, taken out of its queues: its future."""
        queues = self._queues[is_long]
        rank = min(queues)
        extra_key, queue = next(iter(queues[rank].items()))
        queues[rank].move_to_end(extra_key)
        grammar = queue[0]
        for tenant in grammar.tenants:
            self._dequeue(grammar, tenant)
        assert grammar.future is not None
        return grammar.future

    def _enqueue(self, grammar: QueuedGrammar, tenant: Tenant) -> None:
        queues = self._queues[grammar.is_long].setdefault(tenant.rank, OrderedDict())
        queues.setdefault(tenant.extra_key, deque()).append(grammar)

    def _dequeue(self, grammar: QueuedGrammar, tenant: Tenant) -> None:
        """Out of the queue of ``tenant``, if it is there."""
        queues = self._queues[grammar.is_long]
        queue = queues.get(tenant.rank, OrderedDict()).get(tenant.extra_key, ())
        if grammar in queue:
            queues[tenant.rank][tenant.extra_key].remove(grammar)
            if not queues[tenant.rank][tenant.extra_key]:
                del queues[tenant.rank][tenant.extra_key]
            if not queues[tenant.rank]:
                del queues[tenant.rank]
