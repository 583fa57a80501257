"""HTTP without a client library: requests of any form on new connections, and their answers.

A client library would refuse to send most of these requests. Answers are parsed by httptools, as in the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from typing import Any, Self

import httptools
import orjson

HOST = "127.0.0.1"
KEY = "the-key-of-this-run"
_READ_BYTES = 1 << 18
_KEPT_BYTES = 1 << 24  # of a body; further bytes are counted but not kept

# The outcomes of requests that got no status.
LEFT, CLOSED, RESET, SILENT, UNREADABLE = "left", "closed", "reset", "no answer", "unreadable answer"


def head(method: str, path: str, headers: Iterable[str] = (), key: str | None = KEY) -> bytes:
    """A request's head without its last empty line."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", *headers]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n"


def request(method: str, path: str, body: bytes = b"", headers: Iterable[str] = (), key: str | None = KEY) -> bytes:
    """A whole request."""
    length = [f"Content-Length: {len(body)}", "Content-Type: application/json"] if body else []
    return head(method, path, [*headers, *length], key) + b"\r\n" + body


def post(path: str, value: object, key: str | None = KEY, headers: Iterable[str] = ()) -> bytes:
    """A POST of ``value`` as JSON; bytes are sent as they are."""
    return request("POST", path, value if isinstance(value, bytes) else orjson.dumps(value), headers, key)


class Answer:
    """One HTTP answer, growing until ``complete``."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.num_bytes = 0
        self.complete = False

    def json(self) -> Any:
        """The body's value. Raises ValueError."""
        return orjson.loads(bytes(self.body))


class Wire:
    """One connection. ``head_only``: answers end with their heads (HEAD). Use it in an ``async with`` block."""

    def __init__(self, port: int, *, receive_bytes: int | None = None, head_only: bool = False) -> None:
        self._port = port
        self._receive_bytes = receive_bytes
        self._head_only = head_only
        self._answers: list[Answer] = []
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if self._receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        try:
            await self._loop.sock_connect(self._socket, (HOST, self._port))
        except BaseException:
            self._socket.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def current(self) -> Answer:
        """The last answer, which may be incomplete. Raises IndexError if there is none yet."""
        return self._answers[-1]

    def leave_hard(self) -> None:
        """Close the connection with a reset, whatever is in flight."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    async def send(self, data: bytes) -> bool:
        """Send ``data``; False if the server has closed."""
        try:
            await self._loop.sock_sendall(self._socket, data)
        except OSError:
            return False
        return True

    async def read(self) -> bytes:
        """Read what has arrived (empty at the end) and feed it to the parser. Raises OSError and
        httptools.HttpParserError."""
        data = await self._loop.sock_recv(self._socket, _READ_BYTES)
        if data:
            with contextlib.suppress(httptools.HttpParserUpgrade):
                self._parser.feed_data(data)
        elif self._answers and not self._answers[-1].complete:
            self._answers[-1].complete = self._ends_by_closing()
        return data

    def _ends_by_closing(self) -> bool:
        return bool(self._answers[-1].status) and not self._parser_has_length

    async def answer(self) -> Answer | str:
        """The next complete answer that is not a 1xx; CLOSED, RESET or UNREADABLE if the connection ends before."""
        while True:
            while self._answers and self._answers[0].complete:
                answer = self._answers.pop(0)
                if answer.status >= 200 or answer.status == 101:
                    return answer
            try:
                if not await self.read() and not (self._answers and self._answers[0].complete):
                    return CLOSED
            except OSError:
                return RESET
            except httptools.HttpParserError:
                return UNREADABLE

    # --- httptools' callbacks

    def on_message_begin(self) -> None:
        """A new answer."""
        self._answers.append(Answer())
        self._parser_has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._parser_has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """The head has come."""
        answer = self._answers[-1]
        answer.status = self._parser.get_status_code()
        answer.complete = self._head_only or answer.status == 101

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        answer = self._answers[-1]
        answer.num_bytes += len(body)
        if len(answer.body) < _KEPT_BYTES:
            answer.body += body

    def on_message_complete(self) -> None:
        """The answer has come."""
        self._answers[-1].complete = True


async def exchange(
    port: int, data: bytes, wait_s: float, *, leave_after_s: float | None = None, head_only: bool = False
) -> Answer | str:
    """Send ``data`` on a new connection and read at the same time. LEFT after ``leave_after_s`` seconds, SILENT after
    ``wait_s`` seconds without a complete answer."""
    try:
        async with Wire(port, head_only=head_only) as wire, asyncio.timeout(leave_after_s or wait_s):
            sending = asyncio.ensure_future(wire.send(data))
            try:
                return await wire.answer()
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
    except TimeoutError:
        return SILENT if leave_after_s is None else LEFT
    except OSError:
        return RESET


def outcome(answer: Answer | str) -> str:
    """The status as text, or what happened instead."""
    return answer if isinstance(answer, str) else str(answer.status)
