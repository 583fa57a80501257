"""Every mistake of a client's is a 4xx with OpenAI's error object and one readable line."""

from __future__ import annotations

import json
import math

import aiohttp
import openai
import pytest

HI = [{"role": "user", "content": "Hi"}]
COMPLETION = {"model": "byte", "prompt": "a"}
CHAT = {"model": "byte", "messages": HI}

# (what the body is changed to, the error's param, a part of its message)
COMPLETION_MISTAKES = [
    ({"prompt": None}, "prompt", "this field is required"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": []}, "prompt", "is empty"),
    ({"prompt": [[]]}, "prompt", "empty list of token ids"),
    ({"prompt": ["a", ""]}, "prompt", "is empty"),
    ({"prompt": ["a", 1]}, "prompt", "must not mix forms"),
    ({"prompt": [1, True]}, "prompt", "must not mix forms"),
    ({"prompt": [1.5]}, "prompt", "must not mix forms"),
    ({"prompt": {"text": "a"}}, "prompt", "must be a string"),
    ({"prompt": ["a"] * 4097}, "prompt", "at most 4096"),
    ({"prompt": ["a"] * 100, "n": 100}, "n", "at most 4096"),
    ({"prompt": [261]}, None, "outside the vocabulary of 261"),
    ({"prompt": [-1]}, None, "outside the vocabulary"),
    ({"prompt": [2**63]}, None, "outside the vocabulary"),
    ({"prompt": "a" * 2100}, "prompt", "2048"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 129}, "n", "128"),
    ({"n": "2"}, "n", "valid integer, got '2'"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"temperature": "hot"}, "temperature", "valid number, got 'hot'"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_p": 1.1}, "top_p", "(0, 1]"),
    ({"top_k": 0}, "top_k", "-1 or at least 1"),
    ({"top_k": 2**64 - 1}, "top_k", "-1 or at least 1"),
    ({"min_p": 2}, "min_p", "[0, 1]"),
    ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
    ({"frequency_penalty": -3}, "frequency_penalty", "[-2, 2]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "[0.001, 2]"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logprobs": -1}, "logprobs", "0"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": "a"}}, "logit_bias.5", "valid number"),
    ({"logit_bias": {"5": 101}}, None, "-100, 100"),
    ({"logit_bias": {"999": 1}}, None, "outside the vocabulary"),
    ({"logit_bias": [1]}, "logit_bias", "valid dictionary"),
    ({"stop": 5}, "stop", "valid list"),
    ({"stop": ["a", 5]}, "stop[1]", "valid string"),
    ({"stop": ""}, "stop", "must not have an empty string"),
    ({"stop": ["a"] * 65}, "stop", "stop may have at most 64"),
    ({"stop_token_ids": [9] * 1025}, None, "at most 1024 ids"),
    ({"seed": 1.5}, "seed", "valid integer"),
    ({"seed": 2**64}, "seed", ""),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when stream is true"),
    ({"suffix": "end"}, "suffix", "fill in the middle"),
    ({"best_of": 3}, "best_of", "must equal n=1"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema or structural_tag, got 'xml'"),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema", "an object as schema"),
    ({"regex": "a*", "ebnf": "root ::= x"}, "ebnf", "exclude each other"),
    ({"regex": "a*", "response_format": {"type": "json_object"}}, "regex", "exclude each other"),
    ({"regex": "a" * 200_000}, "regex", "may have 131072 characters"),
    ({"json_schema": "{}"}, "json_schema", "use response_format"),
    ({"lora_path": "x"}, "lora_path", "no adapters"),
    ({"return_hidden_states": True}, "return_hidden_states", "not available"),
    ({"rid": ""}, "rid", "1 character"),
    ({"min_tokens": 20}, None, "min_new_tokens"),
    ({"logit_bias": {"5": [[[[[[[[[[1]]]]]]]]]]}}, "logit_bias.5", "valid number"),
]
CHAT_MISTAKES = [
    ({"messages": None}, "messages", "this field is required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "Hi"}, "messages", "valid list"),
    ({"messages": ["Hi"]}, "messages[0]", "valid dictionary"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "this field is required"),
    ({"messages": [*HI, {"role": "robot", "content": "Hi"}]}, "messages[1].role", "'user'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string or a list of parts"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
        "messages[0].content[0]: this model reads text only",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content",
        "[0] is a text part whose text is not",
    ),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content", "[0] is a part of type 'None'"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
    ({"logprobs": 3}, "logprobs", "valid boolean"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"top_logprobs": 2}, "top_logprobs", "only allowed when logprobs is true"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema", "takes"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "--tool-call-parser"),
    ({"tool_choice": "required"}, "tool_choice", "only allowed with tools"),
    ({"functions": [{"name": "f"}]}, "functions", "not available"),
    ({"modalities": ["audio"]}, "modalities", "only text"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "messages", "cannot set chat_template"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "valid dictionary"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "has no content"),
    ({"messages": [*HI, {"role": "user", "content": None}]}, "messages[1]", "has no content"),
    (
        {"messages": [*HI, {"role": "assistant", "reasoning_content": "x"}], "continue_final_message": True},
        "messages",
        "needs a last message",
    ),
    ({"messages": [{"role": "user", "content": "a" * 2100}]}, "prompt", "2048"),
]
TOLERATED = {
    "user": "ann", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "something_new": [1],
    "parallel_tool_calls": True, "response_format": {"type": "text"}, "n": None, "stop": None, "logit_bias": None,
    "stream": True, "stream_options": {"include_usage": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "mistakes"),
    [("completions", COMPLETION, COMPLETION_MISTAKES), ("chat/completions", CHAT, CHAT_MISTAKES)],
)
async def test_mistakes(serve, path, body, mistakes):
    async with serve() as server, aiohttp.ClientSession() as session:
        for stream in (False, True):
            for change, param, text in mistakes:
                asked = {"stream": stream, **body, **change}
                if stream and "stream_options" in change:
                    continue
                async with session.post(f"{server.url}/v1/{path}", json=asked) as response:
                    answer = await response.json()
                    assert response.status == 400, (change, answer)
                error = answer["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["type"] == "invalid_request_error"
                assert text in error["message"], (change, error)
                assert "\n" not in error["message"] and "pydantic" not in error["message"]
                if param is not None:
                    assert error["param"] == param, (change, error)
                if param == "tools":
                    assert error["code"] == "unsupported"
        assert server.link.sent == []
        answer = await server.client.completions.create(**COMPLETION)
        assert answer.choices[0].text == "Hello wörld"


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"5", b'"a"', b"null", b'{"model": "byte", "prompt": "a", "temperature": NaN}',
        b'{"model": "byte", "prompt": "a", "temperature": 1e999}', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
    ],
)  # fmt: skip
async def test_bodies_that_are_no_json_objects(serve, raw):
    async with serve() as server, aiohttp.ClientSession() as session:
        for path in ("completions", "chat/completions"):
            async with session.post(f"{server.url}/v1/{path}", data=raw) as response:
                assert response.status == 400
                assert (await response.json())["error"]["message"]


async def test_bodies_of_unreasonable_shape(serve, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].tool_calls | tojson }}{{ x | tojson }}")
    deep = b"[" * 900 + b"]" * 900
    bodies = [
        b'{"messages": [{"role": "assistant", "tool_calls": [{"x": ' + deep + b"}]}]}",
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": ' + deep + b"}}",
        b'{"messages": [' + b"1," * 300_000 + b"1]}",
    ]
    async with serve(chat_template=str(template)) as server, aiohttp.ClientSession() as session:
        for raw in bodies:
            async with session.post(f"{server.url}/v1/chat/completions", data=raw) as response:
                answer = await response.json()
                assert response.status == 400, answer
                assert len(answer["error"]["message"]) < 300


async def test_unknown_models_are_not_found_where_names_are_strict(serve):
    async with serve(strict_model_name=True) as server:
        for call in (
            server.client.completions.create(model="gpt-9", prompt="a"),
            server.client.chat.completions.create(model="gpt-9", messages=HI),
            server.client.models.retrieve("gpt-9"),
        ):
            with pytest.raises(
                openai.NotFoundError, match="'gpt-9' does not exist; this server serves 'byte'"
            ) as caught:
                await call
            assert caught.value.code == "model_not_found"


async def test_model_may_be_left_out_or_default(serve):
    async with serve() as server, aiohttp.ClientSession() as session:
        for body in ({"messages": HI}, {"messages": HI, "model": "default"}):
            async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
                assert (await response.json())["model"] == "byte"


async def test_models(serve):
    async with serve(served_model_name="org/name") as server:
        models = await server.client.models.list()
        assert [model.id for model in models.data] == ["org/name"]
        assert models.data[0].max_model_len == server.config.model.context_length
        assert (await server.client.models.retrieve("org/name")).id == "org/name"


async def test_api_key(serve):
    async with serve(api_key="secret") as server:
        assert (await server.client.completions.create(**COMPLETION)).choices
        stranger = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="guess", max_retries=0)
        async with stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.completions.create(**COMPLETION)


async def test_request_ids(serve):
    async with serve() as server, aiohttp.ClientSession() as session:
        url = f"{server.url}/v1/completions"
        async with session.post(url, json=COMPLETION, headers={"X-Request-Id": "trace-7"}) as response:
            assert response.headers["x-request-id"] == "trace-7"
            assert (await response.json())["id"] == "cmpl-trace-7"
        server.script.endless = True
        body = {**COMPLETION, "rid": "twice", "stream": True}
        async with session.post(url, json=body) as response:
            assert response.status == 200
            async with session.post(url, json={**body, "stream": False}) as second:
                assert second.status == 400
                assert "twice" in (await second.json())["error"]["message"]
            same_trace = {"X-Request-Id": "t"}
            async with session.post(url, json={**COMPLETION, "stream": True}, headers=same_trace) as third:
                assert third.status == 200
                async with session.post(url, json={**COMPLETION, "stream": True}, headers=same_trace) as fourth:
                    assert fourth.status == 200


async def test_what_clients_send_besides_is_tolerated(serve):
    async with serve() as server, aiohttp.ClientSession() as session:
        for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
            asked = {**body, **TOLERATED, "tools": [], "tool_choice": "none"}
            async with session.post(f"{server.url}/v1/{path}", data=json.dumps(asked)) as response:
                assert response.status == 200, await response.text()
        assert all(math.isfinite(message.sampling_params.temperature) for message in server.link.sent)
