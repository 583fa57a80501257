"""One choice of a chat completion, whole or as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Mapping

from fenceline.entrypoints.openai.answer import TokenIds, finish_fields
from fenceline.entrypoints.openai.delivery import StreamShape, TextFrame
from fenceline.entrypoints.openai.logprobs import chat_logprobs
from fenceline.entrypoints.openai.protocol import ChatBody
from fenceline.entrypoints.openai.reasoning_parser import ReasoningParser, Split
from fenceline.entrypoints.openai.token_texts import TokenTexts
from fenceline.frontend.request_types import GenerateChunk


class ChatChoice:
    """Writes one choice. ``parser`` is None if reasoning is not separated from the answer."""

    def __init__(
        self,
        index: int,
        body: ChatBody,
        texts: TokenTexts,
        parser: ReasoningParser | None,
        ids: TokenIds | None,
    ) -> None:
        self.index = index
        self._ids = ids
        self._texts = texts
        self._num_top = body.top_logprobs or 0
        self._with_logprobs = body.logprobs
        self._parser = parser
        self._hold_reasoning = not body.stream_reasoning
        self._held_reasoning = ""
        self._begun = False

    # --- whole

    def whole(self, chunk: GenerateChunk) -> dict[str, object]:
        """The choice of an answer that does not stream."""
        message: dict[str, object] = {"role": "assistant", "content": chunk.text}
        if self._parser is not None:
            split = self._split(chunk)
            message["content"] = split.content or None
            message["reasoning_content"] = split.reasoning or None
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(chunk),
            **finish_fields(chunk.finish_reason),
            **self._id_fields(chunk),
        }

    def _split(self, chunk: GenerateChunk) -> Split:
        assert self._parser is not None
        split = self._parser.feed(chunk.text)
        if chunk.finish_reason is None:
            return split
        rest = self._parser.finish()
        return Split(split.reasoning + rest.reasoning, split.content + rest.content)

    def _logprobs(self, chunk: GenerateChunk) -> dict[str, object] | None:
        if not self._with_logprobs or chunk.output_logprobs is None:
            return None
        return chat_logprobs(self._texts, chunk.output_logprobs, self._num_top)

    def _id_fields(self, chunk: GenerateChunk) -> dict[str, object]:
        return {} if self._ids is None else self._ids.fields(chunk)

    # --- streaming

    def text_frame(self, shape: StreamShape) -> TextFrame | None:
        """The prepared frame for chunks that carry text alone; None if every chunk of this choice carries more."""
        if self._with_logprobs or self._parser is not None or self._ids is not None:
            return None
        return shape.text_frame(self._delta({"content": TextFrame.MARK}))

    def frames(self, chunk: GenerateChunk, shape: StreamShape, usage: Mapping[str, object]) -> bytes:
        """The chunk as events, possibly none. The role precedes the first text, the finish reason follows the last."""
        data = b""
        if not self._begun:
            self._begun = True
            data += shape.frame(self._delta({"role": "assistant", "content": ""}), usage)
        delta, logprobs, ids = self._new_text(chunk), self._logprobs(chunk), self._id_fields(chunk)
        if delta or logprobs is not None or any(ids.values()):
            data += shape.frame({**self._delta(delta or {"content": ""}, logprobs), **ids}, usage)
        if chunk.finish_reason is not None:
            choice = {**self._delta({}), **finish_fields(chunk.finish_reason)}
            data += shape.frame(choice, usage)
        return data

    def _delta(
        self, delta: dict[str, object], logprobs: dict[str, object] | None = None
    ) -> dict[str, object]:
        return {"index": self.index, "delta": delta, "logprobs": logprobs, **finish_fields(None)}

    def _new_text(self, chunk: GenerateChunk) -> dict[str, object]:
        if self._parser is None:
            return {"content": chunk.text} if chunk.text else {}
        split = self._split(chunk)
        reasoning = split.reasoning
        if self._hold_reasoning:
            reasoning = self._release_reasoning(split, chunk.finish_reason is not None)
        delta: dict[str, object] = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if split.content:
            delta["content"] = split.content
        return delta

    def _release_reasoning(self, split: Split, finished: bool) -> str:
        """For ``stream_reasoning: false``: all of the reasoning at once, when the answer begins."""
        self._held_reasoning += split.reasoning
        if not (split.content or finished):
            return ""
        whole, self._held_reasoning = self._held_reasoning, ""
        return whole
