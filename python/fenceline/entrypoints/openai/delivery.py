"""Sends an answer: as one JSON object, or chunk by chunk as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from fenceline.entrypoints.json_body import PartsResponse
from fenceline.entrypoints.openai.answer import UsageCounter
from fenceline.entrypoints.openai.protocol import GenerationBody, StreamOptions
from fenceline.entrypoints.sse import DONE, EventStream, collect_or_abort, written
from fenceline.frontend.request_stream import StreamGroup
from fenceline.frontend.request_types import TURN_REQUESTS, GenerateChunk, error_of


@dataclass(frozen=True, slots=True)
class StreamShape:
    """What the frames of one stream carry besides their choice."""

    fields: Mapping[str, object]
    include_usage: bool
    continuous_usage: bool

    @classmethod
    def of(cls, body: GenerationBody, fields: Mapping[str, object]) -> StreamShape:
        """The shape that the request's ``stream_options`` ask for."""
        options = body.stream_options or StreamOptions()
        return cls(fields, bool(options.include_usage), bool(options.continuous_usage_stats))

    def frame(self, choice: Mapping[str, object], usage: Mapping[str, object] | None) -> bytes:
        """One event with one choice; ``usage`` is the choice's, sent only where it was asked for."""
        value: dict[str, object] = {**self.fields, "choices": [choice]}
        if self.include_usage or self.continuous_usage:
            value["usage"] = usage if self.continuous_usage else None
        return event(value)

    def usage_frame(self, usage: Mapping[str, object]) -> bytes:
        """The last event before the end: all choices' usage, or nothing where it was not asked for."""
        if not self.include_usage:
            return b""
        return event({**self.fields, "choices": [], "usage": usage})

    def extension_frame(self, extension: Mapping[str, object]) -> bytes:
        """The event before the usage: what the request asked for beyond OpenAI's fields, if anything."""
        return event({**self.fields, "choices": [], **extension}) if extension else b""

    def text_frame(self, choice_with_mark: Mapping[str, object]) -> TextFrame | None:
        """A frame that differs only in its text, prepared once; None if frames carry changing usage."""
        if self.continuous_usage:
            return None
        before, after = self.frame(choice_with_mark, None).split(orjson.dumps(TextFrame.MARK), 1)
        return TextFrame(before, after)


@dataclass(frozen=True, slots=True)
class TextFrame:
    """The bytes before and after the text of a frame, encoded once, so that a chunk of text costs one join."""

    before: bytes
    after: bytes

    MARK = "\x00text\x00"

    def fill(self, text: str) -> bytes:
        """The frame with this text."""
        return self.before + orjson.dumps(text) + self.after


class ChoiceWriter(Protocol):
    """Writes one choice of an answer, either whole or as frames of a stream, and keeps its state between the frames."""

    def whole(self, chunk: GenerateChunk) -> dict[str, object]:
        """The choice of an answer that does not stream; ``chunk`` holds all of its output."""

    def frames(self, chunk: GenerateChunk, shape: StreamShape, usage: Mapping[str, object]) -> bytes:
        """The events for ``chunk``; no bytes if there is nothing to send. ``usage`` is the choice's."""

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens of what has been written are reasoning; None if that is not known."""

    def text_frame(self, shape: StreamShape) -> TextFrame | None:
        """A prepared form of what :meth:`frames` returns for an unfinished chunk from the second one on; None if such
        chunks carry more than text."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a submitted request: ``choices[i]`` writes what ``group.streams[i]`` yields."""

    group: StreamGroup
    choices: Sequence[ChoiceWriter]
    usage: UsageCounter

    def stream(self, shape: StreamShape) -> Response:
        """Answer with events. A RequestError during the stream is sent as the last event before the end."""
        return EventStream(self._events(shape), self.group.close)

    async def whole(self, fields: Mapping[str, object], request: Request) -> Response:
        """Answer with one object that begins with ``fields``, unless ``request``'s client leaves meanwhile. Raises
        RequestError for the first request of the group that failed."""
        chunks = await collect_or_abort(request, self.group)
        for index, chunk in enumerate(chunks):
            self.usage.note(index, chunk)
        parts = [orjson.dumps(fields)[:-1] + b',"choices":[']
        for index, (choice, chunk) in enumerate(zip(self.choices, chunks, strict=True), start=1):
            parts += (await written(chunk, partial(_whole_choice, choice, chunk)), b",")
            self.usage.note_reasoning(index - 1, choice.reasoning_tokens)
            if index % TURN_REQUESTS == 0:
                await asyncio.sleep(0)
        rest = {"usage": self.usage.total(), **self.usage.extension()}
        parts[-1] = b"]," + orjson.dumps(rest)[1:]
        return PartsResponse(parts)

    async def _events(self, shape: StreamShape) -> AsyncGenerator[bytes, None]:
        prepared: list[TextFrame | None] = [None] * len(self.choices)
        async for index, chunk in self.group:
            self.usage.note(index, chunk)
            frame = prepared[index]
            if frame is not None and chunk.finish_reason is None:
                if chunk.text:
                    yield frame.fill(chunk.text)
                continue
            if (error := error_of(chunk)) is not None:
                raise error
            choice = self.choices[index]
            write = partial(choice.frames, chunk, shape, self.usage.of_choice(index))
            data = await written(chunk, write)
            self.usage.note_reasoning(index, choice.reasoning_tokens)
            if data:
                yield data
            if chunk.finish_reason is None:
                prepared[index] = choice.text_frame(shape)
        yield shape.extension_frame(self.usage.extension()) + shape.usage_frame(self.usage.total()) + DONE


def _whole_choice(choice: ChoiceWriter, chunk: GenerateChunk) -> bytes:
    """The choice as JSON. It is encoded in the thread that calls this: choices with many logprobs in a worker thread,
    so that they do not block the event loop."""
    return orjson.dumps(choice.whole(chunk))


def event(value: object) -> bytes:
    """One server-sent event with ``value`` as JSON."""
    return b"data: " + orjson.dumps(value) + b"\n\n"
