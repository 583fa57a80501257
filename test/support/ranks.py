"""Runs several ranks of one model as threads of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.nn.functional as F

from fenceline.layers.context import Shard
from fenceline.memory_order import Communicator, open_device

Result = TypeVar("Result")


class Ranks:
    """Threads that are the ranks of one model, each with a device and a communicator on its FORWARD."""

    def __init__(self, size: int) -> None:
        self.devices = [open_device("cpu") for _ in range(size)]
        self.shards = [
            Shard(rank, size, Communicator("ranks", device, device.forward, ThreadBackend(rank, self)))
            for rank, device in enumerate(self.devices)
        ]
        self.values: list[torch.Tensor] = [torch.empty(0)] * size
        self.num_sent = [0] * size  # how many elements each rank has sent
        self.bytes_sent = [0] * size  # how many bytes each rank has sent
        self.num_fused = [0] * size  # how many of each rank's sums have also computed the next norm
        self.most_fused_rows = 0  # the most rows that such a sum may have
        self.barrier = threading.Barrier(size, timeout=60)

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """Run ``work(rank)`` on all ranks at the same time, with FORWARD as the current stream."""

        def on_forward(rank: int) -> Result:
            with self.devices[rank].forward.active():
                return work(rank)

        with ThreadPoolExecutor(len(self.shards)) as pool:
            return list(pool.map(on_forward, range(len(self.shards))))


class ThreadBackend:
    """``memory_order.CollectiveBackend`` in one process."""

    def __init__(self, rank: int, ranks: Ranks) -> None:
        self.rank, self.size, self._ranks = rank, len(ranks.devices), ranks

    def all_reduce(self, x: torch.Tensor) -> None:
        parts = self._exchange(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        x.copy_(total)

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """Sum, add and normalise in one operation, like our own kernels, which take only few rows."""
        if len(x) > self._ranks.most_fused_rows:
            return None
        self.all_reduce(x)
        residual.add_(x)
        self._ranks.num_fused[self.rank] += 1
        return F.rms_norm(residual, residual.shape[1:], weight, eps)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.stack(self._exchange(x)))

    def register(self) -> None:
        return

    def give_up(self) -> None:
        return

    def check(self) -> None:
        return

    def close(self) -> None:
        return

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        ranks = self._ranks
        ranks.num_sent[self.rank] += x.numel()
        ranks.bytes_sent[self.rank] += x.nbytes
        ranks.values[self.rank] = x.clone()
        ranks.barrier.wait()
        values = list(ranks.values)
        ranks.barrier.wait()
        return values
