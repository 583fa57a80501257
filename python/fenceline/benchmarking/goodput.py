"""--find-max-goodput: the highest rate of requests at which a wanted share of them meets the limits of --goodput."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

_PRECISION = 0.05  # of the rate; runs of some hundred requests tell no more
_FIRST_STEP = 0.2  # away from what the server sustains, of that; each further step is twice as wide
_MOST = 64  # times that


@dataclass(frozen=True, slots=True)
class Trial:
    """One run at ``request_rate`` requests per second (inf: all at once) with the prompts and arrivals of ``seed``.
    ``request_throughput`` and ``request_goodput`` are requests per second; the latter and ``good_request_fraction`` are
    of those that met the limits."""

    request_rate: float
    seed: int
    request_throughput: float
    request_goodput: float
    good_request_fraction: float


async def find_max_goodput(probe: Callable[[float, int], Awaitable[Trial]], wanted: float, seed: int) -> list[Trial]:
    """Run ``probe(rate, seed)`` at rates that close in on the highest one with a fraction of at least ``wanted``, each
    time with the next seed. The first run sends all requests at once: what the server then completes per second is
    about what it can sustain. Returns the runs in their order; :func:`best_of` chooses among them."""
    trials = [await probe(math.inf, seed)]

    async def meets(rate: float) -> bool:
        trials.append(await probe(rate, seed + len(trials)))
        return trials[-1].good_request_fraction >= wanted

    capacity = trials[0].request_throughput
    if trials[0].good_request_fraction >= wanted or capacity == 0:
        return trials
    low, high, rate, step = 0.0, math.inf, capacity, _FIRST_STEP
    while _PRECISION * capacity < rate < _MOST * capacity and high - low > _PRECISION * rate:
        if await meets(rate):
            low = rate
        else:
            high = rate
        if low and high < math.inf:
            rate = (low + high) / 2
        else:  # a server under less pressure may sustain more
            rate = low * (1 + step) if low else high / (1 + step)
            step *= 2
    return trials


def best_of(trials: Sequence[Trial], wanted: float) -> Trial | None:
    """The run with the highest rate that met ``wanted``; None if none did."""
    good = [trial for trial in trials if trial.good_request_fraction >= wanted]
    return max(good, key=lambda trial: trial.request_rate, default=None)
