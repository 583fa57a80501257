"""Sends requests to the HTTP application without a server, for requests that need no engine."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.access import Access, rule_of
from fenceline.entrypoints.http_server import create_app
from fenceline.entrypoints.web_page import PAGE_PATHS
from fenceline.frontend.tokenizer import load_tokenizer
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc import io_struct as io


class DeadLink:
    """An engine that never answers."""

    def send(self, message: io.Message) -> None:
        pass

    def wake(self) -> None:
        pass

    async def receive(self) -> list[io.Message]:
        raise AssertionError("nobody listens")

    def close(self) -> None:
        pass


def make_app(model_path: str = "demo", **flags: Any) -> ASGIApp:
    """All endpoints over an engine that does not answer."""
    config = resolve(ServerArgs(model_path=model_path, device="cpu", **flags))
    manager = TokenizerManager(config, load_tokenizer(config.tokenizer_path), DeadLink())
    app = create_app(manager, config)
    manager.shutdown()
    return app


def ask(
    app: ASGIApp, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer."""
    [answer] = ask_many(app, path, headers, method)
    return answer


def ask_many(
    app: ASGIApp, path: str, headers: dict[str, str] | None = None, method: str = "GET", num: int = 1
) -> list[tuple[int, dict[str, str], bytes]]:
    """The answers to ``num`` equal requests that begin in the same turn of the event loop."""

    async def one() -> tuple[int, dict[str, str], bytes]:
        sent: list[Message] = []
        parts: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            if not parts:
                await asyncio.Event().wait()
            return parts.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()], "root_path": "",
            "scheme": "http", "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "http_version": "1.1",
        }  # fmt: skip
        task = asyncio.ensure_future(app(scope, receive, send))
        for _ in range(50):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        body = b"".join(message.get("body", b"") for message in sent[1:])
        answer_headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], answer_headers, body

    async def run() -> list[tuple[int, dict[str, str], bytes]]:
        return await asyncio.gather(*(one() for _ in range(num)))

    return asyncio.run(run())


def routes_of(app: ASGIApp) -> list[Route]:
    """All routes of :func:`make_app`'s application."""
    inner: Any = app
    while not isinstance(inner, FastAPI):
        inner = inner._app if hasattr(inner, "_app") else inner.app
    return cast("list[Route]", inner.routes)


def paths_for(app: ASGIApp, access: Access) -> set[str]:
    """The paths of the routes that ``access`` may use, without those of the page."""
    return {route.path for route in routes_of(app) if rule_of(route).access is access and route.path not in PAGE_PATHS}
