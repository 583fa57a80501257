"""A replacement for torch.cuda that runs nothing. It records each call with the stream that was current.

``install(monkeypatch)`` puts it where ``memory_order.cuda`` imports it, so that CudaDevice can be made on a laptop.
Memory is the host's; :class:`Buffer` takes the place of tensors whose copies matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda", 0)
Call = tuple[object, ...]


class Machine:
    """Records the calls to the device in ``calls``, oldest first. ``current`` is the current stream."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.num_streams = 0
        self.current = Stream.__new__(Stream)  # the default stream
        self.current.number = self.current.cuda_stream = self.current.stream_id = 0
        self.streams = {0: self.current}
        self.before: list[Stream] = []  # the streams that were current when another was entered
        self.passed: set[Event] = set()
        self.default = self.current

    def take(self) -> list[Call]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls

    def set_stream(self, stream_id: int, device_index: int, device_type: int) -> None:
        """``torch._C._cuda_setStream``."""
        assert (device_index, device_type) == (DEVICE.index, Stream.device_type), "a stream of the device"
        stream = self.streams[stream_id]
        if self.before and self.before[-1] is stream:
            self.before.pop()
        else:
            self.before.append(self.current)
            self.calls.append(("enter", stream))
        self.current = stream


MACHINE = Machine.__new__(Machine)  # the one that is installed


class Stream:
    """``torch.cuda.Stream``."""

    number: int
    cuda_stream: int
    stream_id: int
    device_type = 1  # CUDA

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE, "a stream of the device"
        MACHINE.num_streams += 1
        self.number = MACHINE.num_streams
        self.cuda_stream = 1000 + self.number
        self.stream_id = 2000 + self.number
        MACHINE.streams[self.stream_id] = self
        self.device_index = device.index

    def wait_event(self, event: Event) -> None:
        MACHINE.calls.append(("wait", self, event))

    def __repr__(self) -> str:
        return f"stream {self.number}"


class Event:
    """``torch.cuda.Event``. It has passed if it is in ``MACHINE.passed``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.recorded: Stream | None = None
        self.time_ms = 0.0

    def record(self, stream: Stream | None = None) -> None:
        assert self.recorded is None, "an event is one moment"
        self.recorded = MACHINE.current if stream is None else stream
        MACHINE.calls.append(("record", self.recorded, self))

    def synchronize(self) -> None:
        assert self.recorded is not None, "an event that was never recorded is no moment"
        MACHINE.calls.append(("block", self))

    def query(self) -> bool:
        assert self.recorded is not None, "an event that was never recorded is no moment"
        MACHINE.calls.append(("query", self))
        return self in MACHINE.passed

    def elapsed_time(self, other: Event) -> float:
        assert self.enable_timing and other.enable_timing, "CUDA raises where an event carries no time"
        return other.time_ms - self.time_ms


class CUDAGraph:
    """``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        MACHINE.calls.append(("replay", MACHINE.current, self))


class Buffer:
    """A tensor of which only the copies are recorded."""

    def __init__(self, kind: str, pinned: bool = False) -> None:
        self.device = SimpleNamespace(type=kind)
        self._pinned = pinned

    def is_pinned(self) -> bool:
        return self._pinned

    def copy_(self, source: Buffer, non_blocking: bool = False) -> None:
        MACHINE.calls.append(("copy", MACHINE.current, self, source, non_blocking))


class Kernels:
    """A library of ``fenceline_kernel``. It records copies of words and fills of rows."""

    def copy_words(self, dst: int, src: int, num_words: int, device: torch.device, stream: int) -> None:
        MACHINE.calls.append(("copy_words", dst, src, num_words, device, stream))


class FillPlan:
    """``fenceline_kernel.FillPlan``."""

    def __init__(self, fields: list[Any], kernels: Kernels) -> None:
        self.fields = fields
        MACHINE.calls.append(("plan", kernels))

    def fill(self, num_live: int, sources: list[torch.Tensor | None]) -> None:
        for field, source in zip(self.fields, sources, strict=True):
            head = 0 if source is None else num_live
            if source is not None:
                field.target[:head].copy_(source)
            field.target[head:].fill_(field.pad)
        MACHINE.calls.append(("fill", num_live))


class KernelUnavailable(RuntimeError):
    """``fenceline_kernel.KernelUnavailable``."""


def install(monkeypatch: pytest.MonkeyPatch, kernels: Kernels | None = None) -> Machine:
    """Replace torch.cuda by a machine, with ``fenceline_kernel`` or without."""
    from fenceline.memory_order import cuda

    MACHINE.__init__()  # type: ignore[misc]

    @contextmanager
    def graph(raw: CUDAGraph, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        MACHINE.calls.append(("capture", raw, pool, stream, capture_error_mode))
        before, MACHINE.current = MACHINE.current, stream
        try:
            yield
        finally:
            MACHINE.current = before
        MACHINE.calls.append(("captured", raw))

    def load(device: torch.device) -> Kernels:
        assert device == DEVICE
        if kernels is None:
            raise KernelUnavailable("no compiler")
        return kernels

    library = SimpleNamespace(
        load=load,
        KernelUnavailable=KernelUnavailable,
        FillPlan=FillPlan,
        FillField=lambda target, source, pad: SimpleNamespace(target=target, pad=pad),
    )
    made = torch.empty

    def empty(*shape: int, device: object = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = made(*shape, **options)
        MACHINE.calls.append(("empty", tensor.nbytes, device, pin_memory))
        return tensor

    for name, value in {
        "Stream": Stream, "Event": Event, "CUDAGraph": CUDAGraph, "graph": graph,
        "graph_pool_handle": object, "is_available": lambda: True, "current_device": lambda: 0,
        "mem_get_info": lambda device: (3 << 30, 8 << 30) if device == DEVICE else (0, 0),
        "synchronize": lambda device: MACHINE.calls.append(("synchronize", device)),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    current = lambda index: MACHINE.current.cuda_stream if index == DEVICE.index else -1  # noqa: E731
    for name, value in {
        "_cuda_getCurrentRawStream": current,
        "_cuda_getCurrentStream": lambda index: (MACHINE.current.stream_id, index, Stream.device_type),
        "_cuda_setStream": MACHINE.set_stream,
    }.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(cuda, "fenceline_kernel", library)
    return MACHINE
