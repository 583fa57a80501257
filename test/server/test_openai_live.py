"""The OpenAI client against a live server whose scheduler echoes the prompt, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from fake_scheduler import Seed
from live_server import WAIT_S, LiveServer, tokens_of

TEXT = "The quick brown fox: 12 + 30 = 42. Grüße, 你好!"
HI = [{"role": "user", "content": "Say hello."}]
# What the echo makes of HI: the rendered prompt without its special tokens, up to the first end-of-turn.
HI_ECHO = "user\nSay hello."


@pytest.fixture(scope="module")
def api(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The OpenAI client of the shared server."""
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with an API key, a reasoning parser and a template of its own."""
    template = tmp_path_factory.mktemp("template") / "plain.jinja"
    template.write_text("{{ messages[0].content }}")
    flags = ["--api-key", "secret", "--reasoning-parser", "qwen3", "--served-model-name", "thinker"]
    with LiveServer.fake(*flags, "--chat-template", str(template)) as live:
        yield live.wait_ready()


@pytest.fixture(scope="module")
def model(api: openai.OpenAI) -> str:
    """The served model's name."""
    return api.models.list().data[0].id


def test_completion_whole_and_streamed(api, model, client):
    length = len(tokens_of(client, TEXT))
    whole = api.completions.create(model=model, prompt=TEXT, max_tokens=length)
    assert whole.choices[0].text == TEXT
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (length, length)
    stream = api.completions.create(
        model=model, prompt=TEXT, max_tokens=length, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == length
    assert last.usage.prompt_tokens_details.cached_tokens == length - 1


def test_token_ids_and_batches(api, model, client):
    batch = [tokens_of(client, "one"), tokens_of(client, "two three")]
    answer = api.completions.create(model=model, prompt=batch, max_tokens=1, n=2, echo=True)
    firsts = [client.post("/detokenize", json={"tokens": ids[:1]}).json()["text"] for ids in batch]
    expected = ["one" + firsts[0]] * 2 + ["two three" + firsts[1]] * 2
    assert [choice.text for choice in answer.choices] == expected


def test_stop_strings_never_leak(api, model):
    options = {"model": model, "prompt": TEXT, "max_tokens": 200, "stop": ["fox: 12 + 3", "never"]}
    assert api.completions.create(**options).choices[0].text == "The quick brown "
    chunks = list(api.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "The quick brown "
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].matched_stop == "fox: 12 + 3"
    kept = api.completions.create(**options, extra_body={"no_stop_trim": True})
    assert kept.choices[0].text == "The quick brown fox: 12 + 3"


def test_scoring(api, model, client):
    ids = tokens_of(client, TEXT)
    answer = api.completions.create(model=model, prompt=TEXT, max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == TEXT
    assert choice.logprobs.token_logprobs == [None, *(-(token % 8) / 8 for token in ids[1:])]
    for token, start in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or TEXT[start:].startswith(token)


def test_chat_whole_and_streamed(api, model):
    whole = api.chat.completions.create(model=model, messages=HI)
    assert whole.choices[0].message.content == HI_ECHO
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"
    stream = api.chat.completions.create(model=model, messages=HI, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == HI_ECHO
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_chat_samples_stream_side_by_side(api, model):
    stream = api.chat.completions.create(model=model, messages=HI, n=5, stream=True)
    texts = [""] * 5
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [HI_ECHO] * 5


def test_chat_logprobs(api, model):
    answer = api.chat.completions.create(model=model, messages=HI, max_tokens=4, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 4
    assert all([top.logprob for top in entry.top_logprobs] == [-0.125, -0.25] for entry in entries)
    # the first token is the start-of-turn mark, which the text leaves out
    joined = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert joined == "<|im_start|>" + answer.choices[0].message.content


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


def test_api_key(guarded):
    with openai.OpenAI(base_url=f"{guarded.base_url}/v1", api_key="guess", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_reasoning(guarded):
    thought = "<think>\nTwo and two.\n</think>\n\nFour."  # the template passes it on, the model repeats it
    asked = {"model": "thinker", "messages": [{"role": "user", "content": thought}]}
    with openai.OpenAI(base_url=f"{guarded.base_url}/v1", api_key="secret", max_retries=0) as friend:
        asked["max_tokens"] = friend.chat.completions.create(**asked, max_tokens=1).usage.prompt_tokens
        message = friend.chat.completions.create(**asked).choices[0].message
        assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")
        reasoning, content = "", ""
        for chunk in friend.chat.completions.create(**asked, stream=True):
            reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
            content += chunk.choices[0].delta.content or ""
        assert (reasoning, content) == ("Two and two.", "Four.")
