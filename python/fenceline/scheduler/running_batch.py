"""RunningBatch: the decoding requests, kept as columns so that a step costs numpy operations, not loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fenceline.config.draft_config import StepShape
from fenceline.memory_order import Points
from fenceline.model_executor.step import DepthChoice, PageWrites, StepBatch, constrained_rows
from fenceline.sampling.sampling_batch import ReqSampling
from fenceline.scheduler.req import Req

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Grow = Callable[[Sequence[Req], Sequence[int]], tuple[npt.NDArray[np.int32], Points]]

# A request gets pages for this many tokens at once while memory is plentiful, so that most steps change
# no page table; the least it gets is one page.
_AHEAD_TOKENS = 16


class RunningBatch:
    """Requests whose prompts are computed (or in flight), in the order in which they were added.

    Columns [B]: ``allocated_lens`` (the length once all steps in flight are done, at most), ``capacity`` (tokens that
    its pages hold), ``final_lens`` (the length after its last step). ``composition`` changes with membership, and after
    a step beside prompts. A step yields at most as many tokens per request as its ``StepShape`` says, and writes its
    spare slots as well. If the ``largest`` shape yields one token, lengths are exact.
    ``num_rewritten`` is the number of the last committed tokens whose KV a step computes again.

    Most steps of one token per request only add one to every length. How many such plain steps follow is computed once,
    after each step that was different, so that they need not examine the columns.
    """

    def __init__(
        self,
        page_size: int,
        largest: StepShape,
        tokens_in_flight: Callable[[int], int],
        tree_slots: Callable[[int], int],
        num_rewritten: int = 0,
    ) -> None:
        """``tokens_in_flight``, ``tree_slots``: the functions of these names in ``memory_order``, for the device."""
        self.page_size = page_size
        self.largest = largest
        self.is_exact = largest.num_tokens == 1  # lengths are exact because every step yields one token
        self.num_rewritten = num_rewritten
        self.num_drafting = 0  # requests whose drafts may be accepted
        self._tokens_in_flight = tokens_in_flight
        self._tree_slots = tree_slots
        self._num_in_flight = 0  # of the latest step
        self._num_advanced = 0  # of the next step, see StepBatch
        # The number of next steps in which no request ends or needs pages, if none joins or leaves before.
        self._num_plain_steps = 0
        self._some_left = False  # since the last ``drop_left``
        self.reqs: list[Req] = []
        self.composition = 0
        self._rows = _column()
        self._allocated_lens = _column()
        self._capacity = _column()
        self._final_lens = _column()
        self._samples: Bools = np.zeros(0, dtype=np.bool_)
        self._sampling: tuple[ReqSampling, ...] = ()
        self._constrained = _column()
        self._may_accept: Bools | None = None

    def __len__(self) -> int:
        return len(self.reqs)

    @property
    def num_tokens(self) -> int:
        """Tokens computed and in flight, over all requests."""
        return int(self._allocated_lens.sum())

    def expected_tokens(self, ratio: float, clip: int) -> I64:
        """The number of tokens [B] for which each request is expected to need memory in future: ``ratio`` times its
        remaining tokens, of which at most ``clip`` count. Whole numbers, since a sum of floats depends on the order."""
        left = np.maximum(self._final_lens - self._allocated_lens, 0)
        expected: I64 = np.rint(np.minimum(left, clip) * ratio).astype(np.int64)
        return expected

    def add(self, reqs: Sequence[Req]) -> None:
        """Add requests whose whole prompt has been submitted and that may sample more than one token."""
        if not reqs:
            return
        assert all(req.row and not req.left and req.committed_len <= req.allocated_len for req in reqs), (
            "only admitted requests decode"
        )
        self.reqs.extend(reqs)
        self._rows = _extended(self._rows, [req.row for req in reqs])
        self._allocated_lens = _extended(self._allocated_lens, [req.allocated_len for req in reqs])
        self._capacity = _extended(self._capacity, [len(req.pages) * self.page_size for req in reqs])
        self._final_lens = _extended(self._final_lens, [req.final_len for req in reqs])
        self._changed()

    def note_left(self) -> None:
        """Note that a request has left, perhaps one of these."""
        self._some_left = True
        self._num_plain_steps = 0

    def drop_left(self) -> None:
        """Remove requests that have left, and those whose last token is already in flight."""
        if self._num_plain_steps and not self._some_left:
            return
        if not self.reqs:
            self._some_left = False
            return
        keep = self._allocated_lens < self._final_lens
        if self._some_left:
            keep &= np.fromiter([not req.left for req in self.reqs], dtype=np.bool_, count=len(self.reqs))
            self._some_left = False
        if not keep.all():
            self._keep(keep)

    def remove(self, req: Req) -> None:
        keep = np.ones(len(self.reqs), dtype=np.bool_)
        keep[self.reqs.index(req)] = False
        self._keep(keep)

    def settle(self, reqs: Sequence[Req], number: int) -> list[Req]:
        """Correct the lengths after step ``number``, of ``reqs``, has been published: a request that got fewer tokens
        than it might have is shorter than was assumed. Returns the requests that go on although they were removed
        because the step might have been their last; the caller adds them again.
        """
        places = {req: index for index, req in enumerate(self.reqs)}
        again = []
        lens = self._allocated_lens.copy()  # the latest batch has the column itself
        for req in reqs:
            if req.left:
                continue
            index = places.get(req)
            if index is None:
                req.allocated_len = req.committed_len
                again.append(req)
                continue
            in_flight = 0 if req.last_step == number else self._num_in_flight
            assert req.committed_len <= lens[index], f"{req.rid} got more tokens than were allocated"
            lens[index] = min(lens[index], req.committed_len + in_flight)
        self._allocated_lens, self._num_advanced = lens, 0
        return again

    @property
    def needs_nothing(self) -> bool:
        """Whether no request needs pages in the next step, and none has joined or left since the latest one: there is
        room for the next step because there was for that one."""
        return self._num_plain_steps > 0

    def next_lens(self, shape: StepShape) -> I64:
        """The greatest lengths [B] that a step of ``shape`` can lead to."""
        lens = self._allocated_lens + shape.num_tokens
        if not self.is_exact:
            # A request's last step computes as many rows as any other, and rows beyond its end need slots as well.
            np.minimum(lens, self._final_lens + shape.num_tokens - 1, out=lens)
            self._num_advanced = 0
        return lens

    def num_pages_needed(self, lens: I64, shape: StepShape) -> int:
        """Further pages that a step of ``shape`` needs to bring the requests to ``lens``."""
        missing = lens + shape.num_spare - self._capacity
        short = missing > 0
        if not short.any():
            return 0
        return int((-(-missing[short] // self.page_size)).sum())

    def schedule_step(
        self, lens: I64, shape: StepShape, choice: DepthChoice, num_available_pages: int, grow: Grow
    ) -> StepBatch:
        """Make a step of ``shape``, by ``choice``, that brings the requests to ``lens`` (from :meth:`next_lens`).
        ``grow``: see ``RequestMemory.grow``; a request gets at least the pages that it needs."""
        ends = lens + shape.num_spare if shape.num_spare else lens
        kept = lens + self._tree_slots(shape.num_spare) if shape.num_spare else lens
        if self._num_plain_steps:
            self._num_plain_steps -= 1
            writes, after = PageWrites.none(), Points.none()
        else:
            writes, after = self._grow(kept, num_available_pages, grow)
            assert (kept <= self._capacity).all(), "a request has the pages that its step writes"
            if self.is_exact:
                self._num_plain_steps = int((np.minimum(self._capacity, self._final_lens) - lens).min())
        starts, self._allocated_lens = self._allocated_lens, lens
        num_advanced, self._num_advanced = self._num_advanced, shape.num_tokens
        if not self.is_exact:
            self._num_in_flight = self._tokens_in_flight(shape.num_tokens)
            # A request whose prompt step is still in flight has no published length; all its prompt counts.
            committed = np.array([max(req.committed_len, len(req.prompt_ids)) for req in self.reqs], dtype=np.int64)
            assert (committed < lens).all(), "a step writes behind what has been published"
            starts = np.maximum(committed - self.num_rewritten, 0)
        return StepBatch(
            rows=self._rows,
            starts=starts,
            seq_lens=ends,
            samples=self._samples,
            sampling=self._sampling,
            page_writes=writes,
            after=after,
            constrained=self._constrained,
            composition=self.composition,
            num_advanced=num_advanced,
            may_accept=self._may_accept,
            depth=choice,
        )

    def left_arena(self) -> None:
        """The step that has just been scheduled runs beside prompts. So the device does not advance rows and lengths of
        decode steps, and the next one uploads them."""
        self.composition += 1
        self._num_advanced = 0

    def _grow(self, lens: I64, num_available_pages: int, grow: Grow) -> tuple[PageWrites, Points]:
        short = np.flatnonzero(lens > self._capacity)
        if len(short) == 0:
            return PageWrites.none(), Points.none()
        size, capacity = self.page_size, self._capacity[short]
        ahead = max(_AHEAD_TOKENS // size, 1)
        nums = -(-(lens[short] - capacity) // size)
        if num_available_pages >= 2 * ahead * len(self.reqs):
            nums = np.maximum(nums, np.minimum(ahead, -(-(self._final_lens[short] - capacity) // size)))
        pages, after = grow([self.reqs[i] for i in short.tolist()], nums.tolist())
        self._capacity[short] += nums * size
        # A request's new pages follow those that it has.
        columns = np.arange(len(pages)) + np.repeat(capacity // size - (nums.cumsum() - nums), nums)
        return PageWrites(np.repeat(self._rows[short], nums), columns, pages), after

    def _keep(self, keep: Bools) -> None:
        for req, stays, length in zip(self.reqs, keep.tolist(), self._allocated_lens.tolist(), strict=True):
            if not stays:
                req.allocated_len = length
        self.reqs = [req for req, stays in zip(self.reqs, keep.tolist(), strict=True) if stays]
        self._rows = self._rows[keep]
        self._allocated_lens = self._allocated_lens[keep]
        self._capacity = self._capacity[keep]
        self._final_lens = self._final_lens[keep]
        self._changed()

    def _changed(self) -> None:
        self.composition += 1
        self._num_advanced = self._num_plain_steps = 0
        self._samples = np.ones(len(self.reqs), np.bool_)
        self._sampling = tuple(req.sampling() for req in self.reqs)
        self._constrained = constrained_rows(self._sampling)
        if not self.is_exact:
            self._may_accept = np.array([one.accepts_drafts for one in self._sampling], np.bool_)
            self.num_drafting = int(self._may_accept.sum())


class NewTokenRatio:
    """The share of its remaining tokens that a running request is expected to ask for. Starts at 0.7 times
    ``conservativeness`` (1 at most) and sinks to 14 % of that over 600 decode steps. When memory runs short it is set
    from what the running requests have really needed."""

    _INITIAL, _MIN_FACTOR, _DECAY_STEPS = 0.7, 0.14, 600

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(self._INITIAL * conservativeness, 1.0)
        self._min = self._initial * self._MIN_FACTOR
        self._decay = (self._initial - self._min) / self._DECAY_STEPS
        self.value = self._initial

    def decay(self) -> None:
        """Lower the ratio a little; called for each decode step."""
        self.value = max(self.value - self._decay, self._min)

    def after_retraction(self, num_decoded: int, num_running: int, num_max_new: int) -> None:
        """Requests were retracted. The ``num_running`` left have decoded ``num_decoded`` of ``num_max_new`` tokens."""
        self.value = min((num_decoded + 20 * num_running) / max(num_max_new, 1), 1.0)


def _column() -> I64:
    return np.zeros(0, dtype=np.int64)


def _extended(column: I64, values: list[int]) -> I64:
    return np.concatenate([column, np.array(values, dtype=np.int64)])
