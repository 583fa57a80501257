"""The scheduler's Worker in the proof: a ModelRunner that records decisions as they are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.host.cache_controller import HiCacheController, TransferCounts
from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.storage.controller import (
    Ack,
    Storage,
    StorageController,
    StorageTierStats,
)
from fenceline.mem_cache.storage.controller import Fetched as FetchedAck
from fenceline.mem_cache.storage.worker import Prefetch
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import LeasePool, Points
from fenceline.model_executor.graph_runner import GraphStats
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import (
    Completions,
    ForwardResult,
    HeldStep,
    StepBatch,
    StepCosts,
    StepOutput,
    drain_completions,
)
from fenceline.models.loader import NewWeights
from fenceline_proof.decisions import Decision, Event, Fetched, Kept, Transfer, Update, host_bytes
from fenceline_sim.tags import Tags

I32 = npt.NDArray[np.int32]


class RecordedWorker:
    """A ModelRunner that adds its launches, its transfers and the published results to ``events``."""

    def __init__(self, runner: ModelRunner, events: list[Event], tags: Tags | None = None) -> None:
        self.device = runner.device
        self.pages = runner.pages
        self.max_step_tokens = runner.max_step_tokens
        self.req_pool = runner.req_pool
        self.memory_bytes = runner.memory_bytes
        self.hicache: RecordedTransfers | None = None
        self.storage: Storage | None = None
        if runner.hicache is not None:
            self.hicache = RecordedTransfers(runner.hicache, events, tags)
            if runner.storage is not None:
                recorded = RecordedStorage(runner.storage.controller, runner.hicache, events)
                self.storage = Storage(cast(StorageController, recorded), runner.storage.root_key)
        self._runner = runner
        self._events = events
        self._tags = tags

    @property
    def step_costs(self) -> StepCosts | None:
        """As of the runner."""
        return self._runner.step_costs

    @property
    def graph_stats(self) -> GraphStats | None:
        """See ModelRunner."""
        return self._runner.graph_stats

    @property
    def prefill_graph_stats(self) -> GraphStats | None:
        """See ModelRunner."""
        return self._runner.prefill_graph_stats

    def completions(self, awaited: ForwardResult | None) -> Completions:
        """See ModelRunner."""
        return drain_completions(self.hicache, self.storage, awaited)

    def launch(self, batch: StepBatch) -> ForwardResult | HeldStep:
        """See ModelRunner."""
        result = self._runner.launch(batch)
        decision = Decision(batch)
        self._events.append(decision)
        if isinstance(result, HeldStep):
            return HeldStep(
                result.done, partial(self._masks, result, decision), partial(self._sample, result, decision)
            )
        return cast(ForwardResult, _RecordedResult(result, decision))

    def check_weights(self, weights: NewWeights) -> None:
        """See ModelRunner."""
        self._runner.check_weights(weights)

    def replace_weights(self, weights: NewWeights, one_more: Callable[[], None]) -> None:
        """See ModelRunner."""
        self._events.append(Update(weights))
        if self._tags is not None:
            self._tags.weights_replaced(weights)
        self._runner.replace_weights(weights, one_more)

    def _masks(self, held: HeldStep, decision: Decision) -> I32:
        decision.masks = held.begin_masks()
        return decision.masks

    def _sample(self, held: HeldStep, decision: Decision) -> ForwardResult:
        assert decision.masks is not None, "masks are written before the draw"
        decision.masks = decision.masks.copy()  # those of the next step are written to the same memory
        return cast(ForwardResult, _RecordedResult(held.sample(), decision))


class _RecordedResult:
    """A step's result that records what ``publish`` takes from it."""

    def __init__(self, result: ForwardResult, decision: Decision) -> None:
        self.done = result.done
        self._result = result
        self._decision = decision

    def arrived(self) -> bool:
        return self._result.arrived()

    def wait(self) -> StepOutput:
        self._decision.output = self._result.wait()
        return self._decision.output


class RecordedTransfers:
    """A HiCacheController that records its transfers."""

    def __init__(self, controller: HiCacheController, events: list[Event], tags: Tags | None) -> None:
        self._controller = controller
        self._tags = tags
        self._events = events
        self._ids: set[int] = set()

    @property
    def host_pages(self) -> LeasePool:
        """See HiCacheController."""
        return self._controller.host_pages

    @property
    def counts(self) -> Mapping[TransferKind, TransferCounts]:
        """See HiCacheController."""
        return self._controller.counts

    @property
    def num_in_flight(self) -> int:
        """See HiCacheController."""
        return self._controller.num_in_flight

    def store(self, ticket: Ticket, device_pages: I32, host_pages: I32, after: Points) -> None:
        """See HiCacheController."""
        self._begin(ticket, TransferKind.STORE, device_pages, host_pages)
        with self._purpose_of(TransferKind.STORE, device_pages, host_pages):
            self._controller.store(ticket, device_pages, host_pages, after)

    def load(self, ticket: Ticket, device_pages: I32, host_pages: I32, after: Points) -> None:
        """See HiCacheController."""
        self._begin(ticket, TransferKind.LOAD, device_pages, host_pages)
        with self._purpose_of(TransferKind.LOAD, device_pages, host_pages):
            self._controller.load(ticket, device_pages, host_pages, after)

    def _begin(self, ticket: Ticket, kind: TransferKind, device_pages: I32, host_pages: I32) -> None:
        num = len(device_pages)
        assert ticket.num_pages == num, f"{ticket!r} is said to have {ticket.num_pages} pages, it has {num}"
        assert ticket.id > 0 and ticket.id not in self._ids, (
            f"{ticket!r} has a number that another one has, or none"
        )
        self._ids.add(ticket.id)
        self._events.append(Transfer(kind, device_pages.copy(), host_pages.copy()))

    def _purpose_of(self, *transfer: Any) -> AbstractContextManager[None]:
        return nullcontext() if self._tags is None else self._tags.transfer(*transfer)

    def ended(self) -> tuple[int, int]:
        """See HiCacheController."""
        return self._controller.ended()

    def drain_acks(self, until: tuple[int, int] | None = None) -> Sequence[Ticket]:
        """See HiCacheController."""
        return self._controller.drain_acks(until)


class RecordedStorage:
    """A StorageController that records what is written to storage and what is read from it."""

    def __init__(
        self, controller: StorageController, transfers: HiCacheController, events: list[Event]
    ) -> None:
        self._controller = controller
        self._host_pool = transfers.host_pool
        self._events = events

    def write(self, keys: Sequence[PageKey], host_pages: I32, after: Points, handle: int) -> None:
        """See StorageController."""
        self._events.append(Kept(tuple(keys), host_pages.copy()))
        self._controller.write(keys, host_pages, after, handle)

    def query(self, op: Prefetch) -> None:
        """See StorageController."""
        self._controller.query(op)

    def fetch(self, op: Prefetch, host_pages: I32, after: Points) -> None:
        """See StorageController."""
        self._controller.fetch(op, host_pages, after)

    def cancel(self, op: Prefetch) -> None:
        """See StorageController."""
        self._controller.cancel(op)

    def may_schedule(self, op: Prefetch) -> bool:
        """See StorageController."""
        return self._controller.may_schedule(op)

    @property
    def num_outstanding(self) -> int:
        """See StorageController."""
        return self._controller.num_outstanding

    def drain(self) -> list[Ack]:
        """See StorageController. The scheduler owns the pages of a :class:`Fetched` ack from here on, so their bytes
        can be read now."""
        acks = self._controller.drain()
        for ack in acks:
            if isinstance(ack, FetchedAck):
                pages = slice(ack.first, ack.first + ack.num_pages)
                host_pages = ack.op.host_pages[pages].copy()
                data = host_bytes(self._host_pool, host_pages)
                self._events.append(Fetched(ack.op.keys[pages], host_pages, data))
        return acks

    def stats(self) -> StorageTierStats:
        """See StorageController."""
        return self._controller.stats()

    def clear(self) -> int:
        """See StorageController."""
        return self._controller.clear()

    def close(self) -> None:
        """See StorageController."""
        self._controller.close()
