"""The OpenAI client against a live server whose scheduler echoes the prompt, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from fake_scheduler import Seed
from live_server import WAIT_S, LiveServer

TEXT = "The quick brown fox: 12 + 30 = 42. Grüße, 你好!"
HI = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def api(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The OpenAI client of the shared server."""
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(api: openai.OpenAI) -> str:
    """The served model's name."""
    return api.models.list().data[0].id


def test_stop_strings_never_leak(api, model):
    options = {"model": model, "prompt": TEXT, "max_tokens": 200, "stop": ["fox: 12 + 3", "never"]}
    assert api.completions.create(**options).choices[0].text == "The quick brown "
    chunks = list(api.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "The quick brown "
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].matched_stop == "fox: 12 + 3"
    kept = api.completions.create(**options, extra_body={"no_stop_trim": True})
    assert kept.choices[0].text == "The quick brown fox: 12 + 3"


def test_errors(api, model):
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        api.completions.create(model=model, prompt="a", max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="context"):
        api.completions.create(model=model, prompt="word " * 3000)
    with pytest.raises(openai.NotFoundError, match="names an adapter"):
        api.chat.completions.create(model=f"{model}:nobody", messages=HI)
    with pytest.raises(openai.NotFoundError, match="'nobody' does not exist"):
        api.models.retrieve("nobody")
    with pytest.raises(openai.APIStatusError, match="no room for this one") as refused:
        api.completions.create(model=model, prompt="a", seed=Seed.REFUSE)
    assert refused.value.status_code == 507
    stream = api.completions.create(model=model, prompt="a", seed=Seed.REFUSE, stream=True)
    with pytest.raises(openai.APIError, match="no room for this one"):
        list(stream)


def test_many_streams_at_once(server, model):
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": f"Count to {number}."}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert asyncio.run(ask_all()) == [f"user\nCount to {number}." for number in range(64)]


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_free_their_places(server, model, client, stream):
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as leaver:
            # Two samples: the first never answers, the second stops after a token.
            call = leaver.completions.create(
                model=model, prompt=TEXT, n=2, max_tokens=500, stream=stream, seed=Seed.HANG
            )
            task = asyncio.ensure_future(call)
            while await running() < 2:
                await asyncio.sleep(0.01)
            task.cancel() if not stream else await (await task).close()
        while await running():
            await asyncio.sleep(0.01)

    async def running() -> int:
        info = await asyncio.to_thread(lambda: client.get("/get_server_info").json())
        return info["internal_states"][0]["num_running_reqs"]

    asyncio.run(asyncio.wait_for(leave(), WAIT_S))
