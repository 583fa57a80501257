"""Tools over /v1/chat/completions, as the openai client sees them: what the model is told, what it calls, what is
refused."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
import xgrammar

from fenceline.constrained.compile import compile_grammar
from fenceline.entrypoints.openai.parsing import calls_tag
from fenceline.entrypoints.openai.protocol import ChatBody
from fenceline.entrypoints.openai.tool_call_parser import TOOL_CALL_FORMATS
from fenceline.ipc.io_struct import FinishReason

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TEMPLATE = (
    "{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools><tool_call>{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
CALLS = [
    "Let me", " look.\n<tool",
    '_call>\n{"name": "weather", "argu', 'ments": {"city": "Par', 'is"}}\n</tool_call>\n<too',
    'l_call>{"name": "now", "arguments": {}}</tool', "_call>",
]  # fmt: skip


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


async def test_the_model_is_told_of_tools_and_its_calls_are_parsed(serve, template):
    async with serve(chat_template=template) as server:
        server.script.pieces = CALLS
        answer = await server.client.chat.completions.create(model="byte", messages=HI, tools=[WEATHER, NOW])
        choice = answer.choices[0]
        assert choice.message.content == "Let me look."
        calls = choice.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("weather", {"city": "Paris"}),
            ("now", {}),
        ]
        assert choice.finish_reason == "tool_calls"
        assert len({call.id for call in calls}) == 2
        prompt = server.tokenizer.decode(server.link.sent[0].input_ids, skip_special_tokens=False)
        assert json.dumps(WEATHER) in prompt
        assert "null" not in prompt  # what the client left out is left out


async def test_calls_stream_as_openai_sends_them(serve, template):
    async with serve(chat_template=template) as server:
        server.script.pieces = CALLS
        stream = await server.client.chat.completions.create(
            model="byte", messages=HI, tools=[WEATHER, NOW], stream=True
        )
        content, calls, reasons = "", [], []
        async for chunk in stream:
            choice = chunk.choices[0]
            content += choice.delta.content or ""
            reasons.append(choice.finish_reason)
            assert len(choice.delta.tool_calls or ()) <= 1
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert (call.index, call.type) == (len(calls), "function")
                    calls.append([call.id, call.function.name, []])
                else:
                    assert (call.index, call.type, call.function.name) == (len(calls) - 1, None, None)
                calls[call.index][2].append(call.function.arguments)
        assert content == "Let me look."
        assert [(name, "".join(parts)) for _, name, parts in calls] == [
            ("weather", '{"city": "Paris"}'),
            ("now", "{}"),
        ]
        assert len(calls[0][2]) > 1  # the arguments arrived while they were written
        assert reasons == [*[None] * (len(reasons) - 1), "tool_calls"]


async def test_an_answer_without_calls_is_as_without_tools(serve, template):
    async with serve(chat_template=template) as server:
        for tools in ([WEATHER], openai.NOT_GIVEN):
            answer = await server.client.chat.completions.create(model="byte", messages=HI, tools=tools)
            message = answer.choices[0].message
            assert (message.content, message.tool_calls) == ("Hello wörld", None)
            assert answer.choices[0].finish_reason == "stop"


async def test_a_call_at_the_limit_of_tokens_is_cut_off(serve, template):
    async with serve(chat_template=template) as server:
        server.script.pieces = CALLS[:4]
        server.script.finish = FinishReason(type="length")
        answer = await server.client.chat.completions.create(model="byte", messages=HI, tools=[WEATHER])
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Par'


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_if_the_client_cannot_run_several(serve, template, stream):
    async with serve(chat_template=template) as server:
        server.script.pieces = CALLS
        answer = await server.client.chat.completions.create(
            model="byte", messages=HI, tools=[WEATHER, NOW], parallel_tool_calls=False, stream=stream
        )
        if stream:
            deltas = [chunk.choices[0].delta async for chunk in answer]
            names = [call.function.name for delta in deltas for call in delta.tool_calls or () if call.id]
        else:
            names = [call.function.name for call in answer.choices[0].message.tool_calls]
        assert names == ["weather"]


async def test_tools_and_reasoning(serve, template):
    async with serve(chat_template=template, reasoning_parser="qwen3") as server:
        server.script.pieces = ["<think>use <tool_call>", "?</think>", "\n", *CALLS[1:]]
        answer = await server.client.chat.completions.create(model="byte", messages=HI, tools=[WEATHER, NOW])
        message = answer.choices[0].message
        assert message.reasoning_content == "use <tool_call>?"
        assert message.content == "look."
        assert [call.function.name for call in message.tool_calls] == ["weather", "now"]


async def test_tool_choice_none_hides_the_tools(serve, template):
    async with serve(chat_template=template) as server:
        server.script.pieces = CALLS
        answer = await server.client.chat.completions.create(
            model="byte", messages=HI, tools=[WEATHER], tool_choice="none"
        )
        assert answer.choices[0].message.content == "".join(CALLS)
        assert answer.choices[0].finish_reason == "stop"
        prompt = server.tokenizer.decode(server.link.sent[0].input_ids, skip_special_tokens=False)
        assert "weather" not in prompt


async def test_history_with_calls_and_answers(serve, template):
    async with serve(chat_template=template) as server:
        call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        await server.client.chat.completions.create(
            model="byte",
            tools=[NOW],
            messages=[
                *HI,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
            ],
        )
        prompt = server.tokenizer.decode(server.link.sent[0].input_ids, skip_special_tokens=False)
        assert (
            '<tool_call>{"arguments": {}, "name": "now"}</tool_call>' in prompt or '"name": "now"' in prompt
        )
        assert "<|im_start|>tool\nnoon" in prompt


async def test_an_empty_answer_and_an_empty_result_can_be_put_back(serve, template):
    async with serve(chat_template=template, reasoning_parser="qwen3") as server:
        create = server.client.chat.completions.create
        server.script.pieces = []
        answer = (await create(model="byte", messages=HI)).choices[0].message
        assert (answer.content, answer.reasoning_content) == (None, None)
        server.script.pieces = CALLS
        call = (await create(model="byte", messages=HI, tools=[WEATHER, NOW])).choices[0].message
        result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": None}
        await create(model="byte", messages=[*HI, answer, *HI, call, result], tools=[WEATHER, NOW])
        prompt = server.tokenizer.decode(server.link.sent[-1].input_ids, skip_special_tokens=False)
        assert "<|im_start|>assistant\n<|im_end|>" in prompt and "<|im_start|>tool\n<|im_end|>" in prompt
        call = {"type": "function_call", "call_id": "a", "name": "now", "arguments": '{"cut'}
        result = {"type": "function_call_output", "call_id": "a", "output": None}
        await server.client.responses.create(model="byte", input=[*HI, call, result])
        prompt = server.tokenizer.decode(server.link.sent[-1].input_ids, skip_special_tokens=False)
        assert "<|im_start|>tool\n<|im_end|>" in prompt and '{\\"cut' in prompt


async def test_the_flag_names_the_form_where_the_template_does_not_show_it(serve, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ tools | tojson }}{{ messages[0].content }}")
    async with serve(chat_template=str(path), tool_call_parser="pythonic") as server:
        server.script.pieces = ["[now", "()]"]
        answer = await server.client.chat.completions.create(model="byte", messages=HI, tools=[NOW])
        assert answer.choices[0].message.tool_calls[0].function.name == "now"
        assert not server.link.sent[0].sampling_params.skip_special_tokens  # its marks may be special tokens
    async with serve(chat_template=str(path)) as server:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            await server.client.chat.completions.create(model="byte", messages=HI, tools=[NOW])
        assert not server.link.sent


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_must_be_is_read_from_what_the_grammar_allows(serve, template, stream):
    async with serve(chat_template=template) as server:
        server.script.pieces = ['[{"name": "now", "par', 'ameters": {}}', "]"]
        answer = await server.client.chat.completions.create(
            model="byte", messages=HI, tools=[WEATHER, NOW], stream=stream,
            tool_choice={"type": "function", "function": {"name": "now"}},
        )  # fmt: skip
        if stream:
            choices = [chunk.choices[0] async for chunk in answer]
            calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
            assert "".join(call.function.arguments for call in calls) == "{}"
            reason = choices[-1].finish_reason
        else:
            calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
            assert answer.choices[0].message.content is None
        assert calls[0].function.name == "now" and reason == "tool_calls"
        assert server.link.sent[0].grammar > 0
        await server.client.chat.completions.create(model="byte", messages=HI, tools=[NOW])
        assert server.link.sent[1].grammar == 0


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}


async def test_arguments_of_strict_functions_follow_their_schemas_among_other_text(serve, template):
    async with serve(chat_template=template) as server:
        server.script.pieces = CALLS
        create = server.client.chat.completions.create
        answer = await create(model="byte", messages=HI, tools=[STRICT, NOW])
        assert answer.choices[0].message.content == "Let me look."
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather", "now"]
        await create(model="byte", messages=HI, tools=[WEATHER, NOW])
        await create(model="byte", messages=HI, tools=[STRICT], tool_choice="none")
        assert [bool(message.grammar) for message in server.link.sent] == [True, False, False]
        with pytest.raises(openai.BadRequestError, match="no way to call its tools"):
            await create(model="byte", messages=HI, tools=[STRICT], response_format={"type": "json_object"})


@pytest.mark.parametrize("parser", ["pythonic", "llama3", "mistral", "deepseekv3", "qwen3_coder"])
async def test_strict_functions_are_refused_where_no_text_tells_that_a_call_begins(serve, template, parser):
    async with serve(chat_template=template, tool_call_parser=parser) as server:
        create = server.client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="no text tells for certain"):
            await create(model="byte", messages=HI, tools=[STRICT])
        assert not server.link.sent


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("No call.", True),
        ('See: <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": 7}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "free", "arguments": {"any": [1]}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "free", "arguments": 1}\n</tool_call>', False),
        ("<tool_call>weather", False),
        (2 * '<tool_call>\n{"name": "free", "arguments": {}}\n</tool_call>', None),
        ('<tool_call>\n{"name": "free", "arguments": {%s}}\n</tool_call>' % (3 * " "), False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("parallel", [True, False])
def test_what_an_answer_with_strict_functions_may_be(text, fits, parallel):
    free = {"type": "function", "function": {"name": "free"}}
    body = ChatBody.model_validate(
        {"messages": HI, "tools": [STRICT, free], "parallel_tool_calls": parallel, "model": ""}
    )
    texts = TOOL_CALL_FORMATS["qwen25"].texts
    assert texts is not None
    spec = calls_tag(body, texts)
    assert spec is not None
    pieces = [bytes([byte]) for byte in range(256)] + [b""]
    vocabulary = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    data = compile_grammar(vocabulary, spec, 2)
    matcher = xgrammar.GrammarMatcher(xgrammar.CompiledGrammar.deserialize_json(data.decode(), vocabulary))
    accepted = matcher.accept_string(text) and matcher.accept_token(256)
    assert accepted == (parallel if fits is None else fits)


async def test_a_template_without_tools_refuses_them(serve):
    async with serve(tool_call_parser="qwen25") as server:
        with pytest.raises(openai.BadRequestError, match="the chat template has no place for them"):
            await server.client.chat.completions.create(model="byte", messages=HI, tools=[NOW])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function: this field is required"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, r"tools\[0\].function.name"),
        ({"tools": [NOW] * 129}, "at most 128"),
        ({"tools": [{**NOW, "function": {"name": "f", "description": "x" * (1 << 18)}}]}, "256 KiB"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice must be"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "gone"}}}, "not among the tools"),
        ({"tool_choice": "required"}, "only allowed with tools"),
        ({"tools": [NOW], "response_format": {"type": "json_object"}}, "no way to call its tools"),
    ],
)  # fmt: skip
async def test_what_is_refused(serve, template, fields, words):
    async with serve(chat_template=template) as server:
        with pytest.raises(openai.BadRequestError, match=words):
            await server.client.chat.completions.create(model="byte", messages=HI, **fields)
        assert not server.link.sent


async def test_a_schema_nested_too_deeply_is_refused(serve, template):
    nested = '{"properties": {"a": ' * 450 + "{}" + "}}" * 450
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {nested}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "tools": [{tool}]}}'
    async with serve(chat_template=template) as server, httpx.AsyncClient() as client:
        url = f"{server.client.base_url}chat/completions"
        answer = await client.post(url, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert not server.link.sent
