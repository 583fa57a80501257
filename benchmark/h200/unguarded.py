"""Removes the guards that take time with --memory-check off, for benchmarks only.

Everything that orders the device's work stays (waits, Points, copies, pads, the arena's fill), because without it
tokens would be wrong. Only checks that can raise, and the records that they need, are removed. Run it with ``python
-O``, which removes the assertions as well, and with --flight-recorder-steps 0.
"""

from __future__ import annotations

from fenceline.memory_order.arena import Arena, ArenaOutputs
from fenceline.memory_order.device import Device
from fenceline.memory_order.graph import Graph
from fenceline.memory_order.lease import LeasePool
from fenceline.memory_order.stream import Point, Points, Stream
from fenceline.model_executor.graph_runner import GraphRunner
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.scheduler.scheduler import Scheduler


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _yes(*args: object, **kwargs: object) -> bool:
    return True


def _wait(self: Stream, after: Point | Points, edge: object) -> None:
    for point in after if isinstance(after, Points) else (after,):
        if point.stream is not self and not point.passed:
            self._wait_event(point)


def _synchronize(self: Stream, point: Point, edge: object) -> None:
    if not point.passed:
        self._block(point)
        self.note_passed(point)


class _NoBooks:
    """Takes the place of the bitmap of leased ids."""

    def __setitem__(self, key: object, value: object) -> None:
        return


def _make_lease_pool(self: LeasePool, *args: object, **kwargs: object) -> None:
    _INIT_LEASE_POOL(self, *args, **kwargs)  # type: ignore[arg-type]
    self._leased = _NoBooks()  # type: ignore[assignment]


_INIT_LEASE_POOL = LeasePool.__init__

# (class, method, its replacement)
STUBS = (
    (LeasePool, "__init__", _make_lease_pool),
    (LeasePool, "_check", _nothing),  # retired twice, never leased, reserved
    (RequestMemory, "check_memory", _nothing),  # every page and row accounted for when idle
    (Scheduler, "check_memory", _nothing),
    (Stream, "wait", _wait),  # edges by name: declared between these streams, severed, checker
    (Stream, "synchronize", _synchronize),
    (Device, "keeps", _yes),
    (Device, "declare", _nothing),  # what operations touch, for the checker
    (Arena, "begin_replay", lambda self: ArenaOutputs(self, 0)),  # generations of outputs
    (ArenaOutputs, "take", lambda self, name, num_rows: self._arena[name][:num_rows]),
    (Graph, "replay", lambda self: self._replay()),  # life cycle
    (GraphRunner, "fits", _yes),  # addresses
)


def strip() -> None:
    """Remove the guards from this process. Call it before any of these objects is made."""
    for owner, name, stub in STUBS:
        assert name in vars(owner), f"{owner.__name__}.{name} is gone: bring this list up to date"
        setattr(owner, name, stub)
    if __debug__:
        raise RuntimeError("assertions are guards, too: run with python -O")
