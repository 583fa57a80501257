"""Each model's own way: its chat template with calls and answers in the history, and its calls, cut at every byte,
alone and after a thought."""

from __future__ import annotations

import codecs
import json
from typing import Any

import pytest
from published_formats import CALLS, NOW, PUBLISHED, WEATHER, Published
from tokenizers import AddedToken

from fenceline.entrypoints.openai.chat_reader import ChatReader, Reasoning
from fenceline.entrypoints.openai.chat_template import ChatTemplate
from fenceline.entrypoints.openai.reasoning_parser import REASONING_FORMATS, ReasoningParser
from fenceline.entrypoints.openai.tool_call_parser import (
    TOOL_CALL_FORMATS,
    Arguments,
    CallBegun,
    Content,
    ToolCallParser,
)
from fenceline.frontend.request_types import GenerateChunk
from fenceline.frontend.tokenizer import Tokenizer, load_tokenizer
from fenceline.ipc.io_struct import FinishReason

TOOLS = {tool["function"]["name"]: tool["function"] for tool in (WEATHER, NOW)}
IDS = ("a1B2c3D4e", "123456789")
names = pytest.mark.parametrize("name", PUBLISHED)


def history(model: Published, ids: tuple[str, str], **assistant: Any) -> list[dict[str, Any]]:
    """A question, CALLS as the OpenAI client sends them back, and what the tools answered."""
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(value, ensure_ascii=False)}}
        for id, (name, value) in zip(ids, CALLS, strict=True)
    ]  # fmt: skip
    answers = [
        {"role": "tool", "tool_call_id": id, "content": text}
        for id, text in zip(ids, ("rain", "noon"), strict=True)
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


def read(
    model: Published, texts: list[str], inside: bool | None = None
) -> tuple[str, str, list[tuple[str, str]]]:
    """The reasoning, the content, and the calls with the text of their arguments. ``inside``: the answer begins within
    a thought; None for a server without --reasoning-parser."""
    calls = ToolCallParser(TOOL_CALL_FORMATS[model.parser], TOOLS)
    thought = None if inside is None else ReasoningParser(REASONING_FORMATS[model.thinks], inside)
    reader = ChatReader(thought, calls, one_call=False)
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
def test_a_history_is_written_as_the_published_template_writes_it(name, content):
    model = PUBLISHED[name]
    messages = history(model, IDS, content=content)
    if content == "left out":
        del messages[1]["content"]
    template = ChatTemplate(model.template, model.special_tokens)
    assert template.render(messages) == expected(model, IDS)


@names
def test_the_template_tells_the_format_and_takes_tools(name):
    model = PUBLISHED[name]
    template = ChatTemplate(model.template, model.special_tokens)
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


@names
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


def test_a_mistral_template_gets_ids_that_it_takes_and_others_what_the_client_sent():
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


def test_a_client_s_name_of_an_answer_stays_and_one_without_a_call_gets_none():
    template = ChatTemplate("{% for m in messages %}{{ m.name | default('-') }} {% endfor %}", {})
    model = PUBLISHED["Hermes 2 Pro"]
    messages = history(model, IDS)
    messages[2]["name"] = "mine"
    messages.append({"role": "tool", "tool_call_id": "gone", "content": "?"})
    assert template.render(messages) == "- - mine now - "


def test_no_calls_are_as_if_there_were_no_list():
    template = ChatTemplate(PUBLISHED["Llama 3.1"].template, {"bos_token": ""})
    text = template.render([{"role": "assistant", "content": "Hi.", "tool_calls": []}])
    assert text.startswith("<|start_header_id|>assistant<|end_header_id|>\n\nHi.<|eot_id|>")


@names
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_sends_back_what_it_got(serve, tmp_path, name, stream):
    """The whole way: the model calls, the client appends the answer's message and the tool's, and the next prompt has
    both as the template writes them."""
    model = PUBLISHED[name]
    path = tmp_path / "template.jinja"
    template = "{% set eos_token = '</s>' %}" + model.template  # the server's model has none
    path.write_text(template)
    tools = [NOW]
    written = {
        "qwen25": '<tool_call>\n{"name": "now", "arguments": {"x": "é"}}\n</tool_call>',
        "llama3": '{"name": "now", "parameters": {"x": "é"}}',
        "pythonic": "[now(x='é')]",
        "qwen3_coder": "<tool_call>\n<function=now>\n<parameter=x>\né\n</parameter>\n</function>\n</tool_call>",
        "deepseekv3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
        f'{"function" if name == "DeepSeek V3" else "now"}<｜tool▁sep｜>'
        + ('now\n```json\n{"x": "é"}\n```' if name == "DeepSeek V3" else '{"x": "é"}')
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "mistral": '[TOOL_CALLS] [{"name": "now", "arguments": {"x": "é"}}]',
        "glm45": "<tool_call>now\n<arg_key>x</arg_key>\n<arg_value>é</arg_value>\n</tool_call>",
        "minimax-m2": '<minimax:tool_call>\n<invoke name="now">\n<parameter name="x">é</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    }[model.parser]  # fmt: skip
    async with serve(chat_template=str(path), reasoning_parser=model.thinks) as server:
        server.script.pieces = ["<think>", "so", "</think>", "\n\n", *written]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "And?"}]
        create = server.client.chat.completions.create
        answer = await create(model="byte", messages=messages, tools=tools, stream=stream)
        if stream:
            deltas = [event.choices[0].delta async for event in answer]
            parts = [call for delta in deltas for call in delta.tool_calls or ()]
            thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
            call = {"name": parts[0].function.name}
            call["arguments"] = "".join(part.function.arguments or "" for part in parts)
            id = parts[0].id
            assert not any(delta.content for delta in deltas)
        else:
            message = answer.choices[0].message
            thought, [found] = message.reasoning_content, message.tool_calls
            call, id = {"name": found.function.name, "arguments": found.function.arguments}, found.id
            assert message.content is None
        assert (thought, call["name"], json.loads(call["arguments"])) == ("so", "now", {"x": "é"})
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": id, "content": "noon"},
        ]  # fmt: skip
        server.script.pieces = ["It is noon."]
        answer = await create(model="byte", messages=messages, tools=tools)
        assert answer.choices[0].finish_reason == "stop"
        prompt = server.tokenizer.decode(server.link.sent[-1].input_ids, skip_special_tokens=False)
        assert prompt == ChatTemplate(template, model.special_tokens).render(messages, tools=tools)
        assert "noon" in prompt and "now" in prompt and "é" in prompt


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
