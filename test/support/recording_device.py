"""Streams and a device whose Points pass only when the host waits for them, and which record the necessary waits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fenceline.memory_order import Point, Stream
from fenceline.memory_order.device import CpuDevice
from fenceline.memory_order.edges import StreamName


class LaggingStream(Stream):
    """A stream whose Points pass only when the host waits for them."""

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def is_current(self) -> bool:
        raise AssertionError("this stream does not know whether it is current")

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        raise AssertionError("this stream copies nothing")

    def _record_event(self) -> object:
        return None

    def _wait_event(self, point: Point) -> None:
        raise AssertionError("waits are noted with the step that waits")

    def _block(self, point: Point) -> None:
        raise AssertionError("results are waited for through their ForwardResult")


class RecordingStream(LaggingStream):
    """Runs copies at once, and records every wait for a Point that had not passed."""

    def __init__(self, name: StreamName, severed: frozenset[str]) -> None:
        super().__init__(name, severed)
        self.waits: list[Point] = []
        self.blocked: list[Point] = []

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def _wait_event(self, point: Point) -> None:
        self.waits.append(point)

    def _block(self, point: Point) -> None:
        self.blocked.append(point)


class RecordingDevice(CpuDevice):
    """A device whose Points pass only when the host waits for them."""

    kind = "recording"

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def _make_stream(self, name: StreamName) -> Stream:
        return RecordingStream(name, self.severed)
