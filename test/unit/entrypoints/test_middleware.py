"""The middleware: what a client sees of a request that the stopping server cut short."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import orjson
import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from fenceline.entrypoints.access import AccessRules
from fenceline.entrypoints.errors import install_error_handlers
from fenceline.entrypoints.json_body import PartsResponse
from fenceline.entrypoints.middleware import RequestMiddleware
from fenceline.entrypoints.sse import EventStream
from fenceline.frontend import tokenize_pool
from fenceline.frontend.request_types import RequestError

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}


async def answer(started: bool) -> list[Message]:
    """What is sent for a request whose handler is cancelled, before or after its answer began."""
    sent: list[Message] = []
    waits = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        waits.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    task = asyncio.ensure_future(RequestMiddleware(app, AccessRules())(dict(SCOPE), receive, send))
    await waits.wait()
    task.cancel()
    await task  # no exception: nothing for the server to log
    return sent


async def test_a_request_cut_short_by_the_stop_is_told_so() -> None:
    start, body = await answer(started=False)
    assert start["status"] == 503
    assert orjson.loads(body["body"])["error"]["code"] == "shutting_down"


async def test_nothing_follows_an_answer_that_had_begun() -> None:
    assert [message["type"] for message in await answer(started=True)] == ["http.response.start"]


async def test_a_defect_of_any_endpoint_is_an_error_object_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    application = FastAPI()
    install_error_handlers(application)

    @application.get("/broken")
    async def broken() -> None:
        raise KeyError("a defect of ours")

    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {**SCOPE, "method": "GET", "path": "/broken", "query_string": b"", "http_version": "1.1"}
    await RequestMiddleware(application, AccessRules())(scope, receive, send)
    start, body = sent
    assert start["status"] == 500
    assert orjson.loads(body["body"])["error"]["message"].startswith("internal error: KeyError")
    assert "a defect of ours" in caplog.text


class _Body:
    """Stands for what a handler holds of a request: bytes have no weak references."""


async def test_a_refused_request_is_let_go_of_without_the_collector() -> None:
    application, bodies = FastAPI(), []
    install_error_handlers(application)

    @application.post("/generate")
    async def generate() -> None:
        body = _Body()
        bodies.append(weakref.ref(body))
        try:
            orjson.loads("not JSON")
        except orjson.JSONDecodeError as error:
            raise RequestError(400, "the body is not JSON") from error

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    gc.disable()
    try:
        door = RequestMiddleware(application, AccessRules())
        await door({**SCOPE, "query_string": b"", "http_version": "1.1"}, receive, send)
        (body,) = bodies
        assert body() is None
    finally:
        gc.enable()
    assert sent[0]["status"] == 400


async def test_memory_of_large_bodies_is_given_back_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, given_back, trims = asyncio.get_running_loop(), asyncio.Event(), []

    def trim() -> None:
        trims.append(door.num_body_bytes)
        loop.call_soon_threadsafe(given_back.set)

    monkeypatch.setattr(tokenize_pool, "_TRIM_SOON_S", 0.0)
    monkeypatch.setattr(tokenize_pool, "_TRIM_LATER_S", 3600.0)
    monkeypatch.setattr(tokenize_pool, "trim_memory", trim)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    async def send(message: Message) -> None: ...

    async def ask(num_bytes: int) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": bytes(num_bytes), "more_body": False}

        await door(dict(SCOPE), receive, send)

    door = RequestMiddleware(app, AccessRules())
    for _ in range(100):
        await ask(60_000)  # small ones give nothing back
    await ask(1 << 20)  # little waits for more to come with it
    await asyncio.sleep(0)
    assert not trims
    for _ in range(20):
        await ask(1 << 20)
    await given_back.wait()
    assert trims == [0]


@pytest.mark.parametrize("stream", [False, True])
async def test_memory_of_large_answers_is_given_back_too(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    loop, given_back = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(tokenize_pool, "_TRIM_SOON_S", 0.0)
    monkeypatch.setattr(tokenize_pool, "_TRIM_LATER_S", 3600.0)
    monkeypatch.setattr(tokenize_pool, "trim_memory", lambda: loop.call_soon_threadsafe(given_back.set))

    async def events() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(1 << 20)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answer = EventStream(events(), lambda: None) if stream else PartsResponse([bytes(20 << 20)])
        await answer(scope, receive, send)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None: ...

    await RequestMiddleware(app, AccessRules())(dict(SCOPE), receive, send)
    await asyncio.wait_for(given_back.wait(), 30)


async def test_what_little_was_freed_last_is_given_back_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, given_back = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(tokenize_pool, "_TRIM_LATER_S", 0.0)
    monkeypatch.setattr(tokenize_pool, "trim_memory", lambda: loop.call_soon_threadsafe(given_back.set))
    tokenize_pool.FreedMemory().freed(1 << 17)
    await asyncio.wait_for(given_back.wait(), 30)
