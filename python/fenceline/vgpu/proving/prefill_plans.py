"""What the planner of prefill steps decides about random requests in a random memory, decided again.

The planner needs no device, so it is asked at the end of each run about many small states that the run itself seldom
comes to: prompts that just fit, prefixes that several requests share, short requests beside long ones, scored prompts
and limits on a step's prompts and work. What is right is computed from the requests and the pages alone. What is left
of a step or of memory is not kept, but summed up anew from the parts decided so far whenever it is asked for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.mem_cache.tree.radix_cache import RadixCache
from fenceline.memory_order import LeasePool, Points
from fenceline.memory_order.device import CpuStream
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor.step import Chunk
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler import prefill, schedule_policy
from fenceline.scheduler.prefill import PrefillPlan, PrefillPlanner
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.scheduler.schedule_policy import PrefixWork, ShortShare, StepSharing
from fenceline.vgpu.proving.admission import Admissions, Need
from fenceline.vgpu.proving.events import around
from fenceline.vgpu.proving.limits import small_limits
from fenceline.vgpu.proving.retractions import Retractions

_NUM_SERVERS = 24  # that are asked at the end of a run
_NUM_STEPS = 3  # of each
_NUM_TOKENS = 4  # in the vocabulary, so that prompts often begin alike


def compare_prefill_plans(random: Random) -> str:
    """The first decision that is not right, "" if all are."""
    wrong = _wrong_sizes(random)
    with small_limits("scheduler.prefill", "scheduler.schedule_policy"):
        for _ in range(_NUM_SERVERS):
            vars(prefill)["MAX_SCORED_TOKENS"] = random.choice((5, 6, 7))
            wrong = wrong or _Server(random).wrong()
    return wrong and f"prefill plans: {wrong}"


class _Rule(Admissions):
    """The memory rule alone, of requests that no scheduler has."""

    def __init__(self, server: Any, num_tokens: int, num_rows: int) -> None:
        self._scheduler, self._size, self._kept = server, server.memory.page_size, (num_tokens, num_rows)


@dataclass(frozen=True, slots=True)
class _Part:
    """So many tokens of a prompt, behind ``start``."""

    req: Req
    start: int
    size: int


def _wrong_sizes(random: Random) -> str:
    """Of what a step's limits and what is kept for short requests are derived from: an engine's model and memory."""
    model: Any = SimpleNamespace(
        hidden_size=random.randint(1, 40),
        num_heads=random.randint(1, 4),
        num_kv_heads=random.randint(1, 4),
        head_dim=random.randint(1, 9),
        active_mlp_size=random.randint(1, 90),
    )
    width = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim + 3 * model.active_mlp_size
    products, attention = model.hidden_size * width, 2 * model.num_heads * model.head_dim
    work = PrefixWork.of(model, "cpu")
    even = 0 if work is None else work.even_tokens
    # The most tokens whose attention takes no longer than the products of one.
    if not even * attention <= max(products, attention) < (even + 1) * attention:
        return f"attention to {even} tokens is said to take as long as {products} products, one takes {attention}"
    least = schedule_policy._SHORT_MEMORY * schedule_policy._NUM_SHORT * schedule_policy._LEAST_SHORT_TOKENS
    num_tokens, num_rows = least + random.choice((-1, 0, 1, 999)), random.randint(1, 99)
    share = ShortShare.of(num_tokens, num_rows)
    right = (
        (0, 0)
        if num_tokens < least
        else (num_tokens // schedule_policy._SHORT_MEMORY, num_rows // schedule_policy._SHORT_ROWS)
    )
    if (share.tokens, share.rows) != right:
        return f"of {num_tokens} tokens and {num_rows} rows {share} are kept, {right} are right"
    return ""


class _Server:
    """Requests that wait, run, or have left their pages to the prefix tree."""

    def __init__(self, random: Random) -> None:
        self._random = random
        # About each of these something is decided that other states seldom come to.
        is_beside, is_crowded = random.choice(((False, False), (False, False), (True, False), (False, True)))
        size, lookahead = random.choice((1, 2, 4)), random.choice((0, 0, 1, 2))
        pages = LeasePool("pages", 1 + random.randint(24, 64) // size)
        rows = LeasePool("rows", 1 + random.randint(2, 4 if is_crowded else 9))
        tree = RadixCache(pages, size, random.random() < 0.1, lookahead)
        self.memory = RequestMemory(pages, rows, tree, size)
        self._num_rows = rows.num_free
        self._streams = [CpuStream(name, frozenset()) for name in StreamName]
        for stream in self._streams:
            stream.lags = True
        self.chunk_size = random.choice((None, random.randint(6, 14), random.randint(6, 14)))
        if is_beside:
            self.chunk_size = random.randint(8, 14)
        self.even = random.choice((None, None, 1, 4)) if self.chunk_size else None
        self.cost, self.min_shared = random.randint(1, 12), random.choice((1, 5, 9, 99))
        self.max_reqs = random.choice((None, None, 1, 2, 3))
        spare = random.choice((0, 0, 2))
        self.planner = PrefillPlanner(
            self.memory,
            self.chunk_size,
            random.randint(9 if is_beside else 6, 14),
            StepSharing(self.cost, self.min_shared),
            self.max_reqs,
            spare,
            None if self.even is None else PrefixWork(self.even),
        )
        num_tokens = self.memory.num_pages * size if random.random() < 0.7 else 0
        self.kept = num_tokens // schedule_policy._SHORT_MEMORY, self._num_rows // schedule_policy._SHORT_ROWS
        if not self.kept[0]:
            self.kept = 0, 0
        self.rule = _Rule(self, *self.kept)
        self.has_ranks = random.random() < (0.6 if is_crowded else 0.4)
        self._all_give_way = random.random() < 0.5  # if there are ranks
        self._longest = (
            3 if is_beside else random.choice((14, 14, 3))
        )  # what a prompt may have in common with others
        self._scores = random.choice((0.1, 0.8 if is_beside else 0.1, 0.8))  # how often a prompt is scored
        self._num_reqs = 0
        self._stems = [self._tokens(14) for _ in range(1 if is_crowded else random.choice((1, 2, 4)))]
        self._shares = (
            1.0 if is_crowded else random.choice((0.2, 0.8))
        )  # how often a prompt begins as others do
        # As a scheduler has them.
        self.running: Any = SimpleNamespace(reqs=[], largest=SimpleNamespace(num_slots=spare + 1))
        self.reqs: dict[str, Req] = {}
        self.chunked: Req | None = None
        if is_beside or (self.even is not None and random.random() < 0.5):
            self._is_half_way(self._request(random.randint(12, 28)))
        for _ in range(9 if is_crowded else random.randint(0, 4 if is_beside else 9)):
            self._has_run()
        self.waiting = [self._request() for _ in range(random.randint(1, 8))]
        if (
            random.random() < 0.2
        ):  # it needs all memory, or just leaves or does not leave what is kept for short ones
            most = self.memory.num_pages * size
            self.waiting[0] = self._request(random.choice((most, most - self.kept[0] - random.randint(0, 6))))
        if self.has_ranks:
            self.waiting.sort(key=lambda req: req.rank)
        self._retractions = Retractions(self, self.rule, (1e-6,))  # type: ignore[arg-type]

    # --- requests

    def _tokens(self, num: int) -> list[int]:
        return [self._random.randrange(_NUM_TOKENS) for _ in range(num)]

    def _request(self, num_tokens: int | None = None) -> Req:
        """One of random length, or one of ``num_tokens`` that comes before others."""
        random = self._random
        self._num_reqs += 1
        kept = random.randint(0, self._longest) if random.random() < self._shares else 0
        tokens = random.choice(self._stems)[:kept]
        tokens += self._tokens(min(random.choice((0, 1, 2, 4, 8)), self._longest))
        tokens = tokens or self._tokens(1)
        if num_tokens is not None:
            tokens = self._tokens(num_tokens)
        num_new = random.choice((1, 1, 2, 3, 5, 9))
        scored = random.random() < self._scores
        source = TokenizedGenerateReq(
            f"r{self._num_reqs}",
            array("i"),
            SamplingParams(max_new_tokens=num_new),
            return_logprob=scored,
            logprob_start_len=random.randint(0, len(tokens) - 1) if scored else -1,
            body=random.choice((0, 1, 1, 1, 2)),
        )
        is_back = random.random() < 0.2 and num_tokens is None
        final_len = len(tokens) + num_new - 1
        return Req(
            source,
            np.array(tokens, np.int32),
            frozenset(),
            0,
            num_new,
            1,
            rank=random.randrange(3) if self.has_ranks and num_tokens is None else 0,
            is_short=schedule_policy._NUM_SHORT * final_len <= self.kept[0],
            output_ids=self._tokens(random.randrange(num_new)) if is_back else [],
            was_admitted=is_back,
        )

    def _is_admitted(self, req: Req) -> bool:
        """Whether there is memory for ``req``, which it has then got."""
        memory, prefix = self.memory, self.memory.match(req)
        memory.tree.lock(prefix.match.host_node)
        num_pages = math.ceil(req.num_tokens / memory.page_size) - len(prefix.match.pages)
        if not memory.rows.num_free or num_pages > memory.num_available_pages:
            memory.tree.unlock(prefix.match.host_node)
            return False
        memory.admit(req, prefix)
        req.last_flight = Points.of(self._random.choice(self._streams).record())
        return True

    def _is_half_way(self, req: Req) -> None:
        """A step has computed a part of its prompt."""
        if self._is_admitted(req):
            first = max(req.allocated_len, 1)
            req.allocated_len = req.committed_len = self._random.randint(
                first, max(first, req.num_tokens - 4)
            )
            self.reqs[req.rid] = self.chunked = req

    def _has_run(self) -> None:
        """A request that still runs, or has left."""
        req, memory = self._request(), self.memory
        req.rank = 2 if self.has_ranks and self._all_give_way else req.rank
        if not self._is_admitted(req):
            return
        req.allocated_len = req.committed_len = req.num_tokens
        if self._random.random() < 0.7:
            memory.cache_prompt(req)
        if self._random.random() < 0.4:
            req.left = True
            memory.release(req)
            return
        if memory.num_available_pages and self._random.random() < 0.5:
            memory.grow(req, 1)
        self._runs(req)

    def _runs(self, req: Req) -> None:
        if len(req.output_ids) + 1 < req.max_new_tokens:
            req.output_ids.append(0)
        self.running.reqs.append(req)
        self.reqs[req.rid] = req

    def _num_running(self, req: Req) -> int:
        body = req.source.body
        return sum(other.source.body == body for other in self.reqs.values()) if body else 1

    def _share(self) -> ShortShare:
        """What is kept for short requests, and what those that run hold of it."""
        short = [req for req in self.reqs.values() if req.is_short]
        held = sum(len(req.pages) for req in short) * self.memory.page_size
        return ShortShare(
            *self.kept, held, sum(len(r.prompt_ids) + r.max_new_tokens - 1 for r in short), len(short)
        )

    def leaves_enough(self, req: Req) -> bool:
        """Whether ``req``, if nothing else ran, would leave what is kept for short ones."""
        size = self.memory.page_size
        whole = math.ceil(req.num_tokens / size) * size + self._need(req).later
        return whole <= self.memory.num_pages * size - self.kept[0]

    # --- questions

    def wrong(self) -> str:
        """The first decision that is not right, "" if all are."""
        most = self.memory.num_pages * self.memory.page_size - self.kept[0]
        long = self._request(most - self._random.randint(0, 6))
        if self.planner._must_be_alone(long, self._share()) == self.leaves_enough(long):
            return f"a request of {long.num_tokens} tokens is wrongly judged: {most} may be used by long ones"
        for _ in range(_NUM_STEPS):
            wrong = (
                self._wrong_retractions() if self.waiting and self.chunked is None else ""
            ) or self._wrong_plan()
            if wrong:
                return wrong
        return ""

    def _wrong_retractions(self) -> str:
        """Of running requests for the waiting ones, which are of better ranks or of other bodies."""
        reqs, planner, random = self.running.reqs, self.planner, self._random
        begun: list[bool] = []
        any_planner: Any = planner
        victims = any_planner._victims

        def counted(waiting: Any, candidates: Any, ordered: Callable[[], Any], *args: Any) -> Any:
            def order() -> Any:
                begun.append(True)
                return ordered()

            return victims(waiting, candidates, order, *args)

        any_planner._victims = counted
        if self.has_ranks:
            threshold = random.randrange(2)
            may_go = [req.rank - self.waiting[0].rank > threshold for req in reqs]
            expected = self._expected(may_go)
            planner.preempted(self.waiting, reqs, expected, self._num_running, threshold, self._share())
        else:
            may_go = [self._num_running(req) > 1 for req in reqs]
            expected = self._expected(may_go)
            planner.displaced(self.waiting, reqs, expected, self._num_running, self._share())
        any_planner._victims = victims
        if self._retractions.wrong:
            return self._retractions.wrong[0]
        if begun and not self._is_worth_a_search(self.waiting[0], may_go, expected.tolist()):
            return "requests are put in the order of retraction, and all of them would not be enough"
        return ""

    def _expected(self, may_go: Sequence[bool]) -> Any:
        """Tokens that running requests are expected to ask for: any, or so many that the first waiting one just fits,
        or just not, when all have gone that may."""
        random = self._random
        expected = [random.randint(0, 90) / 10 for _ in may_go]  # a sum of floats is not exact
        if all(may_go) or random.random() < 0.4:
            return np.array(expected)
        num_pages, need = self._most_pages(may_go), self._need(self.waiting[0])
        left = (
            (num_pages - need.num_pages) * self.memory.page_size
            - need.later
            + random.choice((-1, 0, 0, 1, 2))
        )
        stay = [number for number, goes in enumerate(may_go) if not goes]
        for number in stay:
            expected[number] = 0.0
        expected[stay[0]] = max(left - random.choice((0.0, 0.0, 0.5)), 0.0)
        return np.array(expected)

    def _need(self, req: Req) -> Need:
        return self.rule.need_of(req, self.memory.match(req).match)

    def _most_pages(self, may_go: Sequence[bool]) -> int:
        """The pages that would be available if all had gone that may, if these share none."""
        pages = [self.rule.pages_of(other) for other in self.running.reqs]
        num_free = self.memory.num_pages - len(set[int]().union(*pages))
        return num_free + sum(len(mine) for mine, goes in zip(pages, may_go, strict=True) if goes)

    def _is_worth_a_search(self, req: Req, may_go: Sequence[bool], expected: Sequence[float]) -> bool:
        """Whether ``req`` might fit, but for a token, if all had gone that may."""
        size, num_pages, need = self.memory.page_size, self._most_pages(may_go), self._need(req)
        reserved = sum(num for num, goes in zip(expected, may_go, strict=True) if not goes)
        fits = need.num_pages * size + need.later <= num_pages * size - math.floor(reserved + 1e-6) + 1
        return need.num_pages <= num_pages and (fits or req.is_short or all(may_go))

    def _wrong_plan(self) -> str:
        random, memory, planner = self._random, self.memory, self.planner
        step_tokens = planner.step_tokens
        if self.chunked is None and random.random() < 0.2:
            step_tokens = max(step_tokens // 4, 1)
        reserved = random.randint(0, 6 * len(self.running.reqs))
        num_waiting = random.choice((sum(req.num_tokens for req in self.waiting), random.randint(1, 99)))
        num_short = sum(req.is_short for req in self.waiting)
        step = _Step(self, step_tokens, reserved, num_waiting, num_short)
        right, num_cached = step.parts(), 0
        right_next = (
            right[-1].req if right and right[-1].start + right[-1].size < right[-1].req.num_tokens else None
        )
        for part in right:
            if part.req is not self.chunked and not part.req.was_admitted:
                num_cached += part.start
        owed: list[Points] = []
        looked_up: list[Req] = []
        evicted: list[int] = []
        any_memory: Any = memory
        match, admit, evict = any_memory.match, any_memory.admit, any_memory.tree.evict
        around(memory, "match", before=looked_up.append)
        around(memory, "admit", after=lambda after, *args: owed.append(after))
        around(memory.tree, "evict", after=lambda num, _: evicted.append(num))
        share = self._share()
        plan = planner.plan(
            lambda: iter(self.waiting),
            step_tokens,
            self.chunked,
            len(self.running.reqs),
            reserved,
            lambda: num_waiting,
            share,
            num_short,
        )
        any_memory.match, any_memory.admit, any_memory.tree.evict = match, admit, evict
        seqs = [] if plan is None else list(zip(plan.batch.starts.tolist(), plan.batch.chunks, strict=True))
        reqs = () if plan is None else plan.reqs
        said = [
            (req.rid, start, len(chunk.token_ids)) for req, (start, chunk) in zip(reqs, seqs, strict=True)
        ]
        wanted = [(part.req.rid, part.start, part.size) for part in right]
        # Pages for one prompt may take the place of the cached prefix of a later one. What is decided with that is not
        # compared.
        now = {rid: start for rid, start, _ in said}
        known = list(step.looked_up)
        if sum(evicted):
            known = [
                *takewhile(
                    lambda req: now.get(req.rid, memory.match(req).num_tokens) >= step.looked_up[req], known
                )
            ]
        is_whole = len(known) == len(step.looked_up)
        names = {req.rid for req in known}
        pair = [
            parts if is_whole else [part for part in parts if part[0] in names] for parts in (said, wanted)
        ]
        if pair[0] != pair[1]:
            return f"a step has {said}, {wanted} are right"
        needless = [req.rid for req in looked_up if req not in step.looked_up]
        if needless and is_whole:
            return f"the prefix of {needless[0]} is looked up, which this step cannot take"
        if plan is not None:
            facts = plan.chunked, plan.num_cached_tokens
            if facts != (right_next, num_cached) and is_whole:
                return f"{facts} are left half-way and cached, {(right_next, num_cached)} are right"
            wrong = self._wrong_batch(plan, owed) or next(filter(None, map(self._wrong_part, reqs, seqs)), "")
            if wrong:
                return wrong
        self._computed(plan)
        return ""

    def _wrong_batch(self, plan: PrefillPlan, owed: Sequence[Points]) -> str:
        """What a step waits for and writes into the page table."""
        late = [point for points in owed for point in points if not _covers(plan.batch.after, point)]
        if late:
            return f"a step does not wait for {late[0]}, with which its memory was leased"
        writes = plan.batch.page_writes
        said = list(zip(writes.rows.tolist(), writes.columns.tolist(), writes.pages.tolist(), strict=True))
        new = [req for req in plan.reqs if req is not self.chunked]
        right = [(req.row, column, page) for req in new for column, page in enumerate(req.pages)]
        return "" if said == right else f"a step writes the pages {said}, {right} are right"

    def _wrong_part(self, req: Req, part: tuple[int, Chunk]) -> str:
        """What a step says of a prompt's part."""
        start, seq = part
        size, end = self.memory.page_size, start + len(seq.token_ids)
        slots = [req.pages[at // size] * size + at % size for at in range(start, end)]
        if seq.out_slots.tolist() != slots:
            return f"{req.rid} goes to slots {seq.out_slots.tolist()}, {slots} are right"
        scored = range(0)
        if req.scores_prompt:
            # A token's logprob comes from the position before it; the first that is asked for has none.
            scored = range(max(req.source.logprob_start_len - start, 0), min(end, req.num_tokens - 1) - start)
        if seq.scored != scored:
            return f"{req.rid} has logprobs of {seq.scored}, {scored} is right"
        return ""

    def _computed(self, plan: PrefillPlan | None) -> None:
        """The step has run."""
        for req in () if plan is None else plan.reqs:
            if req is not self.chunked:
                self.waiting.remove(req)
            req.committed_len = req.allocated_len
            req.last_flight = Points.of(self._random.choice(self._streams).record())
            self.reqs[req.rid] = req
            if plan is not None and req is not plan.chunked:
                self.memory.cache_prompt(req)
                self._runs(req)
        self.chunked = self.chunked if plan is None else plan.chunked


def _covers(after: Points, point: Any) -> bool:
    return point.passed or any(one.stream is point.stream and one.serial >= point.serial for one in after)


class _Step:
    """What a prefill step must have. ``looked_up``: the requests whose cached prefixes are needed to know that, and how
    long these are."""

    def __init__(
        self, server: _Server, step_tokens: int, reserved: int, num_waiting: int, num_short: int
    ) -> None:
        self.looked_up: dict[Req, int] = {}
        self._server = server
        self._step_tokens, self._reserved = step_tokens, reserved
        self._num_waiting, self._num_short = num_waiting, num_short
        self._parts: list[_Part] = []
        self._chunked = server.chunked

    def parts(self) -> list[_Part]:
        """Its parts of prompts, in order."""
        chunked, full = self._chunked, self._server.planner.step_tokens
        if chunked is None:
            self._fill()
            return self._parts
        left = chunked.num_tokens - chunked.allocated_len
        if left > full - full // 2:
            self._beside(chunked)
        is_alone = not self._parts
        self._parts.append(_Part(chunked, chunked.allocated_len, self._size(chunked, chunked.allocated_len)))
        if is_alone and self._parts[0].size == left:
            self._fill()
        return self._parts

    # --- what is left

    @property
    def _left(self) -> int:
        return self._step_tokens - sum(part.size for part in self._parts)

    @property
    def _left_scored(self) -> int:
        """Positions of the step that may still be scored."""
        num = 0
        for part in self._parts:
            scored = range(part.start, part.start + part.size) if part.req.scores_prompt else ()
            num += sum(at >= part.req.source.logprob_start_len for at in scored)
        return prefill.MAX_SCORED_TOKENS - num

    @property
    def _left_work(self) -> float:
        return 1.25 * self._work(self._step_tokens, 0) - sum(
            self._work(part.size, part.start) for part in self._parts
        )

    def _work(self, num_tokens: int, start: int) -> float:
        """Behind so many tokens as are ``even`` a token counts twice; within a part, half of those before it count."""
        even = self._server.even
        return 0.0 if even is None else num_tokens + num_tokens * (start + num_tokens / 2) / even

    def _start(self, req: Req) -> int:
        self.looked_up[req] = self._server.memory.match(req).num_tokens
        return self.looked_up[req]

    def _size(self, req: Req, start: int) -> int:
        """The tokens of ``req`` for which the step has room."""
        server, most, lookahead = self._server, req.num_tokens - start, self._server.memory.tree.lookahead
        limits = [most]
        if server.chunk_size is not None:
            limits.append(self._left)
        if server.even is not None:
            in_time = [num for num in range(most + 1) if self._work(num, start) <= max(self._left_work, 0.0)]
            limits.append(max(in_time[-1], server.planner.step_tokens // 4, lookahead, 1))
        if req.scores_prompt:
            limits.append(max(req.source.logprob_start_len - start, 0) + self._left_scored)
        if min(limits) == most:
            return most
        return max(min(*limits, most - lookahead), 0)

    def _fits(self, req: Req, may_be_alone: bool) -> bool:
        """Whether there is memory for ``req`` beside those that run and those that the step has already."""
        server = self._server
        rule, size = server.rule, server.memory.page_size
        used = set[int]().union(*map(rule.pages_of, server.reqs.values()))
        available, num_rows = server.memory.num_pages - len(used), server.memory.rows.num_free
        left = available * size - self._reserved
        short = [other for other in server.reqs.values() if other.is_short]
        for other in [*(part.req for part in self._parts if part.req is not self._chunked), req]:
            need = rule.need_of(other, server.memory.match(other).match)
            num_pages = need.num_pages + len(need.match_pages - used)
            needed = num_pages * size + need.later
            if other is req:
                alone = may_be_alone and not server.running.reqs and not self._parts
                return rule.has_room(req, num_pages, needed, available, left, num_rows, short, alone)
            used |= need.match_pages
            available, left, num_rows = available - num_pages, left - needed, num_rows - 1
            short += [other] if other.is_short else []
        raise AssertionError("the last one has been judged")

    def _has_row(self) -> bool:
        return self._server.memory.rows.num_free > sum(part.req is not self._chunked for part in self._parts)

    def _is_in_share(self, req: Req) -> bool:
        """Whether ``req`` is short and fits into what is kept for such, with those that run."""
        short = [part.req for part in self._parts if part.req is not self._chunked]
        short += self._server.reqs.values()
        final = sum(_final(other) for other in short if other.is_short)
        return req.is_short and final + _final(req) <= self._server.kept[0]

    def _may_be_passed(self, req: Req) -> bool:
        """Whether short ones may pass ``req``, for which there is no memory."""
        return self._num_short > 0 and not req.is_short and self._server.leaves_enough(req)

    # --- whose turn it is

    def _fill(self) -> None:
        """Waiting prompts in their order."""
        passed: Req | None = None
        for req in self._waiting(math.inf):
            if passed is not None:
                if req.rank > passed.rank or (req.is_short and not self._is_in_share(req)):
                    return
                if not req.is_short:
                    continue
            if self._is_full() or (req.scores_prompt and self._left_scored <= 0):
                return
            start = self._start(req)
            size = self._size(req, start)
            is_whole = self._server.chunk_size is None and len(self._parts) > 0
            has_place = size > 0 and (not is_whole or req.num_tokens - start <= self._left)
            if has_place and self._fits(req, True):
                self._parts.append(_Part(req, start, size))
                if start + size < req.num_tokens:
                    return
            elif self._may_be_passed(req):
                passed = passed or req
            else:
                return

    def _waiting(self, most: float) -> Iterator[Req]:
        if self._num_short:
            most = prefill._MAX_PASSED
        for number, req in enumerate(self._server.waiting):
            if number < most:
                yield req

    def _is_full(self) -> bool:
        """Whether no further prompt joins the step."""
        if self._left <= 0 or not self._has_row() or len(self._parts) == self._server.max_reqs:
            return True
        if not self._parts:
            return False
        if self._server.even is not None and self._left_work <= 0:
            return True
        new = [part for part in self._parts if part.req is not self._chunked]
        num_prompt, waits = sum(part.req.num_tokens for part in new), self._num_waiting
        if num_prompt:  # of what waits, as large a share is cached as of these
            waits = waits * sum(part.req.num_tokens - part.start for part in new) // num_prompt
        most = max(math.isqrt(waits * self._server.cost), self._server.min_shared)
        return sum(part.size for part in self._parts) >= most

    def _beside(self, chunked: Req) -> None:
        """Waiting prompts that fit whole into the half of the step that ``chunked`` leaves, in their order."""
        server = self._server
        half, least_work = server.planner.step_tokens // 2, self._left_work / 2
        scored = prefill.MAX_SCORED_TOKENS // 2 if chunked.scores_prompt else prefill.MAX_SCORED_TOKENS
        best, num_tried, blocked = chunked.rank, 0, False
        for req in self._waiting(prefill._MAX_LOOKED_AT):
            best = min(best, req.rank)
            room = half - sum(part.size for part in self._parts)
            has_place = server.max_reqs is None or len(self._parts) < server.max_reqs - 1
            has_work = server.even is None or self._left_work > least_work
            if req.rank > best or room <= 0 or not has_place or not has_work or not self._has_row():
                return
            if blocked or num_tried >= prefill._MAX_LOOKED_AT:
                if not req.is_short:
                    continue
                if not self._is_in_share(req) or num_tried == 2 * prefill._MAX_LOOKED_AT:
                    return
            num_tried += 1
            start = self._start(req)
            num_new = req.num_tokens - start
            num_scored = sum(part.size for part in self._parts if part.req.scores_prompt)
            is_scorable = not req.scores_prompt or num_new + num_scored <= scored
            if num_new > room or not is_scorable or self._size(req, start) < num_new:
                continue
            if self._fits(req, False):
                self._parts.append(_Part(req, start, num_new))
            elif self._may_be_passed(req):
                blocked = True
            else:
                return


def _final(req: Req) -> int:
    """The tokens whose KV it has when it ends."""
    return len(req.prompt_ids) + req.max_new_tokens - 1
