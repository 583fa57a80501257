"""uvicorn's connections with fewer system calls: what one turn of the event loop writes leaves as one write.

uvloop hands each write to the kernel at once. An answer's head, its first event, the last event and the end of the
chunked body would be writes and packets of their own, each of which wakes the client, and beside a client on the same
machine a wake-up costs more than everything else that the server does for a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HELD_BYTES = 1 << 16
LOG_DELAY_S = 0.01

Data = bytes | bytearray | memoryview


class JoiningTransport(asyncio.Transport):
    """``transport``, except that data is held until the callbacks that are ready now have run, or 64 KiB are."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._held: list[Data] = []
        self._num_held = 0

    def write(self, data: Data) -> None:
        """Write ``data`` soon; in order, and before the connection is closed."""
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)
        self._num_held += len(data)
        if self._num_held > MAX_HELD_BYTES:
            self._flush()

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        """:meth:`write` for each."""
        for data in list_of_data:
            self.write(data)

    def _flush(self) -> None:
        if self._held:
            held, self._held, self._num_held = self._held, [], 0
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        """Write what is held and close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what is held is lost."""
        self._held.clear()
        self._transport.abort()

    def can_write_eof(self) -> bool:
        """As the transport."""
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        """After what is held."""
        self._flush()
        self._transport.write_eof()

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken."""
        return self._num_held + self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """As the transport, whose limits are those that pause the protocol."""
        self._transport.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the transport."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """As the transport."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """As the transport."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As the transport."""
        self._transport.resume_reading()

    def is_reading(self) -> bool:
        """As the transport."""
        return self._transport.is_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """As the transport."""
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """As the transport."""
        return self._transport.get_protocol()


class LateLogger:
    """Writes access lines a moment later: answers that begin now do not wait for the log file."""

    def __init__(self, logger: logging.Logger, loop: asyncio.AbstractEventLoop) -> None:
        self._logger = logger
        self._loop = loop

    def info(self, text: str, *values: object) -> None:
        """As ``logging.Logger.info``, in the same order."""
        if self._logger.isEnabledFor(logging.INFO):
            self._loop.call_later(LOG_DELAY_S, self._logger.info, text, *values)


class JoiningHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 on a :class:`JoiningTransport`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """A client has connected."""
        self.access_logger = cast(logging.Logger, LateLogger(self.access_logger, self.loop))
        super().connection_made(JoiningTransport(transport, self.loop))
