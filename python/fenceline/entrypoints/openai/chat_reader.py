"""Reads an assistant's answer as it arrives: its reasoning, its text and its tool calls, in the order of the output."""

from __future__ import annotations

from collections.abc import Iterator

from fenceline.entrypoints.openai.reasoning_parser import ReasoningParser, ReasoningTokens
from fenceline.entrypoints.openai.tool_call_parser import (
    Arguments,
    CallBegun,
    Content,
    Found,
    Reasoning,
    ToolCallParser,
)
from fenceline.frontend.request_types import GenerateChunk


class ChatReader:
    """The state of one answer. ``front`` reads its text first: it separates the reasoning from the rest, or reads all
    messages of which the answer consists; None if the text is used as it is. ``calls`` finds the calls in the content
    that remains; None if there cannot be any. ``separates_reasoning``: whether :meth:`read` returns reasoning
    separately; otherwise it is content. ``one_call``: calls after the first are left out. ``tokens`` counts those of
    the reasoning; None if no token ends it: then their number is estimated from its share of the text."""

    __slots__ = ("_calls", "_estimate", "_front", "_one_call", "_tokens", "num_calls", "separates_reasoning")

    def __init__(
        self,
        front: ReasoningParser | ToolCallParser | None,
        calls: ToolCallParser | None,
        one_call: bool,
        separates_reasoning: bool | None = None,
        tokens: ReasoningTokens | None = None,
    ) -> None:
        self._front = front
        self._calls = calls
        self._one_call = one_call
        self.separates_reasoning = front is not None if separates_reasoning is None else separates_reasoning
        self.num_calls = 0
        self._tokens = tokens
        self._estimate = 0.0  # of tokens of reasoning; 0 if there has been none

    @property
    def is_plain(self) -> bool:
        """Whether the answer is nothing but its text."""
        return self._front is None and self._calls is None

    def new_call_id(self) -> str:
        """An id for a call, of the form that the model's template takes."""
        parser = self._front if self._calls is None else self._calls
        assert isinstance(parser, ToolCallParser)
        return parser.make_id()

    def read(self, chunk: GenerateChunk) -> Iterator[Found]:
        """What the next chunk of the answer adds; with the last chunk also everything that was held back."""
        finished = chunk.finish_reason is not None
        num_chars = len(chunk.text) or 1
        if self._tokens is not None:
            self._tokens.add(chunk.output_ids)
        for found in self._read(chunk.text, finished):
            self.num_calls += isinstance(found, CallBegun)
            if self._one_call and self.num_calls > 1 and isinstance(found, CallBegun | Arguments):
                continue
            if isinstance(found, Reasoning):
                self._estimate += len(chunk.output_ids) * min(len(found.text) / num_chars, 1)
                if not self.separates_reasoning:
                    found = Content(found.text)
            yield found

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens of what has been read are reasoning; None if it is not told from the rest."""
        if not self.separates_reasoning:
            return None
        return self._tokens.num if self._tokens is not None and self._estimate else round(self._estimate)

    def _read(self, text: str, finished: bool) -> Iterator[Found]:
        calls = self._calls
        for found in self._read_front(text, finished):
            if calls is not None and isinstance(found, Content):
                yield from calls.feed(found.text)
            else:
                yield found
        if calls is not None and finished:
            yield from calls.finish()

    def _read_front(self, text: str, finished: bool) -> Iterator[Found]:
        match self._front:
            case None:
                if text:
                    yield Content(text)
            case ToolCallParser() as messages:
                yield from messages.feed(text)
                if finished:
                    yield from messages.finish()
            case ReasoningParser() as thought:
                for split in (thought.feed(text), *((thought.finish(),) if finished else ())):
                    if split.reasoning:
                        yield Reasoning(split.reasoning)
                    if split.content:
                        yield Content(split.content)
