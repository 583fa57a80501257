"""Streams that move KV pages: their edges, what the host asks of them, and what it may know."""

from __future__ import annotations

import pytest
from recording_device import RecordingDevice, RecordingStream

import edges_page
from fenceline.memory_order import Points, Stream, open_device, page_leases, wait_for_pages
from fenceline.memory_order.device import CpuDevice
from fenceline.memory_order.edges import (
    EDGES,
    HOST_PAGE_REUSE,
    PAGE_EDGES,
    SM_EXCLUSIVE,
    STAGING_REUSE,
    Edge,
    StreamName,
    pages_edge,
)

MOVERS = (StreamName.FORWARD, StreamName.LOAD, StreamName.STORE)


def streams(device: CpuDevice) -> dict[StreamName, RecordingStream]:
    found = {stream.name: stream for stream in device.streams}
    return {name: stream for name, stream in found.items() if isinstance(stream, RecordingStream)}


def test_any_two_streams_that_touch_pages_have_one_edge_each_way() -> None:
    pairs = [(a, b) for a in MOVERS for b in MOVERS if a is not b]
    assert sorted(edge.name for edge in PAGE_EDGES) == sorted(pages_edge(a, b).name for a, b in pairs)
    for waiter, source in pairs:
        edge = pages_edge(waiter, source)
        assert edge.name == f"{waiter.value}_after_{source.value}" and (waiter, source) in edge.pairs
        assert (source, waiter) not in edge.pairs
    with pytest.raises(KeyError):
        pages_edge(StreamName.COPY, StreamName.FORWARD)


def test_an_edge_may_join_several_pairs() -> None:
    forward, store, host = StreamName.FORWARD, StreamName.STORE, StreamName.HOST
    assert (forward, store) in SM_EXCLUSIVE.pairs and (store, forward) in SM_EXCLUSIVE.pairs
    assert (forward, StreamName.LOAD) not in SM_EXCLUSIVE.pairs
    assert (host, store) in HOST_PAGE_REUSE.pairs and (host, StreamName.LOAD) in HOST_PAGE_REUSE.pairs
    assert (store, host) not in HOST_PAGE_REUSE.pairs
    for row in ("forward ← store | exclusive", "store ← forward | ″"):
        assert f"| sm_exclusive | {row} |" in edges_page.render()
    assert all((edge.waiter, edge.source) == edge.pairs[0] for edge in EDGES.values())


def test_pages_are_waited_for_by_the_edge_of_each_pair() -> None:
    device = RecordingDevice()
    by_name = streams(device)
    points = {name: by_name[name].record() for name in MOVERS}
    after = Points.of(*points.values())
    for name, stream in by_name.items():
        if name in MOVERS:
            wait_for_pages(stream, after)
            assert set(stream.waits) == {point for point in after if point.stream is not stream}
    with pytest.raises(KeyError):
        wait_for_pages(device.copy, after)
    before = len(by_name[StreamName.LOAD].waits)
    device.forward.note_passed(points[StreamName.FORWARD])
    wait_for_pages(device.load, Points.of(points[StreamName.LOAD]).join(Points.none()))
    wait_for_pages(device.load, Points((points[StreamName.FORWARD],)))
    assert len(by_name[StreamName.LOAD].waits) == before, "program order, and what has passed, cost nothing"


@pytest.mark.parametrize("edge", PAGE_EDGES, ids=lambda edge: edge.name)
def test_severing_cuts_one_pages_edge_alone(edge: Edge) -> None:
    device = RecordingDevice(frozenset({edge.name}))
    by_name = streams(device)
    after = Points.of(*(by_name[name].record() for name in MOVERS))
    for name in MOVERS:
        wait_for_pages(by_name[name], after)
    missing = [
        (name, point.stream.name)
        for name in MOVERS
        for point in after
        if point.stream.name is not name and point not in by_name[name].waits
    ]
    assert missing == list(edge.pairs)


class AnsweringStream(RecordingStream):
    """A stream whose device has got as far as ``reached``."""

    reached = 0
    asked = 0

    def _query(self, point: object) -> bool:
        self.asked += 1
        return point.serial <= self.reached  # type: ignore[attr-defined]


class AnsweringDevice(CpuDevice):
    def _make_stream(self, name: StreamName) -> Stream:
        return AnsweringStream(name, self.severed)


def test_a_question_asks_once_and_the_host_knows_the_answer() -> None:
    device = AnsweringDevice()
    store = device.store
    assert isinstance(store, AnsweringStream)
    first, second = store.record(), store.record()
    assert not store.ask(first) and store.asked == 1
    store.reached = 1
    assert store.ask(first) and not first.passed, "an answer is not learned by itself"
    store.learn(first)
    assert first.passed and not second.passed
    assert store.ask(first) and store.asked == 2, "what is known is not asked again"
    assert not store.ask(second)
    with pytest.raises(AssertionError, match="on its own stream"):
        device.load.ask(first)


def test_a_worker_s_wait_tells_the_scheduler_nothing() -> None:
    device = RecordingDevice()
    store = device.store
    assert isinstance(store, RecordingStream)
    point = store.record()
    store.synchronize_from_worker(point, HOST_PAGE_REUSE)
    assert store.blocked == [point] and not point.passed and store.passed_serial == 0
    store.note_passed(point)
    store.synchronize_from_worker(point, HOST_PAGE_REUSE)
    assert store.blocked == [point, point], "the worker has to see for itself"
    with pytest.raises(AssertionError, match="does not join host ← store"):
        store.synchronize_from_worker(point, STAGING_REUSE)
    severed = RecordingDevice(frozenset({"host_page_reuse"}))
    assert isinstance(severed.store, RecordingStream)
    severed.store.synchronize_from_worker(severed.store.record(), HOST_PAGE_REUSE)
    assert severed.store.blocked == []


def test_the_cpu_has_done_what_is_submitted() -> None:
    device = open_device("cpu")
    point = device.store.record()
    assert point.passed and device.store.ask(point)
    device.store.synchronize_from_worker(point, HOST_PAGE_REUSE)


def test_under_the_checker_the_cpu_lags_by_one_question() -> None:
    device = open_device("cpu")
    device.check_order()
    first, second = device.load.record(), device.load.record()
    assert not device.load.ask(first)
    third = device.load.record()
    assert device.load.ask(first) and device.load.ask(second) and not device.load.ask(third)
    assert device.load.ask(third)


@pytest.mark.parametrize("severed", ["", "retired_after"])
def test_retired_pages_come_with_their_points(severed: str) -> None:
    device = RecordingDevice(frozenset({severed} - {""}))
    pool = page_leases(device, 3)
    leased = pool.alloc(2)
    assert leased is not None
    point = device.store.record()
    pool.retire(leased[0], Points.of(point))
    again = pool.alloc(2)
    assert again is not None and again[1] == (Points.none() if severed else Points.of(point))
