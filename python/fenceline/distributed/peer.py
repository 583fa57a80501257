"""The back end of ranks on GPUs of one host: our own all-reduce for small messages, NCCL for large ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fenceline.distributed.nccl import NcclBackend
from fenceline.distributed.staged import StagedBackend
from fenceline.memory_order import CommunicatorError, PeerLostError

try:
    from fenceline_kernel import KernelUnavailable
    from fenceline_kernel.all_reduce import ROW_WAYS, PeerAllReduce
except ImportError:  # it is optional
    PeerAllReduce = None  # type: ignore[assignment, misc]
    KernelUnavailable = RuntimeError  # type: ignore[assignment, misc]

logger = logging.getLogger(__name__)

# Bytes of a message, by the number of ranks, up to which one shot is faster than two: it sends all data to all ranks,
# in words of which only half is data.
ONE_SHOT_BYTES = {2: 1 << 20, 3: 256 << 10, 4: 256 << 10}
_ONE_SHOT_OF_MANY = 64 << 10
# Larger messages go through NCCL, which gathers all parts, so that they are added in the order of ranks: twice as many
# bytes cross the links, and torch's operators add them. The largest prefill step of an 8B takes all of it.
MAX_BYTES = 64 << 20
_EPS = 1e-6  # of the norm in the trial
_TRIAL_S = 30.0  # limit for each launch of the trial, which the ranks begin together


def one_shot_bytes(size: int) -> int:
    """The largest message of ``size`` ranks that takes one shot."""
    return ONE_SHOT_BYTES.get(size, _ONE_SHOT_OF_MANY)


class PeerBackend:
    """See ``memory_order.CollectiveBackend``. ``others`` is a back end of the same ranks, all on one host, for
    operations that our own kernels do not take."""

    def __init__(self, others: NcclBackend | StagedBackend, device: torch.device, fuses_norm: bool = True) -> None:
        """All ranks make one together. ``fuses_norm``: whether ``all_reduce_add_norm`` may be used, whose norm is not
        bit by bit that of messages too large for it. If a GPU cannot reach another one's memory, or the kernels cannot
        be compiled or give wrong results, all ranks use ``others`` for everything."""
        self.rank, self.size = others.rank, others.size
        self._others, self._device, self._fuses_norm = others, device, fuses_norm
        self._own: PeerAllReduce | None = None
        if PeerAllReduce is None:
            return
        try:
            self._own = PeerAllReduce(
                self.rank,
                self.size,
                device,
                self._exchange,
                one_shot_bytes(self.size),
                MAX_BYTES,
                pdl=1 if isinstance(others, StagedBackend) else 2,
            )
        except KernelUnavailable as error:
            logger.warning("Sums of ranks go through NCCL, which is slower for few rows: %s", error)
            return
        wrong = [text.decode() for text in self._exchange(self._trial(self._own).encode())]
        if any(wrong):
            logger.warning(
                "The CUDA all-reduce is wrong here and is not used: %s", next(text for text in wrong if text)
            )
            self._own.close()
            self._own = None

    def _trial(self, own: PeerAllReduce) -> str:
        """Compare each of our operations with ``others`` and torch's operators. Returns the first problem, "" if there
        is none. A rank that has found a problem continues to the end: the other ranks do not know of it, and if this
        rank left out an operation of ``others`` the next one would be combined with a different one of theirs."""
        generator = torch.Generator(self._device).manual_seed(self.rank)
        own.limit(_TRIAL_S)
        problem = ""
        # At most what fits one shot of many ranks, in rows of which each of eight has as many vectors as a warp.
        for rows in (1, 5, 16):
            x = torch.randn(rows, 2048, generator=generator, device=self._device).bfloat16()
            wanted, parts = x.clone(), x.new_empty((self.size, *x.shape))
            self._others.all_reduce(wanted)
            self._others.all_gather(x, parts)
            try:
                found = self._round(own, x, wanted, parts)
            except RuntimeError as error:
                found = str(error)
            problem = problem or found
        own.limit(0)
        return problem

    def _round(self, own: PeerAllReduce, x: torch.Tensor, wanted: torch.Tensor, parts: torch.Tensor) -> str:
        """Run each of our operations on ``x`` [rows, n]. ``wanted`` [rows, n] is the sum of all ranks' ``x``, and
        ``parts`` [ranks, rows, n] are these themselves. Returns the first problem, "" if there is none."""
        one, two, hidden, normed = x.clone(), x.clone(), torch.empty_like(x), torch.empty_like(x)
        weight, gathered = torch.full_like(x[0], 0.5), torch.empty_like(parts)
        own.all_reduce(one, False)
        own.all_reduce(two, True)
        own.all_gather(x, gathered)
        added = wanted + 1
        exact = F.rms_norm(added.float(), (x.shape[1],), weight.float(), _EPS)
        right = {
            "one shot": torch.equal(one, wanted),
            "two shots": torch.equal(two, wanted),
            "gather": torch.equal(gathered, parts),
        }
        for way in ROW_WAYS:
            if own.takes_rows(x, way):
                hidden.fill_(1)
                own.all_reduce_add_norm(x, hidden, weight, _EPS, hidden, normed, way)
                right[f"sum and residual {way}"] = torch.equal(hidden, added)
                right[f"norm {way}"] = bool((normed.float() - exact).norm() <= 0.02 * exact.norm())
        for way, holds in right.items():
            if not holds:
                return f"{way} with {len(x)} rows" + (", a peer was not seen" if own.lost else "")
        return ""

    def _exchange(self, data: bytes) -> Sequence[bytes]:
        """All ranks' ``data``, of any length, in the order of ranks, exchanged by ``others``."""
        lengths = self._gather(torch.tensor([len(data)])).tolist()
        padded = bytearray(data.ljust(max(*lengths, 1), b"\0"))
        parts = self._gather(torch.frombuffer(padded, dtype=torch.uint8)).view(self.size, -1)
        return [bytes(part[:n].numpy().tobytes()) for part, n in zip(parts, lengths, strict=True)]

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=self._device)
        self._others.all_gather(x.to(self._device), out)
        return out.cpu().flatten()

    def all_reduce(self, x: torch.Tensor) -> None:
        """See ``memory_order.CollectiveBackend``. In a capture peers write their sums straight to ``x``, whose
        address they learn by ``register``."""
        own = self._own
        if own is None:
            self._others.all_reduce(x)
        elif own.takes(x):
            own.all_reduce(x, registered=torch.cuda.is_current_stream_capturing())
        elif own.takes(padded := _padded(x)):
            own.all_reduce(padded)
            x.copy_(padded[: x.numel()].view(x.shape))
        else:
            self._others.all_reduce(x)

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """See ``memory_order.CollectiveBackend``. One launch, for rows that ``PeerAllReduce.takes_rows`` and a weight
        of the same dtype; else None."""
        own = self._own
        if own is None or not self._fuses_norm or not own.takes(x) or weight.dtype is not x.dtype:
            return None
        if not own.takes_rows(x):
            return None
        normed = torch.empty_like(x)
        own.all_reduce_add_norm(x, residual, weight, eps, residual, normed)
        return normed

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``memory_order.CollectiveBackend``. Tensors that fit one shot are gathered by our own kernel as bytes, so
        a decode step that only samples needs no other library."""
        own, data = self._own, x.reshape(-1).view(torch.uint8)
        if own is None or not 0 < data.nbytes <= own.one_shot_bytes:
            self._others.all_gather(x, out)
            return
        data = _padded(data)
        words = data.view(torch.float32)  # a dtype that the kernels take; the bytes are copied unchanged
        gathered = words.new_empty((self.size, *words.shape))
        own.all_gather(words, gathered)
        out.copy_(gathered.view(torch.uint8)[:, : x.nbytes].view(x.dtype).view(out.shape))

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

    def give_up(self) -> None:
        """See ``memory_order.CollectiveBackend``. Our own kernels end within milliseconds."""
        if self._own is not None:
            self._own.give_up()
        self._others.give_up()

    def check(self) -> None:
        if self._own is not None and self._own.lost:
            raise PeerLostError(
                f"rank {self.rank} of {self.size}: an all-reduce has ended without all ranks, one of which has failed"
            )
        self._others.check()

    def close(self) -> None:
        """See ``memory_order.CollectiveBackend``. Closes the other ranks' memory, then frees this rank's own."""
        if self._own is not None:
            self._own.close()
        self._others.close()


def _padded(x: torch.Tensor) -> torch.Tensor:
    """The elements of ``x``, flat, in whole vectors of 16 bytes at an address that is a multiple of 16: a view if they
    are so already, else a copy that is padded with zeros."""
    flat = x.reshape(-1)
    if flat.nbytes % 16 == 0 and flat.data_ptr() % 16 == 0:
        return flat
    padded = flat.new_zeros(-(-flat.nbytes // 16) * 16 // flat.itemsize)
    padded[: flat.numel()].copy_(flat)
    return padded
