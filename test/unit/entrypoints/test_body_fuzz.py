"""Whatever bytes a client sends to whatever endpoint: an answer below 500, in the server's form, and no traceback."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec
import orjson
import pytest
import uvicorn
from app_requests import routes_of
from fake_scheduler import FakeScheduler
from fake_transport import Wire
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Scope
from uvicorn.server import ServerState

from fenceline.config import ConfigError, model_files
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.http_protocol import HttpProtocol
from fenceline.entrypoints.http_server import create_app
from fenceline.entrypoints.openai.protocol import ChatBody, ReadingBody
from fenceline.entrypoints.openapi import BODIES
from fenceline.frontend.tokenizer import load_tokenizer
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc import io_struct as io

ENDPOINTS = (
    "/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/abort_request",
    "/pause_generation", "/start_profile", "/flush_cache", "/continue_generation", "/stop_profile", "/flight_recorder",
    "/clear_hicache_storage_backend",
)  # fmt: skip
RUNNER = asyncio.Runner()  # as in a server, all requests share an event loop
# The first grammar waits for a process that imports torch: tens of seconds where that is not in the system's cache, or
# the machine is busy.
LIMIT_S = 200.0


# Looks at everything, as those of models with tools do.
TEMPLATE = """{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.content }}{% for call in m.tool_calls or [] %}
{{ call.function.name }}{{ call.function.arguments | tojson }}{{ call.function.arguments }}{% endfor %}{% endfor %}"""


STATE = FakeScheduler(()).state()


class EchoLink:
    """Stands in for the other processes: every request ends at once, every control message succeeds."""

    manager: TokenizerManager

    def send(self, message: io.Message) -> None:
        if isinstance(message, io.ShutdownReq):
            return
        asyncio.get_running_loop().call_soon(self._answer, message)

    def _answer(self, message: io.Message) -> None:
        # What crosses the processes' border must be a message, whatever the client put into it.
        message = io.decode(io.encode(message))
        if isinstance(message, io.TokenizedGenerateReq):
            token = io.TokenOut(
                rid=message.rid, output_ids=[], prompt_tokens=len(message.input_ids), completion_tokens=0,
                cached_tokens=0, finish_reason=io.FinishReason(type="length", length=0),
                output_logprobs=io.TokenLogprobs(token_ids=[], logprobs=[], top_logprobs=io.TokenPairs()),
            )  # fmt: skip
            self.manager.handle(io.BatchStrOut(outs=[io.StrOut(token=token, text="")]))
        elif hasattr(message, "id"):
            state = STATE if isinstance(message, io.GetInternalStateReq) else None
            self.manager.handle(io.ControlReply(id=message.id, success=True, payload=b"{}", state=state))

    def wake(self) -> None:
        pass

    async def receive(self) -> list[io.Message]:
        raise AssertionError("nobody listens")

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ASGIApp]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    config = resolve(
        ServerArgs(
            model_path="demo", device="cpu", max_total_tokens=4096, chat_template=str(template), enable_metrics=True
        )
    )
    link = EchoLink()
    link.manager = manager = TokenizerManager(config, load_tokenizer(config.tokenizer_path), link)
    manager.handle(
        io.SchedulerReady(
            max_total_num_tokens=4096, max_running_requests=4, max_req_input_len=200, context_length=256,
            memory_bytes={},
        )
    )  # fmt: skip
    yield create_app(manager, config)
    manager.shutdown()
    RUNNER.close()


def post(app: ASGIApp, path: str, body: bytes, query: bytes = b"") -> tuple[int, bytes]:
    """The answer's status and body."""
    return RUNNER.run(_post(app, path, body, query))


async def _post(app: ASGIApp, path: str, body: bytes, query: bytes) -> tuple[int, bytes]:
    sent: list[Message] = []
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": query,
        "headers": [(b"content-type", b"application/json")], "root_path": "", "scheme": "http",
        "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "http_version": "1.1",
    }  # fmt: skip
    async with asyncio.timeout(LIMIT_S) as limit:
        await app(scope, receive, send)
    # The middleware takes a cancelled request for the server's end and answers it, so the time-out raises nothing.
    assert not limit.expired(), f"{path} took more than {LIMIT_S:g} s: {body[:200]!r}"
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def check(app: ASGIApp, path: str, body: bytes, query: bytes = b"") -> tuple[int, str]:
    status, answer = post(app, path, body, query)
    assert status < 500, (path, body[:200], answer[:500])
    message = _check_error(answer) if status >= 400 else ""
    for line in answer.split(b"\n\n"):
        assert b"internal error" not in line
    return status, message


def _check_error(answer: bytes) -> str:
    """The message of an error, which must be fit for a client."""
    message: str = orjson.loads(answer)["error"]["message"]
    assert message
    assert "\n" not in message, message
    assert len(message) < 2000, len(message)
    for word in ("set_int_max_str_digits", "Traceback", "pydantic", "msgspec", "maximum recursion"):
        assert word not in message, message
    return message


def nested(depth: int, kind: str, inner: str = "1") -> str:
    if kind == "list":
        return "[" * depth + inner + "]" * depth
    return '{"a":' * depth + inner + "}" * depth


NASTY = {
    **{
        f"{kind}{depth}": nested(depth, kind)
        for kind in ("list", "object")
        for depth in (100, 900, 1000, 5000, 100_000)
    },
    "digits": "9" * 5000,
    "negative digits": "-" + "9" * 5000,
    "zeros": "1" + "0" * 5000,
    "fraction": "0." + "1" * 5000,
    "exponent": "1e5000",
    "tiny": "1e-5000",
    "2**63": str(2**63),
    "-2**63-1": str(-(2**63) - 1),
    "2**64": str(2**64),
    "lone surrogate": '"\\ud800"',
    "surrogates": '"\\udfff\\ud800"',
    "null byte": '"a\\u0000b"',
    "lines": '"a\\nb\\r\\u2028\\u001b[31m"',
    "digits as text": '"' + "9" * 5000 + '"',
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "deep text": json.dumps(nested(1000, "object")),
    "deeper text": json.dumps(nested(100_000, "list")),
    "surrogate in text": json.dumps('{"a": "\\ud800"}'),
    "digits in text": json.dumps('{"a": ' + "9" * 5000 + "}"),
    "long text": '"' + "\\u00e9" * 5000 + '"',
    "raw bytes": "\udcff\udcfe",
}  # fmt: skip
FRAMES = {
    "/generate": [
        '{"text": %s}', '{"input_ids": %s}', '{"input_ids": [%s]}', '{"input_ids": [[%s]]}',
        '{"text": "a", "rid": %s}', '{"text": "a", "stranger": %s}', '{"text": "a", "json_schema": %s}',
        '{"text": "a", "session_params": %s}', '{"text": "a", "priority": %s}', '{"text": "a", "cache_salt": %s}',
        '{"text": "a", "sampling_params": %s}', '{"text": "a", "top_logprobs_num": %s, "return_logprob": true}',
        '{"text": "a", "return_logprob": true, "token_ids_logprob": %s}',
        '{"text": "a", "return_logprob": true, "logprob_start_len": %s}',
        *('{"text": "a", "sampling_params": {"' + name + '": %s}}' for name in (
            "temperature", "max_new_tokens", "seed", "stop", "stop_token_ids", "logit_bias", "n", "top_k", "regex",
            "custom_params", "stranger")),
        '{"text": "a", "sampling_params": {"logit_bias": {"5": %s}}}', '{"text": "a", "stream": true, "rid": %s}',
    ],
    "/v1/completions": [
        '{"prompt": %s}', '{"prompt": [%s]}', '{"prompt": [[%s]]}', '{"prompt": "a", "max_tokens": %s}',
        '{"prompt": "a", "model": %s}', '{"prompt": "a", "logit_bias": {"5": %s}}', '{"prompt": "a", "stop": %s}',
        '{"prompt": "a", "stranger": %s}', '{"prompt": "a", "guided_json": %s}', '{"prompt": "a", "seed": %s}',
        '{"prompt": "a", "rid": %s}', '{"prompt": "a", "user": %s}', '{"prompt": "a", "response_format": %s}',
        '{"prompt": "a", "stream": true, "model": %s}', '{"prompt": "a", "echo": true, "user": %s}',
    ],
    "/v1/chat/completions": [
        '{"messages": %s}', '{"messages": [%s]}', '{"messages": [{"role": "user", "content": %s}]}',
        '{"messages": [{"role": %s, "content": "a"}]}', '{"messages": [{"role": "user", "name": %s, "content": "a"}]}',
        '{"messages": [{"role": "user", "stranger": %s, "content": "a"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": %s}]}]}',
        *('{"messages": [{"role": "assistant", "content": "", "tool_calls": ' + calls + '}]}' for calls in (
            "%s", "[%s]", '[{"id": "1", "type": "function", "function": {"name": "f", "arguments": %s}}]',
            '[{"id": "1", "type": "function", "function": {"name": %s, "arguments": "{}"}}]')),
        *('{"messages": [{"role": "user", "content": "a"}], "' + name + '": %s}' for name in (
            "chat_template_kwargs", "tools", "tool_choice", "metadata", "reasoning_effort", "max_tokens", "stranger",
            "input_ids", "extra_key", "model", "response_format", "stream_options", "top_logprobs")),
        '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": %s}}',
    ],
    "/v1/responses": [
        '{"input": %s}', '{"input": [%s]}', '{"input": [{"role": "user", "content": %s}]}',
        '{"input": [{"role": "user", "content": [{"type": "input_text", "text": %s}]}]}',
        '{"input": [{"type": %s, "id": "a"}]}', '{"input": [{"type": "item_reference", "id": %s}]}',
        '{"input": [{"type": "function_call", "call_id": "a", "name": %s, "arguments": "{}"}]}',
        '{"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": %s}]}',
        '{"input": [{"type": "function_call_output", "call_id": "a", "output": %s}]}',
        '{"input": [{"type": "reasoning", "content": %s}]}', '{"input": "a", "stream": true, "metadata": %s}',
        *('{"input": "a", "' + name + '": %s}' for name in (
            "instructions", "previous_response_id", "store", "tools", "tool_choice", "text", "reasoning", "metadata",
            "include", "cache_salt", "extra_key", "priority", "rid", "max_tokens", "logit_bias", "stop", "stranger")),
        '{"input": "a", "tools": [%s]}', '{"input": "a", "tools": [{"type": %s}]}', '{"input": "a", "include": [%s]}',
        '{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": %s}], "tool_choice": "none"}',
        '{"input": "a", "text": {"format": %s}}', '{"input": "a", "stream": true, "text": {"format": {"x": %s}}}',
    ],
    "/v1/messages": [
        '{"messages": %s, "max_tokens": 1}', '{"messages": [%s], "max_tokens": 1}',
        '{"messages": [{"role": %s, "content": "a"}], "max_tokens": 1}',
        '{"messages": [{"role": "system", "content": %s}], "max_tokens": 1}',
        '{"messages": [{"role": "user", "content": %s}], "max_tokens": 1}',
        '{"messages": [{"role": "user", "content": [%s]}], "max_tokens": 1}',
        '{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": %s}]},'
        ' {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": %s}]}], "max_tokens": 1}',
        '{"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": %s}]}], "max_tokens": 1}',
        *('{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "' + name + '": %s}' for name in (
            "system", "tools", "tool_choice", "thinking", "output_config", "output_format", "context_management",
            "stop_sequences", "cache_salt", "extra_key", "rid", "metadata", "betas", "response_format", "stranger")),
        '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": [{"type": %s}]}',
        '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "output_config": {"effort": %s}}',
        '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "output_format": {"type": "json_schema",'
        ' "schema": %s}}', '{"messages": [{"role": "user", "content": "a"}], "max_tokens": %s, "stream": true}',
    ],
    "/tokenize": ['{"prompt": %s}', '{"prompt": [%s]}', '{"messages": [{"role": "user", "content": %s}]}', '{"x": %s}'],
    "/detokenize": ['{"tokens": %s}', '{"tokens": [%s]}', '{"tokens": [[%s]]}', '{"tokens": [1], "x": %s}'],
    "/abort_request": ['{"rid": %s}', '{"abort_all": %s}', '{"rid": "a", "x": %s}'],
    "/pause_generation": ['{"mode": %s}'],
    "/start_profile": ['{"output_dir": %s}', '{"num_steps": %s}', '{"activities": %s}', '{"x": %s}'],
}  # fmt: skip


@pytest.mark.parametrize("path", ENDPOINTS)
def test_nasty_values_in_every_place(app: ASGIApp, path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for frame in ["%s", *FRAMES.get(path, [])]:
            for value in NASTY.values():
                check(app, path, frame.replace("%s", value).encode(errors="surrogateescape"))
    assert not [record for record in caplog.records if record.exc_info], "no traceback"


def test_a_number_of_many_digits_is_told_so(app: ASGIApp) -> None:
    for path, frame in [
        ("/generate", '{"text": "a", "sampling_params": {"seed": %s}}'),
        ("/generate", '{"input_ids": [%s]}'),
        ("/v1/completions", '{"prompt": "a", "max_tokens": %s}'),
        ("/detokenize", '{"tokens": [%s]}'),
        ("/start_profile", '{"num_steps": %s}'),
    ]:
        status, message = check(app, path, (frame % ("9" * 5000)).encode())
        assert status == 400, path
        assert len(message) < 300


# --- anything: all routes, methods, spellings, headers and declared fields


def fields_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The fields of a declared object, by the names that clients write: their types and whether they are required. A
    field that is declared tomorrow is among them."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {field.encode_name: (field.type, field.required) for field in msgspec.structs.fields(kind)}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {
            field.alias or name: (field.annotation, field.is_required()) for name, field in kind.model_fields.items()
        }
    if is_typeddict(kind):
        return {name: (type_, name in kind.__required_keys__) for name, type_ in get_type_hints(kind).items()}
    return {}


def words_of(kind: Any, seen: set[Any]) -> Iterator[str]:
    """The field names and literals of a declared type and those within it."""
    if id(kind) in seen:
        return
    seen.add(id(kind))
    for name, (inner, _) in fields_of(kind).items():
        yield name
        yield from words_of(inner, seen)
    for inner in get_args(kind):
        if isinstance(inner, str):
            yield inner
        else:
            yield from words_of(inner, seen)


_SEEN: set[Any] = set()
WORDS = (
    *sorted({word for kind, _ in BODIES.values() for word in words_of(kind, _SEEN)}),
    "properties", "object", "string", "anyOf", "enum", "5", "x",
)  # fmt: skip
TEXTS = (
    "", "a", "{}", "\u0000", "é" * 50, "[[[", "9" * 30, "(a|b)*", 'root ::= "a"', "\u2028\x1b[31m", "\ud800",
    "demo", "%",
)  # fmt: skip
NUMBERS = (2**31, 2**53, 2**63, -(2**63), 2**64, *range(-3, 6), 64, 300)
FLOATS = (0.0, 0.5, 1.0, 2.0, -1.5, 1e308, 1e-300, -0.0)
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "PROPFIND")
ENDINGS = (
    b"%0a",
    b"%00",
    b"/",
    b"//",
    b";x",
    b"%2e",
    b"?",
    b"#x",
    b"%ff",
    b"%",
    b"%zz",
    b"/../x",
    b"\xc3\xa9",
    b"%e2%80%a8",
)
QUERIES = (
    b"?storage=true", b"?storage=x", b"?timeout=0", b"?timeout=nan", b"?timeout=-1", b"?timeout=1e400",
    b"?format=trace", b"?format=%ff", b"?%ff=1", b"?a&b=&=c", b"?storage=true&storage=false",
)  # fmt: skip
HEADERS = (
    b"Content-Type: application/json", b"Content-Type: text/plain", b"Content-Type: multipart/form-data; boundary=x",
    b"Content-Type: \xff", b"Origin: http://a.example", b"Origin: null", b"Origin: \xff", b"Sec-Fetch-Site: cross-site",
    b"Sec-Fetch-Site: same-origin", b"User-Agent: Mozilla/5.0", b"Authorization: Bearer x", b"Authorization: \xff",
    b"X-Api-Key: \xff", b"X-Request-Id: a", b"X-Request-Id: \xff\x09", b"Host: evil.example", b"Host: \xff", b"Host:",
    b"Host: [::1", b"Host: localhost:x", b"Connection: Upgrade\r\nUpgrade: h2c", b"Connection: close",
    b"Expect: 100-continue", b"Accept-Encoding: gzip", b"If-None-Match: *, \xff", b"Content-Encoding: gzip",
    b"anthropic-version: 2023-06-01", b"anthropic-beta: x,\xff", b"X-Forwarded-For: 1", b"Cookie: a=b", b"Accept: \xff",
)  # fmt: skip


class Requests:
    """Makes request number ``seed``: well framed, and odd anywhere else. ``rarity``: one value of a body in so many has
    another type than its field; 0: none has, and the values are usual ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rarity = self.random.choice((0, 0, 5, 20))

    def once_in(self, number: int) -> bool:
        return self.random.randrange(number) == 0

    def some(self, values: Sequence[Any], most: int = 3) -> list[Any]:
        return self.random.choices(values, k=self.random.randint(0, most)) if values else []

    def request(self, route: str, methods: Sequence[str]) -> bytes:
        choice = self.random.choice
        method = choice(METHODS if self.once_in(10) else methods)
        name = choice(("demo", "resp_1", "x/y", "%00", "%ff", "a" * 300))
        path = re.sub(r"\{.*?\}", name, route).encode()
        path += choice(ENDINGS) if self.once_in(10) else b""
        path += choice(QUERIES) if self.once_in(5) else b""
        body = self.body(route) if method not in ("GET", "HEAD") or self.once_in(10) else b""
        lines = [b"%s %s HTTP/1.1" % (method.encode(), path)]
        lines += self.some(HEADERS) if self.once_in(3) else []
        if self.once_in(5):
            chunks = [b"%x" % len(body), body] if body else []
            return b"\r\n".join([*lines, b"Transfer-Encoding: chunked", b"", *chunks, b"0", b"", b""])
        return b"\r\n".join([*lines, *([b"Content-Length: %d" % len(body)] if body else []), b"", body])

    def body(self, route: str) -> bytes:
        if route not in BODIES or self.once_in(20):
            return self.random.choice((b"", b"{}", b"null", b"{", self.random.randbytes(30)))
        kind = ChatBody if route.endswith("/tokenize") and self.once_in(2) else BODIES[route][0]
        body = self.value(kind)
        if not self.rarity:  # what every client sends
            for name, usual in (
                ("messages", [{"role": "user", "content": "a"}]), ("text", "a"), ("input", "a"), ("prompt", "a")
            ):  # fmt: skip
                if name in fields_of(kind) and not self.once_in(4):
                    body[name] = usual
        text = re.sub('"<<(.*?)>>"', lambda found: NASTY[found[1]], json.dumps(body))
        return text.encode(errors="surrogateescape")

    def value(self, kind: Any, depth: int = 0) -> Any:
        """A value of a declared type, or once in a while another one."""
        if depth > 6 or (self.rarity and self.once_in(self.rarity)):
            return self.anything()
        origin, args = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self.value(args[0], depth)
        if origin in (Union, UnionType, Literal):
            one = self.random.choice(args)
            return one if origin is Literal else self.value(one, depth)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            keys = self.some(WORDS + TEXTS if args[0] is str else NUMBERS)
            return {str(key): self.value(args[1], depth + 1) for key in keys}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return [self.value(args[0], depth + 1) for _ in range(self.random.randint(not self.rarity, 3))]
        if fields := fields_of(kind):
            optional = [name for name, (_, required) in fields.items() if not required]
            names = [name for name, (_, required) in fields.items() if required] + self.some(optional, 4)
            if self.rarity and self.once_in(10):
                names = names[1:] if self.once_in(2) else [*names, self.random.choice(WORDS)]
            return {
                name: self.value(fields[name][0], depth + 1) if name in fields else self.anything() for name in names
            }
        return self.scalar(kind) if self.rarity or kind not in (int, float, str) else self.usual(kind)

    def scalar(self, kind: Any) -> Any:
        values: dict[Any, Sequence[Any]] = {
            bool: (False, True), int: NUMBERS, float: FLOATS + NUMBERS, str: WORDS + TEXTS, type(None): (None,)
        }  # fmt: skip
        return self.random.choice(values[kind]) if kind in values else self.anything()

    def usual(self, kind: Any) -> Any:
        values: dict[Any, Sequence[Any]] = {int: (1, 2, 3), float: (0.0, 0.5, 1), str: ("a", "demo", "b c", "{}")}
        return self.random.choice(values[kind])

    def anything(self, depth: int = 0) -> Any:
        """Any JSON value; the name of a nasty one is replaced by its text in the end."""
        if self.once_in(8):
            return f"<<{self.random.choice(sorted(NASTY))}>>"
        kind = self.random.choice((bool, int, float, str, type(None), list, dict)[: 7 if depth < 3 else 5])
        if kind is list:
            return [self.anything(depth + 1) for _ in range(self.random.randint(0, 3))]
        if kind is dict:
            return {key: self.anything(depth + 1) for key in self.some(WORDS)}
        return self.scalar(kind)


# The suite makes a share of them, and a campaign (docs/use/security.md) as many as it is told.
NUM_REQUESTS = int(os.environ.get("FENCELINE_FUZZED_REQUESTS", "1000"))


def test_any_request_gets_an_answer_below_500(app: ASGIApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_download", _no_hub)
    failures: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = failures.append  # type: ignore[method-assign]
    answered: Counter[tuple[str, bool]] = Counter()
    routes = sorted(routes_of(app), key=lambda route: (route.path, sorted(route.methods or ())))
    weights = [6 if route.path in BODIES else 1 for route in routes]  # bodies have the most to try
    logging.getLogger().addHandler(handler)
    try:
        for number in range(NUM_REQUESTS):
            requests = Requests(number)
            [route] = requests.random.choices(routes, weights)
            request = requests.request(route.path, sorted(route.methods or ()))
            status, answer = RUNNER.run(_exchange(app, request))
            assert 200 <= status < 500 and b"internal error" not in answer, (number, request, answer)
            assert not failures, (number, request, failures[0].getMessage(), failures[0].exc_text)
            answered[route.path, status < 400] += 1
    finally:
        logging.getLogger().removeHandler(handler)
    print(f"{NUM_REQUESTS} requests, {sum(num for (_, ok), num in answered.items() if ok)} of them served")
    # If all were odd, they would be refused before they cost anything.
    served = {path for path, ok in answered if ok}
    # This server generates, and the demo's tokenizer has no tokens of judges: so these are refused.
    readers = {path for path, (kind, _) in BODIES.items() if issubclass(kind, ReadingBody)}
    assert {path for path, (_, optional) in BODIES.items() if not optional} - served <= readers | {
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
    }


def _no_hub(name: str, flag: str, *_: object, **__: object) -> str:
    raise ConfigError(f"{flag} {name}: no such repository")


async def _exchange(app: ASGIApp, request: bytes) -> tuple[int, bytes]:
    """Status and body, framed, of the answer to ``request``, through uvicorn's parser and ours."""
    config = uvicorn.Config(app, lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.load()
    wire = Wire()
    connection = HttpProtocol(
        config=config, server_state=ServerState(), app_state={}, refused=lambda error: None, max_connections=10
    )
    connection.connection_made(wire)
    connection.data_received(request)
    async with asyncio.timeout(LIMIT_S):
        while not (wire.closing or (connection.cycle is not None and connection.cycle.response_complete)):
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
    connection.connection_lost(None)
    answer = wire.sent.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if 400 <= status < 500 and body:
        _check_error(body)
    return status, body
