"""Communicator: collective operations of ranks, on the one stream that it belongs to (F19).

A rank is one of several processes, or devices, that compute parts of the same step. In a collective operation all ranks
take part, and each waits for the others, so they must all submit the same ones in the same order. On one stream that
order is that of the program. With two streams each rank's device chooses the order, and ranks whose devices choose
differently wait for each other for ever. So a Communicator belongs to one stream, and raises if another is current.

How bytes get from rank to rank is decided by the back end (``distributed/``).
"""

from __future__ import annotations

from typing import Protocol

import torch

from fenceline.memory_order.access import Memory, writes
from fenceline.memory_order.device import Device
from fenceline.memory_order.edges import ONE_STREAM, REGISTERED_GRAPH
from fenceline.memory_order.stream import Stream


class CommunicatorError(RuntimeError):
    """A collective operation was about to be submitted to another stream than the communicator's."""


class PeerLostError(RuntimeError):
    """A collective operation has failed: another rank has ended, or takes part in another operation."""


class CollectiveBackend(Protocol):
    """Collective operations on the current stream. Tensors are contiguous and on the device of the ranks. A back end
    inherits what this class implements unless it can do better. All operations raise ``PeerLostError`` where another
    rank has ended. None has a time limit."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace ``x`` by the sum of all ranks' ``x``: added in float32 in the order of ranks and rounded once, so
        that all ranks get the same bits, and an element's do not depend on its place. Libraries' own all-reduces add
        in an order that depends on the place, so this one gathers."""
        parts = x.new_empty((self.size, *x.shape))
        self.all_gather(x, parts)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """Add the sum of all ranks' ``x``, as ``all_reduce`` gives it, to ``residual``; return RMSNorm of the result
        with ``weight`` [row], a new tensor. All are [rows, row]. If the back end cannot do this in one operation for
        such tensors, all ranks return None and nothing has been done."""
        return None

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write all ranks' ``x`` to ``out`` [size, *shape of x], in the order of ranks."""
        ...

    def register(self) -> None:
        """Exchange the addresses that operations captured since the last call need of other ranks' memory. All ranks
        call it at the same place of their program."""
        return

    def give_up(self) -> None:
        """Abort, because this rank or another one has failed: operations of this rank stop waiting for others, and as
        far as the back end can do it those of the other ranks end too. May be called by any thread."""
        ...

    def check(self) -> None:
        """Raises ``PeerLostError`` if an operation has ended without all ranks, so that what the device has computed
        since then is wrong. Does not ask the device."""
        return

    def close(self) -> None:
        """Leave the group. All ranks call it, with no operation in flight."""
        ...


class Communicator:
    """The ranks of one group as one of them sees them. All methods are called on ``stream``, and by all ranks."""

    def __init__(self, name: str, device: Device, stream: Stream, backend: CollectiveBackend) -> None:
        """``name`` is for reports. ``stream`` is one of ``device``'s."""
        self.name = name
        self.rank = backend.rank
        self.size = backend.size
        self._device = device
        self._stream = stream
        self._backend = backend
        device.communicators = (*device.communicators, self)
        # Stands for the order of operations, which all ranks have in common. Each operation writes it.
        self._order = Memory(f"communicator {name}")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, in the memory of ``x``: added in float32 in the order of ranks, rounded once."""
        self._begin("all-reduce")
        assert x.is_contiguous(), "an all-reduce needs contiguous memory"
        self._backend.all_reduce(x)
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """Add the sum of all ranks' ``x`` [rows, row] to ``residual`` [rows, row], in place; return RMSNorm of the
        result with ``weight`` [row], computed in float32. None if the back end has no such operation."""
        self._require_stream("all-reduce")
        normed = self._backend.all_reduce_add_norm(x, residual, weight, eps)
        if normed is not None:
            self._declare("all-reduce")
        return normed

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate all ranks' ``x`` [..., n] in the order of ranks: a new tensor [..., size * n]."""
        self._begin("all-gather")
        gathered = x.new_empty((self.size, *x.shape))
        self._backend.all_gather(x.contiguous(), gathered)
        return gathered.movedim(0, -2).flatten(-2)

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' ``value``, at start-up only: the host waits for the device."""
        values = self.all_gather(torch.tensor([value], dtype=torch.int64, device=self._device.torch_device))
        return int(values.min())

    def exchange(self, data: bytes) -> list[bytes]:
        """All ranks' ``data``, of any length, in their order. At start-up only: the host waits for the device."""
        device = self._device.torch_device
        lengths = self.all_gather(torch.tensor([len(data)], dtype=torch.int64, device=device)).tolist()
        padded = bytearray(data.ljust(max(*lengths, 1), b"\0"))
        gathered = self.all_gather(torch.frombuffer(padded, dtype=torch.uint8).to(device)).cpu()
        parts = gathered.view(self.size, -1)
        return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def register(self) -> None:
        """Exchange the addresses of other ranks' memory that a captured graph uses, before the graph becomes REGISTERED
        (F10). All ranks call it, when all have captured the graph."""
        if self._device.keeps(REGISTERED_GRAPH):  # severed: the graph is replayed without these addresses
            self._backend.register()

    def give_up(self) -> None:
        """Abort, because a rank has failed: operations that wait for other ranks end, and their results are wrong. May
        be called by any thread, on any stream. See :meth:`check`."""
        self._backend.give_up()

    def check(self) -> None:
        """Raises ``PeerLostError`` if the device's results are wrong because an operation has been given up. Call it
        when results have arrived and before they are used, on any stream."""
        self._backend.check()

    def close(self) -> None:
        """Leave the group. All ranks call it; no operation may follow."""
        self._backend.close()

    def _begin(self, operation: str) -> None:
        self._require_stream(operation)
        self._declare(operation)

    def _require_stream(self, operation: str) -> None:
        # Severed, the operation is not refused, but goes to the stream that is current.
        if not self._stream.is_current and self._device.keeps(ONE_STREAM):
            raise CommunicatorError(
                f"the communicator {self.name} belongs to {self._stream.name.value}, and another stream is current:"
                f" its operations could then run in another order on each rank ({operation}, rank {self.rank})"
            )

    def _declare(self, operation: str) -> None:
        self._device.declare(self._stream.name, f"{operation} of {self.name}", writes, self._order)
