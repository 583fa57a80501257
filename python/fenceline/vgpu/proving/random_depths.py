"""The engine's own choice of the draft's depth (``AdaptiveDepth``), with random times of steps, on which no answer may
depend. Each choice is compared with its definition.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from fenceline.model_executor.step import DepthChoice, StepCosts
from fenceline.scheduler.draft_depth import AdaptiveDepth

_SIZES = (1, 2, 4)  # of batches whose times are known


class RandomDepths:
    """A ``DraftDepth`` that counts the results of its choices: for each depth how often a request got how many
    tokens. Raises AssertionError if a choice is not the one that its definition gives."""

    def __init__(self, depths: Sequence[int], seed: int, spread: float = 1.0) -> None:
        """``spread``: how much the time of a step of some depth varies, from 0 to 1."""
        self.counts: dict[int, Counter[int]] = {depth: Counter() for depth in depths}
        self._depths = list(depths)
        self._random = Random(seed)
        self._spread = spread
        self._chooser = AdaptiveDepth(self._depths, self._draw())
        # By position: the estimated share of drafts that are accepted there, if all before them have been.
        self._accepted = [0.7] * self._depths[-1]
        self._usual = self._depths[-1]
        self._num_shallow = 0  # steps since one of the greatest depth

    def choose(self, num_reqs: int, num_drafting: int, most: int) -> DepthChoice:
        """See ``DraftDepth``."""
        self._chooser._costs = costs = self._draw()
        choice = self._chooser.choose(num_reqs, num_drafting, most)
        row = next((i for i, size in enumerate(_SIZES) if size >= num_reqs), len(_SIZES) - 1)
        right = self._right_choice(costs.seconds[row], num_reqs, num_drafting, most)
        assert choice[:2] == right[:2] and np.allclose(choice.rates, right.rates), (
            f"the draft's depth is {choice}, {right} is right for {num_reqs} requests, of which {num_drafting} draft"
        )
        return choice

    def _draw(self) -> StepCosts:
        """Deeper steps are longer on average, and each depth is the best in some steps."""
        seconds = tuple(
            tuple(
                1 + depth + depth * self._random.uniform(-self._spread, self._spread)
                for depth in self._depths
            )
            for _ in _SIZES
        )
        return StepCosts(_SIZES, seconds)

    def _right_choice(
        self, seconds: Sequence[float], num_reqs: int, num_drafting: int, most: int
    ) -> DepthChoice:
        tokens = [
            num_reqs + num_drafting * sum(math.prod(self._accepted[: n + 1]) for n in range(depth))
            for depth in self._depths
        ]
        rates = tuple(num / time for num, time in zip(tokens, seconds, strict=True))
        of_depth = dict(zip(self._depths, rates, strict=True))
        best, deepest, why = max(self._depths, key=of_depth.__getitem__), self._depths[-1], "kept"
        if of_depth[best] > 1.02 * of_depth[self._usual]:
            self._usual, why = best, "best"
        chosen = self._usual
        self._num_shallow += 1
        if chosen != deepest and num_drafting:
            # A probe is due when what it loses is a hundredth of the tokens since the last one.
            lost = of_depth[chosen] * seconds[-1] - tokens[-1]
            interval = math.ceil(lost / (0.01 * tokens[self._depths.index(chosen)]))
            if self._num_shallow > max(interval, 8):
                chosen, why = deepest, "probe"
        if chosen > most:
            chosen = max((depth for depth in self._depths if depth <= most), key=of_depth.__getitem__)
            why = "memory"
        self._num_shallow = 0 if chosen == deepest else self._num_shallow
        return DepthChoice(chosen, why, rates)

    def published(self, depth: int, counts: npt.NDArray[np.int64]) -> None:
        """See ``DraftDepth``."""
        self.counts[depth].update(counts.tolist())
        self._chooser.published(depth, counts)
        for place in range(depth):
            num_verified = sum(count > place for count in counts.tolist())
            num_accepted = sum(count > place + 1 for count in counts.tolist())
            if num_verified:
                weight = num_verified / (num_verified + 24)
                share = num_accepted / num_verified
                self._accepted[place] = (1 - weight) * self._accepted[place] + weight * share


def compare_depths(seed: int, num_steps: int = 500) -> None:
    """Raises AssertionError if one of many choices is not the one that its definition gives. Depths are about equally
    fast here, so that each is the best for a while, and deeper ones are probed; few drafts are accepted for long."""
    random = Random(seed)
    depths = random.choice(((0, 1, 2, 3), (1, 2), (0, 2, 5)))
    chooser = RandomDepths(depths, seed, spread=random.choice((0.0, 0.05, 0.3)))
    share = 0.5
    for _ in range(num_steps):
        if random.random() < 0.05:
            share = random.random()
        num_reqs = random.randint(1, 5)
        num_drafting = random.randint(0, num_reqs)
        most = random.choice((depths[-1], depths[-1], depths[-1], random.choice(depths)))
        depth = chooser.choose(num_reqs, num_drafting, most).depth
        counts = []
        for _ in range(num_drafting):
            count = 1
            while count <= depth and random.random() < share:
                count += 1
            counts.append(count)
        chooser.published(depth, np.array(counts, dtype=np.int64))
