"""The front door: what a client sees of a request that the stopping server cut short."""

from __future__ import annotations

import asyncio

import orjson
from starlette.types import Message, Receive, Scope, Send

from fenceline.entrypoints.front_door import FrontDoor

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

    task = asyncio.ensure_future(FrontDoor(app, None)(dict(SCOPE), receive, send))
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
