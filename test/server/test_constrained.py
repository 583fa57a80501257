"""Constrained answers of the whole engine: every one that ends by itself is valid, whatever else runs beside it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from json_schemas import generated_schema, problem

import fenceline
from fenceline.entrypoints.openai.parsing import answer_grammar, refuse_chat
from fenceline.entrypoints.openai.protocol import ChatBody
from fenceline.entrypoints.openai.tool_call_parser import JSON_CALLS, Arguments, CallBegun, Content, ToolCallParser

_AT_ONCE = 64  # with a schema
_AMBIGUOUS = 'root ::= s "b"\ns ::= "a" | s s | s s s'
_FLAGS = {
    "model_path": "demo",
    "random_seed": 1,  # of random weights
    "constrained_json_whitespace_pattern": "",
    "max_total_tokens": 560,
    "max_running_requests": 16,
    "chunked_prefill_size": 64,
    "schedule_conservativeness": 0.01,  # so that requests are retracted
    "log_level": "error",
}


async def _ask(engine: fenceline.Engine, prompt: str, params: dict[str, Any]) -> dict[str, Any]:
    answer = await engine.async_generate(prompt, params)
    assert isinstance(answer, dict)
    return answer


async def _all(
    engine: fenceline.Engine, num_schemas: int, max_depth: int, max_new_tokens: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of a schema, empty for a request without one, and its answer."""
    random = Random(5)
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for index in range(num_schemas):
        schema = generated_schema(random, depth=1 + index % max_depth)
        params = {"temperature": random.choice((0.0, 1.0)), "sampling_seed": index}
        params["max_new_tokens"] = max_new_tokens
        asked.append((schema, params | {"json_schema": json.dumps(schema)}))
        asked.append(({}, {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}))
    rest, answers = iter(enumerate(asked)), [{}] * len(asked)

    async def some() -> None:
        for number, (_, params) in rest:
            answers[number] = await _ask(engine, f"Q: What is {number} + 30?\nA:", params)

    await asyncio.gather(*[some() for _ in range(2 * _AT_ONCE)])
    return [(schema, answer) for (schema, _), answer in zip(asked, answers, strict=True)]


@pytest.fixture(scope="module")
def engine() -> Iterator[fenceline.Engine]:
    with fenceline.Engine(**_FLAGS) as started:
        yield started


@pytest.fixture(scope="module")
def random_engine() -> Iterator[fenceline.Engine]:
    """Of random weights: what they would write is nothing like JSON."""
    more = {"load_format": "dummy", "max_total_tokens": 2048, "max_running_requests": 128}
    with fenceline.Engine(**_FLAGS | more) as started:
        yield started


@pytest.mark.long
@pytest.mark.slow
def test_generated_schemas_are_followed_under_mixed_load(random_engine: fenceline.Engine) -> None:
    engine = random_engine
    pairs = asyncio.run(_all(engine, num_schemas=40, max_depth=5, max_new_tokens=400))
    plain = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    alone = engine.generate("Q: What is 1 + 30?\nA:", plain)
    ended = 0
    for schema, answer in pairs:
        if schema and answer["meta_info"]["finish_reason"]["type"] == "stop":
            ended += 1
            assert problem(json.loads(answer["text"]), schema, schema) == "", answer["text"]
    assert ended >= 0.65 * 40  # the others have reached their limit
    assert sum(answer["meta_info"]["num_retractions"] for _, answer in pairs) > 0
    assert pairs[1][1]["output_ids"] == alone["output_ids"]  # who has no grammar is not touched by others'


@pytest.mark.slow
def test_an_engine_takes_every_kind_of_grammar(engine: fenceline.Engine) -> None:
    matched = engine.generate("Q:", {"regex": "[0-9]{3}-[a-c]{2}", "max_new_tokens": 20, "n": 3, "temperature": 2})
    assert all(re.fullmatch("[0-9]{3}-[a-c]{2}", answer["text"]) for answer in matched)
    chosen = engine.generate("Q:", {"ebnf": 'root ::= "yes" | "no"', "min_new_tokens": 9, "ignore_eos": True})
    assert chosen["text"] in ("yes", "no")
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[xy]{2}"}, "end": "</a>"}
    tagged = engine.generate("Q:", {"structural_tag": {"type": "structural_tag", "format": tag}})
    assert re.fullmatch("<a>[xy]{2}</a>", tagged["text"])
    scored = engine.generate("Q:", {"regex": "7"}, return_logprob=True, top_logprobs_num=2)
    assert scored["meta_info"]["output_token_logprobs"][0][0] == 0.0  # nothing else could come
    for params, reason in (
        ({"json_schema": {"not": {"type": "null"}}}, "not is not enforced"),
        ({"regex": "a("}, "parenthesis"),
        ({"regex": "a", "ebnf": "b"}, "exclude each other"),
        ({"ebnf": _AMBIGUOUS, "max_new_tokens": 4000}, "too long for each token"),
    ):  # fmt: skip
        with pytest.raises((ValueError, RuntimeError), match=reason):
            engine.generate("Q:", params)


_TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "move",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"to": {"$ref": "#/$defs/place"}, "steps": {"type": "integer", "maximum": 99}},
                "required": ["to", "steps"],
                "additionalProperties": False,
                "$defs": {"place": {"enum": ["north", "south"]}},
            },
        },
    },
]


@pytest.mark.long
@pytest.mark.slow
def test_a_call_that_must_be_is_one_of_the_tools(random_engine: fenceline.Engine) -> None:
    """With random weights too: the grammar makes the call, and references within a tool's schema hold."""
    seen: set[str] = set()
    for seed, choice in enumerate(("required", "required", _TOOLS[1], _TOOLS[0])):
        body = ChatBody.model_validate(
            {"messages": [{"role": "user", "content": "Hi"}], "tools": _TOOLS, "tool_choice": choice}
            | {"parallel_tool_calls": False}
        )
        refuse_chat(body)
        grammar = answer_grammar(body)
        assert grammar is not None
        answer = random_engine.generate(
            "Q:", {grammar.kind: grammar.text, "max_new_tokens": 900, "sampling_seed": seed, "temperature": 0.7}
        )
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer["text"]
        parser = ToolCallParser(JSON_CALLS, {tool["function"]["name"]: {} for tool in _TOOLS})
        found = [*parser.feed(answer["text"]), *parser.finish()]
        names = [event.name for event in found if isinstance(event, CallBegun)]
        seen.update(names)
        assert len(names) == 1
        assert not any(isinstance(event, Content) for event in found)
        if choice is _TOOLS[1]:
            assert names == ["move"]
            text = "".join(event.text for event in found if isinstance(event, Arguments))
            arguments = json.loads(text)
            assert arguments["to"] in ("north", "south") and arguments["steps"] <= 99
        if choice is _TOOLS[0]:
            assert names == ["now"]
    assert seen == {"now", "move"}
