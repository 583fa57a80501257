"""The back end of ranks on GPUs of one host: our own all-reduce for what is small, NCCL for the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from fenceline.distributed.nccl import NcclBackend
from fenceline.memory_order import CommunicatorError, sum_gathered

try:
    from fenceline_kernel import KernelUnavailable
    from fenceline_kernel.all_reduce import PeerAllReduce
except ImportError:  # it is optional
    PeerAllReduce = None  # type: ignore[assignment, misc]
    KernelUnavailable = RuntimeError  # type: ignore[assignment, misc]

logger = logging.getLogger(__name__)

# Up to here one shot is faster than two, by the number of ranks: it sends each byte to all of them, in words that are
# half data.
ONE_SHOT_BYTES = {2: 512 << 10, 3: 256 << 10, 4: 128 << 10}
_ONE_SHOT_OF_MANY = 64 << 10
# From here on NCCL moves data at its full rate, and copies straight between the ranks' tensors.
MAX_BYTES = 8 << 20


def one_shot_bytes(size: int) -> int:
    """The largest message of ``size`` ranks that takes one shot."""
    return ONE_SHOT_BYTES.get(size, _ONE_SHOT_OF_MANY)


class PeerBackend:
    """See ``memory_order.CollectiveBackend``. ``nccl`` has the same ranks, all of one host."""

    def __init__(self, nccl: NcclBackend, device: torch.device) -> None:
        """All ranks come here. Where a GPU cannot reach another one's memory, or the kernels cannot be compiled, NCCL
        does everything, on all ranks alike."""
        self.rank, self.size = nccl.rank, nccl.size
        self._nccl, self._device = nccl, device
        self._own: PeerAllReduce | None = None
        if PeerAllReduce is None:
            return
        try:
            self._own = PeerAllReduce(
                self.rank, self.size, device, self._exchange, one_shot_bytes(self.size), MAX_BYTES
            )
        except KernelUnavailable as error:
            logger.warning("Sums of ranks go through NCCL, which is slower for few rows: %s", error)

    def _exchange(self, data: bytes) -> Sequence[bytes]:
        """All ranks' bytes, over NCCL."""
        lengths = self._gather(torch.tensor([len(data)])).tolist()
        padded = bytearray(data.ljust(max(*lengths, 1), b"\0"))
        parts = self._gather(torch.frombuffer(padded, dtype=torch.uint8)).view(self.size, -1)
        return [bytes(part[:n].numpy().tobytes()) for part, n in zip(parts, lengths, strict=True)]

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=self._device)
        self._nccl.all_gather(x.to(self._device), out)
        return out.cpu().flatten()

    def all_reduce(self, x: torch.Tensor) -> None:
        """See ``memory_order.CollectiveBackend``. In a capture peers write their sums straight to ``x``, whose
        address they learn by ``register``."""
        if self._own is not None and self._own.takes(x):
            self._own.all_reduce(x, registered=torch.cuda.is_current_stream_capturing())
        else:
            sum_gathered(self._nccl, x)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``memory_order.CollectiveBackend``."""
        self._nccl.all_gather(x, out)

    def register(self) -> None:
        """See ``memory_order.CollectiveBackend``. Raises ``CommunicatorError`` where memory cannot be shared."""
        if self._own is None:
            return
        try:
            self._own.register()
        except RuntimeError as error:
            raise CommunicatorError(
                f"graphs' memory cannot be opened by the other ranks ({error}): leave expandable_segments out of"
                " PYTORCH_CUDA_ALLOC_CONF"
            ) from error

    def close(self) -> None:
        """See ``memory_order.CollectiveBackend``."""
        self._nccl.close()
