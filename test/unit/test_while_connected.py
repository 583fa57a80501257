"""Work for a client that leaves ends; work for one that stays does not notice that somebody looked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import orjson
import pytest
from frontend_bench import Bench, demo_config
from starlette.requests import ClientDisconnect, Request

from fenceline.entrypoints.body_parser import BodyParser
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.generate_api import AnswerWriter, stream_answers
from fenceline.entrypoints.middleware import BODY_BYTES
from fenceline.entrypoints.native_api import NativeApi
from fenceline.entrypoints.sse import while_connected, written
from fenceline.frontend.request_types import GenerateChunk, GenerateInput, ServedWeights
from fenceline.ipc.io_struct import CancelFlushReq, FlushCacheReq, TokenLogprobs, TokenPairs


async def make_request(num_bytes: int) -> tuple[Request, asyncio.Event]:
    """A request whose body has been read, and the event that its client leaves."""
    left = asyncio.Event()
    messages = [{"type": "http.request", "body": b" " * num_bytes, "more_body": False}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], BODY_BYTES: num_bytes}
    request = Request(scope, receive)
    await request.body()
    return request, left


@pytest.mark.parametrize(("num_bytes", "is_long"), [(100_000, False), (10, True)])
async def test_work_ends_when_the_client_leaves(num_bytes: int, is_long: bool) -> None:
    request, left = await make_request(num_bytes)
    ended = asyncio.Event()

    async def work() -> None:
        left.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ClientDisconnect):
        await asyncio.wait_for(while_connected(request, work(), is_long), 60)
    assert ended.is_set()


@pytest.mark.parametrize("num_bytes", [10, 100_000])
async def test_work_that_ends_first_gives_its_result_or_error(num_bytes: int) -> None:
    async def work(error: Exception | None) -> str:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return "done"

    request, _ = await make_request(num_bytes)
    assert await while_connected(request, work(None)) == "done"
    with pytest.raises(KeyError):
        await while_connected(request, work(KeyError("x")))


async def test_nothing_is_flushed_for_a_client_that_left() -> None:
    bench = Bench()
    api = NativeApi(bench.manager, demo_config(), BodyParser(64, UnknownFields(strict=False)))
    request, left = await make_request(0)
    flushing = asyncio.ensure_future(api.flush_cache(request, timeout=3000))
    async with asyncio.timeout(30):
        while not bench.link.sent:
            await asyncio.sleep(0)
    left.set()
    with pytest.raises(ClientDisconnect):
        await flushing
    flush, cancel = bench.link.sent
    assert isinstance(flush, FlushCacheReq) and cancel == CancelFlushReq(id=flush.id)


async def test_who_is_cancelled_himself_is_cancelled() -> None:
    request, _ = await make_request(100_000)
    waiting = asyncio.ensure_future(while_connected(request, asyncio.Event().wait()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(
    ("num_tokens", "num_top", "repeats", "beside"),
    [(1, 20, False, False), (100, 128, False, True), (5000, 0, False, True), (1, 20, True, True)],
)
async def test_many_logprobs_are_written_beside_the_loop(
    num_tokens: int, num_top: int, repeats: bool, beside: bool
) -> None:
    logprobs = TokenLogprobs(
        token_ids=[1] * num_tokens,
        logprobs=[-1.0] * num_tokens,
        top_logprobs=TokenPairs.of([[(-1.0, 1)] * num_top] * num_tokens),
    )
    chunk = GenerateChunk(
        rid="r", text="", output_ids=[], prompt_tokens=1, completion_tokens=0, cached_tokens=0, e2e_latency=0.0,
        input_logprobs=logprobs,
    )  # fmt: skip
    num_bytes = 1 << 20 if repeats else 0
    threads = await asyncio.gather(*(written(chunk, threading.get_ident, num_bytes) for _ in range(20)))
    assert len(set(threads)) == 1, "each thread that works in Python makes the loop wait for it"
    assert (threads[0] != threading.get_ident()) == beside


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("num_positions", [1, 20_000])
async def test_an_event_that_repeats_many_logprobs_is_made_beside_the_loop(
    num_positions: int, incremental: bool
) -> None:
    """The prompt's come with the first event, and each later one repeats them: none is copied on the loop."""
    config = demo_config()
    inp = GenerateInput(input_ids=[1], return_logprob=True)
    writer = AnswerWriter(inp, config, ServedWeights("demo", "default"), None, None, None, thinking_end=None)

    async def chunks() -> AsyncIterator[tuple[int, GenerateChunk]]:
        for index in range(4):
            num_input = 0 if index else num_positions
            yield 0, GenerateChunk(
                rid="r", text="a", output_ids=[5], prompt_tokens=1, completion_tokens=index + 1, cached_tokens=0,
                e2e_latency=0.0, output_logprobs=logprobs_of(1), input_logprobs=logprobs_of(num_input),
            )  # fmt: skip

    threads = []

    def framed(parts: list[bytes]) -> bytes:
        threads.append(threading.get_ident())
        return b"".join(parts)

    events = [
        orjson.loads(event)
        async for event in stream_answers(chunks(), [writer], incremental, framed)  # type: ignore[arg-type]
    ]
    inputs = [len(event["meta_info"]["input_token_logprobs"]) for event in events]
    assert inputs == [num_positions] * 4
    is_loop = [thread == threading.get_ident() for thread in threads]
    assert is_loop == [num_positions == 1] * 4


def logprobs_of(num: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[1] * num, logprobs=[-1.25] * num, top_logprobs=TokenPairs.of([[]] * num))
