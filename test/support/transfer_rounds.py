"""Transfers of KV pages with adverse timing: rounds that each make one race possible, and random ones with a model.

Work on FORWARD stands for steps: it writes patterns into pages and reads pages. On a GPU, spins make work late. On the
virtual GPU the schedule does this, and its race detector is on. All data that a round has moved are compared bit by bit
with the patterns, which are the result on an idle device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

import numpy as np
import pytest
import torch
from page_pools import Shape, device_pages, fill_host_page, host_page, ids, make_pools

from fenceline.config.hicache import IoBackend
from fenceline.config.server_args import MemLayout
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.host.page_copy import PageCopier, Pages, make_page_copier
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import Device, Point, Points, Stream, open_device, wait_for_pages
from fenceline.memory_order.edges import HOST_PAGE_REUSE
from fenceline_sim import VgpuDevice, VirtualGpu

SHAPE = Shape(num_device_pages=12, num_host_pages=10, page_size=16, num_layers=2, heads=(2, 64))
SPIN_CYCLES = 300_000  # of the device's clock, about 150 us: longer than all the copies of a round
NUM_PATTERNS = 6
NUM_ROUNDS = {"cpu": 20, "vgpu": 3, "cuda": 1000}
POLICIES = ("fifo", "eager", "laziest", "random", "pct")

kinds = pytest.mark.parametrize("kind", ["cpu", "vgpu", pytest.param("cuda", marks=pytest.mark.gpu)])
asynchronous = pytest.mark.parametrize("kind", ["vgpu", pytest.param("cuda", marks=pytest.mark.gpu)])
layouts = pytest.mark.parametrize("layout", ["layer_first", "page_first"])
io_backends = pytest.mark.parametrize("io_backend", ["kernel", "direct"])


class LateCopier(PageCopier):
    """Submits copies after a spin of their stream, if the device is a GPU and the rounds ask for it."""

    def __init__(self, rounds: Rounds, copier: PageCopier) -> None:
        self.uses_sm = copier.uses_sm
        self._rounds = rounds
        self._copier = copier

    def to_host(self, stream: Stream, device_pages: Pages, host_pages: Pages) -> None:
        if self._rounds.late_stores:
            self._rounds.spin(stream)
        self._copier.to_host(stream, device_pages, host_pages)

    def to_device(self, stream: Stream, host_pages: Pages, device_pages: Pages, layers: range) -> None:
        if self._rounds.late_loads:
            self._rounds.spin(stream)
        self._copier.to_device(stream, host_pages, device_pages, layers)


class Rounds:
    """A controller over small pools, and patterns to fill pages with."""

    def __init__(
        self,
        device: Device,
        layout: MemLayout = "layer_first",
        io_backend: IoBackend = "direct",
        spin_cycles: int = SPIN_CYCLES,
    ) -> None:
        self.device = device
        self.late_loads = self.late_stores = True
        self.kv_pool, self.host_pool = make_pools(device, layout, SHAPE)
        self.spin_cycles = spin_cycles if device.kind == "cuda" else 0
        copier = make_page_copier(device, self.kv_pool, self.host_pool, io_backend)
        self.controller = HiCacheController(device, self.kv_pool, self.host_pool, LateCopier(self, copier))
        heads = (SHAPE.page_size, *SHAPE.heads)
        noise = np.random.default_rng(3).integers(-99, 99, (NUM_PATTERNS, SHAPE.num_layers, 2, *heads))
        self.patterns = torch.from_numpy(noise).to(self.kv_pool.dtype)
        self._on_device = self.patterns.to(device.torch_device)
        self.read_out = torch.zeros_like(self._on_device[0])
        self._tickets = count(1)
        device.synchronize()

    def spin(self, stream: Stream) -> None:
        """Make work late that is submitted to ``stream`` from now on."""
        if self.spin_cycles:
            with stream.active():
                torch.cuda._sleep(self.spin_cycles)

    # --- FORWARD

    def write(self, page: int, pattern: int, after: Points = Points.none(), late: bool = True) -> Point:
        """Submit a step that writes ``page``; returns its Point."""
        wait_for_pages(self.device.forward, after)
        if late:
            self.spin(self.device.forward)
        with torch.inference_mode(), self.device.forward.active():
            for layer in range(SHAPE.num_layers):
                for kv, part in enumerate(self._parts(layer, page)):
                    part.copy_(self._on_device[pattern, layer, kv])
        return self.device.forward.record()

    def read(self, page: int, loads: Sequence[Ticket] = (), after: Points = Points.none(), late: bool = True) -> Point:
        """Submit a step that reads ``page`` layer by layer, as attention does, into ``read_out``; returns its Point."""
        wait_for_pages(self.device.forward, after)
        ready = self.controller.layer_ready(loads, self.kv_pool.num_layers)
        if late:
            self.spin(self.device.forward)
        with torch.inference_mode(), self.device.forward.active():
            for layer in range(SHAPE.num_layers):
                ready(layer)
                for kv, part in enumerate(self._parts(layer, page)):
                    self.read_out[layer, kv].copy_(part)
        return self.device.forward.record()

    def _parts(self, layer: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slice(page * SHAPE.page_size, (page + 1) * SHAPE.page_size)
        return self.kv_pool.row(layer, "k")[slots], self.kv_pool.row(layer, "v")[slots]

    # --- transfers

    def store(self, pages: Sequence[int], host: Sequence[int], after: Points) -> Ticket:
        ticket = Ticket(next(self._tickets), TransferKind.STORE)
        with torch.inference_mode():
            self.controller.store(ticket, ids(*pages), ids(*host), after)
        return ticket

    def load(self, pages: Sequence[int], host: Sequence[int], after: Points) -> Ticket:
        ticket = Ticket(next(self._tickets), TransferKind.LOAD)
        with torch.inference_mode():
            self.controller.load(ticket, ids(*pages), ids(*host), after)
        return ticket

    # --- a storage worker

    def worker_writes(self, host: int, pattern: int, after: Points) -> None:
        """Let a thread fill a host page, as storage does, once ``after`` has passed. Returns when it is done."""

        def run() -> None:
            self._worker_waits(after)
            self.fill_host(host, pattern)

        self.device.start_worker("storage", run).join()

    def worker_reads(self, host: int, after: Points) -> torch.Tensor:
        """Let a thread read the bytes of a host page once ``after`` has passed."""
        taken: list[torch.Tensor] = []

        def run() -> None:
            self._worker_waits(after)
            self.host_pool.host_access(host, False, "write of a page to storage")
            taken.append(host_page(self.host_pool, host))

        self.device.start_worker("storage", run).join()
        return taken[0]

    def _worker_waits(self, after: Points) -> None:
        for point in after:
            point.stream.synchronize_from_worker(point, HOST_PAGE_REUSE)

    # --- what there is, on an idle device

    def fill_host(self, host: int, pattern: int) -> None:
        """Fill a host page immediately, without a stream."""
        self.host_pool.host_access(host, True, "read of a page from storage")
        fill_host_page(self.host_pool, host, self.patterns[pattern].view(torch.uint8))

    def fill_device(self, page: int, pattern: int) -> None:
        """Fill a device page and wait for it."""
        self.write(page, pattern, late=False)
        self.device.synchronize()

    def on_host(self, host: int) -> torch.Tensor:
        return host_page(self.host_pool, host)

    def on_device(self, page: int) -> torch.Tensor:
        return device_pages(self.kv_pool)[page]

    def settle(self) -> None:
        """Wait for all work, and until all transfers are acknowledged."""
        self.device.synchronize()
        while self.controller.num_in_flight:
            self.controller.drain_acks()

    def same(self, got: torch.Tensor, pattern: int) -> bool:
        return torch.equal(as_bytes(got.cpu()), as_bytes(self.patterns[pattern]))


def as_bytes(pattern: torch.Tensor) -> torch.Tensor:
    """The bytes of a page, which is given as bytes or as keys and values."""
    return pattern.view(torch.uint8).flatten()


def open_rounds(kind: str, severed: str = "", seed: int = 0, **fields: object) -> Rounds:
    """Rounds on a device of ``kind`` without the edge ``severed``; on vgpu the schedule has the seed ``seed``."""
    cut = frozenset({severed} if severed else ())
    if kind == "vgpu":
        gpu = VirtualGpu(seed=seed, policy=POLICIES[seed % len(POLICIES)], collect=bool(severed))
        return Rounds(VgpuDevice(cut, gpu), **fields)  # type: ignore[arg-type]
    return Rounds(open_device(kind, cut), **fields)  # type: ignore[arg-type]


# One round; returns whether its results are right. Rounds are numbered, so that each uses other values than the last.
Round = Callable[[Rounds, int], bool]


def check_rounds(kind: str, play: Round, **fields: object) -> None:
    """Check that with all edges every round is right: 1,000 rounds on a GPU, a few with each policy of the virtual
    GPU."""
    for seed in range(len(POLICIES) if kind == "vgpu" else 1):
        rounds = open_rounds(kind, seed=seed, **fields)
        for number in range(NUM_ROUNDS[kind]):
            assert play(rounds, number), f"round {number}"


def check_without(kind: str, edge: str, play: Round) -> None:
    """Check that without ``edge`` a GPU corrupts memory within a few rounds, and that the virtual GPU's detector names
    the edge."""
    if kind == "cuda":
        rounds = open_rounds(kind, edge, spin_cycles=10 * SPIN_CYCLES)
        assert not all(play(rounds, number) for number in range(10))
        return
    for seed in range(len(POLICIES)):
        rounds = open_rounds(kind, edge, seed)
        play(rounds, 0)
        assert isinstance(rounds.device, VgpuDevice)
        assert {race.edge for race in rounds.device.gpu.races} == {edge}, f"seed {seed}"


# --- random transfers --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Page:
    """The expected contents of a page once ``after`` has passed."""

    pattern: int
    after: Points = field(default_factory=Points.none)


class RandomTransfers:
    """Steps, transfers and workers on random pages. Each waits only for the Points of the pages that it uses. The cache
    keeps these Points in its nodes and lease pools; here they are kept for each page."""

    def __init__(self, rounds: Rounds, seed: int) -> None:
        self.rounds = rounds
        self._random = Random(seed)
        self._device = {page: _Page(page % NUM_PATTERNS) for page in range(1, SHAPE.num_device_pages)}
        self._host = {page: _Page(page % NUM_PATTERNS) for page in range(SHAPE.num_host_pages)}
        for page, state in self._device.items():
            rounds.fill_device(page, state.pattern)
        for page, state in self._host.items():
            rounds.fill_host(page, state.pattern)

    def turn(self) -> None:
        """Submit one operation. Transfers have several pages."""
        kind = self._random.choice(("write", "read", "store", "store", "load", "load", "worker"))
        getattr(self, f"_{kind}")()
        self.rounds.controller.drain_acks()

    def check(self) -> None:
        """Check that every page has the contents that the operations would leave if they ran one after the other."""
        self.rounds.settle()
        for page, state in self._device.items():
            assert self.rounds.same(self.rounds.on_device(page), state.pattern), f"device page {page}"
        for page, state in self._host.items():
            assert self.rounds.same(self.rounds.on_host(page), state.pattern), f"host page {page}"

    def _late(self) -> bool:
        return self._random.random() < 0.3

    def _write(self) -> None:
        page, pattern = self._random.choice(list(self._device)), self._random.randrange(NUM_PATTERNS)
        state = self._device[page]
        done = self.rounds.write(page, pattern, state.after, self._late())
        self._device[page] = _Page(pattern, state.after.join(Points.of(done)))

    def _read(self) -> None:
        page = self._random.choice(list(self._device))
        state = self._device[page]
        done = self.rounds.read(page, (), state.after, self._late())
        state.after = state.after.join(Points.of(done))

    def _pairs(self) -> tuple[list[int], list[int], Points]:
        num = self._random.randint(1, 3)
        device, host = (self._random.sample(list(pages), num) for pages in (self._device, self._host))
        after = Points.none()
        for state in (*map(self._device.__getitem__, device), *map(self._host.__getitem__, host)):
            after = after.join(state.after)
        return device, host, after

    def _store(self) -> None:
        device, host, after = self._pairs()
        points = self.rounds.store(device, host, after).points
        for source, target in zip(device, host, strict=True):
            self._device[source].after = self._device[source].after.join(points)
            self._host[target] = _Page(self._device[source].pattern, self._host[target].after.join(points))

    def _load(self) -> None:
        device, host, after = self._pairs()
        points = self.rounds.load(device, host, after).points
        for target, source in zip(device, host, strict=True):
            self._host[source].after = self._host[source].after.join(points)
            self._device[target] = _Page(self._host[source].pattern, self._device[target].after.join(points))

    def _worker(self) -> None:
        """Let a storage thread use a page. The page is not leased again before the scheduler has the thread's ack."""
        host, pattern = self._random.choice(list(self._host)), self._random.randrange(NUM_PATTERNS)
        state = self._host[host]
        if self._random.random() < 0.5:
            assert self.rounds.same(self.rounds.worker_reads(host, state.after), state.pattern)
        else:
            self.rounds.worker_writes(host, pattern, state.after)
            self._host[host] = _Page(pattern, state.after)
