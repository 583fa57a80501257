"""Tools over /v1/chat/completions, as the openai client sees them: what the model is told, what it calls, what is
refused."""

from __future__ import annotations

import json
from functools import cache

import httpx
import openai
import pytest
import xgrammar
from tokenizers import AddedToken

from fenceline.constrained.compile import compile_grammar
from fenceline.constrained.spec import GrammarSpec, ThinkTokens
from fenceline.entrypoints.openai.parsing import answer_grammar, call_or, calls_tag
from fenceline.entrypoints.openai.protocol import ChatBody
from fenceline.entrypoints.openai.tool_call_parser import TOOL_CALL_FORMATS
from fenceline.frontend.tokenizer import Tokenizer, load_tokenizer
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
        assert [(name, "".join(parts)) for _, name, parts in calls] == [("weather", '{"city": "Paris"}'), ("now", "{}")]
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


async def test_tools_of_other_kinds_are_left_out(serve, template, caplog):
    async with serve(chat_template=template) as server:
        others = [{"type": "custom", "custom": {"name": "x"}}, {"type": "web_search"}]
        await server.client.chat.completions.create(model="byte", messages=HI, tools=[others[0], WEATHER])
        prompt = server.tokenizer.decode(server.link.sent[0].input_ids, skip_special_tokens=False)
        assert "weather" in prompt and "custom" not in prompt
        await server.client.chat.completions.create(model="byte", messages=HI, tools=others)
    told = [record.getMessage() for record in caplog.records if "is left out here" in record.getMessage()]
    assert sorted(told) == [
        f"A request has a tool of type '{kind}', which is left out here" for kind in ("custom", "web_search")
    ]


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
        assert '<tool_call>{"arguments": {}, "name": "now"}</tool_call>' in prompt or '"name": "now"' in prompt
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


async def test_the_flag_names_the_form_that_the_template_hides(serve, tmp_path):
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


@pytest.mark.parametrize(
    ("names", "written"),
    [
        (("qwen", "deepseek_r1"), 'so</think><tool_call>{"name": "now", "arguments": {}}</tool_call>'),
        (("glm", "glm47"), "<think>so</think><tool_call>now</tool_call>"),
        (("minimax_m2", "minimax_m2"), '<think>so</think><minimax:tool_call><invoke name="now"></invoke>'),
        (("openai", None), "<|channel|>analysis<|message|>so<|end|><|start|>assistant to=functions.now<|channel|>"
         "commentary json<|message|>{}"),
    ],
)  # fmt: skip
async def test_names_of_other_servers_for_parsers(serve, template, names, written):
    async with serve(chat_template=template, tool_call_parser=names[0], reasoning_parser=names[1]) as server:
        server.script.pieces = list(written)
        answer = await server.client.chat.completions.create(model="byte", messages=HI, tools=[NOW])
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("so", None)
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("now", "{}")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_is_read_from_what_the_grammar_allows(serve, template, stream):
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


async def test_arguments_of_strict_functions_follow_their_schemas(serve, template):
    async with serve(chat_template=template) as server:
        server.script.pieces = CALLS
        create = server.client.chat.completions.create
        answer = await create(model="byte", messages=HI, tools=[STRICT, NOW])
        assert answer.choices[0].message.content == "Let me look."
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather", "now"]
        await create(model="byte", messages=HI, tools=[WEATHER, NOW])
        await create(model="byte", messages=HI, tools=[STRICT], tool_choice="none")
        assert [bool(message.grammar) for message in server.link.sent] == [True, False, False]


@pytest.mark.parametrize("parser", ["pythonic", "llama3", "mistral", "deepseekv3", "qwen3_coder", "gpt-oss"])
async def test_strict_functions_are_as_others_where_no_text_marks_one(serve, template, parser, caplog):
    """openai-agents makes every function strict. The log says once what is not enforced."""
    async with serve(chat_template=template, tool_call_parser=parser) as server:
        create = server.client.chat.completions.create
        for _ in range(2):
            await create(model="byte", messages=HI, tools=[STRICT])
        assert [message.grammar > 0 for message in server.link.sent] == [False, False]
    assert [record.message for record in caplog.records if "strict true" in record.message] == [
        "A request has functions with strict true. Their schemas are not enforced where the model may answer with text "
        "too, because no text tells for certain that JSON arguments begin in this model's calls; with tool_choice "
        "'required' or the name of a function they are"
    ]


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
    assert allows(calls_tag(body, texts), text) == (parallel if fits is None else fits)


@cache
def compiled(spec: GrammarSpec) -> xgrammar.CompiledGrammar:
    pieces = [bytes([byte]) for byte in range(256)] + [b""]
    vocabulary = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    return xgrammar.CompiledGrammar.deserialize_json(compile_grammar(vocabulary, spec, 2).decode(), vocabulary)


def allows(spec: GrammarSpec | None, text: str) -> bool:
    """Whether ``text`` is an answer of the form ``spec``."""
    assert spec is not None
    matcher = xgrammar.GrammarMatcher(compiled(spec))
    return bool(matcher.accept_string(text)) and bool(matcher.accept_token(256))


SUM = {
    "type": "json_schema",
    "json_schema": {
        "name": "sum",
        "schema": {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]},
    },
}
CALLED = {
    "qwen25": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n"
    "</seed:tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
    "deepseekv3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "pythonic": '[weather(city="Rome")]',
    "olmo3": '<function_calls>weather(city="Rome")</function_calls>',
    "llama3": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]',
}


@pytest.mark.parametrize("parser", CALLED)
def test_tools_and_a_format_mean_a_call_or_the_format(parser):
    """As openai-agents asks with output_type: of each way to write calls that has no special tokens."""
    form = TOOL_CALL_FORMATS[parser]
    body = ChatBody.model_validate({"messages": HI, "tools": [STRICT], "response_format": SUM, "model": ""})
    asked = answer_grammar(body)
    assert asked is not None
    spec = call_or(asked, body, form.texts, [begin.replace("NAME", "weather") for begin in form.begins])
    assert allows(spec, CALLED[parser])
    assert allows(spec, '{"sum": 42}')
    for text in ("Let me see.", '{"sum": "x"}', '{"sum": 42} ' + CALLED[parser], ""):
        assert not allows(spec, text), text
    if form.texts is not None:
        assert allows(spec, CALLED[parser] + "\n" + CALLED[parser])
        assert not allows(spec, CALLED[parser].replace("city", "town"))


@pytest.mark.parametrize(
    ("fields", "yes", "no"),
    [
        ({"response_format": {"type": "json_object"}}, "{}", "[]"),
        ({"regex": "[0-9]+"}, "12", "x"),
        ({"ebnf": 'root ::= "ab"'}, "ab", "ba"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}},
         "yes", "no"),
    ],
)  # fmt: skip
def test_a_call_may_stand_in_place_of_every_kind_of_form(fields, yes, no):
    body = ChatBody.model_validate({"messages": HI, "tools": [NOW], "model": "", **fields})
    spec = call_or(answer_grammar(body), body, TOOL_CALL_FORMATS["qwen25"].texts, ())
    assert allows(spec, yes) and not allows(spec, no)
    assert allows(spec, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')


async def test_tools_and_a_format_give_a_call_or_the_format(serve, template):
    async with serve(chat_template=template) as server:
        server.script.pieces = CALLS[1:]
        ask = {"model": "byte", "messages": HI, "tools": [WEATHER, NOW], "response_format": {"type": "json_object"}}
        answer = await server.client.chat.completions.create(**ask)
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather", "now"]
        server.script.pieces = ["{", "}"]
        answer = await server.client.chat.completions.create(**ask)
        assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("{}", None)
        assert all(message.grammar for message in server.link.sent)


async def test_a_special_token_begins_a_call_in_place_of_the_format(serve, template, model_dir):
    backend = load_tokenizer(model_dir).backend
    backend.add_tokens([AddedToken(mark, special=True) for mark in ("[TOOL_CALLS]", "<think>", "</think>")])
    flags = {"chat_template": template, "tool_call_parser": "mistral"}
    mark, start, end = (backend.token_to_id(text) for text in ("[TOOL_CALLS]", "<think>", "</think>"))
    for reasoning, expected in (
        (None, ThinkTokens(-1, (), False, calls=(mark,))),
        ("qwen3", ThinkTokens(start, (end,), False, calls=(mark,))),
    ):
        async with serve(Tokenizer(backend), **flags, reasoning_parser=reasoning) as server:
            create = server.client.chat.completions.create
            server.script.pieces = ['[TOOL_CALLS]now[ARGS]{"x": 1}']
            answer = await create(model="byte", messages=HI, tools=[NOW], response_format=SUM)
            assert answer.choices[0].message.tool_calls[0].function.arguments == '{"x": 1}'
            await create(model="byte", messages=HI, response_format=SUM)
            await create(model="byte", messages=HI, response_format=SUM, tools=[NOW], tool_choice="none")
            [first, *others] = [message.think for message in server.link.sent]
            assert first == expected
            assert all(think is None or think.calls == () for think in others)


async def test_a_template_that_shows_no_calls_can_be_made_to_call(serve):
    """As of the demo: the grammar makes the model write a JSON call."""
    async with serve() as server:
        server.script.pieces = ['[{"name": "now", "parameters": {}}]']
        create = server.client.chat.completions.create
        for choice in ("required", {"type": "function", "function": {"name": "now"}}):
            answer = await create(model="byte", messages=HI, tools=[WEATHER, NOW], tool_choice=choice)
            assert answer.choices[0].finish_reason == "tool_calls"
            assert answer.choices[0].message.tool_calls[0].function.name == "now"
        assert all(message.grammar for message in server.link.sent)
        with pytest.raises(openai.BadRequestError, match="'required' or a function"):
            await create(model="byte", messages=HI, tools=[NOW])


async def test_a_template_without_tools_refuses_them(serve):
    async with serve(tool_call_parser="qwen25") as server:
        with pytest.raises(openai.BadRequestError, match="the chat template has no place for them"):
            await server.client.chat.completions.create(model="byte", messages=HI, tools=[NOW])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": 5}]}, r"tools\[0\].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "only allowed with tools"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function: this field is required"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, r"tools\[0\].function.name"),
        ({"tools": [NOW] * 129}, "at most 128"),
        ({"tools": [{**NOW, "function": {"name": "f", "description": "x" * (1 << 18)}}]}, "256 KiB"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice must be"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "gone"}}}, "not among the tools"),
        ({"tool_choice": "required"}, "only allowed with tools"),
        ({"tools": [NOW], "response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
         "no way to call its tools"),
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
