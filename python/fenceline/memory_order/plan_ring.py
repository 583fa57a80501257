"""A ring of memory for kernels whose host side plans each batch: the plan is written to pinned memory and copied.

FlashInfer's wrappers keep one pinned buffer each, write it in ``plan()`` and copy it with cudaMemcpyAsync; that the
copy of the last plan has run before the next one writes is left to the caller (F12). Here whoever owns the buffers owns
their fences: a plan borrows a slot, the library writes the slot's pinned half and submits the copy to the device half
itself, on SCHEDULE, where it need not wait for the step in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fenceline.memory_order.access import Memory, copies, reads, writes
from fenceline.memory_order.device import Device
from fenceline.memory_order.edges import (
    FORWARD_AFTER_SCHEDULE,
    SCHEDULE_AFTER_FORWARD,
    STAGING_REUSE,
    StreamName,
)
from fenceline.memory_order.stream import Point, Points


@dataclass(slots=True)
class PlanSlot:
    """``host``, pinned, and ``device`` [nbytes] uint8, with the Points after which each may be written again."""

    host: torch.Tensor
    device: torch.Tensor
    host_memory: Memory
    device_memory: Memory
    host_after: Point | None = None
    device_after: Points = Points()


class PlanRing:
    """Slots of ``nbytes`` for plans that FORWARD reads.

    With two of them a plan is copied while the step before still reads its own. A slot is FORWARD's from the end of
    :meth:`planning` until the next one begins: work that reads it has to be submitted in between.
    """

    def __init__(self, device: Device, nbytes: int, depth: int = 2, name: str = "plan_ring") -> None:
        self.name = name
        self._device = device
        self._slots = [self._make(index, nbytes) for index in range(depth)]
        self.num_plans = 0

    def _make(self, index: int, nbytes: int) -> PlanSlot:
        make, host, device = (
            self._device.memory,
            self._device.host_buffer(nbytes),
            self._device.device_buffer(nbytes),
        )
        names = f"{self.name}.pinned[{index}]", f"{self.name}.device[{index}]"
        return PlanSlot(host, device, make(names[0], host), make(names[1], device))

    @contextmanager
    def planning(self) -> Iterator[PlanSlot]:
        """Inside, the host may write ``slot.host`` and submit its copy to ``slot.device``, on SCHEDULE, the current
        stream. Afterwards FORWARD may read ``slot.device``."""
        device, depth = self._device, len(self._slots)
        if self.num_plans:  # what FORWARD was given since the last plan may read that plan
            last = self._slots[(self.num_plans - 1) % depth]
            device.declare(StreamName.FORWARD, "step that reads its plan", reads, last.device_memory)
            last.device_after = Points.of(device.forward.record())
        slot = self._slots[self.num_plans % depth]
        self.num_plans += 1
        if slot.host_after is not None:  # WAR: the copy of an earlier plan may still read the pinned half
            device.schedule.synchronize(slot.host_after, STAGING_REUSE)
        device.declare(StreamName.HOST, "plan of a batch", writes, slot.host_memory)
        device.schedule.wait(
            slot.device_after, SCHEDULE_AFTER_FORWARD
        )  # WAR: an earlier step may still read it
        device.declare(StreamName.SCHEDULE, "upload of a plan", copies, slot.host_memory, slot.device_memory)
        with device.schedule.active():
            yield slot
        slot.host_after = device.schedule.record()
        device.forward.wait(slot.host_after, FORWARD_AFTER_SCHEDULE)  # RAW: the copy brings the plan
