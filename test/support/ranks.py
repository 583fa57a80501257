"""Several ranks of one model as threads of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from fenceline.layers.context import Shard

Result = TypeVar("Result")


class Ranks:
    """Threads that are the ranks of one model."""

    def __init__(self, size: int) -> None:
        self.shards = [Shard(rank, size, _Rank(rank, self)) for rank in range(size)]
        self.values: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """``work(rank)`` of all ranks at once."""
        with ThreadPoolExecutor(len(self.shards)) as pool:
            return list(pool.map(work, range(len(self.shards))))


class _Rank:
    """One rank's communicator."""

    def __init__(self, rank: int, ranks: Ranks) -> None:
        self.rank, self.ranks = rank, ranks

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.ranks.values[self.rank] = x.clone()
        self.ranks.barrier.wait()
        values = list(self.ranks.values)
        self.ranks.barrier.wait()
        return values
