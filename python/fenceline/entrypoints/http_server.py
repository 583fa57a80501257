"""The HTTP application and the uvicorn server that carries it."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.body_parser import BodyParser
from fenceline.entrypoints.direct_routes import DirectRoutes, handlers_of
from fenceline.entrypoints.errors import install_error_handlers
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.http_protocol import (
    BoundedReader,
    ConnectionLimits,
    HttpProtocol,
    Listener,
    check_paces,
)
from fenceline.entrypoints.middleware import RequestMiddleware
from fenceline.entrypoints.native_api import NativeApi
from fenceline.entrypoints.openai.router import create_router
from fenceline.entrypoints.openapi import install_docs
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.version import __version__

SHUTDOWN_TIMEOUT_S = 2  # for answers still being written when the server closes
KEEP_ALIVE_S = 60
MAX_CONNECTIONS = 16384
_MACOS_DESCRIPTORS = 10240
# Connections that the kernel keeps for us until their turn; it takes its own limit if that is smaller (4,096 on Linux).
# Beyond them it drops a client's first packet, which is sent again only a second later, /health's too.
_BACKLOG = 65535
_RESERVED_DESCRIPTORS = 128  # for all that is no connection: sockets to the engine, logs, models being read


def create_app(manager: TokenizerManager, config: EngineConfig) -> ASGIApp:
    """All endpoints over ``manager``, behind the one middleware."""
    app = FastAPI(title="Fenceline", version=__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    parser = BodyParser(config.model.context_length, UnknownFields(config.server_args.strict_fields))
    routers = (NativeApi(manager, config, parser).router(), create_router(manager, config, parser))
    for router in routers:
        app.include_router(router)
    install_docs(app)
    direct = DirectRoutes(app, handlers_of(route for router in routers for route in router.routes))
    return RequestMiddleware(
        direct, api_key=config.server_args.api_key, admin_api_key=config.server_args.admin_api_key
    )


def raise_descriptor_limit() -> None:
    """Each connection takes a file descriptor: let this process, and its children, have as many as they may."""
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


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor decides what a signal means."""

    def __init__(self, app: ASGIApp, config: EngineConfig) -> None:
        num_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limits = ConnectionLimits(max_connections(num_descriptors))
        # Beyond the limit there are those that will be told so, and /health.
        self._max_accepted = self._limits.max_connections + _RESERVED_DESCRIPTORS // 2
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
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
        # Start and stop are the supervisor's to report.
        logging.getLogger("uvicorn.error").setLevel("WARNING")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on ``sockets``, which listen already."""
        listeners = [Listener(sock, self._make_protocol, self._has_room) for sock in sockets or ()]
        self.servers = cast("list[asyncio.Server]", listeners)  # which uvicorn closes and waits for
        self.started = True

    def _make_protocol(self) -> BoundedReader:
        connection = HttpProtocol(
            config=self.config, server_state=self.server_state, app_state={}, limits=self._limits
        )
        return BoundedReader(connection, self._limits)

    def _has_room(self) -> bool:
        return len(self.server_state.connections) < self._max_accepted

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; once a second clients that do not keep pace are disconnected."""
        if counter % 10 == 0:
            self._limits.advance(asyncio.get_running_loop().time())
            self._looked = False
        if not self._looked:
            connections = cast("list[HttpProtocol]", list(self.server_state.connections))
            self._looked = check_paces(connections)
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield
