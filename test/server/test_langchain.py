"""langchain-openai against a live server with the demo model: structured output, tools and streams as agents use them.

The demo model has learned neither tools nor schemas: what it must answer, the grammar makes it answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Literal

import pytest
from live_server import LiveServer
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool
    from langchain_openai import ChatOpenAI

pytestmark = [pytest.mark.long, pytest.mark.slow]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\\n' }}"
)
SUM = "What is 12 + 30?"


class Place(BaseModel):
    """Where somebody is."""

    kind: Literal["city", "village"]
    code: str = Field(pattern="^[A-Z]{3}$")


class Trip(BaseModel):
    """A trip."""

    days: int = Field(ge=1, le=30)
    start: Place
    stops: list[Place] = Field(min_length=1, max_length=2)


def calculator(operation: Literal["add", "subtract"], left: Literal[12, 13], right: Literal[30, 31]) -> int:
    """Computes."""
    return left + right if operation == "add" else left - right


def clock(zone: Literal["utc", "local"]) -> str:
    """Tells the time."""
    return f"12:30 {zone}"


@pytest.fixture(scope="module")
def tools() -> list[BaseTool]:
    """``calculator`` and ``clock``. Langchain's import takes a second and more, also of who collects the tests only."""
    from langchain_core.tools import tool

    return [tool(calculator), tool(clock)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    pytest.importorskip("langchain_openai", reason="the extra 'test' is not installed: no langchain-openai")
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    flags = ["--chat-template", str(template), "--tool-call-parser", "qwen25", "--max-total-tokens", "8192"]
    # A model that has learned no JSON likes white space best.
    flags += ["--constrained-json-whitespace-pattern", ""]
    with LiveServer.real("--model-path", "demo", "--device", "cpu", *flags) as live:
        yield live.wait_ready()


@pytest.fixture(scope="module")
def llm(server: LiveServer) -> ChatOpenAI:
    return make(server)


def make(server: LiveServer, **options: Any) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    defaults = {"temperature": 0, "max_retries": 0, "timeout": 120, "max_completion_tokens": 400}
    return ChatOpenAI(model="demo", base_url=f"{server.base_url}/v1", api_key="none", **{**defaults, **options})


def test_an_answer_whole_streamed_and_many_at_once(llm: ChatOpenAI) -> None:
    whole = llm.invoke(SUM)
    assert whole.content == "42" and whole.response_metadata["finish_reason"] == "stop"
    chunks = list(llm.stream(SUM, stream_usage=True))
    together = reduce(add, chunks)
    assert together.content == "42" and together.usage_metadata == whole.usage_metadata
    assert len(chunks) > 2
    sums = [f"What is {left} + 30?" for left in range(10, 18)]
    answers = asyncio.run(llm.abatch(sums))
    assert [answer.content for answer in answers] == [llm.invoke(text).content for text in sums]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(llm: ChatOpenAI, method: Literal["json_schema", "function_calling"]) -> None:
    structured = llm.with_structured_output(Trip, method=method, include_raw=True)
    answer = structured.invoke("Plan a trip.")
    assert answer["parsing_error"] is None and isinstance(answer["parsed"], Trip)
    *_, last = llm.with_structured_output(Trip, method=method).stream("Plan a trip.")
    assert last == answer["parsed"]


def test_structured_output_of_a_plain_schema(llm: ChatOpenAI) -> None:
    schema = {"title": "pick", "description": "Pick one.", "type": "object", "required": ["one"],
              "properties": {"one": {"enum": ["left", "right"]}}, "additionalProperties": False}  # fmt: skip
    answer = llm.with_structured_output(schema, method="json_schema", strict=True).invoke("Pick.")
    assert answer in ({"one": "left"}, {"one": "right"})


def test_a_loop_of_tools(llm: ChatOpenAI, tools: list[BaseTool]) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

    messages: list[Any] = [SystemMessage("You use tools."), HumanMessage(SUM)]
    called = llm.bind_tools(tools, tool_choice="calculator").invoke(messages)
    [call] = called.tool_calls
    assert call["name"] == "calculator" and called.response_metadata["finish_reason"] in ("stop", "tool_calls")
    messages += [called, tools[0].invoke(call)]
    assert isinstance(messages[-1], ToolMessage) and messages[-1].content in ("42", "43", "44", "-18", "-19", "-17")
    last = llm.bind_tools(tools, tool_choice="none").invoke(messages)
    assert isinstance(last, AIMessage) and last.tool_calls == []


def test_calls_are_streamed_in_parts(llm: ChatOpenAI, tools: list[BaseTool]) -> None:
    bound = llm.bind_tools(tools, tool_choice="any", parallel_tool_calls=False)
    whole = bound.invoke(SUM)
    assert [call["name"] in ("calculator", "clock") for call in whole.tool_calls] == [True]
    chunks = list(bound.stream(SUM))
    together = reduce(add, chunks)
    parts = [part for chunk in chunks for part in chunk.tool_call_chunks]
    assert len(parts) > 2 and "".join(part["args"] or "" for part in parts).startswith("{")
    without_ids = [(call["name"], call["args"]) for call in together.tool_calls]
    assert without_ids == [(call["name"], call["args"]) for call in whole.tool_calls]


def test_the_responses_api(server: LiveServer, tools: list[BaseTool]) -> None:
    llm = make(server, use_responses_api=True)
    assert llm.invoke(SUM).text == "42"
    assert reduce(add, llm.stream(SUM)).text == "42"
    [call] = llm.bind_tools(tools[:1], tool_choice="calculator").invoke(SUM).tool_calls
    assert call["name"] == "calculator" and set(call["args"]) == {"operation", "left", "right"}


def test_a_refusal_is_the_clients_exception(llm: ChatOpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="schema"):
        llm.bind(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
        ).invoke(SUM)
