"""What the scheduler says of its work, compared with a record of what it did: its figures, the counts that it tells the
clients of each request, and the flight record.

The record is made from outside, at the calls by which requests arrive, steps are launched, and requests are retracted
or leave. What is compared is described in ``ipc.io_struct`` and ``scheduler.flight_recorder``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fenceline.ipc.io_struct import InternalState, SpecCounts, TokenizedGenerateReq
from fenceline.memory_order import Points
from fenceline.memory_order.edges import StreamName, pages_edge
from fenceline.model_executor.step import Completions, StepBatch
from fenceline.scheduler.flight_recorder import I32, CompletionsEvent, Departure, Event, Serials, StepRecord
from fenceline.scheduler.req import Req
from fenceline.scheduler.scheduler import InFlight, Scheduler, StepMasks
from fenceline.vgpu.proving.answers import Exchange
from fenceline.vgpu.proving.decisions import Decision
from fenceline.vgpu.proving.drafts import Verified
from fenceline.vgpu.proving.events import around

_NUM_COMPARED = 64  # steps of the flight record, the latest; the others would only take time

_TRACE_STEPS = 1_000_000  # more than any run has

_LOG_INTERVAL = 3  # decode steps

_Happened = tuple[object, ...]


@dataclass(slots=True)
class _Launched:
    """A step. ``done``: the serial of the Point at its end; ``passed``: that of the latest Point of FORWARD that the
    host knew to have passed; ``num_in_flight``: steps before it that had not been published; ``happened``: what has
    happened since the launch before."""

    rids: list[str]
    done: int
    passed: int
    num_in_flight: int
    happened: list[_Happened]


class SchedulerRecord:
    """Follows ``scheduler``, which has not begun yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_prompt_tokens = self._num_outputs = self._num_retractions = 0
        self._latest_num = 0  # tokens of the latest prompt that has come
        self._num_cached = self._num_computed = 0  # tokens of prompts
        self._num_refused = 0  # requests that have never been queued
        self._retractions: Counter[str] = Counter()  # by rid
        self._admitted: set[str] = set()
        self._steps: list[_Launched] = []
        self._depths: Counter[str] = Counter()  # of decode steps
        self._num_published = 0
        self._happened: list[_Happened] = []
        self._gives_back_all = False
        self._leased: list[Points] = []  # of the memory that requests have got since the latest step
        # As if a trace were to end after so many steps.
        self._scheduler.control.profiler.steps_left = _TRACE_STEPS
        # Short runs have log lines, too.
        scheduler.stats._decode_log_interval = _LOG_INTERVAL
        self._num_logged = 0
        around(scheduler.stats, "log_decode", after=self._logged)
        around(scheduler, "accept", after=self._accepted)
        around(scheduler, "give_back_all", before=self._begin_all, after=self._end_all)
        around(scheduler, "retract", before=self._retracted)
        around(scheduler, "depart", before=self._departs)
        around(scheduler, "launch", after=self._launched)
        around(scheduler, "sample_held", after=self._sampled)
        around(scheduler, "publish", before=self._published)
        around(scheduler.memory, "complete", before=self._completed)
        around(scheduler.memory.pages, "retire", before=self._retires)
        around(scheduler.memory, "admit", after=lambda after, *args: self._leased.append(after))
        around(scheduler.memory, "grow", after=lambda grown, *args: self._leased.append(grown[1]))

    def _accepted(self, _: None, message: TokenizedGenerateReq) -> None:
        if not message.same_prompt:
            self._latest_num = len(message.input_ids)
        if message.rid in self._scheduler.reqs:
            self._num_prompt_tokens += self._latest_num
        else:
            self._num_refused += 1

    def _logged(self, *args: object) -> None:
        self._num_logged += 1

    def _begin_all(self) -> None:
        self._gives_back_all = True

    def _end_all(self, num: int) -> None:
        self._gives_back_all = False

    def _retracted(self, req: Req) -> None:
        """All are told to the client. The figure is of those for want of memory or for other requests, and not of those
        for a pause or for new weights."""
        self._num_retractions += not self._gives_back_all
        self._retractions[req.rid] += 1

    def _departs(self, req: Req, why: str) -> None:
        self._num_outputs += 0 if why == "retract" else len(req.output_ids)
        if req.row:
            last = _serials(req.last_flight)
            facts = req.rid, req.row, why, list(req.pages), req.committed_len, last
            self._happened.append(("departure", *facts))

    def _launched(self, flight: InFlight, batch: StepBatch, reqs: Sequence[Req]) -> None:
        leased, self._leased = [point for after in self._leased for point in after if not point.passed], []
        waits = {point.stream.name: point.serial for point in batch.after}
        late = [point for point in leased if waits.get(point.stream.name, 0) < point.serial]
        others = [point.stream.name for point in late if point.stream.name is not StreamName.FORWARD]
        edges = [pages_edge(StreamName.FORWARD, name).name for name in others]
        assert not late, (
            f"a step does not wait for {_serials(Points.of(*late))}, and its memory was leased after these;"
            + (f" missing edge: {' or '.join(edges)}" if edges else "")
        )
        happened, self._happened = self._happened, []
        done, num_in_flight = flight.result.done, len(self._steps) - self._num_published
        rids = [req.rid for req in reqs]
        number = len(self._steps) + 1
        assert flight.number == self._scheduler.num_launched == number, (
            f"step {number} has the number {flight.number}, and {self._scheduler.num_launched} are said to be launched"
        )
        self._steps.append(_Launched(rids, done.serial, done.stream.passed_serial, num_in_flight, happened))
        if batch.is_decode:
            self._depths[str(batch.depth.depth)] += 1
            return
        self._num_computed += batch.num_prompt_tokens
        for start, req in zip(batch.starts.tolist(), reqs, strict=True):
            self._num_cached += 0 if req.rid in self._admitted else start
            self._admitted.add(req.rid)

    def _sampled(self, flight: InFlight, pending: StepMasks) -> None:
        self._steps[-1].done = flight.result.done.serial

    def _published(self, flight: InFlight) -> None:
        self._num_published += 1

    def _completed(self, ended: Completions) -> None:
        transfers = [(ticket.kind.value, ticket.id, ticket.num_pages) for ticket in ended.transfers]
        self._happened.append(("ended", transfers, len(ended.storage), ended.results_arrived))

    def _retires(self, ids: I32, after: Points) -> None:
        if len(ids):
            self._happened.append(("retirement", ids.tolist(), _serials(after)))

    # --- comparisons ---------------------------------------------------------------------------------

    def compare(
        self,
        state: InternalState,
        exchanges: Mapping[str, Exchange],
        verified: Sequence[Verified],
        steps: Sequence[Decision],
    ) -> str:
        """What is wrong, "" if nothing is. ``verified``: what has come of drafts; ``steps``: all that were launched."""
        parts = (
            self._compare_figures(state, exchanges, verified),
            self._compare_counts(exchanges, verified),
            self._compare_flight(steps),
        )
        return "\n".join(part for part in parts if part)

    def _compare_figures(
        self, state: InternalState, exchanges: Mapping[str, Exchange], verified: Sequence[Verified]
    ) -> str:
        reasons = [one.outs[-1].finish_reason for one in exchanges.values() if one.outs]
        aborted = [one for one in reasons if one is not None and one.type == "abort"]
        num_prompt = self._num_cached + self._num_computed
        speculates = self._scheduler.config.speculative is not None
        accepted = sum(one.count - 1 for one in verified)
        figures: list[tuple[str, object, object]] = [
            ("prompt tokens", state.num_prompt_tokens, self._num_prompt_tokens),
            ("generated tokens", state.num_generated_tokens, self._num_outputs),
            ("cached tokens", state.num_cached_tokens, self._num_cached),
            ("retractions", state.num_retractions, self._num_retractions),
            ("aborts", state.num_aborts, len(aborted) - self._num_refused),
            ("the cache's hit rate", state.cache_hit_rate, self._num_cached / max(num_prompt, 1)),
            # Each move of a row is written with the next step, so none is found to be behind.
            ("page tables written again", self._scheduler.memory.recomputes["page_table"], 0),
        ]
        if state.hicache is not None:
            by_tier = sum(state.hicache.cached_tokens.values())
            figures.append(("cached tokens of all tiers", by_tier, self._num_cached))
        if speculates:
            length = 1 + accepted / len(verified) if verified else 0.0
            figures.append(("the length that is accepted", state.avg_spec_accept_length, length))
            figures.append(("steps by depth", state.spec_steps_by_depth, dict(self._depths)))
        traced = _TRACE_STEPS - (self._scheduler.control.profiler.steps_left or 0)
        figures.append(("steps of a trace", traced, len(self._steps)))
        num_due = self._depths.total() // _LOG_INTERVAL
        figures.append(("log lines of decode steps", self._num_logged, num_due))
        return _first_wrong("figures", figures)

    def _compare_counts(self, exchanges: Mapping[str, Exchange], verified: Sequence[Verified]) -> str:
        """What the last message of each request says."""
        by_rid: dict[str, list[Verified]] = {}
        for one in verified:
            by_rid.setdefault(one.rid, []).append(one)
        speculates = self._scheduler.config.speculative is not None
        for rid, exchange in exchanges.items():
            out = exchange.outs[-1] if exchange.outs else None
            if out is None or out.finish_reason is None:
                continue
            mine = by_rid.get(rid, [])
            num_accepted = sum(one.count - 1 for one in mine)
            counts = SpecCounts(len(mine), num_accepted, sum(one.shape.depth for one in mine))
            wrong = _first_wrong(
                rid,
                [
                    ("retractions", out.num_retractions, self._retractions[rid]),
                    ("drafts", out.spec, counts if speculates else None),
                ],
            )
            if wrong:
                return wrong
        return ""

    def _compare_flight(self, steps: Sequence[Decision]) -> str:
        recorder = self._scheduler.recorder
        most = self._scheduler.config.server_args.flight_recorder_steps
        records, events = recorder.snapshot()
        told = list(records)
        if len(told) != min(len(self._steps), most):
            return f"flight record: {len(told)} steps are recorded of {len(self._steps)}"
        num = min(len(told), _NUM_COMPARED)
        first = len(self._steps) - num
        for record, launched, decision in zip(
            told[len(told) - num :], self._steps[first:], steps[first:], strict=True
        ):
            wrong = _first_wrong("flight record", list(_facts(record, launched, decision)))
            if wrong:
                return f"{wrong} (step {first} and later are compared)"
        return _first_wrong("flight record", [("the last events", list(map(_told, events)), self._happened)])


def _first_wrong(what: str, figures: Sequence[tuple[str, object, object]]) -> str:
    for name, said, right in figures:
        same = (
            math.isclose(said, right)
            if isinstance(said, float) and isinstance(right, float)
            else said == right
        )
        if not same:
            return f"{what}: {name}: {said} is reported, {right} is right"
    return ""


def _facts(
    record: StepRecord, launched: _Launched, decision: Decision
) -> Iterator[tuple[str, object, object]]:
    """What a record says of a step, each with what is right."""
    batch, output = decision.batch, decision.output
    assert output is not None, "every launched step is published"
    tokens = [output.tokens, *(() if output.counts is None else (output.counts,))]
    yield "requests", list(record.rids), launched.rids
    yield "end", record.done, launched.done
    yield "passed", record.passed, launched.passed
    yield "steps in flight", record.in_flight, launched.num_in_flight
    yield "Points", record.after, _serials(batch.after)
    yield "events", list(map(_told, record.events)), launched.happened
    yield "tokens", [one.tolist() for one in record.tokens], [one.tolist() for one in tokens]
    for name in ("rows", "columns", "pages"):
        said, right = (getattr(one.page_writes, name).tolist() for one in (record.batch, batch))
        yield f"{name} of the page table", said, right
    yield "lengths", _lengths(record.batch), _lengths(batch)


def _lengths(batch: StepBatch) -> object:
    if batch.is_decode:
        return batch.rows.tolist(), batch.seq_lens.tolist()
    return batch.rows.tolist(), batch.starts.tolist(), batch.seq_lens.tolist()


def _told(event: Event) -> _Happened:
    """A recorded event as this record has it."""
    match event:
        case Departure():
            facts = event.rid, event.row, event.why, list(event.pages), event.committed_len, event.last_flight
            return ("departure", *facts)
        case CompletionsEvent():
            return ("ended", list(event.transfers), len(event.storage), event.results_arrived)
        case _:
            return ("retirement", event.pages.tolist(), event.after)


def _serials(points: Points) -> Serials:
    return tuple((point.stream.name.value, point.serial) for point in points)
