"""uvicorn's HTTP/1.1 with limits on what one client may use, and with one write for what one turn writes.

uvicorn buffers a request's head without limit, before the API key is checked, and waits for the rest of a request for
ever. Here sizes are limited while bytes arrive, and a client that is too slow is disconnected. What needs more, such as
a share for each client's address, belongs to a proxy in front (docs/use/security.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from fenceline.entrypoints.errors import error_bytes
from fenceline.entrypoints.json_body import MAX_BODY_BYTES
from fenceline.frontend.request_types import RequestError

MAX_HELD_BYTES = 1 << 16
# Of one request.
MAX_HEAD_BYTES = 64 << 10  # request line and headers together
MAX_URL_BYTES = 8 << 10
MAX_HEADERS = 128
_MAX_LENGTH_DIGITS = 20
MAX_FRAMING_BYTES = 16 << 10  # of a chunked body, in a row: chunk extensions, trailers
MAX_PIPELINED = 256  # requests that are read before the answer to the one before them is complete
# Limits on the pace of a connection, in seconds in which the server itself has run.
HEAD_TIMEOUT_S = 10  # for a request's head, and for a new connection to say anything
BODY_PERIOD_S = 20  # a body brings BODY_PERIOD_BYTES in each such period, or ends
BODY_PERIOD_BYTES = 20 << 10
# The client reads WRITE_PERIOD_BYTES of its answer in each such period, or all that is ready.
WRITE_PERIOD_S = 60
WRITE_PERIOD_BYTES = 16 << 10
# How much is still read of a body that was refused before it arrived, so that the client gets to the answer.
_MAX_DISCARDED_BYTES = 2 * MAX_BODY_BYTES
_REFUSAL_HEAD = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"


class JoiningTransport:
    """``transport``, except that data is held until the callbacks that are ready now have run, or 64 KiB are. uvloop
    hands each write to the kernel at once. An answer's head, its first event, the last event and the end of the chunked
    body would be packets of their own, each of which wakes the client."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._num_held = 0
        self._num_written = 0  # bytes handed to the transport since the connection began

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def num_taken(self) -> int:
        """Bytes that the kernel has taken since the connection began."""
        return self._num_written - self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Write ``data`` soon; in order, and before the connection is closed."""
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)
        self._num_held += len(data)
        if self._num_held > MAX_HELD_BYTES:
            self._flush()

    def _flush(self) -> None:
        held, self._held, self._num_held = self._held, [], 0
        if held and not self._transport.is_closing():  # else the client has reset the connection meanwhile
            data = b"".join(held)
            self._num_written += len(data)
            self._transport.write(data)

    def close(self) -> None:
        """Write what is held and close."""
        self._flush()
        self._transport.close()


class HttpProtocol(HttpToolsProtocol):
    """A connection. A request that is malformed, too large or too slow is answered with a 4xx in the server's own form,
    and the connection is closed; ``refused`` is told the reason. A connection beyond ``max_connections`` gets 503."""

    def __init__(
        self,
        *args: Any,
        refused: Callable[[RequestError], object],
        max_connections: int,
        access_log: logging.Logger | None = None,
        **kwargs: Any,
    ) -> None:
        """``access_log``: in place of uvicorn's logger."""
        super().__init__(*args, **kwargs)
        self.access_logger = access_log or self.access_logger
        self._refused = refused
        self._max_connections = max_connections
        self._refusal: RequestError | None = None  # set by the parser's callbacks, which can only raise
        self._running: RequestResponseCycle | None = None  # the request whose turn it is, or was
        self._in_head = True
        self._num_heads = 0  # complete ones since the connection began
        self._num_head_bytes = 0  # that have arrived of a head, and perhaps of what is behind it
        self._num_header_bytes = 0  # parsed
        self._num_body_bytes = 0
        self._body_parts: list[bytes] = []  # parsed, and not handed on yet
        self._num_framing_bytes = 0  # since the last byte of a body
        self._progress: tuple[object, ...] = ()  # the client's, when it last made any
        self._still_s = 0  # since then
        self._periods_taken = 0  # how much of the answers the kernel had taken when it last took enough
        self._untaken_s = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(cast(asyncio.Transport, JoiningTransport(transport, self.loop)))
        if len(self.connections) > self._max_connections:
            message = "the server has no room for more connections"
            self._refuse(RequestError(503, message, code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected. uvicorn reports this only to the last of its requests."""
        if self._running is not None and self._running is not self.cycle:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # --- sizes

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if self._in_head:
            self._num_head_bytes += len(data)
        self._num_framing_bytes += len(data)
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or RequestError(400, f"this is not valid HTTP: {error}"))
        else:
            if self._in_head and self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large_head(f"{MAX_HEAD_BYTES >> 10} KiB"))
            elif not self._in_head and self._num_framing_bytes > MAX_FRAMING_BYTES:
                self._refuse(RequestError(400, "chunk extensions and trailers are not supported: leave them out"))

    def _feed(self, data: memoryview) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                self._hand_on_body()
                return
            except httptools.HttpParserUpgrade as offer:
                # To HTTP/2, as curl --http2 and Java make it: it gets HTTP/1.1. httptools would take the body for what
                # follows the request, and an attacker's body would be a request that no proxy in front has seen.
                data = data[offer.args[0] :]
                self._feed(memoryview(self._without_offer()))

    def _without_offer(self) -> bytes:
        """The head that was parsed last, without its offer of another protocol, for a new parser."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # httptools before 0.6.3; as uvicorn
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._num_header_bytes = 0
        self._num_head_bytes = max(self._num_head_bytes, 1)  # it may have come with the end of the one before

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._raise(RequestError(414, f"the URL is longer than {MAX_URL_BYTES >> 10} KiB"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A line of the head, or of a chunked body's end, which nobody reads."""
        if not self._in_head:
            return
        super().on_header(name, value)
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._raise(_too_large_head(f"{MAX_HEAD_BYTES >> 10} KiB or {MAX_HEADERS} lines"))

    def on_headers_complete(self) -> None:
        """The head is complete: the application gets the request."""
        if self.parser.get_method() == b"CONNECT":
            self._raise(RequestError(405, "CONNECT is not allowed: this is no proxy"))
        if self.parser.should_upgrade():
            return  # it will be parsed again
        num_hosts = 0
        for name, value in self.headers:
            num_hosts += name == b"host"
            if name == b"content-length" and len(value) > _MAX_LENGTH_DIGITS:
                self._raise(RequestError(400, f"Content-Length has more than {_MAX_LENGTH_DIGITS} digits"))
        if num_hosts > 1:  # a proxy in front may go by the other one
            self._raise(RequestError(400, "there is more than one Host header"))
        if len(self.pipeline) >= MAX_PIPELINED:
            self._raise(RequestError(400, f"more than {MAX_PIPELINED} requests wait for their answers"))
        super().on_headers_complete()
        self._in_head, self._num_framing_bytes = False, 0
        self._num_heads += 1

    def on_body(self, body: bytes) -> None:
        """A chunk, of which a turn may bring tens of thousands: they are handed on together."""
        self._body_parts.append(body)
        self._num_framing_bytes = 0

    def _hand_on_body(self) -> None:
        if not self._body_parts:
            return
        body = b"".join(self._body_parts)
        self._body_parts.clear()
        self._num_body_bytes += len(body)
        if self.cycle.response_complete and self._num_body_bytes > _MAX_DISCARDED_BYTES:
            self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._hand_on_body()
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._in_head, self._num_head_bytes, self._num_body_bytes = True, 0, 0

    def _raise(self, error: RequestError) -> NoReturn:
        self._refusal = error
        raise error

    def _refuse(self, error: RequestError) -> None:
        """Answer with ``error``, unless an answer has begun or others come first, and close the connection."""
        self._refused(error)
        if self._is_answered() if self._in_head else not (self.cycle.response_started or self.pipeline):
            body = error_bytes(error)
            self.transport.write(STATUS_LINE[error.status] + _REFUSAL_HEAD % len(body) + body)
            client = ":".join(map(str, self.client or ()))
            self.access_logger.info("%s - %d %s", client, error.status, error.message)
        self.transport.close()

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # --- pace

    def check_pace(self) -> None:
        """Disconnect a client that does not continue its request or does not read its answer. Called once a second,
        which costs less than a timer for each request; where the server was stopped or busy, no time has passed."""
        transport = cast(JoiningTransport, self.transport)
        periods_taken = transport.num_taken // WRITE_PERIOD_BYTES
        reads = not transport.get_write_buffer_size() or periods_taken != self._periods_taken
        self._periods_taken, self._untaken_s = periods_taken, 0 if reads else self._untaken_s + 1
        if self._untaken_s > WRITE_PERIOD_S:
            transport.abort()
        if self._in_head:  # before a later request's head has begun, uvicorn's keep-alive time-out holds
            waits = self._is_answered() and (self._num_head_bytes > 0 or self._num_heads == 0)
        else:
            waits = not (self.flow.read_paused or self.pipeline)
        progress = self._num_heads, self._in_head, self._num_body_bytes // BODY_PERIOD_BYTES
        self._still_s = self._still_s + 1 if waits and progress == self._progress else 0
        self._progress = progress
        if self._still_s <= (HEAD_TIMEOUT_S if self._in_head else BODY_PERIOD_S) or transport.is_closing():
            return
        if self._in_head and not self._num_head_bytes:
            self.transport.close()  # it has asked for nothing
        elif self._in_head:
            self._refuse(RequestError(408, f"the request's head was not complete after {HEAD_TIMEOUT_S} s"))
        else:
            pace = f"send {BODY_PERIOD_BYTES >> 10} KiB in {BODY_PERIOD_S} s at least"
            self._refuse(RequestError(408, f"the request's body came too slowly: {pace}"))


def _too_large_head(limit: str) -> RequestError:
    return RequestError(431, f"the request's headers are larger than {limit}", code="headers_too_large")
