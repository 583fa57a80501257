"""/v1/messages as the anthropic client sees it: texts, reasoning, tools, streams, counts and errors."""

from __future__ import annotations

from typing import Literal

import httpx
import pytest
from chat_answer import ANSWER, TEMPLATE, prompt_of
from pydantic import BaseModel

from fenceline.ipc.io_struct import FinishReason

HI = [{"role": "user", "content": "Hi"}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "see"}, IMAGE]}
WEATHER = {
    "name": "weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def anthropic():
    """Imported for these tests alone: it takes a second, which every process would need that collects them."""
    return pytest.importorskip("anthropic", reason="the extra 'test' is not installed: no anthropic")


def client_of(server):
    import anthropic

    url = str(server.client.base_url).removesuffix("/v1/")
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


async def test_a_message(serve):
    async with serve() as server:
        message = await client_of(server).messages.create(model="byte", max_tokens=100, messages=HI)
        assert [(block.type, block.text) for block in message.content] == [("text", "Hello wörld")]
        assert (message.role, message.model, message.stop_reason) == ("assistant", "byte", "end_turn")
        assert message.usage.input_tokens > 0 and message.usage.output_tokens == 10
        assert server.link.sent[0].sampling_params.max_new_tokens == 100


async def test_cached_tokens_are_counted_apart(serve):
    async with serve() as server:
        plain = await client_of(server).messages.create(model="byte", max_tokens=100, messages=HI)
        server.script.cached_tokens = 3
        cached = await client_of(server).messages.create(model="byte", max_tokens=100, messages=HI)
        assert cached.usage.cache_read_input_tokens == 3
        assert cached.usage.input_tokens == plain.usage.input_tokens - 3


async def test_thinking_text_and_tools_are_blocks(serve, template):
    async with serve(chat_template=template, reasoning_parser="qwen3") as server:
        server.script.pieces = ANSWER
        message = await client_of(server).messages.create(
            model="byte", max_tokens=100, messages=HI, tools=[WEATHER], system="Be brief."
        )
        thinking, text, call = message.content
        # No token of this tokenizer ends the thinking: of 100 bytes it has eleven.
        assert 0 < message.usage.output_tokens_details.thinking_tokens < 30
        assert (thinking.type, thinking.thinking) == ("thinking", "Let me see.")
        assert (text.type, text.text) == ("text", "I look.")
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})
        assert message.stop_reason == "tool_use"
        prompt = prompt_of(server)
        assert "[system]|Be brief.;[user]|Hi;[assistant]" in prompt
        assert '"description": "The weather"' in prompt and '"parameters": {' in prompt


async def test_arguments_of_strict_tools_follow_their_schemas(serve, template):
    async with serve(chat_template=template) as server:
        for strict in (True, False):
            tool = {**WEATHER, "strict": strict}
            await client_of(server).messages.create(model="byte", max_tokens=9, messages=HI, tools=[tool])
        assert [message.grammar > 0 for message in server.link.sent] == [True, False]


@pytest.mark.parametrize(
    ("written", "read"),
    [('{"x": 123456789012345678901234567890}', {"x": 123456789012345678901234567890}), ('{"x": "\\ud800"}', {}),
     ('{"x": ' + "[" * 300 + "]" * 300 + "}", None), ("[1]", {})],
)  # fmt: skip
async def test_odd_arguments_do_not_lose_the_answer(serve, template, written, read):
    async with serve(chat_template=template) as server:
        server.script.pieces = [f'<tool_call>{{"name": "weather", "arguments": {written}}}</tool_call>']
        message = await client_of(server).messages.create(model="byte", max_tokens=9, messages=HI, tools=[WEATHER])
        call = next((block for block in message.content if block.type == "tool_use"), None)
        assert call is not None and (read is None or call.input == read)


async def test_a_stream_says_the_same_block_by_block(serve, template):
    async with serve(chat_template=template, reasoning_parser="qwen3") as server:
        server.script.pieces = ANSWER
        kinds = []
        async with client_of(server).messages.stream(
            model="byte", max_tokens=100, messages=HI, tools=[WEATHER]
        ) as stream:
            async for event in stream:
                if event.type.startswith(("message_", "content_block_st")):
                    kinds.append(event.type)
            message = await stream.get_final_message()
        block = ["content_block_start", "content_block_stop"]
        assert kinds == ["message_start", *block * 3, "message_delta", "message_stop"]
        thinking, text, call = message.content
        assert (thinking.thinking, text.text, call.input) == ("Let me see.", "I look.", {"city": "Paris"})
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens > 0


async def test_a_history_with_tools(serve, template):
    async with serve(chat_template=template) as server:
        await client_of(server).messages.create(
            model="byte",
            max_tokens=100,
            tools=[WEATHER],
            messages=[
                *HI,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "Sun"}]},
                        {"type": "tool_result", "tool_use_id": "call_2", "content": "gone", "is_error": True},
                        {"type": "text", "text": "And now?"},
                    ],
                },
            ],
        )
        assert prompt_of(server).endswith(
            '[user]|Hi;[assistant]Hm.|I look.<tool_call>weather{"city": "Rome"};[tool]|Sun;[tool]|Error: gone;'
            "[user]|And now?;[assistant]"
        )


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (FinishReason(type="length"), "max_tokens", None),
        (FinishReason(type="stop", matched="END"), "stop_sequence", "END"),
        (FinishReason(type="stop", matched=0), "end_turn", None),
    ],
)
async def test_why_an_answer_ended(serve, finish, reason, sequence):
    async with serve() as server:
        server.script.finish = finish
        message = await client_of(server).messages.create(
            model="byte", max_tokens=100, messages=HI, stop_sequences=["END"]
        )
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
        assert server.link.sent[0].sampling_params.stop == ("END",)


async def test_a_last_message_of_the_assistant_is_continued(serve):
    async with serve() as server:
        await client_of(server).messages.create(
            model="byte", max_tokens=100, messages=[*HI, {"role": "assistant", "content": "Well"}]
        )
        assert prompt_of(server).endswith("<|im_start|>assistant\nWell")


async def test_tokens_are_counted_without_generating(serve, template):
    async with serve(chat_template=template) as server:
        client = client_of(server)
        counted = await client.messages.count_tokens(model="byte", messages=HI, tools=[WEATHER])
        assert not server.link.sent
        await client.messages.create(model="byte", max_tokens=9, messages=HI, tools=[WEATHER])
        assert counted.input_tokens == len(server.link.sent[0].input_ids)


SCHEMA = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"extra_body": {"output_format": {"type": "json_schema", "schema": SCHEMA}}},
    ],
)
async def test_a_format_is_a_grammar(serve, fields):
    async with serve() as server:
        server.script.pieces = ['{"city": "Rome"}']
        message = await client_of(server).messages.create(model="byte", max_tokens=100, messages=HI, **fields)
        assert message.content[0].text == '{"city": "Rome"}'
        assert server.link.sent[0].grammar
        counted = await client_of(server).messages.count_tokens(model="byte", messages=HI, **fields)
        assert counted.input_tokens == len(server.link.sent[0].input_ids)


async def test_parsed_output(serve):
    class Trip(BaseModel):
        city: Literal["Rome", "Oslo"]
        days: int

    async with serve() as server:
        server.script.pieces = ['{"city": "Rome", "days": 3}']
        client = client_of(server)
        asked = {"model": "byte", "max_tokens": 100, "messages": HI, "output_format": Trip}
        assert (await client.messages.parse(**asked)).parsed_output == Trip(city="Rome", days=3)
        async with client.messages.stream(**asked) as stream:
            assert (await stream.get_final_message()).parsed_output == Trip(city="Rome", days=3)
        assert all(message.grammar for message in server.link.sent)


async def test_what_claude_code_sends(serve, tmp_path, caplog):
    """Its betas change nothing here: they are accepted, and named in the log once."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ reasoning_effort }};" + TEMPLATE)
    body = {
        "model": "claude-sonnet-4-5", "max_tokens": 100, "system": [{"type": "text", "text": "Be brief."}],
        "messages": [*HI, {"role": "system", "content": [{"type": "text", "text": "It is night."}]}],
        "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"}, "thinking": {"type": "adaptive"}, "metadata": {"user_id": "x"},
    }  # fmt: skip
    async with serve(chat_template=str(template), strict_fields=True) as server:
        client = client_of(server)
        for _ in range(2):
            message = await client.beta.messages.create(**body, betas=["claude-code-20250219"])
            assert message.content[0].text == "Hello wörld"
        prompt = prompt_of(server)
        assert prompt.startswith("medium;") and "web_search" not in prompt
        assert prompt.endswith("[system]|Be brief.;[user]|Hi;[system]|It is night.;[assistant]")
    told = [record.getMessage() for record in caplog.records if "is left out here" in record.getMessage()]
    assert sorted(told) == [
        "A request has a beta 'claude-code-20250219', which is left out here",
        "A request has a beta 'context_management', which is left out here",
        "A request has a tool of type 'web_search_20250305', which is left out here",
    ]


async def test_a_billing_header_is_no_part_of_the_prompt(serve, template):
    def header(number: int) -> dict[str, str]:
        text = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={number:05x};"
        return {"type": "text", "text": text}

    brief = {"type": "text", "text": "Be brief."}
    async with serve(chat_template=template) as server:
        messages = client_of(server).messages
        for system, inline, prompt in (
            ([header(1), brief], [brief, header(2)], "[system]|Be brief.;[user]|Hi;[system]|Be brief.;[assistant]"),
            ([header(3)], [header(4)], "[user]|Hi;[assistant]"),
            (header(5)["text"], header(6)["text"], "cch=00005;;[user]|Hi;[system]|" + header(6)["text"]),
        ):
            asked = {"model": "byte", "system": system, "messages": [*HI, {"role": "system", "content": inline}]}
            await messages.create(**asked, max_tokens=9)
            assert prompt in prompt_of(server) and ("header" in prompt_of(server)) == isinstance(system, str)
            counted = await messages.count_tokens(**asked)
            assert counted.input_tokens == len(server.link.sent[-1].input_ids)
        asked = {"model": "byte", "max_tokens": 9, "messages": [{"role": "user", "content": [header(7)]}]}
        await messages.create(**asked)
        assert header(7)["text"] in prompt_of(server), "what the user says is not touched"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source is of type 'None'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "whose source is missing"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"messages\[0\].content\[0\]: this model reads text"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, r"messages\[0\].content\[0\].content\[1\]: this model"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "whose text is missing"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, r"tools\[0\].name"),
        ({"tools": [{"type": "custom", "name": "x"}]}, r"tools\[0\].input_schema: this field is required"),
        ({"tools": [WEATHER] * 129}, "has 129 tools"),
        ({"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}}, "only allowed with tools"),
        (
            {
                "messages": [
                    *HI,
                    {"role": "system", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
                ]
            },
            "no text, where text must be",
        ),
        ({"output_config": {"format": {"type": "json_object"}}}, r"output_config.format must be"),
        ({"extra_body": {"output_format": {"type": "json_schema"}}}, r"output_format must be"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, r"use output_config.format"),
        ({"stop_sequences": ["x"] * 65}, "stop"),
        ({"extra_body": {"temperature": -1.0}}, "temperature"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers is not available"),
        ({"tools": [WEATHER]}, "tools is not available"),
    ],
)
async def test_errors_are_anthropics(serve, anthropic, fields, words):
    async with serve() as server:
        with pytest.raises(anthropic.BadRequestError, match=words) as caught:
            await client_of(server).messages.create(**{"model": "byte", "max_tokens": 9, "messages": HI} | fields)
        error = caught.value.body
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert not server.link.sent


async def test_a_stream_that_fails_says_so(serve, anthropic):
    async with serve() as server:
        server.script.finish = FinishReason(type="abort", status_code=503, message="too long in the queue")
        with pytest.raises(anthropic.APIStatusError, match="too long in the queue"):
            async with client_of(server).messages.stream(model="byte", max_tokens=9, messages=HI) as stream:
                await stream.get_final_message()


async def test_bad_json_and_unknown_names(serve):
    async with serve(strict_fields=True) as server, httpx.AsyncClient(base_url=str(server.client.base_url)) as client:
        answer = await client.post("messages", content=b"{")
        assert answer.status_code == 400 and answer.json()["type"] == "error"
        answer = await client.post("messages", json={"max_tokens": 9, "messages": HI, "colour": "red"})
        assert answer.status_code == 400 and "colour" in answer.json()["error"]["message"]
