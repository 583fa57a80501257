"""FlightRecorder: keeps the scheduler's decisions of the last steps, for the case that something goes wrong.

The recorder keeps references to values that are frozen anyway (batches, sampled tokens) and copies nothing in a decode
step. :mod:`fenceline.scheduler.flight_dump` converts them to JSON on request. The recorder keeps no Points, because
these would keep their events alive, and no requests. It keeps prompts only with --flight-recorder-prompts, because they
are private and long. Its size is bounded: about 8 bytes for each request and step, and 32 MiB for everything else. If
page-table writes, requests that leave and the parameters of requests take more, fewer steps are kept.

A checkout can run a dump's decisions again under a race detector, see docs/use/flight_recorder.md.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fenceline.config.engine_config import EngineConfig
from fenceline.mem_cache.storage.controller import Ack, Fetched, Found, Written
from fenceline.memory_order import Point, Points
from fenceline.model_executor.step import Chunk, Completions, MixedCosts, PageWrites, StepBatch, StepCosts, StepOutput
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import RequestMemory

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

# The limit for page ids, slots, prompts and parameters. 100 prompts of 4,000 tokens admitted one by one take 12 MB.
_MAX_BYTES = 32 << 20
_VALUE_BYTES = 100  # the approximate size of one entry of a dict or tuple of parameters, as Python objects
REDACTED = -1  # stands for each token id of a prompt that is not recorded
# An array of one number with a stride of 0, made once because broadcasting takes longer than slicing.
_REDACTED = np.broadcast_to(np.int64(REDACTED), (1 << 20,))
_NOT_KEPT: I32 = np.zeros(0, np.int32)

Serials = tuple[tuple[str, int], ...]  # Points, each as the name of its stream and its serial


@dataclass(frozen=True, slots=True)
class Leaving:
    """A request left, which had been admitted to ``row`` and held ``pages``. ``why`` is stop, length, abort or
    retract, ``cause`` that of a retraction, else ""."""

    rid: str
    row: int
    why: str
    cause: str
    pages: Sequence[int]
    committed_len: int
    after: Serials


@dataclass(frozen=True, slots=True)
class Retirement:
    """KV pages went back to the pool; others may access them after ``after``."""

    pages: I32
    after: Serials


@dataclass(frozen=True, slots=True)
class CompletionsEvent:
    """The Completions at the beginning of a turn of the loop: ``transfers`` between the tiers that had ended (kind, id,
    number of pages), ``storage`` jobs that had ended (kind, handle, number of pages), and whether the results of the
    step in flight had arrived, which are then published before the next launch."""

    transfers: tuple[tuple[str, int, int], ...]
    storage: tuple[tuple[str, int, int], ...]
    results_arrived: bool


Event = Leaving | Retirement | CompletionsEvent


class StepRecord(NamedTuple):
    """One launched step. ``batch`` is the step's batch without its Points, which are in ``after``. ``rids`` are its
    requests, in batch order. ``done`` and ``passed`` are serials of FORWARD: of the Point that ends the step, and of
    the last Point that the host knew to have passed. ``in_flight`` is the number of earlier steps that were not
    published yet. ``events`` happened between the launch before and this one. ``tokens`` is empty until the step is
    published. Then it has the step's tokens and, in a speculative decode step, the number of tokens of each request."""

    batch: StepBatch
    rids: Sequence[str]
    after: Serials
    done: int
    passed: int
    in_flight: int
    events: Sequence[Event]
    tokens: list[I64]


class _Run(NamedTuple):
    """The first step of a run. Decode steps after it that only advance every request are stored as a reference."""

    batch: StepBatch
    rids: Sequence[str]
    after: Serials
    events: Sequence[Event]


# A step as it is recorded, which must be fast: its run, by how much lengths have grown since the run began, done,
# passed, in_flight, tokens. It is small, because it is no longer in the CPU's caches when the ring drops it.
_Raw = tuple[_Run | None, int, int, int, int, list[I64]]


class FlightRecorder:
    """Records the last ``config.server_args.flight_recorder_steps`` steps of one scheduler; none if that is 0. ``reqs``
    are the scheduler's requests by id and ``memory`` is their memory; the recorder only reads both."""

    def __init__(
        self,
        config: EngineConfig,
        memory: RequestMemory,
        reqs: Mapping[str, Req],
        step_costs: StepCosts | MixedCosts | None = None,
    ) -> None:
        """``step_costs``: those by which the scheduler decides."""
        self.config = config
        self.step_costs = step_costs
        self.memory = memory
        self.reqs = reqs
        self._steps: deque[_Raw] = deque(maxlen=config.server_args.flight_recorder_steps)
        self._events: list[Event] = []  # since the last launch
        # StepRecord.tokens of the steps in flight, still to be filled.
        self._awaited: deque[list[I64]] = deque()
        self._composition = -1
        self._rids: Sequence[str] = ()
        self._run: _Run | None = None
        self._advanced = 0  # by how much lengths have grown since the run began
        # An upper bound of the bytes of the runs, some of which the ring may have dropped since.
        self._num_bytes = 0
        self._was_cut = False
        if self.enabled:
            memory.pages.observers += (self._retired,)

    @property
    def enabled(self) -> bool:
        return self.config.server_args.flight_recorder_steps > 0

    @property
    def wrapped(self) -> bool:
        """Whether earlier steps may have been dropped."""
        return self._was_cut or len(self._steps) == self.config.server_args.flight_recorder_steps

    def snapshot(self, last: int = sys.maxsize) -> tuple[Iterator[StepRecord], list[Event]]:
        """The last ``last`` steps, oldest first, and the events since the last launch. May be called from any thread.
        The iterator makes each record when it is asked for, since that takes time."""
        # Each list() holds the interpreter lock throughout, so the scheduler's thread cannot change it meanwhile.
        steps, events = list(self._steps)[-last:], list(self._events)
        return starmap(_record, steps), events

    def launched(self, batch: StepBatch, reqs: Sequence[Req], done: Point) -> None:
        """A step with ``reqs`` (in batch order) has been launched; it ends at ``done``. The recorder keeps references,
        so ``batch`` and the arrays in it must not change later."""
        if (
            batch.composition != self._composition
            or not batch.num_advanced
            or len(batch.page_writes.rows)
            or self._events
            or batch.after.points
        ):
            if not self.enabled:
                return
            self._begin_run(batch, reqs)
        else:
            self._advanced += batch.num_advanced
        awaited = self._awaited
        tokens: list[I64] = []
        self._steps.append((self._run, self._advanced, done.serial, done.stream.passed_serial, len(awaited), tokens))
        awaited.append(tokens)

    def sampled(self, done: Point) -> None:
        """The sampling of the latest step has been launched, after its forward; the step ends at ``done``."""
        if self._steps:
            run, advanced, _, passed, in_flight, tokens = self._steps[-1]
            self._steps[-1] = (run, advanced, done.serial, passed, in_flight, tokens)

    def published(self, out: StepOutput) -> None:
        """The results of the oldest step in flight have arrived."""
        if self._awaited:
            tokens = self._awaited.popleft()
            tokens.append(out.tokens)
            if out.counts is not None:
                tokens.append(out.counts)

    def completed(self, ended: Completions) -> None:
        """A turn of the loop begins with ``ended``. Only the ids of tickets and prefetches are kept."""
        if self.enabled:
            transfers = tuple([(ticket.kind.value, ticket.id, ticket.num_pages) for ticket in ended.transfers])
            storage = tuple([_storage_ack(ack) for ack in ended.storage])
            self._events.append(CompletionsEvent(transfers, storage, ended.results_arrived))

    def left(self, req: Req, why: str, cause: str) -> None:
        """``req`` leaves and still holds its memory. A request that has no memory is not recorded."""
        if req.row and self.enabled:
            pages, flight = req.pages, _serials(req.last_flight)
            self._events.append(Leaving(req.rid, req.row, why, cause, pages, req.committed_len, flight))

    def _retired(self, pages: I32, after: Points) -> None:
        self._events.append(Retirement(pages.copy(), _serials(after)))

    def _begin_run(self, batch: StepBatch, reqs: Sequence[Req]) -> None:
        events, self._events = self._events, []
        after = _serials(batch.after)
        if not batch.is_decode:
            self._composition = -1
            self._rids = tuple([req.rid for req in reqs])
            # Load tickets would keep the Points of their transfers alive, one for each layer.
            chunks = tuple(map(self._without_prompt, batch.chunks))
            batch = replace(batch, chunks=chunks, after=Points.none(), loads=(), encodes=())
        elif batch.composition != self._composition:
            self._composition = batch.composition
            self._rids = tuple([req.rid for req in reqs])
        if batch.after.points:
            batch = replace(batch, after=Points.none())
        self._run = _Run(batch, self._rids, after, events)
        self._advanced = 0
        self._num_bytes += _num_bytes(self._run)
        if self._num_bytes > _MAX_BYTES:
            self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest steps until a quarter of the bytes is free, so that this is not needed again soon."""
        sizes = {id(step[0]): _num_bytes(step[0]) for step in self._steps if step[0] is not None}
        self._num_bytes = sum(sizes.values()) + _num_bytes(self._run)
        while self._num_bytes > _MAX_BYTES * 3 // 4 and self._steps:
            run = self._steps.popleft()[0]
            self._was_cut = True
            if not self._steps or self._steps[0][0] is not run:
                self._num_bytes -= sizes[id(run)]

    def _without_prompt(self, chunk: Chunk) -> Chunk:
        """``chunk`` without what images add and drafts are looked up in, and with its prompt tokens withheld unless
        --flight-recorder-prompts is set."""
        if chunk.image_rows is not None or chunk.axes is not None or len(chunk.looked_up):
            chunk = replace(chunk, image_rows=None, axes=None, looked_up=_NOT_KEPT)
        if self.config.server_args.flight_recorder_prompts:
            return chunk
        history = chunk.history
        if history is not None:
            history = (redacted(len(history[0])), history[1])
        following = (REDACTED,) * len(chunk.following)
        return replace(chunk, token_ids=redacted(len(chunk.token_ids)), following=following, history=history)


def _num_bytes(run: _Run | None) -> int:
    """The approximate number of bytes in ``run`` that grow with prompts, answers and parameters."""
    if run is None:
        return 0
    batch, writes = run.batch, run.batch.page_writes
    total = writes.rows.nbytes + writes.columns.nbytes + writes.pages.nbytes
    total += sum(4 * len(event.pages) for event in run.events if not isinstance(event, CompletionsEvent))
    for chunk in batch.chunks:
        total += chunk.out_slots.nbytes
        total += sum(ids.nbytes for ids in (chunk.token_ids, *(chunk.history or ())) if any(ids.strides))
    for sampling in batch.sampling[: len(batch.sampling) - batch.num_decodes]:  # the others came with their prompts
        params = sampling.params
        num_values = len(params.logit_bias or ()) + len(params.stop_token_ids)
        total += _VALUE_BYTES * num_values + sum(map(len, params.stop))
    return total


def redacted(num_tokens: int) -> I64:
    """``num_tokens`` placeholders for token ids that are not recorded [num_tokens] int64, which take no memory."""
    if num_tokens <= len(_REDACTED):
        return _REDACTED[:num_tokens]
    return np.broadcast_to(np.int64(REDACTED), (num_tokens,))


def _record(run: _Run | None, advanced: int, done: int, passed: int, in_flight: int, tokens: list[I64]) -> StepRecord:
    """The full record of a step. In a run every length grows by the same amount, and nothing else changes."""
    assert run is not None, "the first step begins a run"
    if advanced == 0:
        return StepRecord(run.batch, run.rids, run.after, done, passed, in_flight, run.events, tokens)
    first = run.batch
    assert first.is_decode, "a run goes on with decode steps"
    starts, seq_lens = first.starts + advanced, first.seq_lens + advanced
    batch = replace(first, starts=starts, seq_lens=seq_lens, page_writes=PageWrites.none())
    return StepRecord(batch, run.rids, (), done, passed, in_flight, (), tokens)


def _storage_ack(ack: Ack) -> tuple[str, int, int]:
    kind = type(ack).__name__.lower()
    match ack:
        case Written():
            return kind, ack.handle, ack.num_written
        case Found() | Fetched():
            return kind, ack.op.handle, ack.num_pages
        case _:
            return kind, ack.op.handle, 0


def _serials(points: Points) -> Serials:
    return tuple([(point.stream.name.value, point.serial) for point in points])
