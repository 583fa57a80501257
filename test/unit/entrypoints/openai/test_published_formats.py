"""Each model's own way: its chat template with calls and answers in the history, and its calls, cut at every byte,
alone and after a thought."""

from __future__ import annotations

import codecs
import json
import re
from functools import cache
from typing import Any

import msgspec
import pytest
from published_formats import ARGUMENTS, CALLS, NOW, PUBLISHED, WEATHER, Published
from tokenizers import AddedToken

from fenceline.entrypoints.openai.chat_reader import ChatReader
from fenceline.entrypoints.openai.chat_template import ChatTemplate
from fenceline.entrypoints.openai.reasoning_parser import REASONING_FORMATS, ReasoningParser
from fenceline.entrypoints.openai.tool_call_parser import (
    TOOL_CALL_FORMATS,
    Arguments,
    CallBegun,
    Content,
    Reasoning,
    ToolCallParser,
)
from fenceline.frontend.request_types import GenerateChunk
from fenceline.frontend.tokenizer import Tokenizer, load_tokenizer
from fenceline.ipc.io_struct import FinishReason

TOOLS = {tool["function"]["name"]: tool["function"] for tool in (WEATHER, NOW)}
IDS = ("a1B2c3D4e", "123456789")
names = pytest.mark.parametrize("name", PUBLISHED)


@cache  # it is compiled and tried out, which takes longer than most tests
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(PUBLISHED[name].template, PUBLISHED[name].special_tokens)


def history(model: Published, ids: tuple[str, str], **assistant: Any) -> list[dict[str, Any]]:
    """A question, CALLS as the OpenAI client sends them back, and what the tools answered."""
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(value, ensure_ascii=False)}}
        for id, (name, value) in zip(ids, CALLS, strict=True)
    ]  # fmt: skip
    answers = [
        {"role": "tool", "tool_call_id": id, "content": text} for id, text in zip(ids, ("rain", "noon"), strict=True)
    ]
    called = {"role": "assistant", "content": None, "tool_calls": calls[: model.num_calls], **assistant}
    return [{"role": "user", "content": "And?"}, called, *answers[: model.num_calls]]


def expected(model: Published, ids: tuple[str, str]) -> str:
    text = model.history.replace("WRITTEN", model.written)
    return text.replace("ID1", ids[0]).replace("ID2", ids[1])


def pieces(data: bytes, *cuts: int) -> list[str]:
    """``data`` cut at these bytes, as the detokenizer passes text on: never half a character."""
    decoder, edges = codecs.getincrementaldecoder("utf-8")(), (0, *cuts, len(data))
    return [decoder.decode(data[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def read(model: Published, texts: list[str], inside: bool | None = None) -> tuple[str, str, list[tuple[str, str]]]:
    """The reasoning, the content, and the calls with the text of their arguments. ``inside``: the answer begins within
    a thought; None for a server without --reasoning-parser."""
    calls = ToolCallParser(TOOL_CALL_FORMATS[model.parser], TOOLS)
    thought = None if inside is None else ReasoningParser(REASONING_FORMATS[model.thinks], inside)
    reader = ChatReader(thought, calls, one_call=False)
    if TOOL_CALL_FORMATS[model.parser].reads_reasoning:
        reader = ChatReader(calls, None, one_call=False, separates_reasoning=inside is not None)
    return collect(reader, texts)


def collect(reader: ChatReader, texts: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """The reasoning, the content and the calls of an answer that comes as ``texts``."""
    reasoning, content, found = "", "", []
    for index, text in enumerate(texts):
        finish = FinishReason(type="stop") if index == len(texts) - 1 else None
        for piece in reader.read(chunk(text, finish)):
            match piece:
                case Reasoning(text):
                    reasoning += text
                case Content(text):
                    content += text
                case CallBegun(name):
                    found.append((name, ""))
                case Arguments(text):
                    found[-1] = (found[-1][0], found[-1][1] + text)
    return reasoning, content, found


def chunk(text: str, finish: FinishReason | None) -> GenerateChunk:
    return GenerateChunk(
        rid="r", text=text, output_ids=[], prompt_tokens=1, completion_tokens=1, cached_tokens=0,
        finish_reason=finish, e2e_latency=0.0,
    )  # fmt: skip


@names
@pytest.mark.parametrize("content", [None, "", "left out"])
def test_a_history_is_written_as_by_the_published_template(name, content):
    model = PUBLISHED[name]
    messages = history(model, IDS, content=content)
    if content == "left out":
        del messages[1]["content"]
    template = template_of(name)
    assert template.render(messages) == expected(model, IDS)


@names
def test_the_template_tells_the_format_and_takes_tools(name):
    model = PUBLISHED[name]
    template = template_of(name)
    shown = "deepseekv3" if model.parser == "deepseekv31" else model.parser
    assert template.has_tools and template.tool_call_format == shown
    assert "weather" in template.render([{"role": "user", "content": "And?"}], tools=[WEATHER, NOW])


@names
def test_calls_are_the_same_cut_at_every_byte(name):
    model = PUBLISHED[name]
    data = model.written.encode()
    whole = read(model, [model.written])
    found = [(called, json.loads(arguments)) for called, arguments in whole[2]]
    assert (whole[:2], found) == (("", ""), CALLS[: model.num_calls])
    for cut in range(1, len(data)):
        assert read(model, pieces(data, cut)) == whole, cut
    assert read(model, pieces(data, *range(1, len(data)))) == whole


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "gpt-oss"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_thought_in_front_is_cut_off_at_every_byte(name, inside):
    """It may speak of calls in their own words. A pythonic or Llama call has to be all of the answer, and the thought
    is no part of it."""
    model = PUBLISHED[name]
    thought = f"Zürich? {model.written[:40]} or not"
    form = REASONING_FORMATS[model.thinks]
    text = f"{'' if inside else form.start}\n{thought}\n{form.end}\n\n{model.written}"
    whole = read(model, [text], inside)
    assert whole == (thought, "", read(model, [model.written])[2])
    data = text.encode()
    for cut in range(1, data.index(form.end.encode()) + len(form.end) + 20):  # the rest is cut above
        assert read(model, pieces(data, cut), inside) == whole, cut
    assert read(model, pieces(data, *range(1, len(data))), inside) == whole


ONE, TWO = "first words", "second words"


def with_content(kind: str, content: object) -> list[dict[str, Any]]:
    """A conversation in which a message of ``kind`` has ``content``."""
    question, answer = {"role": "user", "content": "And?"}, {"role": "assistant", "content": "So."}
    if kind in ("tool", "calls"):
        messages = history(Published("", "", "", "", "", num_calls=1), IDS)
        messages[{"calls": 1, "tool": 2}[kind]]["content"] = content
        return messages
    return {
        "system": [{"role": "system", "content": content}, question],
        "user": [{**question, "content": content}],
        "late user": [question, answer, {**question, "content": content}],
        "assistant": [question, {**answer, "content": content}, question],
    }[kind]


@names
@pytest.mark.parametrize("tools", [[], [WEATHER]])
@pytest.mark.parametrize("kind", ["system", "user", "late user", "assistant", "calls", "tool"])
def test_text_parts_are_text_in_every_branch_of_a_template(name, kind, tools):
    """One part is shown as a string is, and the second is not lost where the string would be shown."""
    template = template_of(name)
    one, two = ({"type": "text", "text": text} for text in (ONE, TWO))
    plain = template.render(with_content(kind, ONE), tools=tools)
    assert template.render(with_content(kind, [one]), tools=tools) == plain
    text = template.render(with_content(kind, [one, two]), tools=tools)
    assert text.count(TWO) == plain.count(ONE)
    # Some branches concatenate the parts, others get them as lines.
    assert "".join(re.split(r"\s|\\n", text.replace(TWO, ""))) == "".join(re.split(r"\s|\\n", plain))


@names
@pytest.mark.parametrize("tools", [[], [WEATHER]])
def test_no_system_message_is_lost_or_refused(name, tools):
    """Instructions and a developer message, as Codex sends them, and one in the middle, as Claude Code does."""
    template = template_of(name)
    first, second = ({"role": "system", "content": text} for text in (ONE, TWO))
    question, answer = {"role": "user", "content": "And?"}, {"role": "assistant", "content": "So."}
    text = template.render([first, second, question], tools=tools)
    assert text.index(ONE) < text.index(TWO) < text.index("And?")
    parts = {"role": "system", "content": [{"type": "text", "text": TWO}]}
    assert template.render([first, parts, question], tools=tools) == text
    for turns in ([question, answer, second, question], [question, second, answer, question], [question, second]):
        text = template.render([first, *turns], tools=tools)
        assert ONE in text and TWO in text and text.count("And?") == turns.count(question)


@names
@pytest.mark.parametrize("sent", ['{"city": "Par', "print(1)", "[1]", ""])
def test_a_call_that_was_cut_off_can_stay_in_the_history(name, sent):
    template = template_of(name)
    messages = history(Published("", "", "", "", "", num_calls=1), IDS)
    messages[1]["tool_calls"][0]["function"]["arguments"] = sent
    turns = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "Again."}]
    text = template.render([*messages, *turns], tools=[WEATHER])
    assert "weather" in text and "rain" in text and "Again." in text
    if sent in ('{"city": "Par', "print(1)"):
        assert sent.removeprefix('{"city": "') in text


@names
@pytest.mark.parametrize("sent", [None, {}, {"city": "Paris"}])
def test_arguments_may_be_an_object_or_null(name, sent):
    """As a few clients send them; the same as in JSON."""
    template = template_of(name)
    texts = []
    for arguments in (sent, json.dumps(sent or {})):
        messages = history(Published("", "", "", "", "", num_calls=1), IDS)
        messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
        texts.append(template.render(messages))
    assert texts[0] == texts[1]


@names
def test_a_tool_needs_no_parameters_and_no_description(name):
    template = template_of(name)
    for parameters in ({}, {"parameters": {"type": "object"}}, {"parameters": {}}):
        tool = {"type": "function", "function": {"name": "now", **parameters}}
        assert "now" in template.render([{"role": "user", "content": "And?"}], tools=[tool])


def harmony(text: str, tools: bool = True, cut: int | None = None) -> tuple[str, str, list[tuple[str, str]]]:
    """What gpt-oss's answer ``text`` is read as; ``cut``: in pieces of so many bytes."""
    data = text.encode()
    texts = [text] if cut is None else pieces(data, *range(cut, len(data), cut))
    calls = ToolCallParser(TOOL_CALL_FORMATS["gpt-oss"], TOOLS if tools else {})
    return collect(ChatReader(calls, None, one_call=False, separates_reasoning=True), texts)


ANALYSIS = "<|channel|>analysis<|message|>Zürich?\n\n1 < 2 <|x<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>Rain é."
HARMONY = [
    (ANALYSIS + NEXT + FINAL, "Zürich?\n\n1 < 2 <|x", "Rain é.", []),
    (ANALYSIS + NEXT + FINAL + "<|return|>", "Zürich?\n\n1 < 2 <|x", "Rain é.", []),
    (FINAL + "<|return|>", "", "Rain é.", []),
    ("<|channel|>analysis<|message|>a<|end|>" + NEXT + "<|channel|>analysis<|message|>b<|end|>" + NEXT + FINAL,
     "a\n\nb", "Rain é.", []),
    # a preamble, and the recipient in front of the channel or behind it
    (NEXT + "<|channel|>commentary<|message|>Let me see.<|end|>" + NEXT
     + ' to=functions.now<|channel|>commentary json<|message|>{"x": "<|end"}<|call|>', "", "Let me see.",
     [("now", '{"x": "<|end"}')]),
    ('<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"x": 1}<|call|>', "", "",
     [("now", '{"x": 1}')]),
    ('<|channel|>commentary to=functions.now<|constrain|>json<|message|>{"x": 1}', "", "", [("now", '{"x": 1}')]),
    ("<|channel|>commentary to=now json<|message|>{}", "", "", [("now", "{}")]),
    ('<|channel|>analysis to=functions.now code<|message|>{"x": 1}<|call|>', "", "", [("now", '{"x": 1}')]),
    ("<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>", "", "", [("now", "{}")]),
    ("<|channel|>commentary to=functions.now <|constrain|>json<|message|>", "", "", [("now", "{}")]),
    ("<|channel|>commentary to=functions.now code<|message|>print(1)<|call|>", "", "", [("now", "print(1)")]),
    ('<|channel|>commentary to=functions.gone json<|message|>{"x"', "", "", [("gone", '{"x"')]),
    # the first message, which begins with its recipient
    (' to=functions.now<|channel|>commentary json<|message|>{"x": 1}<|call|>', "", "", [("now", '{"x": 1}')]),
    ('to=functions.now code<|message|>{"x": 1}', "", "", [("now", '{"x": 1}')]),
    (" \nto=functions.now<|channel|>comm", "", "", []),
    # and what only looks like one
    (" to=functions.now", "", " to=functions.now", []),
    (" to be <|return|>", "", " to be", []),
    (" to=x<|return|>", "", " to=x", []),
    (" t", "", " t", []),
    ("to=" + "x" * 400 + "<|channel|>final<|message|>a", "", "to=" + "x" * 400 + "\n\na", []),
    ("to=x<|channel|>" + "x" * 400, "", "to=x<|channel|>" + "x" * 400, []),
    ("<|channel|>final" + "x" * 400 + "<|message|>a", "", "<|channel|>final" + "x" * 400 + "\n\na", []),
    # no call: a recipient that is no function of the client
    ('<|channel|>commentary to=browser.search code<|message|>{"q": 1}<|call|>', "", '{"q": 1}', []),
    ('<|channel|>analysis to=python code<|message|>1 + 1<|call|>', "1 + 1", "", []),
    # cut off by the limit of tokens
    ("<|channel|>analysis<|message|>so", "so", "", []),
    ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>fi", "so", "", []),
    # without headers, as an answer that is continued; and what is none
    ("Rain.", "", "Rain.", []),
    ("Rain. <|return|>", "", "Rain.", []),
    ("<|channel|>" + "x" * 400, "", "<|channel|>" + "x" * 400, []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), HARMONY)
def test_harmony_messages_cut_at_every_byte(text, reasoning, content, calls):
    assert harmony(text) == (reasoning, content, calls)
    for size in (1, 2, 3, 5, 7):
        assert harmony(text, cut=size) == (reasoning, content, calls)
    data = text.encode()
    for at in range(1, len(data)):
        parser = ToolCallParser(TOOL_CALL_FORMATS["gpt-oss"], TOOLS)
        found = [event for piece in pieces(data, at) for event in parser.feed(piece)] + parser.finish()
        assert "".join(event.text for event in found if isinstance(event, Content)) == content
        assert "".join(event.text for event in found if isinstance(event, Arguments)) == "".join(a for _, a in calls)


def test_harmony_calls_of_a_client_without_tools_are_content():
    text = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"x": 1}'
    assert harmony(text, tools=False) == ("", '{"x": 1}', [])


def test_harmony_text_arrives_as_it_is_written_at_the_same_cost():
    parser = ToolCallParser(TOOL_CALL_FORMATS["gpt-oss"], TOOLS)
    assert parser.feed("<|channel|>analysis<|message|>so ") == [Reasoning("so")]
    assert parser.feed("it <") == [Reasoning(" it")]
    assert parser.feed("b") == [Reasoning(" <b")]
    assert parser.feed("<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>") == [
        CallBegun("now")
    ]
    assert parser.feed('{"x": "Par') == [Arguments('{"x": "Par')]
    for begin, piece in (("analysis", "\n "), ("analysis", "a "), ("commentary to=functions.now", '{"a":1} ')):
        parser, work = ToolCallParser(TOOL_CALL_FORMATS["gpt-oss"], TOOLS), 0
        parser.feed(f"<|channel|>{begin}<|message|>")
        for _ in range(10_000):
            work += len(parser._source.text) + len(piece)
            parser.feed(piece)
        assert work < 200_000, begin


async def test_harmony_is_taken_apart_unless_wanted_whole(serve, tmp_path):
    """The template tells the form; a client without tools gets reasoning and answer, too."""
    model = PUBLISHED["gpt-oss"]
    path = tmp_path / "template.jinja"
    path.write_text(model.template)
    async with serve(chat_template=str(path)) as server:
        create = server.client.chat.completions.create
        ask = {"model": "byte", "messages": [{"role": "user", "content": "And?"}]}
        server.script.pieces = [*model.thought, *FINAL]
        [choice] = (await create(**ask)).choices
        assert (choice.message.reasoning_content, choice.message.content) == ("so", "Rain é.")
        assert not server.link.sent[-1].sampling_params.skip_special_tokens
        [choice] = (await create(**ask, extra_body={"separate_reasoning": False})).choices
        assert choice.message.content == model.thought + FINAL
        # Without the marks its parts would run into each other.
        assert not server.link.sent[-1].sampling_params.skip_special_tokens
        [choice] = (await create(**ask, tools=[NOW], extra_body={"separate_reasoning": False})).choices
        assert choice.message.content == "soRain é."
        server.script.pieces = [*model.thought, *'<|channel|>final<|message|>[{"name": "now", "parameters": {}}]']
        [choice] = (await create(**ask, tools=[NOW], tool_choice="required")).choices
        assert [call.function.name for call in choice.message.tool_calls] == ["now"]
        assert choice.message.reasoning_content == "so"
        # The grammar begins with the text of an answer's message, or a call's.
        think = server.link.sent[-1].think
        assert think.is_open and server.tokenizer.decode(list(think.end)) == "<|channel|>final"
        assert [server.tokenizer.decode(list(end)) for end in think.or_end] == ["<|channel|>commentary"]
        assert server.tokenizer.decode(list(think.header_end)) == "<|message|>"
        server.script.pieces = [
            *model.thought,
            *'<|channel|>commentary to=functions.now <|constrain|>json<|message|>[{"name": "now", "parameters": {}}]',
        ]
        [choice] = (await create(**ask, tools=[NOW], tool_choice="required")).choices
        assert [call.function.name for call in choice.message.tool_calls] == ["now"]
        await create(**ask, response_format={"type": "json_object"})
        think = server.link.sent[-1].think
        assert think.or_end == () and not think.may_end  # a preamble is no answer
        server.script.pieces = ['<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"x": 1}']
        [choice] = (await create(**ask, tools=[NOW], response_format={"type": "json_object"})).choices
        assert choice.message.tool_calls[0].function.arguments == '{"x": 1}'
        assert server.link.sent[-1].think == msgspec.structs.replace(think, may_end=True)


def test_a_gpt_oss_template_gets_what_it_takes():
    """Calls one by one, a description of each tool, and one thought in front of a call."""
    model = PUBLISHED["gpt-oss"]
    template = ChatTemplate(model.template, model.special_tokens)
    messages = history(Published("gpt-oss", "", "", "", ""), ("a", "b"))
    text = template.render([*messages, *history(Published("gpt-oss", "", "", "", ""), ("b", "a"))])
    turn = [
        f"to=functions.weather<|channel|>commentary json<|message|>{json.dumps(ARGUMENTS, ensure_ascii=False)}<|call|>"
    ]
    turn += ['<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>']
    turn += ["to=functions.now<|channel|>commentary json<|message|>{}<|call|>"]
    turn += ['<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|>']
    for part in 2 * turn:
        _, found, text = text.partition(part)
        assert found
    messages = history(model, ("a", "b"), content="Let me see.", reasoning_content="so")
    text = template.render(messages, tools=[NOW])
    assert "<|start|>assistant<|channel|>analysis<|message|>so\n\nLet me see.<|end|>" in text
    assert "// \ntype now" in text


def test_what_gpt_oss_s_template_lacks_stays_in_other_prompts():
    """A template that cannot do without a tool's description gets an empty one, but no conversation whose text has
    become a thought, which it leaves out."""
    source = (
        "{% for tool in tools or [] %}{{ 'T: ' + tool.function.description }}{% endfor %}"
        "{% for message in messages %}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    messages = history(Published("", "", "", "", ""), IDS, content="Let me see.", reasoning_content="so")
    described = {"type": "function", "function": {"name": "now", "description": "The time."}}
    text = ChatTemplate(source, {}).render(messages, tools=[described])
    assert text.startswith("T: The time.And?Let me see.{")
    bare = {"type": "function", "function": {"name": "now"}}
    text = ChatTemplate(source, {}).render(messages, tools=[bare])
    assert text.startswith("T: And?Let me see.{")


def test_a_gpt_oss_template_says_why_it_refuses_with_tools():
    source = (
        "{# <|channel|> #}{{ 'T: ' + tools[0].function.description }}"
        "{{ raise_exception('two thoughts') if messages[0].content == 'x' }}{{ messages[0].content }}"
    )
    tools = [{"type": "function", "function": {"name": "now"}}]
    template = ChatTemplate(source, {})
    assert template.render([{"role": "user", "content": "And?"}], tools=tools) == "T: And?"
    with pytest.raises(ValueError, match="two thoughts"):
        template.render([{"role": "user", "content": "x"}], tools=tools)


def test_granite_s_templates_get_tools_under_their_name():
    model = PUBLISHED["Granite 3.2"]
    template = ChatTemplate(model.template, model.special_tokens)
    ask = [{"role": "user", "content": "And?"}]
    assert "weather" in template.render(ask, tools=[WEATHER])
    text = template.render(ask, tools=[WEATHER], variables={"available_tools": [NOW]})
    assert "weather" not in text and "now" in text


def test_a_mistral_template_gets_ids_that_it_takes():
    foreign = ("call_0123456789abcdefABCDEFGH", "x")
    for name in ("Mistral 7B v0.3", "Mistral Small 3.2"):
        model = PUBLISHED[name]
        text = ChatTemplate(model.template, model.special_tokens).render(history(model, foreign))
        assert not any(id in text for id in foreign[:1])
        starts = [text.index(mark) + len(mark) for mark in ('"id": "', '"call_id": "') if mark in text]
        starts = starts or [text.index(mark) + len(mark) for mark in ("[CALL_ID]", "[TOOL_RESULTS]")]
        short = {text[start : start + 9] for start in starts}
        assert len(short) == 1 and short.pop().isalnum()  # the call and its answer have the same
    plain = "{{ messages[1].tool_calls[0].id }} {{ messages[2].tool_call_id }}"
    assert ChatTemplate(plain, {}).render(history(model, foreign)) == f"{foreign[0]} {foreign[0]}"


def test_a_client_s_name_of_an_answer_stays():
    template = ChatTemplate("{% for m in messages %}{{ m.name | default('-') }} {% endfor %}", {})
    model = PUBLISHED["Hermes 2 Pro"]
    messages = history(model, IDS)
    messages[2]["name"] = "mine"
    messages.append({"role": "tool", "tool_call_id": "gone", "content": "?"})
    assert template.render(messages) == "- - mine now - "


def test_no_calls_are_as_if_there_were_no_list():
    template = ChatTemplate(PUBLISHED["Llama 3.1"].template, {"bos_token": ""})
    text = template.render([{"role": "assistant", "content": "Hi.", "tool_calls": []}])
    assert "<|start_header_id|>assistant<|end_header_id|>\n\nHi.<|eot_id|>" in text


@pytest.mark.parametrize(("name", "stream"), [(name, bool(index % 2)) for index, name in enumerate(PUBLISHED)])
async def test_a_client_sends_back_what_it_got(serve, tmp_path, name, stream):
    """The whole way: the model calls, the client appends the answer's message and the tool's, and the next prompt has
    both as the template writes them."""
    model = PUBLISHED[name]
    path = tmp_path / "template.jinja"
    template = "{% set eos_token = '</s>' %}" + model.template  # the server's model has none
    path.write_text(template)
    tools = [WEATHER, NOW]
    async with serve(chat_template=str(path), reasoning_parser=model.thinks) as server:
        server.script.pieces = [*model.thought, *model.written]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "And?"}]
        create = server.client.chat.completions.create
        answer = await create(model="byte", messages=messages, tools=tools, stream=stream)
        if stream:
            deltas = [event.choices[0].delta async for event in answer]
            thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
            calls: dict[int, dict[str, str]] = {}
            for part in (call for delta in deltas for call in delta.tool_calls or ()):
                call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
                call["arguments"] += part.function.arguments or ""
            found = list(calls.values())
            assert not any(delta.content for delta in deltas)
        else:
            message = answer.choices[0].message
            thought = message.reasoning_content
            found = [{"id": call.id, **call.function.model_dump()} for call in message.tool_calls]
            assert message.content is None
        assert (thought, [(call["name"], json.loads(call["arguments"])) for call in found]) == (
            "so",
            CALLS[: model.num_calls],
        )
        calls_sent = [{"id": call.pop("id"), "type": "function", "function": call} for call in found]
        messages += [
            {"role": "assistant", "content": None, "tool_calls": calls_sent},
            *({"role": "tool", "tool_call_id": call["id"], "content": "noon"} for call in calls_sent),
        ]  # fmt: skip
        server.script.pieces = ["It is noon."]
        answer = await create(model="byte", messages=messages, tools=tools)
        assert answer.choices[0].finish_reason == "stop"
        prompt = server.tokenizer.decode(server.link.sent[-1].input_ids, skip_special_tokens=False)
        assert prompt == ChatTemplate(template, model.special_tokens).render(messages, tools=tools)
        assert "noon" in prompt and "日本" in prompt


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("mark", ["<tool_call>", "<arg_key>", "<minimax:tool_call>"])
async def test_a_mark_that_is_a_special_token_is_not_left_out(serve, model_dir, tmp_path, mark, is_special):
    """Some models of a format have its mark as a special token, which answers do not show otherwise."""
    path = tmp_path / "template.jinja"
    path.write_text("{# " + mark + " #}{{ tools }}{{ messages[0].content }}")
    backend = load_tokenizer(model_dir).backend
    backend.add_tokens([AddedToken(mark, special=is_special)])
    async with serve(Tokenizer(backend), chat_template=str(path)) as server:
        ask = {"model": "byte", "messages": [{"role": "user", "content": "And?"}]}
        await server.client.chat.completions.create(**ask, tools=[NOW])
        await server.client.chat.completions.create(**ask)
    shown = [not message.sampling_params.skip_special_tokens for message in server.link.sent]
    assert shown == [is_special, False]
