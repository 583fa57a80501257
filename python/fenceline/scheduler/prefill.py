"""PrefillPlanner: which prompts, and how much of them, the next extend step computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.transfer import Ticket
from fenceline.memory_order import Points
from fenceline.model_executor.step import Chunk, PageWrites, StepBatch, concatenated
from fenceline.scheduler.admission import AdmissionState, would_admit
from fenceline.scheduler.image_cache import StepImages
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.scheduler.schedule_policy import PrefixWork, StepSharing, StepTime

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

# Logits of prompt positions are a vocabulary wide: a step computes at most this many, of all prompts together.
MAX_SCORED_TOKENS = 1024
# So many waiting requests are looked at for one step: each may need a lookup in the tree.
_MAX_LOOKED_AT = 128


@dataclass(slots=True)
class _Budget:
    """What is left of a step: its tokens, work (see PrefixWork), tokens whose prompt logprobs it computes, prompts."""

    step_tokens: int
    work: float
    scored_tokens: int
    num_reqs: int
    time: StepTime | None = None


@dataclass(slots=True)
class _Plan:
    most_tokens: int  # of the step
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
    images: StepImages = field(default_factory=StepImages)
    snapshots: list[tuple[int, int]] = field(default_factory=list)  # see StepBatch

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
        after = self.after.join(self.images.after)
        for ticket in loads:
            after = after.join(ticket.state_points)
        return StepBatch.of_chunks(
            rows=[req.row for req in self.reqs],
            starts=[
                req.allocated_len - len(chunk.token_ids) for req, chunk in zip(self.reqs, self.chunks, strict=True)
            ],
            chunks=self.chunks,
            sampling=[req.sampling() if req.allocated_len == req.num_tokens else None for req in self.reqs],
            page_writes=self.page_writes(),
            after=after,
            loads=tuple([ticket for ticket in loads if ticket.num_pages]),
            encodes=tuple(self.images.encodes),
            snapshots=tuple(self.snapshots),
        )


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
    """Admits waiting requests in order, as long as step and memory have room for them. ``chunk_size``: tokens of one
    step if prompts are split, None never to split them; ``max_prefill_tokens``: tokens of one step in any case (without
    splitting, a single longer prompt is still admitted); ``sharing``: the length from which no further prompt joins a
    step; ``max_reqs``: prompts of one step, None for any number; ``prefix_work``: a limit on the work of a step, in
    addition to that on its tokens, None for none; ``looks_up_drafts``: whether rows have the tokens of their requests.
    """

    def __init__(
        self,
        memory: RequestMemory,
        chunk_size: int | None,
        max_prefill_tokens: int,
        sharing: StepSharing,
        max_reqs: int | None = None,
        prefix_work: PrefixWork | None = None,
        looks_up_drafts: bool = False,
    ) -> None:
        self._memory = memory
        self._page_size = memory.page_size
        self._chunk_size = chunk_size
        # The maximum number of tokens of a step. If prompts are not split, a single prompt may have more.
        self.step_tokens = max_prefill_tokens if chunk_size is None else min(max_prefill_tokens, chunk_size)
        self.sharing = sharing
        self._max_reqs = max_reqs
        # If prompts are not split, a prompt is computed as a whole, however long that takes.
        self._prefix_work = None if chunk_size is None else prefix_work
        self._looks_up_drafts = looks_up_drafts

    def plan(
        self,
        waiting: Callable[[], Iterable[Req]],
        chunked: Req | None,
        state: AdmissionState,
        num_waiting: Callable[[], int],
        most_tokens: int,
        time: StepTime | None = None,
    ) -> PrefillPlan | None:
        """The next extend step of at most ``most_tokens`` and, if it is limited, ``time``, or None if nothing fits.
        ``waiting`` makes a new iterator at each call. Requests that are admitted get a row, and are counted in
        ``state``. ``chunked`` is the request whose prompt an earlier step left half-way. If it would take more than
        half of the step, waiting prompts that fit whole into the other half come first: they do not wait for the long
        prompts before them. Otherwise, and always if prompts are not split, it comes first itself. ``num_waiting``
        counts the tokens of all waiting prompts; it is called only if a second prompt might join the step."""
        if chunked is not None and time is not None:
            most_tokens = time.max_tokens(chunked.allocated_len, most_tokens)
        plan = _Plan(most_tokens)
        work = 0.0 if self._prefix_work is None else self._prefix_work.of_step(most_tokens)
        budget = _Budget(most_tokens, work, MAX_SCORED_TOKENS, self._max_reqs or self._memory.rows.size, time)
        if chunked is not None:
            # If prompts are not split, one is half-way because of its images only, and goes on as a whole.
            is_split = self._chunk_size is not None
            half, start = most_tokens - most_tokens // 2, chunked.allocated_len
            if is_split and chunked.num_tokens - start > half:
                if time is not None:
                    time.take(half, start)
                self._admit_waiting(plan, waiting(), chunked, state, budget, num_waiting)
                if time is not None:
                    time.take(-half, start)
            is_shared = bool(plan.reqs)
            self._add_chunk(plan, chunked, budget, chunked.allocated_len)
        # If the chunked prompt is still half-way, it has used up the step; there is at most one such prompt.
        if chunked is None or (chunked.allocated_len == chunked.num_tokens and not is_shared):
            self._admit_waiting(plan, waiting(), None, state, budget, num_waiting)
        if not plan.reqs:
            return None
        last = plan.reqs[-1]
        batch = plan.batch(self._memory.start_loads())
        self._check(plan, batch, budget)
        return PrefillPlan(
            batch=batch,
            reqs=tuple(plan.reqs),
            chunked=last if last.allocated_len < last.num_tokens else None,
            num_cached_tokens=plan.num_cached_tokens,
        )

    def wanted(self, waiting: Iterable[Req]) -> list[Req]:
        """The first requests of ``waiting``, as many as have a step's tokens, without samples that would wait for one
        of them to compute their prompt."""
        found: list[Req] = []
        computed: set[int] = set()  # ids of Samples
        left, max_reqs = self.step_tokens, self._max_reqs or self._memory.rows.size
        for req in waiting:
            if id(req.samples) in computed and not req.scores_prompt:
                continue
            prefix = self._memory.match(req)
            num_new = req.num_tokens - prefix.num_tokens
            if found and self._chunk_size is None and num_new > left:
                break
            found.append(req)
            if self._memory.would_compute_for_others(req):
                computed.add(id(req.samples))
            left -= num_new
            if left <= 0 or len(found) == max_reqs:
                break  # before another one is looked for
        return found

    def _check(self, plan: _Plan, batch: StepBatch, budget: _Budget) -> None:
        """Assert what every step keeps to, whatever was admitted: its limits, and that each of its requests, none
        twice, holds the pages of its whole prompt and computes the next part of it."""
        reqs, num_tokens, step_tokens = plan.reqs, batch.num_prompt_tokens, plan.most_tokens
        assert num_tokens == plan.num_step_tokens == step_tokens - budget.step_tokens, "every token counts once"
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

    def _admit_waiting(
        self,
        plan: _Plan,
        waiting: Iterable[Req],
        chunked: Req | None,
        state: AdmissionState,
        budget: _Budget,
        num_waiting: Callable[[], int],
    ) -> None:
        """Admit requests of ``waiting``; beside ``chunked``, if it is given, those that fit whole into half of
        ``budget``. No request passes one of a better rank, nor one that lacks memory, unless the reserve has room."""
        kept = _Budget(0, 0.0, 0, 0)  # for ``chunked``
        if chunked is not None:
            num_scored = budget.scored_tokens - budget.scored_tokens // 2 if chunked.scores_prompt else 0
            kept = _Budget(plan.most_tokens - plan.most_tokens // 2, budget.work / 2, num_scored, 1)
        best_passed = None if chunked is None else chunked.rank
        state.is_passing = False
        num_waiting_tokens: int | None = None
        limit = 0  # from which no further prompt joins the step
        for req in islice(waiting, _MAX_LOOKED_AT):
            room = budget.step_tokens - kept.step_tokens
            if room <= 0 or budget.num_reqs <= kept.num_reqs or not state.num_rows:
                return
            if self._prefix_work is not None and budget.work <= kept.work:
                return
            if best_passed is not None and req.rank > best_passed:
                return
            if state.is_passing and not state.holdings.may_use_reserve(req):
                continue
            if chunked is not None and chunked.images and req.images:
                best_passed = req.rank  # so that there is room for the embeddings of the half-way prompt
                continue
            if plan.reqs and chunked is None:
                if num_waiting_tokens is None:
                    num_waiting_tokens = num_waiting()
                limit = self._shared_tokens(plan, num_waiting_tokens)
                if plan.num_step_tokens >= limit:
                    return
            num_cached = self._memory.match(req).num_tokens
            num_new = req.num_tokens - num_cached
            if chunked is not None and num_new > room:  # before its time is computed: there may be many of these
                best_passed = req.rank
                continue
            if budget.time is not None:
                room = budget.time.max_tokens(num_cached, room)
            size = self._chunk_tokens(req, num_cached, budget, plan.images)
            if chunked is not None:
                num_scored = num_new if req.scores_prompt else 0
                if num_new > min(room, size) or num_scored > budget.scored_tokens - kept.scored_tokens:
                    best_passed = req.rank
                    continue
            elif size == 0 or (plan.reqs and self._chunk_size is None and num_new > room):
                return
            if plan.reqs and chunked is None and self.sharing.stays_in_graphs(plan.num_step_tokens, size, limit):
                return
            if not would_admit(state, req):
                if state.is_passing or not state.may_be_passed(req):
                    return
                state.is_passing, best_passed = True, req.rank
                continue
            self._admit(plan, req, state, num_cached)
            self._add_chunk(plan, req, budget, 0)
            if req.allocated_len < req.num_tokens:
                return

    def _shared_tokens(self, plan: _Plan, num_waiting: int) -> int:
        """The number of tokens from which no further prompt joins the step. Cached prefixes need not be computed. Those
        of the waiting prompts are not known yet; they are assumed to be as long as those of the admitted prompts."""
        if plan.num_prompt_tokens:
            num_waiting = num_waiting * plan.num_uncached_tokens // plan.num_prompt_tokens
        return self.sharing.tokens(num_waiting)

    def _admit(self, plan: _Plan, req: Req, state: AdmissionState, num_cached: int) -> None:
        """Give ``req`` its memory."""
        memory = self._memory
        req.in_reserve = state.admit(req)
        prefix = memory.match(req)
        memory.tree.lock(prefix.match.host_node)
        plan.num_prompt_tokens += req.num_tokens
        plan.num_uncached_tokens += req.num_tokens - num_cached
        if not req.was_admitted:
            plan.num_cached_tokens += num_cached
        plan.after = plan.after.join(memory.admit(req, prefix))
        assert (state.num_pages, state.num_rows) == (memory.num_available_pages, memory.rows.num_free), (
            f"{req.rid} has taken what it was promised"
        )
        plan.page_rows.append(np.full(len(req.pages), req.row, dtype=np.int64))
        plan.page_columns.append(np.arange(len(req.pages), dtype=np.int64))
        plan.page_ids.append(np.array(req.pages, dtype=np.int32))

    def _chunk_tokens(self, req: Req, start: int, budget: _Budget, images: StepImages) -> int:
        """How many tokens from ``start`` on the step has room for; 0 for none."""
        remaining = size = req.num_tokens - start
        if self._chunk_size is not None:
            size = min(size, budget.step_tokens)
            if (fork := self._memory.fork(req)) > start:
                size = min(size, fork - start)
        if self._prefix_work is not None:
            most = self._prefix_work.max_tokens(max(budget.work, 0.0), start)
            # Not less than the lookahead: so many tokens may be left of the prompt, and they cannot be split.
            size = min(size, max(most, self.step_tokens // 4, self._memory.tree.lookahead, 1))
        if budget.time is not None and self._chunk_size is not None:
            size = budget.time.max_tokens(start, size)
        if req.scores_prompt:
            size = min(size, max(req.source.logprob_start_len - start, 0) + budget.scored_tokens)
        # The draft's KV of a chunk is computed from tokens that follow it; these must be tokens of the prompt.
        most = remaining - self._memory.tree.lookahead
        if size != remaining:
            size = max(min(size, most), 0)
        if req.images and size:
            room = remaining if self._chunk_size is None else budget.step_tokens
            size = self._memory.images.room(images, req.images, start, size, room)
            if most < size < remaining:
                size = remaining if remaining <= room else 0
        return size

    def _add_chunk(self, plan: _Plan, req: Req, budget: _Budget, num_known: int) -> None:
        """Schedule as much of the request's prompt as the step has room for. ``num_known``: tokens that its row has."""
        tokens = req.token_ids()
        size = self._chunk_tokens(req, req.allocated_len, budget, plan.images)
        if req.scores_prompt:
            budget.scored_tokens -= max(size - max(req.source.logprob_start_len - req.allocated_len, 0), 0)
        assert size > 0, f"{req.rid} has no part in the step that it is in"
        start, end = req.allocated_len, req.allocated_len + size
        done = end == len(tokens)
        plan.reqs.append(req)
        chunk = self._chunk(req, tokens, start, end, done)
        if self._looks_up_drafts:
            chunk = replace(chunk, looked_up=_without_images(req, tokens, num_known, end))
        plan.chunks.append(self._with_images(chunk, plan, req, start) if req.images else chunk)
        req.allocated_len = end
        if (taken := self._memory.states.take(req, end)) is not None:
            plan.snapshots.append((req.row, taken[0]))
            plan.after = plan.after.join(taken[1])
        budget.step_tokens -= size
        budget.num_reqs -= 1
        if self._prefix_work is not None:
            budget.work -= self._prefix_work.of_tokens(size, start)
        if budget.time is not None:
            budget.time.take(size, start)
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
            embeds=done and req.source.embed,
        )

    def _with_images(self, chunk: Chunk, plan: _Plan, req: Req, start: int) -> Chunk:
        """``chunk``, which begins at ``start``, with what the images of ``req`` add to it."""
        images, size = self._memory.images, len(chunk.token_ids)
        return replace(
            chunk,
            image_rows=images.take(plan.images, req.images, start, size),
            axes=images.axes(req.images, start, start + size),
            position_delta=images.delta(req.images),
            whole=images.whole(req.images, start, size),
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


def _without_images(req: Req, tokens: I32, first: int, end: int) -> I32:
    """``tokens`` from ``first`` to ``end - 1`` of ``req``, with -1 for those of its images."""
    if not req.images:
        return tokens[first:end]
    texts = tokens.copy()
    for image in req.images:
        texts[image.offset : image.end] = -1
    return texts[first:end]
