"""Declares the accesses to a ring's slot to the checker (``--memory-check order``)."""

from __future__ import annotations

from fenceline.memory_order.checker import OrderChecker
from fenceline.memory_order.edges import StreamName


class SlotOrder:
    """A slot's pinned buffer and its device twin, as the checker knows them. All methods raise ``OrderError``."""

    def __init__(self, checker: OrderChecker, ring: str, index: int) -> None:
        self._checker = checker
        self._host = checker.memory(f"{ring}.pinned[{index}]")
        self._device = checker.memory(f"{ring}.device[{index}]")
        self._step = 0

    def host(self, write: bool, label: str) -> None:
        """The host writes the pinned buffer for this step, or reads what the step that last used the slot left."""
        if write:
            self._checker.touch(StreamName.HOST, label, None, self._host)
        else:
            self._checker.touch(StreamName.HOST, label, self._host, None, self._step)

    def device(self, stream: StreamName, write: bool, label: str) -> None:
        """``stream`` touches the device buffer."""
        if write:
            self._step = self._checker.step
            self._checker.touch(stream, label, None, self._device)
        else:
            self._checker.touch(stream, label, self._device, None)

    def upload(self, stream: StreamName, label: str) -> None:
        """``stream`` copies the pinned buffer to the device's."""
        self._checker.touch(stream, label, self._host, self._device)

    def download(self, stream: StreamName, label: str) -> None:
        """``stream`` copies the device's buffer to the pinned one."""
        self._checker.touch(stream, label, self._device, self._host)

    def write_host(self, stream: StreamName, label: str) -> None:
        """``stream`` writes the pinned buffer itself."""
        self._step = self._checker.step
        self._checker.touch(stream, label, None, self._host)

    def give_up(self) -> None:
        """Both buffers go back to the allocator, from where anybody may get them."""
        label = "return of a slot to the allocator"
        self._checker.touch(StreamName.HOST, label, None, self._host)
        self._checker.touch(StreamName.HOST, label, None, self._device)
