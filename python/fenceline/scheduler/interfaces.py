"""What the scheduler's loop is connected to, and what it passes from turn to turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fenceline.ipc.io_struct import BatchTokenOut, Message
from fenceline.mem_cache.hierarchical_cache import Transfers
from fenceline.mem_cache.req_pool import ReqPool
from fenceline.mem_cache.storage.make import Storage
from fenceline.memory_order import Device, LeasePool
from fenceline.model_executor.forward_result import ForwardResult
from fenceline.model_executor.graph_runner import GraphStats
from fenceline.model_executor.schedule_batch import ScheduleBatch
from fenceline.scheduler.req import Req


class Inbox(Protocol):
    """Where requests and control messages come from."""

    def drain(self, block: bool, timeout_ms: int | None = None) -> Sequence[Message]:
        """All messages that have arrived; with ``block`` wait until there is one, ``timeout_ms`` at most."""
        ...


class Outbox(Protocol):
    """Where news go."""

    def to_detokenizer(self, message: BatchTokenOut) -> None:
        """Tokens."""
        ...

    def to_tokenizer(self, message: Message) -> None:
        """Replies to control messages, statistics."""
        ...


class Worker(Protocol):
    """What computes steps: a ModelRunner, or a stand-in that benchmarks measure the scheduler with."""

    device: Device
    pages: LeasePool
    req_pool: ReqPool

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Long-lived allocations by name."""
        ...

    @property
    def hicache(self) -> Transfers | None: ...  # what moves pages to the host tier and back, None without one

    @property
    def storage(self) -> Storage | None: ...  # the tier below the host, None without one

    @property
    def graph_stats(self) -> GraphStats | None: ...  # None without graphs

    @property
    def prefill_graph_stats(self) -> GraphStats | None: ...  # None without graphs of prefill's pieces

    def launch(self, batch: ScheduleBatch) -> ForwardResult:
        """Submit one step without waiting for it."""
        ...


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step: its batch, its requests in batch order, and its result to come."""

    batch: ScheduleBatch
    reqs: Sequence[Req]
    result: ForwardResult
