"""The conformance programs' machine on a real GPU, through torch's own streams, events and graphs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

SPIN_CYCLES = 4_000_000  # of the device's clock, about 2 ms
PAUSE_S = 0.004  # the host's delay, longer than a spin
NUM_LARGE = 2 << 20  # 16 MiB: torch's allocator hands it out whole


class CudaMachine:
    """See ``conformance.Machine``. It delays at the lags named in ``lags``; a doubled name is delayed twice as long."""

    capture_errors: type[Exception] = RuntimeError

    def __init__(self, lags: frozenset[str]) -> None:
        self._lags = lags
        self._device = torch.device("cuda")

    def stream(self) -> Any:
        return torch.cuda.Stream()

    @property
    def default(self) -> Any:
        return torch.cuda.default_stream()

    def on(self, stream: Any) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        return torch.cuda.Event()

    def synchronize(self, stream: Any = None) -> None:
        if stream is None:
            torch.cuda.synchronize()
        else:
            stream.synchronize()

    def cell(self, value: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int64, device=self._device)

    def large(self, value: int) -> torch.Tensor:
        return torch.full((NUM_LARGE,), value, dtype=torch.int64, device=self._device)

    def pinned(self, value: int, large: bool = False) -> torch.Tensor:
        return torch.full((NUM_LARGE if large else 1,), value, dtype=torch.int64, pin_memory=True)

    def pageable(self, value: int, large: bool = False) -> torch.Tensor:
        return torch.full((NUM_LARGE if large else 1,), value, dtype=torch.int64)

    def peek(self, host: torch.Tensor) -> int:
        return int(host[0])

    def poke(self, host: torch.Tensor, value: int) -> None:
        host.fill_(value)

    def value(self, tensor: torch.Tensor) -> int | str:
        return int(tensor[0].item())

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def graph(self, pool: Any = None) -> Any:
        graph = torch.cuda.CUDAGraph()
        return _Graph(graph, None if pool is None else pool.graph.pool())

    @contextmanager
    def capture(self, graph: Any, stream: Any) -> Iterator[None]:
        """Capture without ``torch.cuda.graph``, which would also empty caches and so move memory."""
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.begin()
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):
                    graph.graph.capture_end()
                raise
            graph.graph.capture_end()

    def replay(self, graph: Any, stream: Any) -> None:
        with torch.cuda.stream(stream):
            graph.graph.replay()

    def in_thread(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    def lag(self, name: str) -> None:
        if name in self._lags:
            torch.cuda._sleep(SPIN_CYCLES)

    def host_lag(self, name: str) -> None:
        if name in self._lags:
            time.sleep(PAUSE_S)


class _Graph:
    """torch's graph and the memory pool that it shares."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        self.graph = graph
        self._pool = pool

    def begin(self) -> None:
        if self._pool is None:
            self.graph.capture_begin()
        else:
            self.graph.capture_begin(pool=self._pool)


def run_in_new_process(name: str) -> Any:
    """The outcome of the program ``name``, run in a new process, which it may leave unusable."""
    import conformance_copies  # noqa: F401 - their programs register themselves
    import conformance_graphs  # noqa: F401
    import conformance_streams  # noqa: F401
    from conformance import PROGRAMS

    return PROGRAMS[name].run(CudaMachine(frozenset()))
