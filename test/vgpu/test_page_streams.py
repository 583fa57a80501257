"""LOAD, STORE and the host's threads on the virtual GPU: what a query says, and what it orders."""

from __future__ import annotations

import pytest
import torch

from fenceline.memory_order import Points, wait_for_pages
from fenceline.memory_order.edges import EDGES, HOST_PAGE_REUSE, PAGE_EDGES, StreamName
from fenceline.vgpu import RaceError, VirtualGpu
from fenceline.vgpu.device import VgpuDevice
from fenceline.vgpu.policy import POLICIES

torch.set_num_threads(1)


def backed_up(device: VgpuDevice) -> tuple[torch.Tensor, torch.Tensor]:
    """A device page, written by FORWARD, and a pinned one that STORE copies it to."""
    host = device.host_buffer(64)
    with torch.inference_mode():
        with device.forward.active():
            page = torch.full((64,), 7, dtype=torch.uint8, device=device.torch_device)
        wait_for_pages(device.store, Points.of(device.forward.record()))
        device.store.copy(host, page)
    return page, host


@pytest.mark.parametrize("policy", POLICIES)
def test_a_query_orders_the_host_only_where_it_says_passed(policy: str) -> None:
    answers = set()
    for seed in range(12):
        device = VgpuDevice(gpu=VirtualGpu(seed=seed, policy=policy))
        _, host = backed_up(device)
        passed = device.store.poll(point := device.store.record())
        answers.add(passed)
        assert point.passed is passed
        if passed:
            device.host_access(host, False, "write of a page to storage")
            assert host.tolist() == [7] * 64
        else:
            with pytest.raises(RaceError, match="missing edge: host_page_reuse"):
                device.host_access(host, False, "write of a page to storage")
                device.synchronize()
    if policy in ("fifo", "laziest"):
        assert answers == {False}, "nobody has waited for anything"
    if policy == "random":
        assert answers == {True, False}


@pytest.mark.parametrize("policy", POLICIES)
def test_who_asks_often_enough_is_told_yes(policy: str) -> None:
    """A drain that asks once a step gets its answer on every schedule."""
    device = VgpuDevice(gpu=VirtualGpu(policy=policy))
    pages = backed_up(device)
    point = device.store.record()
    assert any(device.store.poll(point) for _ in range(100)) and pages[1].tolist() == [7] * 64


# --- each edge between streams that touch pages ------------------------------------------------------


def hand_over(device: VgpuDevice, first: StreamName, second: StreamName) -> None:
    """``first`` touches a page and a host page, then ``second`` does, by the edge of the two."""
    by_name = {stream.name: stream for stream in device.streams}
    host = device.host_buffer(64)
    device.name_memory(host, "host_pool", 64)
    with torch.inference_mode():
        page = torch.zeros(64, dtype=torch.uint8, device=device.torch_device)
        other = torch.zeros(64, dtype=torch.uint8, device=device.torch_device)
        device.synchronize()

        def touch(name: StreamName, pages: torch.Tensor) -> None:
            if name is StreamName.LOAD:
                device.load.copy(pages, host)
            elif name is StreamName.STORE:
                device.store.copy(host, pages)
            else:
                with device.forward.active():
                    pages.add_(1)

        touch(first, page)
        wait_for_pages(by_name[second], Points.of(by_name[first].record()))
        shared = StreamName.FORWARD in (first, second)
        touch(second, page if shared else other)  # LOAD and STORE meet in host pages alone, too
        device.synchronize()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("edge", PAGE_EDGES, ids=lambda edge: edge.name)
def test_pages_change_hands_by_their_edge(edge, policy: str) -> None:  # type: ignore[no-untyped-def]
    for seed in range(3):
        hand_over(VgpuDevice(gpu=VirtualGpu(seed=seed, policy=policy)), edge.source, edge.waiter)
        gpu = VirtualGpu(seed=seed, policy=policy, collect=True)
        hand_over(VgpuDevice(frozenset({edge.name}), gpu), edge.source, edge.waiter)
        cause = min(gpu.races, key=lambda race: race.order, default=None)
        assert cause is not None and cause.edge == edge.name, str(cause)
        assert cause.hazard in [hazard.value for hazard in EDGES[edge.name].hazards]


def test_a_worker_hears_what_it_waits_for() -> None:
    for seed in range(8):
        read_by_worker(VgpuDevice(gpu=VirtualGpu(seed=seed)))
        severed = VgpuDevice(frozenset({"host_page_reuse"}), VirtualGpu(seed=seed))
        with pytest.raises(RaceError, match="missing edge: host_page_reuse"):
            read_by_worker(severed)


def read_by_worker(device: VgpuDevice) -> None:
    _, host = backed_up(device)
    copied = device.store.record()
    seen: list[list[int]] = []

    def read() -> None:
        device.store.synchronize_from_worker(copied, HOST_PAGE_REUSE)
        device.host_access(host, False, "write of a page to storage")
        seen.append(host.tolist())

    device.gpu.spawn("storage", read).join()
    device.synchronize()
    assert seen == [[7] * 64]
