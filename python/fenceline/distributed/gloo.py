"""How ranks find each other, and the back end of ranks on the CPU: torch.distributed's gloo, over TCP."""

from __future__ import annotations

import datetime
import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist

from fenceline.config import ConfigError
from fenceline.memory_order import CollectiveBackend, PeerLostError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_INTERFACE = "GLOO_SOCKET_IFNAME"
# A collective waits for the slowest rank without a limit, since that rank may read weights for minutes at start-up. A
# rank that hangs is found by the watchdog.
NO_LIMIT = datetime.timedelta(days=365)
_BACKLOG = 1024


def join_group(backend: str, rank: int, size: int, meeting: str, **others: Any) -> None:
    """Make torch.distributed's default group of ``size`` ranks with ``backend``; waits until all have joined.
    ``meeting`` is the same for all: ``tcp://host:port`` of rank 0's host, or on one host the URI of a file that does
    not exist yet. Raises ``ValueError`` if rank 0 cannot listen there, else what torch raises."""
    if meeting.startswith("tcp://"):
        others["store"] = _tcp_store(rank, size, meeting)
    else:
        others["init_method"] = meeting
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=NO_LIMIT, **others)


def _tcp_store(rank: int, size: int, meeting: str) -> Any:
    """torch's own socket would listen on all interfaces, and whoever reaches the store can change what is in it."""
    host, _, port = meeting.removeprefix("tcp://").rpartition(":")
    descriptor = None
    if rank == 0:
        try:
            with socket.create_server((host, int(port)), backlog=_BACKLOG) as listener:
                descriptor = listener.detach()  # the store closes it
        except OSError as error:
            raise ConfigError(
                f"the ranks cannot meet at {meeting} ({error.strerror or error}): check --dist-init-addr"
            ) from error
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, int(port), size, rank == 0, NO_LIMIT, master_listen_fd=descriptor)


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class GlooBackend(CollectiveBackend):
    """See ``memory_order.CollectiveBackend``. One in a process, since it is torch.distributed's default group."""

    def __init__(self, rank: int, size: int, meeting: str, interface: str | None = None) -> None:
        """Waits until all ``size`` ranks have joined at ``meeting`` (see ``join_group``). ``interface``: the network
        interface that the ranks use, the loopback one unless given. Raises ``ConfigError`` if they cannot meet,
        ``PeerLostError`` if one of them has ended since."""
        self.rank = rank
        self.size = size
        os.environ.setdefault(_INTERFACE, interface or LOOPBACK)  # the host's name may have no address
        try:
            join_group("gloo", rank, size, meeting)
        except dist.DistNetworkError as error:
            raise ConfigError(
                f"the ranks cannot meet at {meeting} ({first_line(error)}): check --dist-init-addr"
            ) from error
        except RuntimeError as error:  # a rank came to the meeting and has ended since
            raise PeerLostError(f"rank {rank} of {size}: the ranks cannot connect ({first_line(error)})") from error

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        try:
            dist.all_gather(list(out), x)
        except RuntimeError as error:
            text = first_line(error).partition(". ")[0]  # gloo's advice after it does not apply here
            raise PeerLostError(f"rank {self.rank} of {self.size}: a collective has failed ({text})") from error

    def give_up(self) -> None:
        """See ``memory_order.CollectiveBackend``. Other ranks' operations end because this rank leaves."""
        self.close()

    def close(self) -> None:
        dist.destroy_process_group()
