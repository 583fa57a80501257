"""The back end of ranks on the CPU: torch.distributed's gloo, over TCP."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fenceline.memory_order import PeerLostError

# A collective waits for the slowest rank however long that takes: at start-up it may read weights for minutes, and
# whoever hangs is found by the watchdog.
_NO_LIMIT = datetime.timedelta(days=365)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_INTERFACE = "GLOO_SOCKET_IFNAME"


class GlooBackend:
    """See ``memory_order.CollectiveBackend``. One in a process, since it is torch.distributed's default group."""

    def __init__(self, rank: int, size: int, meeting: Path) -> None:
        """Waits until all ``size`` ranks of this host have come to ``meeting``, the name of a file that does not exist
        yet, the same for all. They share the host's cores."""
        self.rank = rank
        self.size = size
        os.environ.setdefault(_INTERFACE, _LOOPBACK)  # the host's name need not lead anywhere
        torch.set_num_threads(max(torch.get_num_threads() // size, 1))
        dist.init_process_group(
            "gloo", init_method=meeting.as_uri(), rank=rank, world_size=size, timeout=_NO_LIMIT
        )

    def all_reduce(self, x: torch.Tensor) -> None:
        """See ``memory_order.CollectiveBackend``. gloo's own sums in an order that depends on an element's place."""
        parts = x.new_empty((self.size, *x.shape))
        self.all_gather(x, parts)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``memory_order.CollectiveBackend``."""
        try:
            dist.all_gather(list(out), x)
        except RuntimeError as error:
            text = str(error).partition("\n")[0].partition(". ")[0]  # of gloo's advice nothing applies
            raise PeerLostError(
                f"rank {self.rank} of {self.size}: a collective has failed ({text})"
            ) from error

    def close(self) -> None:
        """See ``memory_order.CollectiveBackend``."""
        dist.destroy_process_group()
