"""The one middleware: request ids, the API key, the size of bodies. Pure ASGI, because each of a stream's
chunks passes through it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fenceline.entrypoints.errors import error_response, internal_error
from fenceline.entrypoints.json_body import MAX_BODY_BYTES
from fenceline.managers.request_types import RequestError, new_rid

logger = logging.getLogger(__name__)

# Keys in the ASGI scope.
REQUEST_ID = "fenceline.request_id"
BODY_SEND = "fenceline.send"  # for the body of a started answer: past the wrappers that only watch its start
_ID_PATTERN = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_MAX_LENGTH_DIGITS = 20  # of a Content-Length
# Bodies larger than this share MAX_BODIES_BYTES while their requests are worked on; there is always room for others.
_SMALL_BODY_BYTES = 64 << 10
MAX_BODIES_BYTES = 4 * MAX_BODY_BYTES
_OPEN_PREFIXES = ("/health", "/metrics")  # reachable without the key, as probes and scrapers carry none


class FrontDoor:
    """Gives every request an id (the client's ``x-request-id`` or a fresh one) that its answer carries too,
    compares the key in constant time, refuses bodies over 64 MiB and answers for our own defects.

    All large bodies that are here at one time may have 256 MiB together; what comes on top is answered with 503."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._credentials = None if api_key is None else f"Bearer {api_key}".encode()
        self.num_body_bytes = 0  # of large bodies whose requests have not ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _ID_PATTERN.fullmatch(given) else new_rid().encode()
        scope[REQUEST_ID] = request_id.decode()
        scope[BODY_SEND] = send

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        error = self._refusal(scope, headers)
        if error is not None:
            await error_response(error)(scope, receive, send_with_id)
            return
        body = _Body(self, receive)
        try:
            await self._app(scope, body.receive, send_with_id)
        except asyncio.CancelledError:  # the server stops and waits no longer
            if not started:
                await error_response(_stopping())(scope, receive, send_with_id)
        except Exception as defect:
            logger.exception("request %s failed", scope[REQUEST_ID])
            if not started:
                await error_response(internal_error(defect))(scope, receive, send_with_id)
        finally:
            self.num_body_bytes -= body.num_shared

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> RequestError | None:
        length = headers.get(b"content-length", b"0")
        if len(length) > _MAX_LENGTH_DIGITS or not length.isdigit():
            return RequestError(400, "Content-Length is not a number of bytes")
        if int(length) > MAX_BODY_BYTES:
            return _too_large()
        if self._credentials is None or scope["method"] == "OPTIONS":
            return None
        if scope["path"].startswith(_OPEN_PREFIXES):
            return None
        if hmac.compare_digest(headers.get(b"authorization", b""), self._credentials):
            return None
        return RequestError(
            401, "send the server's API key as 'Authorization: Bearer KEY'", code="invalid_api_key"
        )


class _Body:
    """``receive`` that counts: a body without a declared length is limited too, and so are all bodies together."""

    def __init__(self, door: FrontDoor, receive: Receive) -> None:
        self._door = door
        self._receive = receive
        self._num_bytes = 0
        self.num_shared = 0  # counted in the door's sum

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
        if self._door.num_body_bytes + num_more > MAX_BODIES_BYTES:
            raise RequestError(
                503, "other large requests are being received: try again", code="too_many_bodies"
            )
        self._door.num_body_bytes += num_more
        self.num_shared += num_more


def _too_large() -> RequestError:
    return RequestError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", code="body_too_large")


def _stopping() -> RequestError:
    return RequestError(503, "the server is shutting down", code="shutting_down")
