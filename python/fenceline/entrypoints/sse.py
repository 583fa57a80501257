"""Server-sent events that are written directly to the ASGI server, and answers that end when their client
disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fenceline.entrypoints.errors import error_bytes, internal_error
from fenceline.entrypoints.json_body import PIECE_BYTES, pieces
from fenceline.entrypoints.middleware import BODY_BYTES, BODY_SEND, LARGE_BYTES
from fenceline.frontend.request_stream import StreamGroup
from fenceline.frontend.request_types import GenerateChunk, RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Event = bytes | Sequence[bytes]

DONE = b"data: [DONE]\n\n"
HEAD_PATIENCE_S = 1.0
_SHORT_WORK_BYTES = 1 << 15
_INLINE_LOGPROBS = 2048
_LOGPROB_THREAD = ThreadPoolExecutor(1, thread_name_prefix="logprobs")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """Sends each item of ``events`` as it comes; an item is one or more whole events (``data: ...\\n\\n``), or the
    parts that make these when they are joined. A large one is sent in pieces, each in a turn of the event loop of its
    own, like a large :class:`fenceline.entrypoints.json_body.PartsResponse`.

    ``close`` is called exactly once at the end, at once if the client disconnects, and must make ``events``
    end: ``StreamGroup.close``. A RequestError raised by ``events`` becomes an error event, then ``[DONE]``.
    While the client's connection is full, sending waits; meanwhile ``StreamGroup`` merges chunks.

    The head waits up to a second for the first event and is sent together with it. So of a hundred requests that arrive
    at the same time all are submitted before the first head is written.
    """

    def __init__(
        self,
        events: AsyncIterator[Event],
        close: Callable[[], None],
        write_error: Callable[[RequestError], bytes] | None = None,
    ) -> None:
        """``write_error``: the last events of a stream that failed, of an API with a form of its own."""
        super().__init__()
        self._write_error = write_error or error_event
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_on_disconnect(receive, self._close))
        head = _Head(send)
        try:
            send_body: Send = scope.get(BODY_SEND, send)
            async for event in self._guarded():
                await head.sent()
                parts = (event,) if isinstance(event, bytes) else event
                num_bytes = sum(map(len, parts))
                if num_bytes <= PIECE_BYTES:
                    body = event if isinstance(event, bytes) else b"".join(event)
                    await send_body({"type": "http.response.body", "body": body, "more_body": True})
                    continue
                scope[LARGE_BYTES] = scope.get(LARGE_BYTES, 0) + num_bytes
                for piece in pieces(parts):
                    await send_body({"type": "http.response.body", "body": piece, "more_body": True})
                    await asyncio.sleep(0)
            await head.sent()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            head.forget()
            gone.cancel()
            self._close()

    async def _guarded(self) -> AsyncIterator[Event]:
        try:
            async for event in self._events:
                yield event
        except RequestError as error:
            yield self._write_error(error)
        except Exception as error:  # too late for a status code: the client still gets a reason
            logger.exception("a stream failed")
            yield self._write_error(internal_error(error))


def error_event(error: RequestError) -> bytes:
    """The end of a stream that failed."""
    return b"data: " + error_bytes(error) + b"\n\n" + DONE


class _Head:
    """The head of a stream. It is sent once, with the first event or after :data:`HEAD_PATIENCE_S`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_sent = False
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(HEAD_PATIENCE_S, self._late)

    def _late(self) -> None:
        self._task = asyncio.ensure_future(self.sent())

    async def sent(self) -> None:
        """Send it unless that has been done."""
        if not self._is_sent:
            self._is_sent = True
            self._timer.cancel()
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    def forget(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


async def collect_or_abort(request: Request, group: StreamGroup) -> list[GenerateChunk]:
    """All answers of ``group``, whose requests are aborted if the client disconnects meanwhile. The request's body must
    have been read. Raises RequestError for the first request that failed, and 499 if the client has gone."""
    gone = asyncio.ensure_future(_on_disconnect(request.receive, group.close))
    try:
        return await group.collect()
    finally:
        gone.cancel()
        group.close()


async def written(chunk: GenerateChunk, write: Callable[[], T]) -> T:
    """The result of ``write()``, which writes ``chunk``: in a thread if it has many logprobs, which take a microsecond
    each or less. Chunks are written there in turn, as each thread that runs Python makes the event loop wait."""
    if num_logprobs(chunk) <= _INLINE_LOGPROBS:
        return write()
    return await asyncio.get_running_loop().run_in_executor(_LOGPROB_THREAD, write)


def num_logprobs(chunk: GenerateChunk) -> int:
    """How many logprobs ``chunk`` has, with alternatives."""
    parts = [part for part in (chunk.input_logprobs, chunk.output_logprobs) if part is not None]
    return sum(len(part.token_ids) + part.top_logprobs.num_pairs + part.token_ids_logprobs.num_pairs for part in parts)


async def while_connected(request: Request, work: Coroutine[Any, Any, T], is_long: bool = False) -> T:
    """The result of ``work``, which is cancelled if the client disconnects meanwhile; ClientDisconnect is raised then.
    The body must have been read. If it is small, the work is too short to watch for a disconnect, unless
    ``is_long``."""
    if not is_long and request.scope.get(BODY_BYTES, 0) <= _SHORT_WORK_BYTES:
        return await work
    return await unless_gone(request, work)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """:func:`while_connected` for work that may take long whatever the body, which is not needed any more."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_on_disconnect(request.receive, working.cancel))
    try:
        return await working
    except asyncio.CancelledError:
        if gone.done():
            raise ClientDisconnect from None
        raise
    finally:
        gone.cancel()
        working.cancel()
        del working, gone  # else the error holds this frame, and this frame the error and the body


async def _on_disconnect(receive: Receive, close: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    close()
