"""Chooses the depth of each decode step: how many tokens its draft proposes one after the other.

A deeper step takes longer and may yield more tokens. The times are measured at start-up (``StepCosts``). The number of
tokens is estimated from the share of drafts that were accepted recently, at each position after the last token. A
shallow step says nothing about later positions, so now and then a step of the greatest depth probes them. Such probes
are so rare that they cost at most 0.5 % of the tokens.

A choice depends on the table of times and on published results only, not on a clock. So all ranks choose the same, and
the flight recorder records each choice with the rates that it was based on.
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

# The share of drafts that is assumed to be accepted at a position where none has been verified yet.
_INITIAL_ACCEPTANCE = 0.7
# How slowly the estimate of a position changes: this many new drafts weigh as much as all earlier ones together.
_HALF_WEIGHT = 24
# Another depth must be better by this share to be chosen, because changes are not free and the estimates not exact.
_MIN_GAIN = 0.02
# The share of the tokens that may be lost to probes, which are deeper than the best depth.
_PROBE_SHARE = 0.005
# The minimum number of steps between two probes, even if they lose nothing.
_MIN_PROBE_INTERVAL = 8


class DraftDepth(Protocol):
    """Chooses the depth of each decode step."""

    def choose(self, num_reqs: int, num_drafting: int, most: int) -> DepthChoice:
        """The depth of a step of ``num_reqs`` requests, of which ``num_drafting`` may have drafts accepted. ``most`` is
        the greatest depth for which there is memory."""
        ...

    def published(self, depth: int, counts: I64) -> None:
        """A step of ``depth`` has been published. ``counts`` [N] are the numbers of tokens that it yielded for those of
        its requests whose drafts may be accepted."""
        ...


class AdaptiveDepth:
    """Chooses the depth with the highest estimated number of tokens per second. ``depths`` are the possible depths,
    ascending. ``costs`` has the times of steps of each of them."""

    def __init__(self, depths: Sequence[int], costs: StepCosts) -> None:
        self._depths = depths
        self._costs = costs
        # By position: the share of drafts that are accepted, of those whose predecessors were all accepted.
        self._acceptance = [_INITIAL_ACCEPTANCE] * depths[-1]
        self._best = len(depths) - 1  # the index of the depth that is used until another one is better
        self._num_shallow = 0  # steps since the last one of the greatest depth

    def choose(self, num_reqs: int, num_drafting: int, most: int) -> DepthChoice:
        seconds = self._costs.of(num_reqs)
        tokens = self._expected(num_reqs, num_drafting)
        rates = tuple([num / time for num, time in zip(tokens, seconds, strict=True)])
        best, deepest, why = max(range(len(rates)), key=rates.__getitem__), len(rates) - 1, "kept"
        if rates[best] > rates[self._best] * (1 + _MIN_GAIN):
            self._best, why = best, "best"
        chosen = self._best
        self._num_shallow += 1
        if chosen < deepest and num_drafting:
            lost = seconds[deepest] * rates[chosen] - tokens[deepest]
            if self._num_shallow > max(math.ceil(lost / (_PROBE_SHARE * tokens[chosen])), _MIN_PROBE_INTERVAL):
                chosen, why = deepest, "probe"
        if self._depths[chosen] > most:  # self._best stays, and is used again when there is memory
            possible = [index for index, depth in enumerate(self._depths) if depth <= most]
            chosen, why = max(possible, key=rates.__getitem__), "memory"
        if chosen == deepest:
            self._num_shallow = 0
        return DepthChoice(self._depths[chosen], why, rates)

    def published(self, depth: int, counts: I64) -> None:
        if depth == 0 or len(counts) == 0:
            return
        # at_least[n]: the number of requests that got at least n tokens.
        at_least = np.bincount(counts, minlength=depth + 2)[::-1].cumsum()[::-1].tolist()
        for place in range(depth):
            num_verified, num_accepted = at_least[place + 1], at_least[place + 2]
            if num_verified == 0:
                return
            weight = num_verified / (num_verified + _HALF_WEIGHT)
            self._acceptance[place] += weight * (num_accepted / num_verified - self._acceptance[place])

    def _expected(self, num_reqs: int, num_drafting: int) -> list[float]:
        """The expected number of tokens of a step of each depth: one for each request, and the drafts before the first
        one that is rejected."""
        reached = [0.0, *accumulate(accumulate(self._acceptance, mul))]
        return [num_reqs + num_drafting * reached[depth] for depth in self._depths]
