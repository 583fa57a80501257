"""/v1/responses: OpenAI's Responses API, served as a chat completion whose answer is written as items.

Responses are kept for ``previous_response_id`` and for references to their items unless the request says ``store:
false``: in memory, the latest 1,024 and 64 MiB of them, none of a conversation of more than 4 MiB. They are kept as
encoded JSON, because Python's objects take up to twenty times as much. Their ids cannot be guessed; whoever knows one,
and the key, can read, continue and delete it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from sys import getsizeof
from typing import Any

import msgspec
import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from fenceline.entrypoints.access import for_clients
from fenceline.entrypoints.body_parser import BodyParser
from fenceline.entrypoints.errors import too_deep
from fenceline.entrypoints.fields import UnknownFields
from fenceline.entrypoints.json_body import json_response
from fenceline.entrypoints.openai.answer import ServedModel
from fenceline.entrypoints.openai.chat_reader import ChatReader
from fenceline.entrypoints.openai.parsing import chat_completion, parse_model
from fenceline.entrypoints.openai.protocol import JsonObject, StrictModel
from fenceline.entrypoints.openai.responses_protocol import (
    MAX_ID_CHARS,
    RULES,
    Message,
    ResponsesBody,
    chat_fields,
    input_messages,
    item_kind,
)
from fenceline.entrypoints.openai.serving_chat import ChatServing, functions_of
from fenceline.entrypoints.openai.tool_call_parser import CallBegun, Content, Found, Reasoning
from fenceline.entrypoints.sse import EventStream, collect_or_abort
from fenceline.frontend.request_stream import StreamGroup
from fenceline.frontend.request_types import GenerateChunk, RequestError, error_of, new_rid

MAX_STORED, MAX_STORED_BYTES = 1024, 64 << 20
MAX_CONVERSATION_BYTES = 4 << 20
_ENTRY_BYTES = 512  # of the objects that hold one


@dataclass(frozen=True, slots=True)
class _Stored:
    """A response as encoded JSON, which takes as much memory as it has bytes: ``head`` without its output, the
    ``items`` of that, and ``messages``, the conversation with the answer as a list without brackets. Instructions are
    not among them: they hold for one response."""

    head: bytes
    items: tuple[bytes, ...]
    messages: bytes

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return _ENTRY_BYTES + sum(map(getsizeof, (self.head, self.messages, self.items, *self.items)))

    def response(self) -> bytes:
        return b'%b,"output":[%b]}' % (self.head[:-1], b",".join(self.items))

    def conversation(self) -> list[Message]:
        messages: list[Message] = orjson.loads(b"[%b]" % self.messages)
        return messages


class ResponseStore:
    """The latest responses by id, as many as the two bounds allow."""

    def __init__(
        self,
        max_responses: int = MAX_STORED,
        max_bytes: int = MAX_STORED_BYTES,
        max_conversation_bytes: int = MAX_CONVERSATION_BYTES,
    ) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._max_conversation_bytes = max_conversation_bytes
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._num_bytes = 0

    def add(self, response: dict[str, Any], history: _Stored | None, new: list[Message]) -> None:
        """Keep ``response``, whose conversation is that of ``history`` and the ``new`` messages; the least recently
        used ones make room. One of a longer conversation than is allowed is not kept."""
        # Not with orjson, whose texts take 4 KiB each at least.
        parts = (
            b"" if history is None else history.messages,
            msgspec.json.encode(new, enc_hook=StrictModel.model_dump)[1:-1],
        )
        head = msgspec.json.encode({name: value for name, value in response.items() if name != "output"})
        items = tuple(map(msgspec.json.encode, response["output"]))
        stored = _Stored(head, items, b",".join(filter(None, parts)))
        if stored.num_bytes > self._max_conversation_bytes:
            return
        self._stored[response["id"]] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, id: str) -> _Stored:
        """The response, which is now the most recently used one. Raises RequestError (404)."""
        found = self._stored.get(id)
        if found is None:
            raise _not_found("response", id)
        self._stored.move_to_end(id)
        return found

    def delete(self, id: str) -> None:
        """Forget it. Raises RequestError (404)."""
        found = self._stored.pop(id, None)
        if found is None:
            raise _not_found("response", id)
        self._num_bytes -= found.num_bytes

    def resolved(self, items: str | list[JsonObject]) -> str | list[JsonObject]:
        """``items`` with the stored ones in place of references to them, whose ids say of which response they are.
        Raises RequestError (404) for one that is not kept, and (400) for more than a conversation may have."""
        if isinstance(items, str):
            return items
        left = self._max_conversation_bytes
        found: list[JsonObject] = []
        for item in items:
            if item_kind(item) != "item_reference":
                found.append(item)
                continue
            id = str(item["id"])
            _, _, rest = id.partition("_")
            response, _, index = rest.partition("_")
            stored = self._stored.get(f"resp_{response}")
            number = int(index) if index.isascii() and index.isdigit() and len(index) < 9 else None
            kept = () if stored is None or number is None else stored.items[number : number + 1]
            left -= sum(map(len, kept))
            if left < 0:
                raise RequestError(
                    400,
                    f"the items that input refers to have more than {self._max_conversation_bytes} bytes",
                    param="input",
                )
            value: JsonObject = orjson.loads(kept[0]) if kept else {}
            if value.get("id") != id:
                raise _not_found("item", id)
            self._stored.move_to_end(f"resp_{response}")
            found.append(value)
        return found


def _not_found(what: str, id: str) -> RequestError:
    return RequestError(
        404, f"there is no {what} {id[:MAX_ID_CHARS]!r}: it was not stored, or is kept no longer; send the conversation"
    )


class ResponsesServing:
    """Answers with the chat endpoint's prompts, limits and parsers."""

    def __init__(self, chat: ChatServing, model: ServedModel, parser: BodyParser) -> None:
        self._chat = chat
        self._model = model
        self._parser = parser
        self.store = ResponseStore()

    def router(self) -> APIRouter:
        router = APIRouter(tags=["OpenAI"])
        router.add_api_route("/v1/responses", self.create, methods=["POST"])
        router.add_api_route("/v1/responses/{id}", self.retrieve, methods=["GET"])
        router.add_api_route("/v1/responses/{id}", self.delete, methods=["DELETE"])
        return router

    @for_clients
    async def create(self, request: Request) -> Response:
        """Write the next items of a conversation."""
        body = await self._parser.parse(request, _parse)
        body = body.model_copy(update={"input": self.store.resolved(body.input)})
        history = None
        if body.previous_response_id is not None:
            history = self.store.get(body.previous_response_id)
        chat = chat_completion(chat_fields(body, [] if history is None else history.conversation()))
        id = f"resp_{new_rid()}"
        name = self._model.name_for(body.model)
        # A client's own name of the request aborts it. The response's id cannot be guessed in any case.
        prompt, group = await self._chat.submit(chat, body.rid or body.request_id or id, request)
        answer = _Answer(id, name, body, self._chat.reader(chat, prompt, functions_of(chat)))
        if body.stream:
            events = _Events()
            stream = self._events(group, answer, events, body, history)
            return EventStream(stream, group.close, events.error)
        [chunk] = await collect_or_abort(request, group)
        for _ in answer.read(chunk):
            pass
        self._keep(answer, body, history)
        return json_response(answer.fields)

    @for_clients
    async def retrieve(self, id: str) -> Response:
        """A stored response."""
        return Response(self.store.get(id).response(), media_type="application/json")

    @for_clients
    async def delete(self, id: str) -> Response:
        """Forget a stored response."""
        self.store.delete(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    def _keep(self, answer: _Answer, body: ResponsesBody, history: _Stored | None) -> None:
        if body.store:
            new = [*input_messages(body.input), *input_messages(answer.fields["output"])]
            self.store.add(answer.fields, history, new)

    async def _events(
        self, group: StreamGroup, answer: _Answer, events: _Events, body: ResponsesBody, history: _Stored | None
    ) -> AsyncGenerator[bytes, None]:
        yield events.write(answer.begin())
        try:
            async for _, chunk in group:
                if (error := error_of(chunk)) is not None:
                    raise error
                data = events.write(answer.read(chunk))
                if chunk.finish_reason is not None:
                    self._keep(answer, body, history)  # before the client learns that it is complete
                if data:
                    yield data
        except RequestError as error:
            yield events.write(answer.fail(error))


def _parse(raw: bytes, unknown: UnknownFields) -> ResponsesBody:
    body = parse_model(ResponsesBody, RULES, raw, unknown)
    try:
        orjson.dumps([_repeated(body)])  # as deep as in an event
    except orjson.JSONEncodeError:
        raise too_deep() from None
    return body


def _repeated(body: ResponsesBody) -> dict[str, object]:
    """The objects of a request that its response repeats."""
    form = None if body.text is None else body.text.format
    return {
        "text": {"format": form or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools],
    }


class _Events:
    """Writes the events of one stream, which are numbered."""

    def __init__(self) -> None:
        self._number = 0

    def write(self, events: Iterable[dict[str, Any]]) -> bytes:
        parts: list[bytes] = []
        for event in events:
            data = orjson.dumps({**event, "sequence_number": self._number})
            parts += (b"event: ", event["type"].encode(), b"\ndata: ", data, b"\n\n")
            self._number += 1
        return b"".join(parts)

    def error(self, error: RequestError) -> bytes:
        """The last event of a stream that a defect has ended, for which there is no response any more."""
        return self.write([{"type": "error", "code": "server_error", "message": error.message, "param": None}])


class _Answer:
    """One response: ``fields`` is the object, which grows as chunks are read."""

    def __init__(self, id: str, model: str, body: ResponsesBody, reader: ChatReader) -> None:
        self._reader = reader
        self._id = id
        self._text: list[str] = []  # of the item that is being written, in parts
        self.fields: dict[str, Any] = {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": body.store,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": body.metadata,
            **_repeated(body),
        }

    # Each yields the events of what happened. An answer that does not stream drops them.

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first events."""
        yield {"type": "response.created", "response": self.fields}
        yield {"type": "response.in_progress", "response": self.fields}

    def read(self, chunk: GenerateChunk) -> Iterator[dict[str, Any]]:
        """The next chunk, after the last one the end too."""
        for piece in self._reader.read(chunk):
            if isinstance(piece, CallBegun) or not self._continues(piece):
                yield from self._end_item("completed")
                yield from self._begin_item(piece)
            if not isinstance(piece, CallBegun):
                self._text.append(piece.text)
                yield {**self._place(), "type": f"response.{self._stem()}.delta", "delta": piece.text} | self._extra()
        if chunk.finish_reason is not None:
            cut = chunk.finish_reason.type == "length"
            yield from self._end_item("incomplete" if cut else "completed")
            self.fields["status"] = "incomplete" if cut else "completed"
            if cut:
                self.fields["incomplete_details"] = {"reason": "max_output_tokens"}
            self.fields["usage"] = _usage(chunk, self._reader.reasoning_tokens or 0)
            yield {"type": f"response.{self.fields['status']}", "response": self.fields}

    def fail(self, error: RequestError) -> Iterator[dict[str, Any]]:
        """The answer ended with an error."""
        yield from self._end_item("incomplete")
        self.fields["status"] = "failed"
        self.fields["error"] = {"code": "server_error", "message": error.message}
        yield {"type": "response.failed", "response": self.fields}

    # --- items

    @property
    def _item(self) -> dict[str, Any]:
        item: dict[str, Any] = self.fields["output"][-1]
        return item

    def _continues(self, piece: Found) -> bool:
        output = self.fields["output"]
        kind = output[-1]["type"] if output and output[-1]["status"] == "in_progress" else None
        match piece:
            case Reasoning():
                return bool(kind == "reasoning")
            case Content():
                return bool(kind == "message")
        return bool(kind == "function_call")

    def _begin_item(self, piece: Found) -> Iterator[dict[str, Any]]:
        output = self.fields["output"]
        id = f"{self._id.removeprefix('resp_')}_{len(output)}"
        match piece:
            case Reasoning():
                item = {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": []}
            case Content():
                item = {"id": f"msg_{id}", "type": "message", "role": "assistant", "content": []}
            case _:
                call_id = self._reader.new_call_id()
                item = {"id": f"fc_{id}", "type": "function_call", "call_id": call_id, "arguments": ""}
                if isinstance(piece, CallBegun):
                    item["name"] = piece.name
        output.append({**item, "status": "in_progress"})
        self._text = []
        index = len(output) - 1
        yield {"type": "response.output_item.added", "output_index": index, "item": self._item}
        if (part := self._part("")) is not None:
            yield {"type": "response.content_part.added", **self._place(), "part": part}

    def _end_item(self, status: str) -> Iterator[dict[str, Any]]:
        output = self.fields["output"]
        if not output or output[-1]["status"] != "in_progress":
            return
        text = "".join(self._text)
        part = self._part(text)
        name = "arguments" if part is None else "text"
        yield {**self._place(), "type": f"response.{self._stem()}.done", name: text} | self._extra()
        if part is None:
            self._item["arguments"] = text
        else:
            self._item["content"] = [part]
            yield {"type": "response.content_part.done", **self._place(), "part": part}
        self._item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(output) - 1, "item": self._item}

    def _stem(self) -> str:
        return {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}[
            self._item["type"]
        ]

    def _part(self, text: str) -> dict[str, Any] | None:
        """The one part of the item's content, ``text``, None for a call."""
        match self._item["type"]:
            case "reasoning":
                return {"type": "reasoning_text", "text": text}
            case "message":
                return {"type": "output_text", "text": text, "annotations": []}
        return None

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._item["id"], "output_index": len(self.fields["output"]) - 1}
        return place if self._item["type"] == "function_call" else {**place, "content_index": 0}

    def _extra(self) -> dict[str, Any]:
        return {"logprobs": []} if self._item["type"] == "message" else {}


def _usage(chunk: GenerateChunk, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": chunk.prompt_tokens,
        "input_tokens_details": {"cached_tokens": chunk.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": chunk.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": chunk.prompt_tokens + chunk.completion_tokens,
    }
