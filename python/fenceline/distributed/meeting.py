"""How ranks find each other: the store of torch.distributed, which listens on the address of the meeting only."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch.distributed as dist

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
            raise ValueError(
                f"the ranks cannot meet at {meeting} ({error.strerror or error}): check --dist-init-addr"
            ) from error
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, int(port), size, rank == 0, NO_LIMIT, master_listen_fd=descriptor)
