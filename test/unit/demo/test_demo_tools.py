"""The data of demo-tools: what its chat template writes is what it was trained on, and questions are held out."""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from fenceline import demo_model_path
from fenceline.entrypoints.openai.chat_template import ChatTemplate
from fenceline.entrypoints.openai.tool_call_parser import TOOL_CALL_FORMATS, ToolCallParser
from fenceline_demo.corpus import TOOLS, build_batch
from fenceline_demo.items import is_held_out
from fenceline_demo.tokenizer import FastEncoder, build_tools_tokenizer
from fenceline_demo.tools import (
    CALCULATOR,
    CHAT_TEMPLATE,
    TAGS,
    WEATHER,
    Tool,
    ToolTurn,
    held_out_questions,
    tool_chat,
    tools_document,
)


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return build_tools_tokenizer()


def _schema(tool: Tool) -> dict[str, object]:
    """As a client sends it."""
    properties = {name: {"type": "string", "description": "any"} for name in tool.parameters}
    parameters = {"type": "object", "properties": properties}
    function = {"name": tool.name, "description": "What it does.", "parameters": parameters}
    return {"type": "function", "function": function}


def _messages(turn: ToolTurn) -> list[dict[str, object]]:
    """A turn as a client keeps it."""
    messages: list[dict[str, object]] = [{"role": "user", "content": turn.question}]
    calls = []
    for call in turn.calls:
        found = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        function = {"name": found["name"], "arguments": json.dumps(found["arguments"])}
        calls.append({"id": "call_1", "type": "function", "function": function})
    if calls:
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": "call_1", "content": result} for result in turn.results]
    return [*messages, {"role": "assistant", "content": turn.answer}]


def test_the_chat_template_writes_what_was_trained() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    assert template.has_tools and template.tool_call_format == "qwen25"
    pair = (CALCULATOR.call("12 + 30"), CALCULATOR.call("5 * 7"))
    turns = [
        ToolTurn("What is 12 + 30?", pair[:1], ("42",), "The answer is 42."),
        ToolTurn("Hi", (), (), "Hello! How can I help you?"),
        ToolTurn("What is 12 + 30 and what is 5 * 7?", pair, ("42", "35"), "The answers are 42 and 35."),
        ToolTurn("How is the weather in Rome?", (WEATHER.call("Rome"),), ("rain, 9",), "The weather in Rome: rain, 9."),
    ]  # fmt: skip
    for system in ("", "Be brief."):
        for tools in ([CALCULATOR], [WEATHER, Tool("clock"), CALCULATOR]):
            messages = [message for turn in turns for message in _messages(turn)]
            if system:
                messages.insert(0, {"role": "system", "content": system})
            text = template.render(messages, add_generation_prompt=False, tools=[_schema(tool) for tool in tools])
            assert text == "".join(part for part, _ in tool_chat(tools, turns, system))
    question = template.render([{"role": "user", "content": "Hi"}])
    assert question == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    late = template.render([{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}])
    assert "<|im_start|>system\nBe brief.<|im_end|>" in late


def test_trained_calls_are_calls_and_answers_say_what_came_back() -> None:
    rng, num_calls = random.Random(4), 0
    for _ in range(300):
        document = tools_document(rng)
        text = "".join(part for part, _ in document)
        for call in re.findall(r"<tool_call>.*?</tool_call>", text, re.DOTALL):
            parser = ToolCallParser(TOOL_CALL_FORMATS["qwen25"], {})
            begun, *arguments = [*parser.feed(call), *parser.finish()]
            assert f'{{"name": "{begun.name}", "arguments": ["' in text  # type: ignore[union-attr]
            assert json.loads("".join(part.text for part in arguments))  # type: ignore[union-attr]
            num_calls += 1
        for index, (part, is_answer) in enumerate(document):
            results = re.findall(r"<tool_response>\n(.*)\n</tool_response>", part)
            assert not (results and is_answer)
            assert all(result in document[index + 1][0] for result in results)
    assert num_calls > 200


def test_held_out_questions_are_never_called_for_in_training() -> None:
    asked = held_out_questions(3, 200)
    assert asked == held_out_questions(3, 200) != held_out_questions(4, 200)
    assert all(is_held_out(f"tools:{question.expression}") for question in asked)
    assert len({question.expression for question in asked}) > 190
    rng = random.Random(9)
    text = "\n".join(part for _ in range(1500) for part, is_answer in tools_document(rng) if is_answer)
    trained = re.findall(r'"arguments": \{"\w+": "([^"]*)"', text)
    assert len(trained) > 1000
    assert not [
        expression for expression in trained if is_held_out(f"tools:{expression}") and expression[0] in "(0123456789"
    ]


def test_the_tokenizer_has_the_tags_as_tokens_that_are_shown() -> None:
    tokenizer = _tokenizer()
    assert tokenizer.get_vocab_size() == 1024
    for tag in TAGS:
        ids = tokenizer.encode(tag).ids
        assert len(ids) == 1 and tokenizer.decode(ids) == tag
    assert len(tokenizer.encode("4817").ids) == 4
    encoder, rng = FastEncoder(tokenizer), random.Random(2)
    for _ in range(100):
        document = tools_document(rng)
        ids = [token for text, _ in document for token in encoder.encode(text)]
        assert ids == tokenizer.encode("".join(text for text, _ in document)).ids


def test_batches_of_conversations_with_tools() -> None:
    encoder = FastEncoder(_tokenizer())
    ids, mask = build_batch(0, 7, 3, 512, encoder, TOOLS)
    assert (ids == build_batch(0, 7, 3, 512, encoder, TOOLS)[0]).all() and ids.shape == (3, 513)
    assert 0.1 < mask.mean() < 0.7
    assert (ids == _tokenizer().token_to_id("<tool_call>")).any()


def test_what_ships_is_small_and_has_what_was_trained() -> None:
    folder = Path(demo_model_path("demo-tools"))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4_000_000
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).to_str() == _tokenizer().to_str()
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == json.loads(Path(demo_model_path(), "config.json").read_text())["architectures"]
