"""The back end of ranks on NVIDIA GPUs: torch.distributed's NCCL.

torch runs NCCL's kernels on the current stream, or, depending on its version, on a stream of the process group. That
stream waits for the current one before them, and the current one waits for it after them. In both cases they are in
program order operations of the current stream. This holds in a CUDA graph too, because the capture follows both waits.

With the first operation of a kind NCCL sets up memory and connections, which is not possible in a capture. So an
operation may be captured only after one of the same size has run.
"""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist

from fenceline.config import ConfigError
from fenceline.distributed.gloo import LOOPBACK, first_line, join_group
from fenceline.memory_order import CollectiveBackend, CommunicatorError, PeerLostError


class NcclBackend(CollectiveBackend):
    """See ``memory_order.CollectiveBackend``. One in a process, since it is torch.distributed's default group."""

    def __init__(self, rank: int, size: int, meeting: str, device: torch.device, interface: str | None = None) -> None:
        """Waits until all ``size`` ranks have joined at ``meeting`` over ``interface`` (see ``GlooBackend``).
        ``device``: this rank's GPU, which must be current. Raises ``ValueError`` if the ranks cannot meet."""
        assert device.type == "cuda" and device.index is not None, f"{device} is no GPU of one rank"
        self.rank = rank
        self.size = size
        self._warm: set[int] = set()  # bytes of operations that have run
        self._given_up = False
        # Where NCCL listens; "=" is this name and none that begins with it. InfiniBand does not depend on it.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface or LOOPBACK}")
        try:
            # With device_id, NCCL makes its communicator now and not in the first operation.
            join_group("nccl", rank, size, meeting, device_id=device)
        except RuntimeError as error:
            raise ConfigError(f"the ranks cannot meet at {meeting} with NCCL ({first_line(error)})") from error

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``memory_order.CollectiveBackend``. Raises ``CommunicatorError`` in a capture if no operation of this
        size has run before."""
        nbytes = x.nbytes
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and nbytes not in self._warm:
            raise CommunicatorError(
                f"a collective of {nbytes} bytes is captured before one has run: NCCL would set up memory in it"
            )
        try:
            dist.all_gather_into_tensor(out, x)
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank} of {self.size}: a collective has failed ({first_line(error)})"
            ) from error
        if not capturing:
            self._warm.add(nbytes)

    def give_up(self) -> None:
        """See ``memory_order.CollectiveBackend``. Aborts the group; destroying it would wait for operations that never
        end. NCCL ends all operations as soon as the abort begins. But the abort returns only when no CUDA graph that
        contains one of them exists any more, so a thread makes it, and nothing waits for that thread."""
        if self._given_up:
            return
        self._given_up = True
        group = dist.group.WORLD
        assert group is not None, "the group exists until it is closed"
        threading.Thread(target=group.abort, name="nccl-abort", daemon=True).start()

    def check(self) -> None:
        if self._given_up:
            raise PeerLostError(f"rank {self.rank} of {self.size}: another rank has failed")

    def close(self) -> None:
        """See ``memory_order.CollectiveBackend``. Nothing runs any more, and the end of the process frees the group: to
        destroy it would wait for graphs that contain its operations, and an abort may not have ended when CUDA does.
        The process has to end by ``os._exit``, because the group's destructor aborts it too."""
