"""Which waiting requests a prefill step takes, passes and leaves, decided again when it has been planned.

The planner is offered waiting requests in their order. It may stop only where a step is full or the documentation lets
it (see "Fair turns" in security.md), and may pass a request only if that is long and short ones wait behind it, or
beside a half-way prompt if it does not fit whole into the other half of the step. Samples of a prompt wait only for one
that computes pages which they would find, and nobody gives way to a sample that would then wait for another one. No
answer depends on any of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fenceline.scheduler import prefill, schedule_policy, waiting_queue
from fenceline.scheduler.req import Prefix, Req
from fenceline.scheduler.scheduler import Scheduler
from fenceline.vgpu.proving.admission import Admissions
from fenceline.vgpu.proving.events import around


@dataclass(frozen=True, slots=True)
class _Offered:
    """A request that the planner is offered, and what there is for it: free rows, the step's prompts and work, and
    whether it fits into what is kept for short requests."""

    req: Req
    num_rows: int
    num_prompts: int
    work: float
    has_share: bool


class _Offers:
    """Offers ``reqs`` one by one. ``most``: no more are asked for."""

    def __init__(self, reqs: Iterable[Req], offer: Callable[[Req], _Offered], most: float) -> None:
        self._reqs, self._offer, self._most = reqs, offer, most
        self.has_ended = False
        self.seen: list[_Offered] = []

    def __iter__(self) -> Iterator[Req]:
        for req in self._reqs:
            self.seen.append(self._offer(req))
            yield req
        self.has_ended = True

    @property
    def last(self) -> Req | None:
        """The one at which the planner has stopped, or which was the last that it might look at; None if it wanted yet
        another one, and there was none."""
        return None if self.has_ended or not self.seen else self.seen[-1].req

    @property
    def is_at_limit(self) -> bool:
        """Whether the planner might not look at another one in any case."""
        return len(self.seen) >= self._most


class Passing:
    """Follows the planner of ``scheduler``. ``wrong``: what it decided wrongly."""

    def __init__(self, scheduler: Scheduler, admissions: Admissions) -> None:
        self.wrong: list[str] = []
        self._scheduler = scheduler
        self._admissions = admissions
        self._planner = planner = scheduler.planner
        self._refused: set[str] = set()  # that have been tried, and for which there was no room
        self._num_cached: dict[str, int] = {}  # tokens of the prefixes that have been found
        around(scheduler.memory, "match", after=self._matched)
        around(planner, "_admit", after=self._tried)
        around(planner, "plan", before=self._begin)
        around(scheduler.waiting, "waits_for_sample", after=self._waits)
        any_planner: Any = planner
        admit_waiting, admit_beside = any_planner._admit_waiting, any_planner._admit_beside

        def waiting(
            plan: Any,
            reqs: Iterable[Req],
            num_running: int,
            budget: Any,
            num_waiting: Callable[[], int],
            num_short: int,
        ) -> None:
            offers = self._offers(reqs, plan, budget, prefill._MAX_PASSED if num_short else math.inf)
            admit_waiting(plan, offers, num_running, budget, num_waiting, num_short)
            self._check_waiting(offers, plan, budget, num_waiting, num_short)

        def beside(plan: Any, reqs: Iterable[Req], chunked: Req, budget: Any, num_short: int) -> None:
            most = prefill._MAX_PASSED if num_short else prefill._MAX_LOOKED_AT
            offers = self._offers(reqs, plan, budget, most)
            scored, least_work = budget.scored_tokens, budget.work / 2
            admit_beside(plan, offers, chunked, budget, num_short)
            self._was_beside = True
            self._check_beside(offers, chunked, budget, scored, least_work, num_short)

        preempted = any_planner.preempted
        any_planner.preempted = lambda reqs, *args: preempted(self._given_way_to(reqs), *args)
        any_planner._admit_waiting, any_planner._admit_beside = waiting, beside
        self._was_beside = False
        around(planner, "_add_chunk", before=self._adds)

    def _begin(self, *args: Any, **kwargs: Any) -> None:
        self._refused, self._num_cached, self._was_beside = set(), {}, False

    def _matched(self, prefix: Prefix, req: Req) -> None:
        self._num_cached[req.rid] = prefix.num_tokens

    def _tried(self, got: bool, plan: Any, req: Req, budget: Any, alone: bool) -> None:
        if not got:
            self._refused.add(req.rid)

    def _offers(self, reqs: Iterable[Req], plan: Any, budget: Any, most: float) -> _Offers:
        def offer(req: Req) -> _Offered:
            num_rows = self._scheduler.memory.rows.num_free
            return _Offered(req, num_rows, len(plan.reqs), budget.work, budget.share.has_room(req))

        return _Offers(reqs, offer, most)

    def _must_be_alone(self, req: Req) -> bool:
        """Whether it needs what is kept for short requests, too."""
        scheduler, size = self._scheduler, self._scheduler.memory.page_size
        later = self._admissions.need_of(req, scheduler.memory.match(req).match).later
        needed = math.ceil(req.num_tokens / size) * size + later
        return needed > scheduler.memory.num_pages * size - scheduler.share.tokens

    def _may_be_passed(self, req: Req, num_short: int) -> bool:
        return num_short > 0 and not req.is_short and not self._must_be_alone(req)

    def _check_waiting(
        self, offers: _Offers, plan: Any, budget: Any, num_waiting: Callable[[], int], num_short: int
    ) -> None:
        """A request that does not fit ends the step, unless short ones may pass it."""
        passed: Req | None = None
        last = offers.last
        for offered in offers.seen:
            req = offered.req
            if req.row:
                self._check(passed is None or req.is_short, f"{req.rid} passes another one and is long")
            elif req is not last and passed is None:
                may = req.rid in self._refused and self._may_be_passed(req, num_short)
                self._check(may, f"{req.rid} is passed, and must not be")
                passed = req
            elif req is not last:
                self._check(not req.is_short, f"{req.rid} is short, and is passed")
        if last is None or offers.is_at_limit:
            return
        planner = self._planner
        if last.row:
            is_whole = last.allocated_len == last.num_tokens
            self._check(not is_whole, f"the step ends behind {last.rid}, which is whole")
            return
        is_full = (
            budget.step_tokens <= 0
            or self._scheduler.memory.rows.num_free == 0
            or len(plan.reqs) == planner._max_reqs
            or (last.scores_prompt and budget.scored_tokens <= 0)
        )
        if plan.reqs:  # a first prompt is computed in any case
            is_full |= planner._prefix_work is not None and budget.work <= 0
            is_full |= plan.num_step_tokens >= planner._shared_tokens(plan, num_waiting())
        refused = last.rid in self._refused
        if passed is None:
            ends = refused and not self._may_be_passed(last, num_short)
        else:
            ends = last.rank > passed.rank or (last.is_short and (refused or not offers.seen[-1].has_share))
        self._check(is_full or ends, f"the step ends at {last.rid}, and there is no reason")

    def _check_beside(
        self,
        offers: _Offers,
        chunked: Req,
        budget: Any,
        scored: int,
        least_work: float,
        num_short: int,
    ) -> None:
        """Those that fit whole into the half of the step that is not ``chunked``'s are taken, and the others passed."""
        planner, limits_work = self._planner, self._planner._prefix_work is not None
        room = planner.step_tokens // 2
        if chunked.scores_prompt:
            scored //= 2
        last = offers.last
        rank, num_looked_at, is_blocked = chunked.rank, 0, False
        for offered in offers.seen:
            req, is_in = offered.req, offered.req.row != 0
            rank = min(rank, req.rank)
            is_full = (
                room == 0
                or offered.num_rows == 0
                or (limits_work and offered.work <= least_work)
                or (planner._max_reqs is not None and offered.num_prompts + 1 >= planner._max_reqs)
            )
            only_short = is_blocked or num_looked_at >= prefill._MAX_LOOKED_AT
            ends = is_full or req.rank > rank
            if only_short and not ends:
                if not req.is_short:
                    self._check(not is_in, f"{req.rid} is long and has no turn")
                    continue
                ends = num_looked_at >= 2 * prefill._MAX_LOOKED_AT
                ends |= not offered.has_share
            if ends:
                self._check(not is_in and req is last, f"{req.rid} is tried, and the half is full")
                return
            num_looked_at += 1
            if req.rid not in self._num_cached:
                self._scheduler.memory.match(req)
            start = self._num_cached[req.rid]
            size = req.num_tokens - start
            if not self._fits(req, start, room, scored, offered.work):
                self._check(not is_in, f"{req.rid} is beside {chunked.rid}, and {size} tokens are not {room}")
                continue
            if is_in:
                room -= size
                scored -= size if req.scores_prompt else 0
                continue
            self._check(
                req.rid in self._refused, f"{req.rid} is passed, and its {size} tokens fit into {room}"
            )
            if not self._may_be_passed(req, num_short):
                self._check(req is last, f"{req.rid} is passed, and must not be")
                return
            is_blocked = True
        self._check(
            offers.has_ended or offers.is_at_limit,
            f"nobody else is taken beside {chunked.rid}, and there is no reason",
        )

    def _fits(self, req: Req, start: int, room: int, scored: int, work: float) -> bool:
        planner, size = self._planner, req.num_tokens - start
        fits = size <= room and (size <= scored or not req.scores_prompt)
        if planner._prefix_work is None:
            return fits
        most = planner._prefix_work.max_tokens(max(work, 0.0), start)
        return fits and size <= max(most, planner.step_tokens // 4, self._scheduler.memory.tree.lookahead, 1)

    def _adds(self, plan: Any, req: Req, budget: Any) -> None:
        """Whether others had a chance beside a prompt that takes more than half of a step."""
        if req is not self._scheduler.chunked or plan.reqs or req.row == 0:
            return
        step, left = self._planner.step_tokens, req.num_tokens - req.allocated_len
        is_long = left > step - step // 2
        self._check(
            is_long == self._was_beside,
            f"others are {'' if self._was_beside else 'not '}looked for beside {req.rid}, which has {left} tokens left",
        )

    def _waits(self, waits: bool, req: Req) -> None:
        """A sample waits for pages that another one of its prompt computes, and for no others."""
        found = any(
            other.row
            and other is not req
            and other.committed_len < len(req.prompt_ids)
            and self._computes_for(other, other.shared_len, req)
            for other in self._scheduler.reqs.values()
        )
        self._check(waits == found, f"{req.rid} {'waits' if waits else 'does not wait'} for a sample")

    def _given_way_to(self, reqs: Iterable[Req]) -> Iterator[Req]:
        """``reqs``, for which running requests may have to go. Of each body and rank these are all that may be
        scheduled, up to the last one that is asked for, except samples that would wait for an earlier one of them."""
        seen: list[Req] = []
        for req in reqs:
            would_wait = self._would_wait(req, seen)
            self._check(not would_wait, f"others may have to go for {req.rid}, which would wait for a sample")
            same = [other for other in self._scheduler.waiting if _group(other) == _group(req)]
            self._check_left_out(same[: same.index(req)], seen, f"before {req.rid}")
            seen.append(req)
            yield req
        self._check_left_out(list(self._scheduler.waiting), seen, "though nobody else is left")

    def _check_left_out(self, reqs: Sequence[Req], seen: Sequence[Req], when: str) -> None:
        scheduler = self._scheduler
        most = schedule_policy.max_of_body(scheduler.config.device)
        for req in reqs:
            if req in seen or not scheduler.may_schedule(req) or self._would_wait(req, seen):
                continue
            in_body = [
                one for one in (*scheduler.reqs.values(), *seen) if one.source.body == req.source.body != 0
            ]
            num = sum(one.row > 0 or one in seen for one in set(in_body))
            self._check(most is not None and num >= most, f"{req.rid} is left out {when}")

    def _would_wait(self, req: Req, earlier: Sequence[Req]) -> bool:
        """Whether ``req`` would wait if those of ``earlier`` had been admitted."""
        size = self._scheduler.memory.page_size
        matches = [(other, self._scheduler.memory.match(other).match) for other in earlier]
        return any(
            self._computes_for(other, len(match.pages) * size + match.num_host_tokens, req)
            for other, match in matches
        )

    def _computes_for(self, other: Req, num_shared: int, req: Req) -> bool:
        """Whether ``other``, which computes its prompt behind ``num_shared`` tokens, computes pages that ``req`` would
        find, and enough of them. The last token of a prompt is computed in any case, and so are those behind the last
        whole page in front of it."""
        if self._scheduler.config.server_args.disable_radix_cache or not req.source.body or req.scores_prompt:
            return False
        whole = max(range(0, len(req.prompt_ids), self._scheduler.memory.page_size))
        is_same = _group(other) == _group(req) and other.prompt_ids is req.prompt_ids
        return is_same and whole - num_shared >= waiting_queue._MIN_SHARED_TOKENS

    def _check(self, holds: bool, text: str) -> None:
        if not holds and len(self.wrong) < 5:
            self.wrong.append(f"turns: {text}")


def _group(req: Req) -> tuple[int, int | str]:
    """Requests that wait in one line: those of a body that have the same rank."""
    return req.rank, req.source.body or req.rid
