"""Whether decode steps get the memory that they need and no more, and whether requests are retracted for them only if
they must be, computed again from the requests alone.

A decode step needs pages for the tokens that it may yield, and for the slots of its drafts behind these. Where memory
is plentiful, a request gets pages for some tokens more, but for none behind its last. None of this changes an answer.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from fenceline.config.draft_config import StepShape
from fenceline.ipc.io_struct import TokenizedGenerateReq, id_array
from fenceline.memory_order import Points
from fenceline.model_executor.step import DepthChoice, StepBatch, StepOutput
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler import running_batch
from fenceline.scheduler.req import Req
from fenceline.scheduler.running_batch import RunningBatch
from fenceline.scheduler.scheduler import Scheduler
from fenceline.vgpu.proving.events import around


class DecodeRoom:
    """Follows the decode steps of ``scheduler``. ``wrong``: what it decided wrongly."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.wrong: list[str] = []
        self._scheduler = scheduler
        self._size = scheduler.memory.page_size
        self._shape: StepShape | None = None  # of the decode step for which memory is looked for
        self._latest = StepShape()  # the shape of the latest for which there was some
        self._is_plentiful = False
        self._of_latest: Sequence[Req] = ()  # the requests of the latest decode step, if none has left since
        # Of each request: its length with the published steps, and the most tokens of each decode step in flight.
        self._lens: dict[str, int] = {}
        self._in_flight: dict[str, list[int]] = {}
        around(scheduler, "deepest_with_room", after=self._chose)
        around(scheduler, "make_room", before=self._makes_room, after=self._made_room)
        around(scheduler, "retract", before=self._retracts)
        around(scheduler, "depart", before=self._departs)
        around(scheduler, "launch", before=self._launches)
        around(scheduler, "publish_counted", before=self._published)
        # The running batch is given this function.
        around(scheduler.memory, "grow", before=self._grows)

    # --- the rules -----------------------------------------------------------------------------------

    def _end_of(self, req: Req, shape: StepShape) -> int:
        """The slots that a step of ``shape`` may bring ``req`` to, those of its drafts included."""
        length = self._lens[req.rid] + sum(self._in_flight[req.rid]) + shape.num_tokens
        final = len(req.prompt_ids) + max(req.max_new_tokens, 1) - 1
        # Its last step computes as many rows as any other.
        return min(length, final + shape.num_tokens - 1) + shape.num_spare

    def _num_missing(self, req: Req, shape: StepShape) -> int:
        return max(math.ceil(self._end_of(req, shape) / self._size) - len(req.pages), 0)

    def _num_needed(self, shape: StepShape) -> int:
        return sum(self._num_missing(req, shape) for req in self._scheduler.running.reqs)

    @property
    def _holders(self) -> list[Req]:
        chunked = self._scheduler.chunked
        return [*self._scheduler.running.reqs, *(() if chunked is None else (chunked,))]

    @property
    def _some_end(self) -> bool:
        """Whether some request that holds memory is about to give it back."""
        scheduler = self._scheduler
        return len(scheduler.reqs) > len(list(scheduler.waiting)) + len(self._holders)

    def _leaves_share(self, shape: StepShape) -> bool:
        """Whether the step leaves what is kept for short requests, less what these hold of it."""
        scheduler = self._scheduler
        held = sum(len(req.pages) for req in self._holders if req.is_short) * self._size
        kept = max(scheduler.share.tokens - held, 0) // self._size
        return self._num_needed(shape) <= scheduler.memory.num_available_pages - kept

    def _has_room(self, shape: StepShape) -> bool:
        """Whether the step may be launched. The share of short ones is restored by retracting long ones, but not the
        last, and not if some request is about to end."""
        if self._leaves_share(shape):
            return True
        fits = self._num_needed(shape) <= self._scheduler.memory.num_available_pages
        num_long = sum(not req.is_short for req in self._holders)
        return fits and (self._some_end or num_long <= 1)

    def _needs_nothing(self, shape: StepShape) -> bool:
        """Whether the step is of the requests of the latest one, none of which needs a page or ends before it."""
        reqs = self._scheduler.running.reqs
        if self._scheduler.config.speculative is not None or list(self._of_latest) != reqs:
            return False
        lens = [self._lens[req.rid] + sum(self._in_flight[req.rid]) + shape.num_tokens for req in reqs]
        return all(
            length <= min(len(req.pages) * self._size, req.final_len)
            for req, length in zip(reqs, lens, strict=True)
        )

    # --- what is decided -----------------------------------------------------------------------------

    def _chose(self, depth: int) -> None:
        """The deepest draft for which there is memory."""
        shapes = self._scheduler.shapes
        right = max((depth for depth, shape in shapes.items() if self._has_room(shape)), default=min(shapes))
        self._check(depth == right, f"there is said to be memory for drafts of depth {depth}, it is {right}")

    def _makes_room(self, shape: StepShape) -> None:
        self._shape = shape

    def _departs(self, req: Req, why: str) -> None:
        self._of_latest = ()

    def _made_room(self, room: Any, shape: StepShape) -> None:
        self._shape = None
        scheduler, num_needed = self._scheduler, self._num_needed(shape)
        if room is None:
            # Otherwise all have been retracted, for a prompt that is half-way.
            if scheduler.running.reqs:
                waits = self._some_end and num_needed > scheduler.memory.num_available_pages
                self._check(waits, "a decode step waits, and has memory or would never have it")
            return
        available, left = room[1], scheduler.memory.num_available_pages - scheduler.share.tokens // self._size
        self._check(
            num_needed == 0 or self._has_room(shape), "a decode step has not the memory that it needs"
        )
        # There is room for a step like the latest one because there was for that one, whatever is left.
        right = 0 if self._needs_nothing(shape) else left
        self._check(
            available == right, f"{available} pages are said to be left for a decode step, {right} is right"
        )
        self._latest = shape
        self._is_plentiful = available >= 2 * self._ahead * len(scheduler.running)

    @property
    def _ahead(self) -> int:
        return max(running_batch._AHEAD_TOKENS // self._size, 1)

    def _retracts(self, req: Req) -> None:
        """For the memory of a decode step: one after the other, those first that have the fewest outputs, and of these
        the one with the longest prompt."""
        shape = self._shape
        if shape is None:
            return
        self._check(not self._needs_nothing(shape), f"{req.rid} is retracted for a step that needs nothing")
        self._check(not self._has_room(shape), f"{req.rid} is retracted for a step that has its memory")
        fits = self._num_needed(shape) <= self._scheduler.memory.num_available_pages
        equals = [
            other
            for other in self._holders
            if self._key(other) == self._key(req) and not (fits and other.is_short)
        ]
        first = min((len(other.output_ids), -len(other.prompt_ids)) for other in equals)
        mine = len(req.output_ids), -len(req.prompt_ids)
        self._check(mine == first, f"{req.rid} is retracted, and another one loses less")

    def _key(self, req: Req) -> tuple[int, int]:
        """Those of one rank whose bodies run as many."""
        body = req.source.body
        rows = [one for one in self._scheduler.reqs.values() if one.row and one.source.body == body and body]
        return req.rank, max(len(rows), 1)

    def _grows(self, req: Req, num_pages: int) -> None:
        shape = self._latest
        final = len(req.prompt_ids) + max(req.max_new_tokens, 1) - 1
        right = self._num_missing(req, shape)
        if self._is_plentiful:
            right = max(right, min(self._ahead, math.ceil(final / self._size) - len(req.pages)))
        self._check(
            num_pages == right, f"{req.rid} gets {num_pages} pages for a decode step, {right} are right"
        )

    def _launches(self, batch: StepBatch, reqs: Sequence[Req]) -> None:
        if not batch.is_decode:
            for length, req in zip(batch.seq_lens.tolist(), reqs, strict=True):
                self._lens[req.rid], self._in_flight[req.rid] = length, []
            return
        shape = self._scheduler.shapes[batch.depth.depth]
        self._of_latest = list(reqs)
        for req, end in zip(reqs, batch.seq_lens.tolist(), strict=True):
            right, has = self._end_of(req, shape), len(req.pages) * self._size
            self._check(end == right, f"a step may bring {req.rid} to {end} slots, {right} are right")
            self._check(end <= has, f"{req.rid} has {has} slots, and a step may write {end}")
            self._in_flight[req.rid].append(shape.num_tokens)

    def _published(self, batch: StepBatch, reqs: Sequence[Req], number: int, out: StepOutput) -> None:
        for req, count in zip(reqs, out.token_counts(len(reqs)), strict=True):
            if not req.left:
                self._lens[req.rid] += count
                self._in_flight[req.rid].pop(0)

    def _check(self, holds: bool, text: str) -> None:
        if not holds and len(self.wrong) < 5:
            self.wrong.append(f"decode steps: {text}")


def compare_growth(random: Random) -> str:
    """Asks for decode steps of random requests with as many available pages as make memory plentiful, with one less and
    with one more. What is wrong with the pages that the requests get, "" if nothing is."""
    size = random.choice((1, 2, 3, 4, 5, 8, 12, 16, 32))
    shape = random.choice((StepShape(), StepShape(2, 3, 3), StepShape(2, 6, 6)))
    reqs = [_random_request(random, row, size) for row in range(1, random.randint(2, 4))]
    ahead = max(running_batch._AHEAD_TOKENS // size, 1)
    plentiful = 2 * ahead * len(reqs)
    for num_available in (plentiful - 1, plentiful, plentiful + 1):
        right, ends = Counter[int](), list[int]()
        for req in reqs:
            most = req.final_len + shape.num_tokens - 1  # its last step computes as many rows as any other
            end = min(req.allocated_len + shape.num_tokens, most) + shape.num_spare
            ends.append(end)
            num_missing = max(math.ceil(end / size) - len(req.pages), 0)
            if num_missing and num_available >= plentiful:
                num_missing = max(num_missing, min(ahead, math.ceil(req.final_len / size) - len(req.pages)))
            right[req.row] = num_missing
        got = Counter[int]()

        def grow(req: Req, num_pages: int, got: Counter[int] = got) -> tuple[npt.NDArray[np.int32], Points]:
            got[req.row] += num_pages
            return np.arange(num_pages, dtype=np.int32), Points.none()

        running = RunningBatch(size, shape, lambda num: num, lambda num: num)
        running.add(reqs)
        lens = running.next_lens(shape)
        num_needed = running.num_pages_needed(lens, shape)
        batch = running.schedule_step(lens, shape, DepthChoice(shape.depth), num_available, grow)
        columns = [
            (req.row, column)
            for req in reqs
            for column in range(len(req.pages), len(req.pages) + right[req.row])
        ]
        written = list(zip(batch.page_writes.rows.tolist(), batch.page_writes.columns.tolist(), strict=True))
        if got != right or written != columns or (num_needed > 0) != (right.total() > 0):
            return (
                f"growth: {dict(got)} pages of {size} tokens are taken for a step of {shape.num_slots} slots with "
                f"{num_available} available, {dict(right)} are right"
            )
        if batch.seq_lens.tolist() != ends:
            return f"growth: a step of {shape.num_slots} slots leads to {batch.seq_lens.tolist()}, {ends} is right"
    return ""


def _random_request(random: Random, row: int, page_size: int) -> Req:
    """A request that decodes, with pages for its tokens so far and perhaps for some more."""
    length, max_new = random.randint(1, 40), random.randint(2, 60)
    message = TokenizedGenerateReq(
        rid=f"r{row}", input_ids=id_array(), sampling_params=SamplingParams(max_new_tokens=max_new)
    )
    req = Req(message, np.zeros(length, dtype=np.int32), frozenset(), 0, max_new, 1)
    req.row, req.allocated_len = row, length + random.randrange(max_new - 1)
    req.pages = array("i", [0] * (math.ceil(req.allocated_len / page_size) + random.choice((0, 0, 1))))
    return req
