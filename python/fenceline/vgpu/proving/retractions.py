"""Which running requests are retracted for waiting ones, computed again from the requests alone.

The order is simulated one retraction after the other: the worst priority first, then the HTTP body that has most
requests left, then the request with the fewest outputs, and of these the one with the longest prompt. Of this order as
few go as suffice: with one less, one of the requests for which they go would not fit, or would not fit beside those
that are admitted before it. For each number of retractions the memory is counted anew, page by page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.scheduler.req import Req
from fenceline.scheduler.scheduler import Scheduler
from fenceline.vgpu.proving.admission import Admissions, Need

_GivesWay = Callable[[Req, Req], bool]
# The requests that are retracted, and the ends of the prefixes of those for which they go.
_Found = tuple[list[Req], list[TreeNode]]


class _Asked:
    """Waiting requests, with a note of those that have been asked for."""

    def __init__(self, reqs: Iterable[Req]) -> None:
        self._reqs = iter(reqs)
        self._noted: list[Req] = []

    def __iter__(self) -> Iterator[Req]:
        for req in self._reqs:
            self._noted.append(req)
            yield req

    def again(self) -> Iterator[Req]:
        """All from the beginning. Only those that have not been asked for yet are taken from the queue now."""
        yield from list(self._noted)
        yield from self


class Retractions:
    """Follows the planner of ``scheduler``. ``wrong``: what it decided wrongly."""

    def __init__(
        self, scheduler: Scheduler, admissions: Admissions, slacks: Sequence[float] = (-1e-6, 1e-6)
    ) -> None:
        """``slacks``: what sums of expected tokens may differ by. Rounding decides about a token that just fits."""
        self.wrong: list[str] = []
        self._slacks = slacks
        self._scheduler = scheduler
        self._admissions = admissions
        planner: Any = scheduler.planner
        preempted: Callable[..., _Found] = planner.preempted
        displaced: Callable[..., _Found] = planner.displaced

        def preempts(waiting: Iterable[Req], running: Sequence[Req], expected: Any, *args: Any) -> _Found:
            asked, threshold = _Asked(waiting), args[1]
            found = preempted(asked, running, expected, *args)
            self._compare(found[0], asked, expected, 0, lambda one, req: one.rank - req.rank > threshold)
            return found

        def displaces(newcomers: Iterable[Req], running: Sequence[Req], expected: Any, *args: Any) -> _Found:
            asked = _Asked(newcomers)
            found = displaced(asked, running, expected, *args)
            self._compare(found[0], asked, expected, 1, lambda one, req: True)
            return found

        planner.preempted, planner.displaced = preempts, displaces

    def _compare(
        self, found: list[Req], waiting: _Asked, expected: Any, num_kept: int, gives_way: _GivesWay
    ) -> None:
        """``expected``: the tokens that each running request is expected to ask for. Each body keeps ``num_kept``."""
        of_rid = dict(zip((req.rid for req in self._scheduler.running.reqs), expected.tolist(), strict=True))
        order = self._order(num_kept)
        right = [self._right(waiting.again(), order, of_rid, gives_way, slack) for slack in self._slacks]
        if found not in right and len(self.wrong) < 5:
            names = [[req.rid for req in reqs] for reqs in (found, right[0])]
            self.wrong.append(f"retractions: {names[0]} give way to waiting requests, {names[1]} are right")

    def _order(self, num_kept: int) -> list[Req]:
        """The running requests in the order in which they would be retracted."""
        left = Counter(_body(req) for req in self._scheduler.reqs.values() if req.row)
        rest, order = list(self._scheduler.running.reqs), list[Req]()
        while free := [req for req in rest if left[_body(req)] > num_kept]:
            worst = max(req.rank for req in free)
            most = max(left[_body(req)] for req in free if req.rank == worst)
            equals = [req for req in free if req.rank == worst and left[_body(req)] == most]
            order.append(min(equals, key=lambda req: (len(req.output_ids), -len(req.prompt_ids))))
            rest.remove(order[-1])
            left[_body(order[-1])] -= 1
        return order

    def _right(
        self,
        waiting: Iterable[Req],
        order: Sequence[Req],
        expected: dict[str, float],
        gives_way: _GivesWay,
        slack: float,
    ) -> Sequence[Req]:
        planner, memory = self._scheduler.planner, self._scheduler.memory
        first: list[Need] = []
        num_gone = num_new = 0
        for req in waiting if order else ():
            if num_new >= planner.step_tokens or len(first) == planner._max_reqs:
                break
            prefix = memory.match(req)
            num_left = planner.step_tokens - num_new
            if first and planner._chunk_size is None and req.num_tokens - prefix.num_tokens > num_left:
                break  # it is not split, so another step has it
            first.append(self._admissions.need_of(req, prefix.match))
            num = num_gone
            while not self._all_fit(first, order[:num], expected, slack):
                if num == len(order) or not gives_way(order[num], req):
                    return order[:num_gone]
                num += 1
            num_gone = num
            num_new += req.num_tokens - prefix.num_tokens
        return order[:num_gone]

    def _all_fit(
        self, needs: Sequence[Need], gone: Sequence[Req], expected: dict[str, float], slack: float
    ) -> bool:
        """Whether all of ``needs`` could be admitted, one after the other, if the requests of ``gone`` had left."""
        scheduler, admissions = self._scheduler, self._admissions
        size, num_rows = scheduler.memory.page_size, scheduler.memory.rows.num_free + len(gone)
        holders = [req for req in scheduler.reqs.values() if req.row and req not in gone]
        running = [req for req in scheduler.running.reqs if req not in gone]
        used = set[int]().union(*map(admissions.pages_of, holders))
        available = scheduler.memory.num_pages - len(used)
        left: float = available * size - int(sum(expected[req.rid] for req in running) + slack)
        short = [req for req in running if req.is_short]
        for number, need in enumerate(needs):
            num_pages = need.num_pages + len(need.match_pages - used)
            needed = num_pages * size + need.later
            alone = not running and number == 0
            if not admissions.has_room(need.req, num_pages, needed, available, left, num_rows, short, alone):
                return False
            used |= need.match_pages
            available, left, num_rows = available - num_pages, left - needed, num_rows - 1
            short += [need.req] if need.req.is_short else []
        return True


def _body(req: Req) -> int | str:
    return req.source.body or req.rid
