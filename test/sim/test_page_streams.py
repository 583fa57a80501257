"""LOAD, STORE and the host's threads on the virtual GPU: what a query says, and what it orders."""

from __future__ import annotations

import pytest
import torch

from fenceline.memory_order import HostChannel, Point, Points, wait_for_pages
from fenceline.memory_order.access import occupies_sm
from fenceline.memory_order.edges import EDGES, HOST_PAGE_REUSE, PAGE_EDGES, SM_EXCLUSIVE, StreamName
from fenceline_sim import RaceError, VirtualGpu
from fenceline_sim.device import VgpuDevice
from fenceline_sim.policy import POLICIES

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
        passed = device.store.ask(point := device.store.record())
        answers.add(passed)
        if passed:
            device.store.learn(point)
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
    assert any(device.store.ask(point) for _ in range(100)) and pages[1].tolist() == [7] * 64


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


# --- workers and channels ----------------------------------------------------------------------------


def write_behind(device: VgpuDevice, num_pages: int = 3) -> list[list[int]]:
    """The scheduler hands over backed-up pages, polls for acks and reuses each page when its ack has come."""
    host = device.host_buffer(64)
    jobs: HostChannel[Point | None] = device.make_channel()
    acks: HostChannel[list[int]] = device.make_channel()

    def work() -> None:
        while (copied := jobs.get()) is not None:
            device.store.synchronize_from_worker(copied, HOST_PAGE_REUSE)
            device.host_access(host, False, "write of a page to storage")
            acks.put(host[:2].tolist())

    worker = device.start_worker("storage", work)
    seen = []
    with torch.inference_mode(), device.forward.active():
        page = torch.zeros(64, dtype=torch.uint8, device=device.torch_device)
        for value in range(num_pages):
            wait_for_pages(device.forward, Points.of(device.store.record()))
            page.fill_(value)
            wait_for_pages(device.store, Points.of(device.forward.record()))
            device.store.copy(host, page)
            jobs.put(device.store.record())
            while (ack := acks.poll()) is None:
                pass
            seen.append(ack)
        jobs.put(None)
        worker.join()
        assert acks.poll() is None
        device.synchronize()
    return seen


@pytest.mark.parametrize("policy", POLICIES)
def test_an_ack_hands_pages_back(policy: str) -> None:
    """On policies that never switch threads by themselves, too: who polls in vain lets others run."""
    for seed in range(6):
        assert write_behind(VgpuDevice(gpu=VirtualGpu(seed=seed, policy=policy))) == [[0, 0], [1, 1], [2, 2]]
        severed = VgpuDevice(frozenset({"host_page_reuse"}), VirtualGpu(seed=seed, policy=policy))
        with pytest.raises(RaceError, match="missing edge: host_page_reuse"):
            write_behind(severed)


def test_an_empty_channel_orders_nothing() -> None:
    for seed in range(6):
        device = VgpuDevice(gpu=VirtualGpu(seed=seed))
        host = device.host_buffer(64)
        told: HostChannel[int] = device.make_channel()

        def write(device: VgpuDevice = device, host: torch.Tensor = host) -> None:
            device.host_access(host, True, "write of a page that storage has")

        worker = device.start_worker("storage", write)
        with pytest.raises(RaceError, match=r"WA[WR]|RAW"):
            assert told.poll() is None
            device.host_access(host, True, "reuse of the page")
            worker.join()


# --- the multiprocessors -----------------------------------------------------------------------------


def share_the_sm(device: VgpuDevice, captured: bool, forward_first: bool) -> None:
    """Persistent attention, in a graph or not, and a backup by a kernel, one after the other."""
    host, pool = device.host_buffer(64), device.make_graph_pool("decode")
    with torch.inference_mode():
        with device.forward.active():
            page, scores = (torch.zeros(64, dtype=torch.uint8, device=device.torch_device) for _ in range(2))

        def attention() -> None:
            device.declare(StreamName.FORWARD, "attention", occupies_sm)
            scores.add_(1)

        graph = device.capture("decode", pool, attention) if captured else None
        device.synchronize()

        def forward() -> None:
            device.forward.wait(device.store.record(), SM_EXCLUSIVE)
            with device.forward.active():
                if graph is None:
                    attention()
                else:
                    graph.raw.replay()  # type: ignore[attr-defined]

        def backup() -> None:
            device.store.wait(device.forward.record(), SM_EXCLUSIVE)
            device.declare(StreamName.STORE, "backup", occupies_sm)
            device.store.copy(host, page)

        for run in (forward, backup, forward) if forward_first else (backup, forward, backup):
            run()
        device.synchronize()


@pytest.mark.parametrize("forward_first", [True, False])
@pytest.mark.parametrize("captured", [True, False], ids=["graph", "eager"])
def test_the_sm_bears_one_user(captured: bool, forward_first: bool) -> None:
    for seed in range(4):
        share_the_sm(VgpuDevice(gpu=VirtualGpu(seed=seed)), captured, forward_first)
        gpu = VirtualGpu(seed=seed, collect=True)
        share_the_sm(VgpuDevice(frozenset({"sm_exclusive"}), gpu), captured, forward_first)
        cause = min(gpu.races, key=lambda race: race.order)
        assert (cause.edges, cause.hazard, cause.memory) == (("sm_exclusive",), "exclusive", "resource sm")
        assert all("test_page_streams.py" in place for place in cause.places)


def test_other_streams_do_not_mind() -> None:
    """Only who says that it holds the SMs has to be ordered: loads run beside persistent attention."""
    device = VgpuDevice()
    device.declare(StreamName.FORWARD, "attention", occupies_sm)
    with torch.inference_mode():
        host = device.host_buffer(64)
        with device.load.active():
            page = torch.zeros(64, dtype=torch.uint8, device=device.torch_device)
        device.load.copy(page, host)
    device.synchronize()
    assert device.gpu.races == []
