"""The back end of ranks on NVIDIA GPUs: torch.distributed's NCCL. Not used by a server yet: it has run on no two GPUs.

torch runs NCCL's kernels on a stream of the group's own, which waits for the current one, and the current one for it.
So in program order they are operations of the current stream, in a CUDA graph too: the capture follows both waits.

What NCCL sets up with the first operation of a kind, memory and connections, must not be set up in a capture. An
operation is captured only after one of the same size has run.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from fenceline.memory_order import CommunicatorError, PeerLostError, sum_gathered

_NO_LIMIT = datetime.timedelta(days=365)  # as for gloo: whoever hangs is found by the watchdog


class NcclBackend:
    """See ``memory_order.CollectiveBackend``. One in a process, since it is torch.distributed's default group."""

    def __init__(self, rank: int, size: int, meeting: str, device: torch.device) -> None:
        """Waits until all ``size`` ranks have come to ``meeting`` (see ``GlooBackend``). ``device``: the GPU of this
        rank, which no other rank has, and the current one. Raises ``ValueError`` where the ranks cannot meet."""
        assert device.type == "cuda" and device.index is not None, f"{device} is no GPU of one rank"
        self.rank = rank
        self.size = size
        self._warm: set[int] = set()  # bytes of operations that have run
        try:
            # With device_id NCCL's communicator is made now, not by the first operation.
            dist.init_process_group(
                "nccl", init_method=meeting, rank=rank, world_size=size, timeout=_NO_LIMIT, device_id=device
            )
        except RuntimeError as error:
            raise ValueError(
                f"the ranks cannot meet at {meeting} with NCCL ({_first_line(error)})"
            ) from error

    def all_reduce(self, x: torch.Tensor) -> None:
        """See ``memory_order.CollectiveBackend``. NCCL's own sums in an order that depends on an element's place and
        rounds each partial sum."""
        sum_gathered(self, x)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``memory_order.CollectiveBackend``. Raises ``CommunicatorError`` in a capture before one of this size has
        run."""
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
                f"rank {self.rank} of {self.size}: a collective has failed ({_first_line(error)})"
            ) from error
        if not capturing:
            self._warm.add(nbytes)

    def register(self) -> None:
        """See ``memory_order.CollectiveBackend``. Its operations use no addresses of other ranks."""

    def close(self) -> None:
        """See ``memory_order.CollectiveBackend``. Operations that wait for a rank that has gone are given up: to wait
        for them, as to destroy the group does, would take for ever."""
        group = dist.group.WORLD
        assert group is not None, "the group exists until it is closed"
        group.abort()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
