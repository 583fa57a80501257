"""Large bodies are parsed by another process, with the same outcome; what none may contain is counted before."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from tiny_tokenizers import byte_level

from fenceline.config.engine_config import resolve
from fenceline.config.request_limits import MAX_TEXT_CHARS
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints import body_parser
from fenceline.entrypoints.body_parser import BodyParser, count_values
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.generate_body import GenerateBody, parse_generate
from fenceline.entrypoints.openai import parsing
from fenceline.entrypoints.openai.chat_template import ChatTemplate
from fenceline.entrypoints.openai.protocol import ChatBody, CompletionBody
from fenceline.entrypoints.openai.serving_chat import conversation_text
from fenceline.frontend.request_types import RequestError
from fenceline.frontend.scheduler_link import SchedulerLink
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc.io_struct import SchedulerReady

CONTEXT = 4096
Parse = Callable[[bytes, UnknownFields], object]
parse_chat, parse_completion = (partial(parsing.parse_body, ChatBody), partial(parsing.parse_body, CompletionBody))


@pytest.fixture(autouse=True)
def as_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper has the tests' priority: at its own it gets no CPU time beside processes that keep the cores busy."""
    monkeypatch.setattr(body_parser, "_NICENESS", 0)


@pytest.fixture
def parser() -> Iterator[BodyParser]:
    parser = BodyParser(CONTEXT, UnknownFields(strict=False))
    yield parser
    if parser._helper is not None:
        parser._helper[0].kill()
        parser._helper[0].join()


@pytest.fixture(scope="module")
def idle_helpers() -> Iterator[list[Any]]:
    """Helpers that earlier tests have started and left idle."""
    helpers: list[Any] = []
    yield helpers
    for process, _ in helpers:
        process.kill()
        process.join()


@pytest.fixture
def warm_parser(idle_helpers: list[Any]) -> Iterator[BodyParser]:
    """A parser whose helper an earlier test has started, since a start takes half a second of CPU time."""
    parser = BodyParser(CONTEXT, UnknownFields(strict=False))
    parser._helper = idle_helpers.pop() if idle_helpers else None
    yield parser
    if parser._helper is not None:
        idle_helpers.append(parser._helper)


def request_of(data: bytes) -> Request:
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, object]:
        if not messages:
            await asyncio.Event().wait()  # nobody leaves
        return messages.pop()

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(st.sampled_from('a,"\\[{:é\n'), max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('ab,"\\', max_size=3), inner, max_size=4),
)


@given(JSON)
def test_values_are_counted_as_a_parser_would(value: object) -> None:
    data = orjson.dumps(value)
    assert count_values(data, 10**9) == count(value) <= body_parser._at_most_values(data)


def count(value: object) -> int:
    """Strings, commas and opening brackets."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 1 + max(len(value) - 1, 0) + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + max(len(value) - 1, 0) + len(value) + sum(map(count, value.values()))
    return 0


GENERATE = {"input_ids": [[7] * 200_000, [5]], "sampling_params": {"stop": ["\n"]}, "rid": "r", "colour": 3}
LONG = "ein langer Text, 漢字 🙂 " * 200_000
CHAT = {"messages": [{"role": "user", "content": LONG}, {"role": "user", "content": "short"}], "n": 2}


class Nowhere:
    """A parser that must not be used."""

    def __call__(self, *arguments: object, **named: object) -> object:
        raise AssertionError("parsed on the event loop")


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process cannot parse JSON; the helper can."""
    monkeypatch.setattr(msgspec.json, "decode", Nowhere())
    monkeypatch.setattr(parsing.orjson, "loads", Nowhere())


# More than Python 3.11 lets C code recurse. Since 3.12 that has a limit of its own, of 10,000, and orjson's is 1,024.
DEEP, TOO_DEEP = (900, "nested too deeply") if sys.version_info < (3, 12) else (2_000, "depth limit exceeded")


@pytest.mark.parametrize(("parse", "value"), [(parse_generate, GENERATE), (parse_chat, CHAT)])
async def test_a_large_body_comes_out_the_same(parser: BodyParser, parse: Parse, value: object) -> None:
    data = orjson.dumps(value)
    expected = parse(data, UnknownFields(strict=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(msgspec.json, "decode", Nowhere())
        patch.setattr(parsing.orjson, "loads", Nowhere())
        assert await parser.parse(request_of(data), parse) == expected


CHAT_LISTS = {"messages": [{"role": "user", "content": "a"}], "colour": [[]] * 100_000}


@pytest.mark.parametrize(("parse", "body"), [(parse_generate, GENERATE), (parse_chat, CHAT_LISTS)])
async def test_unknown_fields_of_a_large_body_are_noted_here(parser: BodyParser, parse: Parse, body: object) -> None:
    parser.unknown = UnknownFields(strict=True)
    with pytest.raises(RequestError, match="colour"):
        await parser.parse(request_of(orjson.dumps(body)), parse)


LISTS = b'{"text": "a", "x": [' + b"[]," * 500_000 + b"1]}"


@pytest.mark.parametrize(("parse", "data", "words"), [
    (parse_generate, b'{"input_ids": [' + b"1," * 2_000_000 + b"1]}", "more than 1048576 JSON values"),
    (parse_generate, b'{"text": [' + b'"",' * 2_000_000 + b'""]}', "more than 1048576 JSON values"),
    (parse_chat, LISTS * 3, "more than 1048576 JSON values"),
    (parse_generate, b'{"text": [' + b'"",' * 300_000 + b'""]}', "at most 4096 are allowed"),
    (parse_generate, b'{"text": "a", "token_ids_logprob": [' + b"1," * 300_000 + b"1]}", "at most 4096 are allowed"),
    (parse_generate, b'{"text": "a", "sampling_params": {"stop_token_ids": [' + b"1," * 300_000 + b"1]}}",
     "at most 1024 ids"),
    (parse_chat, b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {'
     + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}}", "at most 1024 entries"),
    (parse_generate, b'{"text": "a"' + b"".join(b',"f%d":1' % i for i in range(100_000)) + b"}", "at most 256"),
    (parse_completion, b'{"prompt": "a"' + b"".join(b',"f%d":1' % i for i in range(100_000)) + b"}", "at most 256"),
    (parse_chat, b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ['
     + b"1," * 300_000 + b"1]}}", "more than 64 KiB"),
    (parse_chat, b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": '
     b'{"name": "f", "arguments": "[' + b"1," * 300_000 + b'1]"}}]}]}', "at most 65536 JSON values"),
    (parse_chat, b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": {"a": ['
     + b'{"a":"b"},' * 200_000 + b"{}]}}", "more than 262144 values"),
    (parse_chat, b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": {"a": [{"a":'
     + b"[" * DEEP + b"]" * DEEP + b"}" + b',{"a":"b"}' * 20_000 + b"]}}", TOO_DEEP),
    (parse_generate, b'{"input_ids": [' + b"[1]," * 200_000 + b"[1]]}", "at most 4096 are allowed"),
    (parse_generate, b'{"text": "a", "sampling_params": [' + b"{}," * 200_000 + b"{}]}", "at most 4096 are allowed"),
    (parse_completion, b'{"prompt": [' + b'"a",' * 200_000 + b'"a"]}', "at most 4096 are allowed"),
    (parse_chat, b'{"messages": [' + b'{"role":"user","content":"a"},' * 100_000 + b"{}]}", "at most 4096 of each"),
    (parse_chat, b'{"messages": [{"role": "user", "content": [' + b'{"type":"text","text":"a"},' * 100_000 + b"1]}]}",
     "at most 4096 of each"),
    (parse_generate, b'{"text": ' + b" " * 3_000_000, "not valid JSON"),
    (parse_generate, b'{"text": "' + b"a" * 17_000_000 + b'"}', "at most 16777216 are allowed in one"),
    (parse_chat, b'{"messages": [{"role": "user", "content": "' + b"a" * 17_000_000 + b'"}]}',
     "at most 16777216 are allowed in one"),
])  # fmt: skip
@pytest.mark.usefixtures("deaf")
async def test_hostile_bodies_are_refused_without_being_parsed_here(
    warm_parser: BodyParser, parse: Parse, data: bytes, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        await warm_parser.parse(request_of(data), parse)
    assert caught.value.status == 400


@pytest.mark.usefixtures("deaf")
async def test_what_is_counted_as_too_much_never_reaches_a_parser() -> None:
    for data in (LISTS * 3, b'"' * 5_000_000):
        result = body_parser._parsed(Nowhere(), data, 1 << 20)
        assert isinstance(result, RequestError)


@pytest.mark.parametrize("begin", ["data:image/png;base64,iVBOR", "iVBORw0KGgoA", "/9j/4AAQ", "UklGRkA", "R0lGODlh"])
async def test_large_images_may_be_longer_than_texts(warm_parser: BodyParser, begin: str) -> None:
    """Of all routes: /v1/messages and /generate have base64 alone."""
    url = begin + "A" * MAX_TEXT_CHARS
    body = await warm_parser.parse(request_of(orjson.dumps({"text": "a", "image_data": url})), parse_generate)
    assert body.image_data == url


def test_lists_of_ids_come_back_in_pieces_between_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, huge = list(range(-5, 100_000)), [2**70] * 2000
    value = {"ids": [ids, ids[:5], huge], "texts": ["text"] * 50_000, "long": LONG, "bools": [True] * 3000}
    pickled, apart = body_parser._pickled(value)
    assert len(apart) == 2  # the list and the long text
    reads: list[int] = []
    read = body_parser._Frames.read

    def counted(self: body_parser._Frames, num_bytes: int = -1) -> bytes:
        reads.append(num_bytes)
        return read(self, num_bytes)

    monkeypatch.setattr(body_parser._Frames, "read", counted)
    assert body_parser._Unpickler(pickled, apart).load() == value
    assert max(reads) < 70_000 < len(pickled)
    assert sum(reads) >= len(pickled)


async def test_a_defect_in_a_parser_leaves_the_helper_alive(parser: BodyParser) -> None:
    data = b'"' + b"a" * 3_000_000 + b'"'
    with pytest.raises(RequestError, match="TypeError") as caught:
        await parser.parse(request_of(data), int)  # type: ignore[arg-type]  # takes no unknown fields
    assert caught.value.status == 500
    assert parser._helper is not None
    process = parser._helper[0]
    assert isinstance(await parser.parse(request_of(orjson.dumps(GENERATE)), parse_generate), GenerateBody)
    assert parser._helper[0] is process


async def test_a_refused_body_is_let_go_of_without_the_collector(parser: BodyParser) -> None:
    data = b'{"input_ids": [' + b"1," * 2_000_000 + b"1]}"
    parts: list[dict[str, object]] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, object]:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    async def refused() -> weakref.ref[Request]:
        request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
        try:
            await parser.parse(request, parse_generate)
        except RequestError as error:
            assert error.status == 400
        return weakref.ref(request)

    gc.collect()
    gc.disable()
    try:
        request = await refused()
        # Until the task that looked out for a disconnection and the executor's thread have let go of it.
        for _ in range(100_000):
            if request() is None:
                break
            await asyncio.sleep(0)
        kept = request() is not None
    finally:
        gc.enable()
    assert not kept


async def test_bodies_of_clients_that_left_are_let_go_of(parser: BodyParser, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release, parsed = threading.Event(), threading.Event(), []

    def parse_apart(parse: object, parts: deque[bytes], started: object) -> tuple[object, list[object]]:
        parsed.append(sum(map(len, parts)))
        begun.set()
        assert release.wait(60)
        return "parsed", []

    class Body(bytearray):
        """One that can be watched."""

    monkeypatch.setattr(parser, "_parse_apart", parse_apart)
    bodies = [Body(3_000_000 + number) for number in range(4)]
    kept = [weakref.ref(body) for body in bodies]

    async def parse(body: Body) -> object:
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        del body

        async def receive() -> dict[str, object]:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        return await parser.parse(Request({"type": "http", "headers": []}, receive), parse_generate)

    asked = [asyncio.ensure_future(parse(bodies.pop(0))) for _ in range(4)]
    while not begun.is_set():
        await asyncio.sleep(0)
    for task in asked[:3]:  # the first too, whose body the helper has: it goes on with it
        task.cancel()
    await asyncio.wait(asked[:3])
    del task
    last = asked.pop()
    asked.clear()
    gc.collect()
    assert [body() is not None for body in kept] == [True, False, False, True]
    release.set()
    assert await last == "parsed"
    assert parsed == [3_000_000, 3_000_003]


async def test_each_turn_of_the_loop_parses_one_body_that_is_not_tiny(parser: BodyParser) -> None:
    turns: list[int] = []
    turn = 0

    def note(data: bytes, unknown: UnknownFields) -> None:
        turns.append(turn)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count_turns())
    await asyncio.gather(*(parser.parse(request_of(b'"' + b"a" * 9000 + b'"'), note) for _ in range(20)))
    assert len(turns) == len(set(turns)) == 20
    turns.clear()
    await asyncio.gather(*(parser.parse(request_of(b"{}"), note) for _ in range(20)))
    assert len(set(turns)) == 1
    turns.clear()
    begin = turn
    await parser.parse(request_of(b'"' + b"a" * 9000 + b'"'), note)
    assert turns == [begin], "one that is alone has waited"
    counting.cancel()


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize(
    "data", [b'{"text": "a", "x": [' + b"1," * 40_000 + b"1]}", b'{"text": "' + b"a" * 600_000 + b'"}']
)
async def test_what_takes_more_than_milliseconds_is_not_parsed_here(parser: BodyParser, data: bytes) -> None:
    body = await parser.parse(request_of(data), parse_generate)
    assert isinstance(body, GenerateBody)
    assert parser._helper is not None


async def test_small_bodies_start_no_process_and_are_not_taken_apart(
    parser: BodyParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It copies the body, which would take ten milliseconds of the event loop.
    monkeypatch.setattr(body_parser, "count_values", Nowhere())
    data = orjson.dumps({"text": "the fox, " * 20_000})
    body = await parser.parse(request_of(data), parse_generate)
    assert isinstance(body, GenerateBody)
    assert parser._helper is None


async def test_a_helper_that_is_stopped_is_replaced(parser: BodyParser, monkeypatch: pytest.MonkeyPatch) -> None:
    data = orjson.dumps(GENERATE)
    await parser.parse(request_of(data), parse_generate)
    assert parser._helper is not None
    process = parser._helper[0]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    connection, turned = parser._connection, threading.Event()

    def late() -> Connection:
        """A thread that is slow to begin: what passes until then is not the helper's fault."""
        assert turned.wait(60)
        return connection()

    def kill_at_once() -> None:
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    with monkeypatch.context() as patch:
        patch.setattr(body_parser, "_LOOK_INTERVAL_S", 0.0)
        patch.setattr(parser, "_connection", late)
        patch.setattr(process, "kill", kill_at_once)
        work = asyncio.ensure_future(parser.parse(request_of(data), parse_generate))
        for _ in range(3 * body_parser._MAX_LOOKS):
            await asyncio.sleep(0)
        turned.set()
        with pytest.raises(RequestError) as caught:
            await work
    assert caught.value.status == 503
    process.join()
    assert isinstance(await parser.parse(request_of(data), parse_generate), GenerateBody)


async def test_a_large_body_is_never_joined_here(parser: BodyParser) -> None:
    """It goes to the helper part by part."""
    data = b'{"text": "' + b"a" * 3_000_000 + b'"}'
    parts = [data[start : start + 100_000] for start in range(0, len(data), 100_000)]
    sent: list[int] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    connection = parser._connection()
    send_bytes = connection.send_bytes

    def note(part: bytes) -> None:
        sent.append(len(part))
        send_bytes(part)

    parser._helper = parser._helper[0], cast(Connection, SimpleNamespace(  # type: ignore[index]
        send=connection.send, send_bytes=note, recv=connection.recv, recv_bytes=connection.recv_bytes
    ))  # fmt: skip
    body = await parser.parse(Request({"type": "http", "headers": []}, receive), parse_generate)
    assert body.text == "a" * 3_000_000
    assert sum(sent) == len(data) and max(sent) == 100_000


async def test_a_helper_that_died_is_replaced(parser: BodyParser) -> None:
    data = orjson.dumps(GENERATE)
    await parser.parse(request_of(data), parse_generate)
    assert parser._helper is not None
    parser._helper[0].kill()
    parser._helper[0].join()
    assert isinstance(await parser.parse(request_of(data), parse_generate), GenerateBody)


async def test_a_long_conversation_is_rendered_beside_the_loop() -> None:
    rendered: list[int] = []

    class Template:
        def render(self, messages: list[object], **named: object) -> str:
            rendered.append(threading.get_ident())
            return "text"

    manager = TokenizerManager(
        resolve(ServerArgs(model_path="demo", device="cpu")),
        byte_level(),
        cast(SchedulerLink, SimpleNamespace(send=None)),
    )
    limits = SchedulerReady(
        max_total_num_tokens=9999, max_running_requests=2, max_req_input_len=5000, context_length=5001, memory_bytes={}
    )
    manager.handle(limits)

    async def text_of(content: str, num_messages: int) -> str:
        body = {"messages": [{"role": "user", "content": content}] * num_messages}
        parsed = parse_chat(orjson.dumps(body), UnknownFields(strict=False))
        return await conversation_text(manager, cast(ChatTemplate, Template()), parsed)

    here = threading.get_ident()
    for content, num_messages, beside in [("a", 1, False), ("a", 100, True), ("a" * 40_000, 1, True)]:
        assert await text_of(content, num_messages) == "text"
        assert (rendered.pop() != here) == beside
    with pytest.raises(RequestError, match="at least 5077 tokens"):
        await text_of("a" * 1000, 66)
    assert not rendered
