"""What attention is to the rest: a backend plans a batch once, each layer then runs through the plan."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from fenceline.layers.forward_batch import AttentionInputs


class AttentionPlan(ABC):
    """One batch's attention, the same for all layers."""

    @abstractmethod
    def forward(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store ``k``, ``v`` at the batch's slots, then attend causally over prefix and new tokens.

        q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] → [T, num_heads, head_dim], in q's
        dtype. Runs on the current stream (FORWARD).
        """


class AttentionBackend(ABC):
    """Makes plans; owns whatever workspace they share."""

    @abstractmethod
    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Prepare one batch. No host synchronisation."""
