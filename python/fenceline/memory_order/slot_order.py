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
        checker = self._checker
        if write:
            checker.write(checker.begin(StreamName.HOST, label), self._host)
        else:
            checker.read(checker.begin(StreamName.HOST, label, self._step), self._host)

    def device(self, stream: StreamName, write: bool, label: str) -> None:
        """``stream`` touches the device buffer."""
        op = self._checker.begin(stream, label)
        if write:
            self._step = op.step
            self._checker.write(op, self._device)
        else:
            self._checker.read(op, self._device)

    def upload(self, stream: StreamName, label: str) -> None:
        """``stream`` copies the pinned buffer to the device's."""
        op = self._checker.begin(stream, label)
        self._checker.read(op, self._host)
        self._checker.write(op, self._device)

    def download(self, stream: StreamName, label: str) -> None:
        """``stream`` copies the device's buffer to the pinned one."""
        op = self._checker.begin(stream, label)
        self._checker.read(op, self._device)
        self._checker.write(op, self._host)

    def give_up(self) -> None:
        """Both buffers go back to the allocator, from where anybody may get them."""
        op = self._checker.begin(StreamName.HOST, "return of a slot to the allocator")
        self._checker.write(op, self._host)
        self._checker.write(op, self._device)
