"""Drafts whose depth is another one in every step, by a seed: no answer may depend on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from fenceline.model_executor.step import DepthChoice


class RandomDepths:
    """A ``DraftDepth`` that notes what has come of its choices: how often a request got how many tokens, by depth."""

    def __init__(self, depths: Sequence[int], seed: int) -> None:
        self.counts: dict[int, Counter[int]] = {depth: Counter() for depth in depths}
        self._depths = depths
        self._random = Random(seed)

    def choose(self, num_reqs: int, num_drafting: int) -> DepthChoice:
        """See ``DraftDepth``."""
        return DepthChoice(self._random.choice(self._depths), "random")

    def published(self, depth: int, counts: npt.NDArray[np.int64]) -> None:
        """See ``DraftDepth``."""
        self.counts[depth].update(counts.tolist())
