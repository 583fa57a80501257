"""The engine's own choice of the draft's depth (``AdaptiveDepth``), with random times of steps, on which no answer may
depend."""

from __future__ import annotations

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
    tokens."""

    def __init__(self, depths: Sequence[int], seed: int) -> None:
        self.counts: dict[int, Counter[int]] = {depth: Counter() for depth in depths}
        self._depths = list(depths)
        self._random = Random(seed)
        self._chooser = AdaptiveDepth(self._depths, self._draw())

    def choose(self, num_reqs: int, num_drafting: int, most: int) -> DepthChoice:
        self._chooser._costs = self._draw()
        return self._chooser.choose(num_reqs, num_drafting, most)

    def _draw(self) -> StepCosts:
        """Deeper steps are longer on average, and each depth is the best in some steps."""
        uniform = self._random.uniform
        seconds = tuple(tuple(1 + depth + depth * uniform(-1.0, 1.0) for depth in self._depths) for _ in _SIZES)
        return StepCosts(_SIZES, seconds)

    def published(self, depth: int, counts: npt.NDArray[np.int64]) -> None:
        self.counts[depth].update(counts.tolist())
        self._chooser.published(depth, counts)
