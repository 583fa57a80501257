"""The real scheduler, which also reports what it does to the proof's records.

Its choices are checked too, where the documentation defines them: how many prompt tokens a step takes, the order of
admission, and which requests are retracted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

from fenceline.config.engine_config import EngineConfig
from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.model_executor.step import StepBatch, StepOutput, Worker
from fenceline.scheduler import prefill, waiting_queue
from fenceline.scheduler.prefill import PrefillPlan
from fenceline.scheduler.req import Req
from fenceline.scheduler.scheduler import Inbox, InFlight, Outbox, Scheduler, StepMasks
from fenceline.vgpu.proving.answers import Sharing
from fenceline.vgpu.proving.drafts import Verified
from fenceline.vgpu.proving.events import around
from fenceline.vgpu.proving.policy_order import POLICIES, policy_order
from fenceline.vgpu.tags import Tags


class WatchedScheduler(Scheduler):
    """Tells ``sharing`` when a prefix is cached, when one may be found, and when some are given up. ``wrong``: choices
    that are not those that were promised. ``verified``: what has come of drafts."""

    def __init__(
        self, config: EngineConfig, worker: Worker, inbox: Inbox, outbox: Outbox, tags: Tags | None = None
    ) -> None:
        super().__init__(config, worker, inbox, outbox)
        self.wrong: list[str] = []
        self.verified: list[Verified] = []
        self._arrivals: dict[str, int] = {}
        self._since: dict[tuple[float, object], int] = {}  # of each waiting request: when it last had a turn
        self._num_moments = 0
        self._late: InFlight | None = None
        self._was_early = False  # ``_late`` has been published in this turn of the loop, without need
        self._all_give_back = False
        self._half_way: Sequence[Req] = ()  # whose prompts prefill steps have left unfinished
        self._num_prefills = 0  # since the latest decode step, or since nobody ran
        self._went_before_decode = False  # a short prompt, since then
        self._may_go_before_decode = False  # one may in the step that is being planned
        self.is_decode_due = (
            False  # whether a decode step has to come before a full step of prompts (``Admissions``)
        )
        self._was_asked = False  # the planner, in the present turn of the loop
        self._tags = tags
        if tags is not None:
            tags.watch(self)
        args, tiers = config.server_args, config.hicache
        storage = tiers is not None and tiers.storage is not None
        threshold = 1 if tiers is None else tiers.load_back_threshold
        draft = None if config.speculative is None else config.speculative.draft
        # The draft's rows of a chunk are computed from tokens of the prompt behind it.
        self._lookahead = lookahead = 0 if draft is None else draft.lookahead
        self._num_rows_behind = 0 if draft is None else draft.num_rows_behind
        self.sharing = Sharing(args.page_size, args.disable_radix_cache, storage, threshold, lookahead)
        around(self.planner, "plan", before=self._asks)
        tree = self.memory.tree
        around(tree, "_detach", after=lambda result, node: self.sharing.lost())
        around(tree, "evict", after=lambda num, num_pages: self.sharing.moved() if num else None)
        around(self.memory, "flush", after=lambda num, storage=False: self.sharing.flushed(storage))

    def step(self, prev: InFlight | None) -> InFlight | None:
        """See Scheduler."""
        self._was_early = False
        self._late = prev  # a step in flight, to be published after the next one has been launched
        return super().step(prev)

    def launch(self, batch: StepBatch, reqs: Sequence[Req]) -> InFlight:
        """See Scheduler. The device must not stand still while the host reads the results of a decode step. Only drafts
        under masks need these before the next step, and on a CPU a launch is the whole step."""
        if self._late is not None and self._was_early and self._late.batch.is_decode:
            self.wrong.append("a decode step is published before the next step has been launched")
        if not batch.is_decode:
            self._check_prefill(batch, reqs)
            for req in reqs:
                if req.rid not in self.sharing.admitted:
                    self.sharing.admit(req.source, req.prompt_ids.tolist())
            self._num_prefills += 1
        else:
            self._num_prefills, self._went_before_decode = 0, False
        with nullcontext() if self._tags is None else self._tags.step(batch, reqs):
            return super().launch(batch, reqs)

    def sample_held(self, pending: StepMasks) -> InFlight:
        """See Scheduler."""
        with nullcontext() if self._tags is None else self._tags.rest_of_step():
            return super().sample_held(pending)

    def publish(self, flight: InFlight) -> None:
        """See Scheduler."""
        if flight is self._late and self.config.device != "cpu":
            under_masks = any(req.grammar is not None for req in self.reqs.values())
            self._was_early = not (under_masks and self.config.speculative is not None)
        batch, reqs = flight.batch, []
        if not batch.is_decode:
            columns = (flight.reqs, batch.seq_lens.tolist(), batch.samples.tolist())
            reqs = [
                (req, length)
                for req, length, samples in zip(*columns, strict=True)
                if samples and not req.left
            ]
        super().publish(flight)
        for req, length in reqs:
            self._cached(req, length, req.num_tokens)

    def publish_counted(self, batch: StepBatch, reqs: Sequence[Req], number: int, out: StepOutput) -> None:
        """See Scheduler."""
        if out.counts is not None:
            shape = self.shapes[batch.depth.depth]
            self.verified += [
                Verified(req.rid, len(req.output_ids), count, shape)
                for req, count in zip(reqs, out.counts.tolist(), strict=True)
                if not req.left
            ]
        super().publish_counted(batch, reqs, number, out)

    def retire_departed(self) -> None:
        """See Scheduler."""
        for req in self.departed:
            if req.row != 0:
                self._cached(req, req.committed_len, req.num_tokens)
        super().retire_departed()

    # --- choices

    def accept(self, message: TokenizedGenerateReq) -> None:
        """See Scheduler."""
        self._arrivals[message.rid] = len(self._arrivals)
        waiting = {self._turn_key(req) for req in self.waiting}
        super().accept(message)
        req = self.reqs.get(message.rid)
        if req is not None and self._turn_key(req) not in waiting:
            self._since[self._turn_key(req)] = self._next_moment()

    def give_back_all(self) -> int:
        """See Scheduler. Whose turn it would be does not matter then."""
        self._all_give_back = True
        num_given_back = super().give_back_all()
        self._all_give_back = False
        return num_given_back

    def retract(self, req: Req) -> None:
        """See Scheduler. The running request of the lowest priority is retracted first; within a priority, one of the
        body with the most running requests. A pause retracts all."""
        running = [] if self._all_give_back else self.running.reqs
        if not req.is_short:  # it may be retracted because it has memory that is kept for short ones
            running = [other for other in running if not other.is_short]
        if any(self._rank(other) > self._rank(req) for other in running):
            self.wrong.append(f"{req.rid} is retracted, and a request of a worse priority runs on")
        equals = [other for other in running if self._rank(other) == self._rank(req)]
        if any(self._num_rows(other) > self._num_rows(req) for other in equals):
            self.wrong.append(f"{req.rid} is retracted, and a larger body runs on")
        alone = self._turn_key(req) not in {self._turn_key(other) for other in self.waiting}
        super().retract(req)
        if alone:
            self._since[self._turn_key(req)] = -self._next_moment()

    def plan_prefill(self) -> PrefillPlan | None:
        """See Scheduler. A request for which all others may be retracted does not wait, because it fits if it is
        alone."""
        if not len(self.running):
            self._num_prefills, self._went_before_decode = 0, False
        is_decode_due = self.is_decode_due and not self._went_before_decode
        # Before any request is retracted: afterwards the body may run only one.
        self._may_go_before_decode = is_decode_due and self._takes_turns and self._some_body_runs_several()
        self._was_asked, others_give_way = False, self._others_give_way()
        plan = super().plan_prefill()
        if self._was_asked and others_give_way and not any(req.row for req in others_give_way):
            names = ", ".join(req.rid for req in others_give_way)
            self.wrong.append(f"nobody gives way to {names}, and all that run are of a worse priority")
        return plan

    def _asks(self, *args: object, **kwargs: object) -> None:
        self._was_asked = True

    def _others_give_way(self) -> Sequence[Req]:
        """Waiting requests for which all running ones may be retracted."""
        priority = self.config.priority
        threshold = None if priority is None else priority.preemption_threshold
        if threshold is None or self.chunked is not None:
            return ()
        best = min(map(self._rank, self.waiting), default=math.inf)
        holders = [req for req in self.reqs.values() if req.row]
        none_ends = not self.departed and len(holders) == len(self.running)
        if not holders or not none_ends:
            return ()
        if not all(self._rank(req) - best > threshold for req in holders):
            return ()
        return [req for req in self.waiting if self._rank(req) == best and self.may_schedule(req)]

    def preempt(self, threshold: int) -> None:
        """See Scheduler. A request is retracted only for a waiting one whose priority is better by more than
        ``threshold``, and not if its last token is or may be in flight: its memory becomes free in any case, mostly a
        step later."""
        running, best = list(self.running.reqs), min(map(self._rank, self.waiting), default=math.inf)
        super().preempt(threshold)
        for req in running:
            if req.left and not self._rank(req) - best > threshold:
                self.wrong.append(
                    f"{req.rid} gives way, and nobody waits who is better by more than {threshold}"
                )

    def displace(self, newcomers: Iterable[Req]) -> None:
        """See Scheduler. A request is retracted for one of a body without running requests only if others of its own
        body keep running."""
        running = list(self.running.reqs)
        super().displace(newcomers)
        is_newcomer = any(not self._num_rows(req) for req in self.waiting)
        for req in running:
            if req.left and not (is_newcomer and self._num_rows(req)):
                self.wrong.append(f"{req.rid} is displaced, and it is not for a body that runs nothing")

    def candidates(self) -> Iterator[Req]:
        """See Scheduler. The policies that look at the cache are computed again; a request is left out only if it may
        not be scheduled now."""
        policy, waiting = self.config.server_args.schedule_policy, list(self.waiting)
        ordered: list[Req] = []
        for number, req in enumerate(super().candidates()):
            if number == 0 and policy in POLICIES:
                ordered = policy_order(policy, waiting, self.memory.match)
            while ordered and ordered[0] is not req and not self.may_schedule(ordered[0]):
                ordered.pop(0)
            if policy in POLICIES and (not ordered or ordered.pop(0) is not req):
                self.wrong.append(f"{req.rid} is tried before one that {policy} prefers")
            yield req

    def _next_moment(self) -> int:
        self._num_moments += 1
        return self._num_moments

    def _turn_key(self, req: Req) -> tuple[float, object]:
        """The key of the group that takes turns as one: requests of the same body and priority."""
        return self._rank(req), req.source.body or req.rid

    def _num_rows(self, req: Req) -> int:
        """Requests of its body that hold a row."""
        body = req.source.body
        return sum(
            1
            for other in self.reqs.values()
            if other.row and (other.rid == req.rid or (body and other.source.body == body))
        )

    @property
    def _takes_turns(self) -> bool:
        args = self.config.server_args
        return args.schedule_policy == "fcfs" and not args.enable_priority_scheduling

    def _some_body_runs_several(self) -> bool:
        return any(req.row and self._num_rows(req) > 1 for req in self.reqs.values())

    def _check_prefill(self, batch: StepBatch, reqs: Sequence[Req]) -> None:
        chunk, most = self.config.chunked_prefill_size, self.config.max_prefill_tokens
        num_tokens = batch.num_prompt_tokens
        most = most if chunk is None else min(chunk, most)
        if num_tokens > most and (chunk is not None or len(reqs) > 1):
            self.wrong.append(f"a prefill step computes {num_tokens} tokens, {most} are allowed")
        most_reqs = self.config.prefill_max_requests
        if most_reqs is not None and len(reqs) > most_reqs:
            self.wrong.append(f"a prefill step computes {len(reqs)} prompts, {most_reqs} are allowed")
        admitted = [req for req in reqs if req not in self._half_way]
        room = self._room_beside(batch, reqs, most)
        unfinished = [req for samples, req in zip(batch.samples.tolist(), reqs, strict=True) if not samples]
        # A step that goes before a decode step leaves out a prompt that is half-way.
        left_out = [req for req in self._half_way if req not in reqs and not req.left]
        waiting = [req for req in self.waiting if req.prefetch is None and not self._has_twin(req)]
        # Bodies. Of a body that has its first request in this step, those of other priorities still count as waiting
        # for their first: what runs is counted before a step is planned.
        running: set[object] = {
            req.source.body or req.rid for req in self.reqs.values() if req.row and req not in admitted
        }
        is_newcomer = len(reqs) == len(admitted) == 1 and (reqs[0].source.body or reqs[0].rid) not in running
        if self._may_go_before_decode and is_newcomer and not unfinished and num_tokens <= most // 4:
            self._went_before_decode, room = True, most // 4
        self._half_way = left_out + unfinished
        turns = dict(self._since)
        earlier = [req for req in self.reqs.values() if req.row and req not in admitted]
        for index, req in enumerate(admitted):
            others = (*earlier, *admitted[:index])
            other = next((other for other in others if self._waits_for(req, other)), None)
            if other is not None and not req.num_retractions:
                self.wrong.append(f"{req.rid} computes the prompt that {other.rid} computes")
            passed = self._wrongly_passed(req, waiting, running, turns, room)
            if passed is not None:
                self.wrong.append(f"{req.rid} is admitted before {passed.rid}, whose turn it is")
            running.add(self._turn_key(req))
            turns[self._turn_key(req)] = self._since[self._turn_key(req)] = self._next_moment()

    def _wrongly_passed(
        self,
        req: Req,
        waiting: list[Req],
        running: set[object],
        turns: dict[tuple[float, object], int],
        room: int | None,
    ) -> Req | None:
        """The first request of ``waiting`` that had to be admitted before ``req``, if there is one. Those that may be
        passed because ``room`` is too small for them (None: nobody), or because they are long and ``req``, which is
        short, has memory of its own, have then had a turn of their body in this
        step: they are removed from ``waiting``, and the next request of the body is tried after the first ones of all
        other bodies."""
        while True:
            before = [left for left in waiting if self._is_before(left, req, running, turns)]
            if not before:
                return None
            first = [
                left
                for left in before
                if not any(self._is_before(other, left, running, turns) for other in before)
            ]
            too_long = (
                left
                for left in first
                if (room is not None and not self._fits(left, req, room))
                or (req.is_short and not left.is_short and self._rank(left) == self._rank(req))
            )
            passed = next(too_long, None)
            if passed is None:
                return first[0]
            waiting.remove(passed)
            running.add(self._turn_key(passed))
            turns[self._turn_key(passed)] = self._next_moment()

    def _room_beside(self, batch: StepBatch, reqs: Sequence[Req], most: int) -> int | None:
        """If a half-way prompt has more than half of the step, the number of tokens left in the other half, else
        None."""
        half, scored = most - most // 2, prefill.MAX_SCORED_TOKENS
        sizes = dict(zip(reqs, (batch.seq_lens - batch.starts).tolist(), strict=True))
        for req, start, samples in zip(reqs, batch.starts.tolist(), batch.samples.tolist(), strict=True):
            if req in self._half_way and (not samples or sizes[req] > half):
                least = min(half, scored - scored // 2) if req.scores_prompt else half
                rest = req.num_tokens - start
                least = min(least, rest if samples else rest - self._lookahead)
                # On a CPU it gets half of the step's work, see ``chunks``.
                if len(reqs) > 1 and sizes[req] < least and self.config.device != "cpu":
                    self.wrong.append(f"{req.rid} gets {sizes[req]} tokens of a step, {least} are its half")
                return most - half - (sum(sizes.values()) - sizes[req])
        return None

    def _fits(self, left: Req, req: Req, room: int) -> bool:
        """Whether ``left`` would also have fitted into ``room``, or has a better priority than ``req``."""
        most = min(room, prefill.MAX_SCORED_TOKENS) if left.scores_prompt else room
        return left.num_tokens <= most or self._rank(left) < self._rank(req)

    def _is_before(
        self, left: Req, req: Req, running: Collection[object], turns: Mapping[tuple[float, object], int]
    ) -> bool:
        """Whether ``left``, which waits, had to be admitted before ``req`` by the documented order: by priority; then
        requests of bodies without a ``running`` request; then the body that has waited longer since it arrived or had a
        turn (``turns``); within a body retracted requests first, then by arrival. Other policies also depend on the
        cache, and only their rule that retracted requests go first is checked."""
        if self._rank(left) != self._rank(req):
            return self._rank(left) < self._rank(req)
        is_fresh, came_fresh = not left.num_retractions, not req.num_retractions
        if self.config.server_args.schedule_policy != "fcfs":
            return is_fresh < came_fresh
        one, other = self._turn_key(left), self._turn_key(req)
        if one == other:
            by_arrival = not left.num_retractions and self._arrivals[left.rid] < self._arrivals[req.rid]
            return is_fresh < came_fresh or (is_fresh == came_fresh and by_arrival)
        runs, other_runs = ({key, key[1]} & set(running) for key in (one, other))
        if bool(runs) != bool(other_runs):
            return not runs
        return turns[one] < turns[other]

    def _has_twin(self, req: Req) -> bool:
        """Whether another request of its body computes the same prompt, for which it waits."""
        return any(
            other.row
            and other.source.body == req.source.body != 0
            and other.committed_len < len(other.prompt_ids)
            and other.prompt_ids.tolist() == req.prompt_ids.tolist()
            for other in self.reqs.values()
        )

    def _waits_for(self, req: Req, other: Req) -> bool:
        """Whether ``req`` has to wait, because ``other`` is a sample of the same prompt and computes what ``req`` would
        find in the cache afterwards."""
        size, num_prompt = self.config.server_args.page_size, len(req.prompt_ids)
        is_sample = req.prompt_ids is other.prompt_ids and self._turn_key(req) == self._turn_key(other)
        if not is_sample or req.scores_prompt or self.config.server_args.disable_radix_cache:
            return False
        num_to_share = (num_prompt - 1) // size * size - other.shared_len
        is_computing = not other.left and other.committed_len < num_prompt
        return is_computing and num_to_share >= waiting_queue._MIN_SHARED_TOKENS

    def _rank(self, req: Req) -> float:
        args = self.config.server_args
        if not args.enable_priority_scheduling:
            return 0.0
        value = req.source.priority if req.source.priority is not None else args.default_priority_value
        if value is None:
            return math.inf
        return value if args.schedule_low_priority_values_first else -value

    # --- prefixes

    def _cached(self, req: Req, num_computed: int, num_known: int) -> None:
        """The KV of ``num_computed`` tokens of ``req`` has been computed, and ``num_known`` of its tokens are known."""
        tokens = req.token_ids()[:num_known].tolist()
        self.sharing.cache(req.source.extra_key, tokens, num_computed - self._num_rows_behind)
