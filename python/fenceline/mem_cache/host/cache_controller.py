"""HiCacheController: moves KV pages between device and host, one batched transfer after the other.

It owns LOAD and STORE: no other code submits to them. Before a transfer accesses its pages its stream waits for their
last users, by the edge of each pair of streams (store_after_forward, load_after_forward, load_after_store,
store_after_load); afterwards the ticket's Points are what others wait for. Nothing here blocks the host.

A load goes layer by layer, so that a step runs its first layers while the last ones are on their way
(forward_after_load). A store is one piece, since nothing waits for a part of it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fenceline.config.engine_config import EngineConfig
from fenceline.config.hicache import DIRECT_PAGE_SIZE
from fenceline.config.kv_layout import KVLayout
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.host.host_states import HostStates, Pairs
from fenceline.mem_cache.host.page_copy import PageCopier, make_page_copier
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.mem_cache.page_tags import PageTags, TransferTags
from fenceline.mem_cache.state_pool import StatePool
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import (
    Communicator,
    Device,
    LeasePool,
    Point,
    Points,
    Stream,
    exchanges_shares,
    loads_states,
    page_layers,
)
from fenceline.memory_order.access import Accesses, Memory, occupies_sm
from fenceline.memory_order.edges import FORWARD_AFTER_LOAD, SM_EXCLUSIVE, StreamName
from fenceline.memory_order.stream import wait_for_pages

logger = logging.getLogger(__name__)
I32 = npt.NDArray[np.int32]

# Each group of layers costs the CPU a launch, an event and a wait, some 10 us, and the GPU a kernel's start. A larger
# group saves that and makes the step's last layers wait for the group's end: one layer of 8,192 tokens of an 8B is
# 0.5 ms on the link.
LAYERS_PER_POINT = 1

_NO_PAGES: I32 = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class TransferCounts:
    """What has been moved in one direction: transfers that were submitted, and ``seconds`` of those that have ended.
    ``seconds`` is the stream's own time, copying only, where the device has a clock (cuda); elsewhere the host's time
    in the submitting call, which on a synchronous device is when the bytes move."""

    num_transfers: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _InFlight:
    ticket: Ticket
    device_pages: I32
    begin: Point
    end: Point
    submit_s: float


class HiCacheController:
    """Submits all work to LOAD and STORE of one device. Only the scheduler's thread calls it."""

    def __init__(
        self,
        device: Device,
        kv_pool: KVPool,
        host_pool: HostPool,
        copier: PageCopier,
        pages: Memory | None = None,
        num_target_layers: int | None = None,
        ranks: Communicator | None = None,
        tags: TransferTags | None = None,
        states: HostStates | None = None,
    ) -> None:
        """``pages``: the Memory of the device's pages that steps declare, which stands for all layers together. Loads
        also declare each layer separately, because a step may read some layers while others are still being loaded.
        ``num_target_layers``: layers of the target, which come before the draft's; None if there is no draft.
        ``ranks``: those among which the rows are divided that all of them have; None: a rank alone has all. ``tags``:
        None without ``--memory-check full``. ``states``: None for a model without recurrent layers."""
        self.host_pool, self.host_states = host_pool, states
        self.host_pages: LeasePool = host_pool.pages
        self.counts: dict[TransferKind, TransferCounts] = {kind: TransferCounts() for kind in TransferKind}
        self._device = device
        self._copier = copier
        self._tags = tags
        of_target = kv_pool.num_layers if num_target_layers is None else num_target_layers
        self._num_layers = kv_pool.num_layers
        self._num_loaded = page_layers(device, kv_pool.num_layers, of_target)
        self._ranks = ranks
        self._shares = kv_pool.shares(host_pool.layout)
        self._parts_of = kv_pool.layout.parts_of
        self._has_shares_only = False  # of the last load: until the step that it was submitted with has the others'
        self._divides = exchanges_shares(device, any(part.shape[1] > 1 for part in self._shares))
        self._device_memory = Memory("kv_pool", kv_pool.num_pages, "page") if pages is None else pages
        self._host_memory = Memory("host_pool", host_pool.num_pages, "page")
        layers = range(kv_pool.num_layers)
        self._layers = [Memory(f"kv_pool.layer{layer}", kv_pool.num_pages, "page") for layer in layers]
        self._in_flight: dict[TransferKind, deque[_InFlight]] = {kind: deque() for kind in TransferKind}
        self._last_store: Point | None = None
        self._last_persistent: Point | None = None  # the latest step on FORWARD with persistent attention

    @property
    def num_in_flight(self) -> int:
        """Transfers that no :meth:`drain_acks` has returned yet."""
        return sum(len(queue) for queue in self._in_flight.values())

    # --- transfers -----------------------------------------------------------------------------------

    def store(self, ticket: Ticket, device_pages: I32, host_pages: I32, after: Points, states: Pairs = ()) -> None:
        """Copy device page ``device_pages[i]`` to host page ``host_pages[i]``, all layers, on STORE after ``after``.
        Both int32 [n]. ``states``: as in ``PageMove``. ``after`` joins the Points of all these, on either side. Submits
        ``ticket``. If there is nothing to copy nothing is submitted: the ticket has no Points and no ack."""
        if _is_empty(ticket, device_pages, host_pages, states):
            return
        stream, begin_s = self._device.store, time.perf_counter()
        wait_for_pages(stream, after)
        if self._copier.uses_sm and self._last_persistent is not None:
            stream.wait(self._last_persistent, SM_EXCLUSIVE)  # exclusive: persistent attention holds the SMs
        tags, begin = self._tags, stream.record()
        if self.host_states is not None:
            self.host_states.to_host(stream, states)
        if len(device_pages):
            self._device.declare(StreamName.STORE, "backup of KV pages", self._store_accesses, device_pages, host_pages)
            moved = None if tags is None else tags.begin(stream, device_pages, host_pages, is_load=False)
            self._copier.to_host(stream, device_pages, host_pages)
            if tags is not None and moved is not None:
                tags.stored(stream, moved)
        end = self._last_store = stream.record()
        if tags is not None and len(device_pages) and moved is not None:
            tags.end(moved, end)
        ticket.submit(Points.of(end))
        self._submitted(ticket, device_pages, begin, end, time.perf_counter() - begin_s, len(states))

    def load(self, ticket: Ticket, device_pages: I32, host_pages: I32, after: Points, states: Pairs = ()) -> None:
        """Copy host page ``host_pages[i]`` to device page ``device_pages[i]``, layer by layer, on LOAD after ``after``,
        and before them the ``states``. The arguments are those of :meth:`store`. The ticket gets a Point for each
        layer; a step that reads the pages waits for these by :meth:`layer_ready`, and one that reads the states for
        ``state_points``."""
        if _is_empty(ticket, device_pages, host_pages, states):
            return
        stream, begin_s = self._device.load, time.perf_counter()
        tags = self._tags
        wait_for_pages(stream, after if tags is None else after.join(tags.retired_until))
        begin = end = stream.record()
        if self.host_states is not None and states:
            if loads_states(self._device):
                self.host_states.to_device(stream, states)
            end = stream.record()
            ticket.state_points = Points.of(end)
        if not len(device_pages):
            ticket.submit(Points.of(end))
            self._submitted(ticket, device_pages, begin, end, time.perf_counter() - begin_s, len(states))
            return
        assert not self._has_shares_only, "no step has exchanged the shares of the last load"
        self._has_shares_only = self._divides
        moved = None if tags is None else tags.begin(stream, device_pages, host_pages, is_load=True)
        layer_points: list[Point] = []
        for first in range(0, self._num_loaded, LAYERS_PER_POINT):
            layers = range(first, min(first + LAYERS_PER_POINT, self._num_loaded))
            self._device.declare(
                StreamName.LOAD, "load of KV pages", self._load_accesses, layers, device_pages, host_pages
            )
            self._copier.to_device(stream, host_pages, device_pages, layers)
            if tags is not None and moved is not None:
                for layer in layers:
                    tags.loaded(stream, moved, ticket.id, layer)
            layer_points += [stream.record()] * len(layers)
        layer_points += layer_points[-1:] * (self._num_layers - self._num_loaded)
        if tags is not None and moved is not None:
            tags.end(moved, layer_points[-1])
        ticket.submit(Points.of(layer_points[-1]), tuple(layer_points))
        self._submitted(ticket, device_pages, begin, layer_points[-1], time.perf_counter() - begin_s, len(states))

    def ended(self) -> tuple[int, int]:
        """How many loads and how many stores have ended since the start. Asks the device for each kind until it names
        one that has not ended. Nothing else learns of the answer before :meth:`drain_acks`."""
        num_loads, num_stores = (self._num_ended(kind) for kind in TransferKind)
        return num_loads, num_stores

    def drain_acks(self, until: tuple[int, int] | None = None) -> list[Ticket]:
        """Transfers that have ended since the last call: loads, then stores, each in the order of their submission.
        ``until`` (loads, stores): only those among so many first loads and first stores, which must have ended. Call it
        in every step, whatever the step does (F6)."""
        ended: list[Ticket] = []
        for kind, num_ended in zip(TransferKind, self.ended() if until is None else until, strict=True):
            queue, stream = self._in_flight[kind], self._stream(kind)
            for _ in range(num_ended - (self.counts[kind].num_transfers - len(queue))):
                flight = queue.popleft()
                stream.learn(flight.end)
                ended.append(self._ended(kind, flight))
        return ended

    # --- FORWARD -------------------------------------------------------------------------------------

    def divided(self, loads: Sequence[Ticket]) -> I32:
        """The device pages of ``loads``, just submitted, of which each rank loads a share and has to get the others'.
        Empty if a rank alone loads all."""
        return self._pages_of(loads) if self._divides else _NO_PAGES

    def layer_ready(
        self,
        loads: Sequence[Ticket],
        num_layers: int,
        arrived: Callable[[], None] | None = None,
        divided: torch.Tensor | None = None,
    ) -> Callable[[int], None]:
        """A function of the layer's number, which a step that reads the pages of ``loads`` calls before the layer first
        accesses the pool: FORWARD then waits until that layer has been loaded. Other steps do not wait (F4).
        ``num_layers``: those of the step's model; a draft's layers may follow them in the pool. At the last one FORWARD
        waits until all layers of the pages have been loaded, and then ``arrived`` is called. ``divided``: the pages of
        :meth:`divided`, int64 on the device; the ranks exchange their shares of each layer as it has been loaded, on
        FORWARD, where all ranks have the same order."""
        device, forward = self._device, self._device.forward
        loads = [ticket for ticket in loads if ticket.layer_points]
        num_complete = 0  # a step that is compared with its graphs runs twice

        def ready(layer: int) -> None:
            nonlocal num_complete
            is_last = layer == num_layers - 1
            for ticket in loads:
                point = ticket.layer_points[-1 if is_last else layer]
                forward.wait(point, FORWARD_AFTER_LOAD)  # RAW: the layer's pages
            device.declare(StreamName.FORWARD, "layer of a prefill step", self._layer_accesses, layer, loads)
            end = self._num_layers if is_last else layer + 1
            if divided is not None and num_complete < end:
                self._exchange_shares(range(num_complete, end), divided)
                num_complete = end
                self._has_shares_only = end < self._num_layers
            if is_last and arrived is not None:
                arrived()

        return ready

    def before_persistent_forward(self) -> None:
        """Call it before a step with persistent attention is submitted: the step waits for backups that run on SMs
        (F2). Loads may run at the same time; neither waits for the other (test/gpu/test_load_beside_attention.py)."""
        if not self._copier.uses_sm:
            return
        if self._last_store is not None:
            self._device.forward.wait(self._last_store, SM_EXCLUSIVE)  # exclusive: a backup holds SMs
        self._device.declare(StreamName.FORWARD, "persistent attention", occupies_sm)

    def after_persistent_forward(self, done: Point) -> None:
        """Call it after that step has been submitted: backups on SMs start after ``done``, its end on FORWARD."""
        if self._copier.uses_sm:
            self._last_persistent = done

    # --- declarations --------------------------------------------------------------------------------

    def _store_accesses(self, op: Accesses, device_pages: I32, host_pages: I32) -> None:
        op.read(self._device_memory, device_pages)
        op.write(self._host_memory, host_pages)

    def _load_accesses(self, op: Accesses, layers: range, device_pages: I32, host_pages: I32) -> None:
        op.read(self._host_memory, host_pages)
        op.write(self._device_memory, device_pages)
        for layer in layers:
            op.write(self._layers[layer], device_pages)

    def _layer_accesses(self, op: Accesses, layer: int, loads: Sequence[Ticket]) -> None:
        op.read(self._layers[layer], self._pages_of(loads))

    # --- internals -----------------------------------------------------------------------------------

    def _exchange_shares(self, layers: range, pages: torch.Tensor) -> None:
        """Get the other ranks' shares of the rows of ``layers`` in ``pages``, on FORWARD. This rank's own is not
        written: a backup may read it."""
        assert self._ranks is not None, "a rank alone has all"
        for part in self._parts_of(layers):
            shares = self._shares[part]
            num_shares = shares.shape[1]
            if num_shares == 1:
                continue
            own = self._ranks.rank % num_shares
            gathered = self._ranks.all_gather(shares[:, own].index_select(0, pages))
            gathered = gathered.view(len(pages), self._ranks.size, -1)
            for others in (slice(0, own), slice(own + 1, num_shares)):
                if shares[:, others].numel():
                    shares[:, others].index_copy_(0, pages, gathered[:, others])

    def _stream(self, kind: TransferKind) -> Stream:
        return self._device.load if kind is TransferKind.LOAD else self._device.store

    def _pages_of(self, loads: Sequence[Ticket]) -> I32:
        """Device pages of those ``loads`` that are still in flight."""
        queue = self._in_flight[TransferKind.LOAD]
        pages = [flight.device_pages for flight in queue if flight.ticket in loads]
        return np.concatenate(pages) if pages else _NO_PAGES

    def _num_ended(self, kind: TransferKind) -> int:
        queue, stream = self._in_flight[kind], self._stream(kind)
        num_ended = self.counts[kind].num_transfers - len(queue)
        for flight in queue:
            if not stream.ask(flight.end):
                break
            num_ended += 1
        return num_ended

    def _submitted(
        self, ticket: Ticket, device_pages: I32, begin: Point, end: Point, submit_s: float, num_states: int
    ) -> None:
        self._in_flight[ticket.kind].append(_InFlight(ticket, device_pages, begin, end, submit_s))
        counts = self.counts[ticket.kind]
        counts.num_transfers += 1
        counts.num_pages += len(device_pages)
        counts.num_bytes += len(device_pages) * self.host_pool.page_nbytes
        if self.host_states is not None:
            counts.num_bytes += num_states * self.host_states.nbytes

    def _ended(self, kind: TransferKind, flight: _InFlight) -> Ticket:
        measured = self._stream(kind).seconds_between(flight.begin, flight.end)
        self.counts[kind].seconds += flight.submit_s if measured is None else measured
        return flight.ticket


def _is_empty(ticket: Ticket, device_pages: I32, host_pages: I32, states: Pairs) -> bool:
    """Whether there is nothing to copy; the ticket then has no Points."""
    assert len(device_pages) == len(host_pages), "device and host pages go in pairs"
    if len(device_pages) == 0 and not states:
        ticket.submit(Points.none())
        return True
    return False


def make_hicache_controller(
    config: EngineConfig,
    device: Device,
    kv_pool: KVPool,
    pages: Memory,
    room: int,
    ranks: Communicator | None = None,
    page_tags: PageTags | None = None,
    states: StatePool | None = None,
) -> HiCacheController:
    """A host tier for ``kv_pool`` and ``states``, whose ``pages`` steps declare. ``room``: bytes of host memory
    available for it. ``ranks``: see ``HiCacheController``. ``page_tags``: the tags of the device's pages, None without
    ``--memory-check full``. On a GPU the sink page is copied to the host and back, so that nothing has to be compiled
    or loaded while a request waits; this waits for the device. Raises ``ValueError`` with the remedy if the host has no
    room for the tier."""
    assert config.hicache is not None
    io_backend = config.hicache.io_backend
    if device.kind == "cuda" and io_backend == "direct" and kv_pool.page_size < DIRECT_PAGE_SIZE:
        logger.warning(
            "HiCache moves pages of %d token(s) by the copy engine, at a few percent of its rate: give --page-size 64",
            kv_pool.page_size,
        )
    rank, num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    layout = kv_pool.layout.share(num_ranks)
    num_pages, num_states = host_sizes(config, kv_pool, layout, states)
    host_states = None if states is None else HostStates(device, states, num_states, room)
    room -= 0 if host_states is None else host_states.buffer.nbytes
    host_pool = HostPool(device, num_pages, layout, config.server_args.hicache_mem_layout, room)
    copier = make_page_copier(device, kv_pool, host_pool, io_backend, rank)
    if device.kind == "cuda":
        _warm_up(device, copier, kv_pool.num_layers)
    tags = None if page_tags is None else TransferTags(device, page_tags, kv_pool, host_pool, rank)
    if tags is not None and device.kind == "cuda":
        tags.warm_up()
    of_target = config.model.num_attention_layers
    return HiCacheController(device, kv_pool, host_pool, copier, pages, of_target, ranks, tags, host_states)


def host_sizes(
    config: EngineConfig, kv_pool: KVPool, layout: KVLayout, states: StatePool | None = None
) -> tuple[int, int]:
    """Numbers of pages, which have ``layout`` there, and of states on the host: as many as fit ``host_bytes``, divided
    between them as the device's memory is, else --hicache-ratio times the device's, and one state at least. Raises
    ``ValueError`` if the device has no snapshots."""
    assert config.hicache is not None
    num_pages, num_snapshots = kv_pool.num_pages - 1, 0
    if states is not None:
        num_snapshots = states.snapshots.size - states.snapshots.reserved
        if not num_snapshots:
            raise ValueError(
                "--enable-hierarchical-cache: without snapshots of states no prefix is cached; give a"
                " --max-mamba-cache-size above --max-running-requests, or leave it out"
            )
    ratio = config.server_args.hicache_ratio
    if config.hicache.host_bytes is not None:
        state_nbytes = 0 if states is None else states.carried.shape[1]
        ratio = config.hicache.host_bytes / (num_pages * layout.page_nbytes + num_snapshots * state_nbytes)
        if not num_snapshots:
            return config.hicache.host_bytes // layout.page_nbytes, 0
    return int(num_pages * ratio), max(int(num_snapshots * ratio), int(num_snapshots > 0))


def _warm_up(device: Device, copier: PageCopier, num_layers: int) -> None:
    sink, first = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    device.synchronize()  # the pool was written on the default stream
    copier.to_host(device.store, sink, first)
    device.synchronize()
    copier.to_device(device.load, first, sink, range(num_layers))
    device.synchronize()
