"""Scheduler: decides, step by step, what the device computes, and publishes what it has computed.

Decisions are a function of the inbox's messages and of Completions (what has ended on device and disk). Both are
drained once a step; with several ranks, all ranks drain the same values (``ranks``). Decisions read no wall clock and
iterate over nothing unordered, so that ranks and replays with the same inputs decide the same. ``step`` is the only
place that sequences a step; in-flight state is its argument and its return value::

    step k-1:  launch k-1 | publish k-2 ...            the CPU
    step k  :               launch k    | publish k-1
    GPU     :      [ step k-1      ][ step k       ]   never waits for the CPU
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from fenceline.config.draft_config import StepShape
from fenceline.config.engine_config import EngineConfig
from fenceline.constrained.matcher import GrammarStore
from fenceline.ipc.io_struct import (
    AbortReq,
    BatchTokenOut,
    FinishReason,
    InternalState,
    Message,
    SchedulerInput,
    SlowGrammarsReq,
    TickReq,
    TokenizedGenerateReq,
)
from fenceline.mem_cache.page_tags import PageFinding
from fenceline.memory_order import OrderError, Points, tokens_in_flight, tree_slots
from fenceline.model_executor.step import StepBatch, Worker
from fenceline.scheduler.admission import Holdings
from fenceline.scheduler.control import SchedulerControl
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.intake import Intake
from fenceline.scheduler.kv_event_publisher import KVEventPublisher
from fenceline.scheduler.masked_steps import MaskedSteps
from fenceline.scheduler.population import InFlight, Population
from fenceline.scheduler.publishing import Publisher
from fenceline.scheduler.ranks import RankLink
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import make_request_memory
from fenceline.scheduler.running_batch import RunningBatch
from fenceline.scheduler.schedule_policy import max_of_body
from fenceline.scheduler.stats import SchedulerStats
from fenceline.scheduler.step_planner import StepPlanner
from fenceline.scheduler.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

# How long the loop waits for messages when it has nothing to compute but transfers of the cache or storage jobs are
# still running: the short time if there are requests, which may be waiting for them, else the long one.
_ACK_INTERVAL_MS = 1
_QUIET_ACK_INTERVAL_MS = 50


class Inbox(Protocol):
    """Where requests and control messages come from."""

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        """All messages that have arrived; with ``block`` wait until there is one, ``timeout_ms`` at most."""
        ...


class Outbox(Protocol):
    """Where the scheduler's outgoing messages go."""

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        """Tokens."""
        ...

    def to_tokenizer(self, message: Message) -> None:
        """Replies to control messages, statistics."""
        ...


class Scheduler:
    """The loop that serves the requests of one engine, built from parts with their own state: the ``population``, the
    ``planner`` of steps, ``masks``, the ``publisher``, the ``intake`` and ``control``."""

    def __init__(
        self, config: EngineConfig, worker: Worker, inbox: Inbox, outbox: Outbox, ranks: RankLink | None = None
    ) -> None:
        """``ranks``: given if there are several ranks. Messages and completions are then taken from it instead of from
        ``inbox`` and ``worker``."""
        self.config = config
        self.worker = worker
        self.inbox = inbox
        self.ranks = ranks
        self.memory = make_request_memory(config, worker)
        args, speculative, most = config.server_args, config.speculative, worker.max_step_tokens
        shapes = {most - 1: StepShape(most - 1, most, most)}  # of decode steps, by depth
        num_rewritten = 0
        if speculative is not None:
            shapes = speculative.shapes
        if config.draft is not None:
            num_rewritten = max(config.draft.lookahead - 1, config.draft.num_rows_behind)
        largest = shapes[most - 1]
        self.running = RunningBatch(
            args.page_size,
            largest,
            partial(tokens_in_flight, worker.device),
            partial(tree_slots, worker.device),
            num_rewritten,
        )
        num_tokens = self.memory.num_pages * args.page_size
        num_rows, num_spare = self.memory.rows.size, largest.num_slots - 1
        holdings = Holdings.of(num_tokens, num_rows, args.page_size, num_spare)
        self.waiting = WaitingQueue(holdings, max_of_body(config.device))
        self.reqs: dict[str, Req] = {}  # all that have not left, by rid, in order of arrival
        self.recorder = FlightRecorder(config, self.memory, self.reqs, worker.step_costs)
        offloads = config.hicache is not None and args.retract_policy == "offload"
        self.population = Population(
            self.reqs, self.memory, self.running, self.waiting, self.recorder, offloads=offloads
        )
        trace = None if config.traces is None else outbox.to_tokenizer
        self.stats = SchedulerStats(self.memory, worker, args.decode_log_interval, trace)
        self.planner = StepPlanner(config, self.population, self.stats, shapes, worker.step_costs)
        self.grammars = GrammarStore(config.model.eos_token_ids, decides=ranks is None)
        self.masks = MaskedSteps(self.grammars, self.population, self.recorder)
        self.publisher = Publisher(self.population, self.planner, self.masks, self.stats, outbox.to_detokenizer)
        # A request's last step writes as many slots as any other step, even if it yields fewer tokens.
        capacity = min(config.model.context_length, num_tokens - num_spare)
        self.intake = Intake(config, capacity, self.grammars, self.memory.tree.images)
        self.control = SchedulerControl(
            self.population,
            self.publisher,
            self.grammars,
            worker,
            self.recorder,
            config.torch_profiler_dir,
            outbox.to_tokenizer,
            partial(_state, self.population, self.planner, self.stats),
        )
        self.kv_events: KVEventPublisher | None = None  # if the configuration asks for it, and this is rank 0
        self.expect_tokens: Callable[[], None] | None = None  # called before it waits for first tokens
        self.num_launched = self.num_published = 0  # steps
        self._memory_checked = True

    @property
    def idle(self) -> bool:
        """Whether nothing can be scheduled until a message comes."""
        if self.control.paused:
            return True
        if self.population.chunked or self.population.joining or len(self.running):
            return False
        return not any(self.memory.may_schedule(req) for req in self.waiting)

    @property
    def speculates_under_masks(self) -> bool:
        """Whether the engine speculates while some request has a grammar. The previous step is then published before
        the next launch: the second phase of a speculative step touches KV, so nothing may be retired between them."""
        return not self.running.is_exact and self.population.num_constrained > 0

    @property
    def stopped(self) -> bool:
        """Whether the loop should end: it has been told to, and no request is left."""
        return self.control.draining and not self.reqs

    def step(self, prev: InFlight | None) -> InFlight | None:
        """One turn of the loop. ``prev`` is the step in flight; returns the step now in flight."""
        block = prev is None and self.idle and not self.stopped
        timeout_ms = None
        if block and self.memory.num_outstanding:
            timeout_ms = _ACK_INTERVAL_MS if self.reqs else _QUIET_ACK_INTERVAL_MS
        if block and self.grammars.loading:
            timeout_ms = _ACK_INTERVAL_MS
        if block and (timeout_ms is None or self.stats.report_is_due()):
            self.control.report()  # nobody else would until the next request
        awaited = prev if prev is not None and self.may_publish_early(prev) else None
        if self.ranks is None:
            self.ingest(self.inbox.drain(block, timeout_ms))
            ended = self.worker.completions(None if awaited is None else awaited.forward_result)
        else:
            asked = None if awaited is None else (awaited.number, awaited.forward_result)
            messages, ended = self.ranks.turn(block, timeout_ms, asked, self.own_messages())
            self.ingest(messages)
        if self.grammars.loading:
            for id, error in self.grammars.loaded():
                self.control.answer(id, partial(_loaded, error))
        if ended:
            self.recorder.completed(ended)
            self.memory.complete(ended)  # every step, decode included (F6)
            self.stats.loaded(ended.transfers)
        if prev is not None and (ended.results_arrived or self.speculates_under_masks):
            # The results are there already (first tokens need not wait for the launch), or the next step's masks
            # depend on them.
            self.publish(prev)
            prev = None
        self.population.release()  # so that the next step can use the memory of requests that have ended by now
        flight = self.launch_next()
        if flight is not None:
            self.masks.begin(flight)
        if prev is not None:
            if self.expect_tokens is not None and prev.batch.sampling and not prev.batch.is_decode:
                self.expect_tokens()
            self.publish(prev)
        if self.masks.pending is not None:
            for req, why in self.masks.stuck():
                self.publisher.end(req, why, 400)
            self.publisher.output.flush()
            flight = self.masks.sampled()
        if flight is not None and self.memory.images.planned:
            self.memory.images.launched(flight.result.done)  # a draft reads embeddings after the sampling
        if flight is not None and self.config.server_args.disable_overlap_schedule:
            self.publish(flight)
            flight = None
        self.population.release()
        self.memory.write_backups()
        if flight is None and not self.reqs:
            self.control.flush_when_idle()
            self.check_memory()
        if self.kv_events is not None:
            self.kv_events.publish()
        return flight

    def own_messages(self) -> list[SchedulerInput]:
        """What this rank has to tell the others. What rank 0 says holds for all."""
        overdue = self.grammars.overdue()
        return [SlowGrammarsReq(grammars=overdue)] if overdue else []

    def may_publish_early(self, flight: InFlight) -> bool:
        """Whether a step is published before the next launch if its results have arrived by then: first tokens, which
        would wait for the launch. On a CPU everything, since a launch is the whole step: tokens would wait for all of
        the next one."""
        return not flight.batch.is_decode or self.config.device == "cpu"

    def close(self) -> None:
        """Stop the threads of the lower tiers and of events; the loop must have ended."""
        if self.memory.tiers is not None:
            self.memory.tiers.close()
        if self.kv_events is not None:
            self.kv_events.close()

    # --- in ------------------------------------------------------------------------------------------

    def ingest(self, messages: Sequence[Message]) -> None:
        """Take in everything that has arrived."""
        if not messages:
            return
        # Only the last tick counts: requests that arrived between two ticks have had no chance to be scheduled yet.
        ticks = [number for number, message in enumerate(messages) if isinstance(message, TickReq)]
        for number, message in enumerate(messages):
            match message:
                case TokenizedGenerateReq():
                    self.accept(message)
                case AbortReq():
                    self.control.abort(message)
                case TickReq():
                    if number == ticks[-1]:
                        self.end_overdue(message.now)
                case _:
                    self.control.carry_out(message)

    def accept(self, message: TokenizedGenerateReq) -> None:
        """Queue a request, or refuse it."""
        req, refused = self.intake.req_of(message, is_known=message.rid in self.reqs)
        if refused:
            reason = FinishReason(type="abort", message=refused, status_code=400)
            self.publisher.output.finish(req, reason)
            self.publisher.output.flush()
            return
        self.population.enter(req)
        self.waiting.add(req)
        self.memory.prefetch(req)
        self.stats.arrived(req)
        num_tokens = len(req.prompt_ids)
        logger.debug("Request %s: %d tokens, at most %d new ones", req.rid, num_tokens, req.max_new_tokens)

    def end_overdue(self, now: float) -> None:
        """End requests that have waited or run for too long."""
        if not self.control.paused:
            for req, why in self.population.overdue(now, self.config.server_args):
                self.publisher.end(req, why, 503)
            self.publisher.output.flush()

    # --- launch --------------------------------------------------------------------------------------

    def launch_next(self) -> InFlight | None:
        """Submit the next step. Requests whose prompt it completes decode from the one after it on."""
        self.population.join()
        plan = None if self.control.paused else self.planner.plan()
        if plan is None:
            return None
        running, prefill, depth = self.running, plan.prefill, plan.batch.depth.depth
        if plan.batch.num_decodes and self.stats.decode(depth):
            self.stats.log_decode(running.num_tokens, len(running), self.waiting.num_reqs, depth)
        if prefill is not None:
            self.population.joining = [
                req for req in prefill.reqs if req is not prefill.chunked and req.allocated_len < req.final_len
            ]
        flight = self.launch(plan.batch, plan.reqs)
        if prefill is not None:  # after the launch, so that the log line does not delay the device
            self.stats.prefill(prefill, plan.batch.num_decodes, len(running), self.waiting.num_reqs)
        return flight

    def launch(self, batch: StepBatch, reqs: Sequence[Req]) -> InFlight:
        """Hand a batch to the worker and note it as the last step of its requests."""
        assert self.num_launched - self.num_published <= 1, "one step is in flight while another is launched"
        if self.memory.remaps:
            batch = self.memory.with_remaps(batch)
        batch = self.memory.tables.up_to_date(batch, reqs)
        if self.ranks is not None:
            self.ranks.decided(self.num_launched + 1, batch, reqs)
        result = self.worker.launch(batch)
        done = Points.of(result.done)
        self.num_launched += 1
        kind = "decode" if batch.is_decode else "prefill"
        logger.debug("Step %d: %s of %d requests", self.num_launched, kind, len(reqs))
        for req in reqs:
            assert req.row and not req.left, f"{req.rid} is in a step without memory"
            req.last_flight, req.last_step = done, self.num_launched
        self._memory_checked = False
        self.recorder.launched(batch, reqs, result.done)
        if self.control.profiler.steps_left is not None:
            self.control.profiler.step()
        return InFlight(batch, reqs, result, self.num_launched)

    # --- publish -------------------------------------------------------------------------------------

    def publish(self, flight: InFlight) -> None:
        """Take a step's results: append tokens, end requests, tell the detokenizer."""
        self.num_published += 1
        assert flight.number == self.num_published <= self.num_launched, "each step is published once, in order"
        out = flight.forward_result.wait()
        self.recorder.published(out)
        if out.findings:
            raise self.page_error(flight, out.findings[0])
        if self.ranks is not None:
            self.ranks.decisions.published(out)
        self.publisher.publish(flight, out)
        if self.stats.report_is_due():
            self.control.report()

    def page_error(self, flight: InFlight, finding: PageFinding) -> OrderError:
        """The report of what ``--memory-check full`` has found in ``flight``."""
        rids = {row: req.rid for row, req in zip(flight.batch.rows.tolist(), flight.reqs, strict=True)}
        request = rids[finding.row]
        owners = [req.rid for req in self.reqs.values() if req.rid != request and finding.page in req.pages]
        if not owners and finding.page in self.memory.tree.all_pages():
            owners = ["the prefix tree"]
        return finding.error(request, " and ".join(owners))

    def check_memory(self) -> None:
        """Check, once each time the engine becomes idle, that every page and row is accounted for."""
        if not self._memory_checked:
            self.memory.check_memory()
            assert self.population.num_constrained == 0, (
                f"{self.population.num_constrained} requests with a grammar have left unnoticed"
            )
            self._memory_checked = True


def _loaded(error: BaseException | None) -> tuple[bool, str]:
    """The answer to a LoadGrammarReq: success and error text."""
    return error is None, "" if error is None else f"{type(error).__name__}: {error}"


def _state(population: Population, planner: StepPlanner, stats: SchedulerStats, paused: bool) -> InternalState:
    """The scheduler's counters and gauges."""
    num_running = sum(1 for req in population.reqs.values() if req.row)
    return stats.state(num_running, population.waiting.num_reqs, planner.ratio.value, paused)
