"""The Python SDKs of OpenAI and Anthropic against a live server: answers, streams, turns, tools, objects, usage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from client_flows import ANSWER, ARGUMENTS, HELLO, LAST, NUM_IN, NUM_OUT, RESULT, SUM, Trip
from live_server import LiveServer

pytestmark = pytest.mark.slow
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR: Any = {"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}
OF_RESPONSES: Any = {"type": "function", "name": "calculator", "parameters": PARAMETERS, "strict": False}
OF_MESSAGES: Any = {"name": "calculator", "input_schema": PARAMETERS}


def said(content: str | list[Any], role: str = "user") -> Any:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def client(tools_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_server.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_completions(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    whole = create(model="demo-tools", messages=[said(HELLO)], temperature=0)
    assert whole.choices[0].message.content == ANSWER and whole.choices[0].finish_reason == "stop"
    chunks = list(
        create(
            model="demo-tools",
            messages=[said(HELLO)],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    parts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(part or "" for part in parts) == ANSWER and len(parts) > 1
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (NUM_IN, NUM_OUT)

    messages = [said(SUM)]
    called = create(model="demo-tools", messages=messages, tools=[CALCULATOR], temperature=0).choices[0]
    [call] = called.message.tool_calls or ()
    assert call.type == "function" and json.loads(call.function.arguments) == ARGUMENTS
    messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    last = create(model="demo-tools", messages=messages, tools=[CALCULATOR], temperature=0).choices[0]
    assert last.message.content == LAST
    turn = create(model="demo-tools", messages=[*messages, last.message, said(HELLO)], temperature=0)
    assert turn.choices[0].message.content == ANSWER


def test_chat_completions_parsed(client: openai.OpenAI) -> None:
    ask: Any = {"model": "demo-tools", "messages": [said("Plan.")], "temperature": 0, "max_tokens": 200}
    [choice] = client.chat.completions.parse(**ask, response_format=Trip).choices
    assert isinstance(choice.message.parsed, Trip)
    with client.chat.completions.stream(**ask, response_format=Trip) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed
    assert {"content.delta", "content.done", "chunk"} <= kinds


def test_responses(client: openai.OpenAI) -> None:
    create = client.responses.create
    whole = create(model="demo-tools", input=HELLO, temperature=0)
    events = list(create(model="demo-tools", input=HELLO, temperature=0, stream=True))
    assert whole.output_text == ANSWER and whole.status == "completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER and len(deltas) > 1
    assert events[-1].type == "response.completed"
    for usage in (whole.usage, events[-1].response.usage):
        assert usage is not None and (usage.input_tokens, usage.output_tokens) == (NUM_IN, NUM_OUT)
        assert usage.output_tokens_details.reasoning_tokens == 0
        assert 0 <= usage.input_tokens_details.cached_tokens < NUM_IN

    first = create(model="demo-tools", input=SUM, tools=[OF_RESPONSES], temperature=0)
    [call] = first.output
    assert call.type == "function_call" and json.loads(call.arguments) == ARGUMENTS
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    ask: Any = {"model": "demo-tools", "tools": [OF_RESPONSES], "temperature": 0}
    kept = create(**ask, previous_response_id=first.id, input=[output])
    sent = create(**ask, store=False, input=[said(SUM), call.to_dict(), output])
    referred = create(**ask, store=False, input=[said(SUM), {"type": "item_reference", "id": call.id}, output])
    assert kept.output_text == sent.output_text == referred.output_text == LAST
    turn = create(model="demo-tools", input=HELLO, previous_response_id=kept.id, temperature=0)
    assert turn.output_text == ANSWER
    assert client.responses.retrieve(kept.id).output_text == LAST


def test_tenants_share_no_prefix(client: openai.OpenAI, tools_server: LiveServer) -> None:
    """On the routes that once ignored whose prefix it was."""
    anthropic = pytest.importorskip("anthropic", reason="the extra 'test' is not installed: no anthropic")
    messages = anthropic.Anthropic(base_url=tools_server.base_url, api_key="none", max_retries=0).messages

    def cached(api: str, tenant: str) -> int:
        salt: Any = {"extra_body": {"cache_salt": f"{api} {tenant}"}}
        if api == "responses":
            usage = client.responses.create(model="demo-tools", input=SUM, max_output_tokens=1, **salt).usage
            assert usage is not None
            return usage.input_tokens_details.cached_tokens
        message = messages.create(model="demo-tools", max_tokens=1, messages=[said(SUM)], **salt)
        return int(message.usage.cache_read_input_tokens)

    for api in ("responses", "messages"):
        assert cached(api, "ann") == 0 and cached(api, "ann") > 0
        assert cached(api, "ben") == 0


def test_responses_parsed(client: openai.OpenAI) -> None:
    ask: Any = {"model": "demo-tools", "input": "Plan.", "temperature": 0, "max_output_tokens": 200}
    trip = client.responses.parse(**ask, text_format=Trip).output_parsed
    assert isinstance(trip, Trip)
    with client.responses.stream(**ask, text_format=Trip) as stream:
        assert stream.get_final_response().output_parsed == trip


def test_messages(tools_server: LiveServer) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the extra 'test' is not installed: no anthropic")
    client = anthropic.Anthropic(base_url=tools_server.base_url, api_key="none", max_retries=0)
    ask: Any = {"model": "demo-tools", "max_tokens": 200, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**ask, messages=[said(HELLO)])
    assert [block.text for block in whole.content] == [ANSWER] and whole.stop_reason == "end_turn"
    with client.messages.stream(**ask, messages=[said(HELLO)]) as stream:
        parts = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert "".join(parts) == ANSWER and len(parts) > 1
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == NUM_IN
        assert usage.output_tokens == NUM_OUT
    counted = client.messages.count_tokens(model="demo-tools", messages=[said(HELLO)])
    assert counted.input_tokens == NUM_IN

    called = client.messages.create(**ask, messages=[said(SUM)], tools=[OF_MESSAGES])
    [call] = called.content
    assert (call.type, call.input, called.stop_reason) == ("tool_use", ARGUMENTS, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    messages: Any = [said(SUM), {"role": "assistant", "content": called.content}]
    messages.append({"role": "user", "content": [result]})
    last = client.messages.create(**ask, messages=messages, tools=[OF_MESSAGES])
    assert [block.text for block in last.content] == [LAST]
    messages += [{"role": "assistant", "content": last.content}, said(HELLO)]
    assert client.messages.create(**ask, messages=messages).content[0].text == ANSWER

    @anthropic.beta_tool
    def calculator(expression: str) -> str:
        """Computes."""
        assert expression == ARGUMENTS["expression"]
        return RESULT

    runner = client.beta.messages.tool_runner(**ask, messages=[said(SUM)], tools=[calculator])
    assert runner.until_done().content[0].text == LAST

    trip = client.messages.parse(**ask, messages=[said("Plan.")], output_format=Trip).parsed_output
    assert isinstance(trip, Trip)
    with client.messages.stream(**ask, messages=[said("Plan.")], output_format=Trip) as stream:
        assert stream.get_final_message().parsed_output == trip


def test_an_agent_finds_its_last_prompt_in_the_cache(tools_server: LiveServer) -> None:
    """As Claude Code asks: before the system prompt is a billing header, which is another in each request."""
    anthropic = pytest.importorskip("anthropic", reason="the extra 'test' is not installed: no anthropic")
    client = anthropic.Anthropic(base_url=tools_server.base_url, api_key="none", max_retries=0)
    messages: list[Any] = []
    num_known = 1  # tokens of the last prompt and its answer; the last of them has not been computed
    for turn in range(10):
        if turn % 2 == 0:
            messages.append(said(f"What is {4821 + turn} + 377?"))
        header = f"x-anthropic-billing-header: cc_version=2.1.37.{turn:03x}; cc_entrypoint=cli; cch={turn * 7919:05x};"
        message = client.messages.create(
            model="demo-tools",
            max_tokens=64,
            system=[{"type": "text", "text": header}, {"type": "text", "text": "You are a careful assistant."}],
            messages=messages,
            tools=[OF_MESSAGES],
            extra_body={"temperature": 0, "cache_salt": "agent"},
        )
        [block] = message.content
        messages.append({"role": "assistant", "content": [block.to_dict()]})
        if turn % 2 == 0:
            assert block.input == {"expression": f"{4821 + turn} + 377"}
            messages.append(said([{"type": "tool_result", "tool_use_id": block.id, "content": RESULT}]))
        else:
            assert block.text == LAST
        usage = message.usage
        assert usage.cache_read_input_tokens == num_known - 1, turn
        num_known = usage.cache_read_input_tokens + usage.input_tokens + usage.output_tokens
    assert num_known > 400, "the conversation has grown"
