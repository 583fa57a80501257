"""Device: where memory lives and work runs. The engine is written once against it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from fenceline.memory_order.edges import EDGES, StreamName
from fenceline.memory_order.stream import Stream


class Device(ABC):
    """One accelerator (or the CPU) with its named streams.

    ``severed`` names edges that are left out: for tests that prove an edge necessary, never for serving.
    """

    kind: str

    def __init__(self, torch_device: torch.device, severed: frozenset[str] = frozenset()) -> None:
        unknown = severed - EDGES.keys()
        if unknown:
            raise ValueError(f"no such edge: {', '.join(sorted(unknown))}; see docs/edges.md")
        self.torch_device = torch_device
        self.severed = severed
        self.schedule = self._make_stream(StreamName.SCHEDULE)
        self.forward = self._make_stream(StreamName.FORWARD)
        self.copy = self._make_stream(StreamName.COPY)

    @abstractmethod
    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Uninitialised host memory [nbytes] uint8 that this device's copies can use asynchronously."""

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        """Uninitialised device memory [nbytes] uint8, preallocated: it may cross streams under a lease."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device's memory."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all streams are empty: start-up and shut-down only."""

    @abstractmethod
    def _make_stream(self, name: StreamName) -> Stream: ...


def open_device(kind: str, severed: frozenset[str] = frozenset()) -> Device:
    """The device of that kind: ``cpu`` or ``cuda`` (the current CUDA device).

    Raises ``ValueError`` with the remedy where it is not available.
    """
    if kind == "cpu":
        from fenceline.memory_order.cpu import CpuDevice

        return CpuDevice(severed)
    if kind == "cuda":
        from fenceline.memory_order.cuda import CudaDevice

        return CudaDevice(severed)
    raise ValueError(f"unknown device {kind!r}: use --device cpu or --device cuda")
