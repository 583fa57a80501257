"""One choice of a chat completion, whole or as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fenceline.entrypoints.openai.answer import TokenIds, finish_fields
from fenceline.entrypoints.openai.delivery import StreamShape, TextFrame
from fenceline.entrypoints.openai.logprobs import chat_logprobs
from fenceline.entrypoints.openai.protocol import ChatBody
from fenceline.entrypoints.openai.reasoning_parser import ReasoningParser, Split
from fenceline.entrypoints.openai.token_texts import TokenTexts
from fenceline.entrypoints.openai.tool_call_parser import Arguments, CallBegun, Content, ToolCallParser
from fenceline.frontend.request_types import GenerateChunk
from fenceline.ipc.io_struct import FinishReason


class ChatChoice:
    """Writes one choice. ``parser`` is None if reasoning is not separated from the answer, ``calls`` if the model was
    given no tools."""

    def __init__(
        self,
        index: int,
        body: ChatBody,
        texts: TokenTexts,
        parser: ReasoningParser | None,
        calls: ToolCallParser | None,
        ids: TokenIds | None,
    ) -> None:
        self.index = index
        self._ids = ids
        self._texts = texts
        self._num_top = body.top_logprobs or 0
        self._with_logprobs = body.logprobs
        self._parser = parser
        self._calls = calls
        self._one_call = not body.parallel_tool_calls
        self._num_calls = 0
        self._hold_reasoning = not body.stream_reasoning
        self._held_reasoning = ""
        self._begun = False

    # --- whole

    def whole(self, chunk: GenerateChunk) -> dict[str, object]:
        """The choice of an answer that does not stream."""
        split = self._split(chunk)
        message: dict[str, object] = {"role": "assistant", "content": split.content}
        if self._parser is not None:
            message["content"] = split.content or None
            message["reasoning_content"] = split.reasoning or None
        if self._calls is not None:
            message["content"], calls = self._with_calls(split.content, finished=True)
            if calls:
                message["tool_calls"] = [
                    {key: call[key] for key in ("id", "type", "function")} for call in calls
                ]
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(chunk),
            **self._finish_fields(chunk.finish_reason),
            **self._id_fields(chunk),
        }

    def _split(self, chunk: GenerateChunk) -> Split:
        if self._parser is None:
            return Split("", chunk.text)
        split = self._parser.feed(chunk.text)
        if chunk.finish_reason is None:
            return split
        rest = self._parser.finish()
        return Split(split.reasoning + rest.reasoning, split.content + rest.content)

    def _with_calls(self, content: str, finished: bool) -> tuple[str | None, list[dict[str, Any]]]:
        """What ``content``, more text of the answer, brings: text, and the calls that begin or go on in it, as a
        stream's delta has them."""
        assert self._calls is not None
        found = self._calls.feed(content) + (self._calls.finish() if finished else [])
        text = ""
        calls: list[dict[str, Any]] = []
        for event in found:
            match event:
                case Content():
                    text += event.text
                case CallBegun():
                    self._num_calls += 1
                    function = {"name": event.name, "arguments": ""}
                    id = self._calls.make_id()
                    calls.append(
                        {"index": self._num_calls - 1, "id": id, "type": "function", "function": function}
                    )
                case Arguments():
                    if not calls:
                        calls.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += event.text
        return text or None, [call for call in calls if not (self._one_call and call["index"])]

    def _finish_fields(self, reason: FinishReason | None) -> dict[str, object]:
        fields = finish_fields(reason)
        if self._num_calls and reason is not None and reason.type == "stop":
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
        if self._with_logprobs or self._parser or self._calls or self._ids:
            return None
        return shape.text_frame(self._delta({"content": TextFrame.MARK}))

    def frames(self, chunk: GenerateChunk, shape: StreamShape, usage: Mapping[str, object]) -> bytes:
        """The chunk as events, possibly none. The role precedes the first text, the finish reason follows the last."""
        data = b""
        if not self._begun:
            self._begun = True
            data += shape.frame(self._delta({"role": "assistant", "content": ""}), usage)
        deltas, logprobs, ids = self._new_text(chunk), self._logprobs(chunk), self._id_fields(chunk)
        if not deltas and (logprobs is not None or any(ids.values())):
            deltas = [{"content": ""}]
        for delta in deltas:
            data += shape.frame({**self._delta(delta, logprobs), **ids}, usage)
            logprobs, ids = None, {}
        if chunk.finish_reason is not None:
            choice = {**self._delta({}), **self._finish_fields(chunk.finish_reason)}
            data += shape.frame(choice, usage)
        return data

    def _delta(
        self, delta: dict[str, object], logprobs: dict[str, object] | None = None
    ) -> dict[str, object]:
        return {"index": self.index, "delta": delta, "logprobs": logprobs, **finish_fields(None)}

    def _new_text(self, chunk: GenerateChunk) -> list[dict[str, Any]]:
        """The deltas for the chunk's text: one for reasoning and content, and one for each call."""
        split, finished = self._split(chunk), chunk.finish_reason is not None
        reasoning = self._release_reasoning(split, finished) if self._hold_reasoning else split.reasoning
        content: str | None = split.content
        calls: list[dict[str, Any]] = []
        if self._calls is not None:
            content, calls = self._with_calls(split.content, finished)
        delta: dict[str, Any] = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content:
            delta["content"] = content
        return [*([delta] if delta else []), *({"tool_calls": [call]} for call in calls)]

    def _release_reasoning(self, split: Split, finished: bool) -> str:
        """For ``stream_reasoning: false``: all of the reasoning at once, when the answer begins."""
        self._held_reasoning += split.reasoning
        if not (split.content or finished):
            return ""
        whole, self._held_reasoning = self._held_reasoning, ""
        return whole
