"""demo-tools calls a calculator: question, call, the tool's answer and final answer, with the openai client.

The model itself decides whether to call (`tool_choice` auto) and writes every token of it without a grammar.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer

from fenceline_demo.tools import held_out_questions

pytestmark = [pytest.mark.long, pytest.mark.slow]
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 12 + 30"}},
            "required": ["expression"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NUM_QUESTIONS = 24
PAGE = Path(__file__).parents[2] / "docs" / "use" / "openai_api.md"


@pytest.fixture(scope="module")
def client(tools_server: LiveServer) -> Iterator[openai.OpenAI]:
    base_url = f"{tools_server.base_url}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """The value of ``expression``, at most four digits behind the point."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.BinOp():
                return float(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise AssertionError(ast.dump(node))

    try:
        return f"{value(ast.parse(expression, mode='eval').body):.4f}".rstrip("0").rstrip(".")
    except ZeroDivisionError:
        return "0"


def answered(client: openai.OpenAI, messages: list[Any], stream: bool, **more: Any) -> tuple[dict[str, Any], str]:
    """The assistant's message as a client keeps it, and the finish reason."""
    ask: dict[str, Any] = {"model": "demo-tools", "messages": messages, "tools": [CLOCK, CALCULATOR]} | more
    if not stream:
        [choice] = client.chat.completions.create(**ask).choices
        return choice.message.model_dump(exclude_none=True), str(choice.finish_reason)
    content, calls, reason = "", [], ""
    for chunk in client.chat.completions.create(**ask, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for delta in choice.delta.tool_calls or ():
            if delta.id:
                calls.append({"id": delta.id, "type": "function", "function": {"name": "", "arguments": ""}})
            call = calls[delta.index]["function"]
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
        reason = choice.finish_reason or reason
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    return message | ({"tool_calls": calls} if calls else {}), reason


@pytest.mark.parametrize("stream", [False, True])
def test_questions_calls_results_and_final_answers(client: openai.OpenAI, stream: bool) -> None:
    """Every second result is not the expression's: the final answer can only come from the tool."""
    for index, question in enumerate(held_out_questions(11, NUM_QUESTIONS)):
        messages: list[Any] = [{"role": "user", "content": question.question}]
        message, reason = answered(client, messages, stream)
        assert reason == "tool_calls" and not message.get("content"), question
        [call] = message["tool_calls"]
        assert call["function"]["name"] == "calculator"
        assert json.loads(call["function"]["arguments"]) == {"expression": question.expression}
        result = calculate(question.expression) if index % 2 else str(70_321 + 97 * index)
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        message, reason = answered(client, messages, stream)
        assert reason == "stop" and f" {result}" in message["content"], question
        # After a story it has not learned well whose things were asked for.
        if question.answer.startswith("The"):
            assert message["content"] == question.answer.replace("RESULT", result)
        assert "tool_calls" not in message


def test_it_decides_whether_to_call(client: openai.OpenAI) -> None:
    hello: list[Any] = [{"role": "user", "content": "Hello!"}]
    message, reason = answered(client, hello, stream=False)
    assert (message["content"], reason) == ("Hello! How can I help you?", "stop") and "tool_calls" not in message
    question: list[Any] = [{"role": "user", "content": "What is 4821 + 377?"}]
    for more in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        message, reason = answered(client, question, stream=False, **more)
        assert reason == "stop" and "tool_calls" not in message
    assert answered(client, question, stream=False)[1] == "tool_calls"


def test_two_questions_are_two_calls(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 12 + 30 and what is 518 * 7?"}]
    message, _ = answered(client, messages, stream=True)
    asked = [json.loads(call["function"]["arguments"])["expression"] for call in message["tool_calls"]]
    assert asked == ["12 + 30", "518 * 7"]
    messages.append(message)
    for call, expression in zip(message["tool_calls"], asked, strict=True):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": calculate(expression)})
    assert answered(client, messages, stream=True)[0]["content"] == "The answers are 42 and 3626."


def test_arguments_that_follow_their_schema(client: openai.OpenAI) -> None:
    """`strict`: the same call, of which a grammar lets nothing else be written; and a call that is demanded."""
    function = CALCULATOR["function"] | {"strict": True}
    strict = {"type": "function", "function": function}
    messages: list[Any] = [{"role": "user", "content": "What is 4821 + 377?"}]
    for more in ({"tools": [strict]}, {"tool_choice": {"type": "function", "function": {"name": "calculator"}}}):
        [call] = answered(client, messages, stream=False, max_tokens=200, **more)[0]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments.keys() == {"expression"} and ("tool_choice" in more or arguments["expression"] == "4821 + 377")


def test_the_example_of_the_documentation_runs(client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands on the page, against the server at its address here."""
    page = PAGE.read_text()
    start = page.index("```python", page.index("## A tool from question to answer"))
    code, _, rest = page[start:].removeprefix("```python\n").partition("```")
    printed = re.search(r"```\n(.*?)```", rest, re.DOTALL)
    assert printed is not None
    exec(compile(code.replace("http://127.0.0.1:30000/v1", str(client.base_url)), str(PAGE), "exec"), {})
    assert capsys.readouterr().out == printed[1]
