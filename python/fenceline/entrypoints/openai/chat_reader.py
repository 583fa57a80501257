"""Reads an assistant's answer as it arrives: its reasoning, its text and its tool calls, in the order of the output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fenceline.entrypoints.openai.reasoning_parser import ReasoningParser, Split
from fenceline.entrypoints.openai.tool_call_parser import Arguments, CallBegun, Content, Found, ToolCallParser
from fenceline.frontend.request_types import GenerateChunk


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning in front of the answer."""

    text: str


Piece = Reasoning | Found


class ChatReader:
    """The state of one answer. ``reasoning`` is None if reasoning is not separated from the answer, ``calls`` if the
    model was given no tools. ``one_call``: calls after the first are left out."""

    __slots__ = ("_calls", "_one_call", "_reasoning", "num_calls")

    def __init__(
        self, reasoning: ReasoningParser | None, calls: ToolCallParser | None, one_call: bool
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._one_call = one_call
        self.num_calls = 0

    @property
    def is_plain(self) -> bool:
        """Whether the answer is nothing but its text."""
        return self._reasoning is None and self._calls is None

    @property
    def separates_reasoning(self) -> bool:
        """Whether :meth:`read` tells reasoning from content."""
        return self._reasoning is not None

    def new_call_id(self) -> str:
        """An id for a call, of the form that the model's template takes."""
        assert self._calls is not None
        return self._calls.make_id()

    def read(self, chunk: GenerateChunk) -> Iterator[Piece]:
        """What the next chunk of the answer brings, the last with all that was kept back."""
        split, finished = self._split(chunk), chunk.finish_reason is not None
        if split.reasoning:
            yield Reasoning(split.reasoning)
        if self._calls is None:
            if split.content:
                yield Content(split.content)
            return
        for found in self._calls.feed(split.content) + (self._calls.finish() if finished else []):
            self.num_calls += isinstance(found, CallBegun)
            if not (self._one_call and self.num_calls > 1 and isinstance(found, CallBegun | Arguments)):
                yield found

    def _split(self, chunk: GenerateChunk) -> Split:
        if self._reasoning is None:
            return Split("", chunk.text)
        split = self._reasoning.feed(chunk.text)
        if chunk.finish_reason is None:
            return split
        rest = self._reasoning.finish()
        return Split(split.reasoning + rest.reasoning, split.content + rest.content)
