"""StepPlanner: which step comes next, and which running requests are retracted so that it has room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np
import numpy.typing as npt

from fenceline.config.draft_config import StepShape
from fenceline.config.engine_config import EngineConfig, launch_tokens
from fenceline.model_executor.step import DepthChoice, MixedCosts, StepBatch, StepCosts
from fenceline.scheduler.admission import CLIP_NEW_TOKENS, AdmissionState, loses_least, preempted
from fenceline.scheduler.draft_depth import AdaptiveDepth, DraftDepth
from fenceline.scheduler.population import Population
from fenceline.scheduler.prefill import PrefillPlan, PrefillPlanner
from fenceline.scheduler.req import Req
from fenceline.scheduler.running_batch import NewTokenRatio
from fenceline.scheduler.schedule_policy import (
    PrefixWork,
    StepSharing,
    StepTime,
    max_prefills_in_row,
    num_waiting_tokens,
    order_waiting,
)
from fenceline.scheduler.stats import SchedulerStats

# However long the steps of those that decode already take, prompts go on by so many tokens.
_LEAST_PROMPT_TOKENS = 32
# Without --max-inter-token-ms a step beside prompts takes at most so long, or so many times as long as without them:
# the longest gap of a text is then about twice its mean, and prompts get their share where many decode.
_INTER_TOKEN_S, _INTER_TOKEN_STEPS = 0.03, 3


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step: its batch, its requests in the same order, and the plan of its prompts, None if it has none."""

    batch: StepBatch
    reqs: Sequence[Req]
    prefill: PrefillPlan | None = None


class StepPlanner:
    """Plans the steps of ``population``: prompts before decode steps, as far as ``max_in_row`` allows, or both in one
    step (``EngineConfig.mixes_steps``)."""

    def __init__(
        self,
        config: EngineConfig,
        population: Population,
        stats: SchedulerStats,
        shapes: dict[int, StepShape],
        step_costs: StepCosts | MixedCosts | None,
    ) -> None:
        """``shapes``: of decode steps, by depth. ``step_costs``: see ``Worker``; without, their depth is always the
        greatest, and prompts beside which others decode are not limited by time."""
        self.population = population
        self.memory = population.memory
        self.running = population.running
        self.waiting = population.waiting
        self.prefill = PrefillPlanner(
            self.memory,
            config.chunked_prefill_size,
            config.max_prefill_tokens,
            StepSharing.of(
                config.model,
                max(config.piecewise_cuda_graph_tokens, default=0),
                launch_tokens(config.server_args.tp_size, config.model),
            ),
            config.prefill_max_requests,
            PrefixWork.of(config.model, config.device),
            config.looks_up_drafts,
        )
        self.shapes = shapes
        self._greatest_depth = DepthChoice(max(shapes))
        self.draft_depth: DraftDepth | None = None
        if isinstance(step_costs, StepCosts):
            self.draft_depth = AdaptiveDepth(tuple(shapes), step_costs)
        self.ratio = NewTokenRatio(config.server_args.schedule_conservativeness)
        self._mixes = config.mixes_steps
        self._mixed_costs = step_costs if isinstance(step_costs, MixedCosts) else None
        self._most_ms = config.server_args.max_inter_token_ms
        # Between two decode steps at most this many prompt tokens are computed.
        in_row = max_prefills_in_row(config.device, config.speculative is not None)
        self.max_in_row = in_row * self.prefill.step_tokens
        # Tokens of prefill since the last decode step; short steps count for more, see plan_prefill.
        self._in_row = 0
        self._threshold = None if config.priority is None else config.priority.preemption_threshold
        self._policy = config.server_args.schedule_policy
        # A generator of its own, so that shuffling the queue does not change the requests' seeds.
        self.shuffler = Random(config.random_seed)
        self._stats = stats

    def plan(self) -> StepPlan | None:
        """The next step. None: there is nothing to compute, or no memory for it yet."""
        decode = prefill = None
        if self.may_prefill():
            if self._threshold is not None and self.population.chunked is None:
                self.preempt(self._threshold)
            if self._mixes:  # before prompts are admitted, which would take memory that running requests need now
                decode = self.plan_decode()
                if decode is None and len(self.running):
                    return None  # the step in flight leaves them some, and prompts wait for that too
            prefill = self.plan_prefill(0 if decode is None else len(decode.rows))
        if prefill is None:
            decode = self.plan_decode() if decode is None else decode
            return None if decode is None else StepPlan(decode, list(self.running.reqs))
        if decode is None:
            return StepPlan(prefill.batch, prefill.reqs, prefill)
        self.running.left_arena()
        return StepPlan(prefill.batch.beside(decode), [*prefill.reqs, *self.running.reqs], prefill)

    def may_prefill(self) -> bool:
        """Whether some prompt waits for a step, and no decode step has to come first."""
        if self.population.chunked is None:
            if not self.waiting.num_reqs:
                return False
            if self._threshold is None and not self.memory.rows.num_free:
                return False
        if not len(self.running):
            self._in_row = 0  # no running request waits for a decode step
            return True
        return self._mixes or self._in_row + self.prefill.step_tokens <= self.max_in_row

    def plan_prefill(self, num_decodes: int) -> PrefillPlan | None:
        """The prompts of a step that ``num_decodes`` running requests share: of the chunked request and the waiting
        ones. None: none of them fits."""
        population, chunked, step_tokens = self.population, self.population.chunked, self.prefill.step_tokens
        most = max(step_tokens - num_decodes, step_tokens // 4, 1)
        time = self.step_time(num_decodes)
        queue = partial(num_waiting_tokens, self.waiting, self.waiting.num_reqs)
        plan = self.prefill.plan(self.candidates, chunked, self.admission_state(), queue, most, time)
        if plan is not None:
            for req in plan.reqs:
                if req is not chunked:
                    self.waiting.admit(req)
            population.chunked = plan.chunked
            # Even a short step takes time, so it counts as a quarter of a full one. Where prompts arrive one by one,
            # each would still get a step of its own, so a step after which no prompt is left counts as a quarter of
            # the limit.
            is_last = population.chunked is None and not self.waiting.num_reqs
            least = (self.max_in_row if is_last else step_tokens) // 4
            self._in_row += max(plan.num_new_tokens, least)
        return plan

    def step_time(self, num_decodes: int) -> StepTime | None:
        """The time of a step that ``num_decodes`` requests share: --max-inter-token-ms, or what is good for people who
        read along. None: it is not limited."""
        costs, context = self._mixed_costs, self.running.num_tokens
        if costs is None or not num_decodes:
            return None
        limit = max(_INTER_TOKEN_S, _INTER_TOKEN_STEPS * costs.of(0, num_decodes, 0, context))
        if self._most_ms is not None:
            limit = self._most_ms / 1e3
        return StepTime(costs, limit, num_decodes, context, _LEAST_PROMPT_TOKENS)

    def candidates(self) -> Iterator[Req]:
        """The waiting requests that may be admitted now, in the order of the policy."""
        if self._policy == "fcfs":
            return self.waiting.in_turn(self.memory.may_schedule)
        ordered = order_waiting(list(self.waiting), self._policy, self.memory.match, self.shuffler)
        return filter(self.memory.may_schedule, ordered)

    def admission_state(self) -> AdmissionState:
        """What admission decides by now."""
        expected = 0
        if len(self.running):  # a first token waits for this
            expected = int(self.running.expected_tokens(self.ratio.value, CLIP_NEW_TOKENS).sum())
        num_running = len(self.running) + (self.population.chunked is not None)
        return AdmissionState(self.memory, self.waiting.holdings, num_running, expected)

    def preempt(self, threshold: int) -> None:
        """Retract running requests in favour of waiting ones whose priority is better by more than ``threshold``."""
        best = next(self.waiting.in_turn(self.memory.may_schedule), None)
        if best is None or all(req.rank - best.rank <= threshold for req in self.running.reqs):
            return
        expected = self.running.expected_tokens(self.ratio.value, CLIP_NEW_TOKENS).tolist()
        wanted = self.prefill.wanted(self.waiting.in_turn(self.memory.may_schedule))
        victims = preempted(self.admission_state(), wanted, self.running.reqs, expected, threshold)
        if victims:
            self.population.retract_beside(victims, [self.memory.match(req).match.host_node for req in wanted])
            self._stats.preempted([victim.rid for victim in victims])

    def plan_decode(self) -> StepBatch | None:
        """A decode step of all running requests. Returns None if there are none, or no memory for it yet because
        requests that are about to end still hold it."""
        running, choice = self.running, self._greatest_depth
        if not len(running):
            return None
        if self.draft_depth is not None:
            choice = self.draft_depth.choose(len(running), running.num_drafting, self.deepest_with_room())
        shape = self.shapes[choice.depth]
        room = self.make_room(shape)
        if room is None:
            return None
        lens, available = room
        self._in_row = 0
        self.ratio.decay()
        return running.schedule_step(lens, shape, choice, available, self.memory.grow)

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

    def num_kept_pages(self) -> int:
        """Pages that a decode step leaves to the reserve: those for which a request outside it would be retracted. Not
        while some request is about to end, and never the last one."""
        kept = self.waiting.holdings.kept_tokens
        if not kept or self.population.some_end:
            return 0
        num_others = sum(not req.in_reserve for req in self.population.holders())
        return kept // self.memory.page_size if num_others > 1 else 0

    def make_room(self, shape: StepShape) -> tuple[npt.NDArray[np.int64], int] | None:
        """Retract requests (running ones, or the chunked one) until a decode step of ``shape`` fits for the others, and
        leaves the reserve. Returns the lengths [B] after the step, and the number of available pages apart from the
        reserve, 0 if the step needs none. Returns None if the step has to wait: memory is about to become free because
        a request ends with the step in flight, or only the chunked request is left."""
        retracted: list[str] = []
        lens = self.running.next_lens(shape)
        if self.running.needs_nothing:
            return lens, 0
        num_reserved = self.waiting.holdings.reserve_tokens // self.memory.page_size
        while True:
            num_needed = self.running.num_pages_needed(lens, shape)
            num_available = self.memory.num_available_pages
            if num_needed <= num_available - num_reserved or num_needed <= num_available - self.num_kept_pages():
                break
            holders = self.population.holders()
            if num_needed <= num_available:
                holders = [req for req in holders if not req.in_reserve]
            elif self.population.some_end:
                return None
            assert len(holders) > 1, "one request alone always fits: its length was limited on arrival"
            victim = min(holders, key=lambda req: loses_least(req, self.waiting.holdings))
            kept = f", {self.num_kept_pages()} of them kept in reserve" if num_needed <= num_available else ""
            cause = f"memory: a decode step needs {num_needed} pages, {num_available} are available{kept}"
            self.population.retract(victim, cause)
            retracted.append(victim.rid)
            if not len(self.running):
                self._stats.retracted(retracted, self.ratio.value)
                return None
            lens = self.running.next_lens(shape)
        if retracted:
            reqs = self.running.reqs
            decoded = sum(len(req.output_ids) for req in reqs)
            self.ratio.after_retraction(decoded, len(reqs), sum(req.max_new_tokens for req in reqs))
            self._stats.retracted(retracted, self.ratio.value)
        return lens, num_available - num_reserved
