"""/v1/messages: Anthropic's Messages API, served as a chat completion whose answer is written in blocks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from fenceline.entrypoints.access import for_clients
from fenceline.entrypoints.anthropic.protocol import RULES, CountBody, MessagesBody, chat_fields
from fenceline.entrypoints.body_parser import BodyParser
from fenceline.entrypoints.errors import CLIENT_GONE, MAX_MESSAGE_CHARS, ErrorResponse, too_deep
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.json_body import json_response
from fenceline.entrypoints.openai.answer import Generator, ServedModel, answer_id
from fenceline.entrypoints.openai.chat_reader import ChatReader
from fenceline.entrypoints.openai.parsing import chat_completion, parse_model
from fenceline.entrypoints.openai.protocol import ChatBody
from fenceline.entrypoints.openai.serving_chat import ChatServing, functions_of
from fenceline.entrypoints.openai.tool_call_parser import Arguments, CallBegun, Content, Found, Reasoning
from fenceline.entrypoints.sse import EventStream, collect_or_abort
from fenceline.frontend.request_stream import StreamGroup
from fenceline.frontend.request_types import GenerateChunk, RequestError, error_of
from fenceline.ipc.child_process import one_line

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesServing:
    """Answers messages with the chat endpoint's prompts, limits and parsers."""

    def __init__(self, chat: ChatServing, model: ServedModel, manager: Generator, parser: BodyParser) -> None:
        self._chat = chat
        self._model = model
        self._manager = manager
        self._parser = parser

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Anthropic"])
        for path, handler in (("/v1/messages", self.create), ("/v1/messages/count_tokens", self.count_tokens)):
            router.add_api_route(path, _with_errors(handler), methods=["POST"], name=handler.__name__)
        return router

    async def create(self, request: Request) -> Response:
        """Write the assistant's next message, as Anthropic's API does."""
        chat = await self._parser.parse(request, partial(_parse, MessagesBody))
        betas = request.headers.get("anthropic-beta", "")
        self._parser.unknown.note({name.strip() for name in betas.split(",") if name.strip()}, "beta")
        name = self._model.name_for(chat.model)
        with answer_id("msg_", chat, request, self._manager) as rid:
            prompt, group = await self._chat.submit(chat, rid, request)
        message = _Message(rid, name, self._chat.reader(chat, prompt, functions_of(chat)))
        if chat.stream:
            return EventStream(_events(group, message), group.close, _error_event)
        [chunk] = await collect_or_abort(request, group)
        return json_response(message.whole(chunk))

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of a conversation has."""
        chat = await self._parser.parse(request, partial(_parse, CountBody))
        return json_response({"input_tokens": await self._chat.count_tokens(chat, request)})


class _Message:
    """Writes one answer, whole or as events: blocks of thinking, text and tool use in the order of the output."""

    def __init__(self, rid: str, model: str, reader: ChatReader) -> None:
        self._reader = reader
        self._fields: dict[str, Any] = {"id": rid, "type": "message", "role": "assistant", "model": model}
        self._kind = ""  # of the block that is being written; none at first
        self._num_blocks = 0

    # --- whole

    def whole(self, chunk: GenerateChunk) -> dict[str, object]:
        """The message of an answer that does not stream."""
        blocks: list[dict[str, Any]] = []
        parts: list[list[str]] = []  # of each block's text
        for piece in self._reader.read(chunk):
            if self._begins_block(piece):
                blocks.append(self._new_block(piece))
                parts.append([])
            if not isinstance(piece, CallBegun):
                parts[-1].append(piece.text)
        for block, text in zip(blocks, map("".join, parts), strict=True):
            if block["type"] == "tool_use":
                block["input"] = _input_of(text)
            else:
                block[block["type"]] = text
        return {**self._fields, "content": blocks, **self._stop(chunk), "usage": self._usage(chunk)}

    def _usage(self, chunk: GenerateChunk) -> dict[str, object]:
        usage, thinking = _usage(chunk), self._reader.reasoning_tokens
        return usage if thinking is None else usage | {"output_tokens_details": {"thinking_tokens": thinking}}

    # --- streaming

    def begin(self, chunk: GenerateChunk | None) -> bytes:
        """The first event; ``chunk`` is the first of the answer."""
        usage = {"input_tokens": 0, "output_tokens": 0} if chunk is None else _usage(chunk)
        message = {**self._fields, "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "usage": usage})

    def events(self, chunk: GenerateChunk) -> bytes:
        """The events of a chunk, after the last one those of the message's end too."""
        parts: list[bytes] = []
        for piece in self._reader.read(chunk):
            if self._begins_block(piece):
                parts.append(self._end_block())
                block = self._new_block(piece, {})
                parts.append(_event("content_block_start", index=self._num_blocks, content_block=block))
            if not isinstance(piece, CallBegun):
                parts.append(_event("content_block_delta", index=self._num_blocks, delta=_delta(piece)))
        if chunk.finish_reason is not None:
            parts.append(self._end_block())
            parts.append(_event("message_delta", delta=self._stop(chunk), usage=self._usage(chunk)))
            parts.append(_event("message_stop"))
        return b"".join(parts)

    def _end_block(self) -> bytes:
        if not self._kind:
            return b""
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)

    # --- both

    def _begins_block(self, piece: Found) -> bool:
        return isinstance(piece, CallBegun) or _kind_of(piece) != self._kind

    def _new_block(self, piece: Found, no_input: object = None) -> dict[str, Any]:
        self._kind = _kind_of(piece)
        match piece:
            case CallBegun():
                id = self._reader.new_call_id()
                return {"type": "tool_use", "id": id, "name": piece.name, "input": no_input}
            case Reasoning():
                return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def _stop(self, chunk: GenerateChunk) -> dict[str, object]:
        reason = chunk.finish_reason
        if reason is None:
            return {"stop_reason": None, "stop_sequence": None}
        if self._reader.num_calls and reason.type == "stop":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason.type == "stop" and isinstance(reason.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": reason.matched}
        return {"stop_reason": _STOP_REASONS.get(reason.type, "end_turn"), "stop_sequence": None}


async def _events(group: StreamGroup, message: _Message) -> AsyncGenerator[bytes, None]:
    begun = False
    async for _, chunk in group:
        if (error := error_of(chunk)) is not None:
            raise error
        data = b"" if begun else message.begin(chunk)
        begun = True
        if data := data + message.events(chunk):
            yield data


def _error_event(error: RequestError) -> bytes:
    return _event("error", error=_error(error))


def _event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def _kind_of(piece: Found) -> str:
    match piece:
        case Reasoning():
            return "thinking"
        case Content():
            return "text"
    return "tool_use"


def _delta(piece: Reasoning | Content | Arguments) -> dict[str, str]:
    match piece:
        case Reasoning():
            return {"type": "thinking_delta", "thinking": piece.text}
        case Content():
            return {"type": "text_delta", "text": piece.text}
    return {"type": "input_json_delta", "partial_json": piece.text}


def _input_of(arguments: str) -> object:
    """The object that the model has written as a call's arguments; empty if the answer's end has cut it off."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    # Numbers as they were written.
    return orjson.Fragment(arguments.encode()) if isinstance(value, dict) else {}


def _usage(chunk: GenerateChunk) -> dict[str, object]:
    """Tokens so far. As in Anthropic's counts, ``input_tokens`` are those that were not in the cache."""
    return {
        "input_tokens": chunk.prompt_tokens - chunk.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": chunk.cached_tokens,
        "output_tokens": chunk.completion_tokens,
    }


def _parse(body_type: type[CountBody], raw: bytes, unknown: UnknownFields) -> ChatBody:
    body = parse_model(body_type, RULES[body_type], raw, unknown)
    if body.context_management and body.context_management.get("edits"):
        unknown.note({"context_management"}, "beta")
    return chat_completion(chat_fields(body))


def _error(error: RequestError) -> dict[str, str]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": kind, "message": one_line(error.message[:MAX_MESSAGE_CHARS])}


def _with_errors(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """``handler`` with errors as Anthropic's API writes them."""

    @for_clients
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as caught:
            error = caught
        except RecursionError:
            error = too_deep()
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        return ErrorResponse(error, orjson.dumps({"type": "error", "error": _error(error)}))

    answer.__doc__ = handler.__doc__
    return answer
