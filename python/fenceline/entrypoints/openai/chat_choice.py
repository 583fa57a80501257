"""One choice of a chat completion, whole or as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fenceline.entrypoints.openai.answer import TokenIds, finish_fields
from fenceline.entrypoints.openai.chat_reader import ChatReader
from fenceline.entrypoints.openai.delivery import StreamShape, TextFrame
from fenceline.entrypoints.openai.logprobs import chat_logprobs
from fenceline.entrypoints.openai.protocol import ChatBody
from fenceline.entrypoints.openai.token_texts import TokenTexts
from fenceline.entrypoints.openai.tool_call_parser import CallBegun, Content, Reasoning
from fenceline.frontend.request_types import GenerateChunk
from fenceline.ipc.io_struct import FinishReason


class ChatChoice:
    """Writes one choice."""

    def __init__(self, index: int, body: ChatBody, texts: TokenTexts, reader: ChatReader, ids: TokenIds | None) -> None:
        self.index = index
        self._ids = ids
        self._texts = texts
        self._num_top = body.top_logprobs or 0
        self._with_logprobs = body.logprobs
        self._reader = reader
        self._hold_reasoning = not body.stream_reasoning
        self._held_reasoning: list[str] = []
        self._begun = False

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens of what has been written are reasoning; None if it is not told from the rest."""
        return self._reader.reasoning_tokens

    # --- whole

    def whole(self, chunk: GenerateChunk) -> dict[str, object]:
        """The choice of an answer that does not stream."""
        reasoning, content, calls = self._read(chunk)
        message: dict[str, object] = {"role": "assistant", "content": content}
        if self._reader.separates_reasoning or calls:
            message["content"] = content or None
        if self._reader.separates_reasoning:
            message["reasoning_content"] = reasoning or None
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(chunk),
            **self._finish_fields(chunk.finish_reason),
            **self._id_fields(chunk),
        }

    def _read(self, chunk: GenerateChunk) -> tuple[str, str, list[dict[str, Any]]]:
        """What ``chunk`` adds: reasoning, content, and the calls in it, in the form of a stream's delta."""
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        arguments: list[list[str]] = []  # of each call
        for piece in self._reader.read(chunk):
            match piece:
                case Reasoning():
                    reasoning.append(piece.text)
                case Content():
                    content.append(piece.text)
                case CallBegun():
                    id, function = self._reader.new_call_id(), {"name": piece.name}
                    index = self._reader.num_calls - 1
                    calls.append({"index": index, "id": id, "type": "function", "function": function})
                    arguments.append([])
                case _:
                    if not calls:
                        calls.append({"index": self._reader.num_calls - 1, "function": {}})
                        arguments.append([])
                    arguments[-1].append(piece.text)
        for call, texts in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(texts)
        return "".join(reasoning), "".join(content), calls

    def _finish_fields(self, reason: FinishReason | None) -> dict[str, object]:
        fields = finish_fields(reason)
        if self._reader.num_calls and reason is not None and reason.type == "stop":
            fields["finish_reason"] = "tool_calls"
        return fields

    def _logprobs(self, chunk: GenerateChunk) -> dict[str, object] | None:
        if not self._with_logprobs or chunk.output_logprobs is None:
            return None
        return chat_logprobs(self._texts, chunk.output_logprobs, self._num_top)

    def _id_fields(self, chunk: GenerateChunk) -> dict[str, object]:
        return {} if self._ids is None else self._ids.fields(chunk)

    # --- streaming

    def text_frame(self, shape: StreamShape) -> TextFrame | None:
        """The prepared frame for chunks that carry text alone; None if every chunk of this choice carries more."""
        if self._with_logprobs or self._ids is not None or not self._reader.is_plain:
            return None
        return shape.text_frame(self._delta({"content": TextFrame.MARK}))

    def frames(self, chunk: GenerateChunk, shape: StreamShape, usage: Mapping[str, object]) -> bytes:
        """The chunk as events, possibly none. The role precedes the first text, the finish reason follows the last."""
        data = b""
        if not self._begun:
            self._begun = True
            data += shape.frame(self._delta({"role": "assistant", "content": ""}), usage)
        deltas, logprobs, ids = self._deltas(chunk), self._logprobs(chunk), self._id_fields(chunk)
        if not deltas and (logprobs is not None or any(ids.values())):
            deltas = [{"content": ""}]
        for delta in deltas:
            data += shape.frame({**self._delta(delta, logprobs), **ids}, usage)
            logprobs, ids = None, {}
        if chunk.finish_reason is not None:
            choice = {**self._delta({}), **self._finish_fields(chunk.finish_reason)}
            data += shape.frame(choice, usage)
        return data

    def _delta(self, delta: dict[str, object], logprobs: dict[str, object] | None = None) -> dict[str, object]:
        return {"index": self.index, "delta": delta, "logprobs": logprobs, **finish_fields(None)}

    def _deltas(self, chunk: GenerateChunk) -> list[dict[str, Any]]:
        """The deltas for the chunk's text: one for reasoning and content, and one for each call."""
        reasoning, content, calls = self._read(chunk)
        if self._hold_reasoning:
            going_on = chunk.finish_reason is None and not (content or calls)
            reasoning = self._release_reasoning(reasoning, going_on)
        delta: dict[str, Any] = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content:
            delta["content"] = content
        return [*([delta] if delta else []), *({"tool_calls": [call]} for call in calls)]

    def _release_reasoning(self, text: str, going_on: bool) -> str:
        """For ``stream_reasoning: false``: all of the reasoning at once, when the answer begins."""
        self._held_reasoning.append(text)
        if going_on:
            return ""
        whole, self._held_reasoning = self._held_reasoning, []
        return "".join(whole)
