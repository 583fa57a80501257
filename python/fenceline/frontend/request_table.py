"""The requests in flight, as the main process knows them; the limit on waiting ones; and --log-requests."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

import msgspec

from fenceline.config.engine_config import EngineConfig, PriorityConfig
from fenceline.frontend.request_stream import RequestStream
from fenceline.frontend.request_types import GenerateChunk, GenerateInput, RequestError, RequestTimes, TraceOrigin
from fenceline.ipc.io_struct import SchedulerReady, Stage, StagesReport, TokenizedGenerateReq, TokenOut
from fenceline.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_LOGGED_CHARS = 2048

_MAX_PAST_IDS = 65536  # no message about a request arrives after so many later ones have ended


@dataclass(slots=True)
class RequestTrace:
    """What is known of a request that will have a span. ``num_samples``: of its prompt. ``stages`` have times of
    ``time.perf_counter()``, as all times of a :class:`RequestEntry`."""

    origin: TraceOrigin | None
    params: SamplingParams
    num_samples: int
    stages: list[Stage] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RequestEntry:
    """One request in flight. Times are ``time.perf_counter()`` seconds, 0 where not yet known."""

    rid: str
    family: str
    wire_rid: str
    stream: RequestStream
    num_prompt_tokens: int
    rank: int  # see PriorityConfig.rank
    num_pixel_bytes: int = 0  # of its images, its share of those that samples of a prompt share
    displaced: bool = False  # aborted to make room in the queue
    created: float = field(default_factory=time.perf_counter)
    started: bool = False
    first_token: float = 0.0
    last_token: float = 0.0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_time_s: float | None = None
    trace: RequestTrace | None = None  # None if requests are not traced

    @property
    def num_held_tokens(self) -> int:
        """An estimate of the KV slots that the request holds and shares with nobody."""
        return self.num_prompt_tokens - self.cached_tokens + self.completion_tokens

    def chunk(self, token: TokenOut, text: str, now: float) -> GenerateChunk:
        """``token`` as the consumer sees it."""
        chunk = GenerateChunk(
            rid=self.rid,
            text=text,
            output_ids=token.output_ids,
            prompt_tokens=token.prompt_tokens,
            completion_tokens=token.completion_tokens,
            cached_tokens=token.cached_tokens,
            e2e_latency=now - self.created,
            output_logprobs=token.output_logprobs,
            input_logprobs=token.input_logprobs,
            finish_reason=token.finish_reason,
            num_retractions=token.num_retractions,
            cached_tokens_details=token.cached_tokens_details,
            spec=token.spec,
            embedding=None if token.decode is None else token.decode.embedding,
        )
        return chunk if token.finish_reason is None else msgspec.structs.replace(chunk, times=self.times(now))

    def times(self, now: float) -> RequestTimes:
        """How long it took, at its end."""
        first = self.first_token
        num_later = self.completion_tokens - 1
        return RequestTimes(
            queue_time_s=self.queue_time_s,
            first_token_latency_s=first - self.created if first else None,
            decode_throughput=num_later / (now - first) if first and num_later > 0 and now > first else None,
        )


def is_meant(request: RequestEntry | GenerateInput, rid: str, prefix: bool) -> bool:
    """Whether ``rid`` is the request's id or its family's or, with ``prefix``, one of them begins so."""
    names = (request.rid, request.family)
    return any(name.startswith(rid) for name in names) if prefix else rid in names


class RequestTable:
    """Requests by id. A client may use an id again as soon as its request has ended, while messages about that request
    are still on their way, and before the scheduler knows that it has ended. So a reused id is sent under another name,
    the *wire id*, and messages are matched by the wire id alone."""

    def __init__(self, max_queued: int | None, priority: PriorityConfig | None = None) -> None:
        self._max_queued = max_queued
        self._priority = priority
        self._active: dict[str, RequestEntry] = {}  # by id
        self._by_wire: dict[str, RequestEntry] = {}
        self._waiting: dict[str, RequestEntry] = {}  # by id, in order of arrival; without an output so far
        self._families: Counter[str] = Counter()  # how many requests of each are active
        self._past: dict[str, int] = {}  # ids used before (the latest of them) and how often
        self._held_tokens = 0  # of started requests
        self.num_pixel_bytes = 0  # of all requests

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, rid: str) -> bool:
        return rid in self._active or rid in self._families

    def get(self, rid: str) -> RequestEntry | None:
        """The request in flight with this id."""
        return self._active.get(rid)

    def wire_rid(self, rid: str) -> str:
        """The name under which a request ``rid`` is sent to the scheduler, or was if it is active."""
        if rid in self._active:
            return self._active[rid].wire_rid
        times = self._past.get(rid, 0)
        # An id that contains a tilde always gets a number, so that no two requests can have the same name.
        return f"{rid}~{times}" if times or "~" in rid else rid

    def named(self, rid: str, prefix: bool) -> list[RequestEntry]:
        """The requests in flight that ``rid`` means (see :func:`is_meant`)."""
        return [entry for entry in self._active.values() if is_meant(entry, rid, prefix)]

    @property
    def num_waiting(self) -> int:
        """Requests without an output so far."""
        return len(self._waiting)

    def admit(
        self, rids: Sequence[str], prompt_lens: Sequence[int], priorities: Sequence[int], limits: SchedulerReady
    ) -> list[RequestEntry]:
        """The waiting requests that must be aborted before all these may be added: none, unless the queue is full and
        these have a better priority than others. There must be no await between this and :meth:`add`. Raises
        RequestError if these may not be added: 400 for a duplicate id, 503 beyond --max-queued-requests."""
        seen: set[str] = set()
        for rid in rids:
            if rid in self._active or rid in seen:
                raise RequestError(400, f"a request with id {rid!r} is already in flight", param="rid")
            seen.add(rid)
        if self._max_queued is None:
            return []
        ranks = list(map(self._rank, priorities))
        excess = self._num_queued(prompt_lens, ranks, limits) - self._max_queued
        if excess <= 0:
            return []
        # Among those of the lowest priority the latest are aborted, because they came to the queue last.
        worse = [entry for entry in self._waiting.values() if entry.rank > max(ranks) and not entry.displaced]
        if len(worse) < excess:
            raise RequestError(
                503, f"the queue is full (--max-queued-requests {self._max_queued}); try again later", code="queue_full"
            )
        return sorted(worse, key=attrgetter("rank"))[-excess:]

    def _rank(self, priority: int) -> int:
        return 0 if self._priority is None else self._priority.rank(priority)

    def _num_queued(self, prompt_lens: Sequence[int], ranks: Sequence[int], limits: SchedulerReady) -> int:
        """How many requests would wait if these were added: those that do not fit the free places or the free memory,
        in order of priority and arrival."""
        waiting = [(entry.rank, entry.num_prompt_tokens) for entry in self._waiting.values() if not entry.displaced]
        waiting += zip(ranks, prompt_lens, strict=True)
        prompts = [length for _, length in sorted(waiting, key=itemgetter(0))]
        places = limits.max_running_requests - (len(self._active) - len(self._waiting))
        tokens = limits.max_total_num_tokens * limits.num_replicas - self._held_tokens
        admitted = 0
        for length in prompts:
            tokens -= length
            if admitted >= places or tokens < 0:
                break
            admitted += 1
        return len(prompts) - admitted

    def add(
        self, message: TokenizedGenerateReq, stream: RequestStream, family: str = "", num_pixel_bytes: int = 0
    ) -> RequestEntry:
        """Start keeping track of a request that :meth:`admit` allowed."""
        assert stream.rid not in self._active
        assert message.rid not in self._by_wire
        rank, num_tokens = self._rank(message.priority), len(message.input_ids)
        entry = RequestEntry(stream.rid, family, message.rid, stream, num_tokens, rank, num_pixel_bytes)
        self.num_pixel_bytes += num_pixel_bytes
        self._active[entry.rid] = self._waiting[entry.rid] = self._by_wire[entry.wire_rid] = entry
        if family and family != entry.rid:
            self._families[family] += 1
        return entry

    def advance(self, token: TokenOut) -> RequestEntry | None:
        """Update the entry of ``token``'s request and return it; None if the client has left. The last removes it."""
        entry = self._by_wire.get(token.rid)
        if entry is None:
            return None
        held = entry.num_held_tokens
        if not entry.started:
            entry.started = True
            entry.queue_time_s = None if token.decode is None else token.decode.queue_time_s
            del self._waiting[entry.rid]
            held = 0
        entry.completion_tokens = token.completion_tokens
        entry.cached_tokens = token.cached_tokens
        self._held_tokens += entry.num_held_tokens - held
        if token.finish_reason is not None:
            self._forget(entry)
        return entry

    def note_stages(self, report: StagesReport) -> None:
        """Note the stages of a request that is traced, unless it has ended."""
        entry = self._by_wire.get(report.rid)
        if entry is not None and entry.trace is not None:
            entry.trace.stages += report.stages

    def abandon(self, rid: str) -> RequestEntry | None:
        """Forget a request whose client has left. None if the request had ended."""
        entry = self._active.get(rid)
        if entry is not None:
            self._forget(entry)
        return entry

    def clear(self) -> list[RequestEntry]:
        """Forget everything; the entries, for their streams to be failed."""
        entries = list(self._active.values())
        self._active.clear()
        self._waiting.clear()
        self._by_wire.clear()
        self._families.clear()
        self._held_tokens = self.num_pixel_bytes = 0
        return entries

    def _forget(self, entry: RequestEntry) -> None:
        del self._active[entry.rid]
        del self._by_wire[entry.wire_rid]
        self.num_pixel_bytes -= entry.num_pixel_bytes
        if entry.family in self._families:
            self._families[entry.family] -= entry.family != entry.rid
            if not self._families[entry.family]:
                del self._families[entry.family]
        self._waiting.pop(entry.rid, None)
        if entry.started:
            self._held_tokens -= entry.num_held_tokens
        self._past[entry.rid] = self._past.pop(entry.rid, 0) + 1
        if len(self._past) > _MAX_PAST_IDS:
            del self._past[next(iter(self._past))]


class RequestLog:
    """Writes what --log-requests-level asks for: 0 ids and counts, 1 sampling parameters, 2 beginnings, 3 all."""

    def __init__(self, config: EngineConfig) -> None:
        self._level = config.server_args.log_requests_level if config.server_args.log_requests else -1

    def received(self, inp: GenerateInput, message: TokenizedGenerateReq) -> None:
        if self._level < 0:
            return
        line = f"Receive: rid={message.rid} prompt_tokens={len(message.input_ids)} stream={inp.stream}"
        if self._level >= 1:
            line += f" sampling_params={msgspec.to_builtins(message.sampling_params)}"
        if self._level >= 2:
            prompt = inp.text if inp.text is not None else str(message.input_ids.tolist())
            line += f" prompt={self._cut(prompt)!r}"
        logger.info(line)

    def finished(self, entry: RequestEntry, token: TokenOut) -> None:
        if self._level < 0:
            return
        reason = token.finish_reason
        logger.info(
            "Finish: rid=%s finish_reason=%s prompt_tokens=%d completion_tokens=%d cached_tokens=%d retractions=%d",
            entry.rid, reason.type if reason else None, token.prompt_tokens, token.completion_tokens,
            token.cached_tokens, token.num_retractions,
        )  # fmt: skip

    def abandoned(self, entry: RequestEntry) -> None:
        """The client of a request has left."""
        if self._level >= 0:
            logger.info("Abort: rid=%s the client disconnected after %d tokens", entry.rid, entry.completion_tokens)

    def _cut(self, text: str) -> str:
        return text if self._level >= 3 or len(text) <= MAX_LOGGED_CHARS else text[:MAX_LOGGED_CHARS] + "..."
