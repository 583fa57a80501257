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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from fenceline.config.draft_config import StepShape
from fenceline.config.engine_config import EngineConfig
from fenceline.constrained.matcher import Grammars, GrammarStore, MaskFill, RequestGrammar, accept_tokens
from fenceline.ipc.io_struct import (
    AbortReq,
    BatchTokenOut,
    CancelFlushReq,
    ContinueGenerationReq,
    FinishReason,
    FlightRecorderReq,
    FlushCacheReq,
    GetInternalStateReq,
    InternalState,
    LoadGrammarReq,
    Message,
    PauseGenerationReq,
    ProfileReq,
    SchedulerInput,
    ShutdownReq,
    SlowGrammarsReq,
    StatsReport,
    TickReq,
    TokenizedGenerateReq,
    TokenLogprobs,
    TokenOut,
    UpdateWeightsReq,
    id_array,
)
from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.memory_order import Points, forgetting_old_kv, slots_of_tree, tokens_in_flight
from fenceline.model_executor.step import (
    DepthChoice,
    ForwardResult,
    HeldStep,
    LogprobValues,
    PageWrites,
    StepBatch,
    StepOutput,
    Worker,
)
from fenceline.models.loader import NewWeights
from fenceline.scheduler.admission import CLIP_NEW_TOKENS, AdmissionState, Holdings, loses_least, preempted
from fenceline.scheduler.control import SchedulerControl
from fenceline.scheduler.draft_depth import AdaptiveDepth, DraftDepth
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.prefill import PrefillPlan, PrefillPlanner, remap_writes
from fenceline.scheduler.ranks import RankLink
from fenceline.scheduler.req import LogprobLog, Req, Samples, emit_interval
from fenceline.scheduler.request_memory import Remap, make_request_memory
from fenceline.scheduler.running_batch import NewTokenRatio, RunningBatch
from fenceline.scheduler.schedule_policy import (
    PrefixWork,
    StepSharing,
    max_of_body,
    max_prefills_in_row,
    num_waiting_tokens,
    order_waiting,
)
from fenceline.scheduler.stats import SchedulerStats
from fenceline.scheduler.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

I32 = npt.NDArray[np.int32]

_TOO_SLOW = "its grammar takes too long for each token: make it less ambiguous"
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


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step: its batch, its requests in batch order, and its future result. ``result`` is a HeldStep while
    only the forward has been launched; :meth:`Scheduler.sample_held` replaces it."""

    batch: StepBatch
    reqs: Sequence[Req]
    result: ForwardResult | HeldStep
    number: int  # the number of steps launched so far, including this one

    @property
    def forward_result(self) -> ForwardResult:
        """``result`` of a step whose sampling has been launched too."""
        assert not isinstance(self.result, HeldStep), "its sampling has been submitted"
        return self.result


class ConstrainedReqs:
    """The constrained requests of a step, in its order, and those of the next steps as long as the batch is the same.
    ``least``: how many tokens an answer must have; None if none of them must have any."""

    def __init__(self, batch: StepBatch, reqs: Sequence[Req]) -> None:
        reqs = [req for req, samples in zip(reqs, batch.samples.tolist(), strict=True) if samples]
        self.composition = batch.composition
        self.reqs = [reqs[row] for row in batch.constrained.tolist()]
        self.grammars = Grammars([req.grammar for req in self.reqs])
        # Whether all requests of the step that sample are constrained.
        self.is_whole = len(self.reqs) == len(reqs)
        least = [req.source.sampling_params.min_new_tokens for req in self.reqs]
        self.least = least if any(least) else None


class StepMasks:
    """The token masks of a step whose forward has been launched. ``constrained``: its M constrained requests.
    ``num_unpublished``: how many of their tokens the grammars have accepted that have not been published yet."""

    def __init__(self, flight: InFlight, held: HeldStep, constrained: ConstrainedReqs) -> None:
        self.flight = flight
        self.held = held
        self.constrained = constrained
        self.num_unpublished = 0
        self.fill: MaskFill | None = None  # once the masks have been begun
        self.may_go_on: list[bool] | None = None  # [M], once they have been filled
        self.sampled: InFlight | None = None  # once the sampling has been submitted


class Scheduler:
    """The requests of one engine and the loop that serves them."""

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        inbox: Inbox,
        outbox: Outbox,
        ranks: RankLink | None = None,
    ) -> None:
        """``ranks``: given if there are several ranks. Messages and completions are then taken from it instead of from
        ``inbox`` and ``worker``."""
        self.config = config
        self.worker = worker
        self.inbox = inbox
        self.ranks = ranks
        self.memory = make_request_memory(config, worker)
        speculative, most = config.speculative, worker.max_step_tokens
        self.shapes = {most - 1: StepShape(most - 1, most, most)}  # of decode steps, by depth
        num_rewritten = 0
        if speculative is not None:
            self.shapes = speculative.shapes
            num_rewritten = max(speculative.draft.lookahead - 1, speculative.draft.num_rows_behind)
        self.greatest_depth = DepthChoice(most - 1)
        self.draft_depth: DraftDepth | None = None  # None: always the greatest
        if worker.step_costs is not None:
            self.draft_depth = AdaptiveDepth(tuple(self.shapes), worker.step_costs)
        largest = self.shapes[most - 1]
        self.running = RunningBatch(
            config.server_args.page_size,
            largest,
            partial(tokens_in_flight, worker.device),
            partial(slots_of_tree, worker.device),
            num_rewritten,
        )
        self.planner = PrefillPlanner(
            self.memory,
            config.chunked_prefill_size,
            config.max_prefill_tokens,
            StepSharing.of(config.model),
            config.prefill_max_requests,
            PrefixWork.of(config.model, config.device),
        )
        # Prompts are computed before decode steps, but between two decode steps at most this many prompt tokens are.
        self.max_prefill_in_row = max_prefills_in_row(config.device) * self.planner.step_tokens
        self.output = OutputSender(outbox.to_detokenizer, speculates=most > 1)
        self.stats = SchedulerStats(self.memory, worker, config.server_args.decode_log_interval)
        self.tell_frontend = outbox.to_tokenizer
        self.ratio = NewTokenRatio(config.server_args.schedule_conservativeness)
        num_tokens = self.memory.num_pages * config.server_args.page_size
        self.seeds = Random(config.random_seed)
        # A generator of its own, so that shuffling the queue does not change the requests' seeds.
        self.shuffler = Random(config.random_seed)
        self.reqs: dict[str, Req] = {}  # all that have not left, by rid, in order of arrival
        self.num_constrained = 0  # how many of them have a grammar
        self.recorder = FlightRecorder(config, self.memory, self.reqs)
        self.control = SchedulerControl(
            self.recorder, config.torch_profiler_dir, outbox.to_tokenizer, self.report
        )
        self.reported: InternalState | None = None  # what the front end knows
        self.still_working: Callable[[], None] = lambda: None  # called during a long turn, for the watchdog
        self.flushes: list[FlushCacheReq] = []  # that wait for the last request to leave
        holdings = Holdings.of(num_tokens, self.memory.rows.size)
        self.waiting = WaitingQueue(holdings, max_of_body(config.device))
        self.grammars = GrammarStore(config.model.eos_token_ids, decides=ranks is None)
        self.pending_masks: StepMasks | None = None  # of the step that has been launched and not sampled yet
        self.latest_constrained: ConstrainedReqs | None = None  # until one of them leaves
        # The last prompt and logit_bias that came in an HTTP body with several requests, after the body's number.
        self.latest_prompt: tuple[int, Samples] = 0, Samples(np.empty(0, dtype=np.int32))
        self.latest_bias: tuple[int, dict[int, float]] = 0, {}
        self.chunked: Req | None = None
        self.num_launched = self.num_published = 0  # steps
        # Requests that decode from the next step on: the last part of their prompt has just been submitted.
        self.joining: list[Req] = []
        self.departed: list[Req] = []
        self.remaps: list[Remap] = []
        # Tokens of prefill since the last decode step; short steps count for more, see plan_prefill.
        self.prefill_in_row = 0
        self.paused = False
        self.draining = False
        self.memory_checked = True

    @property
    def idle(self) -> bool:
        """Whether nothing can be scheduled until a message comes."""
        if self.paused:
            return True
        if self.chunked or self.joining or len(self.running):
            return False
        return not any(self.memory.may_schedule(req) for req in self.waiting)

    @property
    def speculates_under_masks(self) -> bool:
        """Whether the engine speculates while some request has a grammar. The previous step is then published before
        the next launch: the second phase of a speculative step touches KV, so nothing may be retired between the two
        phases."""
        return not self.running.is_exact and self.num_constrained > 0

    @property
    def stopped(self) -> bool:
        """Whether the loop should end: it has been told to, and no request is left."""
        return self.draining and not self.reqs

    def step(self, prev: InFlight | None) -> InFlight | None:
        """One turn of the loop. ``prev`` is the step in flight; returns the step now in flight."""
        block = prev is None and self.idle and not self.stopped
        timeout_ms = None
        if block and self.memory.num_outstanding:
            timeout_ms = _ACK_INTERVAL_MS if self.reqs else _QUIET_ACK_INTERVAL_MS
        if block and self.grammars.loading:
            timeout_ms = _ACK_INTERVAL_MS
        if block and (timeout_ms is None or self.stats.report_is_due()):
            self.report()  # nobody else would until the next request
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
        if prev is not None and (ended.results_arrived or self.speculates_under_masks):
            # The results are there already (first tokens need not wait for the launch), or the next step's masks
            # depend on them.
            self.publish(prev)
            prev = None
        self.retire_departed()  # so that the next step can use the memory of requests that have ended by now
        flight = self.launch_next()
        if flight is not None and isinstance(flight.result, HeldStep):
            self.pending_masks = StepMasks(
                flight, flight.result, self.constrained_of(flight.batch, flight.reqs)
            )
        if prev is not None:
            self.publish(prev)
        if self.pending_masks is not None:
            pending, self.pending_masks = self.pending_masks, None
            flight = pending.sampled or self.sample_late(pending)
        if flight is not None and self.config.server_args.disable_overlap_schedule:
            self.publish(flight)
            flight = None
        self.retire_departed()
        self.memory.write_backups()
        if flight is None and not self.reqs:
            self.flush_when_idle()
            self.check_memory()
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
        """Stop the lower tiers' threads; the loop must have ended."""
        if self.memory.tiers is not None:
            self.memory.tiers.close()

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
                    self.abort(message)
                case TickReq():
                    if number == ticks[-1]:
                        self.end_overdue(message.now)
                case _:
                    self.carry_out(message)

    def accept(self, message: TokenizedGenerateReq) -> None:
        """Queue a request. The front end has checked its values; sizes are limited here once more."""
        message = self.with_bias(message)
        params = message.sampling_params
        eos = () if params.ignore_eos else self.config.model.eos_token_ids
        num_tokens = self.memory.num_pages * self.config.server_args.page_size
        # A request's last step writes as many slots as any other step, even if it yields fewer tokens.
        capacity = min(self.config.model.context_length, num_tokens - self.running.largest.num_slots + 1)
        samples = self.samples_of(message)
        prompt_ids = samples.prompt_ids
        req = Req(
            source=msgspec.structs.replace(message, input_ids=id_array()),
            prompt_ids=prompt_ids,
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=self.seeds.getrandbits(63) if params.seed is None else params.seed,
            max_new_tokens=min(params.max_new_tokens, capacity - len(prompt_ids)),
            emit_interval=emit_interval(message, self.config.server_args.stream_interval),
            samples=samples if message.body else None,
            rank=0 if self.config.priority is None else self.config.priority.rank(message.priority),
        )
        if message.grammar:
            req.grammar = self.grammars.begin(message.grammar, message.think)
        if message.rid in self.reqs:
            self.output.finish(req, _error(f"request id {message.rid!r} is already in use"))
        elif req.max_new_tokens < min(params.max_new_tokens, 1) or len(req.prompt_ids) == 0:
            self.output.finish(req, _error(f"a prompt must have 1 to {capacity - 1} tokens"))
        else:
            req.prompt_log = LogprobLog.of_prompt(message, req.prompt_ids)
            req.output_log = LogprobLog() if message.return_logprob else None
            self.enter(req)
            self.waiting.add(req)
            self.memory.prefetch(req)
            self.stats.arrived(req)
            logger.debug(
                "Request %s: %d tokens, at most %d new ones", req.rid, len(prompt_ids), req.max_new_tokens
            )
            return
        self.output.flush()

    def with_bias(self, message: TokenizedGenerateReq) -> TokenizedGenerateReq:
        """``message`` with the logit_bias that samples of one prompt share. Without a prompt if the message before,
        which had the bias, was lost."""
        body, bias = self.latest_bias
        params = message.sampling_params
        if message.same_bias and body == message.body and bias:
            params = msgspec.structs.replace(params, logit_bias=bias)
            return msgspec.structs.replace(message, sampling_params=params)
        if message.same_bias:
            return msgspec.structs.replace(message, input_ids=id_array(), same_prompt=False)
        if message.body and params.logit_bias:
            self.latest_bias = message.body, params.logit_bias
        return message

    def samples_of(self, message: TokenizedGenerateReq) -> Samples:
        """The prompt of a request that has arrived, which the samples of one prompt share. Empty if the message before,
        which had the prompt, was lost."""
        body, latest = self.latest_prompt
        is_known = body == message.body != 0
        if message.same_prompt:
            return latest if is_known else Samples(np.empty(0, dtype=np.int32))
        prompt_ids = np.frombuffer(message.input_ids, dtype=np.int32)  # the message's own memory
        if is_known and np.array_equal(latest.prompt_ids, prompt_ids):
            return latest
        samples = Samples(prompt_ids)
        if message.body:
            self.latest_prompt = message.body, samples
        return samples

    def enter(self, req: Req) -> None:
        """Add the request to ``reqs``, where it stays until :meth:`depart`. A resumed one takes the place of itself."""
        earlier = self.reqs.get(req.rid)
        assert (earlier is None or earlier.left) and not req.row, f"{req.rid} enters once, without memory"
        self.reqs[req.rid] = req
        self.num_constrained += req.grammar is not None

    def abort(self, message: AbortReq) -> None:
        """End one request, or all. ``silent`` means the detokenizer has already told the client."""
        rids = list(self.reqs) if message.abort_all else [message.rid]
        for rid in rids:
            req = self.reqs.get(rid)
            if req is None:
                continue
            if message.silent:
                self.depart(req, "abort")
            else:
                self.end(req, message.message or "aborted", message.status_code)
        self.output.flush()

    def end(self, req: Req, message: str, status_code: int | None) -> None:
        """Abort ``req`` and tell its client why."""
        self.stats.num_aborts += 1
        self.finish(req, FinishReason(type="abort", message=message, status_code=status_code))

    def end_overdue(self, now: float) -> None:
        """End requests that have waited or run for too long. A request's time starts at the first tick that finds it
        waiting or running, so no request is ended early; it restarts after a pause and after a retraction."""
        if self.paused:
            return
        for req in list(self.reqs.values()):
            running = req.row != 0
            args = self.config.server_args
            limit = args.req_running_timeout if running else args.req_waiting_timeout
            if req.clocked_running is not running:
                req.clocked_running, req.clocked_since = running, now
            elif limit is not None and now - req.clocked_since > limit:
                what, flag = ("running", "running") if running else ("waiting in the queue", "waiting")
                self.end(req, f"still {what} after {limit:g} s (--req-{flag}-timeout)", 503)
        self.output.flush()

    # --- launch --------------------------------------------------------------------------------------

    def launch_next(self) -> InFlight | None:
        """Submit the next step: a prefill step if prompts are to be computed and ``max_prefill_in_row`` allows it, else
        a decode step of every running request."""
        self.running.drop_departed()
        if self.joining:
            self.running.add([req for req in self.joining if not req.left])
            self.joining = []
        if self.paused:
            return None
        plan = self.plan_prefill()
        if plan is not None:
            return self.launch_prefill(plan)
        if len(self.running):
            return self.launch_decode()
        return None

    def plan_prefill(self) -> PrefillPlan | None:
        """Choose among the chunked request and the waiting ones. Returns None if there is no prompt to compute, or if a
        decode step has to come first."""
        if self.chunked is None and not self.waiting.num_reqs:
            return None
        threshold = None if self.config.priority is None else self.config.priority.preemption_threshold
        if self.chunked is None and threshold is None and not self.memory.rows.num_free:
            return None
        step_tokens = self.planner.step_tokens
        if not len(self.running):
            self.prefill_in_row = 0  # no running request waits for a decode step
        elif self.prefill_in_row + step_tokens > self.max_prefill_in_row:
            return None
        if threshold is not None and self.chunked is None:
            self.preempt(threshold)
        chunked = self.chunked
        queue = partial(num_waiting_tokens, self.waiting, self.waiting.num_reqs)
        plan = self.planner.plan(self.candidates, chunked, self.admission_state(), queue)
        if plan is not None:
            for req in plan.reqs:
                if req is not chunked:
                    self.waiting.admit(req)
            self.chunked = plan.chunked
            # Even a short step takes time, so it counts as a quarter of a full one. Where prompts arrive one by one,
            # each would still get a step of its own, so a step after which no prompt is left counts as a quarter of
            # the limit.
            is_last = self.chunked is None and not self.waiting.num_reqs
            least = (self.max_prefill_in_row if is_last else step_tokens) // 4
            self.prefill_in_row += max(plan.num_new_tokens, least)
        return plan

    def candidates(self) -> Iterator[Req]:
        """The waiting requests that may be admitted now, in the order of the policy."""
        policy = self.config.server_args.schedule_policy
        if policy == "fcfs":
            return self.waiting.in_turn(self.memory.may_schedule)
        ordered = order_waiting(list(self.waiting), policy, self.memory.match, self.shuffler)
        return filter(self.memory.may_schedule, ordered)

    def admission_state(self) -> AdmissionState:
        """What admission decides by now."""
        expected = 0
        if len(self.running):  # a first token waits for this
            expected = int(self.running.expected_tokens(self.ratio.value, CLIP_NEW_TOKENS).sum())
        num_running = len(self.running) + (self.chunked is not None)
        num_spare = self.running.largest.num_slots - 1
        return AdmissionState(self.memory, self.waiting.holdings, num_running, expected, num_spare)

    def preempt(self, threshold: int) -> None:
        """Retract running requests in favour of waiting ones whose priority is better by more than ``threshold``."""
        expected = self.running.expected_tokens(self.ratio.value, CLIP_NEW_TOKENS).tolist()
        wanted = self.planner.wanted(self.waiting.in_turn(self.memory.may_schedule))
        victims = preempted(self.admission_state(), wanted, self.running.reqs, expected, threshold)
        if victims:
            self.retract_beside(victims, [self.memory.match(req).match.host_node for req in wanted])
            self.stats.preempted(len(victims))

    def retract_beside(self, victims: Sequence[Req], prefixes: Sequence[TreeNode]) -> None:
        """Retract ``victims``. What they leave on the host does not take the place of ``prefixes``, the ends of the
        cached prefixes of the requests for which they go."""
        tree = self.memory.tree
        for node in prefixes:
            tree.lock(node)
        for victim in victims:
            self.retract(victim)
        for node in prefixes:
            tree.unlock(node)

    def launch_prefill(self, plan: PrefillPlan) -> InFlight:
        """Submit a prefill step. Requests whose prompt it completes decode from the next step on."""
        batch = plan.batch
        if self.remaps:
            batch = replace(batch, page_writes=self.with_remaps(batch.page_writes))
        self.joining = [
            req for req in plan.reqs if req is not plan.chunked and req.allocated_len < req.final_len
        ]
        flight = self.launch(batch, plan.reqs)
        # After the launch, so that the log line does not delay the device.
        self.stats.prefill(plan, len(self.running), self.waiting.num_reqs)
        return flight

    def launch_decode(self) -> InFlight | None:
        """Submit a decode step of all running requests. Returns None if there is no memory for it yet because requests
        that are about to end still hold it."""
        running, choice = self.running, self.greatest_depth
        if self.draft_depth is not None:
            most = self.deepest_with_room()
            choice = self.draft_depth.choose(len(running), running.num_drafting, most)
        shape = self.shapes[choice.depth]
        room = self.make_room(shape)
        if room is None:
            return None
        lens, available = room
        self.prefill_in_row = 0
        batch = running.schedule_step(lens, shape, choice, available, self.memory.grow)
        if self.remaps:
            batch = replace(batch, page_writes=self.with_remaps(batch.page_writes))
        self.ratio.decay()
        if self.stats.decode(choice.depth):
            self.stats.log_decode(running.num_tokens, len(running), self.waiting.num_reqs, choice.depth)
        return self.launch(batch, list(running.reqs))

    def launch(self, batch: StepBatch, reqs: Sequence[Req]) -> InFlight:
        """Hand a batch to the worker and note it as the last step of its requests."""
        assert self.num_launched - self.num_published <= 1, "one step is in flight while another is launched"
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
        self.memory_checked = False
        self.recorder.launched(batch, reqs, result.done)
        if self.control.profiler.steps_left is not None:
            self.control.profiler.step()
        return InFlight(batch, reqs, result, self.num_launched)

    def sample_held(self, pending: StepMasks) -> InFlight:
        """Submit the sampling of a step whose forward has been launched and whose masks have been filled. Requests that
        left since the launch keep their rows until this step's sampling is done as well."""
        flight = pending.flight
        result = pending.held.sample()
        done = Points.of(result.done)
        for req in flight.reqs:
            if req.last_step == flight.number:
                req.last_flight = done
        self.recorder.sampled(result.done)
        return InFlight(flight.batch, flight.reqs, result, flight.number)

    def sample_late(self, pending: StepMasks) -> InFlight:
        """:meth:`sample_held`, now that the previous step has been published, so that the grammars know which tokens
        may follow. A request is ended if its grammar allows no token or has become too slow."""
        if not self.fill_masks(pending):
            self.end_stuck(pending)
        return self.sample_held(pending)

    def constrained_of(self, batch: StepBatch, reqs: Sequence[Req]) -> ConstrainedReqs:
        """The constrained requests of a step with ``reqs``."""
        latest = self.latest_constrained
        if latest is None or not batch.is_decode or latest.composition != batch.composition:
            latest = self.latest_constrained = ConstrainedReqs(batch, reqs)
        return latest

    def sample_early(
        self,
        grammars: Sequence[RequestGrammar | None],
        tokens: Sequence[int],
        accepted: Sequence[bool | None],
    ) -> None:
        """The tokens of the previous step's requests, whose grammars are given, have arrived and are about to be
        published. If the grammars have ``accepted`` all of them and no answer may have ended, submit the sampling of
        the step that has just been launched first: the next step can only be launched after it. Otherwise, let helper
        threads begin with the masks of requests of which this is true; the others follow in :meth:`sample_late`."""
        pending = self.pending_masks
        if pending is None:
            return
        mine = pending.constrained.grammars
        if grammars is mine and accepted.count(True) == len(mine) and not self.grammars.may_end(tokens):
            ready: Sequence[RequestGrammar | None] = mine
        else:
            going_on = {
                grammar
                for grammar, token, goes_on in zip(grammars, tokens, accepted, strict=True)
                if goes_on and grammar is not None and not grammar.may_end_with(token)
            }
            ready = [grammar if grammar in going_on else None for grammar in mine]
            if None not in ready:
                ready = mine
        all_ready = ready is mine
        pending.fill = self.grammars.begin_fill(ready, pending.held.begin_masks(), finishes_now=all_ready)
        if all_ready:
            pending.num_unpublished = 1
            if self.fill_masks(pending):
                pending.sampled = self.sample_held(pending)

    def fill_masks(self, pending: StepMasks) -> bool:
        """Write which tokens a step's constrained requests may draw, if that has not been done. Returns False if some
        request has to end, because its grammar allows no token or has become too slow."""
        asked, fill = pending.constrained, pending.fill
        grammars: Sequence[RequestGrammar | None] = asked.grammars
        if not pending.num_unpublished and any(req.left for req in asked.reqs):
            # These need no mask: their draws are not read.
            grammars = [None if req.left else req.grammar for req in asked.reqs]
        if pending.may_go_on is None:
            if fill is None:
                none = [None] * len(grammars)
                fill = pending.fill = self.grammars.begin_fill(
                    none, pending.held.begin_masks(), finishes_now=True
                )
            least_more = None
            if asked.least is not None:
                published = [len(req.output_ids) + pending.num_unpublished for req in asked.reqs]
                least_more = [least - num for least, num in zip(asked.least, published, strict=True)]
            pending.may_go_on = self.grammars.finish_fill(fill, grammars, least_more)
        clocks = {grammar.clock for grammar in grammars if grammar is not None}
        return all(pending.may_go_on) and not any(clock.is_over for clock in clocks)

    def end_stuck(self, pending: StepMasks) -> None:
        """End the requests that have to, see :meth:`fill_masks`."""
        assert pending.fill is not None and pending.may_go_on is not None, "the masks have been filled"
        for index, (req, goes_on) in enumerate(zip(pending.constrained.reqs, pending.may_go_on, strict=True)):
            if req.left:
                continue
            assert req.grammar is not None, "a constrained request has a grammar"
            if req.grammar.is_too_slow:
                self.end(req, _TOO_SLOW, 400)
            elif not goes_on:
                pending.fill.masks[index] = -1
                self.end(req, "no token of the vocabulary can follow in its grammar", 400)
        self.output.flush()

    def deepest_with_room(self) -> int:
        """The greatest draft depth for which there is memory, or the smallest depth if there is memory for none. A
        shallower step comes before a retraction: it only loses a chance of more tokens, whereas a retracted request
        has to compute its tokens again."""
        depths = tuple(self.shapes)  # they ascend
        for depth in depths[:0:-1]:
            shape = self.shapes[depth]
            num_needed = self.running.num_pages_needed(self.running.next_lens(shape), shape)
            if num_needed <= self.memory.num_available_pages - self.num_kept_pages():
                return depth
        return depths[0]

    def holders(self) -> list[Req]:
        """The requests that may be retracted: all that hold memory and are not about to end."""
        return self.running.reqs if self.chunked is None else [*self.running.reqs, self.chunked]

    def num_kept_pages(self) -> int:
        """Pages that a decode step leaves to the reserve: those for which a request outside it would be retracted. Not
        while some request is about to end, and never the last one."""
        kept, holders = self.waiting.holdings.kept_tokens, self.holders()
        if not kept or len(self.reqs) > self.waiting.num_reqs + len(holders):
            return 0
        return kept // self.memory.page_size if sum(not req.in_reserve for req in holders) > 1 else 0

    def make_room(self, shape: StepShape) -> tuple[npt.NDArray[np.int64], int] | None:
        """Retract requests (running ones, or the chunked one) until a decode step of ``shape`` fits for the others,
        and leaves the reserve.

        Returns the lengths [B] after the step, and the number of available pages apart from the reserve, 0 if the step
        needs none. Returns None if the step has to wait: memory is about to become free because a request ends with
        the step in flight, or only the chunked request is left."""
        retracted = 0
        lens = self.running.next_lens(shape)
        if self.running.needs_nothing:
            return lens, 0
        num_reserved = self.waiting.holdings.reserve_tokens // self.memory.page_size
        while True:
            num_needed = self.running.num_pages_needed(lens, shape)
            num_available = self.memory.num_available_pages
            if (
                num_needed <= num_available - num_reserved
                or num_needed <= num_available - self.num_kept_pages()
            ):
                break
            holders = self.holders()
            if num_needed <= num_available:
                holders = [req for req in holders if not req.in_reserve]
            elif len(self.reqs) > self.waiting.num_reqs + len(holders):  # one is about to end
                return None
            assert len(holders) > 1, "one request alone always fits: its length was limited on arrival"
            self.retract(min(holders, key=lambda req: loses_least(req, self.waiting.holdings)))
            retracted += 1
            if not len(self.running):
                self.stats.retracted(retracted, self.ratio.value)
                return None
            lens = self.running.next_lens(shape)
        if retracted:
            reqs = self.running.reqs
            decoded = sum(len(req.output_ids) for req in reqs)
            self.ratio.after_retraction(decoded, len(reqs), sum(req.max_new_tokens for req in reqs))
            self.stats.retracted(retracted, self.ratio.value)
        return lens, num_available - num_reserved

    def retract(self, req: Req) -> None:
        """Take all memory from ``req`` and put it back at the head of the queue. When it is admitted again it computes
        its tokens again, or with ``--retract-policy offload`` loads their KV from the host."""
        if req in self.running.reqs:
            self.running.remove(req)
        offloads = self.config.hicache is not None and self.config.server_args.retract_policy == "offload"
        tail = self.memory.offload(req) if offloads else None
        self.depart(req, "retract")
        self.retire_departed()
        resumed = req.resumed()
        resumed.tail = tail
        self.enter(resumed)
        self.waiting.put_back(resumed)

    def with_remaps(self, writes: PageWrites) -> PageWrites:
        """``writes`` together with the page-table writes of pending remaps, which move requests onto the tree's pages;
        they are made before any step reads those rows."""
        live = [remap for remap in self.remaps if not remap.req.left]
        self.remaps = []
        if not live:
            return writes
        for remap in live:
            self.memory.tables.written(remap.req.row, remap.version)
        moved = remap_writes(live)
        return PageWrites(
            np.concatenate([writes.rows, moved.rows]),
            np.concatenate([writes.columns, moved.columns]),
            np.concatenate([writes.pages, moved.pages]),
        )

    # --- publish -------------------------------------------------------------------------------------

    def publish(self, flight: InFlight) -> None:
        """Take a step's results: append tokens, end requests, tell the detokenizer."""
        self.num_published += 1
        assert flight.number == self.num_published <= self.num_launched, (
            "each step is published once, in order"
        )
        out = flight.forward_result.wait()
        self.recorder.published(out)
        if self.ranks is not None:
            self.ranks.decisions.published(out)
        completed: Sequence[Req] = ()
        if flight.batch.is_decode:
            self.publish_decode(flight.batch, flight.reqs, flight.number, out)
        else:
            completed = self.publish_extend(flight.batch, flight.reqs, out)
        self.output.flush()
        self.cache_prompts(completed)  # after the flush: first tokens need not wait for the tree
        if self.stats.report_is_due():
            self.report()

    def publish_decode(self, batch: StepBatch, reqs: Sequence[Req], number: int, out: StepOutput) -> None:
        """Append the new token of each request that has not left since the launch. This is the hot loop of decoding;
        the rarer cases are in :meth:`publish_counted` and :meth:`publish_tokens`."""
        if not self.running.is_exact or out.logprobs is not None:
            self.publish_counted(batch, reqs, number, out)
            return
        num_published = 0
        tokens = out.tokens.tolist()
        accepted = self.accept_tokens(batch, reqs, tokens)
        for req, length, token, goes_on in zip(reqs, batch.seq_lens.tolist(), tokens, accepted, strict=True):
            if req.left:
                continue
            grammar = req.grammar
            if grammar is not None and (not goes_on or grammar.may_end_with(token)):
                self.publish_tokens(req, [token], out, 0, goes_on)
                continue
            num_published += 1
            req.committed_len = length
            req.output_ids.append(token)
            if token not in req.stop_ids and len(req.output_ids) < req.max_new_tokens:
                self.output.token(req)
                continue
            reason = req.finish_reason_after(token)
            if reason is None:
                self.output.token(req)
            else:
                self.finish(req, reason)
        self.stats.num_generated_tokens += num_published

    def accept_tokens(
        self, batch: StepBatch, reqs: Sequence[Req], tokens: Sequence[int]
    ) -> list[bool | None]:
        """Advance the grammars of a step with one token for each request. See :func:`accept_tokens` and
        :meth:`sample_early`."""
        if not len(batch.constrained):
            return [None] * len(reqs)
        latest = self.latest_constrained
        if latest is not None and latest.composition == batch.composition and latest.is_whole:
            grammars: Sequence[RequestGrammar | None] = latest.grammars  # of ``reqs``, none of whom has left
        else:
            grammars = [None if req.left else req.grammar for req in reqs]
        accepted = accept_tokens(grammars, tokens)
        self.sample_early(grammars, tokens, accepted)
        return accepted

    def publish_counted(self, batch: StepBatch, reqs: Sequence[Req], number: int, out: StepOutput) -> None:
        """Like :meth:`publish_decode`, for steps with several tokens per request or with logprobs."""
        tokens, counts = out.tokens.tolist(), out.token_counts(len(reqs))
        shape, is_exact, last = self.shapes[batch.depth.depth], self.running.is_exact, 0
        accepted = self.accept_tokens(batch, reqs, tokens) if is_exact else [None] * len(reqs)
        for req, length, count, goes_on in zip(reqs, batch.seq_lens.tolist(), counts, accepted, strict=True):
            first, last = last, last + count
            if not req.left:
                if not is_exact:
                    self.stats.verified(req, count - 1, shape.depth)
                self.publish_tokens(req, tokens[first:last], out, first, goes_on)
                assert req.committed_len <= length - shape.num_spare and count <= shape.num_tokens, (
                    f"{req.rid} got more tokens than it may"
                )
        if out.counts is not None:
            assert batch.may_accept is not None, "the engine speculates"
            if self.draft_depth is not None:
                self.draft_depth.published(shape.depth, out.counts[batch.may_accept])
        if out.bad_drafts is not None and out.bad_drafts.any():
            self.stats.bad_drafts([reqs[index] for index in np.flatnonzero(out.bad_drafts).tolist()])
        if not is_exact:
            self.joining += self.running.settle(reqs, number)

    def publish_extend(self, batch: StepBatch, reqs: Sequence[Req], out: StepOutput) -> list[Req]:
        """Append the first tokens of completed prompts and log prompt logprobs. Returns the requests whose prompt is
        completed."""
        completed: list[Req] = []
        tokens = out.tokens.tolist()
        counts = iter(out.token_counts(len(batch.sampling)))
        num_tokens = num_scored = 0
        columns = (batch.chunks, batch.starts.tolist(), batch.seq_lens.tolist(), batch.samples.tolist())
        for req, chunk, start, length, samples in zip(reqs, *columns, strict=True):
            scored, num_scored = num_scored, num_scored + len(chunk.scored)
            sampled, num_tokens = num_tokens, num_tokens + (next(counts) if samples else 0)
            if req.left:
                continue
            req.committed_len = length
            if chunk.scored and out.prompt_logprobs is not None:
                position = start + chunk.scored.start + 1
                targets = req.prompt_ids[position : position + len(chunk.scored)].tolist()
                _log_prompt(req, targets, out.prompt_logprobs, scored)
            if samples:
                self.publish_tokens(req, tokens[sampled:num_tokens], out, sampled)
                completed.append(req)
        return completed

    def cache_prompts(self, reqs: Sequence[Req]) -> None:
        """Put the prompts of ``reqs`` into the tree. Those that have left are put there when their memory is
        retired."""
        for req in reqs:
            if not req.left:
                remap = self.memory.cache_prompt(req)
                if remap is not None:
                    self.remaps.append(remap)

    def publish_tokens(
        self,
        req: Req,
        tokens: Sequence[int],
        out: StepOutput,
        first: int,
        accepted: bool | None = None,
    ) -> None:
        """Append a step's new tokens; tokens after the one that ends the request are dropped. ``first``: the index in
        ``out`` of the first of them. ``accepted``: whether the grammar has accepted the only token, None if the
        grammar has not been asked yet."""
        if req.max_new_tokens == 0:  # only the prompt was to be computed
            self.finish(req, FinishReason(type="length", length=0))
            return
        for index, token in enumerate(tokens, first):
            req.output_ids.append(token)
            if out.logprobs is not None:
                _log_output(req, token, out.logprobs, index)
            self.stats.num_generated_tokens += 1
            if req.grammar is not None and not self.goes_on(req, req.grammar, token, accepted):
                return
            reason = req.finish_reason_after(token)
            if reason is not None:
                break
        # The KV of the last token is computed by the next step.
        req.committed_len = req.num_tokens - 1
        if reason is None:
            self.output.token(req)
        else:
            self.finish(req, reason)

    def goes_on(self, req: Req, grammar: RequestGrammar, token: int, accepted: bool | None) -> bool:
        """Advance the request's grammar by a new token, unless ``accepted`` says that this has been done. Returns False
        if the request has been ended because of its grammar."""
        if accepted is None:
            if grammar.is_too_slow:
                if req.finish_reason_after(token) is not None:
                    return True  # the answer is complete without it
                self.end(req, _TOO_SLOW, 400)
                return False
            accepted = grammar.accept(token)
        if not accepted:
            self.end(req, "a token was drawn that its grammar does not allow: logits are not finite", 500)
        return accepted

    def finish(self, req: Req, reason: FinishReason | None) -> None:
        """Send a request's last output with its finish reason, and let it depart."""
        assert reason is not None, f"{req.rid} has no reason to end"
        self.output.finish(req, reason)
        self.depart(req, reason.type)

    # --- control -------------------------------------------------------------------------------------

    def carry_out(self, message: Message) -> None:
        """Carry out and answer one control message."""
        logger.debug("Control message: %s", type(message).__name__)
        answer = self.control.answer
        match message:
            case LoadGrammarReq():
                self.grammars.load(
                    message.id, message.grammar, message.data, message.vocabulary, message.forgotten
                )
            case SlowGrammarsReq():
                self.grammars.end(message.grammars)
            case FlushCacheReq():
                if message.wait and self.reqs:
                    self.flushes.append(message)
                else:
                    answer(message.id, partial(self.flush, message.storage))
            case CancelFlushReq():
                for flush in [flush for flush in self.flushes if flush.id == message.id]:
                    self.flushes.remove(flush)
                    answer(flush.id, partial(self.flush, flush.storage))
            case UpdateWeightsReq():
                answer(message.id, partial(self.update_weights, message))
            case PauseGenerationReq():
                answer(message.id, partial(self.pause, message.mode))
            case ContinueGenerationReq():
                self.paused = False
                answer(message.id, lambda: (True, "generation continues"))
            case ShutdownReq():
                self.draining, self.paused = True, False
                if not message.drain:
                    self.abort(AbortReq(abort_all=True))
            case ProfileReq() | FlightRecorderReq() | GetInternalStateReq():
                self.control.observe(message, self.state)
            case _:
                raise AssertionError(f"the scheduler does not take a {type(message).__name__}")

    def flush(self, storage: bool) -> tuple[bool, str]:
        """Empty the prefix cache, and with ``storage`` the storage tier too. Fails while there are requests."""
        self.retire_departed()  # requests aborted by the messages just before still lock their prefixes
        if self.reqs:
            return False, f"cache not flushed: {len(self.reqs)} requests are pending"
        try:
            num_pages = self.memory.flush(storage)
        except ValueError as error:
            return False, f"cache not flushed: {error}"
        return True, f"cache flushed: {num_pages} pages are free again"

    def update_weights(self, message: UpdateWeightsReq) -> tuple[bool, str, bytes]:
        """Replace the model's weights. First all running requests are retracted and all cache tiers forget the KV that
        the old weights computed; the requests then go on with the new weights from their published tokens. If the new
        weights do not fit the model, nothing is changed."""
        weights = NewWeights(message.id, message.model_path, message.file, message.weight_version)
        try:
            self.worker.check_weights(weights)
        except ValueError as error:
            return False, f"weights not updated: {error}", b"0"
        if message.abort_all_requests:
            self.abort(AbortReq(abort_all=True))
        running = self.give_back_all()
        self.retire_departed()
        # All requests of the step in flight have left, so its tokens are dropped.
        forgetting_old_kv(self.worker.device, partial(self.memory.forget, self.waiting))()
        try:
            self.worker.replace_weights(weights, self.still_working)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"some weights are new and others are not: {error}") from error
        done = "weights updated"
        if message.keep_pause and self.draining:
            done += (
                ", and no pause: the server is shutting down, and its last requests must be allowed to end"
            )
        elif message.keep_pause:
            self.stop_scheduling()
        return True, done, str(running).encode()

    def give_back_all(self) -> int:
        """Retract every request that holds memory. Returns how many there were."""
        # Newest first: each one goes to the head of the queue, so they resume in their old order.
        holders = [req for req in reversed(list(self.reqs.values())) if req.row]
        for req in holders:
            self.retract(req)
        return len(holders)

    def flush_when_idle(self) -> None:
        """Carry out the flushes that have waited until no request is left."""
        flushes, self.flushes = self.flushes, []
        for flush in flushes:
            self.control.answer(flush.id, partial(self.flush, flush.storage))

    def pause(self, mode: str) -> tuple[bool, str]:
        """Launch nothing until a ContinueGenerationReq. ``mode`` says what happens to running requests: ``abort``,
        ``retract``, or ``in_place``."""
        if mode not in ("abort", "retract", "in_place"):
            return False, f"unknown mode {mode!r}: use abort, retract or in_place"
        if self.draining:
            return False, "the server is shutting down: its last requests must be allowed to end"
        self.stop_scheduling()
        if mode == "abort":
            self.abort(AbortReq(abort_all=True))
        elif mode == "retract":
            self.give_back_all()
        return True, f"paused ({mode}); /continue_generation resumes"

    def stop_scheduling(self) -> None:
        """Pause until a ContinueGenerationReq. The time until then does not count for the requests' time-outs."""
        self.paused = True
        for req in self.reqs.values():
            req.clocked_running = None

    def state(self) -> InternalState:
        """The scheduler's counters and gauges, for the front end."""
        num_running = sum(1 for req in self.reqs.values() if req.row)
        return self.stats.state(num_running, self.waiting.num_reqs, self.ratio.value, self.paused)

    def report(self) -> None:
        """Send :meth:`state` to the front end if it has changed since it was sent. No error in it ends the scheduler,
        which only observes here."""
        try:
            state = self.state()
        except Exception:
            logger.exception("the state could not be told")
            return
        if state != self.reported:
            self.reported = state
            self.tell_frontend(StatsReport(state=state))

    # --- out -----------------------------------------------------------------------------------------

    def depart(self, req: Req, why: str) -> None:
        """Remove the request. :meth:`retire_departed` gives back its memory, which others may use after the request's
        last step in flight."""
        assert self.reqs.get(req.rid) is req and not req.left, f"{req.rid} leaves once"
        logger.debug(
            "Request %s leaves (%s): %d tokens, %d of them cached, and %d new ones, after %d retractions",
            req.rid, why, len(req.prompt_ids), req.cached_tokens, len(req.output_ids), req.num_retractions,
        )  # fmt: skip
        req.left = True
        self.running.departed()
        self.recorder.departed(req, why)
        if why != "retract":  # otherwise the resumed request takes its place
            del self.reqs[req.rid]
        if req.grammar is not None:
            self.num_constrained -= 1
            self.latest_constrained = None
        if req.row == 0:
            self.waiting.remove(req)
        else:
            self.waiting.holdings.release(req)
        if self.chunked is req:
            self.chunked = None
        self.departed.append(req)

    def retire_departed(self) -> None:
        """Retire the memory of departed requests; each one's may be used again after its own last step (F13)."""
        for req in self.departed:
            self.memory.release(req)
        self.departed.clear()

    def check_memory(self) -> None:
        """Check, once each time the engine becomes idle, that every page and row is accounted for."""
        if not self.memory_checked:
            self.memory.check_memory()
            assert self.num_constrained == 0, (
                f"{self.num_constrained} requests with a grammar have left unnoticed"
            )
            self.memory_checked = True


def _loaded(error: BaseException | None) -> tuple[bool, str]:
    """The answer to a LoadGrammarReq: success and error text."""
    return error is None, "" if error is None else f"{type(error).__name__}: {error}"


def _error(message: str) -> FinishReason:
    return FinishReason(type="abort", message=message, status_code=400)


class OutputSender:
    """What the detokenizer is told about each request, and when: the news of one step go as one message."""

    def __init__(self, send: Callable[[BatchTokenOut], None], speculates: bool = False) -> None:
        """``speculates``: whether each message carries the request's counts of drafts."""
        self._send = send
        self._speculates = speculates
        self._outs: list[TokenOut] = []

    def token(self, req: Req) -> None:
        """``req`` goes on and has a new token. The detokenizer is told at the first token, and then when
        ``emit_interval`` tokens have been gathered."""
        emitted = req.num_emitted
        if emitted == 0 or len(req.output_ids) - emitted >= req.emit_interval:
            self._add(req, None)

    def finish(self, req: Req, reason: FinishReason) -> None:
        """Add the last output of ``req``, with its finish reason."""
        self._add(req, reason)

    def flush(self) -> None:
        """Send what has been collected."""
        if self._outs:
            outs, self._outs = self._outs, []
            self._send(BatchTokenOut(outs=outs))

    def _add(self, req: Req, reason: FinishReason | None) -> None:
        num_outputs = len(req.output_ids)
        decode = None
        if not req.announced:
            req.announced = True
            decode = req.decode_info()
        output_logprobs = input_logprobs = None
        if req.output_log is not None:
            output_logprobs, req.output_log = _taken(req.output_log), LogprobLog()
        if req.prompt_log is not None and (req.output_ids or reason is not None):
            input_logprobs, req.prompt_log = _taken(req.prompt_log), None
        self._outs.append(
            TokenOut(
                rid=req.rid,
                output_ids=req.output_ids[req.num_emitted :],
                prompt_tokens=len(req.prompt_ids),
                completion_tokens=num_outputs,
                cached_tokens=req.cached_tokens,
                finish_reason=reason,
                decode=decode,
                input_logprobs=input_logprobs,
                output_logprobs=output_logprobs,
                num_retractions=req.num_retractions,
                cached_tokens_details=req.cached_details,
                spec=req.spec_counts if self._speculates else None,
            )
        )
        req.num_emitted = num_outputs


def _log_output(req: Req, token: int, values: LogprobValues, index: int) -> None:
    """Note the logprob of a sampled token."""
    if req.output_log is not None:
        _append(req.output_log, [token], values, index, req.source)


def _log_prompt(req: Req, tokens: list[int], values: LogprobValues, start: int) -> None:
    """Note the logprobs of the prompt's next ``tokens``; their values begin at ``start`` in the step's."""
    if req.prompt_log is not None:
        _append(req.prompt_log, tokens, values, start, req.source)


def _append(
    log: LogprobLog, tokens: list[int], values: LogprobValues, start: int, source: TokenizedGenerateReq
) -> None:
    num, num_top, named = len(tokens), source.top_logprobs_num, source.token_ids_logprob
    rows = slice(start, start + num)
    log.token_ids += tokens
    log.logprobs += values.chosen[rows].tolist()
    ids = values.top_ids[rows, :num_top].astype(np.int32)
    log.top.append(values.top[rows, :num_top].tobytes(), ids.tobytes(), num)
    if named:
        assert values.named is not None, "a step computes what its requests name"
        named_ids = np.asarray(named, dtype=np.int32).tobytes() * num
        log.named.append(values.named[rows, : len(named)].tobytes(), named_ids, num)


def _taken(log: LogprobLog) -> TokenLogprobs:
    return TokenLogprobs(
        token_ids=log.token_ids, logprobs=log.logprobs, top_logprobs=log.top, token_ids_logprobs=log.named
    )
