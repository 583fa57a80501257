"""The body of every error of every endpoint: OpenAI's object, with SGLang's fields beside it."""

from __future__ import annotations

from copy import copy

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fenceline.frontend.request_types import RequestError
from fenceline.ipc.child_process import one_line

MAX_MESSAGE_CHARS = 1000
REFUSED = "fenceline.refused"  # in the ASGI scope
CLIENT_GONE = 499  # no client reads it; the access log shows it


def error_body(error: RequestError) -> dict[str, object]:
    """OpenAI's object under ``error``, and flat beside it SGLang's: ``object``, ``message``, ``type``, ``param``,
    ``code``. The message, which may show what the client sent, is one line of bounded length. OpenAI's ``code`` is the
    status unless a word fits better, SGLang's is always the status."""
    message = one_line(error.message[:MAX_MESSAGE_CHARS])
    fields = {"message": message, "type": error.type, "param": error.param}
    code = error.code if error.code is not None else error.status
    return {"error": {**fields, "code": code}, "object": "error", **fields, "code": error.status}


def error_bytes(error: RequestError) -> bytes:
    return orjson.dumps(error_body(error))


def without_frames(error: RequestError) -> RequestError:
    """A copy of ``error`` for the request's scope. The frames of an error's traceback, and of the one behind it, hold
    the scope and the body: a cycle of up to 64 MiB, which stays until the garbage collector comes by."""
    return copy(error)


class ErrorResponse(Response):
    """The answer to a request that is refused for ``error``, with a body of any form. It leaves the error in the
    request's scope, where the middleware finds it to count it."""

    media_type = "application/json"

    def __init__(self, error: RequestError, body: bytes) -> None:
        headers = {"Retry-After": "1"} if error.status == 503 else {}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(body, status_code=error.status, headers=headers)
        self._error = without_frames(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REFUSED] = self._error
        await super().__call__(scope, receive, send)


def error_response(error: RequestError) -> Response:
    """The HTTP answer to a request that failed before anything was sent."""
    return ErrorResponse(error, error_bytes(error))


def internal_error(error: BaseException) -> RequestError:
    """The error that a client gets for a defect of the server; the log has the details."""
    return RequestError(500, f"internal error: {type(error).__name__}; see the server's log")


def too_deep() -> RequestError:
    """The error that a client gets for a RecursionError, which only values of its own request can cause."""
    return RequestError(400, "the body's JSON is nested too deeply", code="invalid_json")


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of a request with :func:`error_response`. The middleware logs defects, and answers if one
    occurs outside the application."""

    async def on_request_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(RequestError(error.status_code, _http_message(request, error)))

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return error_response(RequestError(400, f"{where}: {first['msg']}", param=where or None))

    async def on_recursion_error(request: Request, error: Exception) -> Response:
        return error_response(too_deep())

    async def on_client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def on_defect(request: Request, error: Exception) -> Response:
        return error_response(internal_error(error))  # it is also raised again, and the middleware logs it

    app.add_exception_handler(Exception, on_defect)
    app.add_exception_handler(ClientDisconnect, on_client_gone)
    app.add_exception_handler(RecursionError, on_recursion_error)
    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)


def _http_message(request: Request, error: HTTPException) -> str:
    if error.status_code == 404:
        return f"no such endpoint: {request.url.path}; /docs lists them all"
    if error.status_code == 405:
        return f"{request.method} is not allowed on {request.url.path}"
    return str(error.detail)
