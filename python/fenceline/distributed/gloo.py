"""The back end of ranks on the CPU: torch.distributed's gloo, over TCP."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from fenceline.distributed.meeting import join_group
from fenceline.memory_order import PeerLostError, sum_gathered

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_INTERFACE = "GLOO_SOCKET_IFNAME"


class GlooBackend:
    """See ``memory_order.CollectiveBackend``. One in a process, since it is torch.distributed's default group."""

    def __init__(self, rank: int, size: int, meeting: str, interface: str | None = None) -> None:
        """Waits until all ``size`` ranks have joined at ``meeting`` (see ``join_group``). ``interface``: the network
        interface that the ranks use, the loopback one unless given. Raises ``ValueError`` if they cannot meet."""
        self.rank = rank
        self.size = size
        os.environ.setdefault(_INTERFACE, interface or LOOPBACK)  # the host's name may have no address
        try:
            join_group("gloo", rank, size, meeting)
        except dist.DistNetworkError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"the ranks cannot meet at {meeting} ({reason}): check --dist-init-addr") from error

    def all_reduce(self, x: torch.Tensor) -> None:
        """See ``memory_order.CollectiveBackend``. gloo's own all-reduce adds in an order that depends on an element's
        place."""
        sum_gathered(self, x)

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """See ``memory_order.CollectiveBackend``. There is no such operation."""
        return None

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        try:
            dist.all_gather(list(out), x)
        except RuntimeError as error:
            text = str(error).partition("\n")[0].partition(". ")[0]  # gloo's advice after it does not apply here
            raise PeerLostError(f"rank {self.rank} of {self.size}: a collective has failed ({text})") from error

    def register(self) -> None:
        """See ``memory_order.CollectiveBackend``. Its operations use no addresses of other ranks."""

    def give_up(self) -> None:
        """See ``memory_order.CollectiveBackend``. The other ranks' operations end because this rank leaves the
        group."""
        self.close()

    def check(self) -> None:
        """See ``memory_order.CollectiveBackend``. It never raises, because an operation that fails raises itself."""

    def close(self) -> None:
        dist.destroy_process_group()
