"""Whatever a client sends: a 4xx with OpenAI's error object and a clear message, and the server goes on."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from fake_scheduler import Seed
from live_server import LiveServer

VOCAB = 1024
LONG = [7] * 1024

BAD_GENERATE = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b'{"text": "\xff"}', "JSON"),
    (b'{"text":' * 100_000, "text"),
    (b'{"unknown":' + b"[" * 100_000, "nested too deeply"),
    (b"[]", "object"),
    (b'{"text": "\\ud800"}', "JSON"),
    (b'{"text": "a", "sampling_params": {"stop": "\\udfff"}}', "JSON"),
    (b'"text"', "object"),
    (b"{}", "text or input_ids"),
    (b'{"text": "a", "input_ids": [1]}', "text or input_ids"),
    (b'{"text": 5}', "text"),
    (b'{"text": ""}', "empty"),
    (b'{"text": []}', "empty"),
    (b'{"text": ["a", 7]}', "text"),
    (b'{"input_ids": []}', "empty"),
    (b'{"input_ids": [[]]}', "empty"),
    (b'{"input_ids": [1, [2]]}', "mixes"),
    (b'{"input_ids": [' + b"1," * 5000 + b"[2]]}", "the prompt has 5001 tokens"),
    (b'{"input_ids": [1.5]}', "input_ids"),
    (b'{"input_ids": [true]}', "input_ids"),
    (b'{"input_ids": [-1]}', "outside the vocabulary"),
    (b'{"input_ids": [1024]}', "outside the vocabulary"),
    (b'{"input_ids": [123456789012345678901234567890]}', "outside the vocabulary"),
    (b'{"text": "a", "stream": "yes"}', "stream"),
    (b'{"text": "a", "sampling_params": 3}', "sampling_params"),
    (b'{"text": "a", "sampling_params": []}', "sampling_params"),
    (b'{"text": "a", "sampling_params": [{}, {}]}', "sampling_params"),
    (b'{"text": "a", "sampling_params": {"temprature": 1}}', "temprature"),
    (b'{"text": "a", "sampling_params": {"temperature": -1}}', "temperature"),
    (b'{"text": "a", "sampling_params": {"temperature": NaN}}', "JSON"),
    (b'{"text": "a", "sampling_params": {"temperature": Infinity}}', "JSON"),
    (b'{"text": "a", "sampling_params": {"temperature": 1e999}}', "out of range"),
    (b'{"text": "a", "sampling_params": {"temperature": "hot"}}', "temperature"),
    (b'{"text": "a", "sampling_params": {"top_p": 0}}', "top_p"),
    (b'{"text": "a", "sampling_params": {"top_p": 1.5}}', "top_p"),
    (b'{"text": "a", "sampling_params": {"top_k": 0}}', "top_k"),
    (b'{"text": "a", "sampling_params": {"top_k": -2}}', "top_k"),
    (b'{"text": "a", "sampling_params": {"min_p": 2}}', "min_p"),
    (b'{"text": "a", "sampling_params": {"max_new_tokens": -1}}', "max_new_tokens"),
    (b'{"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}', "min_new_tokens"),
    (b'{"text": "a", "sampling_params": {"presence_penalty": 9}}', "presence_penalty"),
    (b'{"text": "a", "sampling_params": {"repetition_penalty": 0}}', "repetition_penalty"),
    (b'{"text": "a", "sampling_params": {"logit_bias": {"5000": 1}}}', "logit_bias"),
    (b'{"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}', "logit_bias"),
    (b'{"text": "a", "sampling_params": {"stop": [""]}}', "stop"),
    (b'{"text": "a", "sampling_params": {"stop": [1]}}', "stop"),
    (b'{"text": "a", "sampling_params": {"seed": 99999999999999999999}}', "seed"),
    (b'{"text": "a", "sampling_params": {"n": 0}}', "n must be"),
    (b'{"text": "a", "sampling_params": {"n": 129}}', "n must be"),
    (b'{"text": "a", "sampling_params": {"n": 1000000000}}', "n must be"),
    (b'{"text": "a", "sampling_params": {"regex": "a+", "json_schema": "{}"}}', "exclude each other"),
    (b'{"text": "a", "sampling_params": {"json_schema": 5}}', "json_schema"),
    (b'{"text": "a", "regex": "a+"}', "regex is not available: use response_format"),
    (b'{"text": "a", "return_logprob": true, "top_logprobs_num": -1}', "top_logprobs_num"),
    (b'{"text": "a", "return_logprob": true, "top_logprobs_num": 5000}', "top_logprobs_num"),
    (b'{"text": "a", "return_logprob": true, "logprob_start_len": -7}', "logprob_start_len"),
    (b'{"text": "a", "return_logprob": true, "logprob_start_len": 700}', "logprob_start_len"),
    (b'{"text": "a", "rid": ""}', "rid"),
    (b'{"text": ["a", "b"], "rid": ["x", "x"]}', "already in flight"),
    (b'{"text": ["a", "b"], "rid": ["x"]}', "rid"),
    (b'{"text": "a", "image_data": "x"}', "image_data: this model reads text only"),
    (b'{"text": "a", "lora_path": "x"}', "lora_path is not available: merge the adapter"),
    (b'{"text": "a", "session_params": {"id": 1}}', "session_params is not available: send the whole"),
]


def check_error(response: httpx.Response, status: int, words: str) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"], error
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(("body", "words"), BAD_GENERATE, ids=lambda value: str(value)[:60])
def test_bad_bodies_of_generate(client: httpx.Client, body: bytes, words: str) -> None:
    check_error(client.post("/generate", content=body), 400, words)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ""),
        ("stop", ["a"] * 65),
        ("stop", "a" * 5000),
        ("stop_token_ids", [1] * 1025),
        ("logit_bias", {"5000": 1}),
        ("top_k", 0),
        ("seed", 2**64),
    ],
    ids=str,
)
def test_an_error_names_its_parameter(client: httpx.Client, name: str, value: object) -> None:
    body = {"text": "a", "sampling_params": {name: value}}
    assert check_error(client.post("/generate", json=body), 400, "")["param"] == name


def test_refused_fields_may_be_null_or_empty(client: httpx.Client) -> None:
    body = {"input_ids": [1], "image_data": None, "lora_path": None, "session_params": {}}
    body["sampling_params"] = {"max_new_tokens": 1, "regex": None, "json_schema": None}
    assert client.post("/generate", json=body).status_code == 200


def test_health_answers_head(client: httpx.Client) -> None:
    assert client.head("/health").status_code == 200


def test_prompt_too_long_names_the_limit(client: httpx.Client) -> None:
    error = check_error(client.post("/generate", json={"input_ids": LONG}), 400, "at most 1023")
    assert error["code"] == "context_length_exceeded"
    check_error(client.post("/generate", json={"text": "word " * 50_000}), 400, "at most 1023")


def test_a_bad_prompt_in_a_batch_sends_none(client: httpx.Client) -> None:
    before = client.get("/server_info").json()["internal_states"][0]["num_generated_tokens"]
    check_error(client.post("/generate", json={"input_ids": [[1, 2], [5000]]}), 400, "outside")
    assert client.get("/server_info").json()["internal_states"][0]["num_generated_tokens"] == before


def test_too_large_bodies_are_refused_declared_or_not(client: httpx.Client) -> None:
    address = urlsplit(str(client.base_url))
    with socket.create_connection((address.hostname, address.port)) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{" % (1 << 40))
        assert raw.recv(12) == b"HTTP/1.1 413"
    chunks = (b"[" + b" " * (1 << 20) for _ in range(70))
    try:
        response = client.post("/generate", content=chunks)
    except httpx.WriteError:
        return  # refused while it was still being sent
    check_error(response, 413, "64 MiB")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/abort_request", "/pause_generation"])
@pytest.mark.parametrize("body", [b"{", b"[]", b'{"prompt": 3, "tokens": "a", "rid": 4, "mode": "never"}'])
def test_other_endpoints_refuse_nonsense(client: httpx.Client, path: str, body: bytes) -> None:
    check_error(client.post(path, content=body), 400, "")


def test_tokenize_says_what_it_can_be_given(client: httpx.Client) -> None:
    error = check_error(client.post("/tokenize", json={"text": "a"}), 400, "or a conversation in messages")
    assert error["param"] == "prompt"


def test_detokenize_refuses_ids_outside_the_vocabulary(client: httpx.Client) -> None:
    check_error(client.post("/detokenize", json={"tokens": [1, VOCAB]}), 400, "outside the vocabulary")
    check_error(client.post("/detokenize", json={"tokens": [[1], [-1]]}), 400, "outside the vocabulary")


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    check_error(client.get("/nothing"), 404, "/nothing")
    check_error(client.get("/generate"), 405, "GET")


def test_profile_refusal_of_the_scheduler_is_shown(client: httpx.Client) -> None:
    assert client.post("/start_profile", json={"num_steps": 3}).json()["message"] == "profile start"
    for num_steps in (0, -1, 2**70):
        check_error(client.post("/start_profile", json={"num_steps": num_steps}), 400, "num_steps")
    check_error(client.post("/stop_profile"), 400, "profile stop")


def test_client_that_leaves_while_it_sends(server: LiveServer, client: httpx.Client) -> None:
    address = urlsplit(server.base_url)
    num_lines = len(server.lines)
    with socket.create_connection((address.hostname, address.port)) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert client.get("/health").status_code == 200
    assert "Traceback" not in "".join(server.lines[num_lines:])


def test_offers_to_upgrade_and_pipelines_are_answered_in_order(server: LiveServer) -> None:
    """As curl --http2 and proxies with open connections send them; a body is never the next request."""
    address = urlsplit(server.base_url)
    offer = b"Host: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    inner = b"POST /flush_cache HTTP/1.1\r\nHost: localhost\r\n\r\n"
    rounds = 20
    data = (
        b'POST /detokenize HTTP/1.1\r\n%sContent-Length: 14\r\n\r\n{"tokens":[7]}' % offer
        + b"POST /nothing HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (offer, len(inner), inner)
        + b"POST /nothing HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
        % (offer, len(inner), inner)
        + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    ) * rounds + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as raw:
        raw.sendall(data)
        answers = b"".join(iter(lambda: raw.recv(1 << 16), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"404", b"404", b"200"] * rounds + [b"200"]
    assert b"Cache flushed" not in answers


def test_duplicate_id_is_refused_while_in_flight(server: LiveServer) -> None:
    with server.client() as client:
        body = {"input_ids": [1], "rid": "twice", "stream": True, "sampling_params": {"seed": Seed.HELD}}
        with client.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200
            check_error(client.post("/generate", json={"input_ids": [1], "rid": "twice"}), 400, "in flight")
