"""/v1/completions through the OpenAI client against a scripted model."""

from __future__ import annotations

import asyncio
from itertools import chain

import openai
import orjson
import pytest

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.openai.logprobs import LegacyLogprobsWriter, chat_logprobs
from fenceline.entrypoints.openai.token_texts import TokenTexts
from fenceline.frontend.tokenizer import load_tokenizer
from fenceline.ipc.io_struct import FinishReason, TokenLogprobs, TokenPairs


async def test_text_prompt(serve):
    async with serve() as server:
        answer = await server.client.completions.create(model="byte", prompt="Say hello", max_tokens=20)
        assert answer.object == "text_completion"
        assert answer.id.startswith("cmpl-")
        assert answer.model == "byte"
        (choice,) = answer.choices
        assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "Hello wörld", "stop", None)
        prompt = server.tokenizer.encode("Say hello")
        assert list(server.link.sent[0].input_ids) == prompt
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(server.tokenizer.encode("Hello wörld"))
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.prompt_tokens_details is None


async def test_batches_and_n_are_ordered_prompt_by_prompt(serve):
    async with serve(enable_cache_report=True) as server:
        server.script.answer_of = lambda message: [f"{len(message.input_ids)}:", message.rid]
        server.script.cached_tokens = 2
        answer = await server.client.completions.create(
            model="byte", prompt=["a", "bcd"], n=2, seed=5, extra_body={"rid": "r"}
        )
        texts = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [text.split(":")[0] for text in texts] == ["1", "1", "3", "3"]
        assert len(set(texts)) == 4  # every request has its own id
        assert answer.id == "r"
        assert [message.sampling_params.seed for message in server.link.sent] == [5, 6, 5, 6]
        assert answer.usage.prompt_tokens == 4  # a prompt counts once, whatever n is
        assert answer.usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "expected"), [([1, 2, 3], [[1, 2, 3]]), ([[4], [5, 6]], [[4], [5, 6]]), (["x"], [[87]])]
)
async def test_prompts_of_token_ids(serve, prompt, expected):
    async with serve() as server:
        await server.client.completions.create(model="byte", prompt=prompt)
        assert [list(message.input_ids) for message in server.link.sent] == expected


async def test_stream(serve):
    async with serve() as server:
        stream = await server.client.completions.create(
            model="byte", prompt="hi", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert len({chunk.id for chunk in chunks}) == 1
        *texts, last = chunks
        assert [chunk.choices[0].text for chunk in texts] == ["Hello", " w", "ör", "ld", ""]
        assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * 4 + ["stop"]
        assert all(chunk.usage is None for chunk in texts)
        assert last.choices == []
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 10)


async def test_stream_usage_in_every_chunk(serve):
    async with serve() as server:
        stream = await server.client.completions.create(
            model="byte", prompt="hi", stream=True, stream_options={"continuous_usage_stats": True}
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream]
        assert counts == [3, 5, 8, 10, 10]


async def test_stream_interleaves_choices(serve):
    async with serve() as server:
        server.script.answer_of = lambda message: list(f"{message.input_ids[0]}-{message.rid[-1]}")
        stream = await server.client.completions.create(
            model="byte", prompt=[[1], [2]], n=2, stream=True, extra_body={"rid": "r"}
        )
        texts, order = ["", "", "", ""], []
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
            order.append(chunk.choices[0].index)
        assert texts == ["1-r", "1-1", "2-2", "2-1"]
        assert order != sorted(order)


async def test_raw_stream_is_framed_as_events(serve):
    async with serve() as server:
        async with server.client.completions.with_streaming_response.create(
            model="byte", prompt="hi", stream=True
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-request-id"]
            body = b"".join([data async for data in response.iter_bytes()])
        events = body.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert all(event.startswith(b"data: {") and b"\n" not in event for event in events[:-2])


async def test_echo(serve):
    async with serve() as server:
        answer = await server.client.completions.create(model="byte", prompt="Hi!", echo=True)
        assert answer.choices[0].text == "Hi!Hello wörld"
        ids = server.tokenizer.encode("Ho")
        stream = await server.client.completions.create(model="byte", prompt=ids, echo=True, stream=True)
        assert [chunk.choices[0].text async for chunk in stream][:2] == ["HoHello", " w"]


async def test_scoring_with_echo_and_no_new_tokens(serve):
    async with serve() as server:
        server.script.finish = FinishReason(type="length", length=0)
        answer = await server.client.completions.create(
            model="byte", prompt="<s>Hö", max_tokens=0, echo=True, logprobs=2
        )
        (choice,) = answer.choices
        assert server.link.sent[0].logprob_start_len == 0
        assert choice.finish_reason == "length"
        assert choice.logprobs.tokens == ["<s>", "H", "bytes:\\xc3", "bytes:\\xb6"]
        assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.top_logprobs[1] == {server.tokenizer.token_text(7): -0.25, "H": -0.5}
        # <s> is not in the text, and half a character has no width.
        assert choice.logprobs.text_offset == [0, 0, 1, 1]
        assert answer.usage.completion_tokens == 0


async def test_logprobs_stream_like_the_whole(serve):
    async with serve() as server:
        whole = await server.client.completions.create(model="byte", prompt="Hi", echo=True, logprobs=3)
        stream = await server.client.completions.create(model="byte", prompt="Hi", echo=True, logprobs=3, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices[0].logprobs]
        expected = whole.choices[0].logprobs
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert list(chain.from_iterable(getattr(part, name) for part in parts)) == getattr(expected, name)
        assert expected.top_logprobs[-1][server.tokenizer.token_text(20)] == -9999.0  # JSON has no -inf
        text = whole.choices[0].text
        at = expected.tokens.index("He")
        assert text[expected.text_offset[at] :].startswith("Hello")


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_many_logprobs_are_encoded_position_by_position(api, monkeypatch):
    """No thread runs while one call encodes, so the event loop would wait until all of them are encoded."""
    num_positions, num_top = 2000, 20
    positions = TokenLogprobs(
        token_ids=[300] * num_positions,
        logprobs=[-0.5] * num_positions,
        top_logprobs=TokenPairs.of([[(-0.5, 300 + i) for i in range(num_top)]] * num_positions),
    )
    texts = TokenTexts(load_tokenizer(resolve(ServerArgs(model_path="demo", device="cpu")).tokenizer_path))
    num_values = []
    dumps = orjson.dumps

    def count(value, *args, **kwargs):
        num_values.append(_num_values(value))
        return dumps(value, *args, **kwargs)

    monkeypatch.setattr(orjson, "dumps", count)
    if api == "chat":
        written = orjson.dumps(chat_logprobs(texts, positions, num_top))
        tops = [entry["top_logprobs"] for entry in orjson.loads(written)["content"]]
    else:
        written = orjson.dumps(LegacyLogprobsWriter(texts, num_top, skip_special_tokens=True).write(positions))
        tops = orjson.loads(written)["top_logprobs"]
    assert [len(top) for top in tops] == [num_top] * num_positions
    assert max(num_values) <= 5 * num_positions


def _num_values(value):
    if isinstance(value, dict):
        return sum(map(_num_values, value.values()))
    return sum(map(_num_values, value)) if isinstance(value, list) else 1


async def test_logprobs_zero_reports_chosen_tokens_only(serve):
    async with serve() as server:
        answer = await server.client.completions.create(model="byte", prompt="Hi", logprobs=0)
        assert answer.choices[0].logprobs.top_logprobs is None
        assert len(answer.choices[0].logprobs.token_logprobs) == 10


async def test_sampling_parameters_arrive(serve):
    async with serve() as server:
        await server.client.completions.create(
            model="byte", prompt="a", temperature=0.5, top_p=0.9, max_tokens=7, stop=["x", "y"], seed=3,
            presence_penalty=1, frequency_penalty=-1, logit_bias={"5": -100, "6": 1.5},
            extra_body={
                "top_k": 4, "min_p": 0.1, "min_tokens": 2, "repetition_penalty": 1.1, "stop_token_ids": [9],
                "ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True,
            },
        )  # fmt: skip
        message = server.link.sent[0]
        params = message.sampling_params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 4, 0.1)
        assert (params.max_new_tokens, params.min_new_tokens, params.seed) == (7, 2, 3)
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
        assert params.logit_bias == {5: -100.0, 6: 1.5}
        assert (params.stop, params.stop_token_ids) == (("x", "y"), (9,))
        assert (params.ignore_eos, params.skip_special_tokens, params.no_stop_trim) == (True, False, True)


@pytest.mark.parametrize(("defaults", "expected"), [("model", (0.6, 0.95, 20)), ("openai", (1.0, 1.0, -1))])
async def test_sampling_defaults(serve, defaults, expected):
    async with serve(sampling_defaults=defaults) as server:
        await server.client.completions.create(model="byte", prompt="a", stop="end", extra_body={"n": None})
        params = server.link.sent[0].sampling_params
        assert (params.temperature, params.top_p, params.top_k) == expected
        assert params.max_new_tokens == 16
        assert params.stop == ("end",)


async def test_abort_and_errors_while_generating(serve):
    async with serve() as server:
        server.script.finish = FinishReason(type="abort", message="aborted by the user")
        answer = await server.client.completions.create(model="byte", prompt="a")
        assert answer.choices[0].finish_reason == "abort"
        server.script.finish = FinishReason(type="abort", message="out of memory", status_code=503)
        with pytest.raises(openai.APIStatusError, match="out of memory") as caught:
            await server.client.completions.create(model="byte", prompt="a")
        assert caught.value.status_code == 503
        stream = await server.client.completions.create(model="byte", prompt="a", stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="out of memory"):
            async for chunk in stream:
                texts.append(chunk.choices[0].text)
        assert "".join(texts) == "Hello wörld"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_client_that_leaves_aborts(serve, stream, n):
    async with serve() as server:
        server.script.endless = True

        async def ask() -> None:
            answer = await server.client.completions.create(model="byte", prompt="a", n=n, stream=stream)
            async for _ in answer:
                pass

        task = asyncio.ensure_future(ask())
        async with asyncio.timeout(20):
            while len(server.link.sent) < n or server.manager.num_active < n:
                await asyncio.sleep(0.001)
            task.cancel()
            while len(server.link.aborted) < n or server.manager.num_active:
                await asyncio.sleep(0.001)
        assert sorted(server.link.aborted) == sorted(message.rid for message in server.link.sent)
