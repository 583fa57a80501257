"""Storage workers on the virtual GPU: agents that share host pages with LOAD and STORE, ordered by host_page_reuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from page_pools import Shape, device_pages, make_pools
from storage_cases import key
from storage_tier import Clock, DictBackend

from fenceline.config.server_args import MemLayout
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.host.page_copy import make_page_copier
from fenceline.mem_cache.storage.controller import Fetched, StorageController, StorageLimits, Written, apply
from fenceline.mem_cache.storage.worker import Outcome, Prefetch
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import Points
from fenceline_sim import RaceError, VgpuDevice, VirtualGpu

SEEDS = range(8)
POLICIES = ("fifo", "eager", "laziest", "random", "pct")
LAYOUTS: tuple[MemLayout, ...] = ("page_first", "layer_first")
KEYS = [key(n) for n in range(4)]
SHAPE = Shape(num_device_pages=16, num_host_pages=4, page_size=2, num_layers=2, heads=(1, 4))
I32 = np.int32


class Machine:
    """Four host pages between a device and storage: whatever comes next reuses them."""

    def __init__(
        self,
        seed: int,
        policy: str = "random",
        layout: MemLayout = "page_first",
        severed: frozenset[str] = frozenset(),
        num_workers: int = 2,
    ) -> None:
        self.gpu = VirtualGpu(seed=seed, policy=policy)
        self.device = VgpuDevice(severed, self.gpu)
        self.kv_pool, self.pool = make_pools(self.device, layout, SHAPE)
        copier = make_page_copier(self.device, self.kv_pool, self.pool, "direct")
        self.transfers = HiCacheController(self.device, self.kv_pool, self.pool, copier)
        self.backend = DictBackend(self.pool.page_nbytes)
        limits = StorageLimits(batch_bytes=2 * self.pool.page_nbytes, max_write_pages=4, max_fetch_pages=8, close_s=60)
        self.storage = StorageController(
            self.device, self.pool, self.backend, "wait_complete", None, num_workers, limits, Clock()
        )
        self.acks: list[object] = []
        self.num_tickets = 0
        # If the scheduler knows that a copy has passed, its messages order the worker after that copy.
        self.hears_transfers = True

    def ticket(self, kind: TransferKind) -> Ticket:
        self.num_tickets += 1
        return Ticket(self.num_tickets, kind)

    def store(self, first: int, host: np.ndarray, after: Points) -> Points:
        """Device pages from ``first`` on to the host, right after FORWARD has written them anew."""
        with torch.inference_mode(), self.device.forward.active():
            for layer in range(SHAPE.num_layers):
                for tensor in (self.kv_pool.row(layer, "k"), self.kv_pool.row(layer, "v")):
                    tensor[2 * first : 2 * (first + len(host))].mul_(2)
        ticket = self.ticket(TransferKind.STORE)
        pages = np.arange(first, first + len(host), dtype=I32)
        self.transfers.store(ticket, pages, host, after.join(Points.of(self.device.forward.record())))
        return ticket.points

    def load(self, first: int, host: np.ndarray, after: Points) -> Points:
        """Host pages to the device, from ``first`` on."""
        ticket = self.ticket(TransferKind.LOAD)
        pages = np.arange(first, first + len(host), dtype=I32)
        self.transfers.load(ticket, pages, host, after)
        return ticket.points

    def lease(self, num_pages: int = 4) -> tuple[np.ndarray, Points]:
        leased = self.pool.pages.alloc(num_pages)
        assert leased is not None, "the scene has not given its pages back"
        return leased

    def until(self, ready: Callable[[], bool]) -> None:
        """Steps of a scheduler that has nothing else to do."""
        for _ in range(5000):
            if ready():
                return
            if self.hears_transfers:
                self.transfers.drain_acks()
            for ack in self.storage.drain():
                apply(ack)
                self.acks.append(ack)
        raise AssertionError(f"nothing came: {self.acks}")

    def prefetch(self) -> Prefetch:
        """All four keys into whatever host pages are free."""
        op = Prefetch(1, KEYS)
        self.storage.query(op)
        self.until(lambda: op.num_found == 4)
        host, after = self.lease()
        self.storage.fetch(op, host, after)
        return op

    def assert_equal(self, *firsts: int) -> None:
        """Four device pages from each of these on hold the same."""
        pages = device_pages(self.kv_pool)
        assert bool(pages[firsts[0] : firsts[0] + 4].any())
        for first in firsts[1:]:
            assert torch.equal(pages[first : first + 4], pages[firsts[0] : firsts[0] + 4])


def write_behind(machine: Machine) -> tuple[np.ndarray, Points]:
    """Device pages 1 to 4 by way of the host to storage. The host pages stay leased."""
    host, after = machine.lease()
    stored = machine.store(1, host, after)
    machine.storage.write(KEYS, host, stored, 7)
    machine.until(lambda: Written(7, 4) in machine.acks)
    return host, stored


def fetch_over(machine: Machine, host: np.ndarray, after: Points, first: int) -> Prefetch:
    """The host pages go to the device, from ``first`` on; they are given back at once, and storage's pages come into
    them."""
    machine.pool.pages.retire(host, machine.load(first, host, after))
    op = machine.prefetch()
    machine.until(lambda: op.over)
    assert op.outcome is Outcome.COMPLETE
    return op


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_pages_go_to_storage_and_back_without_a_race(policy: str, layout: MemLayout) -> None:
    for seed in SEEDS:
        machine = Machine(seed, policy, layout)
        op = fetch_over(machine, *write_behind(machine), first=5)
        assert [ack for ack in machine.acks if isinstance(ack, Fetched)] == [Fetched(op, 0, 2), Fetched(op, 2, 2)]
        machine.load(9, op.host_pages, op.after)
        machine.storage.close()
        machine.device.synchronize()
        machine.assert_equal(1, 5, 9)
        assert machine.gpu.races == []


# --- without the edge --------------------------------------------------------------------------------


def test_a_worker_that_reads_while_store_still_writes_is_named() -> None:
    for seed in SEEDS:
        machine = Machine(seed, severed=frozenset({"host_page_reuse"}))
        with pytest.raises(RaceError, match="write of a page to storage") as caught:
            write_behind(machine)
            machine.device.synchronize()  # a lazy device has not run the copy yet
        assert caught.value.edge == "host_page_reuse" and caught.value.hazard == "RAW"


def test_a_worker_that_overwrites_what_load_still_reads_is_named() -> None:
    for seed in SEEDS:
        machine = Machine(seed, severed=frozenset({"host_page_reuse"}))
        machine.backend.pages = {name: np.zeros(machine.pool.page_nbytes, np.uint8) for name in KEYS}
        machine.hears_transfers = False
        with pytest.raises(RaceError, match="read of a page from storage") as caught:
            fetch_over(machine, *machine.lease(), first=5)
            machine.device.synchronize()
        assert caught.value.edge == "host_page_reuse" and caught.value.hazard == "WAR"


def test_a_caller_that_forgets_the_points_is_caught() -> None:
    """The edge alone does not help who does not say what to wait for."""
    for seed in SEEDS:
        machine = Machine(seed)
        host, after = machine.lease()
        machine.store(1, host, after)
        machine.storage.write(KEYS, host, Points.none(), 7)
        with pytest.raises(RaceError):
            machine.until(lambda machine=machine: Written(7, 4) in machine.acks)  # type: ignore[misc]
            machine.device.synchronize()


# --- who has the pages when --------------------------------------------------------------------------


def test_a_cancelled_fetch_gives_its_pages_back() -> None:
    """The worker may not have waited for them: whoever is next does."""
    fetched = set()
    for seed in range(40):
        machine = Machine(seed)
        host, stored = write_behind(machine)
        machine.pool.pages.retire(host, machine.load(5, host, stored))
        op = machine.prefetch()
        machine.storage.cancel(op)
        machine.until(lambda op=op: op.over)  # type: ignore[misc]
        fetched.add(op.num_fetched)
        machine.pool.pages.retire(op.host_pages, op.after)
        host, after = machine.lease()
        machine.load(9, host, machine.store(1, host, after))
        machine.storage.close()
        machine.device.synchronize()
        machine.assert_equal(1, 9)
        assert machine.gpu.races == []
    assert fetched == {0}, "nothing is handed out after the cancellation"


def test_what_a_fetch_has_brought_may_be_loaded_while_it_goes_on() -> None:
    for seed in SEEDS:
        machine = Machine(seed)
        host, stored = write_behind(machine)
        machine.pool.pages.retire(host, stored)
        op = machine.prefetch()
        machine.until(lambda op=op: op.num_fetched >= 2)  # type: ignore[misc]
        machine.load(5, op.host_pages[:2], op.after)
        machine.until(lambda op=op: op.over)  # type: ignore[misc]
        machine.load(7, op.host_pages[2:], op.after)
        machine.storage.close()
        machine.device.synchronize()
        machine.assert_equal(1, 5)
        assert machine.gpu.races == []


# --- the seed decides --------------------------------------------------------------------------------


def story(seed: int) -> list[str]:
    """The order of acks of four prefetches that three workers serve."""
    machine = Machine(seed, num_workers=4)
    machine.backend.pages = {name: np.zeros(machine.pool.page_nbytes, np.uint8) for name in KEYS}
    ops = [Prefetch(number, KEYS[:2]) for number in range(4)]
    for op in ops:
        machine.storage.query(op)
    machine.until(lambda: all(op.num_found for op in ops))
    for op in ops:
        machine.storage.fetch(op, *machine.lease(1))
    machine.until(lambda: all(op.over for op in ops))
    machine.storage.close()
    return [f"{type(ack).__name__} {ack.op.handle}" for ack in machine.acks]  # type: ignore[attr-defined]


def test_the_order_of_acks_is_a_function_of_the_seed() -> None:
    stories = [story(seed) for seed in range(10)]
    assert stories == [story(seed) for seed in range(10)]
    assert len({tuple(s) for s in stories}) > 3
