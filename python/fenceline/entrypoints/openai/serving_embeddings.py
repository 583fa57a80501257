"""/v1/embeddings: texts or token ids in, the normalised states of their last tokens out."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import orjson
from starlette.requests import Request
from starlette.responses import Response

from fenceline.entrypoints.generate_body import shared_inputs
from fenceline.entrypoints.json_body import PartsResponse
from fenceline.entrypoints.openai.answer import AnswerHead, Generator, ServedModel, UsageCounter
from fenceline.entrypoints.openai.protocol import EmbeddingBody, Prompt, ReadingBody
from fenceline.entrypoints.sse import collect_or_abort, while_connected
from fenceline.frontend.request_types import TURN_REQUESTS, GenerateChunk, GenerateInput, RequestError

F32 = npt.NDArray[np.float32]
S = TypeVar("S")
T = TypeVar("T")


class EmbeddingServing:
    """Answers embedding requests, also without HTTP: ``request`` is None then, in all methods."""

    def __init__(self, generator: Generator, model: ServedModel) -> None:
        self._generator = generator
        self._model = model

    async def respond(self, body: EmbeddingBody, head: AnswerHead, request: Request) -> Response:
        """The answer. Raises RequestError, before anything is sent."""
        chunks = await self.chunks(body, head.id, request)
        written = await in_turns(partial(_written, body), enumerate(chunks))
        parts = [part for one in written for part in (b",", one)]
        rest = {"model": head.model, "usage": usage_of(chunks, self._model)}
        return PartsResponse([b'{"object":"list","data":[', *parts[1:], b"],", orjson.dumps(rest)[1:]])

    async def chunks(self, body: EmbeddingBody, rid: str, request: Request | None) -> list[GenerateChunk]:
        """The chunk with each input's embedding. Raises RequestError."""
        check_dimensions(body.dimensions, self._model)
        inputs = reading_inputs(body, body.input, rid, embed=True, special=body.add_special_tokens)
        return await collected(self._generator, inputs, request)


def _written(body: EmbeddingBody, numbered: tuple[int, GenerateChunk]) -> bytes:
    index, chunk = numbered
    vector = vector_of(chunk, body.dimensions)
    as_text = body.encoding_format == "base64"
    shown = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector
    one = {"object": "embedding", "index": index, "embedding": shown}
    return orjson.dumps(one, option=orjson.OPT_SERIALIZE_NUMPY)


async def in_turns(make: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """``make`` of each of a body's ``items``, between which others run."""
    made: list[T] = []
    for item in items:
        made.append(make(item))
        if len(made) % TURN_REQUESTS == 0:
            await asyncio.sleep(0)
    return made


def check_dimensions(dimensions: int | None, model: ServedModel) -> None:
    """Raise RequestError (400) for more features than the model's states have."""
    if dimensions is not None and dimensions > model.hidden_size:
        raise RequestError(
            400, f"dimensions must be between 1 and {model.hidden_size} for this model, got {dimensions}",
            param="dimensions",
        )  # fmt: skip


def reading_inputs(
    body: ReadingBody, prompts: Sequence[Prompt], rid: str, *, embed: bool, special: bool = True
) -> list[GenerateInput]:
    """A request for each of ``prompts``, with the fields that they share. ``special``: with the special tokens that the
    tokenizer adds."""
    return [
        GenerateInput(
            text=prompt if isinstance(prompt, str) else None,
            input_ids=prompt if isinstance(prompt, list) else None,
            rid=rid if index == 0 else f"{rid}-{index}",
            family=rid,
            add_special_tokens=special,
            embed=embed,
            **shared,
        )
        for index, (prompt, shared) in enumerate(zip(prompts, shared_inputs(body, len(prompts)), strict=True))
    ]


async def collected(
    generator: Generator, inputs: Sequence[GenerateInput], request: Request | None
) -> list[GenerateChunk]:
    """The whole answers to ``inputs``, which are aborted if the client of ``request`` disconnects. Raises RequestError
    for the first that failed."""
    if request is not None:
        group = await while_connected(request, generator.submit_many(inputs))
        return await collect_or_abort(request, group)
    async with await generator.submit_many(inputs) as group:
        return await group.collect()


def vector_of(chunk: GenerateChunk, dimensions: int | None = None) -> F32:
    """The embedding in ``chunk``: the first ``dimensions`` features of the state, None for all, and then of length 1.
    Raises RequestError if the request was aborted (499), or if the state is not finite (500)."""
    if chunk.embedding is None:
        raise RequestError(499, "the request was aborted", code="closed")
    state = np.frombuffer(chunk.embedding, dtype=np.float32)[:dimensions].astype(np.float64)
    length = float(np.sqrt((state * state).sum()))
    if not np.isfinite(length):
        raise RequestError(500, "the model's state is not finite; its weights or --dtype are at fault")
    return (state / max(length, 1e-12)).astype(np.float32)


def usage_of(chunks: Sequence[GenerateChunk], model: ServedModel) -> dict[str, object]:
    """The usage of requests that were read and generated nothing."""
    counter = UsageCounter(len(chunks), 1, model.cache_report)
    for index, chunk in enumerate(chunks):
        counter.note(index, chunk)
    usage = counter.total()
    del usage["completion_tokens"]
    return usage | {"total_tokens": usage["prompt_tokens"]}
