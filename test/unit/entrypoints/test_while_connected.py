"""Work for a client that leaves ends; work for one that stays does not notice that somebody looked."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator

import orjson
import pytest
from frontend_bench import Bench, demo_config
from starlette.requests import ClientDisconnect, Request

from fenceline.entrypoints.body_parser import BodyParser
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.generate_api import AnswerWriter, stream_answers
from fenceline.entrypoints.json_body import PIECE_BYTES
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


@pytest.mark.parametrize(("num_tokens", "num_top", "beside"), [(1, 20, False), (100, 128, True), (5000, 0, True)])
async def test_many_logprobs_are_written_beside_the_loop(num_tokens: int, num_top: int, beside: bool) -> None:
    logprobs = TokenLogprobs(
        token_ids=[1] * num_tokens,
        logprobs=[-1.0] * num_tokens,
        top_logprobs=TokenPairs.of([[(-1.0, 1)] * num_top] * num_tokens),
    )
    chunk = GenerateChunk(
        rid="r", text="", output_ids=[], prompt_tokens=1, completion_tokens=0, cached_tokens=0, e2e_latency=0.0,
        input_logprobs=logprobs,
    )  # fmt: skip
    threads = await asyncio.gather(*(written(chunk, threading.get_ident) for _ in range(20)))
    assert len(set(threads)) == 1, "each thread that works in Python makes the loop wait for it"
    assert (threads[0] != threading.get_ident()) == beside


@pytest.mark.parametrize("incremental", [False, True])
async def test_an_event_that_repeats_many_logprobs_copies_none_of_them(incremental: bool) -> None:
    """The prompt's come with the first event and are written beside the loop; each later event repeats them."""
    num_positions, num_top = 5000, 20
    config = demo_config()
    inp = GenerateInput(input_ids=[1], return_logprob=True, top_logprobs_num=num_top)
    writer = AnswerWriter(inp, config, ServedWeights("demo", "default"), None, None, None, thinking_end=None)

    async def chunks() -> AsyncIterator[tuple[int, GenerateChunk]]:
        for index in range(4):
            num_input = 0 if index else num_positions
            yield 0, GenerateChunk(
                rid="r", text="a", output_ids=[5], prompt_tokens=1, completion_tokens=index + 1, cached_tokens=0,
                e2e_latency=0.0, output_logprobs=logprobs_of(1), input_logprobs=logprobs_of(num_input, num_top),
            )  # fmt: skip

    events = [
        parts
        async for parts in stream_answers(chunks(), [writer], incremental, list)  # type: ignore[arg-type]
    ]
    known: set[int] = set()  # of the parts, by id; all of them are alive
    num_copied = []
    for parts in events:
        num_copied.append(sum(len(part) for part in parts if id(part) not in known))
        known.update(map(id, parts))
        info = orjson.loads(b"".join(parts))["meta_info"]
        assert info["input_token_logprobs"] == [[-1.25, 1, None]] * num_positions
        assert info["input_top_logprobs"] == [[[-1.25, 1, None]] * num_top] * num_positions
    assert num_copied[0] > 1 << 20
    assert max(num_copied[1:]) <= 3 * PIECE_BYTES, "the ends that may still grow"


def test_writing_many_logprobs_takes_few_calls_of_python() -> None:
    """Each call costs more than the logprob, and while a thread makes them the event loop waits for it."""
    config = demo_config()
    inp = GenerateInput(input_ids=[1], return_logprob=True, top_logprobs_num=128)
    writer = AnswerWriter(inp, config, ServedWeights("demo", "default"), None, None, None, thinking_end=None)
    chunk = GenerateChunk(
        rid="r", text="a", output_ids=[5], prompt_tokens=1, completion_tokens=1, cached_tokens=0, e2e_latency=0.0,
        output_logprobs=logprobs_of(1), input_logprobs=logprobs_of(100, 128),
    )  # fmt: skip
    num_calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        writer.so_far(chunk)
    finally:
        sys.setprofile(None)
    assert num_calls < 1000, "of 12,900 logprobs, at 101 positions"


def logprobs_of(num: int, num_top: int = 0) -> TokenLogprobs:
    return TokenLogprobs(
        token_ids=[1] * num, logprobs=[-1.25] * num, top_logprobs=TokenPairs.of([[(-1.25, 1)] * num_top] * num)
    )
