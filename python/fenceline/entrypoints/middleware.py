"""The one middleware: request ids, access, the size of bodies. Pure ASGI, because each of a stream's
chunks passes through it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fenceline.entrypoints.access import AccessRules
from fenceline.entrypoints.errors import REFUSED, error_response, internal_error
from fenceline.entrypoints.json_body import MAX_BODY_BYTES, PIECE_BYTES
from fenceline.frontend.request_types import ORIGIN, RequestError, TraceOrigin, new_rid, shutting_down
from fenceline.frontend.tokenize_pool import FreedMemory

logger = logging.getLogger(__name__)

# Keys in the ASGI scope.
REQUEST_ID = "fenceline.request_id"
BODY_SEND = "fenceline.send"  # for the body of a started answer: past the wrappers that only watch its start
BODY_BYTES = "fenceline.body_bytes"  # the length of the body, once it has been read
LARGE_BYTES = "fenceline.large_bytes"  # of the answer's large parts, as far as they have been sent that way
_ID_PATTERN = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_MAX_LENGTH_DIGITS = 20  # of a Content-Length
# Bodies larger than this share MAX_BODIES_BYTES while their requests are worked on; there is always room for others.
_SMALL_BODY_BYTES = 64 << 10
MAX_BODIES_BYTES = 4 * MAX_BODY_BYTES


class RequestMiddleware:
    """Gives every request an id (the client's ``x-request-id`` or a fresh one) that its answer carries too, refuses
    what ``rules`` refuse and bodies over 64 MiB, and answers if the application has a defect. ``refused`` is told of
    each request that is answered with an error. All large bodies in the server at one time may have 256 MiB together; a
    body that exceeds this is answered with 503. The memory of large bodies and answers is returned to the system."""

    def __init__(
        self,
        app: ASGIApp,
        rules: AccessRules,
        refused: Callable[[RequestError], object] | None = None,
        traces_requests: bool = False,
    ) -> None:
        """``traces_requests``: whether what a request says of its trace is noted for the task that works on it."""
        self._app = app
        self._traces_requests = traces_requests
        self._rules = rules
        self._refused = refused
        self.num_body_bytes = 0  # of large bodies whose requests have not ended
        self._memory = FreedMemory()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _ID_PATTERN.fullmatch(given) else new_rid().encode()
        scope[REQUEST_ID] = request_id.decode()
        scope[BODY_SEND] = send
        if self._traces_requests:
            ORIGIN.set(TraceOrigin.of(scope["path"], headers))

        started = False
        num_sent = 0

        async def send_with_id(message: Message) -> None:
            nonlocal started, num_sent
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            else:
                num_sent += len(message.get("body", b""))
            await send(message)

        error = self._refusal(scope, headers)
        if error is not None:
            await error_response(error)(scope, receive, send_with_id)
            self._count(scope)
            return
        body = _Body(self, receive)
        try:
            await self._app(scope, body.receive, send_with_id)
        except asyncio.CancelledError:  # the server stops, and no longer waits for this request
            if not started:
                await error_response(shutting_down())(scope, receive, send_with_id)
        except Exception as defect:
            logger.exception("request %s failed", scope[REQUEST_ID])
            if not started:
                await error_response(internal_error(defect))(scope, receive, send_with_id)
        finally:
            self._count(scope)
            self.num_body_bytes -= body.num_shared
            num_freed = body.num_shared + (num_sent if num_sent > PIECE_BYTES else scope.get(LARGE_BYTES, 0))
            if num_freed:
                self._memory.freed(num_freed)

    def _count(self, scope: Scope) -> None:
        if self._refused is not None and (error := scope.get(REFUSED)) is not None:
            self._refused(error)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> RequestError | None:
        length = headers.get(b"content-length", b"0")
        if len(length) > _MAX_LENGTH_DIGITS or not length.isdigit():
            return RequestError(400, "Content-Length is not a number of bytes")
        if int(length) > MAX_BODY_BYTES:
            return _too_large()
        return self._rules.refusal(scope, headers)


class _Body:
    """``receive`` that counts: a body without a declared length is limited too, and so are all bodies together."""

    def __init__(self, middleware: RequestMiddleware, receive: Receive) -> None:
        self._middleware = middleware
        self._receive = receive
        self._num_bytes = 0
        self.num_shared = 0  # counted in the middleware's sum

    async def receive(self) -> Message:
        """The next part. Raises RequestError for one too many."""
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > _SMALL_BODY_BYTES:
            self._count()
        return message

    def _count(self) -> None:
        if self._num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        num_more = self._num_bytes - self.num_shared
        if self._middleware.num_body_bytes + num_more > MAX_BODIES_BYTES:
            raise RequestError(503, "other large requests are being received: try again", code="too_many_bodies")
        self._middleware.num_body_bytes += num_more
        self.num_shared += num_more


def _too_large() -> RequestError:
    return RequestError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", code="body_too_large")
