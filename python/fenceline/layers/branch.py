"""Branch: a part of a decoder layer that reads the residual stream and adds its result to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.linear import RowParallelLinear
from fenceline.layers.weight import RMSNorm, WeightSlots


@dataclass(frozen=True, slots=True)
class BranchNorms:
    """Names in the checkpoint, below the layer's, of the norms around a branch; None: there is no such norm."""

    before: str | None = None
    after: str | None = None


class Branch(ABC):
    """x += scale * after(f(before(x))); f is what subclasses are.

    Most families have no norm ``after`` and a scale of one. GLM-4 has both norms (sandwich norms), OLMo 2 the second
    alone, Granite a scale.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, norms: BranchNorms) -> None:
        """Parameters are uninitialised."""
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norms = norms
        self.scale = config.multipliers.residual
        self.input_norm: RMSNorm | None = None if norms.before is None else context.norm(size, eps)
        self.output_norm: RMSNorm | None = None if norms.after is None else context.norm(size, eps)

    @abstractmethod
    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The residual stream x [T, hidden_size], added to in place."""

    def add_product(self, x: torch.Tensor, linear: RowParallelLinear, y: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] += scale * after(linear(y)), in place; returns x."""
        return linear.add_to(x, y) if self.adds_plainly else self.add(x, linear.forward(y))

    @property
    def adds_plainly(self) -> bool:
        """Whether nothing comes between f and the residual stream, so that a kernel may add its result."""
        return self.output_norm is None and self.scale == 1.0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] += scale * after(y), in place; returns x."""
        return x.add_(y if self.output_norm is None else self.output_norm.forward(y), alpha=self.scale)

    @abstractmethod
    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots by their names in the checkpoint, without those of the norms around the branch."""

    def norm_slots(self, prefix: str) -> WeightSlots:
        """The slots of the norms around it; ``prefix`` is the layer's."""
        slots: WeightSlots = {}
        if self.input_norm is not None:
            slots |= self.input_norm.weight_slots(f"{prefix}{self.norms.before}")
        if self.output_norm is not None:
            slots |= self.output_norm.weight_slots(f"{prefix}{self.norms.after}")
        return slots
