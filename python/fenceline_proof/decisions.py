"""The decisions of a run, in the order in which they were taken, and their execution one after the other on the CPU.

Whatever the schedule, the bytes must equal those of this order: answers step by step, and at the end the pages that the
tree owns, in both tiers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fenceline.config.engine_config import EngineConfig
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import Points, open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import HeldStep, LogprobValues, StepBatch, StepOutput
from fenceline.models.loader import NewWeights

I32 = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Decision:
    """One launched step: the scheduler's decision, and the step's results (None until published)."""

    batch: StepBatch
    output: StepOutput | None = None
    masks: I32 | None = None  # of a step whose sampling waited for them, see HeldStep.begin_masks


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """Pages that were copied from one tier to the other, pairwise."""

    kind: TransferKind
    device_pages: I32
    host_pages: I32


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Host pages that were written to storage under ``keys``."""

    keys: tuple[PageKey, ...]
    host_pages: I32


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """Host pages that were read from storage: ``pages[i]`` are the bytes of ``host_pages[i]``."""

    keys: tuple[PageKey, ...]
    host_pages: I32
    pages: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """At the end: the pages that the tree owns and their bytes, by tier."""

    device_pages: I32
    device: tuple[Bytes, ...]
    host_pages: I32
    host: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """The model's weights were replaced."""

    weights: NewWeights


Event = Decision | Transfer | Kept | Fetched | Owned | Update


def num_steps(events: Sequence[Event]) -> int:
    """How many of them are steps."""
    return sum(isinstance(event, Decision) for event in events)


def device_bytes(runner: ModelRunner, pages: I32) -> tuple[Bytes, ...]:
    """What each of the device's ``pages`` holds, in the order of the layout."""
    parts = [part.cpu() for part in runner.kv_pool.parts]
    return tuple(torch.cat([part[page] for part in parts]).numpy() for page in pages.tolist())


def host_bytes(pool: HostPool, pages: I32) -> tuple[Bytes, ...]:
    """What each of the host's ``pages`` holds, in the order in which storage keeps it."""
    return tuple(np.concatenate(pool.page(page)) for page in pages.tolist())


def execute(
    config: EngineConfig, events: Sequence[Event], prepare: Callable[[ModelRunner], None] = lambda runner: None
) -> str:
    """Execute ``events`` one after the other on the CPU; "" if everything is the same, else what is not.

    ``prepare`` is called before the first, with a runner that has done nothing yet.
    """
    if config.hicache is not None:  # what storage returned is recorded, so no storage is needed
        config = dataclasses.replace(config, hicache=dataclasses.replace(config.hicache, storage=None))
    # One after the other they need no waits, so their order is not the one that is declared.
    args = dataclasses.replace(config.server_args, memory_check="off")
    config = dataclasses.replace(config, server_args=args)
    runner = ModelRunner(config, open_device("cpu"), show_progress=False)
    prepare(runner)
    execution = _Execution(runner)
    for number, event in enumerate(events):
        difference = execution.carry_out(event)
        if difference:
            return f"step {number} of {len(events)} ({_name(event)}): {difference}"
    return ""


def _name(event: Event) -> str:
    return type(event.batch if isinstance(event, Decision) else event).__name__


class _Execution:
    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._kept: dict[PageKey, list[Bytes]] = {}
        self._num_transfers = 0

    def carry_out(self, event: Event) -> str:
        """The first difference, "" if there is none."""
        match event:
            case Decision():
                return self._step(event)
            case Transfer():
                return self._transfer(event)
            case Kept():
                return self._keep(event)
            case Fetched():
                return self._fetch(event)
            case Owned():
                return self._compare(event)
            case Update():
                self._runner.replace_weights(event.weights, lambda: None)
                return ""

    @property
    def _host_pool(self) -> HostPool:
        assert self._runner.hicache is not None, "only a host tier moves pages"
        return self._runner.hicache.host_pool

    def _step(self, decision: Decision) -> str:
        # The CPU is synchronous: all earlier uses of the batch's memory have ended, and so have its loads.
        batch = dataclasses.replace(decision.batch, after=Points.none(), loads=())
        result = self._runner.launch(batch)
        if isinstance(result, HeldStep):
            assert decision.masks is not None, "every launched step is sampled"
            result.begin_masks()[:] = decision.masks
            result = result.sample()
        expected = result.wait()
        assert decision.output is not None, "every launched step is published"
        return _difference(expected, decision.output)

    def _transfer(self, event: Transfer) -> str:
        controller = self._runner.hicache
        assert controller is not None, "only a host tier moves pages"
        self._num_transfers += 1
        ticket = Ticket(self._num_transfers, event.kind)
        submit = controller.load if event.kind is TransferKind.LOAD else controller.store
        submit(ticket, event.device_pages, event.host_pages, Points.none())
        controller.drain_acks()
        return ""

    def _keep(self, event: Kept) -> str:
        for key, page in zip(event.keys, host_bytes(self._host_pool, event.host_pages), strict=True):
            self._kept.setdefault(key, []).append(page)
        return ""

    def _fetch(self, event: Fetched) -> str:
        """A page may have been computed twice, in batches of different shapes; storage has one of the two."""
        pool = self._host_pool
        for key, number, page in zip(event.keys, event.host_pages.tolist(), event.pages, strict=True):
            if not any(np.array_equal(page, kept) for kept in self._kept.get(key, ())):
                return f"what storage brought into host page {number} is nothing that it was given under this key"
            start = 0
            for part in pool.page(number):
                part[:] = page[start : start + len(part)]
                start += len(part)
        return ""

    def _compare(self, event: Owned) -> str:
        tiers = [("device", event.device_pages, event.device, device_bytes(self._runner, event.device_pages))]
        if len(event.host_pages):
            mine = host_bytes(self._host_pool, event.host_pages)
            tiers.append(("host", event.host_pages, event.host, mine))
        for tier, numbers, got, expected in tiers:
            wrong = [
                number for number, a, b in zip(numbers.tolist(), got, expected, strict=True) if not np.array_equal(a, b)
            ]
            if wrong:
                return f"{tier} pages {wrong[:8]} of the tree hold something else than in order of submission"
        return ""


def _difference(expected: StepOutput, got: StepOutput) -> str:
    if not np.array_equal(expected.tokens, got.tokens):
        return f"tokens {got.tokens.tolist()}, in order of submission {expected.tokens.tolist()}"
    counts = [None if out.counts is None else out.counts.tolist() for out in (expected, got)]
    if counts[0] != counts[1]:
        return f"counts {counts[1]}, in order of submission {counts[0]}"
    for name in ("logprobs", "prompt_logprobs"):
        if not _same(getattr(expected, name), getattr(got, name)):
            return f"{name} differ from those in order of submission"
    return ""


def _same(a: LogprobValues | None, b: LogprobValues | None) -> bool:
    if a is None or b is None:
        return a is b
    mine, yours = _arrays(a), _arrays(b)
    return len(mine) == len(yours) and all(map(np.array_equal, mine, yours))


def _arrays(values: LogprobValues) -> list[npt.NDArray[np.generic]]:
    named = [] if values.named is None else [values.named]
    return [values.chosen, values.top, values.top_ids, *named]
