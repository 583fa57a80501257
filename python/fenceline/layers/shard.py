"""Shard: which part of every tensor-parallel layer this process holds, and how the parts come together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Communicator(Protocol):
    """What ranks do together, on the current stream. All ranks make the same calls in the same order."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, possibly in x's own memory."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' ``x`` [..., n] side by side in the order of ranks, [..., size * n]."""
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``rank`` of ``size`` equal parts; ``Shard()`` is the whole, which needs no communicator."""

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def divide(self, total: int, what: str) -> int:
        """``total / size``. Raises ``ValueError`` naming ``what`` where it does not come out even."""
        if total % self.size:
            raise ValueError(
                f"{what} {total} cannot be split over {self.size} ranks; choose a tensor-parallel size that divides it"
            )
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' partial sums ``x`` added up."""
        if self.size == 1:
            return x
        assert self.communicator is not None, "partial sums need somebody to add them up"
        return self.communicator.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' columns ``x`` [..., n] side by side."""
        if self.size == 1:
            return x
        assert self.communicator is not None, "columns of other ranks need somebody to fetch them"
        return self.communicator.all_gather(x)
