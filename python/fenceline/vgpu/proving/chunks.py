"""How many tokens of each prompt a prefill step computes, and how many prompts share a step, computed again.

A prompt gets as many tokens as it has left, as the step has left, and as may be scored. On a CPU the step's work is
limited too, where attention to a long prefix takes longer than the tokens themselves. A prompt that is not completed
leaves at least as many tokens as a draft looks ahead. No answer depends on any of this.
"""

from __future__ import annotations

import math
from typing import Any

from fenceline.scheduler import prefill, schedule_policy
from fenceline.scheduler.prefill import PrefillPlan
from fenceline.scheduler.req import Req
from fenceline.scheduler.schedule_policy import PrefixWork
from fenceline.scheduler.scheduler import Scheduler
from fenceline.vgpu.proving.events import around

# On a CPU, in place of the model's: behind so many tokens a token counts as two.
_EVEN_TOKENS = 8


class Chunks:
    """Follows the plans of ``scheduler``. ``wrong``: what was decided wrongly."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.wrong: list[str] = []
        self._scheduler = scheduler
        config = scheduler.config
        self._splits = config.chunked_prefill_size is not None
        self._limits_work = self._splits and config.device == "cpu"
        model = config.model
        heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        products = model.hidden_size * (2 * heads + 2 * kv_heads + 3 * model.active_mlp_size)
        # Behind so many tokens, attention of a token takes as long as its products.
        self._even = max(products // (2 * heads), 1)
        if self._limits_work:
            work = scheduler.planner._prefix_work
            right = PrefixWork(self._even)
            self._check(work == right, f"the limit on work is {work}, {right} is right")
            self._even = _EVEN_TOKENS
            scheduler.planner._prefix_work = PrefixWork(_EVEN_TOKENS)
        flop = 2 * products * model.num_layers
        self._step_cost = schedule_policy._STEP_TOKENS + schedule_policy._STEP_FLOP // flop
        cost = scheduler.planner.sharing.cost_tokens
        self._check(cost == self._step_cost, f"a step costs {cost} tokens, {self._step_cost} are right")
        around(scheduler.planner, "_shared_tokens", after=self._shares)
        self._num_waiting = 0  # tokens of waiting prompts, when the step is planned
        self._step_tokens = 0
        self._chunked: Req | None = None
        around(scheduler.planner, "plan", before=self._begin, after=self._end)

    def _begin(
        self, waiting: object, step_tokens: int, chunked: Req | None, *args: Any, **kwargs: Any
    ) -> None:
        self._step_tokens, self._chunked = step_tokens, chunked
        reqs = list(self._scheduler.waiting)
        counted = reqs[: schedule_policy._MAX_COUNTED]
        total = sum(len(req.prompt_ids) + len(req.output_ids) for req in counted)
        self._num_waiting = total * len(reqs) // max(len(counted), 1)

    def _shares(self, said: int, plan: Any, num_waiting: int) -> None:
        """Of what waits, as large a share is cached as of the step's prompts so far."""
        parts = [
            (req.num_tokens, req.allocated_len - len(chunk.token_ids))
            for req, chunk in zip(plan.reqs, plan.chunks, strict=True)
            if req is not self._chunked
        ]
        num_prompt, num_cached = (sum(column) for column in zip(*parts, strict=True)) if parts else (0, 0)
        waits = num_waiting * (num_prompt - num_cached) // num_prompt if num_prompt else num_waiting
        right = max(math.isqrt(waits * self._step_cost), schedule_policy._MIN_SHARED_TOKENS)
        self._check(said == right, f"no further prompt joins {said} tokens, {right} are right")

    def _work(self, num_tokens: float, start: int) -> float:
        """In tokens without a prefix: each one's products, and its attention to all in front of it."""
        return num_tokens + num_tokens * (start + num_tokens / 2) / self._even

    def _end(self, plan: PrefillPlan | None, *args: Any, **kwargs: Any) -> None:
        if plan is None:
            return
        left, left_scored = self._step_tokens, prefill.MAX_SCORED_TOKENS
        left_work = 1.25 * self._work(self._step_tokens, 0)
        num_before = num_prompt = num_new = 0
        is_beside = self._chunked is not None and plan.reqs[0] is not self._chunked
        for number, (req, seq) in enumerate(zip(plan.reqs, plan.batch.chunks, strict=True)):
            start, size = int(plan.batch.starts[number]), len(seq.token_ids)
            # Rounding decides about a token that just fits.
            right = [self._size(req, start, left, left_scored, left_work + slack) for slack in (-1e-6, 1e-6)]
            self._check(
                size in right, f"{size} tokens of {req.rid} are computed behind {start}, {right} are right"
            )
            end, num_after = start + size, max(self._scheduler.memory.tree.lookahead, 1)
            following = tuple(req.token_ids()[end : end + num_after].tolist())
            self._check(
                seq.following == following, f"{seq.following} follow {req.rid}, {following} are right"
            )
            if number and not is_beside:
                # Of what waits, as large a share is cached as of the prompts so far.
                waits = self._num_waiting * num_new // num_prompt if num_prompt else self._num_waiting
                most = max(math.isqrt(waits * self._step_cost), schedule_policy._MIN_SHARED_TOKENS)
                self._check(num_before < most, f"{req.rid} joins {num_before} tokens, and {most} are a step")
            left -= size
            left_work -= self._work(size, start)
            first_scored = max(req.source.logprob_start_len, start)
            left_scored -= max(start + size - first_scored, 0) if req.scores_prompt else 0
            num_before += size
            if req is not self._chunked:
                num_prompt += req.num_tokens
                num_new += req.num_tokens - start

    def _size(self, req: Req, start: int, left: int, left_scored: int, left_work: float) -> int:
        remaining = size = req.num_tokens - start
        lookahead = self._scheduler.memory.tree.lookahead
        if self._splits:
            size = min(size, left)
        if self._limits_work:
            most = 0
            while most < size and self._work(most + 1, start) <= left_work:
                most += 1
            size = min(size, max(most, self._scheduler.planner.step_tokens // 4, lookahead, 1))
        if req.scores_prompt:
            size = min(size, max(req.source.logprob_start_len - start, 0) + left_scored)
        return size if size == remaining else max(min(size, remaining - lookahead), 0)

    def _check(self, holds: bool, text: str) -> None:
        if not holds and len(self.wrong) < 5:
            self.wrong.append(f"chunks: {text}")
