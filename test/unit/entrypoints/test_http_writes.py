"""What leaves together: writes of one turn of the loop, an answer's head and first event, requests of one moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from fake_transport import Wire
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fenceline.entrypoints import sse
from fenceline.entrypoints.http_protocol import MAX_HELD_BYTES, JoiningTransport
from fenceline.entrypoints.http_server import DirectRoutes, handlers_of
from fenceline.entrypoints.json_body import PIECE_BYTES, PartsResponse
from fenceline.entrypoints.sse import EventStream
from fenceline.frontend.request_types import RequestError
from fenceline.frontend.scheduler_link import MAX_HELD_BYTES as MOST_SENT_LATE
from fenceline.frontend.scheduler_link import SocketLink
from fenceline.ipc import io_struct
from fenceline.ipc.child_process import Watchdog
from fenceline.ipc.free_memory import FreeMemoryWatch
from fenceline.ipc.io_struct import SCHEDULER_DECODER, AbortReq, ShutdownReq, TokenizedGenerateReq, encode, id_array
from fenceline.ipc.mailbox import Inbox, make_ports, remove_ports
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.process import MAX_STEP_BYTES, SocketInbox


async def test_writes_of_one_turn_are_one_write() -> None:
    wire = Wire()
    transport = JoiningTransport(wire, asyncio.get_running_loop())
    for part in (b"head ", b"event"):
        transport.write(part)
    assert wire.calls == []
    await asyncio.sleep(0)
    assert wire.calls == [b"head event"]
    transport.write(b"last")
    transport.close()
    await asyncio.sleep(0)
    assert wire.calls == [b"head event", b"last", "close"]


async def test_a_lot_is_not_held() -> None:
    wire = Wire()
    transport = JoiningTransport(wire, asyncio.get_running_loop())
    transport.write(b"a")
    transport.write(b"b" * MAX_HELD_BYTES)
    assert [len(data) for data in wire.calls] == [MAX_HELD_BYTES + 1]
    transport.write(b"c")
    await asyncio.sleep(0)
    assert wire.calls[1:] == [b"c"]


async def test_what_is_held_is_lost_with_the_connection() -> None:
    wire = Wire()
    transport = JoiningTransport(wire, asyncio.get_running_loop())
    transport.write(b"answer")
    wire.is_lost = True  # reset by the client, in the turn in which it was answered
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not errors and wire.calls == []


async def test_what_is_held_is_lost_with_an_abort() -> None:
    wire = Wire()
    transport = JoiningTransport(wire, asyncio.get_running_loop())
    transport.write(b"a")
    transport.abort()
    await asyncio.sleep(0)
    assert wire.calls == ["abort"]


@pytest.mark.parametrize("num_parts", [1, 700])
async def test_a_large_answer_is_sent_a_piece_a_turn(num_parts: int) -> None:
    parts = [bytes([number % 251]) * (3 * PIECE_BYTES // num_parts) for number in range(num_parts)]
    parts.append(b"end")
    turns, sent = 0, list[tuple[int, Message]]()

    async def receive() -> Message:
        raise AssertionError("nobody asks")

    async def send(message: Message) -> None:
        sent.append((turns, message))

    task = asyncio.ensure_future(PartsResponse(parts)({"type": "http"}, receive, send))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    (_, start), *bodies = sent
    assert (b"content-length", b"%d" % sum(map(len, parts))) in start["headers"]
    assert b"".join(message["body"] for _, message in bodies) == b"".join(parts)
    assert [message["more_body"] for _, message in bodies] == [True] * (len(bodies) - 1) + [False]
    for turn in range(turns + 1):
        assert sum(len(message["body"]) for at, message in bodies if at == turn) <= PIECE_BYTES


@pytest.mark.parametrize("num_parts", [0, 1, 700])
async def test_a_large_event_is_sent_in_pieces_a_turn_of_the_loop_each(num_parts: int) -> None:
    size = 3 * PIECE_BYTES // max(num_parts, 1)
    parts = [bytes([number % 251]) * size for number in range(max(num_parts, 1))]
    turns, sizes, sent = 0, [0] * 1000, bytearray()

    async def events() -> AsyncIterator[bytes | list[bytes]]:
        yield parts if num_parts else parts[0]
        yield b"small"
        yield [b"in ", b"parts"]

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nobody leaves")

    async def send(message: Message) -> None:
        sizes[turns] += len(message.get("body", b""))
        sent.extend(message.get("body", b""))

    task = asyncio.ensure_future(EventStream(events(), lambda: None)({"type": "http"}, receive, send))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert bytes(sent) == b"".join([*parts, b"small", b"in parts"])
    assert max(sizes) <= PIECE_BYTES


async def test_a_small_answer_is_one_message() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nobody asks")

    async def send(message: Message) -> None:
        sent.append(message)

    await PartsResponse([b"[", b"1", b"]"])({"type": "http"}, receive, send)
    assert [message.get("body") for message in sent] == [None, b"[1]"]
    assert dict(sent[0]["headers"])[b"content-length"] == b"3"


async def stream(events: AsyncIterator[bytes], sent: list[Message], news: asyncio.Event) -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nobody leaves")

    async def send(message: Message) -> None:
        sent.append(message)
        news.set()

    await EventStream(events, lambda: None)({"type": "http"}, receive, send)


@pytest.mark.parametrize("patience_s", [0.0, 3600.0])
async def test_the_head_waits_for_the_first_event_but_not_for_ever(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "HEAD_PATIENCE_S", patience_s)
    go, news, sent = asyncio.Event(), asyncio.Event(), list[Message]()

    async def events() -> AsyncIterator[bytes]:
        await go.wait()
        yield b"data: 1\n\n"

    task = asyncio.ensure_future(stream(events(), sent, news))
    if patience_s == 0.0:
        await news.wait()
        assert [message["type"] for message in sent] == ["http.response.start"]
    else:
        for _ in range(10):
            await asyncio.sleep(0)
        assert not sent
    go.set()
    await task
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * 2]
    assert [message["body"] for message in sent[1:]] == [b"data: 1\n\n", b""]


@contextmanager
def scheduler_link() -> Iterator[tuple[SocketLink, Inbox]]:
    """The link, and the scheduler's end of it."""
    ports = make_ports()
    inbox = Inbox(ports.scheduler, SCHEDULER_DECODER)
    link = SocketLink(ports)
    try:
        yield link, inbox
    finally:
        link.close()
        inbox.close()
        remove_ports(ports)


async def test_what_is_sent_in_one_turn_arrives_together_and_in_order() -> None:
    with scheduler_link() as (link, inbox):
        requests = [AbortReq(rid=str(index)) for index in range(40)]
        for request in requests:
            link.send(request)
        assert not inbox.wait(0)
        await asyncio.sleep(0)
        assert inbox.wait(5000)
        assert inbox.drain(1) == requests[:1]
        assert inbox.drain() == requests[1:]
        link.send(ShutdownReq())
        link.close()  # sends what the loop did not come to
        assert inbox.wait(5000)
        assert inbox.drain() == [ShutdownReq()]


async def test_what_fills_a_step_does_not_wait_for_the_turns_end() -> None:
    with scheduler_link() as (link, inbox):
        ids, params = [70_000] * 1024, SamplingParams(max_new_tokens=1)
        requests = [
            TokenizedGenerateReq(rid=str(index), input_ids=id_array(ids), sampling_params=params) for index in range(20)
        ]
        for request in requests:
            link.send(request)
        full = MOST_SENT_LATE // len(encode(requests[0])) + 1
        assert full == 8, "8,192 tokens"
        num_early = len(requests) // full * full
        early: list[io_struct.Message] = []
        while len(early) < num_early and inbox.wait(5000):  # the event loop has not had a turn
            early += inbox.drain()
        assert early == requests[:num_early]
        await asyncio.sleep(0)
        assert inbox.wait(5000)
        assert early + inbox.drain() == requests


def test_a_flood_of_prompts_reaches_the_scheduler_in_parts() -> None:
    """Taking in a prompt costs time, during which the tokens of running requests wait."""
    ids, params = [70] * 50_000, SamplingParams(max_new_tokens=1)
    requests = [
        TokenizedGenerateReq(rid=str(index), input_ids=id_array(ids), sampling_params=params) for index in range(200)
    ]
    with scheduler_link() as (link, messages):
        link._outbox.send(link._scheduler, *map(encode, requests))
        messages.wait()
        inbox = SocketInbox(messages, Watchdog(0, print), FreeMemoryWatch())
        arrived: list[io_struct.Message] = []
        while step := inbox.drain(False):
            assert 200_000 * len(step) <= MAX_STEP_BYTES + 200_000
            arrived += step
    assert arrived == requests


async def test_who_comes_after_samples_of_long_prompts_waits_little() -> None:
    """n=128 for two prompts: with its prompt in each message they would be 16 MiB, four steps' worth."""
    params = SamplingParams(max_new_tokens=1, logit_bias={7: 1.0})
    prompts = [id_array([70 + number] * 16_000) for number in range(2)]
    samples = [
        TokenizedGenerateReq(rid=f"{number}.{index}", input_ids=prompt, sampling_params=params, body=1)
        for number, prompt in enumerate(prompts)
        for index in range(128)
    ]
    others = [
        TokenizedGenerateReq(rid=f"other {body}", input_ids=prompts[1], sampling_params=params, body=body)
        for body in (2, 0)
    ]
    with scheduler_link() as (link, messages):
        sent: list[bytes] = []
        send = link._outbox.send
        link._outbox.send = lambda to, *parts: sent.extend(parts)  # type: ignore[method-assign]
        for message in (*samples, *others):
            link.send(message)
        while len(sent) < len(samples) + len(others):
            await asyncio.sleep(0)
        send(link._scheduler, *sent)  # all arrives together
        messages.wait()
        step = SocketInbox(messages, Watchdog(0, print), FreeMemoryWatch()).drain(False)
    assert [message.rid for message in step] == [message.rid for message in (*samples, *others)]
    with_prompt = [message.rid for message in step if message.input_ids]
    assert with_prompt == ["0.0", "1.0", "other 2", "other 0"]
    assert all(message.same_prompt != bool(message.input_ids) for message in step)
    with_bias = [message.rid for message in step if message.sampling_params.logit_bias]
    assert with_bias == ["0.0", "other 2", "other 0"], "both prompts of the body have the same"
    assert all(message.same_bias != bool(message.sampling_params.logit_bias) for message in step)


@pytest.mark.parametrize(("raised", "status"), [(RequestError(418, "no"), 418), (ClientDisconnect(), 499), (None, 200)])
async def test_a_direct_route_answers_as_the_app_does(raised: Exception | None, status: int) -> None:
    sent: list[Message] = []

    async def handler(request: Request) -> Response:
        if raised is not None:
            raise raised
        return Response(await request.body())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "the app", "path": scope["path"]})

    async def receive() -> Message:
        return {"type": "http.request", "body": b"body"}

    async def send(message: Message) -> None:
        sent.append(message)

    expected: list[str] = []
    direct = DirectRoutes(app, {"/generate": handler}, lambda: expected.append("a request"))
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    await direct(scope, receive, send)
    assert sent[0]["status"] == status
    if raised is None:
        assert sent[1]["body"] == b"body"
    sent.clear()
    await direct({**scope, "method": "GET"}, receive, send)
    await direct({**scope, "path": "/other"}, receive, send)
    assert sent == [{"type": "the app", "path": path} for path in ("/generate", "/other")]
    assert expected == ["a request"]


def test_only_generation_has_direct_routes() -> None:
    from fastapi import APIRouter

    router = APIRouter()

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        return Response()

    @router.post("/flush_cache")
    async def flush(request: Request) -> Response:
        return Response()

    assert handlers_of(router.routes) == {"/generate": generate}
