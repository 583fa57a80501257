"""Whatever JSON a client sends: a request that the engine can take, or a RequestError. Nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenceline.entrypoints.anthropic.protocol import MessagesBody
from fenceline.entrypoints.anthropic.serving_messages import _parse as parse_messages
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.openai.chat_template import ChatTemplate
from fenceline.entrypoints.openai.parsing import (
    chat_completion,
    parse_body,
    refuse_chat,
    refuse_completion,
    sampling_params,
)
from fenceline.entrypoints.openai.protocol import ChatBody, CompletionBody
from fenceline.entrypoints.openai.responses_protocol import ResponsesBody
from fenceline.entrypoints.openai.responses_protocol import chat_fields as response_fields
from fenceline.entrypoints.openai.serving_chat import render_chat
from fenceline.entrypoints.openai.serving_responses import ResponseStore
from fenceline.entrypoints.openai.serving_responses import _parse as parse_response
from fenceline.frontend.request_prepare import build_message, check_ids
from fenceline.frontend.request_types import GenerateInput, RequestError
from fenceline.ipc.io_struct import SchedulerReady, TokenizedGenerateReq, decode, encode

VOCAB = 100
LIMITS = SchedulerReady(
    max_total_num_tokens=64, max_running_requests=4, max_req_input_len=63, context_length=64, memory_bytes={}
)
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", {})

NUMBERS = st.sampled_from([0, 1, -1, 2, 20, 128, 129, 2**31, 2**63, 2**64 - 1, -(2**63), 0.5, 1.0, -2.0, 1e-320, 1e308])
SCALARS = (
    st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "a", "1", "-5", "user", "assistant", "text", "none"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "5", "x", "include_usage"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]), "content": VALUES},
        optional={"name": VALUES, "tool_calls": VALUES, "reasoning_content": VALUES},
    )
    | VALUES,
    max_size=3,
)


def bodies(kind: type, **valid: st.SearchStrategy) -> st.SearchStrategy:
    """Bodies with some fields of anything, mostly around valid required ones."""
    required = {name: value | VALUES for name, value in valid.items()}
    optional = {name: VALUES for name in kind.model_fields if name not in valid}
    # Few wrong fields at a time, or nothing would ever get past the first check. They are chosen before they are drawn.
    names = st.sampled_from(sorted(optional))
    few = st.lists(names, max_size=1) | st.lists(names, unique=True, max_size=4)
    return few.flatmap(lambda kept: st.fixed_dictionaries(required | {name: optional[name] for name in kept}))


def submit(body: CompletionBody | ChatBody, ids: list[int]) -> None:
    params = sampling_params(body, 16 if body.max_tokens is None else body.max_tokens, {})
    inp = GenerateInput(input_ids=ids, sampling_params=params)
    message = build_message(inp, "rid", check_ids(ids, VOCAB, LIMITS), VOCAB, LIMITS)
    sent = decode(encode(message))
    assert isinstance(sent, TokenizedGenerateReq)
    assert sent.sampling_params.max_new_tokens <= 64


@settings(max_examples=200)
@given(body=bodies(CompletionBody, prompt=st.just("a") | st.just([1, 2])))
def test_completions(body):
    try:
        parsed = parse_body(CompletionBody, orjson.dumps(body), UnknownFields(strict=False))
        refuse_completion(parsed)
        for prompt in parsed.prompt:
            submit(parsed, prompt if isinstance(prompt, list) else [1])
    except RequestError as error:
        check(error)


@settings(max_examples=200)
@given(body=bodies(ChatBody, messages=st.just([{"role": "user", "content": "a"}]) | MESSAGES))
def test_chat(body):
    try:
        parsed = parse_body(ChatBody, orjson.dumps(body), UnknownFields(strict=False))
        submit_chat(parsed)
    except RequestError as error:
        check(error)


ITEMS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"])},
        optional=dict.fromkeys(("id", "role", "content", "call_id", "name", "arguments", "output", "summary"), VALUES),
    )
    | MESSAGES.map(lambda messages: messages[0] if messages else {}),
    max_size=3,
)
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result"])},
        optional=dict.fromkeys(
            ("text", "thinking", "id", "name", "input", "tool_use_id", "content", "is_error"), VALUES
        ),
    ),
    max_size=2,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": VALUES | BLOCKS | st.just("a")}
    ),
    max_size=3,
)


@settings(max_examples=200)
@given(body=bodies(ResponsesBody, input=st.just("a") | ITEMS))
def test_responses(body):
    try:
        parsed = parse_response(orjson.dumps(body), UnknownFields(strict=False))
        items = ResponseStore().resolved(parsed.input)
        submit_chat(chat_completion(response_fields(parsed.model_copy(update={"input": items}), [])))
    except RequestError as error:
        check(error, (400, 404))


@settings(max_examples=200)
@given(body=bodies(MessagesBody, messages=st.just([{"role": "user", "content": "a"}]) | TURNS, max_tokens=st.just(9)))
def test_messages(body):
    try:
        submit_chat(parse_messages(MessagesBody, orjson.dumps(body), UnknownFields(strict=False)))
    except RequestError as error:
        check(error)


def submit_chat(body: ChatBody) -> None:
    refuse_chat(body)
    render_chat(TEMPLATE, body)
    submit(body, [1])


def check(error: RequestError, statuses: Sequence[int] = (400,)) -> None:
    assert error.status in statuses
    assert error.message and "\n" not in error.message
    assert "pydantic" not in error.message


@pytest.mark.parametrize("raw", [b'{"prompt": "a"}', b'{"prompt": ["a", "b"], "n": 2, "stop": ["x"]}'])
def test_good_bodies_get_through(raw):
    body = parse_body(CompletionBody, raw, UnknownFields(strict=False))
    refuse_completion(body)
    submit(body, [1])
