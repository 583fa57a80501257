"""Whatever bytes a client sends to whatever endpoint: an answer below 500, in the server's form, and no traceback."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message, Scope

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.http_server import create_app
from fenceline.frontend.tokenizer import load_tokenizer
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc import io_struct as io

ENDPOINTS = (
    "/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_request",
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
            self.manager.handle(io.ControlReply(id=message.id, success=True, payload=b"{}"))

    async def receive(self) -> list[io.Message]:
        raise AssertionError("nobody listens")

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ASGIApp]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    config = resolve(
        ServerArgs(model_path="demo", device="cpu", max_total_tokens=4096, chat_template=str(template))
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
    message = ""
    if status >= 400:
        message = orjson.loads(answer)["error"]["message"]
        assert message
        assert "\n" not in message, message
        assert len(message) < 2000, len(message)
        for word in ("set_int_max_str_digits", "Traceback", "pydantic", "msgspec", "maximum recursion"):
            assert word not in message, message
    for line in answer.split(b"\n\n"):
        assert b"internal error" not in line
    return status, message


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


# --- anything

NAMES = sorted(
    {
        name
        for frames in FRAMES.values()
        for frame in frames
        for name in orjson.loads(frame.replace("%s", "1"))
    }
    | {"role", "content", "type", "function", "arguments", "temperature", "stop", "n", "5", "stream", "x"}
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.sampled_from([2**31, 2**63, -(2**63), 0.5, 1e308, -1.5])
    | st.sampled_from(["", "a", "user", "text", "abort", "{}", "\u0000", "é" * 50, "[[[", "9" * 30]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5).map(orjson.dumps) | st.binary(
    max_size=60
)


@settings(max_examples=600)
@given(
    path=st.sampled_from(ENDPOINTS),
    body=BODIES,
    query=st.sampled_from([b"", b"storage=x", b"storage=true", b"%ff=1"]),
)
def test_anything(app: ASGIApp, path: str, body: bytes, query: bytes) -> None:
    check(app, path, body, query)
