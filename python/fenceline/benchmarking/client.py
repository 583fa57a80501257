"""The HTTP client: sends one request and reads the reply while it arrives, with a time for each token.

The code that reads replies (it parses server-sent events, and computes the times of tokens from chunks that may contain
several) is synchronous and gets the time as an argument, so that the arithmetic can be tested exactly. One call of
``feed`` is one read from the socket; all events of one read count as having arrived at the same time.
"""

from __future__ import annotations

import re
import resource
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import aiohttp
import orjson

from fenceline.benchmarking.endpoints import Endpoint, Kind
from fenceline.benchmarking.records import Call, Reply

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


class SseSplitter:
    """Cuts a byte stream into the payloads of its ``data:`` lines."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete with ``data``. An incomplete line is kept for the next call."""
        if self._tail:
            data = self._tail + data
        end = data.rfind(b"\n")
        self._tail = data[end + 1 :]
        return [line[5:].strip() for line in data[: end + 1].split(b"\n") if line.startswith(b"data:")]


@dataclass(slots=True)
class TokenClock:
    """Computes TTFT and one inter-token latency per token from pairs (number of tokens so far, time). In seconds."""

    start: float
    num_tokens: int = 0
    ttft: float = 0.0
    last: float = 0.0
    itl: list[float] = field(default_factory=list)
    longest_gap: float = 0.0

    def advance(self, num_tokens: int, now: float) -> None:
        """At the time ``now``, ``num_tokens`` tokens have arrived since the start. If several are new, the time since
        the last arrival is divided evenly among them."""
        new = num_tokens - self.num_tokens
        if new <= 0:
            return
        if self.num_tokens == 0:
            self.ttft = now - self.start
        else:
            gap = now - self.last
            self.itl.extend([gap / new] * new)
            self.longest_gap = max(self.longest_gap, gap)
        self.num_tokens = num_tokens
        self.last = now


class Recorder(Protocol):
    """Reads one reply. ``feed`` gets a stream's raw bytes, ``whole`` a body that is not streamed."""

    def feed(self, data: bytes, now: float) -> None: ...

    def whole(self, body: bytes, now: float) -> None: ...

    def finish(self, now: float) -> Reply: ...


def new_recorder(kind: Kind, start: float) -> Recorder:
    """A recorder for one reply in the wire format ``kind``; ``start`` is the time when the request was sent."""
    return NativeRecorder(start) if kind == "generate" else OpenAIRecorder(kind, start)


def error_text(event: object) -> str | None:
    """The message of an error event or body; None if it is not an error."""
    if not isinstance(event, dict) or not event.get("error"):
        return None
    error = event["error"]
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)


class NativeRecorder:
    """Reads replies of /generate. Each event contains the whole output so far, so only the last event of a read is
    parsed. A server may stream increments instead. This is noticed at its second event, which has fewer ids than
    ``completion_tokens``. SGLang has a mode in which ids and text are increments, and one in which only ids are."""

    def __init__(self, start: float) -> None:
        self._clock = TokenClock(start)
        self._splitter = SseSplitter()
        self._pending = b""  # the last event of a cumulative stream, parsed at the end
        self._incremental: bool | None = None
        self._texts: list[str] = []  # the texts of all events that were parsed
        self._ids: list[int] = []
        self._meta: dict[str, Any] = {}
        self._error = ""
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        events = self._splitter.feed(data)
        if events and events[-1] == b"[DONE]":
            self._done = True
            events.pop()
        if not events:
            return
        match = _COMPLETION_TOKENS.search(events[-1]) if self._incremental is False else None
        if match is not None:
            self._pending = events[-1]
            self._clock.advance(int(match.group(1)), now)
            return
        self._pending = b""
        for event in events:
            self._take(orjson.loads(event))
        self._clock.advance(int(self._meta.get("completion_tokens", 0)), now)

    def whole(self, body: bytes, now: float) -> None:
        self._done = True
        self._take(orjson.loads(body))
        self._clock.advance(int(self._meta.get("completion_tokens", 0)), now)

    def finish(self, now: float) -> Reply:
        if self._pending:
            self._take(orjson.loads(self._pending))
        reason = self._meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            self._error = self._error or f"aborted: {reason.get('message', 'no reason given')}"
        if not self._done:
            self._error = self._error or "the stream ended before [DONE]"
        clock = self._clock
        return Reply(
            success=not self._error,
            error=self._error,
            text=_whole_text(self._texts) if self._incremental else "".join(self._texts[-1:]),
            output_ids=self._ids if len(self._ids) == clock.num_tokens else None,
            output_len=clock.num_tokens,
            prompt_tokens=_count(self._meta, "prompt_tokens"),
            cached_tokens=_count(self._meta, "cached_tokens"),
            start_time=clock.start,
            latency=now - clock.start,
            ttft=clock.ttft,
            itl=clock.itl,
            longest_gap=clock.longest_gap,
        )

    def _take(self, event: object) -> None:
        error = error_text(event)
        if error is not None or not isinstance(event, dict):
            self._error = self._error or error or f"unexpected reply: {str(event)[:200]}"
            return
        self._meta = event.get("meta_info") or {}
        self._texts.append(event.get("text") or "")
        ids = event.get("output_ids")
        if not isinstance(ids, list):
            return
        if self._incremental is None and self._ids:
            self._incremental = len(ids) < int(self._meta.get("completion_tokens", 0))
        self._ids = self._ids + ids if self._incremental else ids


def _whole_text(texts: list[str]) -> str:
    """The text of a stream whose events contain only new ids, and either the whole text so far or only new text."""
    grows = all(later.startswith(earlier) for earlier, later in pairwise(texts))
    if texts and texts[0] != texts[-1] and grows:
        return texts[-1]
    return "".join(texts)


class OpenAIRecorder:
    """Reads replies of /v1/completions, /v1/chat/completions and /v1/embeddings, which have no tokens. Counts of tokens
    come from ``usage`` if the chunks have it. If only the last chunk has it, its total is divided among the arrivals in
    proportion to their text, because a chunk may contain several tokens and does not say how many. Without any usage,
    every chunk counts as one token."""

    def __init__(self, kind: Kind, start: float) -> None:
        self._kind = kind
        self._start = start
        self._splitter = SseSplitter()
        self._pieces: list[str] = []
        self._arrivals: list[tuple[float, int]] = []  # (time, characters so far)
        self._num_chars = 0
        self._num_chunks = 0
        self._counted: TokenClock | None = None  # from exact counts, if the chunks have them
        self._usage: dict[str, Any] = {}
        self._error = ""
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        before = self._num_chunks
        counted = False
        for event in self._splitter.feed(data):
            if event == b"[DONE]":
                self._done = True
                continue
            counted = self._take(orjson.loads(event)) or counted
        if counted:
            self._counted = self._counted or TokenClock(self._start)
            self._counted.advance(int(self._usage["completion_tokens"]), now)
        if self._num_chunks > before:
            self._arrivals.append((now, self._num_chars))

    def whole(self, body: bytes, now: float) -> None:
        self._done = True
        self._take(orjson.loads(body))
        if self._num_chunks:
            self._arrivals.append((now, self._num_chars))

    def finish(self, now: float) -> Reply:
        if not self._done:
            self._error = self._error or "the stream ended before [DONE]"
        total = int(self._usage.get("completion_tokens") or self._num_chunks)
        clock = self._counted or self._shared_out(total)
        details = self._usage.get("prompt_tokens_details") or {}
        return Reply(
            success=not self._error,
            error=self._error,
            text="".join(self._pieces),
            output_len=max(total, clock.num_tokens),
            prompt_tokens=_count(self._usage, "prompt_tokens"),
            cached_tokens=_count(details, "cached_tokens"),
            start_time=self._start,
            latency=now - self._start,
            ttft=clock.ttft,
            itl=clock.itl,
            longest_gap=max((late - early for (early, _), (late, _) in pairwise(self._arrivals)), default=0.0),
        )

    def _shared_out(self, total: int) -> TokenClock:
        clock = TokenClock(self._start)
        for i, (now, num_chars) in enumerate(self._arrivals):
            if i == len(self._arrivals) - 1:
                share = total
            else:  # the first and the last arrival each brought at least one token
                share = min(max(round(total * num_chars / self._num_chars), 1), total - 1)
            clock.advance(share, now)
        return clock

    def _take(self, event: object) -> bool:
        """Read one event. Returns whether it has both text and a token count."""
        error = error_text(event)
        if error is not None or not isinstance(event, dict):
            self._error = self._error or error or f"unexpected reply: {str(event)[:200]}"
            return False
        usage = event.get("usage")
        if usage:
            self._usage = usage
        choices = event.get("choices")
        if not choices:
            return False
        choice = choices[0]
        if choice.get("finish_reason") == "abort":
            self._error = self._error or "aborted by the server"
        text = choice.get("text") if self._kind == "completions" else _chat_text(choice)
        if text:
            self._pieces.append(text)
            self._num_chars += len(text)
            self._num_chunks += 1
        return bool(text) and bool(usage)


def _chat_text(choice: dict[str, Any]) -> str:
    message = choice.get("delta") or choice.get("message") or {}
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


def _count(source: dict[str, Any], key: str) -> int | None:
    value = source.get(key)
    return value if isinstance(value, int) else None


_TIMEOUT_S = 6 * 60 * 60
# Large, so that the server, which is being measured, does not have to wait if the client's event loop is slow.
_READ_BUFFER_BYTES = 10 * 1024**2


def open_session(headers: dict[str, str]) -> aiohttp.ClientSession:
    """A session without a limit on connections. The caller must close it. Each request has its own connection. A
    connection that is kept alive may be closed just when it is used again, and aiohttp does not retry a POST."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        read_bufsize=_READ_BUFFER_BYTES,
        headers=headers,
    )


def raise_file_limit(wanted: int = 65535) -> None:
    """Raise the soft limit on open files to ``wanted``, or to the hard limit, because each request needs a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


class Client:
    """Sends calls to one endpoint over one session."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._session = session
        self._headers = {"Content-Type": "application/json"}
        self.num_reads = 0  # reads from sockets that returned data, for bench_client_capacity

    async def send(self, call: Call) -> Reply:
        """Send ``call`` and wait for the whole reply. A failure is returned as a Reply, not raised as an exception."""
        endpoint = self.endpoint
        try:
            body = orjson.dumps(endpoint.payload(call))
        except orjson.JSONEncodeError as error:  # a prompt from a file may contain half a surrogate pair
            return Reply(False, f"the prompt cannot be sent as JSON: {error}", start_time=time.perf_counter())
        start = time.perf_counter()
        recorder = new_recorder(endpoint.kind, start)
        try:
            async with self._session.post(endpoint.url, data=body, headers=self._headers) as response:
                if response.status != 200:
                    reason = _reason(await response.read())
                    status = f"HTTP {response.status} {response.reason or ''}"
                    return Reply(False, f"{status}: {reason}", start_time=start)
                if endpoint.stream:
                    read = response.content.readany
                    while data := await read():
                        self.num_reads += 1
                        recorder.feed(data, time.perf_counter())
                else:
                    recorder.whole(await response.read(), time.perf_counter())
            return recorder.finish(time.perf_counter())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Reply(False, f"{type(error).__name__}: {error}", start_time=start)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            return Reply(False, f"unreadable reply: {type(error).__name__}: {error}", start_time=start)


def _reason(body: bytes) -> str:
    """The reason in the body of an error: the message of an error object, else the first 500 bytes of the body."""
    try:
        message = error_text(orjson.loads(body))
    except orjson.JSONDecodeError:
        message = None
    return message or body[:500].decode(errors="replace").strip()
