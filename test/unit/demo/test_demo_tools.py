"""The data of demo-tools: what its chat template writes is what it was trained on."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from fenceline import demo_model_path
from fenceline.entrypoints.openai.chat_template import ChatTemplate
from fenceline_demo.tokenizer import build_tools_tokenizer
from fenceline_demo.tools import CALCULATOR, CHAT_TEMPLATE, WEATHER, Tool, ToolTurn, tool_chat


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


def test_what_ships_is_small_and_has_what_was_trained() -> None:
    folder = Path(demo_model_path("demo-tools"))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4_000_000
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).to_str() == _tokenizer().to_str()
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == json.loads(Path(demo_model_path(), "config.json").read_text())["architectures"]
