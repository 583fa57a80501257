"""The CPU as a device: synchronous, so every Point has passed once it is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from fenceline.config import num_usable_cores
from fenceline.memory_order.device import Device
from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.graph import Graph, GraphPool
from fenceline.memory_order.stream import Point, Stream

_current = threading.local()  # its ``stream`` is the innermost one that is active in this thread


class CpuStream(Stream):
    """Work runs when it is submitted.

    With the checker, a Point passes only when the host waits for it or asks for it a second time, so that memory is
    handed out and edges are applied as on an asynchronous device.
    """

    def __init__(self, name: StreamName, severed: frozenset[str]) -> None:
        super().__init__(name, severed)
        self.lags = False  # True with the checker: Points do not pass at once
        self._asked_serial = 0  # of the latest Point at the time of the last query without success

    def record(self) -> Point:
        point = super().record()
        if not self.lags:
            self.passed_serial = point.serial
        return point

    @contextmanager
    def active(self) -> Iterator[None]:
        before = getattr(_current, "stream", None)
        _current.stream = self
        try:
            yield
        finally:
            _current.stream = before

    @property
    def is_current(self) -> bool:
        return getattr(_current, "stream", None) is self

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def _record_event(self) -> object:
        return None

    def _wait_event(self, point: Point) -> None:
        assert self.lags, f"{point} had not passed on a synchronous device"

    def _block(self, point: Point) -> None:
        return  # work has run when it is submitted

    def _query(self, point: Point) -> bool:
        assert self.lags, f"{point} had not passed on a synchronous device"
        if point.serial <= self._asked_serial:
            return True
        self._asked_serial = self.serial
        return False


class CpuGraph(Graph):
    """Runs its body again, which on a synchronous device is what a replay does."""

    def __init__(self, name: str, pool: GraphPool, body: Callable[[], None]) -> None:
        super().__init__(name, pool)
        self._body = body

    def _replay(self) -> None:
        self._body()


class CpuDevice(Device):
    """Host memory and this process's threads."""

    kind = "cpu"

    def __init__(self, severed: frozenset[str] = frozenset()) -> None:
        super().__init__(torch.device("cpu"), severed)
        # One core is left to the front end's processes: OpenMP threads that wait for a core in use make every
        # operation many times slower. OMP_NUM_THREADS can reduce the number further.
        torch.set_num_threads(min(torch.get_num_threads(), max(num_usable_cores() - 1, 1)))

    def check_order(self) -> None:
        super().check_order()
        for stream in self.streams:
            if isinstance(stream, CpuStream):
                stream.lags = True

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def write_host(self, host: torch.Tensor, source: torch.Tensor) -> None:
        self.forward.copy(host, source)

    def memory_info(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def make_graph_pool(self, owner: str) -> GraphPool:
        return GraphPool(owner, None)

    def capture(self, name: str, pool: GraphPool, body: Callable[[], None]) -> Graph:
        return CpuGraph(name, pool, body)

    def _synchronize(self) -> None:
        return

    def _make_stream(self, name: StreamName) -> Stream:
        return CpuStream(name, self.severed)
