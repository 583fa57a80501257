"""/generate: writes answers in SGLang's form, whole or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from itertools import repeat
from typing import TypeVar

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.body_parser import BodyParser
from fenceline.entrypoints.errors import REFUSED, without_frames
from fenceline.entrypoints.generate_body import Expanded, GenerateBody, expand, parse_generate
from fenceline.entrypoints.json_body import PIECE_BYTES, PartsResponse
from fenceline.entrypoints.middleware import REQUEST_ID
from fenceline.entrypoints.openai.reasoning_parser import REASONING_FORMATS, ReasoningTokens
from fenceline.entrypoints.sse import DONE, Event, EventStream, collect_or_abort, error_event, while_connected, written
from fenceline.frontend.request_stream import StreamGroup
from fenceline.frontend.request_types import (
    TURN_REQUESTS,
    GenerateChunk,
    GenerateInput,
    RequestError,
    RequestTimes,
    ServedWeights,
    error_of,
    may_wait,
)
from fenceline.frontend.tokenizer import Tokenizer
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc.io_struct import FinishReason, TokenLogprobs

T = TypeVar("T")

_WRITTEN_AT_ONCE = 1024  # logprobs that are encoded by one call, during which no other thread runs


async def generate(manager: TokenizerManager, config: EngineConfig, parser: BodyParser, request: Request) -> Response:
    """Answer one request to /generate. Raises RequestError before anything is sent. An invalid request for a stream is
    answered as in SGLang, by a stream that has the error as its only event."""
    body = await parser.parse(request, parse_generate)
    try:
        with manager.reserved_id(request.scope[REQUEST_ID]) as rid:
            thinking_end = thinking_end_id(body, config, manager.tokenizer)
            expanded = await expand(body, config, rid, thinking_end)
            work = manager.submit_many(expanded.inputs)
            group = await while_connected(request, work, may_wait(expanded.inputs))
    except RequestError as error:
        if body.stream and error.status == 400:
            request.scope[REFUSED] = without_frames(error)
            return Response(error_event(error), media_type="text/event-stream")
        raise
    writers = make_writers(expanded, group, body, config, manager, thinking_end)
    if body.stream:
        return EventStream(_events(group, writers, config.server_args.incremental_streaming_output), group.close)
    answers = await answers_of(await collect_or_abort(request, group), writers)
    if expanded.single:
        return PartsResponse(answers[0])
    parts = [part for answer in answers for part in (b",", *answer)]
    return PartsResponse([b"[", *parts[1:], b"]"])


def make_writers(
    expanded: Expanded,
    group: StreamGroup,
    body: GenerateBody,
    config: EngineConfig,
    manager: TokenizerManager,
    thinking_end: int | None,
) -> list[AnswerWriter]:
    """A writer for each request of a body that ``group`` answers; ``thinking_end`` is its :func:`thinking_end_id`."""
    shown = manager.tokenizer if body.return_text_in_logprobs else None
    return [
        AnswerWriter(
            inp,
            config,
            manager.weights,
            shown,
            None if expanded.single else index,
            stream.prompt_ids if body.return_prompt_token_ids else None,
            thinking_end,
        )
        for index, (inp, stream) in enumerate(zip(expanded.inputs, group.streams, strict=True))
    ]


async def answers_of(chunks: Sequence[GenerateChunk], writers: Sequence[AnswerWriter]) -> list[Sequence[bytes]]:
    """The JSON objects of requests that did not stream, each in parts to be joined. Others run in between."""
    answers: list[Sequence[bytes]] = []
    for writer, chunk in zip(writers, chunks, strict=True):
        answers.append(await written(chunk, partial(writer.so_far, chunk)))
        if len(answers) % TURN_REQUESTS == 0:
            await asyncio.sleep(0)
    return answers


async def stream_answers(
    group: StreamGroup, writers: Sequence[AnswerWriter], incremental: bool, frame: Callable[[list[bytes]], T]
) -> AsyncIterator[T]:
    """The JSON objects of a stream as they come, each in parts to be joined, as ``frame`` makes them. Raises the
    RequestError that ends one of its requests."""
    async for index, chunk in group:
        error = error_of(chunk)
        if error is not None:
            raise error
        writer = writers[index]
        write = writer.piece if incremental else writer.so_far
        if chunk.output_logprobs is None and chunk.input_logprobs is None:
            yield frame(write(chunk))
        else:
            yield frame(await written(chunk, partial(write, chunk)))


async def _events(group: StreamGroup, writers: Sequence[AnswerWriter], incremental: bool) -> AsyncIterator[Event]:
    async for event in stream_answers(group, writers, incremental, _event):
        yield event
    yield DONE


def _event(parts: list[bytes]) -> list[bytes]:
    return [b"data: ", *parts, b"\n\n"]


class AnswerWriter:
    """Writes the answers of one request as JSON, in pieces to be joined. Streams repeat the whole text, all ids and all
    logprobs in each event, as SGLang's do. Encoding or copying all of it anew each time would cost time quadratic in
    the answer's length; what was encoded before is kept, and all events have it in common."""

    def __init__(
        self,
        inp: GenerateInput,
        config: EngineConfig,
        weights: ServedWeights,
        tokenizer: Tokenizer | None,
        index: int | None,
        prompt_ids: Sequence[int] | None,
        thinking_end: int | None,
    ) -> None:
        """``tokenizer`` writes the texts of logprobs, ``prompt_ids`` come with the first answer, and tokens up to
        ``thinking_end`` are counted as reasoning, each unless None."""
        self._head = b'"meta_info":{"id":' + orjson.dumps(inp.rid)
        self._weights = weights
        self._tail = b"}}" if index is None else b'},"index":%d}' % index
        self._has_text = not config.server_args.skip_tokenizer_init
        self._return_logprob = inp.return_logprob
        self._with_top = inp.top_logprobs_num > 0
        self._with_named = bool(inp.token_ids_logprob)
        self._with_times = config.server_args.enable_metrics
        self._tokenizer = tokenizer
        self._text = _GrowingText()
        self._ids = _GrowingText()
        self._input = _LogprobText()
        self._output = _LogprobText()
        self._prompt_ids = prompt_ids
        self._reasoning = None if thinking_end is None else ReasoningTokens(thinking_end)

    def so_far(self, chunk: GenerateChunk) -> list[bytes]:
        """The event for ``chunk`` that repeats everything before it."""
        self._text.add(orjson.dumps(chunk.text)[1:-1])
        self._ids.add_items(orjson.dumps(chunk.output_ids)[1:-1])
        return self._write(chunk, self._text.parts(), self._ids.parts())

    def piece(self, chunk: GenerateChunk) -> list[bytes]:
        """The event for ``chunk`` alone (--incremental-streaming-output)."""
        self._output = _LogprobText()
        return self._write(chunk, [orjson.dumps(chunk.text)[1:-1]], [orjson.dumps(chunk.output_ids)[1:-1]])

    def _write(self, chunk: GenerateChunk, text: list[bytes], ids: list[bytes]) -> list[bytes]:
        parts = [b'{"text":"', *text, b'","output_ids":['] if self._has_text else [b'{"output_ids":[']
        parts += ids
        if self._prompt_ids is not None:
            parts += (b'],"prompt_token_ids":', orjson.dumps(list(self._prompt_ids)), b",", self._head)
            self._prompt_ids = None
        else:
            parts += (b"],", self._head)
        if self._reasoning is not None:
            self._reasoning.add(chunk.output_ids)
        parts.append(
            b',"prompt_tokens":%d,"completion_tokens":%d,"reasoning_tokens":%d,"cached_tokens":%d,"num_retractions":%d'
            % (
                chunk.prompt_tokens,
                chunk.completion_tokens,
                0 if self._reasoning is None else self._reasoning.num,
                chunk.cached_tokens,
                chunk.num_retractions,
            )
        )
        details = chunk.cached_tokens_details
        if details is not None:
            parts.append(
                b',"cached_tokens_details":{"device":%d,"host":%d,"storage":%d}'
                % (details.device, details.host, details.storage)
            )
        if chunk.spec is not None and chunk.spec.verify_ct > 0:
            spec = chunk.spec
            parts.append(
                b',"spec_verify_ct":%d,"spec_accept_length":%.4f,"spec_accept_rate":%.4f'
                % (spec.verify_ct, 1 + spec.num_accepted / spec.verify_ct, spec.num_accepted / max(spec.num_drafts, 1))
            )
        reason = chunk.finish_reason
        parts.append(b',"finish_reason":')
        parts.append(b"null" if reason is None else orjson.dumps(finish_reason_object(reason)))
        if reason is not None:
            parts.append(b',"e2e_latency":%.6f' % chunk.e2e_latency)
        if self._with_times and chunk.times is not None:
            parts.append(_times(chunk.times))
        if self._return_logprob:
            self._input.add(chunk.input_logprobs, self._tokenizer)
            self._output.add(chunk.output_logprobs, self._tokenizer)
            parts += self._input.fields(b"input", self._with_top, self._with_named)
            parts += self._output.fields(b"output", self._with_top, self._with_named)
            # Of the whole answer so far, also where events carry only what is new.
            parts.append(b',"output_token_logprobs_length":%d' % chunk.completion_tokens)
        parts += (b',"weight_version":', orjson.dumps(self._weights.version), self._tail)
        return parts


class _GrowingText:
    """JSON that grows at its end. Blocks are never copied, because each event of a stream repeats them."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._end = bytearray()

    def add(self, data: bytes) -> None:
        self._end += data
        if len(self._end) >= PIECE_BYTES:
            self._blocks.append(bytes(self._end))
            self._end.clear()

    def add_items(self, items: bytes) -> None:
        """Append items of a list, with a comma between them and those before."""
        if items:
            self.add(b"," + items if self._end or self._blocks else items)

    def parts(self) -> list[bytes]:
        return [*self._blocks, bytes(self._end)]


class _LogprobText:
    """Logprobs as JSON, growing: ``[[logprob, id, text], ...]`` and a list of such lists for alternatives."""

    def __init__(self) -> None:
        self._chosen = _GrowingText()
        self._top = _GrowingText()
        self._named = _GrowingText()

    def add(self, logprobs: TokenLogprobs | None, tokenizer: Tokenizer | None) -> None:
        """Append the logprobs of consecutive positions, a part at a time: others may run in between."""
        if logprobs is None:
            return
        for start in range(0, len(logprobs.token_ids), _WRITTEN_AT_ONCE):
            part = slice(start, start + _WRITTEN_AT_ONCE)
            chosen = _entries(logprobs.logprobs[part], logprobs.token_ids[part], tokenizer)
            self._chosen.add_items(orjson.dumps(chosen)[1:-1])
        for text, pairs in ((self._top, logprobs.top_logprobs), (self._named, logprobs.token_ids_logprobs)):
            for values, ids in pairs.columns():
                text.add_items(orjson.dumps(_entries(values, ids, tokenizer) or None))

    def fields(self, side: bytes, with_top: bool, with_named: bool) -> list[bytes]:
        """The fields of meta_info."""
        parts = [b',"%b_token_logprobs":[' % side, *self._chosen.parts(), b"]"]
        if with_top:
            parts += (b',"%b_top_logprobs":[' % side, *self._top.parts(), b"]")
        if with_named:
            parts += (b',"%b_token_ids_logprobs":[' % side, *self._named.parts(), b"]")
        return parts


def _entries(
    values: Sequence[float | None], ids: Sequence[int], tokenizer: Tokenizer | None
) -> list[tuple[float | None, int, str | None]]:
    texts = repeat(None, len(ids)) if tokenizer is None else map(tokenizer.token_text, ids)
    return list(zip(values, ids, texts, strict=True))


def _times(times: RequestTimes) -> bytes:
    """The fields of meta_info that say how long the request took, in seconds and tokens per second."""
    known = {
        "queue_time": times.queue_time_s,
        "first_token_latency": times.first_token_latency_s,
        "decode_throughput": times.decode_throughput,
    }
    return b"," + orjson.dumps(known)[1:-1]


def thinking_end_id(body: GenerateBody, config: EngineConfig, tokenizer: Tokenizer | None) -> int | None:
    """The token that ends the thinking, None unless it is to be counted. Raises RequestError 400 if there is none."""
    if not body.require_reasoning:
        return None
    if config.server_args.reasoning_parser is None or tokenizer is None:
        raise RequestError(
            400,
            "require_reasoning needs a server that knows where the thinking ends: start it with --reasoning-parser",
            param="require_reasoning",
        )
    tag = REASONING_FORMATS[config.server_args.reasoning_parser].end
    token: int | None = tokenizer.backend.token_to_id(tag)
    if token is None:
        raise RequestError(
            400,
            f"require_reasoning: the model's tokenizer has no one token {tag}; use /v1/chat/completions",
            param="require_reasoning",
        )
    return token


def finish_reason_object(reason: FinishReason) -> dict[str, object]:
    """``{"type": ..., ...}`` with the fields that say something."""
    fields: dict[str, object] = msgspec.to_builtins(reason)
    return {name: value for name, value in fields.items() if value is not None}
