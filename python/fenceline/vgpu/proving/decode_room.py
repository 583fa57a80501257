"""Whether decode steps get the memory that they need and no more, and whether requests are retracted for them only if
they must be, computed again from the requests alone.

A decode step needs pages for the tokens that it may yield, and for the slots of its drafts behind these. Where memory
is plentiful, a request gets pages for some tokens more, but for none behind its last. None of this changes an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fenceline.config.draft_config import StepShape
from fenceline.model_executor.step import DecodeBatch, ScheduleBatch, StepOutput
from fenceline.scheduler import running_batch
from fenceline.scheduler.req import Req
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
        # Of each request: its length with the published steps, and the most tokens of each decode step in flight.
        self._lens: dict[str, int] = {}
        self._in_flight: dict[str, list[int]] = {}
        around(scheduler, "deepest_with_room", after=self._chose)
        around(scheduler, "make_room", before=self._makes_room, after=self._made_room)
        around(scheduler, "retract", before=self._retracts)
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

    # --- what is decided -----------------------------------------------------------------------------

    def _chose(self, depth: int) -> None:
        """The deepest draft for which there is memory."""
        shapes = self._scheduler.shapes
        right = max((depth for depth, shape in shapes.items() if self._has_room(shape)), default=min(shapes))
        self._check(depth == right, f"there is said to be memory for drafts of depth {depth}, it is {right}")

    def _makes_room(self, shape: StepShape) -> None:
        self._shape = shape

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
        # A step that needs none is not told.
        is_right = available == left or (available == num_needed == 0)
        self._check(is_right, f"{available} pages are said to be left for a decode step, {left} are")
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
            more = math.ceil(final / self._size) - len(req.pages)
            right = max(right, min(self._ahead, more))
        self._check(
            num_pages == right, f"{req.rid} gets {num_pages} pages for a decode step, {right} are right"
        )

    def _launches(self, batch: ScheduleBatch, reqs: Sequence[Req]) -> None:
        if not isinstance(batch, DecodeBatch):
            for seq, req in zip(batch.seqs, reqs, strict=True):
                self._lens[req.rid], self._in_flight[req.rid] = seq.seq_len, []
            return
        shape = self._scheduler.shapes[batch.depth.depth]
        for req, end in zip(reqs, batch.seq_lens.tolist(), strict=True):
            right, has = self._end_of(req, shape), len(req.pages) * self._size
            self._check(end == right, f"a step may bring {req.rid} to {end} slots, {right} are right")
            self._check(end <= has, f"{req.rid} has {has} slots, and a step may write {end}")
            self._in_flight[req.rid].append(shape.num_tokens)

    def _published(self, batch: DecodeBatch, reqs: Sequence[Req], number: int, out: StepOutput) -> None:
        for req, count in zip(reqs, out.token_counts(len(reqs)), strict=True):
            if not req.left:
                self._lens[req.rid] += count
                self._in_flight[req.rid].pop(0)

    def _check(self, holds: bool, text: str) -> None:
        if not holds and len(self.wrong) < 5:
            self.wrong.append(f"decode steps: {text}")
