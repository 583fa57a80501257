"""/v1/rerank and /v1/score: how well documents answer a query, and how likely given tokens follow a text.

A model that generates judges each document in the prompt of Qwen3-Reranker, and its score is p(yes) / (p(yes) + p(no))
of the next token. On a server of embeddings the score is the cosine of the two embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request

from fenceline.config.request_limits import MAX_BODY_TOKENS, MAX_TEXT_CHARS
from fenceline.entrypoints.openai.answer import AnswerHead, Generator, ServedModel, required_tokenizer
from fenceline.entrypoints.openai.protocol import Prompt, ReadingBody, RerankBody, ScoreBody
from fenceline.entrypoints.openai.serving_embeddings import collected, in_turns, reading_inputs, usage_of, vector_of
from fenceline.frontend.request_types import GenerateChunk, RequestError, check_num_requests
from fenceline.frontend.tokenizer import Tokenizer
from fenceline.sampling.sampling_params import SamplingParams

DEFAULT_INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
_NEXT_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_TOKENS_OF_JUDGES = ("yes", "no", "<|im_start|>", "<|im_end|>")


class RerankServing:
    """Answers requests to rerank and to score, also without HTTP: ``request`` is None then, in all methods."""

    def __init__(self, generator: Generator, model: ServedModel, embeds: bool) -> None:
        """``embeds``: whether the server embeds instead of generating."""
        self._generator = generator
        self._model = model
        self._embeds = embeds

    async def rerank(self, body: RerankBody, head: AnswerHead, request: Request | None) -> dict[str, object]:
        """The documents, the most relevant first, in the form of Jina, Cohere and vLLM. Raises RequestError."""
        pairs = [(body.query, document) for document in body.documents]
        scores, usage = await self._relevance(body, pairs, body.instruct or body.instruction, head.id, request)
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": body.documents[index]}} if body.return_documents else {})
            for index in order[: body.top_n]
        ]
        return {"id": head.id, "model": head.model, "results": results, "usage": usage}

    async def score(self, body: ScoreBody, head: AnswerHead, request: Request | None) -> dict[str, object]:
        """The scores of pairs of texts as vLLM answers, or with ``label_token_ids`` SGLang's. Raises RequestError."""
        if body.label_token_ids:
            scores, usage = await self._of_labels(body, head.id, request)
            return {"object": "scoring", "model": head.model, "scores": scores, "usage": usage}
        relevance, usage = await self._relevance(body, _pairs(body), body.instruct, head.id, request)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(relevance)]
        return head.fields("list") | {"data": data, "usage": usage}

    async def _of_labels(
        self, body: ScoreBody, rid: str, request: Request | None
    ) -> tuple[list[list[float]], dict[str, object]]:
        """For each item the probabilities that the tokens ``label_token_ids`` follow it, and the usage."""
        if body.query is None or body.items is None:
            raise RequestError(400, "label_token_ids needs query and items", param="items")
        in_ids = isinstance(body.query, list)
        _check_repeated(len(body.query) * (len(body.items) - 1), "query", MAX_BODY_TOKENS if in_ids else MAX_TEXT_CHARS)
        prompts = await in_turns(partial(_joined, body.query, item_first=body.item_first), body.items)
        chunks = await self._next_tokens(body, prompts, body.label_token_ids, rid, request, special=True)
        scores = await in_turns(partial(_probabilities, apply_softmax=body.apply_softmax), chunks)
        return scores, usage_of(chunks, self._model)

    async def _relevance(
        self,
        body: ReadingBody,
        pairs: Sequence[tuple[str, str]],
        instruct: str | None,
        rid: str,
        request: Request | None,
    ) -> tuple[list[float], dict[str, object]]:
        """How well each second text answers the first one, and the usage."""
        check_num_requests(len(pairs), 1)
        num_chars = sum(len(query) for query, _ in pairs) - sum(map(len, {query for query, _ in pairs}))
        _check_repeated(num_chars + len(instruct or "") * (len(pairs) - 1), "query", MAX_TEXT_CHARS)
        tokenizer = required_tokenizer(self._generator)
        if self._embeds:
            queries = [query if instruct is None else f"Instruct: {instruct}\nQuery:{query}" for query, _ in pairs]
            texts = list(dict.fromkeys([*queries, *[document for _, document in pairs]]))
            inputs = reading_inputs(body, texts, rid, embed=True)
            chunks = await collected(self._generator, inputs, request)
            vectors = dict(zip(texts, await in_turns(vector_of, chunks), strict=True))
            of_pairs = zip(queries, pairs, strict=True)
            scores = [float(vectors[query] @ vectors[document]) for query, (_, document) in of_pairs]
            return scores, usage_of(chunks, self._model)
        labels = _label_ids(tokenizer)
        instruct = instruct or DEFAULT_INSTRUCT
        prompts = [_JUDGE.format(instruct=instruct, query=query, document=document) for query, document in pairs]
        chunks = await self._next_tokens(body, prompts, labels, rid, request, special=False)
        scores = await in_turns(lambda chunk: _probabilities(chunk, True)[0], chunks)
        return scores, usage_of(chunks, self._model)

    async def _next_tokens(
        self,
        body: ReadingBody,
        prompts: Sequence[Prompt],
        labels: Sequence[int],
        rid: str,
        request: Request | None,
        *,
        special: bool,
    ) -> list[GenerateChunk]:
        """For each of ``prompts`` the chunk with the logprobs of ``labels`` as its next token."""
        inputs = [
            replace(one, sampling_params=_NEXT_TOKEN, return_logprob=True, token_ids_logprob=tuple(labels))
            for one in reading_inputs(body, prompts, rid, embed=False, special=special)
        ]
        return await collected(self._generator, inputs, request)


def _check_repeated(num: int, param: str, most: int) -> None:
    """Raise RequestError (400) if ``num``, the characters or tokens that are written once in a body and then repeated
    in its prompts, are more than ``most``: a small body would take the memory of many large ones."""
    if num > most:
        raise RequestError(
            400,
            f"what the prompts share would be repeated to a length of {num}, at most {most} are allowed in one body;"
            " shorten it, or send several bodies",
            param=param,
        )


def _label_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens yes and no. Raises RequestError (400) for a model that was not trained on the prompt of judges."""
    ids: dict[str, int | None] = {text: tokenizer.backend.token_to_id(text) for text in _TOKENS_OF_JUDGES}
    yes, no = ids["yes"], ids["no"]
    if yes is None or no is None or None in ids.values():
        missing = next(text for text, token in ids.items() if token is None)
        raise RequestError(
            400,
            f"this model's tokenizer has no one token {missing}, so that it cannot judge documents: serve a model such"
            " as Qwen3-Reranker, or a model of embeddings",
            code="unsupported",
        )
    return yes, no


def _pairs(body: ScoreBody) -> list[tuple[str, str]]:
    """The pairs of vLLM's forms: one text with each of the others, or each with its counterpart."""
    forms = {"text_1 and text_2": (body.text_1, body.text_2), "queries and documents": (body.queries, body.documents)}
    given = [(name, *texts) for name, texts in forms.items() if texts != (None, None)]
    if len(given) != 1:
        raise RequestError(
            400, "give text_1 and text_2, or queries and documents, or query, items and label_token_ids", param="text_1"
        )
    name, first, second = given[0]
    if not first or not second:
        raise RequestError(400, f"give both {name}", param=name.split()[0])
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise RequestError(
            400,
            f"{name} have {len(first)} and {len(second)} texts: give one and several, or as many of both",
            param=name.split()[0],
        )
    return list(zip(first, second, strict=True))


def _joined(query: Prompt, item: Prompt, item_first: bool) -> Prompt:
    first, second = (item, query) if item_first else (query, item)
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    if isinstance(first, list) and isinstance(second, list):
        return first + second
    raise RequestError(400, "query and items must both be texts or both be token ids", param="items")


def _probabilities(chunk: GenerateChunk, apply_softmax: bool) -> list[float]:
    """Of the tokens that were named, among all tokens or with ``apply_softmax`` among themselves. Raises RequestError
    (499) if the request was aborted before."""
    named = [] if chunk.output_logprobs is None else list(chunk.output_logprobs.token_ids_logprobs)
    if not named:
        raise RequestError(499, "the request was aborted", code="closed")
    logprobs = [logprob for logprob, _ in named[0]]
    if not apply_softmax:
        return [math.exp(logprob) for logprob in logprobs]
    largest = max(logprobs)
    weights = [math.exp(logprob - largest) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]
