"""AttentionBackend: plans the attention of a batch once; each layer then runs with that plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.forward_batch import AttentionInputs, AttentionPlan, ForwardMode, GraphDecodeInputs, VerifyInputs


@dataclass(frozen=True, slots=True, eq=False)
class LayerRules:
    """What a layer's attention computes in addition to softmax(scale q k^T) v.

    ``window``: a query attends to its own token and the ``window - 1`` before it (None: to all). ``soft_cap`` c: a
    score s becomes c tanh(s / c); 0 means no cap. ``sinks`` [num_heads] float32: one more score for each head, which
    belongs to no token and has a value of zero. The soft cap is not applied to the sinks.

    ``rows`` names the layer's rows in the KV pool that hold the keys and the values. It may be the same row for both
    (``latent``). ``value_dim``: the layer needs only so many of each result's features, the first ones, so the others
    are undefined and need not be computed (None: all). ``selects``: a query attends to the tokens that an indexer has
    selected for it (``AttentionPlan.select``).
    """

    window: int | None = None
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    rows: tuple[str, str] = ("k", "v")
    value_dim: int | None = None
    selects: bool = False

    @property
    def shared(self) -> bool:
        """Whether one row holds both keys and values."""
        return self.rows[0] == self.rows[1]

    @property
    def plain(self) -> bool:
        """Whether the layer has none of these, so that attention is softmax(scale q k^T) v with rows k and v."""
        plain_scores = self.window is None and self.soft_cap == 0.0 and self.sinks is None
        return plain_scores and self.rows == PLAIN.rows and not self.selects


PLAIN = LayerRules()
NO_RULES: Mapping[int, LayerRules] = {}


def window_of(rules: Mapping[int, LayerRules]) -> int | None:
    """The one window that all layers in ``rules`` have. Plans depend on it; see ``by_kind``."""
    windows = {rule.window for rule in rules.values()}
    assert len(windows) <= 1, f"a backend attends with one window, not with {windows}"
    return next(iter(windows), None)


class AttentionBackend(ABC):
    """Makes plans and owns the workspace that they share. All its layers have the same window. ``rules`` in its
    constructor maps layers, by their index in the pool, to their rules; layers that are not in it have none."""

    @abstractmethod
    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Prepare one eager batch. No host synchronisation."""

    def persistent(self, mode: ForwardMode) -> bool:
        """Whether the kernels for ``mode`` are persistent: they hold their SMs until all tiles are done, so no other
        kernel that needs SMs may run at the same time (edge sm_exclusive)."""
        return False

    def is_compiled(self, mode: ForwardMode) -> bool:
        """Whether steps of this mode can run without a compiler that takes a minute or more."""
        return True

    def begin_to_compile(self) -> None:
        """Compile what prefill steps need in the background, unless it is compiled. Who needs it earlier waits."""
        return

    def warm_up(self) -> None:
        """Load the kernels that only some batches need, so that no step waits for a compiler. Called once at start."""
        return

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        """A plan that a graph of this bucket can capture; None if this backend (or this size) cannot be captured.
        Called once for each bucket, before its warm-up and its capture, which use the plan as it is then: for a batch
        of padding, whose lengths are all 1. What it needs besides ``inputs`` outlives all graphs."""
        return None

    def plan_verify(self, inputs: VerifyInputs) -> AttentionPlan | None:
        """A plan for a few queries of each request, which form a chain or a tree; None if this backend has none. A
        graph can capture it, and eager steps can use it. If there is a window, it has at least as many tokens as the
        tree has nodes. The first plan of a shape may allocate, so it is made outside captures. ``prepare`` is called
        at the beginning of each step.

        A backend that plans on the host from the lengths cannot do this, because the host learns the lengths of
        speculative steps one step late. This rules out FlashInfer, whose kernels split the keys by such a plan and
        whose packed mask covers all keys and would have to be written again in each step. FA3 has no mask for single
        tokens.
        """
        return None

    def before_replay(self, bucket: int, seq_lens_cpu: npt.NDArray[np.int64]) -> None:
        """Bring the host's part of the bucket's plan up to date, on FORWARD, before each replay of it and each eager
        run of a step. ``seq_lens_cpu`` [n <= bucket] include this step's token. Backends without a plan step have
        nothing to do."""
        return
