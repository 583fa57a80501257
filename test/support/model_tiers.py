"""A model runner with a host tier: requests whose pages the test chooses, and transfers of these pages to and from
host."""

from __future__ import annotations

from itertools import count

import numpy as np
from step_traces import GREEDY, VOCAB_SIZE, TraceShape
from trace_runner import make_runner

from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import Device, Points
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import Chunk, ForwardResult, PageWrites, StepBatch, StepOutput
from fenceline.sampling.sampling_batch import ReqSampling

PAGE = 16
PREFIX_PAGES = 5
SHAPE = TraceShape(page_size=PAGE, num_rows=6, num_pages=40)
LOAD, STORE = TransferKind.LOAD, TransferKind.STORE
HICACHE = {"enable_hierarchical_cache": True, "hicache_ratio": 0.5}


def hicache_runner(device: Device, **flags: object) -> ModelRunner:
    return make_runner(device, SHAPE, (1, 2, 4), **(HICACHE | flags))


def ids(pages: range | list[int]) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


class Tiers:
    """A runner, with requests whose pages the test chooses, and transfers between these pages and the host's."""

    def __init__(self, runner: ModelRunner) -> None:
        assert runner.hicache is not None
        self.runner, self.hicache = runner, runner.hicache
        self._tickets = count(1)

    def extend(
        self, row: int, tokens: np.ndarray, pages: list[int], prefix_len: int = 0, loads: tuple[Ticket, ...] = ()
    ) -> StepOutput:
        """Compute ``tokens[prefix_len:]`` of a request whose pages are ``pages``, and wait for its answer."""
        return self.launch(row, tokens, pages, prefix_len, loads).wait()

    def launch(
        self,
        row: int,
        tokens: np.ndarray,
        pages: list[int],
        prefix_len: int = 0,
        loads: tuple[Ticket, ...] = (),
        decodes: StepBatch | None = None,
    ) -> ForwardResult:
        """Like :meth:`extend`, but without waiting, so that the step is in flight; with the rows of ``decodes``."""
        positions = np.arange(prefix_len, len(tokens))
        sampling = ReqSampling(GREEDY, 1, row, len(tokens), (0,), True, 2)
        slots = np.array(pages, np.int64)[positions // PAGE] * PAGE + positions % PAGE
        chunk = Chunk(tokens[prefix_len:], slots)
        num = -(-len(tokens) // PAGE)
        rows = np.full(num, row, np.int64)
        writes = PageWrites(rows, np.arange(num, dtype=np.int64), ids(pages[:num]))
        batch = StepBatch.of_chunks([row], [prefix_len], [chunk], [sampling], writes, Points.none(), loads)
        return self.runner.launch(batch if decodes is None else batch.beside(decodes))

    def decode_batch(self, row: int, seq_len: int, composition: int) -> StepBatch:
        sampling = ReqSampling(GREEDY, 1, row, seq_len, (0,), False, 0)
        lens = np.array([seq_len])
        return StepBatch(
            rows=np.array([row]),
            starts=lens - 1,
            seq_lens=lens,
            samples=np.ones(1, np.bool_),
            sampling=(sampling,),
            page_writes=PageWrites.none(),
            after=Points.none(),
            composition=composition,
        )

    def store(self, device_pages: range | list[int], host_pages: range | list[int]) -> Ticket:
        """Back up pages, after all work that has been submitted to FORWARD."""
        ticket = Ticket(next(self._tickets), STORE)
        after = Points.of(self.runner.device.forward.record())
        self.hicache.store(ticket, ids(device_pages), ids(host_pages), after)
        return ticket

    def load(self, device_pages: range | list[int], host_pages: range | list[int], after: Points) -> Ticket:
        ticket = Ticket(next(self._tickets), LOAD)
        self.hicache.load(ticket, ids(device_pages), ids(host_pages), after)
        return ticket

    def drain(self) -> list[Ticket]:
        """Wait for all acks. It loops, because with the memory checker a device may report an end only at the second
        call."""
        acks = []
        while self.hicache.num_in_flight:
            acks += self.hicache.drain_acks()
        return acks


def prompt(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE, num_tokens)


def through_the_host(tiers: Tiers, last: int = 7) -> tuple[StepOutput, StepOutput]:
    """The answers to a prompt that is computed as a whole, and to the same prompt with a prefix that was copied to the
    host and back to other pages.

    The prefix ends within a page, which the second request continues, as after a retraction.
    """
    tokens = prompt(1, PREFIX_PAGES * PAGE + last)
    prefix_len = PREFIX_PAGES * PAGE - 3
    expected = tiers.extend(1, tokens, list(range(1, 10)))
    first = tiers.launch(2, tokens[:prefix_len], list(range(11, 20)))
    stored = tiers.store(range(11, 11 + PREFIX_PAGES), [4, 2, 6, 3, 5])
    second = tiers.launch(3, prompt(2, 100), list(range(21, 30)))  # whose pages the loaded ones will be
    device = tiers.runner.device
    after = stored.points.join(Points.of(device.forward.record()))
    loaded = tiers.load([25, 23, 21, 22, 28], [4, 2, 6, 3, 5], after)
    first.wait()
    third = tiers.launch(4, tokens, [25, 23, 21, 22, 28, 30], prefix_len, (loaded,))
    assert loaded.waited
    second.wait()
    got = third.wait()
    device.synchronize()
    acks = tiers.drain()
    assert set(acks) == {stored, loaded} and len(acks) == 2
    return expected, got
