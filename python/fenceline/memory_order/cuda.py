"""An NVIDIA GPU as a device: the only place that holds raw CUDA streams and events."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from fenceline.memory_order.device import Device
from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.stream import Point, Stream


class CudaStream(Stream):
    """A CUDA stream of its own (never the legacy default stream, which would order everything)."""

    def __init__(self, name: StreamName, severed: frozenset[str], device: torch.device) -> None:
        super().__init__(name, severed)
        self._raw = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def active(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._raw)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        host = dst if dst.device.type == "cpu" else src
        assert host.device.type != "cpu" or host.is_pinned(), "a copy of pageable memory would block the host"
        with torch.cuda.stream(self._raw):
            dst.copy_(src, non_blocking=True)

    def _record_event(self) -> object:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._raw)
        return event

    def _wait_event(self, point: Point) -> None:
        assert isinstance(point.event, torch.cuda.Event)
        self._raw.wait_event(point.event)

    def _block(self, point: Point) -> None:
        assert isinstance(point.event, torch.cuda.Event)
        point.event.synchronize()


class CudaDevice(Device):
    """The current CUDA device."""

    kind = "cuda"

    def __init__(self, severed: frozenset[str] = frozenset()) -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                "no CUDA device is available: use --device cpu, or install a CUDA build of torch"
            )
        super().__init__(torch.device("cuda", torch.cuda.current_device()), severed)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def memory_info(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free, total

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def _make_stream(self, name: StreamName) -> Stream:
        return CudaStream(name, self.severed, self.torch_device)
