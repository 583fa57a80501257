"""Cached prompt tokens by tier in the answers of both OpenAI endpoints."""

from __future__ import annotations

import pytest

from fenceline.ipc.io_struct import CachedTokensDetails

DETAILS = CachedTokensDetails(device=4, host=2, storage=1)
ASKED = {"extra_body": {"return_cached_tokens_details": True}}
MESSAGES = [{"role": "user", "content": "hi"}]


def tell(server) -> None:
    server.script.cached_tokens, server.script.cached_details = 7, DETAILS


async def test_usage_adds_the_tiers_of_all_prompts_once(serve):
    async with serve(enable_cache_report=True) as server:
        tell(server)
        answer = await server.client.completions.create(model="byte", prompt=["aaaaaaaa", "bbbbbbbb"], n=2)
        assert answer.usage.prompt_tokens_details.model_dump(exclude_none=True) == {
            "cached_tokens": 14,
            "cached_tokens_details": {"device": 8, "host": 4, "storage": 2},
        }
        assert not hasattr(answer, "sglext")


async def test_without_hicache_nothing_is_said_of_tiers(serve):
    async with serve(enable_cache_report=True) as server:
        server.script.cached_tokens = 7
        answer = await server.client.chat.completions.create(model="byte", messages=MESSAGES, **ASKED)
        assert answer.usage.prompt_tokens_details.model_dump(exclude_none=True) == {"cached_tokens": 7}
        assert not hasattr(answer, "sglext")


@pytest.mark.parametrize("flag", [True, False])
async def test_cached_tokens_are_reported_where_asked_without_hicache(serve, flag):
    async with serve(enable_cache_report=flag) as server:
        server.script.cached_tokens = 7
        asked = {} if flag else ASKED
        answer = await server.client.completions.create(model="byte", prompt="aaaaaaaa", **asked)
        assert answer.usage.prompt_tokens_details.cached_tokens == 7
        stream = await server.client.chat.completions.create(
            model="byte", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked
        )
        *_, last = [chunk async for chunk in stream]
        assert last.usage.prompt_tokens_details.cached_tokens == 7


async def test_without_the_report_usage_is_openais(serve):
    async with serve() as server:
        tell(server)
        answer = await server.client.chat.completions.create(model="byte", messages=MESSAGES)
        assert answer.usage.prompt_tokens_details is None
        assert not hasattr(answer, "sglext")


async def test_a_request_may_ask_for_the_tiers(serve):
    async with serve() as server:
        tell(server)
        expected = {"cached_tokens_details": {"device": 4, "host": 2, "storage": 1}}
        chat = await server.client.chat.completions.create(model="byte", messages=MESSAGES, n=2, **ASKED)
        assert chat.sglext == expected
        text = await server.client.completions.create(model="byte", prompt="a", **ASKED)
        assert text.sglext == expected


@pytest.mark.parametrize("asked", [True, False])
async def test_a_stream_brings_the_tiers_before_the_usage(serve, asked):
    async with serve(enable_cache_report=True) as server:
        tell(server)
        stream = await server.client.chat.completions.create(
            model="byte",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_cached_tokens_details": asked},
        )
        *chunks, last = [chunk async for chunk in stream]
        tiers = {"device": 4, "host": 2, "storage": 1}
        assert last.usage.prompt_tokens_details.cached_tokens_details == tiers
        extensions = [chunk for chunk in chunks if hasattr(chunk, "sglext")]
        if asked:
            assert extensions == chunks[-1:]
            assert chunks[-1].choices == []
            assert chunks[-1].sglext == {"cached_tokens_details": tiers}
        else:
            assert extensions == []


async def test_the_field_is_a_switch(serve):
    import openai

    async with serve() as server:
        with pytest.raises(openai.BadRequestError, match="return_cached_tokens_details"):
            await server.client.completions.create(
                model="byte", prompt="a", extra_body={"return_cached_tokens_details": "yes"}
            )
