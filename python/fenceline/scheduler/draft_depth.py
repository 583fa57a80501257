"""How many tokens a step's draft proposes, one after the other: the depth of the step.

A deeper step takes longer and may yield more. How long is a table that is measured at start (``StepCosts``); how much
follows from the share of drafts that were accepted lately, in each place behind the last token. Steps that verify
nothing in a place tell nothing about it, so now and then one goes as deep as possible, seldom enough to lose a
hundredth of the tokens at most.

A choice is a function of the table and of what has been published, without a clock: schedulers that see the same choose
the same, and the flight record has each choice with what it was made from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fenceline.model_executor.step import DepthChoice, StepCosts

I64 = npt.NDArray[np.int64]

_UNKNOWN = 0.7  # of drafts in a place where none has been verified yet are taken to be accepted
_MEMORY = 24  # drafts of a place: so many later ones weigh as much as all before them
_GAIN = (
    0.02  # by which another depth must be better to be taken: changes are not free, and shares are not exact
)
_PROBE_SHARE = 0.01  # of the tokens, that may be lost to steps that are deeper than what is best
_LEAST_INTERVAL = 8  # steps from one of them to the next, where they lose nothing


class DraftDepth(Protocol):
    """Chooses the depth of each decode step."""

    def choose(self, num_reqs: int, num_drafting: int) -> DepthChoice:
        """That of a step of ``num_reqs`` requests; of ``num_drafting`` of them drafts may be accepted."""
        ...

    def published(self, depth: int, counts: I64) -> None:
        """A step of ``depth`` has yielded ``counts`` [N] tokens for those requests of it whose drafts may be
        accepted."""
        ...


class FixedDepth:
    """Always the same."""

    def __init__(self, depth: int) -> None:
        self._choice = DepthChoice(depth)

    def choose(self, num_reqs: int, num_drafting: int) -> DepthChoice:
        return self._choice

    def published(self, depth: int, counts: I64) -> None:
        return


class AdaptiveDepth:
    """Of a few depths the one that promises most tokens in a second.

    ``depths`` ascend; ``costs`` are of steps of all of them.
    """

    def __init__(self, depths: Sequence[int], costs: StepCosts) -> None:
        self._depths = depths
        self._costs = costs
        # Of drafts that follow accepted ones, by their place.
        self._acceptance = [_UNKNOWN] * depths[-1]
        self._best = len(depths) - 1  # the choice that holds until another is better
        self._num_shallow = 0  # steps since the last one of the greatest depth

    def choose(self, num_reqs: int, num_drafting: int) -> DepthChoice:
        seconds = self._costs.of(num_reqs)
        tokens = self._expected(num_reqs, num_drafting)
        rates = tuple([num / time for num, time in zip(tokens, seconds, strict=True)])
        best, deepest, why = max(range(len(rates)), key=rates.__getitem__), len(rates) - 1, "kept"
        if rates[best] > rates[self._best] * (1 + _GAIN):
            self._best, why = best, "best"
        chosen = self._best
        self._num_shallow += 1
        if chosen < deepest and num_drafting:
            lost = seconds[deepest] * rates[chosen] - tokens[deepest]
            if self._num_shallow > max(math.ceil(lost / (_PROBE_SHARE * tokens[chosen])), _LEAST_INTERVAL):
                chosen, why = deepest, "probe"
        if chosen == deepest:
            self._num_shallow = 0
        return DepthChoice(self._depths[chosen], why, rates)

    def published(self, depth: int, counts: I64) -> None:
        if depth == 0 or len(counts) == 0:
            return
        at_least = np.bincount(counts, minlength=depth + 2)[::-1].cumsum()[::-1].tolist()  # so many tokens
        for place in range(depth):
            num_verified, num_accepted = at_least[place + 1], at_least[place + 2]
            if num_verified == 0:
                return
            weight = num_verified / (num_verified + _MEMORY)
            self._acceptance[place] += weight * (num_accepted / num_verified - self._acceptance[place])

    def _expected(self, num_reqs: int, num_drafting: int) -> list[float]:
        """Tokens of a step, by depth: one for each request, and the drafts up to the first that is rejected."""
        reached = [0.0, *accumulate(accumulate(self._acceptance, mul))]
        return [num_reqs + num_drafting * reached[depth] for depth in self._depths]
