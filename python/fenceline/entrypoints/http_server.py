"""The HTTP application and the uvicorn server that carries it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.errors import install_error_handlers
from fenceline.entrypoints.front_door import FrontDoor
from fenceline.entrypoints.http_protocol import JoiningHttpProtocol
from fenceline.entrypoints.native_api import NativeApi
from fenceline.entrypoints.openai.router import create_router
from fenceline.entrypoints.short_way import ShortWay, handlers_of
from fenceline.managers.tokenizer_manager import TokenizerManager
from fenceline.version import __version__

SHUTDOWN_TIMEOUT_S = 2  # for answers still being written when the server closes
KEEP_ALIVE_S = 60


def create_app(manager: TokenizerManager, config: EngineConfig) -> ASGIApp:
    """All endpoints over ``manager``, behind the front door."""
    app = FastAPI(title="Fenceline", version=__version__)
    install_error_handlers(app)
    routers = (NativeApi(manager, config).router(), create_router(manager, config))
    for router in routers:
        app.include_router(router)
    short = ShortWay(app, handlers_of(route for router in routers for route in router.routes))
    return FrontDoor(short, api_key=config.api_key)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor decides what a signal means."""

    def __init__(self, app: ASGIApp, config: EngineConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=JoiningHttpProtocol,
                log_level=config.log_level_http,
                log_config=None,  # the process's own format
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
                server_header=False,
                lifespan="off",
                ws="none",
            )
        )
        # Start and stop are the supervisor's to report.
        logging.getLogger("uvicorn.error").setLevel("WARNING")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def launch_server(config: EngineConfig) -> None:
    """Serve until stopped; ends the process with a non-zero status if the engine fails."""
    from fenceline.entrypoints.supervisor import serve_until_stopped

    status = serve_until_stopped(config)
    if status:
        sys.exit(status)
