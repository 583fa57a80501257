"""JobProcess: the front end's connection to a process that does jobs within limits (``ipc.forked_jobs``)."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

import msgspec

from fenceline.frontend.request_types import RequestError, shutting_down
from fenceline.ipc.child_process import starting_children
from fenceline.ipc.forked_jobs import Job, JobLimits, JobResult

logger = logging.getLogger(__name__)

# A process that has not started by then, or has not answered so long after it should have given up a job itself, hangs.
START_S, ANSWER_S = 120.0, 10.0
# After a process that could not start, the next one is started after FIRST_PAUSE_S, then after twice as long each time.
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 120.0

T = TypeVar("T")


class JobProcess:
    """A process that does jobs, as the event loop sees it. One that does not answer in time is killed: it hangs, or
    somebody has stopped it. ``ended``: it cannot be used any more, since ``ended_s`` on the monotonic clock.
    ``start_error``: why it never could be."""

    def __init__(
        self, name: str, serve: Callable[..., None], args: tuple[object, ...], first: bytes, limits: JobLimits
    ) -> None:
        """``serve``: its main function, at the top of a module, with its end of the connection and ``args``. ``first``:
        the message with which it starts."""
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._limits = limits
        self._begun: asyncio.Future[bytes] = self._loop.create_future()
        self._begun.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.ended = False
        self.ended_s = 0.0
        self.start_error: RequestError | None = None
        self._closed = False
        self._waiting: dict[int, asyncio.Future[JobResult]] = {}
        self._num_jobs = 0
        # A thread of its own: to a process that has been stopped, sending blocks until it is killed.
        self._sender = ThreadPoolExecutor(1, name)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=serve, args=(theirs, *args), name=name, daemon=True)
        threading.Thread(target=self._read, args=(theirs, first), name=name, daemon=True).start()

    async def started(self) -> bytes:
        """What it found out at its start, as soon as it is ready. Raises RequestError (503) if it never is."""
        return await self._in_time(START_S, asyncio.shield(self._begun))

    async def run(self, make: Callable[[int], Job]) -> JobResult:
        """The result of the job that ``make`` makes with its number. Raises RequestError (503) if the process ends
        before, or does not answer."""
        if self.ended:
            raise self._gone()
        self._num_jobs += 1
        job = make(self._num_jobs)
        future = self._waiting[job.id] = self._loop.create_future()
        try:
            return await self._in_time(self._limits.wall_s + ANSWER_S, self._sent(job, future))
        except (OSError, RuntimeError) as error:  # its end is closed, or there can be no thread
            raise self._gone() from error
        finally:
            self._waiting.pop(job.id, None)

    def close(self) -> None:
        """End it, or have it ended as soon as it has been started."""
        self._closed = True
        if self._process.pid is not None:
            self._process.kill()

    async def _sent(self, job: Job, future: asyncio.Future[JobResult]) -> JobResult:
        await self._loop.run_in_executor(self._sender, self._send, job)
        return await future

    def _send(self, job: Job) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(job))

    async def _in_time(self, limit_s: float, answer: Awaitable[T]) -> T:
        """``answer``, unless it takes longer than ``limit_s``: then the process is lost, with all that waits for it."""
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            logger.error("the %s process has not answered for %g s and is killed", self._name, limit_s)
            self.close()
            self._fail()
            raise self._gone() from None

    def _read(self, theirs: Connection, first: bytes) -> None:
        """The thread that starts the process, since that takes a while, and reads what comes."""
        decoder = msgspec.msgpack.Decoder(JobResult)
        try:
            try:
                with starting_children():
                    self._process.start()
            finally:
                theirs.close()
            if self._closed:
                self._process.kill()
            self._connection.send_bytes(first)
            while True:
                made = decoder.decode(self._connection.recv_bytes())
                self._call(self._resolve, made)
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("the %s process is lost", self._name)
        finally:
            self._call(self._fail)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            pass  # the loop is closed

    def _resolve(self, made: JobResult) -> None:
        if self.ended:
            return
        if made.id != 0:
            future = self._waiting.get(made.id)
            if future is not None and not future.done():
                future.set_result(made)
        elif made.error:
            self._fail(RequestError(503, f"nothing can be {self._limits.done} now: {made.error}; try again later"))
        else:
            self._begun.set_result(made.data)

    def _fail(self, error: RequestError | None = None) -> None:
        if self.ended:
            return
        self.ended, self.ended_s = True, time.monotonic()
        self._sender.shutdown(wait=False)
        if not self._begun.done():
            self.start_error = error or self._gone()
            self._begun.set_exception(self.start_error)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._gone())

    def _gone(self) -> RequestError:
        return RequestError(503, f"it could not be {self._limits.done}: the {self._name} process ended; try again")


class JobQueue:
    """Limits how many jobs are done at a time. Belongs to one event loop. Most take milliseconds, a hostile one as long
    as it may. So each has a short turn first, and those that need more time wait again for a long turn. While both
    kinds wait, one turn at a time is a long one. Within a kind the smallest rank goes first, and then whoever came
    first."""

    def __init__(self, num_turns: int) -> None:
        """``num_turns``: how many at a time, at least two, since one of them is never a long turn."""
        assert num_turns >= 2, num_turns
        self._num_turns = num_turns
        self._num_taken = {False: 0, True: 0}  # by whether they are long ones
        self._waiting: dict[bool, list[tuple[int, int, asyncio.Future[None]]]] = {False: [], True: []}
        self._count = itertools.count()

    @asynccontextmanager
    async def turn(self, rank: int, is_long: bool) -> AsyncIterator[None]:
        """Inside the context the caller has its turn."""
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[is_long], (rank, next(self._count), future))
        self._begin()
        try:
            await future
            yield
        finally:
            if not future.cancelled():
                self._num_taken[is_long] -= 1
            self._begin()

    def _begin(self) -> None:
        while sum(self._num_taken.values()) < self._num_turns:
            for waiting in self._waiting.values():
                while waiting and waiting[0][2].cancelled():
                    heapq.heappop(waiting)
            is_long = bool(self._waiting[True]) and (not self._waiting[False] or not self._num_taken[True])
            if not self._waiting[is_long] or (is_long and self._num_taken[True] == self._num_turns - 1):
                return
            self._num_taken[is_long] += 1
            heapq.heappop(self._waiting[is_long])[2].set_result(None)


P = TypeVar("P", bound=JobProcess)


class RestartedProcess(Generic[P]):
    """A process that ``start`` starts when it is needed, and again after it has ended."""

    def __init__(self, start: Callable[[], P]) -> None:
        self._start = start
        self._process: P | None = None
        self._num_failed_starts = 0  # one after the other
        self._closed = False

    def get(self) -> P:
        """The process. Raises RequestError (503) if it has just failed to start."""
        if self._closed:
            raise shutting_down()
        last = self._process
        if last is not None and not last.ended:
            return last
        if last is not None and last.start_error is not None:
            pause = min(FIRST_PAUSE_S * 2 ** min(self._num_failed_starts, 16), MAX_PAUSE_S)
            if time.monotonic() < last.ended_s + pause:
                raise last.start_error.with_traceback(None)
            self._num_failed_starts += 1
        else:
            self._num_failed_starts = 0
        try:
            self._process = self._start()
        except (OSError, RuntimeError) as error:  # no more files or threads
            raise RequestError(503, f"a process cannot be started now: {error}; try again later") from error
        return self._process

    def close(self) -> None:
        """End the process. Whoever waits for it gets RequestError (503)."""
        self._closed = True
        if self._process is not None:
            self._process.close()
