"""Scheduler: decides, step by step, what the device computes, and publishes what it has computed.

Decisions are a function of the inbox's messages and of Completions (what has ended on device and disk), each drained
once a step; of several ranks all drain the same (``ranks``). There is no wall clock and no unordered iteration in them,
so that ranks and replays that see the same decide the same. ``step`` is the only place that sequences a step; in-flight
state is its argument and its return value::

    step k-1:  launch k-1 | publish k-2 ...            the CPU
    step k  :               launch k    | publish k-1
    GPU     :      [ step k-1      ][ step k       ]   never waits for the CPU
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from fenceline.config.draft_config import StepShape
from fenceline.config.engine_config import EngineConfig
from fenceline.constrained.matcher import GrammarStore, RequestGrammar, all_tokens
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
    ShutdownReq,
    StatsReport,
    TickReq,
    TokenizedGenerateReq,
    UpdateWeightsReq,
)
from fenceline.memory_order import Points, forgetting_old_kv, slots_of_tree, tokens_in_flight
from fenceline.model_executor.step import (
    DecodeBatch,
    ExtendBatch,
    ForwardResult,
    HeldStep,
    PageWrites,
    ScheduleBatch,
    StepOutput,
    TokenMasks,
    Worker,
)
from fenceline.models.loader import NewWeights
from fenceline.scheduler.control import SchedulerControl
from fenceline.scheduler.draft_depth import AdaptiveDepth, DraftDepth, FixedDepth
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.output import OutputSender, log_output, log_prompt
from fenceline.scheduler.prefill import (
    CLIP_NEW_TOKENS,
    MAX_SCORED_TOKENS,
    PrefillPlan,
    PrefillPlanner,
    remap_writes,
)
from fenceline.scheduler.ranks import RankLink
from fenceline.scheduler.req import LogprobLog, Req, emit_interval
from fenceline.scheduler.request_memory import Remap, make_request_memory
from fenceline.scheduler.running_batch import NewTokenRatio, RunningBatch
from fenceline.scheduler.schedule_policy import (
    ShortShare,
    StepSharing,
    loses_least,
    max_prefills_in_row,
    num_waiting_tokens,
    order_waiting,
)
from fenceline.scheduler.stats import SchedulerStats
from fenceline.scheduler.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

# So many bodies that run nothing are looked at for one with a short prompt.
_MAX_NEWCOMERS = 16
_TOO_SLOW = "its grammar takes too long for each token: make it less ambiguous"
# How long a loop without anything to compute waits for messages while transfers of the cache or jobs of its storage
# have not ended: briefly where a request waits for them.
_ACK_INTERVAL_MS = 1
_QUIET_ACK_INTERVAL_MS = 50


class Inbox(Protocol):
    """Where requests and control messages come from."""

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        """All messages that have arrived; with ``block`` wait until there is one, ``timeout_ms`` at most."""
        ...


class Outbox(Protocol):
    """Where news go."""

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        """Tokens."""
        ...

    def to_tokenizer(self, message: Message) -> None:
        """Replies to control messages, statistics."""
        ...


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step: its batch, its requests in batch order, its result to come: a HeldStep while only its forward
    has been launched, until :meth:`Scheduler.sample_held`."""

    batch: ScheduleBatch
    reqs: Sequence[Req]
    result: ForwardResult | HeldStep
    number: int  # of steps launched, this one included

    @property
    def brings(self) -> ForwardResult:
        """Its result, once it has been launched as a whole."""
        assert not isinstance(self.result, HeldStep), "its sampling has been submitted"
        return self.result


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
        """``ranks``: with several ranks, what a turn drains comes from there, and not from ``inbox`` and worker."""
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
        self.draft_depth: DraftDepth = FixedDepth(most - 1)
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
            largest.num_slots - 1,
        )
        # Prompts go before decoding, but whoever decodes waits for no more than this between two of its steps.
        self.max_prefill_in_row = max_prefills_in_row(config.device) * self.planner.step_tokens
        self.output = OutputSender(outbox.to_detokenizer, speculates=most > 1)
        self.stats = SchedulerStats(self.memory, worker, config.server_args.decode_log_interval)
        self.tell_frontend = outbox.to_tokenizer
        self.ratio = NewTokenRatio(config.server_args.schedule_conservativeness)
        num_tokens = self.memory.num_pages * config.server_args.page_size
        self.share = ShortShare.of(num_tokens, self.memory.rows.size)
        self.seeds = Random(config.random_seed)
        self.shuffler = Random(config.random_seed)  # its own: how often the queue is shuffled moves no seed
        self.reqs: dict[str, Req] = {}  # all that have not left, by rid
        self.num_constrained = 0  # of them, by a grammar
        self.recorder = FlightRecorder(config, self.memory, self.reqs)
        self.control = SchedulerControl(self.recorder, config.torch_profiler_dir, outbox.to_tokenizer)
        self.still_working: Callable[[], None] = lambda: None  # tells a watchdog that a long turn goes on
        self.flushes: list[FlushCacheReq] = []  # that wait for the last request to leave
        args = config.server_args
        self.waiting = WaitingQueue(None if args.disable_radix_cache else args.page_size)
        self.grammars = GrammarStore(config.model.vocab_size, config.model.eos_token_ids)
        self.latest_prompt = (
            0,
            np.empty(0, dtype=np.int64),
        )  # that has come in a body of several, and its body
        self.chunked: Req | None = None
        self.num_launched = 0  # steps
        self.joining: list[Req] = []  # they decode from the next step on: prompts just submitted whole
        self.departed: list[Req] = []
        self.remaps: list[Remap] = []
        # Tokens of prefill since the last decode step; short steps count for more, see plan_prefill.
        self.prefill_in_row = 0
        self.let_newcomer_in = False  # since the last decode step, see plan_prefill
        self.paused = False
        self.draining = False
        self.books_checked = True

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
        """Whether the step before is published before the next launch: the second phase of a speculative step touches
        KV, so nothing may be retired between its two phases."""
        return not self.running.is_exact and self.num_constrained > 0

    @property
    def stopped(self) -> bool:
        """Whether the loop should end: told so, and no request is left."""
        return self.draining and not self.reqs

    def step(self, prev: InFlight | None) -> InFlight | None:
        """One turn of the loop. ``prev`` is the step in flight; returns the step now in flight."""
        block = prev is None and self.idle and not self.stopped
        timeout_ms = None
        if block and self.memory.num_outstanding:
            timeout_ms = _ACK_INTERVAL_MS if self.reqs else _QUIET_ACK_INTERVAL_MS
        if block and self.grammars.num_loading:
            timeout_ms = _ACK_INTERVAL_MS
        awaited = prev if prev is not None and isinstance(prev.batch, ExtendBatch) else None
        if self.ranks is None:
            self.ingest(self.inbox.drain(block, timeout_ms))
            ended = self.worker.completions(None if awaited is None else awaited.brings)
        else:
            asked = None if awaited is None else (awaited.number, awaited.brings)
            messages, ended = self.ranks.turn(block, timeout_ms, asked)
            self.ingest(messages)
        for id, error in self.grammars.loaded():
            self.control.answer(id, partial(_loaded, error))
        if ended:
            self.recorder.completed(ended)
            self.memory.complete(ended)  # every step, decode included (F6)
        if prev is not None and (ended.results_arrived or self.speculates_under_masks):
            self.publish(prev)  # the device has nothing to do, and first tokens would wait for the launch
            prev = None
        self.retire_departed()  # what those that have ended by now hold is there for the next step
        flight = self.launch_next()
        if prev is not None:
            self.publish(prev)
        if flight is not None and isinstance(flight.result, HeldStep):
            flight = self.sample_held(flight, flight.result)
        if flight is not None and self.config.server_args.disable_overlap_schedule:
            self.publish(flight)
            flight = None
        self.retire_departed()
        self.memory.write_backups()
        if flight is None and not self.reqs:
            self.flush_when_idle()
            self.check_books()
        return flight

    def close(self) -> None:
        """The loop has ended: end what works beside it."""
        if self.memory.tiers is not None:
            self.memory.tiers.close()

    # --- in ------------------------------------------------------------------------------------------

    def ingest(self, messages: Sequence[Message]) -> None:
        """Take in everything that has arrived."""
        # The last tick alone: who came between two of them has had no chance to be scheduled yet.
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
        params = message.sampling_params
        eos = () if params.ignore_eos else self.config.model.eos_token_ids
        num_tokens = self.memory.num_pages * self.config.server_args.page_size
        # The last step computes as many rows as any, whether tokens of the request come of them or not.
        capacity = min(self.config.model.context_length, num_tokens - self.running.largest.num_slots + 1)
        # Three times as fast as np.array.
        prompt_ids = np.frombuffer(array("q", message.input_ids), dtype=np.int64)
        if message.body:
            body, latest = self.latest_prompt
            if body == message.body and np.array_equal(latest, prompt_ids):
                prompt_ids = latest  # samples of one prompt: a copy for each would take memory
            self.latest_prompt = message.body, prompt_ids
        req = Req(
            source=msgspec.structs.replace(message, input_ids=[]),
            prompt_ids=prompt_ids,
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=self.seeds.getrandbits(63) if params.seed is None else params.seed,
            max_new_tokens=min(params.max_new_tokens, capacity - len(message.input_ids)),
            emit_interval=emit_interval(message, self.config.server_args.stream_interval),
            rank=0 if self.config.priority is None else self.config.priority.rank(message.priority),
        )
        req.is_short = self.share.is_short(req.final_len)
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
            return
        self.output.flush()

    def enter(self, req: Req) -> None:
        """The request is there, until :meth:`depart`."""
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
        """End requests that have waited or run for too long. Each one's time begins with the first tick that finds it
        waiting, or running: nobody is ended early. It begins anew after a pause, and after a retraction."""
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
        """Submit the next step: prompts first, up to their share, else new tokens for every running request."""
        self.running.drop_departed()
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
        """Choose among chunked and waiting requests; None if there is nothing to compute, or decoding has its turn."""
        priority = self.config.priority
        threshold = None if priority is None else priority.preemption_threshold
        may_retract = threshold is not None or self.may_displace
        has_place = may_retract or self.memory.rows.num_free > 0
        if self.chunked is None and not (self.waiting and has_place):
            return None
        step_tokens, queued, chunked = self.planner.step_tokens, self.candidates, self.chunked
        if not len(self.running):
            self.prefill_in_row, self.let_newcomer_in = 0, False  # nobody waits for it
        elif self.prefill_in_row + step_tokens > self.max_prefill_in_row:
            # A decode step of a body's many requests takes long: once, somebody who comes before it goes first.
            if self.let_newcomer_in or not self.may_displace:
                return None
            step_tokens //= 4
            newcomer = self.short_newcomer(step_tokens)
            if newcomer is None:
                return None
            self.let_newcomer_in, queued, chunked = True, partial(self.noted, (newcomer,)), None
        if may_retract and self.chunked is None:
            self.make_way(threshold)
        reserved = self.running.reserved_tokens(self.ratio.value, CLIP_NEW_TOKENS)
        queue = partial(num_waiting_tokens, self.waiting, len(self.waiting))
        plan = self.planner.plan(
            queued,
            step_tokens,
            chunked,
            len(self.running),
            reserved,
            queue,
            self.short_share(),
            self.waiting.num_short,
        )
        if plan is not None:
            for req in plan.reqs:
                if req is not chunked:
                    self.waiting.admit(req)
            if chunked is self.chunked:
                self.chunked = plan.chunked
            else:
                assert plan.chunked is None, "a newcomer beside a half-way prompt fits whole into its step"
            # A step takes time however short it is: a quarter of a full one. Where prompts come one by one, each could
            # still have a step of its own, so those that leave nothing to be computed count a quarter of the limit.
            is_last = self.chunked is None and not self.waiting
            least = (self.max_prefill_in_row if is_last else step_tokens) // 4
            self.prefill_in_row += max(plan.num_new_tokens, least)
        return plan

    def candidates(self) -> Iterator[Req]:
        """The waiting requests that may be admitted now, in the order of the policy; of those that come before the one
        asked for it is known whether they have been admitted."""
        policy = self.config.server_args.schedule_policy
        if policy == "fcfs":
            reqs = self.waiting.in_turn(self.may_schedule)
        else:
            ordered = order_waiting(list(self.waiting), policy, self.memory.match, self.shuffler)
            reqs = filter(self.may_schedule, ordered)
        return self.noted(reqs)

    def short_newcomer(self, num_tokens: int) -> Req | None:
        """The first waiting request of a body that runs nothing of which at most ``num_tokens`` are to be computed, so
        that it fits whole into a step of so many."""
        for req in islice(self.waiting.newcomers(self.may_schedule), _MAX_NEWCOMERS):
            num_new = req.num_tokens - self.memory.match(req).num_tokens
            if num_new <= (min(num_tokens, MAX_SCORED_TOKENS) if req.scores_prompt else num_tokens):
                return req
        return None

    def noted(self, reqs: Iterable[Req]) -> Iterator[Req]:
        """``reqs``; of each it is noted before the next one whether it has been admitted."""
        for req in reqs:
            yield req
            if req.row != 0:
                self.waiting.computes(req)

    def may_schedule(self, req: Req) -> bool:
        """Whether a waiting request need not wait for storage, or for a sample of its prompt that is being computed."""
        return self.memory.may_schedule(req) and not self.waiting.waits_for_sample(req)

    @property
    def may_displace(self) -> bool:
        """Whether a body that runs nothing may take the place of a request of one that runs several. Priorities, and
        the policies that look at the cache, have rules of their own."""
        takes_turns = self.config.server_args.schedule_policy == "fcfs" and self.config.priority is None
        return takes_turns and self.waiting.is_shared

    def short_share(self) -> ShortShare:
        """What is left to short requests, and what those have of it that run or are half-way through their prompt."""
        share = self.running.short_share(self.share)
        if self.chunked is not None and self.chunked.is_short:
            share = replace(share)
            share.take(len(self.chunked.pages) * self.memory.page_size, self.chunked.final_len)
        return share

    def make_way(self, threshold: int | None) -> None:
        """Retract running requests for waiting ones whose priority is better by more than ``threshold``, and those of
        bodies that run several for bodies that run none."""
        if threshold is not None:
            self.preempt(threshold)
        if self.may_displace:
            self.displace()

    def displace(self) -> None:
        """Retract requests of bodies that run several for bodies that run none."""
        expected = self.running.expected_tokens(self.ratio.value, CLIP_NEW_TOKENS)
        newcomers = self.waiting.newcomers(self.may_schedule)
        num_running = self.waiting.num_running
        victims = self.planner.displaced(
            newcomers, self.running.reqs, expected, num_running, self.short_share()
        )
        for victim in victims:
            self.retract(victim)
        if victims:
            self.stats.displaced(len(victims))

    def preempt(self, threshold: int) -> None:
        """Retract running requests for waiting ones whose priority is better by more than ``threshold``."""
        expected = self.running.expected_tokens(self.ratio.value, CLIP_NEW_TOKENS)
        waiting = self.waiting.in_turn(self.may_schedule)
        victims = self.planner.preempted(
            waiting,
            self.running.reqs,
            expected,
            self.waiting.num_running,
            threshold,
            self.short_share(),
        )
        if victims:
            for victim in victims:
                self.retract(victim)
            self.stats.preempted(len(victims))

    def launch_prefill(self, plan: PrefillPlan) -> InFlight:
        """Submit prompts; those that are complete decode from the next step on."""
        batch = replace(plan.batch, page_writes=self.with_remaps(plan.batch.page_writes))
        self.joining = [
            req for req in plan.reqs if req is not plan.chunked and req.allocated_len < req.final_len
        ]
        flight = self.launch(batch, plan.reqs)
        # After the launch, so that the log line does not delay the device.
        self.stats.prefill(plan, len(self.running), len(self.waiting))
        return flight

    def launch_decode(self) -> InFlight | None:
        """Submit a step of all running requests; None while requests that are ending hold the memory that it takes."""
        choice = self.draft_depth.choose(len(self.running), self.running.num_drafting)
        shape = self.shapes[choice.depth]
        lens = self.make_room(shape)
        if lens is None:
            return None
        self.prefill_in_row, self.let_newcomer_in = 0, False
        available = self.memory.num_available_pages - self.share.tokens // self.memory.page_size
        batch = self.running.schedule_step(lens, shape, choice, available, self.memory.grow)
        writes = self.with_remaps(batch.page_writes)
        if writes is not batch.page_writes:
            batch = replace(batch, page_writes=writes)
        self.ratio.decay()
        self.stats.decode(self.running.num_tokens, len(self.running), len(self.waiting), choice.depth)
        return self.launch(batch, list(self.running.reqs))

    def launch(self, batch: ScheduleBatch, reqs: Sequence[Req]) -> InFlight:
        """Hand a batch to the worker and note it as its requests' last flight."""
        batch = self.memory.tables.up_to_date(batch, reqs)
        if self.ranks is not None:
            self.ranks.decided(self.num_launched + 1, batch, reqs)
        result = self.worker.launch(batch)
        done = Points.of(result.done)
        self.num_launched += 1
        for req in reqs:
            req.last_flight, req.last_step = done, self.num_launched
        self.books_checked = False
        self.recorder.launched(batch, reqs, result.done)
        if self.control.profiler.steps_left is not None:
            self.control.profiler.step()
        return InFlight(batch, reqs, result, self.num_launched)

    def sample_held(self, flight: InFlight, held: HeldStep) -> InFlight:
        """Submit the sampling of a step whose forward runs: the step before has been published, so that it is known
        which tokens may come. What has left meanwhile keeps its row until this step is done too."""
        masks = self.fill_masks(flight)
        result = held.sample(masks)
        done = Points.of(result.done)
        for req in flight.reqs:
            if req.last_step == flight.number:
                req.last_flight = done
        self.recorder.sampled(result.done)
        return replace(flight, result=result)

    def fill_masks(self, flight: InFlight) -> TokenMasks:
        """The masks of a step's constrained requests. One for which no token may come ends."""
        batch, reqs = flight.batch, flight.reqs
        if isinstance(batch, ExtendBatch):
            reqs = [req for seq, req in zip(batch.seqs, reqs, strict=True) if seq.sampling is not None]
        rows = batch.constrained
        bits = all_tokens(len(rows), self.grammars.num_words)
        for index, row in enumerate(rows.tolist()):
            req = reqs[row]
            if req.left:
                continue  # nobody reads what is drawn for it
            assert req.grammar is not None, "who is constrained has a grammar"
            least_more = req.source.sampling_params.min_new_tokens - len(req.output_ids)
            if req.grammar.is_too_slow:  # by what another request of the same grammar has taken
                self.end(req, _TOO_SLOW, 400)
            elif not req.grammar.fill(bits[index : index + 1], least_more):
                bits[index] = -1
                self.end(req, "no token of the vocabulary can follow in its grammar", 400)
            elif req.grammar.is_too_slow:
                self.end(req, _TOO_SLOW, 400)
        self.output.flush()
        return TokenMasks(rows, bits)

    def make_room(self, shape: StepShape) -> npt.NDArray[np.int64] | None:
        """Retract requests, running ones or the one that is half-way through its prompt, until a step of ``shape`` for
        the others fits; and long ones, while there are several, until they leave what they should to short ones. The
        lengths [B] that the step brings them to; None if memory is about to be free without that, with the step in
        flight, or if only the half-way prompt is left."""
        retracted = 0
        lens = self.running.next_lens(shape)
        while True:
            num_needed = self.running.num_pages_needed(lens, shape)
            num_available, page_size = self.memory.num_available_pages, self.memory.page_size
            if num_needed <= num_available - self.share.tokens // page_size:
                break
            if num_needed <= num_available - self.short_share().kept_tokens // page_size:
                break
            holders = self.running.reqs if self.chunked is None else [*self.running.reqs, self.chunked]
            is_ending = len(self.reqs) > len(self.waiting) + len(holders)
            if num_needed <= num_available:
                holders = [req for req in holders if not req.is_short]
                if is_ending or len(holders) < 2:
                    break
            elif is_ending:
                return None
            assert len(holders) > 1, "one request alone always fits: its length was limited on arrival"
            self.retract(min(holders, key=self.loses_least))
            retracted += 1
            if not len(self.running):
                return None
            lens = self.running.next_lens(shape)
        if retracted:
            reqs = self.running.reqs
            decoded = sum(len(req.output_ids) for req in reqs)
            self.ratio.after_retraction(decoded, len(reqs), sum(req.max_new_tokens for req in reqs))
            self.stats.retracted(retracted, self.ratio.value)
        return lens

    def loses_least(self, req: Req) -> tuple[int, int, tuple[int, int]]:
        """Key by which those that hold memory are retracted, the smallest first: of the lowest priority, then of the
        body that runs most, then those that lose least."""
        return -req.rank, -self.waiting.num_running(req), loses_least(req)

    def retract(self, req: Req) -> None:
        """Take all memory from ``req``; it waits at the head of the queue and computes its tokens again, or with
        ``--retract-policy offload`` brings them back from the host."""
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
        """``writes`` and those that move requests onto the tree's pages, before anybody reads their rows."""
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
        out = flight.brings.wait()
        self.recorder.published(out)
        if self.ranks is not None:
            self.ranks.decisions.published(out)
        if isinstance(flight.batch, DecodeBatch):
            self.publish_decode(flight.batch, flight.reqs, flight.number, out)
        else:
            self.publish_extend(flight.batch, flight.reqs, out)
        self.output.flush()
        if self.stats.report_is_due():
            self.report()

    def publish_decode(self, batch: DecodeBatch, reqs: Sequence[Req], number: int, out: StepOutput) -> None:
        """The new tokens of each request that has not left since. The hot loop: what is rare is elsewhere."""
        if not self.running.is_exact or out.logprobs is not None or len(batch.constrained):
            self.publish_counted(batch, reqs, number, out)
            return
        num_dropped = 0
        for req, length, token in zip(reqs, batch.seq_lens.tolist(), out.tokens.tolist(), strict=True):
            if req.left:
                num_dropped += 1
                continue
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
        self.stats.num_generated_tokens += len(reqs) - num_dropped

    def publish_counted(self, batch: DecodeBatch, reqs: Sequence[Req], number: int, out: StepOutput) -> None:
        """The same for a step with several tokens a request, with logprobs, or with grammars."""
        tokens, counts = out.tokens.tolist(), out.token_counts(len(reqs))
        shape, is_exact, last = self.shapes[batch.depth.depth], self.running.is_exact, 0
        for req, length, count in zip(reqs, batch.seq_lens.tolist(), counts, strict=True):
            first, last = last, last + count
            if not req.left:
                if not is_exact:
                    self.stats.verified(req, count - 1, shape.depth)
                self.publish_tokens(req, tokens[first:last], out, first)
                assert req.committed_len <= length - shape.num_spare and count <= shape.num_tokens, (
                    f"{req.rid} got more tokens than it may"
                )
        if out.counts is not None:
            assert batch.may_accept is not None, "the engine speculates"
            self.draft_depth.published(shape.depth, out.counts[batch.may_accept])
        if out.bad_drafts is not None and out.bad_drafts.any():
            self.stats.bad_drafts([reqs[index] for index in np.flatnonzero(out.bad_drafts).tolist()])
        if not is_exact:
            self.joining += self.running.settle(reqs, number)

    def publish_extend(self, batch: ExtendBatch, reqs: Sequence[Req], out: StepOutput) -> None:
        """First tokens of completed prompts, prompt logprobs, and whole prompts into the tree."""
        tokens = out.tokens.tolist()
        counts = iter(out.token_counts(sum(seq.sampling is not None for seq in batch.seqs)))
        num_tokens = num_scored = 0
        for seq, req in zip(batch.seqs, reqs, strict=True):
            first, last = seq.prompt_logprob_offsets()
            scored, num_scored = num_scored, num_scored + max(last - first, 0)
            sampled, num_tokens = num_tokens, num_tokens + (0 if seq.sampling is None else next(counts))
            if req.left:
                continue
            req.committed_len = seq.seq_len
            if first < last and out.prompt_logprobs is not None:
                position = seq.prefix_len + first + 1
                targets = req.prompt_ids[position : position + last - first].tolist()
                log_prompt(req, targets, out.prompt_logprobs, scored)
            if seq.sampling is not None:
                remap = self.memory.cache_prompt(req)
                if remap is not None:
                    self.remaps.append(remap)
                self.publish_tokens(req, tokens[sampled:num_tokens], out, sampled)

    def publish_tokens(self, req: Req, tokens: Sequence[int], out: StepOutput, first: int) -> None:
        """Append a step's new tokens, of which the first is ``out``'s number ``first``, up to the request's end if it
        is among them: what comes after it is dropped."""
        if req.max_new_tokens == 0:  # only the prompt was wanted
            self.finish(req, FinishReason(type="length", length=0))
            return
        for index, token in enumerate(tokens, first):
            req.output_ids.append(token)
            if out.logprobs is not None:
                log_output(req, token, out.logprobs, index)
            self.stats.num_generated_tokens += 1
            if req.grammar is not None and not self.goes_on(req, req.grammar, token):
                return
            reason = req.finish_reason_after(token)
            if reason is not None:
                break
        # The last token's own KV is computed by the step after it.
        req.committed_len = req.num_tokens - 1
        if reason is None:
            self.output.token(req)
        else:
            self.finish(req, reason)

    def goes_on(self, req: Req, grammar: RequestGrammar, token: int) -> bool:
        """Advance its grammar by a new token; False if it has ended for that."""
        if grammar.is_too_slow:
            if req.finish_reason_after(token) is not None:
                return True  # the answer is complete without it
            self.end(req, _TOO_SLOW, 400)
            return False
        if not grammar.accept(token):
            self.end(req, "a token was drawn that its grammar does not allow: logits are not finite", 500)
            return False
        return True

    def finish(self, req: Req, reason: FinishReason | None) -> None:
        """End a request with its last news."""
        assert reason is not None, f"{req.rid} has no reason to end"
        self.output.finish(req, reason)
        self.depart(req, reason.type)

    # --- control -------------------------------------------------------------------------------------

    def carry_out(self, message: Message) -> None:
        """Carry out and answer one control message."""
        answer = self.control.answer
        match message:
            case LoadGrammarReq():
                self.grammars.load(
                    message.id, message.grammar, message.data, message.vocabulary, message.forgotten
                )
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
        """Empty the prefix cache, with ``storage`` the storage tier too, if no request is there."""
        self.retire_departed()  # requests aborted by the messages just before still lock their prefixes
        if self.reqs:
            return False, f"cache not flushed: {len(self.reqs)} requests are pending"
        try:
            num_pages = self.memory.flush(storage)
        except ValueError as error:
            return False, f"cache not flushed: {error}"
        return True, f"cache flushed: {num_pages} pages are free again"

    def update_weights(self, message: UpdateWeightsReq) -> tuple[bool, str, bytes]:
        """Replace the model's weights. Requests that run give up their memory first, and all tiers forget what the old
        weights have computed; they go on with new ones, from their published tokens. Nothing is changed where the new
        weights do not fit."""
        weights = NewWeights(message.id, message.model_path, message.file, message.weight_version)
        try:
            self.worker.check_weights(weights)
        except ValueError as error:
            return False, f"weights not updated: {error}", b"0"
        if message.abort_all_requests:
            self.abort(AbortReq(abort_all=True))
        running = self.give_back_all()
        self.retire_departed()
        # The step in flight belongs to requests that have left, so its tokens fall away.
        forgetting_old_kv(self.worker.device, partial(self.memory.forget, self.waiting))()
        try:
            self.worker.replace_weights(weights, self.still_working)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"some weights are new and others are not: {error}") from error
        self.paused = self.paused or message.keep_pause
        return True, "weights updated", str(running).encode()

    def give_back_all(self) -> int:
        """Retract whatever holds memory. Returns how many requests that are."""
        # Newest first: each goes to the head of the queue, so they resume in their old order.
        holders = [req for req in reversed(list(self.reqs.values())) if req.row]
        for req in holders:
            self.retract(req)
        return len(holders)

    def flush_when_idle(self) -> None:
        """No request is left: flush where somebody has waited for that."""
        flushes, self.flushes = self.flushes, []
        for flush in flushes:
            self.control.answer(flush.id, partial(self.flush, flush.storage))

    def pause(self, mode: str) -> tuple[bool, str]:
        """Compute nothing until told to continue; ``mode``: what happens to the requests that run."""
        if mode not in ("abort", "retract", "in_place"):
            return False, f"unknown mode {mode!r}: use abort, retract or in_place"
        if self.draining:
            return False, "the server is shutting down: its last requests must be allowed to end"
        self.paused = True
        if mode == "abort":
            self.abort(AbortReq(abort_all=True))
        elif mode == "retract":
            self.give_back_all()
        for req in self.reqs.values():
            req.clocked_running = None
        return True, f"paused ({mode}); /continue_generation resumes"

    def state(self) -> InternalState:
        """How things stand, for the front end."""
        num_running = sum(1 for req in self.reqs.values() if req.row)
        return self.stats.state(num_running, len(self.waiting), self.ratio.value, self.paused)

    def report(self) -> None:
        """Tell the front end how things stand."""
        self.tell_frontend(StatsReport(state=self.state()))

    # --- out -----------------------------------------------------------------------------------------

    def depart(self, req: Req, why: str) -> None:
        """The request leaves; its memory follows in :meth:`retire_departed`, after its last flight."""
        req.left = True
        self.recorder.departed(req, why)
        del self.reqs[req.rid]
        self.num_constrained -= req.grammar is not None
        if req.row == 0:
            self.waiting.remove(req)
        else:
            self.waiting.release(req)
        if self.chunked is req:
            self.chunked = None
        self.departed.append(req)

    def retire_departed(self) -> None:
        """Give back what departed requests held, each after its own last flight (F13)."""
        for req in self.departed:
            self.memory.release(req)
        self.departed.clear()

    def check_books(self) -> None:
        """Once each time the engine falls idle: every page and row is accounted for."""
        if not self.books_checked:
            self.memory.check_books()
            assert self.num_constrained == 0, (
                f"{self.num_constrained} requests with a grammar have left unnoticed"
            )
            self.books_checked = True
            self.report()


def _loaded(error: BaseException | None) -> tuple[bool, str]:
    """What is told of a grammar that has been taken apart."""
    return error is None, "" if error is None else f"{type(error).__name__}: {error}"


def _error(message: str) -> FinishReason:
    return FinishReason(type="abort", message=message, status_code=400)
