"""The streams from which consumers read the chunks of one request, or of several at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from fenceline.frontend.request_types import GenerateChunk, RequestError, error_of, merge_chunks


class RequestStream:
    """An async iterator over the chunks of one request; leaving it early aborts the request. Use as ``async with await
    manager.submit(inp) as stream: async for chunk in stream: ...``. Chunks that arrive while nobody reads are merged
    into the next one read. Iteration raises RequestError if the engine dies. ``prompt_ids`` is the prompt as the
    scheduler got it."""

    __slots__ = ("_abort", "_error", "_exhausted", "_notify", "_pending", "_whole", "prompt_ids", "rid")

    def __init__(self, rid: str, prompt_ids: Sequence[int], abort: Callable[[str], None]) -> None:
        self.rid = rid
        self.prompt_ids = prompt_ids
        self._abort = abort
        self._pending: list[GenerateChunk] = []
        self._notify: Callable[[], None] | None = None  # called when something has arrived
        self._error: RequestError | None = None
        self._exhausted = False  # the last chunk was taken
        self._whole = False  # the reader waits for the whole answer

    # --- producer's side: called by the TokenizerManager on the event loop

    def push(self, chunk: GenerateChunk) -> None:
        self._pending.append(chunk)
        if self._notify is not None and (not self._whole or chunk.finish_reason is not None):
            self._notify()

    def fail(self, error: RequestError) -> None:
        """End the stream: the consumer gets what is pending, then ``error``."""
        self._error = error
        if self._notify is not None:
            self._notify()

    # --- consumer's side

    def listen(self, notify: Callable[[], None] | None) -> None:
        """Have ``notify`` called when :meth:`take` may have something new."""
        self._notify = notify

    @property
    def exhausted(self) -> bool:
        """Whether the last chunk was taken, or the stream closed."""
        return self._exhausted

    def take(self) -> GenerateChunk | None:
        """What has arrived, merged; None if nothing has. Raises the RequestError that ended the stream."""
        if not self._pending:
            if self._error is not None and not self._exhausted:
                self._exhausted = True
                raise self._error
            return None
        pending, self._pending = self._pending, []
        chunk = pending[0] if len(pending) == 1 else merge_chunks(pending)
        self._exhausted = chunk.finish_reason is not None
        return chunk

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerateChunk:
        while not self._exhausted:
            chunk = self.take()
            if chunk is not None:
                return chunk
            await self._news()
        raise StopAsyncIteration

    async def collect(self) -> GenerateChunk:
        """The whole answer as one chunk; wakes up only once. Call it before reading anything. Raises RequestError if
        the request ended in an error or was closed meanwhile."""
        self._whole = True
        chunks = [chunk async for chunk in self]
        if not chunks or not chunks[-1].finished:
            raise RequestError(499, "the request was closed before it finished", code="closed")
        error = error_of(chunks[-1])
        if error is not None:
            raise error
        return merge_chunks(chunks)

    def close(self) -> None:
        """Stop reading; a reader waiting now sees the end. Aborts the request in the scheduler unless its
        last chunk was read. Closing twice is harmless."""
        if not self._exhausted:
            self._exhausted = True
            self._pending.clear()
            self._abort(self.rid)
            if self._notify is not None:
                self._notify()

    async def _news(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        self._notify = wake
        try:
            await waiter
        finally:
            self._notify = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StreamGroup:
    """Several requests that are read together: yields ``(index, chunk)`` as chunks arrive; leaving early aborts all."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.streams = tuple(streams)

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerateChunk]]:
        ready = dict.fromkeys(range(len(self.streams)))  # in order of arrival; all may have chunks already
        news = asyncio.Event()
        for index, stream in enumerate(self.streams):
            stream.listen(self._marker(index, ready, news))
        num_open = len(self.streams)
        while num_open:
            while not ready:
                news.clear()
                await news.wait()
            index = next(iter(ready))
            del ready[index]
            chunk = self.streams[index].take()
            num_open -= self.streams[index].exhausted
            if chunk is not None:
                yield index, chunk

    @staticmethod
    def _marker(index: int, ready: dict[int, None], news: asyncio.Event) -> Callable[[], None]:
        def mark() -> None:
            ready[index] = None
            news.set()

        return mark

    async def collect(self) -> list[GenerateChunk]:
        """All answers in order. Raises the first RequestError; use inside ``async with`` to abort the rest."""
        return [await stream.collect() for stream in self.streams]

    def close(self) -> None:
        """Abort whatever has not finished."""
        for stream in self.streams:
            stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
