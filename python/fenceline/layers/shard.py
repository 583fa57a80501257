"""Shard: which part of every tensor-parallel layer this process holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``rank`` of ``size`` equal parts; ``Shard()`` is the whole."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def divide(self, total: int, what: str) -> int:
        """``total / size``. Raises ``ValueError`` naming ``what`` where it does not come out even."""
        if total % self.size:
            raise ValueError(
                f"{what} {total} cannot be split over {self.size} ranks; choose a tensor-parallel size that divides it"
            )
        return total // self.size
