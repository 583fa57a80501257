"""A connection's transport without a network."""

from __future__ import annotations

import asyncio


class Wire(asyncio.Transport):
    """Records what reaches the operating system. ``untaken``: bytes that it has not taken yet; ``is_lost``: the client
    has disconnected, and uvloop's transport would raise at a write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes | str] = []
        self.untaken = 0
        self.closing = False
        self.aborted = False
        self.reading = True
        self.is_lost = False

    @property
    def sent(self) -> bytes:
        """All that was written."""
        return b"".join(call for call in self.calls if isinstance(call, bytes))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_lost, "uvloop raises here"
        self.calls.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.untaken

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 1) if name in ("sockname", "peername") else default

    def close(self) -> None:
        self.closing = True
        self.calls.append("close")

    def abort(self) -> None:
        self.closing = self.aborted = True
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return self.closing or self.is_lost

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
