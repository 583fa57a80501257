"""Frameworks over the SDKs against a live server: openai-agents, pydantic-ai, LangChain and LiteLLM.

More of LangChain over OpenAI's SDK is in test_langchain.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from functools import reduce
from operator import add
from typing import Any

import pytest
from client_flows import ANSWER, ARGUMENTS, HELLO, LAST, NUM_IN, NUM_OUT, RESULT, SUM, Trip
from live_server import LiveServer

pytestmark = pytest.mark.slow


def calculator(expression: str) -> str:
    """Computes."""
    assert expression == ARGUMENTS["expression"]
    return RESULT


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_openai_agents(tools_server: LiveServer, api: str) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    settings = agents.ModelSettings(temperature=0, max_tokens=200)

    async def flows() -> None:
        async with AsyncOpenAI(base_url=f"{tools_server.base_url}/v1", api_key="none", max_retries=0) as client:
            model = kind(model="demo-tools", openai_client=client)
            tools = [agents.function_tool(calculator)]
            agent = agents.Agent(name="a", model=model, model_settings=settings, tools=tools)
            plain = await agents.Runner.run(agent, HELLO)
            assert plain.final_output == ANSWER
            usage = plain.context_wrapper.usage
            assert usage.output_tokens == NUM_OUT and usage.total_tokens == usage.input_tokens + NUM_OUT
            called = await agents.Runner.run(agent, SUM)
            assert called.final_output == LAST and called.context_wrapper.usage.requests == 2
            turn = await agents.Runner.run(agent, [*called.to_input_list(), {"role": "user", "content": HELLO}])
            assert turn.final_output == ANSWER
            streamed = agents.Runner.run_streamed(agent, SUM)
            deltas = [
                event.data.delta
                async for event in streamed.stream_events()
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
            ]
            assert "".join(deltas) == streamed.final_output == LAST and len(deltas) > 1
            planner = agents.Agent(name="b", model=model, model_settings=settings, output_type=Trip)
            trip = (await agents.Runner.run(planner, "Plan.")).final_output
            assert isinstance(trip, Trip)

    asyncio.run(flows())


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_pydantic_ai(tools_server: LiveServer, api: str) -> None:
    ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    settings: Any = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}
    if api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        provider: Any = AnthropicProvider(base_url=tools_server.base_url, api_key="none")
        model: Any = AnthropicModel("claude-sonnet-4-5", provider=provider, settings=settings)
    else:
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        provider = OpenAIProvider(base_url=f"{tools_server.base_url}/v1", api_key="none")
        model = kind("demo-tools", provider=provider, settings=settings)

    async def flows() -> None:
        plain = await ai.Agent(model).run(HELLO)
        assert plain.output == ANSWER
        assert (plain.usage.input_tokens, plain.usage.output_tokens) == (NUM_IN, NUM_OUT)
        agent = ai.Agent(model, tools=[calculator])
        called = await agent.run(SUM)
        assert called.output == LAST and called.usage.requests == 2
        turn = await ai.Agent(model).run(HELLO, message_history=called.all_messages())
        assert turn.output == ANSWER
        async with agent.run_stream(SUM) as streamed:
            parts = [part async for part in streamed.stream_text(delta=True, debounce_by=None)]
        assert "".join(parts) == LAST and len(parts) > 1
        for output in (ai.NativeOutput(Trip), ai.ToolOutput(Trip)):
            trip = (await ai.Agent(model, output_type=output).run("Plan.")).output
            assert isinstance(trip, Trip)

    asyncio.run(flows())


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_langchain(tools_server: LiveServer, api: str) -> None:
    module = "langchain_anthropic" if api == "anthropic" else "langchain_openai"
    integration = pytest.importorskip(module, reason=f"{module.replace('_', '-')} is not installed")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    settings: Any = {"api_key": "none", "max_tokens": 200, "temperature": 0, "max_retries": 0}
    if api == "anthropic":
        # As a model of which it knows that it has output_config.format.
        llm: Any = integration.ChatAnthropic(model="claude-sonnet-4-5", base_url=tools_server.base_url, **settings)
    else:
        url, responses = f"{tools_server.base_url}/v1", api == "responses"
        llm = integration.ChatOpenAI(
            model="demo-tools", base_url=url, use_responses_api=responses, stream_usage=True, **settings
        )
    whole, chunks = llm.invoke(HELLO), list(llm.stream(HELLO))
    together = reduce(add, chunks)
    assert whole.text == together.text == ANSWER and len(chunks) > 1
    for message in (whole, together):
        assert message.usage_metadata["input_tokens"] == NUM_IN
        assert message.usage_metadata["output_tokens"] == NUM_OUT
    bound = llm.bind_tools([tool(calculator)])
    messages: list[Any] = [HumanMessage(SUM), bound.invoke(SUM)]
    [call] = messages[-1].tool_calls
    assert call["args"] == ARGUMENTS
    messages.append(ToolMessage(calculator(**call["args"]), tool_call_id=call["id"]))
    messages.append(bound.invoke(messages))
    assert messages[-1].text == LAST
    assert llm.invoke([*messages, HumanMessage(HELLO)]).text == ANSWER
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(Trip, method=method).invoke("Plan."), Trip)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm(tools_server: LiveServer, provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it is read at import: no network
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    base = tools_server.base_url + ("" if provider == "anthropic" else "/v1")
    name = "claude-sonnet-4-5" if provider == "anthropic" else "demo-tools"
    ask: dict[str, Any] = {
        "model": f"{provider}/{name}", "api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 200,
        "max_retries": 0,
    }  # fmt: skip
    hello = [{"role": "user", "content": HELLO}]
    whole = litellm.completion(**ask, messages=hello)
    assert whole.choices[0].message.content == ANSWER
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (NUM_IN, NUM_OUT)
    chunks = list(litellm.completion(**ask, messages=hello, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER and len(chunks) > 1
    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": parameters}}]
    messages: list[Any] = [{"role": "user", "content": SUM}]
    messages.append(litellm.completion(**ask, messages=messages, tools=tools).choices[0].message)
    [call] = messages[-1].tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    messages.append(litellm.completion(**ask, messages=messages, tools=tools).choices[0].message)
    assert messages[-1].content == LAST
    turn = litellm.completion(**ask, messages=[*messages, *hello])
    assert turn.choices[0].message.content == ANSWER
    plan = [{"role": "user", "content": "Plan."}]
    answer = litellm.completion(**ask, messages=plan, response_format=Trip).choices[0].message.content
    assert Trip.model_validate_json(answer)
    if provider == "openai":
        response = litellm.responses(model=ask["model"], api_base=base, api_key="none", input=HELLO, temperature=0)
        assert response.output[0].content[0].text == ANSWER
