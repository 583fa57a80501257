"""Communicator: collective operations of ranks, on the one stream that it belongs to (F19).

A rank is one of several processes, or devices, that compute parts of the same step. In a collective operation all ranks
take part, and each waits for the others, so they must all submit the same ones in the same order. On one stream that
order is the program's. With two streams it is the device's choice, and ranks whose devices choose differently wait for
each other for ever. So a Communicator belongs to one stream, and raises where another is current.

How bytes go from rank to rank is the back end's affair (``distributed/``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from fenceline.memory_order.access import Memory, writes
from fenceline.memory_order.device import Device
from fenceline.memory_order.edges import ONE_STREAM, REGISTERED_GRAPH, Guard
from fenceline.memory_order.stream import Stream

T = TypeVar("T")


class CommunicatorError(RuntimeError):
    """A collective operation was about to be submitted to another stream than the communicator's."""


class PeerLostError(RuntimeError):
    """A collective operation has failed: another rank has ended, or takes part in another operation."""


class CollectiveBackend(Protocol):
    """Collective operations on the current stream. Tensors are contiguous and on the device of the ranks.

    All operations raise ``PeerLostError`` where another rank has ended. None has a time limit.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> None:
        """``x`` becomes the sum of all ranks' ``x``: added in float32 in the order of ranks and rounded once, so that
        all ranks get the same bits, and an element's do not depend on its place."""
        ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` [size, *shape of x] becomes all ranks' ``x`` in the order of ranks."""
        ...

    def register(self) -> None:
        """The ranks tell each other what captured operations have noted since the last call: addresses in each one's
        memory that the others need to run them. Ranks call it at the same place of their program."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


def sum_gathered(backend: CollectiveBackend, x: torch.Tensor) -> None:
    """``CollectiveBackend.all_reduce`` by its all_gather, for libraries whose own sums are added in another order."""
    parts = x.new_empty((backend.size, *x.shape))
    backend.all_gather(x, parts)
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    x.copy_(total)


def of_all_ranks(device: Device, guard: Guard, agreed: T, own: Callable[[], T]) -> T:
    """What decisions are made by: ``agreed``, which all ranks have from rank 0. Severed: ``own()``, what this rank's
    device says, which may say something else on each rank."""
    return agreed if device.keeps(guard) else own()


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
        # What the ranks have in common: the order of operations. Each operation writes it.
        self._order = Memory(f"communicator {name}")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, in the memory of ``x``: added in float32 in the order of ranks, rounded once."""
        self._begin("all-reduce")
        assert x.is_contiguous(), "an all-reduce needs contiguous memory"
        self._backend.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' ``x`` [..., n] concatenated in the order of ranks, [..., size * n], new."""
        self._begin("all-gather")
        gathered = x.new_empty((self.size, *x.shape))
        self._backend.all_gather(x.contiguous(), gathered)
        return gathered.movedim(0, -2).flatten(-2)

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' ``value``, at start-up only: the host waits for the device."""
        values = self.all_gather(torch.tensor([value], dtype=torch.int64, device=self._device.torch_device))
        return int(values.min())

    def exchange(self, data: bytes) -> list[bytes]:
        """All ranks' ``data``, of any length, in the order of ranks, at start-up only; the host waits."""
        device = self._device.torch_device
        lengths = self.all_gather(torch.tensor([len(data)], dtype=torch.int64, device=device)).tolist()
        padded = bytearray(data.ljust(max(*lengths, 1), b"\0"))
        gathered = self.all_gather(torch.frombuffer(padded, dtype=torch.uint8).to(device)).cpu()
        parts = gathered.view(self.size, -1)
        return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def register(self) -> None:
        """Before a graph becomes REGISTERED (F10): the ranks exchange what its operations need to know of each other's
        memory. All ranks have captured it."""
        if self._device.keeps(REGISTERED_GRAPH):  # severed: the graph is replayed without
            self._backend.register()

    def close(self) -> None:
        """Leave the group; no operation follows."""
        self._backend.close()

    def _begin(self, operation: str) -> None:
        # Severed: whoever is not on its stream is not refused, and the operation goes to the stream that is current.
        if not self._stream.is_current and self._device.keeps(ONE_STREAM):
            raise CommunicatorError(
                f"the communicator {self.name} belongs to {self._stream.name.value}, and another stream is current:"
                f" two streams would run its operations in an order of their own ({operation}, rank {self.rank})"
            )
        self._device.declare(self._stream.name, f"{operation} of {self.name}", writes, self._order)
