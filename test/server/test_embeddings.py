"""Embeddings, rerank and score over HTTP, from Python and by clients: small random models, transformers' values."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import transformers
from embedding_model import HIDDEN, embedding_of, make_tokenizer, next_probabilities, path, reference, save_reranker
from live_server import LiveServer

import fenceline

__all__ = ["path", "reference"]  # fixtures
pytestmark = pytest.mark.slow
TEXTS = ["The fox", "A dog sleeps. " * 12, "x"]
TOKENIZER = make_tokenizer(appends=True)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[LiveServer]:
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
    forms: list[tuple[object, list[int]]] = [
        (TEXTS[0], [0]), (TEXTS, [0, 1, 2]), (ids[0], [0]), (ids, [0, 1, 2]), ([TEXTS[1]] * 3, [1, 1, 1])
    ]  # fmt: skip
    for given, shown in forms:
        answer = client.post("/v1/embeddings", json={"model": "tiny", "input": given}).json()
        assert (answer["object"], answer["model"]) == ("list", "tiny")
        places = [("embedding", index) for index in range(len(shown))]
        assert [(one["object"], one["index"]) for one in answer["data"]] == places
        close([one["embedding"] for one in answer["data"]], [wanted[index] for index in shown])
        num = sum(len(ids[index]) for index in shown)
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num
        assert "completion_tokens" not in answer["usage"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 150  # of prompts that came before


def test_numbers_as_text_and_fewer_of_them(client: httpx.Client, reference: transformers.PreTrainedModel) -> None:
    body = {"input": TEXTS, "encoding_format": "base64", "dimensions": 7}
    for text, one in zip(TEXTS, client.post("/v1/embeddings", json=body).json()["data"], strict=True):
        found = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
        assert found.shape == (7,) and abs(float(np.linalg.norm(found)) - 1) < 1e-6
        close(found, embedding_of(reference, ids_of(text), 7))


def test_a_text_may_be_as_long_as_the_context(client: httpx.Client, reference: transformers.PreTrainedModel) -> None:
    ids = [number % 90 for number in range(512)]
    answer = client.post("/v1/embeddings", json={"input": ids}).json()
    close(answer["data"][0]["embedding"], embedding_of(reference, ids))


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


def test_llama_index(server: LiveServer, reference: transformers.PreTrainedModel) -> None:
    of_llama_index = pytest.importorskip(
        "llama_index.embeddings.openai_like", reason="llama-index-embeddings-openai-like is not installed"
    )
    model = of_llama_index.OpenAILikeEmbedding(
        model_name="tiny", api_base=f"{server.base_url}/v1", api_key="none", max_retries=0
    )
    close(model.get_text_embedding_batch(TEXTS), [embedding_of(reference, ids_of(text)) for text in TEXTS])
    close(model.get_query_embedding(TEXTS[0]), embedding_of(reference, ids_of(TEXTS[0])))


@pytest.mark.parametrize("provider", ["hosted_vllm", "jina_ai", "cohere"])
def test_rerank_clients(server: LiveServer, reference: transformers.PreTrainedModel, provider: str) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    address = f"{server.base_url}/v2/rerank" if provider == "cohere" else f"{server.base_url}/v1"
    answer = litellm.rerank(
        model=f"{provider}/tiny", query=TEXTS[0], documents=[TEXTS[1], TEXTS[0]], top_n=2, api_base=address,
        api_key="none",
    )  # fmt: skip
    other = embedding_of(reference, ids_of(TEXTS[0])) @ embedding_of(reference, ids_of(TEXTS[1]))
    assert [one["index"] for one in answer.results] == [1, 0]
    close([one["relevance_score"] for one in answer.results], [1.0, other])


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
    ({"input": [5] * 513}, "513 tokens"),
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
    for where, body in (
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": said}),
        ("/v1/messages", {"messages": said, "max_tokens": 3}),
    ):
        answer = client.post(where, json=body)
        assert answer.status_code == 400 and "use /v1/embeddings" in answer.text, (where, answer.text)
    assert client.get("/health_generate").status_code == 200
    assert client.get("/model_info").json()["is_generation"] is False


def test_documents_by_their_embeddings(client: httpx.Client, reference: transformers.PreTrainedModel) -> None:
    query, instruct = "Which one?", "Find it"
    documents = ["The fox", "A dog", "The fox", "x"]
    asked = embedding_of(reference, ids_of(f"Instruct: {instruct}\nQuery:{query}"))
    wanted = [float(asked @ embedding_of(reference, ids_of(text))) for text in documents]
    body = {"query": query, "documents": [documents[0], {"text": documents[1]}, *documents[2:]], "instruct": instruct}
    for route in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = client.post(route, json=body).json()
        order = [one["index"] for one in answer["results"]]
        assert order == sorted(range(4), key=lambda index: (-round(wanted[index], 5), index))
        close([one["relevance_score"] for one in answer["results"]], [wanted[index] for index in order])
        assert [one["document"]["text"] for one in answer["results"]] == [documents[index] for index in order]
    assert answer["usage"]["total_tokens"] == len(ids_of(f"Instruct: {instruct}\nQuery:{query}")) + 8 + 6 + 2
    few = client.post("/v1/rerank", json=body | {"top_n": 2, "return_documents": False}).json()
    assert [set(one) for one in few["results"]] == [{"index", "relevance_score"}] * 2

    pairs = client.post("/v1/score", json={"text_1": "The fox", "text_2": ["The fox", "x"]}).json()
    assert pairs["object"] == "list" and [one["index"] for one in pairs["data"]] == [0, 1]
    other = embedding_of(reference, ids_of("The fox")) @ embedding_of(reference, ids_of("x"))
    close([one["score"] for one in pairs["data"]], [1.0, other])


BAD_PAIRS = [
    ("/v1/rerank", {"documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "a", "documents": []}, "empty"),
    ("/v1/rerank", {"query": "a", "documents": ["a", ""]}, "empty"),
    ("/v1/rerank", {"query": "a", "documents": [{"image": "a"}]}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": ["a"] * 4097}, "at most 4096"),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 9}, "--allow-auto-truncate"),
    ("/v1/score", {}, "give text_1 and text_2"),
    ("/v1/score", {"text_1": "a"}, "give both"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "2 and 3 texts"),
    ("/v1/score", {"text_1": [5], "text_2": "a"}, "text_1"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c", "documents": "d"}, "give text_1 and text_2"),
    ("/v1/score", {"query": "a", "label_token_ids": [5]}, "needs query and items"),
    ("/v1/score", {"query": "a", "items": [[5]], "label_token_ids": [5]}, "both be texts or both"),
    ("/v1/score", {"query": ["a", "b"], "items": "a", "label_token_ids": [5]}, "one text"),
    ("/v1/score", {"query": "a", "items": "a", "label_token_ids": [5]}, "use /v1/embeddings"),
    ("/v1/score", {"query": "a", "items": "a", "label_token_ids": [5] * 129}, "label_token_ids"),
    ("/v1/rerank", {"query": "a" * 5000, "documents": ["a"] * 4096}, "repeated to a length of 20475000"),
    ("/v1/score", {"instruct": "a" * 5000, "text_1": ["a", "b"] * 2048, "text_2": ["a"] * 4096}, "repeated"),
    ("/v1/score", {"query": [5] * 2000, "items": [[5]] * 4096, "label_token_ids": [5]}, "repeated"),
    ("/v1/score", {"query": "a" * 5000, "items": ["a"] * 4096, "label_token_ids": [5]}, "repeated"),
]


@pytest.mark.parametrize(("route", "body", "message"), BAD_PAIRS)
def test_wrong_pairs_are_refused(client: httpx.Client, route: str, body: dict[str, Any], message: str) -> None:
    answer = client.post(route, json=body)
    assert answer.status_code == 400, answer.text[:200]
    assert message in answer.json()["error"]["message"]


def test_from_python_and_on_two_ranks(path: Path, reference: transformers.PreTrainedModel) -> None:
    with fenceline.Engine(str(path), device="cpu", max_total_tokens=2048, tp_size=2) as engine:
        several = engine.encode(TEXTS, dimensions=9)
        close([one["embedding"] for one in several], [embedding_of(reference, ids_of(text), 9) for text in TEXTS])
        one = engine.encode(input_ids=ids_of(TEXTS[0]))
        close(one["embedding"], embedding_of(reference, ids_of(TEXTS[0])))
        assert one["meta_info"]["prompt_tokens"] == len(ids_of(TEXTS[0]))
        with pytest.raises(ValueError, match="between 1 and 64"):
            engine.encode("a", dimensions=65)
        with pytest.raises(ValueError, match="generates none|generate none"):
            engine.generate("a")


def test_a_model_that_generates_judges(reference: transformers.PreTrainedModel, tmp_path: Path) -> None:
    save_reranker(reference, tmp_path)
    tokenizer = make_tokenizer(appends=False)
    yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")

    def judged(query: str, document: str, instruct: str) -> float:
        prompt = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
            ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        both = next_probabilities(reference, tokenizer.encode(prompt).ids)[[yes, no]]
        return float(both[0] / both.sum())

    documents = ["The fox", "A dog sleeps.", "x"]
    usual = "Given a web search query, retrieve relevant passages that answer the query"
    with fenceline.Engine(str(tmp_path), device="cpu", max_total_tokens=4096, page_size=16) as engine:
        for options, instruct in (({}, usual), ({"instruct": "Find it"}, "Find it")):
            wanted = [judged("Which?", document, instruct) for document in documents]
            answer = engine.rerank("Which?", documents, top_n=2, **options)
            order = sorted(range(3), key=lambda index: -wanted[index])[:2]
            assert [one["index"] for one in answer["results"]] == order
            close([one["relevance_score"] for one in answer["results"]], [wanted[index] for index in order])
        close(engine.score(text_1="Which?", text_2=documents), [judged("Which?", one, usual) for one in documents])

        labels = [7, 9, 30]
        following = [next_probabilities(reference, tokenizer.encode("ab" + item).ids)[labels] for item in documents]
        close(engine.score("ab", documents, labels), following)
        close(engine.score("ab", documents, labels, True), [each / each.sum() for each in following])
        first = next_probabilities(reference, [3, 4, 5])[labels]
        close(engine.score([5], [[3, 4]], labels, item_first=True), [first])
        with pytest.raises(ValueError, match="start it with --is-embedding"):
            engine.encode("a")
        with pytest.raises(ValueError, match="outside the vocabulary"):
            engine.score("a", ["b"], [500])
