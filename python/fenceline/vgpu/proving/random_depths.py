"""Chooses the depth of the draft at random in every step, from a seed: no answer may depend on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from fenceline.model_executor.step import DepthChoice


class RandomDepths:
    """A ``DraftDepth`` that counts the results of its choices: for each depth how often a request got how many
    tokens."""

    def __init__(self, depths: Sequence[int], seed: int) -> None:
        self.counts: dict[int, Counter[int]] = {depth: Counter() for depth in depths}
        self._depths = depths
        self._random = Random(seed)

    def choose(self, num_reqs: int, num_drafting: int, most: int) -> DepthChoice:
        """See ``DraftDepth``."""
        depth = self._random.choice(self._depths)
        if depth > most:
            return DepthChoice(max(one for one in self._depths if one <= most), "memory")
        return DepthChoice(depth, "random")

    def published(self, depth: int, counts: npt.NDArray[np.int64]) -> None:
        """See ``DraftDepth``."""
        self.counts[depth].update(counts.tolist())
