"""The scheduler's Worker in the proof: a ModelRunner that records decisions as they are taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.storage.controller import Ack, Storage, StorageController
from fenceline.mem_cache.storage.controller import Fetched as FetchedAck
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import Points
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import Completions, ForwardResult, HeldStep, StepBatch, StepOutput, drain_completions
from fenceline.models.loader import NewWeights
from fenceline_proof.decisions import Decision, Event, Fetched, Kept, Transfer, Update, host_bytes
from fenceline_sim.tags import Tags

I32 = npt.NDArray[np.int32]


class _InPlaceOf:
    """Has all attributes of ``original`` that the class itself does not have."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class RecordedWorker(_InPlaceOf):
    """A ModelRunner that adds its launches, its transfers and the published results to ``events``."""

    def __init__(self, runner: ModelRunner, events: list[Event], tags: Tags | None = None) -> None:
        super().__init__(runner)
        self.hicache: RecordedTransfers | None = None
        self.storage: Storage | None = None
        if runner.hicache is not None:
            self.hicache = RecordedTransfers(runner.hicache, events, tags)
            if runner.storage is not None:
                recorded = RecordedStorage(runner.storage.controller, runner.hicache, events)
                self.storage = Storage(cast(StorageController, recorded), runner.storage.root_key)
        self._events = events
        self._tags = tags

    def completions(self, awaited: ForwardResult | None) -> Completions:
        return drain_completions(self.hicache, self.storage, awaited)

    def launch(self, batch: StepBatch) -> ForwardResult | HeldStep:
        result = self._original.launch(batch)
        decision = Decision(batch)
        self._events.append(decision)
        if isinstance(result, HeldStep):
            return HeldStep(
                result.done, partial(self._masks, result, decision), partial(self._sample, result, decision)
            )
        return cast(ForwardResult, _RecordedResult(result, decision))

    def replace_weights(self, weights: NewWeights, one_more: Callable[[], None]) -> None:
        self._events.append(Update(weights))
        if self._tags is not None:
            self._tags.weights_replaced(weights)
        self._original.replace_weights(weights, one_more)

    def _masks(self, held: HeldStep, decision: Decision) -> I32:
        decision.masks = held.begin_masks()
        return decision.masks

    def _sample(self, held: HeldStep, decision: Decision) -> ForwardResult:
        assert decision.masks is not None, "masks are written before the draw"
        decision.masks = decision.masks.copy()  # those of the next step are written to the same memory
        return cast(ForwardResult, _RecordedResult(held.sample(), decision))


class _RecordedResult(_InPlaceOf):
    """A step's result that records what ``publish`` takes from it."""

    def __init__(self, result: ForwardResult, decision: Decision) -> None:
        super().__init__(result)
        self._decision = decision

    def wait(self) -> StepOutput:
        self._decision.output = self._original.wait()
        return self._decision.output


class RecordedTransfers(_InPlaceOf):
    """A HiCacheController that records its transfers."""

    def __init__(self, controller: HiCacheController, events: list[Event], tags: Tags | None) -> None:
        super().__init__(controller)
        self._tags = tags
        self._events = events
        self._ids: set[int] = set()

    def store(self, ticket: Ticket, device_pages: I32, host_pages: I32, after: Points) -> None:
        self._begin(ticket, TransferKind.STORE, device_pages, host_pages)
        with self._purpose_of(TransferKind.STORE, device_pages, host_pages):
            self._original.store(ticket, device_pages, host_pages, after)

    def load(self, ticket: Ticket, device_pages: I32, host_pages: I32, after: Points) -> None:
        self._begin(ticket, TransferKind.LOAD, device_pages, host_pages)
        with self._purpose_of(TransferKind.LOAD, device_pages, host_pages):
            self._original.load(ticket, device_pages, host_pages, after)

    def _begin(self, ticket: Ticket, kind: TransferKind, device_pages: I32, host_pages: I32) -> None:
        num = len(device_pages)
        assert ticket.num_pages == num, f"{ticket!r} is said to have {ticket.num_pages} pages, it has {num}"
        assert ticket.id > 0 and ticket.id not in self._ids, f"{ticket!r} has a number that another one has, or none"
        self._ids.add(ticket.id)
        self._events.append(Transfer(kind, device_pages.copy(), host_pages.copy()))

    def _purpose_of(self, *transfer: Any) -> AbstractContextManager[None]:
        return nullcontext() if self._tags is None else self._tags.transfer(*transfer)


class RecordedStorage(_InPlaceOf):
    """A StorageController that records what is written to storage and what is read from it."""

    def __init__(self, controller: StorageController, transfers: HiCacheController, events: list[Event]) -> None:
        super().__init__(controller)
        self._host_pool = transfers.host_pool
        self._events = events

    def write(self, keys: Sequence[PageKey], host_pages: I32, after: Points, handle: int) -> None:
        self._events.append(Kept(tuple(keys), host_pages.copy()))
        self._original.write(keys, host_pages, after, handle)

    def drain(self) -> list[Ack]:
        """See StorageController. The scheduler owns the pages of a :class:`Fetched` ack from here on, so their bytes
        can be read now."""
        acks = self._original.drain()
        for ack in acks:
            if isinstance(ack, FetchedAck):
                pages = slice(ack.first, ack.first + ack.num_pages)
                host_pages = ack.op.host_pages[pages].copy()
                data = host_bytes(self._host_pool, host_pages)
                self._events.append(Fetched(ack.op.keys[pages], host_pages, data))
        return acks
