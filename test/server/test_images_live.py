"""Images through clients against a live server with a model that reads them: the same image gives the same answer on
every route, hostile ones are refused, and neighbours do not wait."""

from __future__ import annotations

import asyncio
import base64
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hostile_images import data_url, hostile_images, oriented, picture, png, written
from live_server import LiveServer
from PIL import Image
from vision_cases import BEGIN, END, IMAGE, VIDEO, Film, Picture, answers_around, sizes_of_14193, theirs
from vision_server import save_vision_model

import fenceline
from fenceline.bench_serving import run_benchmark

pytestmark = pytest.mark.slow
SMALL = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
RED, NOISE = Image.new("RGB", (60, 40), "red"), picture(80, 50)
QUESTION = "What is in this image?"
PROMPT = f"<|im_start|>user\n{QUESTION}<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    save_vision_model(directory)
    return directory


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[LiveServer]:
    flags = ["--served-model-name", "vision", "--device", "cpu", "--enable-cache-report", "--limit-mm-data-per-request"]
    with LiveServer.real("--model-path", str(model), *flags, '{"image": 3}') as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[fenceline.Engine]:
    with fenceline.Engine(str(model), device="cpu") as made:
        yield made


def base64_of(image: Image.Image, format: str = "PNG") -> str:
    return base64.b64encode(written(image, format)).decode()


def asked(*images: Image.Image, text: str = QUESTION) -> list[Any]:
    """As in the guide of OpenAI."""
    urls = [f"data:image/png;base64,{base64_of(image)}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]


def answer(client: openai.OpenAI, *images: Image.Image) -> str:
    made = client.chat.completions.create(model="vision", messages=asked(*images), **SMALL)
    return str(made.choices[0].message.content)


def test_the_clients_of_openai_and_anthropic_agree(client: openai.OpenAI, live: LiveServer) -> None:
    import anthropic  # takes a second, which each process that collects the tests would spend

    expected = answer(client, NOISE)
    assert len({expected, answer(client, RED), answer(client)}) == 3 and answer(client, NOISE) == expected
    chunks = client.chat.completions.create(model="vision", messages=asked(NOISE), stream=True, **SMALL)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected

    image = {"type": "input_image", "image_url": f"data:image/png;base64,{base64_of(NOISE)}", "detail": "auto"}
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}, image]}]
    settings: dict[str, Any] = {"temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
    response = client.responses.create(model="vision", input=items, **settings)
    assert response.output_text == expected
    later = client.responses.create(model="vision", input="And?", previous_response_id=response.id, **settings)
    turns = [*asked(NOISE), {"role": "assistant", "content": expected}, {"role": "user", "content": "And?"}]
    same = client.chat.completions.create(model="vision", messages=turns, **SMALL)
    assert later.output_text == same.choices[0].message.content

    with anthropic.Anthropic(base_url=live.base_url, api_key="none", max_retries=0) as other:
        source: Any = {"type": "base64", "media_type": "image/png", "data": base64_of(NOISE)}
        messages: Any = [
            {"role": "user", "content": [{"type": "text", "text": QUESTION}, {"type": "image", "source": source}]}
        ]
        message = other.messages.create(
            model="vision", max_tokens=8, messages=messages, extra_body={"ignore_eos": True, "temperature": 0}
        )
        assert message.content[0].text == expected  # type: ignore[union-attr]
        num_tokens = other.messages.count_tokens(model="vision", messages=messages).input_tokens
        used = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        assert num_tokens == used == same_usage(client)

    generated = httpx.post(
        f"{live.base_url}/generate",
        json={
            "text": PROMPT,
            "image_data": base64_of(NOISE),
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "n": 2},
        },
    ).json()
    assert [one["text"] for one in generated] == [expected] * 2


def same_usage(client: openai.OpenAI) -> int:
    made = client.chat.completions.create(model="vision", messages=asked(NOISE), **SMALL)
    assert made.usage is not None
    return made.usage.prompt_tokens


def test_formats_of_one_picture_give_one_answer(client: openai.OpenAI) -> None:
    def of(data: bytes) -> str:
        messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(data)}}]}]
        made = client.chat.completions.create(model="vision", messages=messages, **SMALL)
        return str(made.choices[0].message.content)

    lossless = [written(NOISE, "PNG"), written(NOISE, "WEBP", lossless=True), written(NOISE.convert("RGBA"), "PNG")]
    assert len(set(map(of, lossless))) == 1
    assert of(oriented(6, 50, 80)) != of(oriented(1, 50, 80))


def test_several_images_in_several_turns(client: openai.OpenAI) -> None:
    turns = [*asked(NOISE, RED), {"role": "assistant", "content": "ab"}, *asked(RED)]
    other = [*asked(RED, NOISE), {"role": "assistant", "content": "ab"}, *asked(RED)]
    texts = {
        client.chat.completions.create(model="vision", messages=messages, **SMALL).choices[0].message.content
        for messages in (turns, other, turns)
    }
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([png(10_000, 10_000)], r"messages\[0\].content\[1\]: it has 10000x10000 pixels"),
        ([written(NOISE, "PNG"), b"GIF89a"], r"messages\[0\].content\[2\]: its file is broken"),
        ([written(NOISE, "PNG")[:900]], r"messages\[0\].content\[1\]: its PNG file is broken"),
        ([written(RED, "PNG")] * 4, r"messages\[0\].content\[4\]: the request has 4 images, this server takes 3"),
        ([written(picture(1000, 900), "PNG")], "the prompt has 11.. tokens, this server takes at most 511"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, content: list[bytes], reason: str) -> None:
    messages = asked()
    messages[0]["content"] += [{"type": "image_url", "image_url": {"url": data_url(data)}} for data in content]
    with pytest.raises(openai.BadRequestError, match=reason):
        client.chat.completions.create(model="vision", messages=messages, **SMALL)


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "shapes": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "shapes"],
    "additionalProperties": False,
}


NO_SPACE = {"0": -100, "1": -100}  # random weights would write little else between the parts of JSON


def check_seen(text: str) -> None:
    seen = json.loads(text)
    assert seen.keys() == {"colour", "shapes"} and seen["colour"] in ("red", "green") and 0 <= seen["shapes"] <= 99


def test_answers_about_an_image_fit_a_json_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA, "strict": True}}
    for seed, image in enumerate((NOISE, NOISE, RED)):
        made = client.chat.completions.create(
            model="vision", messages=asked(image), response_format=form, logit_bias=NO_SPACE, seed=seed
        )
        assert made.choices[0].finish_reason == "stop"
        check_seen(made.choices[0].message.content or "")


def test_a_tool_is_called_about_an_image(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "note", "parameters": SCHEMA, "strict": True}}
    made = client.chat.completions.create(
        model="vision",
        messages=asked(NOISE),
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        logit_bias=NO_SPACE,
    )
    [call] = made.choices[0].message.tool_calls or []
    assert made.choices[0].finish_reason == "tool_calls" and call.type == "function" and call.function.name == "note"
    check_seen(call.function.arguments)


def test_samples_of_a_prompt_share_its_image(live: LiveServer) -> None:
    params = {"temperature": 1, "max_new_tokens": 8, "ignore_eos": True, "n": 3, "sampling_seed": 3}
    body = {"text": f"~{PROMPT}", "image_data": base64_of(picture(90, 60, seed=5)), "sampling_params": params}
    samples = httpx.post(f"{live.base_url}/generate", json=body).json()
    assert len({one["text"] for one in samples}) == 3
    facts = [one["meta_info"] for one in samples]
    computed = sorted([one["prompt_tokens"] - one["cached_tokens"] for one in facts])
    assert computed[2] == facts[0]["prompt_tokens"], "one computes the prompt with the image"
    assert computed[0] == computed[1] < computed[2] // 2, "two find it"


def test_logprobs_beside_images(client: openai.OpenAI, live: LiveServer) -> None:
    made = client.chat.completions.create(model="vision", messages=asked(NOISE), logprobs=True, top_logprobs=3, **SMALL)
    content = made.choices[0].logprobs and made.choices[0].logprobs.content
    assert content and "".join(one.token for one in content) == made.choices[0].message.content
    for one in content:  # it was decoded greedily
        assert len(one.top_logprobs) == 3 and one.logprob == max(top.logprob for top in one.top_logprobs)
    body = {"text": PROMPT, "image_data": base64_of(NOISE), "return_logprob": True, "logprob_start_len": 0}
    facts = httpx.post(f"{live.base_url}/generate", json=body | {"sampling_params": {"max_new_tokens": 1}}).json()
    prompt = facts["meta_info"]["input_token_logprobs"]
    assert len(prompt) == facts["meta_info"]["prompt_tokens"] and [one[1] for one in prompt].count(IMAGE) > 1
    assert all(logprob < 0 for logprob, *_ in prompt[1:])


def test_stop_strings_beside_images(client: openai.OpenAI) -> None:
    expected = answer(client, NOISE)
    stop = expected[4:6]
    made = client.chat.completions.create(model="vision", messages=asked(NOISE), stop=[stop], **SMALL)
    assert made.choices[0].finish_reason == "stop"
    assert made.choices[0].message.content == expected[: expected.index(stop)]


def test_image_tokens_in_texts_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="do not write the model's image tokens into texts"):
        client.chat.completions.create(model="vision", messages=asked(text="<|image_pad|>"), **SMALL)


def shown(*frames: Image.Image, **fields: object) -> list[Any]:
    """A question about a video, in the form of Qwen's models."""
    urls = [f"data:image/png;base64,{base64_of(frame)}" for frame in frames]
    video = {"type": "video", "video": urls, **fields}
    return [{"role": "user", "content": [{"type": "text", "text": QUESTION}, video]}]


@pytest.mark.long
def test_videos_are_lists_of_frames(client: openai.OpenAI, live: LiveServer, engine: fenceline.Engine) -> None:
    frames = [picture(60, 40, seed=seed) for seed in range(3)]

    def of(messages: list[Any]) -> str:
        made = client.chat.completions.create(model="vision", messages=messages, **SMALL)
        return str(made.choices[0].message.content)

    expected = of(shown(*frames))
    assert of(shown(*frames, fps=2.0)) == of(shown(*frames, timestamps=[0, 0.5, 1.0])) == expected
    assert len({expected, of(shown(*frames, fps=0.1)), of(shown(*frames[::-1])), of(asked(*frames))}) == 4

    together = "data:video/jpeg;base64," + ",".join(base64_of(frame) for frame in frames)
    messages: Any = shown(*frames)
    messages[0]["content"][1] = {"type": "video_url", "video_url": {"url": together}}
    assert of(messages) == expected
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    text = PROMPT.replace("image_pad", "video_pad")
    body: dict[str, Any] = {"video_data": [{"video": list(map(base64_of, frames))}], "sampling_params": params}
    assert httpx.post(f"{live.base_url}/generate", json=body | {"text": text}).json()["text"] == expected
    tokens = httpx.post(f"{live.base_url}/tokenize", json={"messages": messages}).json()["tokens"]
    assert tokens.count(VIDEO) == 2 * 6, "two groups of frames"
    ids = [id for index, id in enumerate(tokens) if id != VIDEO or tokens[index - 1] != VIDEO]
    assert httpx.post(f"{live.base_url}/generate", json=body | {"input_ids": ids}).json()["text"] == expected

    array = np.stack([np.asarray(frame) for frame in frames])
    texts = [engine.generate(text, params, video_data=one)["text"] for one in (frames, array)]
    content = [{"type": "text", "text": QUESTION}, {"type": "video", "video": array}]
    made = engine.chat([{"role": "user", "content": content}], params)["choices"][0]
    assert [*texts, made["message"]["content"]] == [expected] * 3


@pytest.mark.parametrize(
    ("video", "reason"),
    [
        ("data:video/mp4;base64,AAAA", "video files are not decoded here: send its frames"),
        ("https://example.org/a.mp4", "video files are not decoded here: send its frames"),
        ([data_url(png(10_000, 10_000))], r"messages\[0\].content\[1\].video\[0\]: it has 10000x10000 pixels"),
        ([data_url(written(NOISE, "PNG")), data_url(b"GIF89a")], r"content\[1\].video\[1\]: its file is broken"),
        ([data_url(written(one, "PNG")) for one in (NOISE, RED)], r"video\[1\]: its 60x40 pixels are not the 80x50"),
        ([data_url(written(NOISE, "PNG"))] * 257, r"video\[256\]: the video has 257 frames, this server takes 256"),
        (
            [data_url(written(picture(300, 300), "PNG"))] * 16,
            "the prompt has 1... tokens, this server takes at most 511",
        ),
    ],
)
def test_which_videos_are_refused(client: openai.OpenAI, video: object, reason: str) -> None:
    for fields in ({"type": "video", "video": video}, {"type": "video_url", "video_url": {"url": video}}):
        messages: Any = shown()
        messages[0]["content"][1] = fields
        with pytest.raises(openai.BadRequestError, match=reason):
            client.chat.completions.create(model="vision", messages=messages, **SMALL)


def test_images_are_fetched_from_nowhere(client: openai.OpenAI, live: LiveServer) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": live.base_url}}]}]
    with pytest.raises(openai.BadRequestError, match="this server fetches no images"):
        client.chat.completions.create(model="vision", messages=messages, **SMALL)


async def _hostile(url: str, count: int, seed: int) -> set[int]:
    """The statuses of ``count`` hostile requests, beside which others are answered."""
    statuses = set()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def neighbour() -> None:
            while True:
                assert (await client.get("/v1/models")).status_code == 200

        async def ask(data: bytes) -> int:
            messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(data)}}]}]
            body = {"messages": messages, "max_tokens": 1}
            return (await client.post("/v1/chat/completions", json=body)).status_code

        beside = asyncio.create_task(neighbour())
        files = list(hostile_images(count, seed))
        for start in range(0, count, 8):
            statuses |= set(await asyncio.gather(*map(ask, files[start : start + 8])))
        assert not beside.done()
        beside.cancel()
    return statuses


def test_hostile_images_are_no_server_errors(live: LiveServer) -> None:
    """Unit tests give 2,000 to the decoder, and measure how long the event loop is kept."""
    assert asyncio.run(_hostile(live.base_url, 80, seed=3)) == {200, 400}


@pytest.mark.long
def test_two_ranks_answer_the_client_of_sglang_14193(tmp_path: Path) -> None:
    """With sums of gloo: 1,025 tokens, twice, and images that end at the edge of a chunk."""
    save_vision_model(tmp_path)
    cases = sizes_of_14193(tmp_path, 1024)
    flags = ["--device", "cpu", "--tp-size", "2", "--chunked-prefill-size", "1024", "--disable-radix-cache"]
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    with LiveServer.real("--model-path", str(tmp_path), *flags) as server:
        server.wait_ready()
        answers = [
            httpx.post(
                f"{server.base_url}/generate",
                json={"input_ids": ids, "image_data": list(map(base64_of, images)), "sampling_params": params},
                timeout=120,
            ).json()["output_ids"]
            for ids, images in cases
        ]
    assert answers == answers_around(tmp_path, cases, "cpu")


@pytest.mark.long
def test_an_engine_takes_images_of_pillow_and_arrays(client: openai.OpenAI, engine: fenceline.Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    texts = [engine.generate(PROMPT, params, image_data=one)["text"] for one in (NOISE, np.asarray(NOISE))]
    message = {"role": "user", "content": [{"type": "text", "text": QUESTION}, {"type": "image", "image": NOISE}]}
    texts.append(engine.chat([message], params)["choices"][0]["message"]["content"])
    assert texts == [answer(client, NOISE)] * 3


@pytest.mark.long
@pytest.mark.parametrize("name", ["Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_conversations_are_answered_as_by_transformers(name: str, tmp_path: Path) -> None:
    model = save_vision_model(tmp_path, name)
    with fenceline.Engine(str(tmp_path), device="cpu") as engine:
        parts = [{"type": "image", "image": NOISE}, {"type": "text", "text": "and"}, {"type": "image", "image": RED}]
        pictures: list[Picture] = [NOISE, RED]
        if not name.startswith("Gemma3"):
            film = Film(tuple(picture(60, 40, seed=seed) for seed in range(3)), fps=1.0)
            parts.append({"type": "video", "video": list(film.frames), "fps": film.fps})
            pictures.append(film)
        made = engine.chat(
            [{"role": "user", "content": parts}],
            {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
            return_token_ids=True,
            return_prompt_token_ids=True,
        )["choices"][0]
    ids = made["prompt_token_ids"]
    line = ids[ids.index(BEGIN) - 1]
    assert (ids[ids.index(BEGIN) - 2 : ids.index(BEGIN)] == [line, line]) == name.startswith("Gemma3")
    assert ids[len(ids) - ids[::-1].index(IMAGE)] == END
    assert made["token_ids"] == theirs(model, ids, pictures)


def test_bench_serving_sends_images(live: LiveServer, tmp_path: Path) -> None:
    """Images that no request had before, and those of a pool, which every request but the first of each finds."""
    flags = {"backend": "fenceline-oai-chat", "base_url": live.base_url, "dataset_name": "image", "num_prompts": 6}
    sizes = {"image_resolution": "40x60", "image_count": 2, "random_input_len": 20, "random_output_len": 4}
    output = {"disable_tqdm": True, "output_file": str(tmp_path / "lines.jsonl"), "random_range_ratio": 1.0}
    cached = []
    for pool in (None, 2):
        result = run_benchmark(Namespace(**flags, **sizes, **output, image_pool=pool, max_concurrency=2))
        assert result["completed"] == 6 and result["failed"] == 0 and result["mean_ttft_ms"] > 0
        assert result["total_input_tokens"] >= 6 * (20 + 2 * 4), "those of images too"
        cached.append(result["total_cached_tokens"])
    assert cached[0] < cached[1]
