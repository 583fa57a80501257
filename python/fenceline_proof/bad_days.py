"""Storage that fails: at random calls, by a seed.

No answer may depend on what storage keeps, so nothing is compared here. What disks and people do to a storage directory
is tested beside it (test/unit/mem_cache/test_storage_*.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

from fenceline.mem_cache.storage.backend import Reason
from fenceline.mem_cache.storage.controller import StorageController
from fenceline.mem_cache.storage.file_backend import FileBackend

# Seconds without news after which storage counts as stalled: more than five steps of the loop and less than six.
_SHORT_PATIENCE_S = 0.055
_TICK_NS = 10**6
_KINDS = ("refusal", "refusal", "crash", "slow")


class CrashError(Exception):
    """What a backend raises, which it promises not to do."""


def order_calls(controller: StorageController, clock: Callable[[], float]) -> None:
    """Let ``clock`` be the controller's, and times of use have an order: the machine's clock may stand still between
    two calls, and who leaves storage first must not depend on it."""
    controller._clock = clock
    for backend in (controller._backend, controller._states and controller._states.backend):
        start_ns, calls = time.time_ns(), count(1)
        if backend is not None:
            assert isinstance(backend, FileBackend), "the one that the flags can ask for"
            backend._clock = lambda start_ns=start_ns, calls=calls: start_ns + next(calls) * _TICK_NS  # type: ignore[misc]


class BadDays:
    """Makes the storage of ``controller`` fail at random calls: pages that it does not write or has lost, some of which
    leave rubbish in their host pages, calls that take long or raise. It then counts as not answering after a few steps,
    and in half of the runs few pages are written or fetched at once. ``events``: what has happened."""

    def __init__(
        self, controller: StorageController, seed: int, pause: Callable[[int], None] = lambda num_polls: None
    ) -> None:
        """``pause`` holds the calling thread up until the scheduler has looked for news so many times."""
        self.events: set[str] = set()
        self._pause, self._random = pause, Random(seed)
        controller._limits = replace(controller._limits, stall_s=_SHORT_PATIENCE_S)
        if seed % 2 == 0:
            controller._limits = replace(controller._limits, max_write_pages=3, max_fetch_pages=3, max_prefetches=2)
            controller._max_write_pages = controller._max_fetch_pages = 3
        for backend in (controller._backend, controller._states and controller._states.backend):
            for name in ("exists", "get", "set") if backend else ():
                setattr(backend, name, self._failing(name, getattr(backend, name)))

    def _failing(self, name: str, call: Callable[..., list[bool]]) -> Callable[..., list[bool]]:
        def failing(keys: Any, *pages: Any) -> list[bool]:
            random = self._random
            kind = random.choice(_KINDS) if random.random() < 0.5 else ""
            if kind == "crash":
                self.events.add("storage raises")
                raise CrashError("a call of the storage raises")
            if kind == "slow":
                self._pause(random.randint(1, 16))
            served = [kind != "refusal" or random.random() < 0.4 for _ in keys]
            some = ([one for one, is_served in zip(each, served, strict=True) if is_served] for each in (keys, *pages))
            results = iter(call(*some))
            if name == "get":
                for parts in (parts for parts, is_served in zip(pages[0], served, strict=True) if not is_served):
                    parts[-1][:] = random.randrange(256)
            if name == "set" and not all(served):
                self.events.add("storage refuses a write")
            return [is_served and next(results) for is_served in served]

        return failing


def events_of(backend: FileBackend) -> set[str]:
    """The events that the storage itself has counted."""
    stats = backend.stats()
    found = {"eviction from storage": stats.evictions, "nothing may leave storage": stats.errors[Reason.FULL]}
    return {event for event, num in found.items() if num}
