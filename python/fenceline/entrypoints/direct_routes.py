"""Requests to generate go straight to their handlers, past routing and middleware that have nothing to do there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fenceline.entrypoints.errors import CLIENT_GONE, error_response, too_deep
from fenceline.frontend.request_types import RequestError

Handler = Callable[[Request], Awaitable[Response]]

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


def handlers_of(routes: Iterable[BaseRoute]) -> dict[str, Handler]:
    """The handlers of :data:`PATHS`, each of which takes the request alone."""
    return {
        route.path: route.endpoint for route in routes if isinstance(route, Route) and route.path in PATHS
    }


class DirectRoutes:
    """POST to a path in ``handlers`` is answered by its handler, everything else by ``app``.

    Errors are answered as ``app`` does (:func:`fenceline.entrypoints.errors.install_error_handlers`): the route changes
    what a request costs, not what it gets. With plain routes of ``app`` instead, a request for two tokens cost this
    process a third more CPU time (benchmark/bench_frontend.py, 1,024 streams); a stream's later tokens cost the same.
    """

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler]) -> None:
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = None
        if scope["type"] == "http" and scope["method"] == "POST":
            handler = self._handlers.get(scope["path"])
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handler(Request(scope, receive))
        except RequestError as error:
            response = error_response(error)
        except RecursionError:
            response = error_response(too_deep())
        except ClientDisconnect:
            response = Response(status_code=CLIENT_GONE)
        await response(scope, receive, send)
