"""HiCacheController: batched transfers behind their pages' Points, acks, counts, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch
from page_pools import Shape, device_pages, host_pages, ids, make_pools
from recording_device import RecordingDevice, RecordingStream

from fenceline.config.hicache import IoBackend
from fenceline.config.server_args import MemLayout
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.host.page_copy import make_page_copier
from fenceline.mem_cache.transfer import Ticket, TransferKind
from fenceline.memory_order import Device, Point, Points, Stream, open_device
from fenceline.memory_order.edges import Edge

SHAPE = Shape()
LOAD, STORE = TransferKind.LOAD, TransferKind.STORE


class Rig:
    """A controller over small pools of noise."""

    def __init__(
        self, device: Device | None = None, layout: MemLayout = "layer_first", io_backend: IoBackend = "direct"
    ) -> None:
        self.device = device or open_device("cpu")
        self.kv_pool, self.host_pool = make_pools(self.device, layout, SHAPE)
        copier = make_page_copier(self.device, self.kv_pool, self.host_pool, io_backend)
        self.controller = HiCacheController(self.device, self.kv_pool, self.host_pool, copier)
        self._num_tickets = 0

    def ticket(self, kind: TransferKind) -> Ticket:
        self._num_tickets += 1
        return Ticket(self._num_tickets, kind)

    def store(self, device: Sequence[int], host: Sequence[int], after: Points = Points.none()) -> Ticket:
        ticket = self.ticket(STORE)
        self.controller.store(ticket, ids(*device), ids(*host), after)
        return ticket

    def load(self, device: Sequence[int], host: Sequence[int], after: Points = Points.none()) -> Ticket:
        ticket = self.ticket(LOAD)
        self.controller.load(ticket, ids(*device), ids(*host), after)
        return ticket


class Waits:
    """Every wait that any stream is asked for, and when work is submitted to it."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str, str]] = []  # waiter, edge, source
        wait = Stream.wait

        def recording(stream: Stream, after: Point | Points, edge: Edge) -> None:
            for point in after if isinstance(after, Points) else (after,):
                self.seen.append((stream.name.value, edge.name, repr(point)))
            wait(stream, after, edge)

        monkeypatch.setattr(Stream, "wait", recording)


def test_a_load_waits_for_users_of_its_pages_and_for_their_tags() -> None:
    """With --memory-check full FORWARD may still take old leases from the pages that a load is to tag."""
    device = RecordingDevice()
    rig, steps, stores = Rig(device), device.forward.record(), device.store.record()
    rig.controller._tags = Mock(retired_until=Points.of(steps))
    rig.load([1], [2], Points.of(stores))
    assert isinstance(device.load, RecordingStream) and set(device.load.waits) == {steps, stores}


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_pages_there_and_back(layout: MemLayout, io_backend: IoBackend) -> None:
    rig = Rig(layout=layout, io_backend=io_backend)
    device_before, host_before = device_pages(rig.kv_pool), host_pages(rig.host_pool)
    rig.store([3, 4, 5, 9], [14, 0, 1, 7])
    stored = host_pages(rig.host_pool)
    assert torch.equal(stored[[14, 0, 1, 7]], device_before[[3, 4, 5, 9]])
    others = [page for page in range(SHAPE.num_host_pages) if page not in (14, 0, 1, 7)]
    assert torch.equal(stored[others], host_before[others])
    rig.load([8, 2, 10], [7, 14, 1])
    loaded = device_pages(rig.kv_pool)
    assert torch.equal(loaded[[8, 2, 10]], device_before[[9, 3, 5]])
    others = [page for page in range(SHAPE.num_device_pages) if page not in (8, 2, 10)]
    assert torch.equal(loaded[others], device_before[others])


def test_a_load_has_a_point_for_each_layer_and_a_store_one() -> None:
    rig = Rig()
    load, store = rig.load([1, 2], [3, 4]), rig.store([5], [6])
    assert len(load.layer_points) == SHAPE.num_layers
    assert all(point.stream is rig.device.load for point in load.layer_points)
    serials = [point.serial for point in load.layer_points]
    assert serials == sorted(serials)
    assert store.layer_points == ()


def test_without_pages_nothing_happens() -> None:
    rig = Rig()
    serials = rig.device.load.serial, rig.device.store.serial
    load, store = rig.load([], []), rig.store([], [])
    assert load.points is Points.none() and store.points is Points.none() and load.layer_points == ()
    assert rig.controller.num_in_flight == 0 and rig.controller.drain_acks() == []
    assert (rig.device.load.serial, rig.device.store.serial) == serials
    assert rig.controller.counts[LOAD].num_transfers == rig.controller.counts[STORE].num_transfers == 0
    rig.controller.layer_ready((load,), SHAPE.num_layers)(0)  # nothing to wait for


def test_lists_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(AssertionError, match="in pairs"):
        Rig().store([1, 2], [3])


def test_acks_come_once_and_are_counted() -> None:
    rig = Rig()
    tickets = [rig.store([1, 2], [0, 1]), rig.load([3], [0]), rig.store([4], [2]), rig.load([5, 6], [1, 2])]
    assert rig.controller.num_in_flight == 4
    assert rig.controller.drain_acks() == [tickets[1], tickets[3], tickets[0], tickets[2]]
    assert rig.controller.num_in_flight == 0 and rig.controller.drain_acks() == []
    for kind in (LOAD, STORE):
        counts = rig.controller.counts[kind]
        assert (counts.num_transfers, counts.num_pages) == (2, 3)
        assert counts.num_bytes == 3 * rig.host_pool.page_nbytes
        assert counts.seconds > 0


def test_acks_stop_at_the_first_that_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    first, second, third = rig.store([1], [0]), rig.store([2], [1]), rig.store([3], [2])
    ended = {next(iter(rig.controller._in_flight[STORE])).end.serial}
    asked: list[int] = []

    def ask(point: Point) -> bool:
        asked.append(point.serial)
        return point.serial in ended

    monkeypatch.setattr(rig.device.store, "ask", ask)
    assert rig.controller.drain_acks() == [first]
    assert len(asked) == 2, "the third is not asked about"
    ended.update(flight.end.serial for flight in rig.controller._in_flight[STORE])
    assert rig.controller.drain_acks() == [second, third]


def test_what_has_ended_is_known_once_it_has_ended_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids that are handed out depend on what the host knows to have passed."""
    rig = Rig()
    first, second, load = rig.store([1], [0]), rig.store([2], [1]), rig.load([3], [0])
    learned: list[Point] = []
    for stream in (rig.device.store, rig.device.load):
        monkeypatch.setattr(stream, "learn", learned.append)
    assert rig.controller.ended() == (1, 2) and learned == []
    assert rig.controller.drain_acks((0, 1)) == [first]
    assert len(learned) == 1
    assert rig.controller.ended() == (1, 2)
    assert rig.controller.drain_acks((0, 1)) == []
    assert rig.controller.drain_acks((1, 2)) == [load, second] and len(learned) == 3


# --- edges -------------------------------------------------------------------------------------------


def checked() -> Device:
    """Points pass late here, so that waits are not skipped."""
    device = open_device("cpu")
    device.check_order()
    return device


def test_streams_wait_for_the_points_of_the_pages_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(checked())
    device = rig.device
    waits = Waits(device, monkeypatch)
    of_step = device.forward.record()
    rig.store([1], [0], Points.of(of_step))
    stored = device.store.record()
    rig.load([2], [0], Points.of(of_step, stored))
    loaded = device.load.record()
    rig.store([2], [3], Points.of(loaded, stored))
    assert waits.seen == [
        ("store", "store_after_forward", repr(of_step)),
        ("load", "load_after_forward", repr(of_step)),
        ("load", "load_after_store", repr(stored)),
        ("store", "store_after_load", repr(loaded)),
    ]


def test_forward_waits_for_each_layer_of_the_loads_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(checked())
    read, other = rig.load([1], [0]), rig.load([2], [1])
    waits = Waits(rig.device, monkeypatch)
    ready = rig.controller.layer_ready((read,), SHAPE.num_layers)
    for layer in range(SHAPE.num_layers):
        ready(layer)
    assert waits.seen == [("forward", "forward_after_load", repr(point)) for point in read.layer_points]
    assert repr(other.layer_points[0]) not in str(waits.seen)


def test_a_model_of_fewer_layers_waits_for_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's layers lie behind the target's: what comes after the target's step may read them."""
    rig = Rig(checked())
    read = rig.load([1], [0])
    waits, arrived = Waits(rig.device, monkeypatch), []
    ready = rig.controller.layer_ready((read,), SHAPE.num_layers - 1, lambda: arrived.append(len(waits.seen)))
    for layer in range(SHAPE.num_layers - 1):
        ready(layer)
    assert waits.seen[-1] == ("forward", "forward_after_load", repr(read.layer_points[-1]))
    assert arrived == [SHAPE.num_layers - 1], "once, after the last layer's wait"


@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_backups_on_sms_and_persistent_attention_take_turns(
    io_backend: IoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways, where and only where backups run on SMs; loads never wait (F2)."""
    rig = Rig(checked(), io_backend=io_backend)
    device, controller = rig.device, rig.controller
    rig.store([1], [0])
    rig.load([2], [1])
    waits = Waits(device, monkeypatch)
    controller.before_persistent_forward()
    done = device.forward.record()
    controller.after_persistent_forward(done)
    rig.load([4], [1])
    second = rig.store([3], [2])
    controller.before_persistent_forward()
    last = repr(next(iter(second.points)))
    waited = [(waiter, edge) for waiter, edge, _ in waits.seen]
    if io_backend == "direct":
        assert waited == []
    else:
        assert waited == [("forward", "sm_exclusive"), ("store", "sm_exclusive"), ("forward", "sm_exclusive")]
        assert waits.seen[1][2] == repr(done) and waits.seen[2][2] == last


@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_steps_without_persistent_attention_never_wait_for_sms(
    io_backend: IoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(checked(), io_backend=io_backend)
    waits = Waits(rig.device, monkeypatch)
    for page in range(1, 5):
        rig.store([page], [page])
        rig.device.forward.record()
    assert waits.seen == []
