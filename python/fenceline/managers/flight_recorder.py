"""FlightRecorder: the last steps of a scheduler as it decided them, kept for the moment when something goes wrong.

Recording keeps references to what is frozen anyway (batches, sampled tokens) and copies nothing in a decode step;
:mod:`fenceline.managers.flight_dump` makes JSON of it when somebody asks. It holds no Points, whose events would live
on, no requests, and no prompt unless told to: prompts are somebody's words, and long. The size is bounded: about
16 bytes for each request and step, and what page-table writes and departures add.

``python -m fenceline.vgpu.replay FILE`` runs a dump's decisions again under the race detector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fenceline.config.engine_config import EngineConfig
from fenceline.managers.req import Req
from fenceline.managers.request_memory import RequestMemory
from fenceline.memory_order import Points
from fenceline.model_executor.forward_result import ForwardResult, StepOutput
from fenceline.model_executor.schedule_batch import DecodeBatch, ExtendSeq, ScheduleBatch

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

WITHHELD = -1  # stands for each token id of a prompt that is not recorded

Serials = tuple[tuple[str, int], ...]  # stream and serial of each Point


@dataclass(frozen=True, slots=True)
class Departure:
    """A request left: it was admitted to ``row`` and held ``pages``. ``why``: stop, length, abort, retract."""

    rid: str
    row: int
    why: str
    pages: Sequence[int]
    published_len: int
    last_flight: Serials


@dataclass(frozen=True, slots=True)
class Retirement:
    """KV pages went back to the pool, to be touched by others after ``after``."""

    pages: I32
    after: Serials


Event = Departure | Retirement


class StepRecord:
    """One launched step. ``events`` happened since the launch before it; ``tokens`` are None until published.

    ``batch`` is the step's own without its Points, which ``after`` names. ``done`` and ``passed`` are serials of the
    stream that computes: of the Point that ends the step, and of the last one the host knew to have passed.
    ``in_flight``: steps launched before and not published yet.
    """

    __slots__ = ("after", "batch", "done", "events", "in_flight", "passed", "rids", "tokens")

    def __init__(
        self,
        batch: ScheduleBatch,
        rids: Sequence[str],
        after: Serials,
        done: int,
        passed: int,
        in_flight: int,
        events: Sequence[Event],
    ) -> None:
        self.batch = batch
        self.rids = rids
        self.after = after
        self.done = done
        self.passed = passed
        self.in_flight = in_flight
        self.events = events
        self.tokens: I64 | None = None


class FlightRecorder:
    """The last ``config.flight_recorder_steps`` steps of one scheduler; 0 records nothing.

    ``reqs`` are the scheduler's requests by id, ``memory`` is theirs: both are only looked at.
    """

    def __init__(self, config: EngineConfig, memory: RequestMemory, reqs: Mapping[str, Req]) -> None:
        self.config = config
        self.memory = memory
        self.reqs = reqs
        self.num_launched = 0
        self.steps: deque[StepRecord] = deque(maxlen=config.flight_recorder_steps)
        self.events: list[Event] = []  # since the last launch
        self._unpublished: deque[StepRecord] = deque()
        self._composition = -1
        self._rids: Sequence[str] = ()
        if self.enabled:
            memory.pages.observer = self._retired

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""
        return self.config.flight_recorder_steps > 0

    def launched(self, batch: ScheduleBatch, reqs: Sequence[Req], result: ForwardResult) -> None:
        """A step was handed to the worker; ``reqs`` in batch order. Of what it refers to nothing may change later."""
        if not self.config.flight_recorder_steps:
            return
        if isinstance(batch, DecodeBatch):
            if batch.composition != self._composition:
                self._composition = batch.composition
                self._rids = tuple([req.rid for req in reqs])
            rids = self._rids
        else:
            rids = tuple([req.rid for req in reqs])
            batch = replace(batch, seqs=tuple([self._seq(seq) for seq in batch.seqs]))
        after: Serials = ()
        if batch.after.points:
            after = _serials(batch.after)
            batch = replace(batch, after=Points.none())
        events = self.events
        if events:
            self.events = []
        done, unpublished = result.done, self._unpublished
        record = StepRecord(
            batch, rids, after, done.serial, done.stream.passed_serial, len(unpublished), events or ()
        )
        unpublished.append(record)
        self.steps.append(record)
        self.num_launched += 1

    def published(self, out: StepOutput) -> None:
        """The oldest step in flight has brought its tokens."""
        if self._unpublished:
            self._unpublished.popleft().tokens = out.next_tokens

    def departed(self, req: Req, why: str) -> None:
        """``req`` leaves and still holds its memory. Those that never had any are not recorded."""
        if req.row and self.config.flight_recorder_steps:
            pages, flight = req.pages, _serials(req.last_flight)
            self.events.append(Departure(req.rid, req.row, why, pages, req.published_len, flight))

    def _retired(self, pages: I32, after: Points) -> None:
        self.events.append(Retirement(pages.copy(), _serials(after)))

    def _seq(self, seq: ExtendSeq) -> ExtendSeq:
        """``seq`` without a view into the whole prompt, and without words unless they were asked for."""
        history = seq.history
        if self.config.flight_recorder_prompts:
            if history is not None:
                history = (history[0].copy(), history[1])
            return replace(seq, token_ids=seq.token_ids.copy(), history=history)
        if history is not None:
            history = (withheld(len(history[0])), history[1])
        next_token = None if seq.next_token is None else WITHHELD
        return replace(seq, token_ids=withheld(len(seq.token_ids)), next_token=next_token, history=history)


def withheld(num_tokens: int) -> I64:
    """So many token ids that are not told; takes no memory."""
    return np.broadcast_to(np.int64(WITHHELD), (num_tokens,))


def _serials(points: Points) -> Serials:
    return tuple([(point.stream.name.value, point.serial) for point in points])
