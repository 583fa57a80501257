"""HostStates: the snapshots of recurrent states in host memory, beside the pages of the prefixes that they end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.host.host_pool import allocate_host
from fenceline.mem_cache.state_pool import StatePool
from fenceline.memory_order import Device, LeasePool, Stream

Pairs = Sequence[tuple[int, int]]  # (slot of the StatePool, slot on the host)


class HostStates:
    """``num_slots`` slots in pinned host memory, each what all layers carry of one slot of ``states``: one contiguous
    piece on both sides, which the copy engine moves, whatever moves pages. ``slots`` leases them. Whoever copies a
    slot, or lets storage threads work on it, must hold its lease."""

    def __init__(self, device: Device, states: StatePool, num_slots: int, room: int | None = None) -> None:
        """``room``: as in ``HostPool``. Raises ``ValueError`` with the remedy if there is not enough memory."""
        self.nbytes = states.carried.shape[1]  # of one slot
        self.description = states.description
        self.slots = LeasePool("host states", num_slots, reserved=0)
        self.buffer = allocate_host(device, num_slots * self.nbytes, room).view(num_slots, self.nbytes)
        device.name_memory(self.buffer, "host_states", self.nbytes)
        self._device, self._carried = device, states.carried
        self._bytes: npt.NDArray[np.uint8] = self.buffer.numpy()

    def to_host(self, stream: Stream, pairs: Pairs) -> None:
        """Submit copies of slots of the device to the host."""
        for slot, host_slot in pairs:
            stream.copy(self.buffer[host_slot], self._carried[slot])

    def to_device(self, stream: Stream, pairs: Pairs) -> None:
        """Submit copies from the host to slots of the device."""
        for slot, host_slot in pairs:
            stream.copy(self._carried[slot], self.buffer[host_slot])

    def piece(self, slot: int, write: bool, what: str) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, which the calling thread reads or writes now."""
        if self._device.watches_host:
            self._device.host_access(self.buffer[slot], write, what)
        piece: npt.NDArray[np.uint8] = self._bytes[slot]
        return piece
