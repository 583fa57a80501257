"""The HTTP application and the uvicorn server that carries it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.errors import install_error_handlers
from fenceline.entrypoints.front_door import FrontDoor
from fenceline.entrypoints.native_api import NativeApi
from fenceline.entrypoints.openai.router import create_router
from fenceline.managers.tokenizer_manager import TokenizerManager
from fenceline.version import __version__

SHUTDOWN_TIMEOUT_S = 2  # for answers still being written when the server closes
KEEP_ALIVE_S = 60


def create_app(manager: TokenizerManager, config: EngineConfig) -> FastAPI:
    """All endpoints over ``manager``, behind the front door."""
    app = FastAPI(title="Fenceline", version=__version__)
    install_error_handlers(app)
    app.include_router(NativeApi(manager, config).router())
    app.include_router(create_router(manager, config))
    app.add_middleware(FrontDoor, api_key=config.api_key)
    return app


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor decides what a signal means."""

    def __init__(self, app: FastAPI, config: EngineConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
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
