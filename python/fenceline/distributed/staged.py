"""The back end of ranks that share one GPU, for tests: gloo, through the host's memory.

NCCL refuses two ranks on one device. Here each operation waits for the device and copies to the host and back, so it
cannot be captured: graphs contain operations of ``peer.py`` only.
"""

from __future__ import annotations

import torch

from fenceline.distributed import SHARED_GPU_VARIABLE
from fenceline.distributed.gloo import GlooBackend
from fenceline.memory_order import CollectiveBackend, CommunicatorError


class StagedBackend(CollectiveBackend):
    """See ``memory_order.CollectiveBackend``. Tensors are on the GPU."""

    def __init__(self, gloo: GlooBackend) -> None:
        self.rank, self.size = gloo.rank, gloo.size
        self._gloo = gloo

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``memory_order.CollectiveBackend``. Raises ``CommunicatorError`` in a capture."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CommunicatorError(
                f"a collective of {x.nbytes} bytes is too large for our own kernels, which alone can be captured with"
                f" {SHARED_GPU_VARIABLE}: lower --piecewise-cuda-graph-max-tokens, or unset {SHARED_GPU_VARIABLE}"
            )
        parts = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.all_gather(x.cpu(), parts)
        out.copy_(parts)

    def give_up(self) -> None:
        """See ``memory_order.CollectiveBackend``. The other ranks' operations end when this rank's process does."""

    def check(self) -> None:
        self._gloo.check()

    def close(self) -> None:
        self._gloo.close()
