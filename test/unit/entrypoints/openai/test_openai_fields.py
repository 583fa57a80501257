"""What is asked for and not declared is refused with a remedy, without effect, or unknown: never silently ignored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints import fields
from fenceline.entrypoints.fields import CHAT, COMPLETION, MAX_NAMES_LOGGED, UnknownFields
from fenceline.entrypoints.generate_body import FIELDS, SAMPLING_FIELDS, expand, parse_generate
from fenceline.entrypoints.openai.parsing import parse_body
from fenceline.entrypoints.openai.protocol import ChatBody, CommonBody, CompletionBody
from fenceline.frontend.request_types import RequestError
from fenceline.ipc.io_struct import TokenizedGenerateReq

DOCS = Path(__file__).parents[4] / "docs"
HI = [{"role": "user", "content": "Hi"}]
# Every route that generates, with a body that it answers, and every other POST route.
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/generate": {"text": "a"},
}
OTHER_ROUTES = {
    "/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score",
    "/v1/messages/count_tokens", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/flush_cache",
    "/clear_hicache_storage_backend", "/hicache/storage-backend/clear", "/abort_request", "/pause_generation",
    "/continue_generation", "/update_weights_from_disk", "/update_weights_from_tensor", "/start_profile",
    "/stop_profile", "/flight_recorder",
}  # fmt: skip
# Each field that all routes have in common: a value, and what must come to the engine.
EFFECTS: dict[str, tuple[object, Callable[[TokenizedGenerateReq], bool]]] = {
    "model": ("default", lambda sent: True),
    "stream": (True, lambda sent: sent.stream),
    "temperature": (0.25, lambda sent: sent.sampling_params.temperature == 0.25),
    "top_p": (0.5, lambda sent: sent.sampling_params.top_p == 0.5),
    "top_k": (7, lambda sent: sent.sampling_params.top_k == 7),
    "min_p": (0.125, lambda sent: sent.sampling_params.min_p == 0.125),
    "repetition_penalty": (1.5, lambda sent: sent.sampling_params.repetition_penalty == 1.5),
    "presence_penalty": (0.5, lambda sent: sent.sampling_params.presence_penalty == 0.5),
    "frequency_penalty": (0.5, lambda sent: sent.sampling_params.frequency_penalty == 0.5),
    "logit_bias": ({"5": 1.0}, lambda sent: sent.sampling_params.logit_bias == {5: 1.0}),
    "seed": (11, lambda sent: sent.sampling_params.seed == 11),
    "min_tokens": (2, lambda sent: sent.sampling_params.min_new_tokens == 2),
    "stop": ("END", lambda sent: sent.sampling_params.stop == ("END",)),
    "stop_token_ids": ([9], lambda sent: sent.sampling_params.stop_token_ids == (9,)),
    "ignore_eos": (True, lambda sent: sent.sampling_params.ignore_eos),
    "skip_special_tokens": (False, lambda sent: not sent.sampling_params.skip_special_tokens),
    "spaces_between_special_tokens": (False, lambda sent: not sent.sampling_params.spaces_between_special_tokens),
    "no_stop_trim": (True, lambda sent: sent.sampling_params.no_stop_trim),
    "include_stop_str_in_output": (True, lambda sent: sent.sampling_params.no_stop_trim),
    "rid": ("mine", lambda sent: sent.rid == "mine"),
    "request_id": ("yours", lambda sent: sent.rid == "yours"),
    "extra_key": ("tenant", lambda sent: len(sent.extra_key) == 64),
    "cache_salt": ("tenant", lambda sent: len(sent.extra_key) == 64),
    "priority": (3, lambda sent: sent.priority == 3),
    "regex": ("a+", lambda sent: sent.grammar is not None),
    "ebnf": ('root ::= "a"', lambda sent: sent.grammar is not None),
}
NATIVE_NAMES = {"min_tokens": "min_new_tokens"}
# What each of these asks for was left out in silence once.
ASKED = {
    "stop_regex": "a+", "guided_json": {"type": "object"}, "guided_regex": "a+", "guided_choice": ["a", "b"],
    "guided_grammar": "x", "structured_outputs": {"regex": "a"}, "use_beam_search": True, "prompt_logprobs": 0,
    "length_penalty": 0.5, "truncate_prompt_tokens": 5, "allowed_token_ids": [1], "bad_words": ["a"],
    "logits_processors": ["x"], "media_io_kwargs": {"a": 1}, "kv_transfer_params": {"a": 1},
    "custom_params": {"a": 1}, "session_params": {"id": 1}, "bootstrap_host": "x", "bootstrap_port": [8998],
    "bootstrap_room": 7, "data_parallel_rank": 1, "return_routed_experts": True, "vllm_xargs": {"a": 1},
    "early_stopping": True, "input_embeds": [[1.0]],
}  # fmt: skip
NOTHING = (None, False, "", [], {}, [None, None])


async def test_every_route_that_generates_is_walked(serve):
    async with serve() as server:
        posts = {route.path for route in routes_of(server.app.routes) if "POST" in (route.methods or ())}
        assert posts == GENERATING.keys() | OTHER_ROUTES


def routes_of(routes: Iterable[Any]) -> Iterator[Any]:
    """All routes, those of included routers too."""
    for route in routes:
        inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
        if inner is None:
            yield route
        else:
            yield from routes_of(inner)


@pytest.mark.parametrize(("path", "body"), GENERATING.items())
async def test_a_common_field_has_its_effect_or_is_refused(serve, path, body):
    assert EFFECTS.keys() == CommonBody.model_fields.keys()
    flags = {"enable_priority_scheduling": True, "served_model_name": "byte"}
    async with serve(**flags) as server, aiohttp.ClientSession() as session:
        for name, (value, shows) in EFFECTS.items():
            asked = {**body, name: value}
            if path == "/generate" and (inner := NATIVE_NAMES.get(name, name)) in SAMPLING_FIELDS.declared:
                asked = {**body, "sampling_params": {inner: value}}
            server.link.sent.clear()
            async with session.post(server.url + path, json=asked) as response:
                answer = await response.text()
                if response.status == 400:
                    assert "is not available" in answer and not server.link.sent, (name, answer)
                    continue
                assert response.status == 200, (name, answer)
            [sent] = server.link.sent
            assert shows(sent), name


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
async def test_tenants_share_prefixes_on_no_route(serve, name):
    """The namespace is the same on each route, so that one tenant's routes share with each other alone."""
    async with serve() as server, aiohttp.ClientSession() as session:
        for path, body in GENERATING.items():
            for tenant in ("ann", "ben", "ann"):
                async with session.post(server.url + path, json={**body, name: tenant}) as response:
                    assert response.status == 200, await response.text()
            async with session.post(server.url + path, json={**body, name: "x" * 1025}) as response:
                assert response.status == 400 and name in await response.text()
        spaces = [message.extra_key for message in server.link.sent]
        assert len(set(spaces)) == 2 and spaces == [spaces[0], spaces[1], spaces[0]] * len(GENERATING)


@pytest.mark.parametrize(("path", "body"), GENERATING.items())
async def test_what_was_asked_for_is_refused_by_its_name(serve, path, body):
    async with serve() as server, aiohttp.ClientSession() as session:
        for name, value in ASKED.items():
            async with session.post(server.url + path, json={**body, name: value}) as response:
                error = (await response.json())["error"]
                assert response.status == 400, name
            if path != "/v1/messages":  # Anthropic's errors have neither
                assert error["param"] == name and error["code"] == "unsupported"
            assert error["message"].startswith(f"{name} is not available: ")
        assert server.link.sent == []
        nothing = {name: NOTHING[index % len(NOTHING)] for index, name in enumerate(ASKED)}
        async with session.post(server.url + path, json={**body, **nothing}) as response:
            assert response.status == 200, await response.text()


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_openai_bodies_judge_every_field_of_the_tables(kind):
    table = CHAT if kind is ChatBody else COMPLETION
    body = {"prompt": "a"} if kind is CompletionBody else {"messages": HI}
    watch = UnknownFields(strict=True)
    for name in table.keys() - kind.model_fields.keys():
        with pytest.raises(RequestError, match="is not available: ") as caught:
            parse_body(kind, orjson.dumps({**body, name: ["something"]}), watch)
        assert caught.value.param == name
        parse_body(kind, orjson.dumps({**body, name: None}), watch)
    for name in fields.WITHOUT_EFFECT - kind.model_fields.keys():
        parse_body(kind, orjson.dumps({**body, name: "x"}), watch)


def test_generate_judges_every_field_of_the_tables():
    watch = UnknownFields(strict=True)
    for name in fields.GENERATION.keys() - FIELDS.declared:
        with pytest.raises(RequestError, match="is not available: ") as caught:
            parse_generate(orjson.dumps({"text": "a", name: ["something"]}), watch)
        assert caught.value.param == name
        assert parse_generate(orjson.dumps({"text": "a", name: ""}), watch).text == "a"
    for name in fields.SAMPLING:
        body = {"text": "a", "sampling_params": {"temperature": 0, name: [5]}}
        with pytest.raises(RequestError, match=f"^{name} is not available: "):
            parse_generate(orjson.dumps(body), watch)
        body["sampling_params"][name] = ""  # type: ignore[index]
        parsed = parse_generate(orjson.dumps(body), watch)
        assert parsed.sampling_params.temperature == 0
    for name in fields.WITHOUT_EFFECT:
        assert parse_generate(orjson.dumps({"text": "a", name: "x"}), watch).text == "a"


def test_a_field_nobody_knows_is_named_once_in_the_log(caplog):
    watch = UnknownFields(strict=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            parse_body(CompletionBody, b'{"prompt": "a", "max_token": 5}', watch)
            parse_generate(b'{"text": "a", "sample_params": {}}', watch)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "A request has the field 'max_token'",
        "A request has the field 'sample_params'",
    ]
    assert "did you mean max_tokens?" in caplog.text
    assert "did you mean sampling_params?" in caplog.text


def test_the_log_of_unknown_fields_is_bounded(caplog):
    watch = UnknownFields(strict=False)
    names = [f"x{index}\n\x1b[31m" + "y" * 10_000 for index in range(3 * MAX_NAMES_LOGGED)]
    with caplog.at_level(logging.WARNING):
        for name in names:
            parse_body(ChatBody, orjson.dumps({"messages": HI, name: 1}), watch)
    assert len(caplog.records) == MAX_NAMES_LOGGED
    assert all(len(record.getMessage()) < 300 for record in caplog.records)
    assert not any("\n" in record.getMessage() or "\x1b" in record.getMessage() for record in caplog.records)


async def test_strict_fields_refuses_what_nobody_knows(serve):
    async with serve(strict_fields=True) as server:
        with pytest.raises(openai.BadRequestError, match="'max_token' is not known; did you mean max_tokens?"):
            await server.client.completions.create(model="byte", prompt="a", extra_body={"max_token": 5})
        answer = await server.client.chat.completions.create(
            model="byte", messages=HI, user="ann", store=True, metadata={"a": "b"}
        )
        assert answer.choices[0].message.content == "Hello wörld"
    with pytest.raises(RequestError, match="'sample_params' is not known"):
        parse_generate(b'{"text": "a", "sample_params": {}}', UnknownFields(strict=True))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "; it belongs in sampling_params"),
        ("temperature", "; it belongs in sampling_params"),
        ("max_tokens", "; did you mean max_new_tokens in sampling_params?"),
        ("retrun_logprob", "; did you mean return_logprob?"),
        ("mood", ""),
    ],
)
def test_sampling_parameters_one_level_too_high_are_told(name, hint, caplog):
    body = orjson.dumps({"text": "a", name: 1})
    with pytest.raises(RequestError) as caught:
        parse_generate(body, UnknownFields(strict=True))
    assert caught.value.message == f"field '{name}' is not known{hint}"
    with caplog.at_level(logging.WARNING):
        parse_generate(body, UnknownFields(strict=False))
    assert f"has no effect{hint} (" in caplog.text


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_every_field_that_does_something_is_documented(kind):
    text = (DOCS / "use" / "openai_api.md").read_text()
    assert [name for name in kind.model_fields if f"`{name}`" not in text] == []


def test_every_field_of_generate_is_documented():
    text = (DOCS / "use" / "api.md").read_text()
    declared = FIELDS.declared | SAMPLING_FIELDS.declared
    assert [name for name in sorted(declared) if f"`{name}`" not in text] == []


# --- vLLM's and SGLang's fields that do something


@pytest.mark.parametrize("n", [1, 2])
async def test_token_ids_of_prompt_and_output(serve, n):
    asked = {"model": "byte", "extra_body": {"return_token_ids": True}, "n": n}
    async with serve() as server:
        text = await server.client.completions.create(prompt=["ab", "c"], **asked)
        prompts = [[server.tokenizer.encode(prompt)] + [None] * (n - 1) for prompt in ("ab", "c")]
        ids = server.tokenizer.encode("Hello wörld", False)
        assert [getattr(choice, "prompt_token_ids", None) for choice in text.choices] == sum(prompts, [])
        assert all(server.tokenizer.decode(choice.token_ids) == "Hello wörld" for choice in text.choices)
        chat = await server.client.chat.completions.create(messages=HI, **asked)
        assert chat.choices[0].prompt_token_ids == list(server.link.sent[-1].input_ids)
        assert sorted(chat.choices[0].token_ids) == sorted(text.choices[0].token_ids)
        assert len(ids) <= len(text.choices[0].token_ids)


@pytest.mark.parametrize("chat", [False, True])
async def test_token_ids_of_a_stream_are_the_new_ones(serve, chat):
    async with serve() as server:
        asked = {"model": "byte", "stream": True, "extra_body": {"return_token_ids": True}}
        if chat:
            stream = await server.client.chat.completions.create(messages=HI, **asked)
        else:
            stream = await server.client.completions.create(prompt="ab", **asked)
        choices = [chunk.choices[0] async for chunk in stream]
        given = [choice.prompt_token_ids for choice in choices if hasattr(choice, "prompt_token_ids")]
        assert given == [list(server.link.sent[0].input_ids)]
        ids = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
        assert server.tokenizer.decode(ids) == "Hello wörld"
        without = await server.client.completions.create(model="byte", prompt="ab")
        assert not hasattr(without.choices[0], "token_ids")


async def test_chat_takes_the_prompt_as_token_ids(serve):
    async with serve(reasoning_parser="qwen3") as server:
        server.script.pieces = ["thought</think>", "answer"]
        ids = server.tokenizer.encode("any prompt<think>", False)
        answer = await server.client.chat.completions.create(
            model="byte", messages=HI, n=2, extra_body={"input_ids": ids}
        )
        assert [list(message.input_ids) for message in server.link.sent] == [ids, ids]
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("thought", "answer")
        for wrong in (["a"], [True], "abc", [1.5]):
            with pytest.raises(openai.BadRequestError, match="list of token ids"):
                await server.client.chat.completions.create(model="byte", messages=HI, extra_body={"input_ids": wrong})


async def test_fields_of_messages_are_judged_too(serve, tmp_path, caplog):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content ~ m.reasoning_content }}{% endfor %}")

    async def ask(server, **extra):
        message = {"role": "assistant", "content": "a", **extra}
        return await server.client.chat.completions.create(model="byte", messages=[*HI, message])

    async with serve(chat_template=str(template)) as server:
        for name in fields.MESSAGE:
            with pytest.raises(openai.BadRequestError, match=f"{name} is not available: ") as caught:
                await ask(server, **{name: {"name": "f"}})
            assert caught.value.param == f"messages[1].{name}"
        await ask(server, function_call=None, refusal=None, annotations=[], audio=None)
        assert "is not known" not in caplog.text
        await ask(server, reasoning="because", mood="good")
        assert server.tokenizer.decode(server.link.sent[-1].input_ids) == "Hiabecause"
        assert "the field 'mood', which is not known" in caplog.text
    async with serve(strict_fields=True) as server:
        with pytest.raises(openai.BadRequestError, match="'mood' is not known"):
            await ask(server, mood="good")


async def test_other_names_of_known_things(serve):
    async with serve(enable_priority_scheduling=True) as server:
        extra = {"request_id": "r-7", "include_stop_str_in_output": True, "priority": 3}
        answer = await server.client.completions.create(model="byte", prompt="a", stop="x", extra_body=extra)
        assert answer.id == "r-7"
        (message,) = server.link.sent
        assert message.sampling_params.no_stop_trim
        assert message.priority == 3
        # vLLM's default is BOS for completions, none for chat.
        await server.client.completions.create(model="byte", prompt="a", extra_body={"add_special_tokens": False})
        await server.client.chat.completions.create(model="byte", messages=HI)
        await server.client.chat.completions.create(model="byte", messages=HI, extra_body={"add_special_tokens": True})
        special = server.tokenizer.encode("", True)
        bare, chat, chat_with = (list(message.input_ids) for message in server.link.sent[1:])
        assert bare == server.tokenizer.encode("a", False)
        assert chat_with == special + chat


@pytest.mark.parametrize(
    ("extra", "times"),
    [
        ({}, 1),
        ({"lora_path": None, "return_routed_experts": False, "image_data": [None], "model": "m"}, 1),
        ({"lora_path": [None, ""], "bootstrap_room": None, "session_params": {}}, 1),
        ({"watermarking": None}, 3),  # in vain, for its names, without them
    ],
)
def test_what_clients_always_mention_costs_no_second_reading(monkeypatch, extra, times):
    readings = []

    def counted(data, kind):
        readings.extend([kind] * (kind is not object))  # a value of its own is an object
        return original(data, kind)

    original = fields.parse_body
    monkeypatch.setattr(fields, "parse_body", counted)
    parse_generate(orjson.dumps({"text": "a", **extra}), UnknownFields(strict=True))
    assert len(readings) == times


def test_a_large_prompt_beside_an_unknown_field_is_kept_as_it_is():
    ids = list(range(50_000))
    body = parse_generate(orjson.dumps({"x": 1, "input_ids": ids, "rid": "r"}), UnknownFields(strict=False))
    assert (body.input_ids, body.rid) == (ids, "r")


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"text": "a", "image_data": "x"}, [{"image_data": "x"}]),
        ({"text": "a", "image_data": ["x", "y"]}, [{"image_data[0]": "x", "image_data[1]": "y"}]),
        ({"text": "a", "image_data": [["x", "y"]]}, [{"image_data[0][0]": "x", "image_data[0][1]": "y"}]),
        ({"text": ["a", "b"], "image_data": "x"}, [{"image_data": "x"}, {"image_data": "x"}]),
        ({"text": ["a", "b"], "image_data": [["x", None], "y"]}, [{"image_data[0][0]": "x"}, {"image_data[1]": "y"}]),
        ({"text": ["a", "b"], "image_data": [None, ""]}, [{}, {}]),
        ({"text": "a", "image_data": [None]}, [{}]),
    ],
)
async def test_images_of_each_prompt(model_dir, fields, places):
    config = resolve(ServerArgs(model_path=str(model_dir), load_format="dummy"))
    body = parse_generate(orjson.dumps(fields), UnknownFields(strict=True))
    found = (await expand(body, config, "r")).inputs
    assert [{image.place: image.url for image in inp.images} for inp in found] == places
    with pytest.raises(RequestError, match="image_data has 3 entries for 2 prompts"):
        body = parse_generate(orjson.dumps({"text": ["a", "b"], "image_data": ["x"] * 3}), UnknownFields(strict=True))
        await expand(body, config, "r")


FRAMES = "data:video/jpeg;base64,x,y"


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"text": "a", "video_data": FRAMES}, [{"video_data": 2}]),
        ({"text": "a", "video_data": {"video": ["x"], "fps": 1}}, [{"video_data": 1}]),
        ({"text": "a", "video_data": [FRAMES, {"video": ["x"]}]}, [{"video_data[0]": 2, "video_data[1]": 1}]),
        ({"text": ["a", "b"], "video_data": [[None, FRAMES], None]}, [{"video_data[0][1]": 2}, {}]),
        ({"text": "a", "image_data": "x", "video_data": [FRAMES]}, [{"image_data": 0, "video_data[0]": 2}]),
    ],
)
async def test_videos_of_each_prompt(model_dir, fields, places):
    config = resolve(ServerArgs(model_path=str(model_dir), load_format="dummy"))
    body = parse_generate(orjson.dumps(fields), UnknownFields(strict=True))
    found = (await expand(body, config, "r")).inputs
    assert [{one.place: len(getattr(one, "frames", ())) for one in inp.images} for inp in found] == places
    with pytest.raises(RequestError, match=r"video_data\[1\]: it is a video that is no list of frames"):
        body = parse_generate(orjson.dumps({"text": "a", "video_data": [FRAMES, "a.mp4"]}), UnknownFields(strict=True))
        await expand(body, config, "r")


@pytest.mark.parametrize(
    "videos", [["data:video/jpeg;base64," + "x," * 600] * 2, [[{"video": ["x"] * 513}], [{"video": ["x"] * 512}]]]
)
def test_frames_of_a_body_are_counted_before_they_are_made(videos):
    """A frame may have two characters, and becomes objects of hundreds of bytes."""
    with pytest.raises(RequestError, match="frames of videos together, at most 1024 are allowed") as caught:
        parse_generate(orjson.dumps({"text": "a", "video_data": videos}), UnknownFields(strict=True))
    assert (caught.value.status, caught.value.param) == (400, "video_data")
