"""A server that does almost nothing, to be attacked in place of the real one. The lateness that an observer measures
with it is due to the machine, the attackers and the observer.

    python benchmark/hostile/run.py attacks --python-path benchmark/hostile/control.py python --label control server

It discards bodies as they arrive and answers each request with 200. A stream gets the tokens of a constant text, one
every 5 ms.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

from wire import HOST

_TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
_TOKEN_EVERY_S = 0.005
_NUM_TOKENS = 200
_MAX_HEAD = 1 << 16


class Control(asyncio.Protocol):
    """One connection. It is closed if a body is chunked or if there is more than one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast(asyncio.Transport, transport)
        self._head = b""
        self._left: int | None = None  # bytes of the body that have not arrived; None before the body
        self._streams = False
        self._task: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._left is None:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                if len(self._head) > _MAX_HEAD:
                    self._transport.close()
                return
            fields = dict(line.lower().partition(b": ")[::2] for line in head.split(b"\r\n"))
            size = fields.get(b"content-length", b"0")
            if not size.isdigit() or len(size) > 20:
                self._transport.close()
                return
            self._left = int(size)
            self._streams = head.startswith(b"POST /v1/completions") and self._left < _MAX_HEAD
        self._left -= len(data)
        if self._left <= 0:
            self._head, self._left = b"", None
            self._answer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        if self._task is not None:
            self._task.cancel()

    def _answer(self) -> None:
        if self._streams:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
            )
            self._task = asyncio.ensure_future(self._stream())
        else:
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async def _stream(self) -> None:
        for _ in range(_NUM_TOKENS):
            self._transport.write(_TOKEN)
            await asyncio.sleep(_TOKEN_EVERY_S)
        self._transport.write(b"data: [DONE]\n\n")
        self._transport.close()


async def main(port: int) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(Control, HOST, port, backlog=2048)
    print(f"control at http://{HOST}:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
