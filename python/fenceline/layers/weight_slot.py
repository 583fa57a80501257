"""WeightSlot: where one tensor of a checkpoint goes, and which part of it this shard keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Name in the checkpoint → place in the model.
WeightSlots = dict[str, "WeightSlot"]


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """``dest`` is a view into a parameter; it takes the ``[start, start + dest.shape[dim])`` part along ``dim`` of a
    checkpoint tensor of ``full_shape``. ``dest`` may be empty: a rank past the end of a padded vocabulary."""

    dest: torch.Tensor
    full_shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` (any float type and device) into place, converting to the parameter's type.

        Raises ``ValueError`` for a wrong shape or a type that is no plain float (a quantised checkpoint).
        """
        if tuple(tensor.shape) != self.full_shape:
            raise ValueError(
                f"weight {name} has shape {list(tensor.shape)}, config.json asks for {list(self.full_shape)}; "
                f"the weights and config.json belong to different models"
            )
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ValueError(f"weight {name} is {tensor.dtype}; use the model's unquantised weights")
        self.dest.copy_(tensor.narrow(self.dim, self.start, self.dest.shape[self.dim]))


def whole(param: torch.Tensor) -> WeightSlot:
    """The slot of a parameter that is not split."""
    return WeightSlot(param, tuple(param.shape))
