"""Measures what well-behaved clients see during an attack, in a separate process: /health, a stream's tokens, memory.

Three clients run on one event loop: /health on a new connection every 10 ms, /health on a kept connection every 10 ms,
and streams with a known text, one after the other. A silence is the time from a request to its whole answer; a request
that still hangs at the end counts with its age. A token's lateness is the time since the preceding token minus the
stream's usual time without an attack; a first token's is the time since the request minus its usual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import statistics
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

import httptools
import orjson
import psutil
from wire import Wire, post, request

PROBE_EVERY_S = 0.01
MEMORY_EVERY_S = 0.05
PATIENCE_S = 150.0
MARK_MS = 100.0  # of an answer to /health, and of a token that is late
NUM_TOKENS = 200
# With ids each token has an event of its own, also the two of this answer that have no text. Without them a token would
# seem to be as late as three steps take.
STREAM = {
    "prompt": "Q: What is 12 + 30?\nA:",
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "return_token_ids": True,
}


class Sample(NamedTuple):
    """Something that began at ``start`` (time.monotonic) and took ``took`` seconds."""

    start: float
    took: float


class Samples:
    """Samples in the order of their ends, stored as two arrays of numbers. There are forty thousand in a minute; as
    objects they would take the observer half a second to send, in which it measures nothing."""

    def __init__(self) -> None:
        self._starts, self._tooks = array("d"), array("d")

    def add(self, start: float, took: float) -> None:
        """Add a sample."""
        self._starts.append(start)
        self._tooks.append(took)

    def __iter__(self) -> Iterator[Sample]:
        return map(Sample, self._starts, self._tooks)

    def __len__(self) -> int:
        return len(self._starts)


@dataclass
class Observed:
    """All samples until ``seen_at``. ``pending``: what had begun by then and not ended."""

    health: Samples = field(default_factory=Samples)
    kept: Samples = field(default_factory=Samples)
    first_tokens: Samples = field(default_factory=Samples)
    next_tokens: Samples = field(default_factory=Samples)
    memory: Samples = field(default_factory=Samples)  # bytes as ``took``
    lag: Samples = field(default_factory=Samples)  # how late the observer itself was
    texts: Samples = field(default_factory=Samples)  # ``took`` is a hash of the stream's text
    failures: list[tuple[float, str]] = field(default_factory=list)
    pending: dict[str, float] = field(default_factory=dict)  # name of samples above to the start
    seen_at: float = 0.0

    def count_pending(self) -> None:
        """Count what is pending as if it had ended at ``seen_at``."""
        for name, start in self.pending.items():
            getattr(self, name).add(start, self.seen_at - start)


def worst(samples: Iterable[Sample], since: float, less: float = 0.0) -> float:
    """The longest of the samples that ended after ``since``, in seconds, minus ``less``."""
    return max((s.took - less for s in samples if s.start + s.took >= since), default=0.0)


def usual(samples: Iterable[Sample], until: float) -> float:
    """The median of the samples that ended before ``until``."""
    took = [s.took for s in samples if s.start + s.took < until]
    return statistics.median(took) if took else 0.0


def not_run(lag: Iterable[Sample], wait: Sample) -> float:
    """The seconds of ``wait`` in which the observer itself did not run although it was due. Where it may, it
    has a higher priority than the server, so the machine ran neither, or something else."""
    late = 0.0
    for one in lag:
        due = one.start + PROBE_EVERY_S
        late += max(0.0, min(due + one.took, wait.start + wait.took) - max(due, wait.start))
    return late


class Observer:
    """The process that observes the server ``pid`` at ``port``; :meth:`look` returns its samples."""

    def __init__(self, port: int, pid: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_run, args=(there, port, pid), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._here.recv()
        return self

    def look(self) -> Observed:
        """All samples so far; requests that hang are included with their age."""
        self._here.send(None)
        observed: Observed = self._here.recv()
        observed.count_pending()
        return observed

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _run(pipe: Connection, port: int, pid: int) -> None:
    with contextlib.suppress(OSError):  # who may not is observed with the priority that there is
        os.nice(-10)
    gc.disable()  # a collection would look like a late answer, and there are few reference cycles here
    asyncio.run(_observe(pipe, port, pid))


async def _observe(pipe: Connection, port: int, pid: int) -> None:
    seen = Observed()
    tasks = [
        asyncio.ensure_future(_probe(seen, port)),
        asyncio.ensure_future(_probe_kept(seen, port)),
        asyncio.ensure_future(_stream(seen, port)),
        asyncio.ensure_future(_memory(seen, pid)),
        asyncio.ensure_future(_lag(seen)),
    ]
    pipe.send(None)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
    while tasks:
        await asked.wait()
        asked.clear()
        if pipe.poll():
            pipe.recv()
            seen.seen_at = time.monotonic()  # taken here and not by the receiver, because sending takes time
            pipe.send(seen)


async def _probe(seen: Observed, port: int) -> None:
    data = request("GET", "/health", headers=["Connection: close"])
    while True:
        start = seen.pending["health"] = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S), Wire(port) as wire:
                await wire.send(data)
                answer = await wire.answer()
            if isinstance(answer, str) or answer.status != 200:
                seen.failures.append((start, f"/health: {answer if isinstance(answer, str) else answer.status}"))
        except (OSError, TimeoutError) as error:
            seen.failures.append((start, f"/health: {type(error).__name__}"))
        _note(seen, "health", start)
        await asyncio.sleep(PROBE_EVERY_S)


async def _probe_kept(seen: Observed, port: int) -> None:
    data = request("GET", "/health")
    while True:
        try:
            async with Wire(port) as wire:
                while True:
                    start = seen.pending["kept"] = time.monotonic()
                    async with asyncio.timeout(PATIENCE_S):
                        await wire.send(data)
                        answer = await wire.answer()
                    _note(seen, "kept", start)
                    if isinstance(answer, str) or answer.status != 200:
                        what = answer if isinstance(answer, str) else str(answer.status)
                        seen.failures.append((start, f"kept /health: {what}"))
                        break
                    await asyncio.sleep(PROBE_EVERY_S)
        except (OSError, TimeoutError) as error:
            seen.failures.append((time.monotonic(), f"kept /health: {type(error).__name__}"))
        await asyncio.sleep(PROBE_EVERY_S)


async def _stream(seen: Observed, port: int) -> None:
    data = post("/v1/completions", STREAM, headers=["Connection: close"])
    while True:
        start = seen.pending["first_tokens"] = time.monotonic()
        try:
            async with Wire(port) as wire:
                await wire.send(data)
                await _read_stream(seen, wire, start)
        except (OSError, httptools.HttpParserError) as error:
            seen.failures.append((start, f"stream: {type(error).__name__}"))
            await asyncio.sleep(PROBE_EVERY_S)
        seen.pending.pop("first_tokens", None)
        seen.pending.pop("next_tokens", None)


async def _read_stream(seen: Observed, wire: Wire, start: float) -> None:
    name, before, tail = "first_tokens", start, b""
    while b"[DONE]" not in tail:
        data = await wire.read()
        if data.count(b"data: {"):
            _note(seen, name, before)
            name, before = "next_tokens", time.monotonic()
            seen.pending[name] = before
        tail = (tail + data)[-300:]
        if not data:
            seen.failures.append((start, f"stream: closed after {tail!r}"))
            return
    events = bytes(wire.current.body).split(b"data: ")[1:-1]
    try:
        text = "".join(choice["text"] for event in events for choice in orjson.loads(event)["choices"])
        seen.texts.add(start, hash(text))
    except (ValueError, KeyError):
        seen.failures.append((start, f"stream: {events[-1][:300]!r}"))


async def _memory(seen: Observed, pid: int) -> None:
    main = psutil.Process(pid)
    processes: list[psutil.Process] = []
    count = 0
    while True:
        if count % 20 == 0:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes = [main, *main.children(recursive=True)]
        count += 1
        with contextlib.suppress(psutil.NoSuchProcess):
            seen.memory.add(time.monotonic(), sum(p.memory_info().rss for p in processes))
        await asyncio.sleep(MEMORY_EVERY_S)


async def _lag(seen: Observed) -> None:
    while True:
        start = time.monotonic()
        await asyncio.sleep(PROBE_EVERY_S)
        seen.lag.add(start, time.monotonic() - start - PROBE_EVERY_S)


def _note(seen: Observed, name: str, start: float) -> None:
    getattr(seen, name).add(start, time.monotonic() - start)
    seen.pending.pop(name, None)
