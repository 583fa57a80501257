"""--memory-check order where pages change tiers: LOAD, STORE, the SMs, and what the host learns by asking."""

from __future__ import annotations

import numpy as np
import pytest

from fenceline.memory_order import Device, OrderError, Points, open_device, wait_for_pages
from fenceline.memory_order.access import Memory, occupies_sm
from fenceline.memory_order.checker import OrderChecker
from fenceline.memory_order.edges import PAGE_EDGES, SM_EXCLUSIVE, Edge, Hazard, StreamName

FORWARD, LOAD, STORE, HOST = StreamName.FORWARD, StreamName.LOAD, StreamName.STORE, StreamName.HOST
PAGES = np.array([2, 3])


def open_checked(severed: str = "") -> Device:
    device = open_device("cpu", frozenset({severed} if severed else ()))
    device.check_order()
    return device


def hand_over(device: Device, edge: Edge) -> None:
    """Source and waiter of the edge touch pages of both tiers, the waiter after what wait_for_pages orders."""
    checker = device.checker
    assert isinstance(checker, OrderChecker)
    kv, host = Memory("kv_pool", 8, "page"), Memory("host_pool", 8, "page")
    by_name = {stream.name: stream for stream in device.streams}

    def touch(name: StreamName) -> None:
        op = checker.begin(name, f"work of {name.value}")
        if name is FORWARD:
            checker.write(op, kv, PAGES)
        else:
            source, target = (host, kv) if name is LOAD else (kv, host)
            checker.read(op, source, PAGES)
            checker.write(op, target, PAGES)

    touch(edge.source)
    wait_for_pages(by_name[edge.waiter], Points.of(by_name[edge.source].record()))
    touch(edge.waiter)


@pytest.mark.parametrize("edge", PAGE_EDGES, ids=lambda edge: edge.name)
def test_pages_change_hands_by_their_edge(edge: Edge) -> None:
    hand_over(open_checked(), edge)
    with pytest.raises(OrderError, match=f"missing edge: {edge.name}") as caught:
        hand_over(open_checked(edge.name), edge)
    assert caught.value.edges == (edge.name,) and caught.value.hazard in edge.hazards
    assert caught.value.memory in ("kv_pool pages 2-3", "host_pool pages 2-3")


@pytest.mark.parametrize("severed", ["", "sm_exclusive"])
@pytest.mark.parametrize("first, second", [(FORWARD, STORE), (STORE, FORWARD)])
def test_the_sm_bears_one_user(first: StreamName, second: StreamName, severed: str) -> None:
    device = open_checked(severed)
    by_name = {stream.name: stream for stream in device.streams}
    device.declare(first, "the first", occupies_sm)
    by_name[second].wait(by_name[first].record(), SM_EXCLUSIVE)
    if not severed:
        device.declare(second, "the second", occupies_sm)
        return
    with pytest.raises(OrderError, match="exclusive on resource sm") as caught:
        device.declare(second, "the second", occupies_sm)
    assert caught.value.edges == ("sm_exclusive",) and caught.value.hazard is Hazard.EXCLUSIVE


def test_the_host_reads_what_it_has_learned_not_what_it_asked() -> None:
    device = open_checked()
    checker = device.checker
    assert isinstance(checker, OrderChecker)
    host = Memory("host_pool", 8, "page")
    checker.write(checker.begin(STORE, "backup"), host, PAGES)
    copied = device.store.record()
    for _ in range(2):  # the second time the answer is that it has passed
        passed = device.store.ask(copied)
        with pytest.raises(OrderError, match="missing edge: host_page_reuse"):
            checker.read(checker.begin(HOST, "look"), host, PAGES)
    assert passed
    device.store.learn(copied)
    checker.read(checker.begin(HOST, "look"), host, PAGES)
    checker.write(checker.begin(LOAD, "what the host submits after it"), host, PAGES)
