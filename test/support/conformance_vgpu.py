"""The conformance programs' machine on the virtual GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fenceline_sim import CaptureError, Graph, VirtualGpu, use
from fenceline_sim.streams import Operation, VirtualStream

POISON = int(torch.full((4,), 0x7FF8, dtype=torch.int16).view(torch.int64)[0])
NUM_LARGE = 16


def make_gpu(policy: str = "random", seed: int = 0, **options: Any) -> tuple[VirtualGpu, torch.device]:
    """A virtual GPU, and the torch device "vgpu", which refers to it from now on."""
    gpu = VirtualGpu(seed=seed, policy=policy, **options)
    return gpu, use(gpu)


class Event:
    """As CUDA's, by marks of the virtual GPU.

    A wait is for the latest record at the time of the call; without one it is for nothing.
    """

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self.mark: Operation | None = None

    def record(self, stream: VirtualStream) -> None:
        """Let the event stand for everything submitted to ``stream`` so far."""
        self.mark = self._gpu.record(stream)

    def wait(self, stream: VirtualStream) -> None:
        """What is submitted to ``stream`` from now on runs after the event's latest record."""
        if self.mark is not None:
            self._gpu.wait(stream, self.mark)

    def synchronize(self) -> None:
        """Block the calling thread until the event's latest record has passed."""
        if self.mark is not None:
            self._gpu.synchronize(self.mark)

    def query(self) -> bool:
        """Whether the event's latest record has passed."""
        return self.mark is None or self._gpu.query(self.mark)


class VgpuMachine:
    """See ``conformance.Machine``. Lags do nothing here: the schedule varies instead."""

    capture_errors: type[Exception] = CaptureError

    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu = gpu
        self._device = use(gpu)
        self._num_threads = 0

    def stream(self) -> Any:
        return self.gpu.stream(f"s{len(self.gpu.streams)}")

    @property
    def default(self) -> Any:
        return self.gpu.default_stream

    def on(self, stream: Any) -> AbstractContextManager[None]:
        return self.gpu.on(stream)

    def event(self) -> Event:
        return Event(self.gpu)

    def synchronize(self, stream: Any = None) -> None:
        if stream is None:
            self.gpu.synchronize_all()
        else:
            self.gpu.synchronize(self.gpu.record(stream))

    def cell(self, value: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int64, device=self._device)

    def large(self, value: int) -> torch.Tensor:
        return torch.full((NUM_LARGE,), value, dtype=torch.int64, device=self._device)

    def pinned(self, value: int, large: bool = False) -> torch.Tensor:
        host = self.gpu.pinned.buffer(8 * (NUM_LARGE if large else 1)).view(torch.int64)
        self.poke(host, value)
        return host

    def pageable(self, value: int, large: bool = False) -> torch.Tensor:
        return torch.full((NUM_LARGE if large else 1,), value, dtype=torch.int64)

    def peek(self, host: torch.Tensor) -> int:
        self.gpu.host_access(host, False, "look at a result")
        return int(host[0])

    def poke(self, host: torch.Tensor, value: int) -> None:
        self.gpu.host_access(host, True, "rewrite")
        host.fill_(value)

    def value(self, tensor: torch.Tensor) -> int | str:
        value = int(tensor[0].item())
        return "undefined" if value == POISON else value

    def address(self, tensor: torch.Tensor) -> int:
        number: int = tensor.allocation.tag.region.number  # type: ignore[attr-defined]
        return number

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.gpu.pinned.find(tensor) is not None

    def graph(self, pool: Graph | None = None) -> Graph:
        return self.gpu.graph(pool=pool)

    @contextmanager
    def capture(self, graph: Graph, stream: Any) -> Iterator[None]:
        self.gpu.synchronize_all()
        with self.gpu.on(stream), self.gpu.capture(graph):
            yield

    def replay(self, graph: Graph, stream: Any) -> None:
        with self.gpu.on(stream):
            graph.replay()

    def in_thread(self, run: Callable[[], None]) -> None:
        self._num_threads += 1
        self.gpu.spawn(f"thread {self._num_threads}", run).join()

    def lag(self, name: str) -> None:
        pass

    def host_lag(self, name: str) -> None:
        pass
