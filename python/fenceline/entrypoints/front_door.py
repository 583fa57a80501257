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
_OPEN_PREFIXES = ("/health", "/metrics")  # reachable without the key, as probes and scrapers carry none


class FrontDoor:
    """Gives every request an id (the client's ``x-request-id`` or a fresh one) that its answer carries too,
    compares the key in constant time, refuses bodies over 64 MiB and answers for our own defects."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._credentials = None if api_key is None else f"Bearer {api_key}".encode()

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
        try:
            await self._app(scope, _limited(receive), send_with_id)
        except asyncio.CancelledError:  # the server stops and waits no longer
            if not started:
                await error_response(_stopping())(scope, receive, send_with_id)
        except Exception as defect:
            logger.exception("request %s failed", scope[REQUEST_ID])
            if not started:
                await error_response(internal_error(defect))(scope, receive, send_with_id)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> RequestError | None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
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


def _limited(receive: Receive) -> Receive:
    """``receive`` that counts: a body without a declared length is limited too."""
    num_bytes = 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return counted


def _too_large() -> RequestError:
    return RequestError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", code="body_too_large")


def _stopping() -> RequestError:
    return RequestError(503, "the server is shutting down", code="shutting_down")
