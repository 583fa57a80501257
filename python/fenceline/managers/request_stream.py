"""The consumer's end of one request, and of several at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from fenceline.managers.request_types import GenerateChunk, RequestError, error_of, merge_chunks


class RequestStream:
    """An async iterator over the chunks of one request; leaving it early aborts the request.

    Use as ``async with await manager.submit(inp) as stream: async for chunk in stream: ...``. Chunks that
    arrive while nobody reads are merged into the next one read. Iteration raises RequestError if the
    engine dies or the request ends in an error before any of its chunks was read.
    """

    __slots__ = ("_abort", "_error", "_exhausted", "_pending", "_waiter", "_whole", "prompt_ids", "rid")

    def __init__(self, rid: str, prompt_ids: Sequence[int], abort: Callable[[str], None]) -> None:
        self.rid = rid
        self.prompt_ids = prompt_ids
        self._abort = abort
        self._pending: list[GenerateChunk] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: RequestError | None = None
        self._exhausted = False
        self._whole = False

    # --- producer's side: called by the TokenizerManager on the event loop

    def push(self, chunk: GenerateChunk) -> None:
        """Deliver one chunk."""
        self._pending.append(chunk)
        if not self._whole or chunk.finish_reason is not None:
            self._wake()

    def fail(self, error: RequestError) -> None:
        """End the stream: the consumer gets what is pending, then ``error``."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- consumer's side

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerateChunk:
        while not self._pending:
            if self._exhausted:
                raise StopAsyncIteration
            if self._error is not None:
                self._exhausted = True
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, []
        chunk = pending[0] if len(pending) == 1 else merge_chunks(pending)
        self._exhausted = chunk.finish_reason is not None
        return chunk

    async def collect(self) -> GenerateChunk:
        """The whole answer as one chunk; wakes up only once. Call it before reading anything.

        Raises RequestError if the request ended in an error or was closed meanwhile.
        """
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
            self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StreamGroup:
    """Several requests read together: yields ``(index, chunk)`` as news comes; leaving early aborts all."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.streams = tuple(streams)

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerateChunk]]:
        if len(self.streams) == 1:
            async for chunk in self.streams[0]:
                yield 0, chunk
            return
        tasks = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(self.streams)}
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = tasks.pop(task)
                    chunk = task.result()
                    if not chunk.finished:
                        tasks[asyncio.ensure_future(anext(self.streams[index]))] = index
                    yield index, chunk
        finally:
            for task in tasks:
                task.cancel()

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
