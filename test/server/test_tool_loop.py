"""The whole loop of a tool with the openai client: question, call, the tool's answer, final answer.

The demo model has learned no tools. The grammar makes its call, whose arguments are then arbitrary but of their schema;
and a chat template puts what the tool answers in front of the question, in the form of the stories that the model has
learned to read. So the final answer is right only if the tool's answer has come to the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer

pytestmark = pytest.mark.slow
TEMPLATE = """
{%- set told = namespace(text='') %}
{%- for message in messages if message.role == 'tool' %}
    {%- set told.text = told.text + message.content + ' ' %}
{%- endfor %}
{%- if tools and not told.text %}{{ 'You can call ' + (tools | tojson) + ' as <tool_call>.\\n' }}{% endif %}
{%- for message in messages if message.role == 'user' %}
    {{- '<|im_start|>user\\n' + told.text + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}"""
DIARY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_diary",
        "description": "What happened on a day.",
        "parameters": {
            "type": "object",
            "properties": {
                "day": {"type": "integer", "minimum": 1, "maximum": 31},
                "reader": {"enum": ["Ada", "Tim"]},
                "words": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
            },
            "required": ["day", "reader", "words"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
QUESTION = {"role": "user", "content": "Where is Mia?"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    flags = ["--chat-template", str(template), "--tool-call-parser", "qwen25"]
    flags += ["--constrained-json-whitespace-pattern", ""]
    with LiveServer.real("--model-path", "demo", "--device", "cpu", *flags) as live:
        base_url = f"{live.wait_ready().base_url}/v1"
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
            yield client


def called(client: openai.OpenAI, stream: bool, **choice: Any) -> tuple[dict[str, Any], str]:
    """The assistant's message with its call, as a client keeps it, and the finish reason."""
    ask: dict[str, Any] = {"model": "demo", "messages": [QUESTION], "tools": [DIARY, CLOCK], "temperature": 0} | choice
    if not stream:
        [choice_] = client.chat.completions.create(**ask).choices
        return choice_.message.model_dump(exclude_none=True), str(choice_.finish_reason)
    call: dict[str, Any] = {}
    reason = ""
    for chunk in client.chat.completions.create(**ask, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            function = delta.function
            assert function is not None and delta.index == 0 and not chunk.choices[0].delta.content
            if delta.id:
                call = {"id": delta.id, "type": "function", "function": {"name": function.name, "arguments": ""}}
            call["function"]["arguments"] += function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    return {"role": "assistant", "content": None, "tool_calls": [call]}, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        {"tool_choice": {"type": "function", "function": {"name": "read_diary"}}},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ],
    ids=["named", "required"],
)  # fmt: skip
def test_question_call_answer_and_final_answer(client: openai.OpenAI, stream: bool, choice: dict[str, Any]) -> None:
    message, reason = called(client, stream, **choice)
    [call] = message["tool_calls"]
    assert reason == ("tool_calls" if choice["tool_choice"] == "required" else reason) and not message.get("content")
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "read_diary":
        assert arguments.keys() == {"day", "reader", "words"}
        assert 1 <= arguments["day"] <= 31 and arguments["reader"] in ("Ada", "Tim") and len(arguments["words"]) <= 2
    else:
        assert (call["function"]["name"], arguments) == ("clock", {}) and choice["tool_choice"] == "required"
    for place in ("garden", "museum"):
        story = f"Mia went to the market. Tim is in the kitchen. Mia walked to the {place}."
        answer = {"role": "tool", "tool_call_id": call["id"], "content": story}
        last = client.chat.completions.create(
            model="demo",
            messages=[QUESTION, message, answer],
            tools=[DIARY, CLOCK],
            temperature=0,  # type: ignore[list-item]
        )
        assert last.choices[0].message.content == f"In the {place}", "what the tool said has come to the model"
        assert last.choices[0].finish_reason == "stop" and not last.choices[0].message.tool_calls
