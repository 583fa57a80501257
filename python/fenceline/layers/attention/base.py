"""AttentionBackend: plans the attention of a batch once; each layer then runs with that plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    ForwardMode,
    GraphDecodeInputs,
    VerifyInputs,
)


@dataclass(frozen=True, slots=True, eq=False)
class LayerRules:
    """What attention of a layer does beside softmax(scale q k^T) v.

    ``window``: a query attends to its own token and the ``window - 1`` before it (None: to all). ``soft_cap`` c: a
    score s becomes c tanh(s / c), 0 means that it does not. ``sinks`` [num_heads] float32: of each head one more score,
    of no token and with a value of zero. A soft cap does not cap the sinks.
    """

    window: int | None = None
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether there is nothing beside."""
        return self.window is None and self.soft_cap == 0.0 and self.sinks is None


PLAIN = LayerRules()
NO_RULES: Mapping[int, LayerRules] = {}


def window_of(rules: Mapping[int, LayerRules]) -> int | None:
    """The window that all of some layers have. Plans depend on it; see ``by_window``."""
    windows = {rule.window for rule in rules.values()}
    assert len(windows) <= 1, f"a backend attends with one window, not with {windows}"
    return next(iter(windows), None)


class AttentionBackend(ABC):
    """Makes plans and owns the workspace that they share. It attends in layers of one window; ``rules`` in its
    constructor are those of layers by their place in the pool, and layers that are not there have none."""

    @abstractmethod
    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Prepare one eager batch. No host synchronisation."""

    def persistent(self, mode: ForwardMode) -> bool:
        """Whether kernels of that mode are persistent: they hold their SMs until all tiles are done, so that no other
        kernel may need SMs at the same time (edge sm_exclusive)."""
        return False

    def warm_up(self) -> None:
        """Load what only some batches need, so that none of them waits for a compiler. Called once, at start-up."""
        return

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        """A plan that a graph of this bucket can capture; None if this backend (or this size) cannot be captured.

        Called once for each bucket, before its capture. What it needs besides ``inputs`` outlives all graphs.
        """
        return None

    def plan_verify(self, inputs: VerifyInputs) -> AttentionPlan | None:
        """A plan for a few queries of each request, of a chain or a tree, that a graph can capture and eager steps can
        use; None if this backend has none. A window is at least as long as a tree has nodes. The first plan of a shape
        may allocate, so it is made outside captures. ``prepare`` is called at the beginning of each step.

        A backend whose plan is made on the host from lengths cannot serve here, for the host learns the lengths of
        speculative steps one step late: so FlashInfer (its kernels split the keys by a plan, and its packed mask covers
        all keys and would be written again in each step) and FA3 (no mask by token) do not.
        """
        return None

    def before_replay(self, bucket: int, seq_lens_cpu: npt.NDArray[np.int64]) -> None:
        """Bring the host's part of the bucket's plan up to date, on FORWARD, before each replay or eager run of it.

        ``seq_lens_cpu`` [n <= bucket] include this step's token. Backends without a plan step have nothing to do.
        """
        return
