"""Clients of JavaScript against a live server: the SDKs of OpenAI and Anthropic, and the Vercel AI SDK.

FENCELINE_NODE_MODULES is a folder in which npm has installed them: openai, @anthropic-ai/sdk, ai, @ai-sdk/openai,
@ai-sdk/openai-compatible, @ai-sdk/anthropic and zod.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from live_server import WAIT_S, LiveServer

pytestmark = pytest.mark.slow
FLOWS = Path(__file__).parents[1] / "support" / "node_clients.mjs"
CLIENTS = {
    "openai chat": ["openai"],
    "openai responses": ["openai"],
    "anthropic": ["@anthropic-ai/sdk"],
    "ai-sdk openai": ["ai", "@ai-sdk/openai"],
    "ai-sdk openai.chat": ["ai", "@ai-sdk/openai"],
    "ai-sdk openai-compatible": ["ai", "@ai-sdk/openai-compatible"],
    "ai-sdk anthropic": ["ai", "@ai-sdk/anthropic"],
    "ai-sdk anthropic, other model": ["ai", "@ai-sdk/anthropic"],
}
TOKENS = (10, 9)  # of the question and the answer of the flow `plain`


@pytest.fixture(scope="module")
def folder() -> Path:
    """Where the packages are."""
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    if not (named := os.environ.get("FENCELINE_NODE_MODULES")):
        pytest.skip("FENCELINE_NODE_MODULES does not say where npm has installed the clients")
    return Path(named)


@pytest.fixture(scope="module", params=CLIENTS)
def flows(folder: Path, tools_server: LiveServer, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The results of all flows of one client."""
    for package in (*CLIENTS[request.param], "zod"):
        if not (folder / "node_modules" / package).is_dir():
            pytest.skip(f"npm has not installed {package}")
    command = ["node", str(FLOWS), str(folder), tools_server.base_url, request.param]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode == 0, run.stderr
    results: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return {"client": request.param, **results}


def test_an_answer_whole_and_streamed(flows: dict[str, Any]) -> None:
    plain, stream = flows["plain"], flows["stream"]
    assert plain.get("text") == stream.get("text") == "Hello! How can I help you?", (plain, stream)
    assert stream["parts"] > 1
    assert plain["end"] in ("stop", "completed", "end_turn") and plain.get("warnings", []) == []
    for usage in (plain["usage"], stream["usage"]):
        assert _tokens(usage) == TOKENS
    assert plain.get("counted", TOKENS[0]) == TOKENS[0]


def _tokens(usage: dict[str, Any]) -> tuple[int, int]:
    """Those of the prompt, cached or not, and of the answer, by any API's names."""
    if "prompt_tokens" in usage:
        assert usage["total_tokens"] == sum(TOKENS)
        return usage["prompt_tokens"], usage["completion_tokens"]
    if "inputTokens" in usage:
        assert usage["totalTokens"] == sum(TOKENS)
        return usage["inputTokens"], usage["outputTokens"]
    if "output_tokens_details" in usage:
        assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
        assert usage["input_tokens_details"]["cached_tokens"] < TOKENS[0]
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), usage["output_tokens"]


def test_a_tool_from_question_to_answer_and_another_turn(flows: dict[str, Any]) -> None:
    """By hand, and by the client's own loop where it has one. The result is not the sum: the last answer can only come
    from the tool."""
    tools = flows["tools"]
    assert tools.get("input") == {"expression": "4821 + 377"}, tools
    assert tools["text"] == tools.get("sent", tools["text"]) == "The answer is 99123."
    assert tools["turn"] == "Hello! How can I help you?"
    assert tools.get("end", "tool_calls") in ("tool_calls", "tool_use") and tools.get("steps", 2) == 2
    if "runTools" in flows:
        run = {"text": "The answer is 99123.", "input": {"expression": "4821 + 377"}, "runs": 1}
        assert flows["runTools"] == run


def test_an_object_of_a_zod_schema_whole_and_streamed(flows: dict[str, Any]) -> None:
    value = flows["object"].get("value")
    assert value is not None, flows["object"]
    assert value["kind"] in ("city", "village") and value["days"] in (3, 7)
    assert value["sunny"] in (True, False) and value["note"] in ("early", "late", None)
    assert value["stop"]["code"] in ("OSL", "FCO") and len(value) == 5
    assert flows["streamObject"] == flows["object"]
