"""PrefillPlanner: which prompts, and how much of them, the next extend step computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.transfer import Ticket
from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.memory_order import Points
from fenceline.model_executor.step import Chunk, PageWrites, StepBatch, concatenated
from fenceline.scheduler.req import Prefix, Req
from fenceline.scheduler.request_memory import Remap, RequestMemory
from fenceline.scheduler.schedule_policy import PrefixWork, ShortShare, StepSharing, loses_least, whole_tokens

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

# A request is not expected to need more new tokens than this when it is admitted, even if its limit is higher.
CLIP_NEW_TOKENS = 4096
# Logits of prompt positions are a vocabulary wide: a step computes at most this many, of all prompts together.
MAX_SCORED_TOKENS = 1024
# Short prompts are looked for among this many requests behind a half-way prompt: each may need a lookup in the tree.
_MAX_LOOKED_AT = 128
# Short requests (see ShortShare) that may pass one without memory are looked for among this many waiting requests.
_MAX_PASSED = 1024


@dataclass(slots=True)
class _Budget:
    """What is left of a step's tokens, of memory (in tokens), of what is kept for short requests, of the step's work
    (see PrefixWork), and of the tokens whose prompt logprobs the step computes."""

    step_tokens: int
    memory_tokens: int
    share: ShortShare
    work: float = 0.0
    scored_tokens: int = field(default_factory=lambda: MAX_SCORED_TOKENS)


@dataclass(slots=True)
class _Plan:
    reqs: list[Req] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    page_rows: list[I64] = field(default_factory=list)
    page_columns: list[I64] = field(default_factory=list)
    page_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    after: Points = field(default_factory=Points.none)
    num_cached_tokens: int = 0
    num_step_tokens: int = 0
    # Tokens of the admitted prompts, with and without their cached prefixes; their ratio is assumed to hold for the
    # waiting prompts too.
    num_prompt_tokens: int = 0
    num_uncached_tokens: int = 0

    def page_writes(self) -> PageWrites:
        """Those of all requests that were admitted."""
        if not self.page_rows:
            return PageWrites.none()
        return PageWrites(
            rows=concatenated(self.page_rows),
            columns=concatenated(self.page_columns),
            pages=concatenated(self.page_ids),
        )

    def batch(self, loads: tuple[Ticket, ...]) -> StepBatch:
        """The step; ``loads`` as in ``StepBatch``. A prompt is sampled from where it ends."""
        return StepBatch.of_chunks(
            rows=[req.row for req in self.reqs],
            starts=[
                req.allocated_len - len(chunk.token_ids)
                for req, chunk in zip(self.reqs, self.chunks, strict=True)
            ],
            chunks=self.chunks,
            sampling=[req.sampling() if req.allocated_len == req.num_tokens else None for req in self.reqs],
            page_writes=self.page_writes(),
            after=self.after,
            loads=loads,
        )


# A running request that may be retracted, and the tokens that it is expected to ask for yet.
_Victim = tuple[Req, float]
# The requests that are to be retracted, and the ends of the cached prefixes of those for which they go.
_Retractions = tuple[list[Req], list[TreeNode]]
# A waiting request, the end of its cached prefix, its pages, and the tokens that it is expected to ask for afterwards.
_Admission = tuple[Req, TreeNode, int, int]


def _largest_bodies_first(
    running: Iterable[_Victim], num_running: Callable[[Req], int], num_kept: int
) -> list[_Victim]:
    """The order in which running requests are retracted: the worst rank first, then the HTTP body that has most
    requests left after the preceding retractions, then by :func:`loses_least`. Each body keeps ``num_kept``."""
    num_left: dict[int | str, int] = {}
    keyed: list[tuple[tuple[int, int], _Victim]] = []
    for victim in sorted(running, key=lambda v: (-v[0].rank, loses_least(v[0]))):
        req = victim[0]
        body = req.source.body or req.rid
        num = num_left.setdefault(body, num_running(req))
        if num > num_kept:
            keyed.append(((-req.rank, -num), victim))
            num_left[body] = num - 1
    return [victim for _, victim in sorted(keyed, key=lambda pair: pair[0])]


class _MemoryForecast:
    """What memory would be like if some running requests were retracted and some waiting ones admitted."""

    def __init__(
        self, memory: RequestMemory, num_running: int, reserved_tokens: float, share: ShortShare
    ) -> None:
        self._share = replace(share)
        self._memory = memory
        self._page_size = memory.page_size
        self._num_pages = memory.num_available_pages
        self._num_rows = memory.rows.num_free
        self._num_running = num_running
        self._reserved_tokens = reserved_tokens
        # The ends of the paths whose locks retracted requests would give back, and of those that admitted ones would
        # lock.
        self._released: list[TreeNode] = []
        self._pinned: list[TreeNode] = []
        # The nodes of these paths, each as often as it would be given back. They are current as long as the tree has
        # made no node since.
        self._num_released: Counter[TreeNode] = Counter()
        self._kept: set[TreeNode] = set()
        self._num_created = memory.tree.num_created

    def walk_again(self) -> None:
        """Find the nodes of the paths again if a lookup may have split one of them: its new upper half is missing."""
        if self._num_created == self._memory.tree.num_created:
            return
        self._num_created = self._memory.tree.num_created
        self._num_released = Counter(chain.from_iterable(end.path() for end in self._released))
        self._kept = set(chain.from_iterable(end.path() for end in self._pinned))

    def pin(self, node: TreeNode) -> None:
        """Count the path of ``node`` as not evictable: it is the prefix of a request to be admitted."""
        self._pinned.append(node)
        for part in node.path():
            if part not in self._kept:
                self._kept.add(part)
                if part.lock_ref == self._num_released[part]:
                    self._num_pages -= part.num_device_pages

    def release(self, req: Req, expected_tokens: float) -> None:
        """Count the row, the own pages and the locks of ``req``, which is running, as given back."""
        assert req.node is not None, f"{req.rid} does not run"
        self._num_pages += len(req.pages) - req.shared_len // self._page_size
        self._released.append(req.node)
        for part in req.node.path():
            self._num_released[part] += 1
            if part.lock_ref == self._num_released[part] and part not in self._kept:
                self._num_pages += part.num_device_pages
        self._num_rows += 1
        self._num_running -= 1
        self._reserved_tokens -= expected_tokens
        if req.is_short:
            self._share.take(-len(req.pages) * self._page_size, -req.final_len)

    def might_have_room(
        self, req: Req, num_pages: int, expected_tokens: int, victims: Sequence[_Victim]
    ) -> bool:
        """False if ``req``, which gets ``num_pages``, would not be admitted even with all ``victims`` retracted.

        This is an upper bound that does not walk the tree, so it may say True where the exact answer is no."""
        most_pages = self._num_pages + sum(len(req.pages) for req, _ in victims)
        reserved_tokens = self._reserved_tokens - sum(expected for _, expected in victims)
        needed = num_pages * self._page_size + expected_tokens
        # One token of slack, as sums of floats depend on their order.
        has_tokens = needed <= most_pages * self._page_size - reserved_tokens + 1 or req.is_short
        return num_pages <= most_pages and (has_tokens or self._num_running == len(victims))

    def has_room(self, req: Req, num_pages: int, expected_tokens: int) -> bool:
        """Whether ``req``, which gets ``num_pages``, would be admitted."""
        if not _has_row(req, self._num_rows, self._share) or num_pages > self._num_pages:
            return False
        needed = num_pages * self._page_size + expected_tokens
        available = self._num_pages * self._page_size
        left = _left_for(req, available, available - whole_tokens(self._reserved_tokens), self._share)
        return needed <= left or self._num_running == 0

    def admit(self, req: Req, num_pages: int, expected_tokens: int) -> None:
        """Count the memory of ``req``, which fits, as taken."""
        if req.is_short:
            self._share.take(self._memory.num_pages_for(req.num_tokens) * self._page_size, req.final_len)
        self._num_pages -= num_pages
        self._num_rows -= 1
        self._num_running += 1
        self._reserved_tokens += expected_tokens


def _has_row(req: Req, num_free: int, share: ShortShare) -> bool:
    return num_free > (0 if req.is_short else share.kept_rows)


def _left_for(req: Req, available: int, left: float, share: ShortShare) -> float:
    """Memory that ``req`` may take, in tokens. ``left`` is ``available`` less what running requests are expected to
    need. A short request within its share may take all of ``available``: it needs little, and long requests can be
    retracted if memory runs short."""
    if share.has_room(req):
        return available
    return left if req.is_short else left - share.kept_tokens


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """An extend step: its batch, its requests in the same order, and the request left half-way, if any."""

    batch: StepBatch
    reqs: tuple[Req, ...]
    chunked: Req | None
    num_cached_tokens: int

    @property
    def num_new_tokens(self) -> int:
        """Tokens the step computes."""
        return self.batch.num_prompt_tokens


class PrefillPlanner:
    """Admits waiting requests in order, as long as step and memory have room for them.

    ``chunk_size``: tokens of one step if prompts are split, None never to split them; ``max_prefill_tokens``: tokens of
    one step in any case (without splitting, a single longer prompt is still admitted); ``sharing``: the length from
    which no further prompt joins a step; ``max_reqs``: prompts of one step, None for any number; ``num_spare``: slots
    after a request's last token that its last decode step writes; ``prefix_work``: a limit on the work of a step, in
    addition to that on its tokens, None for none.
    """

    def __init__(
        self,
        memory: RequestMemory,
        chunk_size: int | None,
        max_prefill_tokens: int,
        sharing: StepSharing,
        max_reqs: int | None = None,
        num_spare: int = 0,
        prefix_work: PrefixWork | None = None,
    ) -> None:
        self._memory = memory
        self._page_size = memory.page_size
        self._chunk_size = chunk_size
        # The maximum number of tokens of a step. If prompts are not split, a single prompt may have more.
        self.step_tokens = max_prefill_tokens if chunk_size is None else min(max_prefill_tokens, chunk_size)
        self.sharing = sharing
        self._max_reqs = max_reqs
        self._num_spare = num_spare
        # If prompts are not split, a prompt is computed as a whole, however long that takes.
        self._prefix_work = None if chunk_size is None else prefix_work

    def plan(
        self,
        waiting: Callable[[], Iterable[Req]],
        step_tokens: int,
        chunked: Req | None,
        num_running: int,
        reserved_tokens: int,
        num_waiting: Callable[[], int],
        share: ShortShare,
        num_short: int = 0,
    ) -> PrefillPlan | None:
        """The next extend step, or None if nothing fits. It has at most ``step_tokens`` tokens if prompts are split.
        ``waiting`` makes a new iterator at each call. Requests that are admitted get a row. The iteration ends at the
        first request that does not fit, unless short requests wait (``num_short``): then it continues with short
        requests that fit into what is left of their ``share`` of memory.

        ``chunked`` is the request whose prompt an earlier step left half-way. It comes first. If it would take more
        than half of the step, waiting prompts that fit whole into the other half are computed in the same step: they
        pass long prompts that wait with them, and the half-way prompt still gets at least half of the step.
        ``reserved_tokens`` is the memory that running requests are expected to need. ``num_waiting`` counts the tokens
        of all waiting prompts; it is called only if a second prompt might join the step.
        """
        plan = _Plan()
        available = self._memory.num_available_pages * self._page_size
        budget = _Budget(step_tokens, available - reserved_tokens, share)
        if self._prefix_work is not None:
            budget.work = self._prefix_work.of_step(step_tokens)
        if chunked is not None:
            if chunked.num_tokens - chunked.allocated_len > self.step_tokens - self.step_tokens // 2:
                self._admit_beside(plan, waiting(), chunked, budget, num_short)
            is_shared = bool(plan.reqs)
            self._add_chunk(plan, chunked, budget)
        # If the chunked prompt is still half-way, it has used up the step; there is at most one such prompt.
        if chunked is None or (chunked.allocated_len == chunked.num_tokens and not is_shared):
            self._admit_waiting(plan, waiting(), num_running, budget, num_waiting, num_short)
        if not plan.reqs:
            return None
        last = plan.reqs[-1]
        batch = plan.batch(self._memory.start_loads())
        self._check(plan, batch, step_tokens, budget)
        return PrefillPlan(
            batch=batch,
            reqs=tuple(plan.reqs),
            chunked=last if last.allocated_len < last.num_tokens else None,
            num_cached_tokens=plan.num_cached_tokens,
        )

    def _check(self, plan: _Plan, batch: StepBatch, step_tokens: int, budget: _Budget) -> None:
        """Assert what every step keeps to, whatever was admitted: its limits, and that each of its requests, none
        twice, holds the pages of its whole prompt and computes the next part of it."""
        reqs, num_tokens = plan.reqs, batch.num_prompt_tokens
        assert num_tokens == plan.num_step_tokens == step_tokens - budget.step_tokens, (
            "every token counts once"
        )
        assert num_tokens <= step_tokens or (self._chunk_size is None and len(reqs) == 1), (
            f"{num_tokens} tokens in a step of at most {step_tokens}"
        )
        assert self._max_reqs is None or len(reqs) <= self._max_reqs, f"{len(reqs)} prompts in a step"
        assert len({req.row for req in reqs}) == len(reqs), "no request and no row is twice in a step"
        for req, start, samples in zip(reqs, batch.starts.tolist(), batch.samples.tolist(), strict=True):
            assert req.row and not req.left, f"{req.rid} is not admitted"
            assert len(req.pages) == self._memory.num_pages_for(req.num_tokens), (
                f"{req.rid} holds {len(req.pages)} pages for {req.num_tokens} tokens"
            )
            assert req.committed_len <= start < req.allocated_len <= req.num_tokens, (
                f"{req.rid} computes tokens {start} to {req.allocated_len}, {req.committed_len} are there"
            )
            assert samples or req is reqs[-1], "only the last prompt of a step is left half-way"

    def preempted(
        self,
        waiting: Iterable[Req],
        running: Sequence[Req],
        expected: F64,
        num_running: Callable[[Req], int],
        threshold: int,
        share: ShortShare,
    ) -> _Retractions:
        """The requests of ``running`` to retract so that those of ``waiting`` whose rank is better by more than
        ``threshold`` have memory. As few as suffice are chosen: the worst rank first, then those of the HTTP bodies
        that run most (``num_running``). No request is retracted for one that would not fit even then. The requests that
        get memory have at most as many tokens as a step; where prompts share steps (``sharing``), they are admitted in
        several steps that follow one another. The second list has the ends of their cached prefixes.

        ``expected`` [len(running)]: tokens that each is expected to ask for in future. ``waiting`` is ordered by rank;
        no more of it is examined than fits into a step.
        """
        waiting = iter(waiting)
        req = next(waiting, None)
        if req is None:
            return [], []
        worst_rank = req.rank + threshold
        candidates = [v for v in zip(running, expected.tolist(), strict=True) if v[0].rank > worst_rank]
        return self._victims(
            chain([req], waiting),
            candidates,
            lambda: _largest_bodies_first(candidates, num_running, 0),
            lambda: _MemoryForecast(self._memory, len(running), float(expected.sum()), share),
            lambda victim, req: victim.rank - req.rank > threshold,
        )

    def displaced(
        self,
        newcomers: Iterable[Req],
        running: Sequence[Req],
        expected: F64,
        num_running: Callable[[Req], int],
        share: ShortShare,
    ) -> _Retractions:
        """Like :meth:`preempted`, for ``newcomers`` of HTTP bodies that run nothing. Requests of bodies that run
        several are retracted; each of these bodies keeps one."""
        candidates = [v for v in zip(running, expected.tolist(), strict=True) if num_running(v[0]) > 1]
        return self._victims(
            newcomers,
            candidates,
            lambda: _largest_bodies_first(candidates, num_running, 1),
            lambda: _MemoryForecast(self._memory, len(running), float(expected.sum()), share),
            lambda victim, req: True,
        )

    def _victims(
        self,
        waiting: Iterable[Req],
        candidates: Sequence[_Victim],
        ordered: Callable[[], Sequence[_Victim]],
        new_forecast: Callable[[], _MemoryForecast],
        gives_way: Callable[[Req, Req], bool],
    ) -> _Retractions:
        """The leading requests of ``ordered()`` (``candidates`` in order of retraction) that have to be retracted for
        ``waiting`` to be admitted, as far as a step's tokens go, and the ends of the prefixes of those of ``waiting``.
        It stops at the first waiting request that does not fit even then, or for which the next candidate does not give
        way."""
        if not candidates:
            return [], []
        step_tokens, forecast = self.step_tokens, new_forecast()
        victims: Iterator[_Victim] | None = None
        taken: list[_Victim] = []
        admitted: list[_Admission] = []
        num_taken = 0
        for index, req in enumerate(waiting):
            prefix = self._memory.match(req)
            num_new = req.num_tokens - prefix.num_tokens
            if index and self._chunk_size is None and num_new > step_tokens:
                break  # prompts are not split, and this one has to wait for the next step
            forecast.walk_again()
            forecast.pin(prefix.match.host_node)
            num_pages, num_expected = self._new_memory(req, prefix)
            if victims is None:
                # This is computed in every step while a request waits for memory; most such calls end here.
                if not forecast.might_have_room(req, num_pages, num_expected, candidates):
                    return [], []
                victims = iter(ordered())
            while not (
                forecast.has_room(req, num_pages, num_expected)
                and (
                    not any(victim.is_short for victim, _ in taken[num_taken:])
                    or self._still_fit(admitted, taken, new_forecast)
                )
            ):
                victim = next(victims, None)
                if victim is None or not gives_way(victim[0], req):
                    return [one for one, _ in taken[:num_taken]], [node for _, node, *_ in admitted]
                taken.append(victim)
                forecast.release(*victim)
            forecast.admit(req, num_pages, num_expected)
            admitted.append((req, prefix.match.host_node, num_pages, num_expected))
            num_taken = len(taken)
            step_tokens -= num_new
            if step_tokens <= 0 or index + 1 == self._max_reqs:
                break  # before another one is looked for
        return [one for one, _ in taken], [node for _, node, *_ in admitted]

    def _still_fit(
        self,
        admitted: Sequence[_Admission],
        taken: Sequence[_Victim],
        new_forecast: Callable[[], _MemoryForecast],
    ) -> bool:
        """Whether the requests of ``admitted``, which fitted when some of the victims ``taken`` had gone, fit now that
        all have. When a short one goes, long ones must leave more to short ones again, which may be more than it gave
        back if it shared pages."""
        if all(req.is_short for req, *_ in admitted):
            return True
        forecast = new_forecast()
        for victim in taken:
            forecast.release(*victim)
        for req, node, num_pages, num_expected in admitted:
            forecast.pin(node)
            if not forecast.has_room(req, num_pages, num_expected):
                return False
            forecast.admit(req, num_pages, num_expected)
        return True

    def _new_memory(self, req: Req, prefix: Prefix) -> tuple[int, int]:
        """Pages that ``req`` gets when it is admitted, and tokens that it is expected to ask for afterwards."""
        num_pages = self._memory.num_pages_for(req.num_tokens) - len(prefix.match.pages)
        return num_pages, self._expected(req)

    def _expected(self, req: Req) -> int:
        """Tokens that ``req`` is expected to ask for after it has been admitted."""
        return min(req.final_len - req.num_tokens + 1, CLIP_NEW_TOKENS) + self._num_spare

    def _admit_waiting(
        self,
        plan: _Plan,
        waiting: Iterable[Req],
        num_running: int,
        budget: _Budget,
        num_waiting: Callable[[], int],
        num_short: int,
    ) -> None:
        num_waiting_tokens: int | None = None
        blocked: Req | None = None  # the first that does not fit
        for req in islice(waiting, None if num_short == 0 else _MAX_PASSED):
            if blocked is not None:
                if req.rank > blocked.rank:
                    return
                if not req.is_short:
                    continue
                if not budget.share.has_room(req):
                    return
            if budget.step_tokens <= 0 or not self._memory.rows.num_free or len(plan.reqs) == self._max_reqs:
                return
            if plan.reqs and self._prefix_work is not None and budget.work <= 0:
                return
            if plan.reqs:
                if num_waiting_tokens is None:
                    num_waiting_tokens = num_waiting()
                if plan.num_step_tokens >= self._shared_tokens(plan, num_waiting_tokens):
                    return
            alone = num_running == 0 and not plan.reqs
            if req.scores_prompt and budget.scored_tokens <= 0:
                return
            if not self._admit(plan, req, budget, alone):
                if num_short == 0 or req.is_short or self._must_be_alone(req, budget.share):
                    return  # no short one passes another one
                blocked = blocked or req
                continue
            self._add_chunk(plan, req, budget)
            if req.allocated_len < req.num_tokens:
                return

    def _admit_beside(
        self, plan: _Plan, waiting: Iterable[Req], chunked: Req, budget: _Budget, num_short: int
    ) -> None:
        """Admit requests of ``waiting`` that fit whole into the half of the step that ``chunked`` leaves. No request
        passes one of a better rank."""
        blocked = False
        room, rank = self.step_tokens // 2, chunked.rank
        # If the chunked prompt is scored, half of the step's scored tokens is left to it as well.
        scored = budget.scored_tokens // 2 if chunked.scores_prompt else budget.scored_tokens
        num_looked_at, least_work = 0, budget.work / 2
        for req in islice(waiting, _MAX_LOOKED_AT if num_short == 0 else _MAX_PASSED):
            if self._prefix_work is not None and budget.work <= least_work:
                return
            rank = min(rank, req.rank)
            is_full = self._max_reqs is not None and len(plan.reqs) + 1 >= self._max_reqs
            if is_full or room == 0 or req.rank > rank or not self._memory.rows.num_free:
                return
            if blocked or num_looked_at >= _MAX_LOOKED_AT:
                if not req.is_short:
                    continue
                if not budget.share.has_room(req) or num_looked_at == 2 * _MAX_LOOKED_AT:
                    return
            num_looked_at += 1
            num_new = req.num_tokens - self._memory.match(req).num_tokens
            if num_new > room or (req.scores_prompt and num_new > scored):
                continue
            if self._chunk_tokens(req, req.num_tokens - num_new, budget) < num_new:
                continue  # its prefix is long
            if not self._admit(plan, req, budget, alone=False):
                if num_short == 0 or req.is_short or self._must_be_alone(req, budget.share):
                    return
                blocked = True
                continue
            self._add_chunk(plan, req, budget)
            room -= num_new
            scored -= num_new if req.scores_prompt else 0

    def _must_be_alone(self, req: Req, share: ShortShare) -> bool:
        """Whether ``req`` is so long that it also needs the share kept for short requests. Short requests may not pass
        it, since otherwise it might wait for ever."""
        num_tokens = self._memory.num_pages * self._page_size - share.tokens
        num_pages = self._memory.num_pages_for(req.num_tokens)
        return num_pages * self._page_size + self._expected(req) > num_tokens

    def _shared_tokens(self, plan: _Plan, num_waiting: int) -> int:
        """The number of tokens from which no further prompt joins the step. Cached prefixes need not be computed. Those
        of the waiting prompts are not known yet; they are assumed to be as long as those of the admitted prompts."""
        if plan.num_prompt_tokens:
            num_waiting = num_waiting * plan.num_uncached_tokens // plan.num_prompt_tokens
        return self.sharing.tokens(num_waiting)

    def _admit(self, plan: _Plan, req: Req, budget: _Budget, alone: bool) -> bool:
        """Give ``req`` its memory, and return True, if the step and the memory have room. ``alone``: nothing else runs,
        so it may use all memory."""
        memory = self._memory
        prefix = memory.match(req)
        node, num_cached = prefix.match.host_node, prefix.num_tokens
        num_new = req.num_tokens - num_cached
        splits = self._chunk_size is not None
        if not splits and plan.reqs and num_new > budget.step_tokens:
            return False
        if self._chunk_tokens(req, num_cached, budget) == 0:
            return False
        if not _has_row(req, memory.rows.num_free, budget.share):
            return False
        free_before = memory.num_available_pages
        left = _left_for(req, free_before * self._page_size, budget.memory_tokens, budget.share)
        memory.tree.lock(node)
        free = memory.num_available_pages
        pinned = (free_before - free) * self._page_size
        num_pages, expected = self._new_memory(req, prefix)
        needed = num_pages * self._page_size + expected + pinned
        if num_pages > free or (needed > left and not alone):
            memory.tree.unlock(node, Points.none())
            return False
        budget.memory_tokens -= needed
        if req.is_short:
            budget.share.take(self._memory.num_pages_for(req.num_tokens) * self._page_size, req.final_len)
        plan.num_prompt_tokens += req.num_tokens
        plan.num_uncached_tokens += num_new
        is_new = not req.was_admitted
        plan.after = plan.after.join(memory.admit(req, prefix))
        if is_new:
            plan.num_cached_tokens += num_cached
        plan.page_rows.append(np.full(len(req.pages), req.row, dtype=np.int64))
        plan.page_columns.append(np.arange(len(req.pages), dtype=np.int64))
        plan.page_ids.append(np.array(req.pages, dtype=np.int32))
        return True

    def _chunk_tokens(self, req: Req, start: int, budget: _Budget) -> int:
        """How many tokens from ``start`` on the step has room for; 0 for none."""
        remaining = size = req.num_tokens - start
        if self._chunk_size is not None:
            size = min(size, budget.step_tokens)
        if self._prefix_work is not None:
            most = self._prefix_work.max_tokens(max(budget.work, 0.0), start)
            # Not less than the lookahead: so many tokens may be left of the prompt, and they cannot be split.
            size = min(size, max(most, self.step_tokens // 4, self._memory.tree.lookahead, 1))
        if req.scores_prompt:
            size = min(size, max(req.source.logprob_start_len - start, 0) + budget.scored_tokens)
        if size == remaining:
            return size
        # The draft's KV of a chunk is computed from tokens that follow it; these must be tokens of the prompt.
        return max(min(size, remaining - self._memory.tree.lookahead), 0)

    def _add_chunk(self, plan: _Plan, req: Req, budget: _Budget) -> None:
        """Schedule as much of the request's prompt as the step has room for."""
        tokens = req.token_ids()
        size = self._chunk_tokens(req, req.allocated_len, budget)
        if req.scores_prompt:
            budget.scored_tokens -= max(size - max(req.source.logprob_start_len - req.allocated_len, 0), 0)
        assert size > 0, f"{req.rid} has no part in the step that it is in"
        start, end = req.allocated_len, req.allocated_len + size
        done = end == len(tokens)
        plan.reqs.append(req)
        plan.chunks.append(self._chunk(req, tokens, start, end, done))
        req.allocated_len = end
        budget.step_tokens -= size
        if self._prefix_work is not None:
            budget.work -= self._prefix_work.of_tokens(size, start)
        plan.num_step_tokens += size

    def _chunk(self, req: Req, tokens: I32, start: int, end: int, done: bool) -> Chunk:
        following = tokens[end : end + max(self._memory.tree.lookahead, 1)]
        history, scored = None, range(0)
        if done and req.source.sampling_params.needs_penalties:
            history = (req.prompt_ids.astype(np.int64), np.array(req.output_ids, dtype=np.int64))
        if req.scores_prompt:  # each token scores the next one, if that belongs to the prompt
            first = max(req.source.logprob_start_len - start, 0)
            scored = range(first, end - start if len(following) else end - start - 1)
        return Chunk(
            token_ids=tokens[start:end].astype(np.int64),
            out_slots=self._slots(req, start, end),
            following=tuple(following.tolist()),
            scored=scored,
            top_logprobs=req.source.top_logprobs_num if req.scores_prompt else 0,
            token_ids_logprob=tuple(req.source.token_ids_logprob) if req.scores_prompt else (),
            history=history,
        )

    def _slots(self, req: Req, start: int, end: int) -> I64:
        """Where the KV of tokens ``start`` .. ``end - 1`` goes."""
        size = self._page_size
        first = start // size
        pages = np.array(req.pages[first : -(-end // size)], dtype=np.int64)
        if size == 1:
            return pages
        positions = np.arange(start, end, dtype=np.int64)
        return pages[positions // size - first] * size + positions % size


def remap_writes(remaps: list[Remap]) -> PageWrites:
    """Page-table writes that move requests onto the tree's pages."""
    return PageWrites(
        rows=np.concatenate([np.full(len(r.pages), r.req.row, dtype=np.int64) for r in remaps]),
        columns=np.concatenate(
            [np.arange(r.first_column, r.first_column + len(r.pages), dtype=np.int64) for r in remaps]
        ),
        pages=np.concatenate([r.pages for r in remaps]),
    )
