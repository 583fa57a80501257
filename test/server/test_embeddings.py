"""Embeddings over HTTP, from Python and by clients: a live server of a small random model, and transformers' values."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import transformers
from embedding_model import HIDDEN, embedding_of, make_tokenizer, random_qwen3, save_embedder
from live_server import LiveServer

pytestmark = pytest.mark.slow
TEXTS = ["The fox", "A dog sleeps. " * 12, "x"]
TOKENIZER = make_tokenizer(appends=True)


@pytest.fixture(scope="module")
def reference() -> transformers.PreTrainedModel:
    return random_qwen3()


@pytest.fixture(scope="module")
def server(reference: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("embedder")
    save_embedder(reference, path)
    flags = ["--max-total-tokens", "4096", "--served-model-name", "tiny", "--enable-cache-report"]
    with LiveServer.real("--model-path", str(path), "--device", "cpu", *flags) as live:
        yield live.wait_ready()


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=1e-4)


def test_every_form_of_input(client: httpx.Client, reference: transformers.PreTrainedModel) -> None:
    wanted = [embedding_of(reference, ids_of(text)) for text in TEXTS]
    ids = [ids_of(text) for text in TEXTS]
    for given, results in ((TEXTS[0], wanted[:1]), (TEXTS, wanted), (ids[0], wanted[:1]), (ids, wanted)):
        answer = client.post("/v1/embeddings", json={"model": "tiny", "input": given}).json()
        assert (answer["object"], answer["model"]) == ("list", "tiny")
        assert [(one["object"], one["index"]) for one in answer["data"]] == [
            ("embedding", index) for index in range(len(results))
        ]
        close([one["embedding"] for one in answer["data"]], results)
        num = sum(map(len, ids[: len(results)]))
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num
        assert "completion_tokens" not in answer["usage"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 150  # of prompts that came before


def test_numbers_as_text_and_fewer_of_them(client: httpx.Client, reference: transformers.PreTrainedModel) -> None:
    body = {"input": TEXTS, "encoding_format": "base64", "dimensions": 7}
    for text, one in zip(TEXTS, client.post("/v1/embeddings", json=body).json()["data"], strict=True):
        found = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
        assert found.shape == (7,) and abs(float(np.linalg.norm(found)) - 1) < 1e-6
        close(found, embedding_of(reference, ids_of(text), 7))


def test_clients(server: LiveServer, reference: transformers.PreTrainedModel) -> None:
    base_url = f"{server.base_url}/v1"
    wanted = [embedding_of(reference, ids_of(text)) for text in TEXTS]
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as sdk:
        answer = sdk.embeddings.create(model="tiny", input=TEXTS)  # asks for base64
        close([one.embedding for one in answer.data], wanted)
        as_floats = sdk.embeddings.create(model="tiny", input=TEXTS, encoding_format="float", dimensions=HIDDEN)
        close([one.embedding for one in as_floats.data], wanted)
        assert answer.usage.total_tokens == sum(map(len, map(ids_of, TEXTS)))
        with pytest.raises(openai.BadRequestError, match="dimensions must be between 1 and 64"):
            sdk.embeddings.create(model="tiny", input="a", dimensions=65)


def test_langchain(server: LiveServer, reference: transformers.PreTrainedModel) -> None:
    of_langchain = pytest.importorskip("langchain_openai", reason="the extra 'test' is not installed")
    model = of_langchain.OpenAIEmbeddings(
        model="tiny", base_url=f"{server.base_url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    close(model.embed_documents(TEXTS), [embedding_of(reference, ids_of(text)) for text in TEXTS])
    close(model.embed_query(TEXTS[0]), embedding_of(reference, ids_of(TEXTS[0])))


def test_litellm(server: LiveServer, reference: transformers.PreTrainedModel) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    answer = litellm.embedding(model="openai/tiny", input=TEXTS, api_base=f"{server.base_url}/v1", api_key="none")
    close([one["embedding"] for one in answer.data], [embedding_of(reference, ids_of(text)) for text in TEXTS])


BAD = [
    ({}, "input"),
    ({"input": ""}, "empty"),
    ({"input": []}, "empty"),
    ({"input": ["a", ""]}, "empty"),
    ({"input": [[]]}, "empty"),
    ({"input": ["a", 5]}, "mix"),
    ({"input": {"text": "a"}}, "must be a string"),
    ({"input": ["a"] * 4097}, "at most 4096"),
    ({"input": "a" * 600}, "601 tokens"),
    ({"input": [5] * 600}, "600 tokens"),
    ({"input": [120]}, "outside the vocabulary"),
    ({"input": [-1]}, "outside the vocabulary"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 65}, "between 1 and 64"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "n": 2}, "one embedding"),
    ({"input": "a", "stream": True}, "as a whole"),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "send the text as input"),
    ({"input": "a", "priority": 3}, "--enable-priority-scheduling"),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_what_is_wrong_is_refused(client: httpx.Client, body: dict[str, Any], message: str) -> None:
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text[:200]
    assert message in answer.json()["error"]["message"]


def test_nothing_is_generated(client: httpx.Client) -> None:
    said = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": said}),
        ("/v1/messages", {"messages": said, "max_tokens": 3}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and "use /v1/embeddings" in answer.text, (path, answer.text)
    assert client.get("/health_generate").status_code == 200
    assert client.get("/model_info").json()["is_generation"] is False
