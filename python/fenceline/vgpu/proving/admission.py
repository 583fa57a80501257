"""Whether requests are admitted and wait as the memory rule says, computed again from the requests alone.

A waiting request is admitted if its pages can be allocated, and if these and all that it may still ask for fit into
what is available less the share of their remaining tokens that running requests are expected to ask for. Nothing of
this changes an answer: a wrong sum makes requests wait, or retracts them, for nothing. With drafts only the number of
available pages is compared, because how many tokens of a step count is known when it has run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fenceline.model_executor.step import StepBatch
from fenceline.scheduler import prefill, schedule_policy
from fenceline.scheduler import scheduler as scheduler_module
from fenceline.scheduler.prefill import PrefillPlan
from fenceline.scheduler.req import Req
from fenceline.vgpu.proving.events import around
from fenceline.vgpu.proving.watched import WatchedScheduler


@dataclass(frozen=True, slots=True)
class _Victim:
    """A retracted request: the pages that it had or kept in the tree, the tokens that it might have asked for, and the
    number of pages that it had itself, which is another one if the same plan has admitted it again. ``own``: those of
    ``pages`` that were not in the tree before it was retracted, which may have put them there."""

    pages: set[int]
    expected: int
    req: Req
    num_pages: int
    own: set[int]


@dataclass(frozen=True, slots=True)
class _Memory:
    """Before a plan: pages that are used, tokens that running requests may ask for, free rows, and short requests that
    have memory."""

    used: set[int] = field(default_factory=set)
    expected: int = 0
    num_rows: int = 0
    short: list[Req] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Need:
    """What an admitted request gets: new pages, those of its prefix on the device, and the tokens that it may still ask
    for."""

    req: Req
    num_pages: int
    match_pages: set[int]
    later: int


class Admissions:
    """Follows the planner of ``scheduler``. ``wrong``: what it decided wrongly."""

    def __init__(self, scheduler: WatchedScheduler) -> None:
        self.wrong: list[str] = []
        self._scheduler = scheduler
        self._size = scheduler.memory.page_size
        num_pages, num_rows = scheduler.memory.num_pages, scheduler.memory.rows.size
        # What is kept for short requests: tokens and rows.
        self._kept = (
            num_pages * self._size // schedule_policy._SHORT_MEMORY,
            num_rows // schedule_policy._SHORT_ROWS,
        )
        if self._kept[0] < schedule_policy._NUM_SHORT * schedule_policy._LEAST_SHORT_TOKENS:
            self._kept = 0, 0
        num_steps = vars(scheduler_module)["max_prefills_in_row"](
            scheduler.config.device
        )  # or that of ``limits``
        self._most_in_row = num_steps * scheduler.planner.step_tokens
        self._step_tokens = 0  # of the step that is being planned
        self._left = 0.0  # tokens that the present plan may still give away
        self._used: set[int] = set()  # pages that some request holds or keeps in the tree
        self._short: list[Req] = []  # that run, or that the present plan has admitted
        self._lengths: dict[str, int] = {}  # of each request after its latest step
        around(scheduler, "launch", before=self._launched)
        # The share of their remaining tokens that running requests are expected to ask for: at first, and now.
        self._first_ratio = min(0.7 * scheduler.config.server_args.schedule_conservativeness, 1.0)
        self._ratio = self._first_ratio
        around(scheduler, "accept", after=self._accepted)
        self._num_victims = 0  # running requests that the present plan has retracted for waiting ones
        self._retracts = False
        self._victim: _Victim | None = None  # the last of them
        self._plan = _Memory()  # what there was for the present plan
        self._needs: list[Need] = []  # of the requests that it has admitted
        self._num_admitted = 0
        self._was_refused = False  # whether the present plan has found no memory for a request
        around(scheduler, "retract_for_waiting", before=self._begin_retraction, after=self._end_retraction)
        around(scheduler, "retract", before=self._retracts_one)
        # Running requests that the present decode step has retracted for its memory.
        self._num_for_memory: int | None = None
        around(scheduler, "make_room", before=self._makes_room, after=self._made_room)
        around(scheduler, "displace", before=self._displaces)
        self._was_displacing = False
        planner: Any = scheduler.planner
        around(planner, "plan", before=self._begin, after=self._end)
        # Prompt tokens since the latest decode step, and whether a short one has gone before the next since then.
        self._in_row, self._short_one_went = 0, False
        self._was_asked = False  # the planner, by the present turn of the loop
        self._some_run = self._some_body_runs_several = False  # when it began
        self._best: Req | None = (
            None  # the first that waits, if it fits once all that give way to it are retracted
        )
        self._short_one_waits = ""  # the request that may go before a decode step in this turn, which is due
        around(scheduler, "plan_prefill", before=self._begin_turn, after=self._end_turn)
        admit: Callable[..., bool] = planner._admit

        def admitted(plan: Any, req: Req, budget: Any, alone: bool) -> bool:
            match = scheduler.memory.match(req).match
            right, needed = self._fits(req, match, alone)
            need = self.need_of(req, match)
            could = self._has_turn(req, plan, budget)
            tokens_before = budget.memory_tokens
            got = admit(plan, req, budget, alone)
            taken = tokens_before - budget.memory_tokens
            self._check(
                taken == (needed if got else 0), f"{req.rid} counts for {taken} tokens, {needed} are right"
            )
            if got != right and (could or got) and scheduler.config.speculative is None:
                self._tell(
                    f"{req.rid} {'is admitted' if got else 'waits'}: it needs {needed} tokens of {self._left}"
                )
            self._num_admitted += got
            self._was_refused = self._was_refused or not got
            if got:
                self._needs.append(need)
                self._left -= needed
                self._used |= self.pages_of(req)
                self._short += [req] if req.is_short else []
            return got

        planner._admit = admitted

    def _accepted(self, _: object, message: Any) -> None:
        req = self._scheduler.reqs.get(message.rid)
        if req is not None:
            is_short = schedule_policy._NUM_SHORT * self._final(req) <= self._kept[0]
            if req.is_short != is_short:
                self._tell(f"{req.rid} of {self._final(req)} tokens is {'' if req.is_short else 'not '}short")

    def _launched(self, batch: StepBatch, reqs: Sequence[Req]) -> None:
        lengths = batch.seq_lens.tolist()
        if batch.is_decode:
            # It sinks to 14 % in 600 decode steps.
            self._ratio = max(self._ratio - 0.86 * self._first_ratio / 600, 0.14 * self._first_ratio)
            self._in_row, self._short_one_went = 0, False
        self._lengths.update(zip((req.rid for req in reqs), lengths, strict=True))

    def _retracted(self, *args: object) -> None:
        """Memory ran short: what the requests that are left have needed says how much they may still need."""
        reqs = self._scheduler.running.reqs
        num_decoded = sum(len(req.output_ids) for req in reqs)
        self._ratio = min(
            (num_decoded + 20 * len(reqs)) / max(sum(req.max_new_tokens for req in reqs), 1), 1.0
        )

    def _begin_retraction(self, threshold: int | None, newcomer: Req | None) -> None:
        self._num_victims, self._victim = len(self._scheduler.running), None
        self._retracts = True

    def _end_retraction(self, _: object, threshold: int | None, newcomer: Req | None) -> None:
        self._num_victims -= len(self._scheduler.running)
        self._retracts = False

    def _makes_room(self, shape: object) -> None:
        self._num_for_memory = 0

    def _made_room(self, room: object, shape: object) -> None:
        if self._num_for_memory and room is not None:
            self._retracted()
        self._num_for_memory = None

    def _displaces(self, newcomers: object) -> None:
        self._was_displacing = True

    def _retracts_one(self, req: Req) -> None:
        if self._num_for_memory is not None:
            self._num_for_memory += 1
        if self._retracts:
            pages, cached = self.pages_of(req), self._scheduler.memory.tree.all_pages().tolist()
            own = pages.difference(cached)
            self._victim = _Victim(pages, self._expected_of(req), req, len(req.pages), own)

    def _expected_of(self, req: Req) -> int:
        """The most tokens for which a running request may still need memory, as far as they count."""
        return min(max(self._final(req) - self._lengths[req.rid], 0), prefill.CLIP_NEW_TOKENS)

    def _begin_turn(self) -> None:
        self._was_asked = self._was_displacing = False
        most = self._scheduler.max_prefill_in_row
        self._check(
            most == self._most_in_row, f"{most} prompt tokens may come in a row, not {self._most_in_row}"
        )
        # Before any request is retracted: afterwards a body may run only one.
        reqs = self._scheduler.reqs.values()
        bodies = Counter(req.source.body or req.rid for req in reqs if req.row)
        self._some_body_runs_several = max(bodies.values(), default=0) > 1
        self._some_run = len(self._scheduler.running) > 0
        if not self._some_run:
            self._in_row, self._short_one_went = 0, False
        self._scheduler.is_decode_due = self._is_due
        self._short_one_waits = self._short_newcomer() if self._is_due and self._may_go_first else ""
        self._best = self._for_which_others_give_way()

    def _for_which_others_give_way(self) -> Req | None:
        """The request whose turn it is, if it fits once all running ones of worse priority have been retracted. What
        drafts need is not computed here. While some request is about to end, it may wait for that one's memory."""
        scheduler = self._scheduler
        priority, running = scheduler.config.priority, scheduler.running.reqs
        threshold = None if priority is None else priority.preemption_threshold
        holders = [req for req in (*scheduler.reqs.values(), *scheduler.departed) if req.row]
        if threshold is None or scheduler.config.speculative is not None or len(holders) != len(running):
            return None
        req = next(scheduler.waiting.in_turn(scheduler.may_schedule), None)
        if req is None:
            return None
        stay = [other for other in running if other.rank <= req.rank + threshold]
        num_rows = scheduler.memory.rows.num_free + len(running) - len(stay)
        used = set[int]().union(*map(self.pages_of, stay))
        available = scheduler.memory.num_pages - len(used)
        left = available * self._size - int(sum(map(self._expected_of, stay)) * self._ratio + 1e-6)
        need = self.need_of(req, scheduler.memory.match(req).match)
        num_pages = need.num_pages + len(need.match_pages - used)
        needed = num_pages * self._size + need.later
        short = [other for other in stay if other.is_short]
        return req if self.has_room(req, num_pages, needed, available, left, num_rows, short) else None

    @property
    def _is_due(self) -> bool:
        """Whether a decode step has to come before another full step of prompts."""
        return self._some_run and self._in_row + self._scheduler.planner.step_tokens > self._most_in_row

    @property
    def _may_go_first(self) -> bool:
        """Whether a short prompt of a body that runs nothing may still go before that decode step."""
        return self._takes_turns and self._some_body_runs_several and not self._short_one_went

    @property
    def _takes_turns(self) -> bool:
        config = self._scheduler.config
        return config.server_args.schedule_policy == "fcfs" and config.priority is None

    def _short_newcomer(self) -> str:
        """The first request that fits whole into a quarter of a step. Of each body that runs nothing, in turn, the
        first that may be scheduled is looked at, and no more bodies than the engine looks at."""
        scheduler = self._scheduler
        running = {req.source.body or req.rid for req in scheduler.reqs.values() if req.row}
        first: dict[object, Req] = {}
        for req in scheduler.waiting:
            body = req.source.body or req.rid
            if body not in running and body not in first and scheduler.may_schedule(req):
                first[body] = req
        quarter = scheduler.planner.step_tokens // 4
        for req in list(first.values())[: scheduler_module._MAX_NEWCOMERS]:
            most = min(quarter, prefill.MAX_SCORED_TOKENS) if req.scores_prompt else quarter
            if req.num_tokens - scheduler.memory.match(req).num_tokens <= most:
                return req.rid
        return ""

    def _end_turn(self, plan: PrefillPlan | None) -> None:
        """Prompts go before the next decode step as long as their tokens, with a quarter of a step for a short one,
        leave room for another whole step. Then a short prompt of a body that runs nothing may go, once."""
        scheduler = self._scheduler
        is_due = self._is_due
        left = scheduler.chunked is not None or (
            len(scheduler.waiting) > 0 and scheduler.memory.rows.num_free > 0
        )
        if plan is None and left and not is_due and not self._was_asked:
            self._tell("prompts wait for a decode step, and it is not due")
        if self._short_one_waits and not self._was_asked:
            self._tell(f"{self._short_one_waits} is short, and is not tried before the decode step")
        best = self._best
        if self._was_asked and best is not None and not best.row:
            self._tell(f"nobody gives way to {best.rid}, which would fit then")
        if plan is not None:
            is_last = scheduler.chunked is None and not scheduler.waiting
            least = (self._most_in_row if is_last else self._step_tokens) // 4
            self._in_row += max(plan.batch.num_prompt_tokens, least)
            said = scheduler.prefill_in_row
            self._check(
                said == self._in_row, f"{said} prompt tokens in a row are counted, not {self._in_row}"
            )

    def _check_turn(self, step_tokens: int) -> None:
        """Whether the planner may be asked for a step of so many tokens now."""
        scheduler, step = self._scheduler, self._scheduler.planner.step_tokens
        self._was_asked, self._step_tokens = True, step_tokens
        if scheduler.chunked is None and self._takes_turns and self._some_body_runs_several:
            self._check(
                self._was_displacing,
                "a body runs several requests, and none gives way to bodies that run nothing",
            )
        may_retract = scheduler.config.priority is not None or (
            self._takes_turns and self._some_body_runs_several
        )
        self._check(
            scheduler.chunked is not None or may_retract or scheduler.memory.rows.num_free > 0,
            "a step of prompts is planned, and there is no row for any",
        )
        if not self._is_due:
            self._check(step_tokens == step, f"a step may have {step_tokens} tokens, {step} are right")
            return
        self._check(
            self._may_go_first and step_tokens == step // 4,
            f"a step of {step_tokens} prompt tokens is planned, and a decode step is due",
        )
        self._short_one_went = True

    def _check(self, holds: bool, text: str) -> None:
        if not holds:
            self._tell(text)

    def _end(self, plan: PrefillPlan | None, *args: Any, **kwargs: Any) -> None:
        """Requests are retracted for waiting ones only if one of these is admitted then. If the plan ends before the
        step is full and though there are memory and rows, the request for which the last one gave way may have to wait:
        from some number of tokens on no further prompt joins a step, and a step may do only so much work on a CPU."""
        planner = self._scheduler.planner
        is_full = plan is not None and (
            plan.num_new_tokens >= self._step_tokens
            or len(plan.reqs) == planner._max_reqs
            or self._step_tokens < planner.step_tokens  # one prompt alone, before a decode step that is due
        )
        no_row = self._scheduler.memory.rows.num_free == 0
        if self._num_victims and not self._num_admitted:
            self._tell(f"{self._num_victims} requests are retracted for nobody")
        elif (
            self._num_victims
            and self._victim is not None
            and self._scheduler.config.speculative is None
            and (is_full or no_row or self._was_refused or all(req.row for req in self._scheduler.waiting))
        ):
            self._check(
                not self._all_fit_beside(self._victim),
                f"{self._victim.req.rid} is retracted, and without that the same requests would be admitted",
            )
        self._num_victims = 0

    def _all_fit_beside(self, victim: _Victim) -> bool:
        """Whether all that the plan has admitted would have fitted beside ``victim``, which was retracted for them."""
        used = self._plan.used | victim.pages
        shared = used - victim.own  # which cost a request nothing
        available = self._scheduler.memory.num_pages - len(used)
        expected = int((self._plan.expected + victim.expected) * self._ratio + 1e-6)
        left, num_rows = available * self._size - expected, self._plan.num_rows - 1
        short = [*self._plan.short, *([victim.req] if victim.req.is_short else [])]
        for need in self._needs:
            if need.req.rid == victim.req.rid:  # admitted again at once
                continue
            num_pages = need.num_pages + len(need.match_pages - shared)
            needed = num_pages * self._size + need.later
            if not self.has_room(
                need.req, num_pages, needed, available, left, num_rows, short, victim=victim
            ):
                return False
            shared |= need.match_pages - victim.own
            available, left, num_rows = available - num_pages, left - needed, num_rows - 1
            short += [need.req] if need.req.is_short else []
        return True

    def _check_batch(self) -> None:
        """What the running batch says of its requests."""
        running, exact = self._scheduler.running, self._scheduler.config.speculative is None
        for name, said, right in (
            ("rows", running._rows, [req.row for req in running.reqs]),
            ("capacities", running._capacity, [len(req.pages) * self._size for req in running.reqs]),
            ("final lengths", running._final_lens, [self._final(req) for req in running.reqs]),
            ("short ones", running._is_short, [req.is_short for req in running.reqs]),
            ("lengths", running._allocated_lens, [self._lengths[req.rid] for req in running.reqs if exact]),
        ):
            if said.tolist() != right and (exact or name != "lengths"):
                self._tell(f"the running batch has {name} {said.tolist()}, {right} are right")

    def _begin(self, waiting: object, step_tokens: int, *args: Any, **kwargs: Any) -> None:
        scheduler = self._scheduler
        self._check_turn(step_tokens)
        self._num_admitted, self._was_refused = 0, False
        self._check_batch()
        ratio = scheduler.ratio.value
        self._check(
            math.isclose(ratio, self._ratio), f"the ratio of new tokens is {ratio}, {self._ratio} is right"
        )
        holders = [req for req in (*scheduler.reqs.values(), *scheduler.departed) if req.row]
        self._used = set[int]().union(*map(self.pages_of, holders))
        available = scheduler.memory.num_pages - len(self._used)
        if scheduler.memory.num_available_pages != available:
            said = scheduler.memory.num_available_pages
            self._tell(f"{said} pages are said to be available, {available} are")
        expected = sum(map(self._expected_of, scheduler.running.reqs))
        self._left = available * self._size - int(expected * scheduler.ratio.value + 1e-6)
        chunked = [] if scheduler.chunked is None else [scheduler.chunked]
        self._short = [req for req in (*scheduler.running.reqs, *chunked) if req.is_short]
        self._check_share(args[4])
        self._plan = _Memory(set(self._used), expected, scheduler.memory.rows.num_free, list(self._short))
        self._needs = []

    def _check_share(self, share: Any) -> None:
        """What is kept for short requests, less what those that run hold of it."""
        short, (tokens, rows) = self._short, self._kept
        right = (
            max(tokens - sum(len(req.pages) for req in short) * self._size, 0),
            max(rows - len(short), 0),
            sum(map(self._final, short)),
        )
        said = share.kept_tokens, share.kept_rows, share.final_tokens
        self._check(said == right, f"tokens, rows and lengths of short ones are {said}, {right} are right")

    def _fits(self, req: Req, match: Any, alone: bool) -> tuple[bool, int]:
        """Whether the memory rule admits ``req``, and the tokens that it needs."""
        need = self.need_of(req, match)
        num_pages = need.num_pages + len(need.match_pages - self._used)
        needed = num_pages * self._size + need.later
        available, num_rows = (
            self._scheduler.memory.num_pages - len(self._used),
            self._scheduler.memory.rows.num_free,
        )
        return self.has_room(
            req, num_pages, needed, available, self._left, num_rows, self._short, alone
        ), needed

    def has_room(
        self,
        req: Req,
        num_pages: int,
        needed: int,
        available: int,
        left: float,
        num_rows: int,
        short: Sequence[Req],
        alone: bool = False,
        victim: _Victim | None = None,
    ) -> bool:
        """Whether ``req``, which gets ``num_pages`` and may need ``needed`` tokens, fits into ``available`` pages, of
        which ``left`` tokens may be given away, and into the rows, beside the ``short`` requests that have memory.
        ``alone``: nothing else runs, so it may have all. ``victim``: one of ``short``, as it was when it ran."""
        # Those that are only thought to be admitted have no pages yet.
        pages = {other.rid: len(other.pages) or math.ceil(other.num_tokens / self._size) for other in short}
        if victim is not None and victim.req.rid in pages:
            pages[victim.req.rid] = victim.num_pages
        held = sum(pages.values()) * self._size
        if req.is_short and sum(self._final(other) for other in (*short, req)) <= self._kept[0]:
            left = available * self._size
        else:
            left -= 0 if req.is_short else max(self._kept[0] - held, 0)
        has_row = num_rows > (0 if req.is_short else max(self._kept[1] - len(short), 0))
        return has_row and num_pages <= available and (needed <= left or alone)

    def need_of(self, req: Req, match: Any) -> Need:
        """What ``req`` gets if it is admitted with the cached prefix ``match``."""
        spare = self._scheduler.running.largest.num_slots - 1
        later = min(self._final(req) - req.num_tokens + 1, prefill.CLIP_NEW_TOKENS) + spare
        num_pages = math.ceil(req.num_tokens / self._size) - len(match.pages)
        return Need(req, num_pages, set(match.pages.tolist()), later)

    def _has_turn(self, req: Req, plan: Any, budget: Any) -> bool:
        """Whether the step has room for ``req``, or a part of it."""
        planner, prefix = self._scheduler.planner, self._scheduler.memory.match(req)
        whole = planner._chunk_size is None and plan.reqs
        if whole and req.num_tokens - prefix.num_tokens > budget.step_tokens:
            return False
        return planner._chunk_tokens(req, prefix.num_tokens, budget) > 0

    def pages_of(self, req: Req) -> set[int]:
        """Its own pages, and those of the tree that it keeps there."""
        shared = [] if req.node is None else [node.pages.tolist() for node in req.node.path()]
        return set(req.pages).union(*shared)

    def _final(self, req: Req) -> int:
        """The tokens whose KV it has when it has all its tokens."""
        return len(req.prompt_ids) + max(req.max_new_tokens, 1) - 1

    def _tell(self, text: str) -> None:
        if len(self.wrong) < 5:
            self.wrong.append(f"admission: {text}")
