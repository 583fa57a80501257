"""The OpenAI client against a live server with the demo model: what comes out means something."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import orjson
import psutil
import pytest
from live_server import LiveServer

SUM = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def demo() -> Iterator[LiveServer]:
    """The server that a newcomer starts."""
    with LiveServer.real("--model-path", "demo", "--device", "cpu", "--enable-cache-report") as live:
        yield live.wait_ready()


@pytest.fixture(scope="module")
def api(demo: LiveServer) -> Iterator[openai.OpenAI]:
    """Its OpenAI client."""
    with openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_no_step_waits_until_the_grammar_library_is_imported(demo):
    """An import holds the interpreter lock, for a second beside other requests. So it comes before all requests."""
    scheduler = demo.engine_processes()[0]
    assert any("xgrammar" in mapped.path for mapped in scheduler.memory_maps())


def test_it_can_add(api):
    answer = api.chat.completions.create(model="demo", messages=SUM, temperature=0)
    assert answer.choices[0].message.content == "42"
    assert answer.choices[0].finish_reason == "stop"


def test_the_server_and_engine_go_before_large_bodies(demo):
    """On a CPU they share the cores. Whoever waits for /health or for a token waits for these two alone."""
    server = psutil.Process(demo.pid)
    if server.nice() > 8:
        pytest.skip("the tests' own niceness leaves no room for lower priorities")
    engine = min(
        (child for child in demo.children() if "resource_tracker" not in " ".join(child.cmdline())),
        key=lambda child: child.create_time(),
    )
    httpx.post(f"{demo.base_url}/generate", json={"text": ["x"] * 100_000}, timeout=60)
    parser = max(demo.children(), key=lambda child: child.create_time())
    assert engine.nice() == server.nice() < parser.nice()
    httpx.post(f"{demo.base_url}/tokenize", json={"prompt": ["some words"] * 100}, timeout=60)
    of_threads = {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in server.threads()}
    assert server.nice() in of_threads
    assert any(niceness > server.nice() for niceness in of_threads), "those that tokenise long texts"


def test_streams_say_what_whole_answers_say(api):
    asked = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 60, "seed": 11, "temperature": 0.8}
    whole = api.completions.create(**asked)
    stream = api.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_each_token_of_the_hostile_stream_has_an_event(demo, monkeypatch):
    """Its observer measures the time between events. Some tokens have no text."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmark" / "hostile"))
    from beside import NUM_TOKENS, STREAM

    without_text = []
    for _ in range(10):  # tokens share an event where the server does not get to writing each
        with demo.client() as client:
            lines = client.post("/v1/completions", json=STREAM).text.split("\n\n")
        choices = [orjson.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
        assert sum(len(choice["token_ids"]) for choice in choices) == NUM_TOKENS
        without_text += [choice for choice in choices if not choice["text"]]
        if without_text:
            break
    assert without_text, "which would have no event without ids"


def test_scoring_agrees_with_generating(api, demo):
    """Logprobs of generated tokens, and of the same tokens as a prompt."""
    prompt = [300, 301, 302, 303]
    params = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    with demo.client() as client:
        made = client.post("/generate", json={"input_ids": prompt, "sampling_params": params}).json()
    generated = api.completions.create(
        model="demo", prompt=prompt, max_tokens=24, temperature=0, logprobs=3, extra_body={"ignore_eos": True}
    ).choices[0]
    scored = api.completions.create(
        model="demo", prompt=prompt + made["output_ids"], max_tokens=0, echo=True, logprobs=3
    ).choices[0]
    assert generated.text == made["text"]
    assert scored.logprobs.tokens[4:] == generated.logprobs.tokens
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[4:] == pytest.approx(generated.logprobs.token_logprobs, abs=1e-3)
    for chosen, top in zip(generated.logprobs.token_logprobs, generated.logprobs.top_logprobs, strict=True):
        assert chosen == pytest.approx(max(top.values()), abs=1e-6)  # greedy takes the best


def test_seeds(api):
    asked = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 1.5, "n": 4}
    first, again, other = (
        [choice.text for choice in api.completions.create(**asked, seed=seed).choices] for seed in (7, 7, 1007)
    )
    assert first == again
    assert first != other
    assert len(set(first)) > 1


def test_logit_bias_min_tokens_and_stop_tokens(api):
    forced = api.completions.create(
        model="demo", prompt="Hello", max_tokens=5, temperature=0, logprobs=0, logit_bias={"40": 100},
        extra_body={"min_tokens": 5},
    )  # fmt: skip
    assert len(set(forced.choices[0].logprobs.tokens)) == 1
    assert forced.usage.completion_tokens == 5
    stopped = api.completions.create(
        model="demo", prompt="Hello", max_tokens=5, temperature=0, logit_bias={"40": 100},
        extra_body={"stop_token_ids": [40]},
    )  # fmt: skip
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].matched_stop == 40
    assert stopped.usage.completion_tokens == 1


def test_extreme_parameters_do_no_harm(api):
    extremes = [
        {"temperature": 1e-30}, {"temperature": 1e30}, {"top_p": 1e-30}, {"seed": 2**63 - 1}, {"seed": -(2**63)},
        {"presence_penalty": 2, "frequency_penalty": -2}, {"logit_bias": {"0": -100, "1": 100}}, {"max_tokens": 2**53},
        {"extra_body": {"top_k": 2**63 - 1}}, {"extra_body": {"min_p": 1}}, {"top_p": 5e-324},
        {"extra_body": {"repetition_penalty": 1e-3}}, {"temperature": 5e-324},
        {"extra_body": {"priority": 0}}, {"stop": [chr(0x10FFFF)] * 64}, {"stop": "x" * 4096},
    ]  # fmt: skip
    for extreme in extremes:
        asked = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "stop": ".", **extreme}
        assert api.completions.create(**asked).choices[0].finish_reason in ("stop", "length"), extreme
    assert api.chat.completions.create(model="demo", messages=SUM, temperature=0).choices[0].message.content == "42"


def test_many_at_once_agree_with_each_alone(demo):
    asked = [
        {"model": "demo", "messages": [{"role": "user", "content": f"What is {a} + {a + 7}?"}], "temperature": 0}
        for a in range(10, 58)
    ]

    async def ask(client: openai.AsyncOpenAI, body: dict, stream: bool) -> str:
        answer = await client.chat.completions.create(**body, stream=stream)
        if stream:
            return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
        return answer.choices[0].message.content

    async def ask_all() -> tuple[list[str], list[str]]:
        options = {"base_url": f"{demo.base_url}/v1", "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as client:
            together = await asyncio.gather(*(ask(client, body, index % 2 == 0) for index, body in enumerate(asked)))
            return together, [await ask(client, body, False) for body in asked]

    together, alone = asyncio.run(ask_all())
    assert together == alone
    assert together[0] == "27"
