"""The HTTP application and the uvicorn server that runs it."""

from __future__ import annotations

import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.access import AccessRules, Hosts, own_names
from fenceline.entrypoints.body_parser import BodyParser
from fenceline.entrypoints.errors import CLIENT_GONE, error_response, install_error_handlers, too_deep
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.http_protocol import HttpProtocol
from fenceline.entrypoints.live_state import LIVE_STATE_PATH, LiveState
from fenceline.entrypoints.middleware import RequestMiddleware
from fenceline.entrypoints.native_api import NativeApi
from fenceline.entrypoints.openai.router import create_router
from fenceline.entrypoints.openapi import install_docs
from fenceline.entrypoints.web_page import install_web_page
from fenceline.frontend.request_types import RequestError
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.version import __version__

Handler = Callable[[Request], Awaitable[Response]]

GENERATE_PATHS = (
    "/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
)  # fmt: skip
_PROBES = ("/health", "/health_generate", "/metrics", LIVE_STATE_PATH)
SHUTDOWN_TIMEOUT_S = 2  # for answers still being written when the server closes
KEEP_ALIVE_S = 60
MAX_CONNECTIONS = 16384
_MACOS_DESCRIPTORS = 10240
# Connections that the kernel keeps for us until their turn; it takes its own limit if that is smaller (4,096 on Linux).
# Beyond them it drops a client's first packet, which is sent again only a second later, /health's too.
_BACKLOG = 65535
_MOST_LATE_LINES = 256  # of the access log: writing them takes about ten milliseconds
_RESERVED_DESCRIPTORS = 128  # for sockets to the engine, logs, files of models and the like


def create_app(manager: TokenizerManager, config: EngineConfig) -> ASGIApp:
    """All endpoints over ``manager``, behind the one middleware; with --cors-allowed-origins behind Starlette's too."""
    app = FastAPI(title="Fenceline", version=__version__, openapi_url=None)
    install_error_handlers(app)
    parser = BodyParser(config.model.context_length, UnknownFields(config.server_args.strict_fields))
    args = config.server_args
    routers = [NativeApi(manager, config, parser).router(), create_router(manager, config, parser)]
    if not args.disable_web_page:
        routers.append(LiveState(manager, config).router())
    for router in routers:
        app.router.routes.extend(router.routes)  # and not nested: each has its rule
    install_docs(app)
    if not args.disable_web_page:
        install_web_page(app, config.model.embeds)
    rules = AccessRules(
        app.routes,
        args.api_key,
        args.admin_api_key,
        Hosts(own_names(args.host), args.allowed_hosts or ()),
        args.cors_allowed_origins or (),
    )
    direct = DirectRoutes(app, handlers_of(app.routes), manager.expect)
    served = RequestMiddleware(direct, rules, manager.metrics.refused, config.traces is not None)
    if args.cors_allowed_origins is None:
        return served
    # Outermost, because a browser sends the preflight request without the key, and pages must be able to read errors.
    return CORSMiddleware(
        served,
        allow_origins=args.cors_allowed_origins,
        allow_methods=("GET", "POST", "PUT", "DELETE"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )


def handlers_of(routes: Iterable[BaseRoute]) -> dict[str, Handler]:
    """The handlers of :data:`GENERATE_PATHS`, each of which takes the request alone."""
    return {route.path: route.endpoint for route in routes if isinstance(route, Route) and route.path in GENERATE_PATHS}


class DirectRoutes:
    """POST to a path in ``handlers`` is answered by its handler, after a call of ``expect``, everything else by
    ``app``. Errors are answered as ``app`` does (:func:`fenceline.entrypoints.errors.install_error_handlers`): the
    route changes what a request costs, not what it gets. With plain routes of ``app`` instead, a request for two tokens
    cost this process a third more CPU time (benchmark/bench_frontend.py, 1,024 streams); a stream's later tokens cost
    the same."""

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler], expect: Callable[[], None]) -> None:
        self._app = app
        self._handlers = handlers
        self._expect = expect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = None
        if scope["type"] == "http" and scope["method"] == "POST":
            handler = self._handlers.get(scope["path"])
        if handler is None:
            await self._app(scope, receive, send)
            return
        self._expect()
        try:
            response = await handler(Request(scope, receive))
        except RequestError as error:
            response = error_response(error)
        except RecursionError:
            response = error_response(too_deep())
        except ClientDisconnect:
            response = Response(status_code=CLIENT_GONE)
        await response(scope, receive, send)


def raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors of this process and its children, since each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, _MACOS_DESCRIPTORS):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):  # macOS calls the limit infinite and allows less
            continue
        return
    logging.getLogger(__name__).info("The limit of %d file descriptors stays", soft)


def max_connections(num_descriptors: int) -> int:
    """How many connections the server keeps if the process may have ``num_descriptors`` (-1: without limit)."""
    if num_descriptors < 0:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(num_descriptors - _RESERVED_DESCRIPTORS, num_descriptors // 2))


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a line of the access log is written: those of probes, scrapers and the page, which come every few
    seconds, only if they failed or with --log-level debug."""
    values = record.args
    if not isinstance(values, tuple) or len(values) != 5 or values[2] not in _PROBES:
        return True
    status = values[4]
    return not isinstance(status, int) or status >= 400 or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


class AccessLog:
    """The access log, in which uvicorn writes a line before an answer's first byte. Lines are only noted, and made and
    written at the next tick, so that a first token does not wait for them."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("uvicorn.access")
        self._lines: list[tuple[float, str, tuple[object, ...]]] = []

    def info(self, line: str, *values: object) -> None:
        """As ``logging.Logger.info``, in the same order."""
        if self._logger.isEnabledFor(logging.INFO):
            self._lines.append((time.time(), line, values))
            if len(self._lines) == _MOST_LATE_LINES:
                self.write()

    def write(self) -> None:
        """Write the lines that wait."""
        lines, self._lines = self._lines, []
        for at, line, values in lines:
            record = self._logger.makeRecord(self._logger.name, logging.INFO, __file__, 0, line, values, None)
            record.created = at
            self._logger.handle(record)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor decides what a signal means. ``refused`` is told of requests
    that do not reach ``app``."""

    def __init__(
        self, app: ASGIApp, config: EngineConfig, refused: Callable[[RequestError], object] | None = None
    ) -> None:
        num_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.access_log = AccessLog()
        connection = partial(
            HttpProtocol,
            refused=refused or (lambda error: None),
            max_connections=max_connections(num_descriptors),
            access_log=cast(logging.Logger, self.access_log),
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[HttpProtocol]", connection),
                log_level=config.log_level_http,
                log_config=None,  # the process's own format
                backlog=_BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
                server_header=False,
                lifespan="off",
                ws="none",
            )
        )
        # The supervisor reports start and stop.
        logging.getLogger("uvicorn.error").setLevel("WARNING")
        logging.getLogger("uvicorn.access").addFilter(is_worth_a_line)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; once a second clients that do not keep pace are disconnected."""
        self.access_log.write()
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                cast(HttpProtocol, connection).check_pace()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and write the lines of the last answers."""
        await super().shutdown(sockets)
        self.access_log.write()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield
