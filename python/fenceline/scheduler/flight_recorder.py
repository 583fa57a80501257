"""FlightRecorder: the last steps of a scheduler as it decided them, kept for the moment when something goes wrong.

Recording keeps references to what is frozen anyway (batches, sampled tokens) and copies nothing in a decode step;
:mod:`fenceline.scheduler.flight_dump` makes JSON of it when somebody asks. It holds no Points, whose events would live
on, no requests, and no prompt unless told to: prompts are somebody's words, and long. The size is bounded: about
8 bytes for each request and step, and 32 MiB of all else: where page-table writes, departures and the parameters of
requests take more, fewer steps are kept.

``python -m fenceline.vgpu.replay FILE`` runs a dump's decisions again under the race detector.
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
from fenceline.model_executor.step import (
    Completions,
    DecodeBatch,
    ExtendBatch,
    ExtendSeq,
    PageWrites,
    ScheduleBatch,
    StepOutput,
)
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import RequestMemory

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

# Of page ids, slots, prompts and parameters. 100 prompts of 4,000 tokens admitted one by one take 12 MB.
_MAX_BYTES = 32 << 20
_VALUE_BYTES = 100  # of an entry of a dict of parameters, or a tuple: Python's objects
WITHHELD = -1  # stands for each token id of a prompt that is not recorded
# One number with strides of 0, made once because broadcasting takes longer than slicing.
_WITHHELD = np.broadcast_to(np.int64(WITHHELD), (1 << 20,))

Serials = tuple[tuple[str, int], ...]  # stream and serial of each Point


@dataclass(frozen=True, slots=True)
class Departure:
    """A request left: it was admitted to ``row`` and held ``pages``. ``why``: stop, length, abort, retract."""

    rid: str
    row: int
    why: str
    pages: Sequence[int]
    committed_len: int
    last_flight: Serials


@dataclass(frozen=True, slots=True)
class Retirement:
    """KV pages went back to the pool, to be touched by others after ``after``."""

    pages: I32
    after: Serials


@dataclass(frozen=True, slots=True)
class Ended:
    """Completions that a turn of the loop began with: ``transfers`` between the tiers that had ended (kind, id, pages);
    ``storage``: what its workers had done (kind, handle, pages); and whether the step in flight had brought its
    results, which were then published before the next launch."""

    transfers: tuple[tuple[str, int, int], ...]
    storage: tuple[tuple[str, int, int], ...]
    results_arrived: bool


Event = Departure | Retirement | Ended


class StepRecord(NamedTuple):
    """One launched step. ``events`` happened since the launch before it. ``tokens`` is empty until they are published,
    then has the step's tokens, and how many each request has where that is not one.

    ``batch`` is the step's own without its Points, which ``after`` names. ``done`` and ``passed`` are serials of the
    stream that computes: of the Point that ends the step, and of the last one the host knew to have passed.
    ``in_flight``: steps launched before and not published yet.
    """

    batch: ScheduleBatch
    rids: Sequence[str]
    after: Serials
    done: int
    passed: int
    in_flight: int
    events: Sequence[Event]
    tokens: list[I64]


class _Run(NamedTuple):
    """A step with something new in it. Decode steps that follow, if they only advance every request, refer to it."""

    batch: ScheduleBatch
    rids: Sequence[str]
    after: Serials
    events: Sequence[Event]


# A step as the hot path notes it: its run, by how much lengths have grown in it, done, passed, in_flight, tokens.
# What is kept for each step has left the caches when the ring drops it, so it is little.
_Raw = tuple[_Run | None, int, int, int, int, list[I64]]


class FlightRecorder:
    """The last ``config.server_args.flight_recorder_steps`` steps of one scheduler; 0 records nothing.

    ``reqs`` are the scheduler's requests by id, ``memory`` is theirs: both are only looked at.
    """

    def __init__(self, config: EngineConfig, memory: RequestMemory, reqs: Mapping[str, Req]) -> None:
        self.config = config
        self.memory = memory
        self.reqs = reqs
        self._steps: deque[_Raw] = deque(maxlen=config.server_args.flight_recorder_steps)
        self._events: list[Event] = []  # since the last launch
        self._awaited: deque[list[I64]] = deque()  # where the tokens of the steps in flight go
        self._composition = -1
        self._rids: Sequence[str] = ()
        self._run: _Run | None = None
        self._advanced = 0  # lengths since the run began
        self._num_bytes = 0  # of the runs that are kept; after some have left by themselves at most so many
        self._was_cut = False
        if self.enabled:
            memory.pages.observer = self._retired

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""
        return self.config.server_args.flight_recorder_steps > 0

    @property
    def wrapped(self) -> bool:
        """Whether earlier steps may have been forgotten."""
        return self._was_cut or len(self._steps) == self.config.server_args.flight_recorder_steps

    def snapshot(self, last: int = sys.maxsize) -> tuple[Iterator[StepRecord], list[Event]]:
        """The steps, oldest first, the ``last`` of them, and what has happened since the last launch. May be called
        from any thread; what takes long, a step in full, is made when it is asked for."""
        steps, events = list(self._steps)[-last:], list(self._events)  # each in one turn of the interpreter
        return starmap(_record, steps), events

    def launched(self, batch: ScheduleBatch, reqs: Sequence[Req], done: Point) -> None:
        """A step was handed to the worker, which ends at ``done``; ``reqs`` in batch order. Of what it refers to
        nothing may change later."""
        if (
            type(batch) is not DecodeBatch
            or batch.composition != self._composition
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
        self._steps.append(
            (self._run, self._advanced, done.serial, done.stream.passed_serial, len(awaited), tokens)
        )
        awaited.append(tokens)

    def sampled(self, done: Point) -> None:
        """The latest step, of which only the forward had been launched, ends at ``done``."""
        if self._steps:
            run, advanced, _, passed, in_flight, tokens = self._steps[-1]
            self._steps[-1] = (run, advanced, done.serial, passed, in_flight, tokens)

    def published(self, out: StepOutput) -> None:
        """The oldest step in flight has brought its tokens."""
        if self._awaited:
            tokens = self._awaited.popleft()
            tokens.append(out.tokens)
            if out.counts is not None:
                tokens.append(out.counts)

    def completed(self, ended: Completions) -> None:
        """A turn of the loop begins, and something had ended. Of tickets and prefetches only the numbers are kept."""
        if self.enabled:
            transfers = tuple(
                [(ticket.kind.value, ticket.id, ticket.num_pages) for ticket in ended.transfers]
            )
            storage = tuple([_storage_ack(ack) for ack in ended.storage])
            self._events.append(Ended(transfers, storage, ended.results_arrived))

    def departed(self, req: Req, why: str) -> None:
        """``req`` leaves and still holds its memory. Those that never had any are not recorded."""
        if req.row and self.enabled:
            pages, flight = req.pages, _serials(req.last_flight)
            self._events.append(Departure(req.rid, req.row, why, pages, req.committed_len, flight))

    def _retired(self, pages: I32, after: Points) -> None:
        self._events.append(Retirement(pages.copy(), _serials(after)))

    def _begin_run(self, batch: ScheduleBatch, reqs: Sequence[Req]) -> None:
        events, self._events = self._events, []
        after = _serials(batch.after)
        if not isinstance(batch, DecodeBatch):
            self._composition = -1
            self._rids = tuple([req.rid for req in reqs])
            # Tickets hold the Points of their transfers, a layer each.
            batch = replace(batch, seqs=tuple([self._seq(seq) for seq in batch.seqs]), loads=())
        elif batch.composition != self._composition:
            self._composition = batch.composition
            self._rids = tuple([req.rid for req in reqs])
        if after:
            batch = replace(batch, after=Points.none())
        self._run = _Run(batch, self._rids, after, events)
        self._advanced = 0
        self._num_bytes += _num_bytes(self._run)
        if self._num_bytes > _MAX_BYTES:
            self._make_room()

    def _make_room(self) -> None:
        """Forget the oldest steps until a quarter of the bytes is free: this is asked for seldom then."""
        sizes = {id(step[0]): _num_bytes(step[0]) for step in self._steps if step[0] is not None}
        self._num_bytes = sum(sizes.values()) + _num_bytes(self._run)
        while self._num_bytes > _MAX_BYTES * 3 // 4 and self._steps:
            run = self._steps.popleft()[0]
            self._was_cut = True
            if not self._steps or self._steps[0][0] is not run:
                self._num_bytes -= sizes[id(run)]

    def _seq(self, seq: ExtendSeq) -> ExtendSeq:
        """``seq`` without a view into the whole prompt, and without words unless they were asked for."""
        history = seq.history
        if self.config.server_args.flight_recorder_prompts:
            if history is not None:
                history = (history[0].copy(), history[1])
            return replace(seq, token_ids=seq.token_ids.copy(), history=history)
        if history is not None:
            history = (withheld(len(history[0])), history[1])
        following = (WITHHELD,) * len(seq.following)
        return replace(seq, token_ids=withheld(len(seq.token_ids)), following=following, history=history)


def _num_bytes(run: _Run | None) -> int:
    """Of what grows with prompts, answers and parameters in ``run``, about."""
    if run is None:
        return 0
    batch, writes = run.batch, run.batch.page_writes
    total = writes.rows.nbytes + writes.columns.nbytes + writes.pages.nbytes
    total += sum(4 * len(event.pages) for event in run.events if not isinstance(event, Ended))
    if isinstance(batch, ExtendBatch):
        for seq in batch.seqs:
            total += seq.out_slots.nbytes
            total += sum(ids.nbytes for ids in (seq.token_ids, *(seq.history or ())) if any(ids.strides))
            if seq.sampling is not None:
                params = seq.sampling.params
                num_values = len(params.logit_bias or ()) + len(params.stop_token_ids)
                total += _VALUE_BYTES * num_values + sum(map(len, params.stop))
    return total


def withheld(num_tokens: int) -> I64:
    """So many token ids that are not told; takes no memory."""
    if num_tokens <= len(_WITHHELD):
        return _WITHHELD[:num_tokens]
    return np.broadcast_to(np.int64(WITHHELD), (num_tokens,))


def _record(
    run: _Run | None, advanced: int, done: int, passed: int, in_flight: int, tokens: list[I64]
) -> StepRecord:
    """A step in full: while nothing else changes, every length grows by the same."""
    assert run is not None, "the first step begins a run"
    if advanced == 0:
        return StepRecord(run.batch, run.rids, run.after, done, passed, in_flight, run.events, tokens)
    assert isinstance(run.batch, DecodeBatch), "a run goes on with decode steps"
    batch = replace(run.batch, seq_lens=run.batch.seq_lens + advanced, page_writes=PageWrites())
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
