"""CudaDevice and CudaStream against a torch.cuda that writes down its calls: each primitive does what it is named for,
on the right stream, in the right order. What the calls mean is CUDA's affair, and the conformance programs'."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import fake_cuda
import pytest
import torch
from fake_cuda import DEVICE, Buffer, Event, Kernels, Machine

from fenceline.memory_order import GraphError, Point, Points, cuda, open_device
from fenceline.memory_order.cuda import CudaDevice, CudaGraph, CudaStream
from fenceline.memory_order.device import FillField
from fenceline.memory_order.edges import (
    COPY_AFTER_FORWARD,
    EDGES,
    FORWARD_AFTER_LOAD,
    GROWTH_STOP,
    HOST_AFTER_COPY,
    HOST_PAGE_REUSE,
    STARTUP_STOP,
    StreamName,
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return fake_cuda.install(monkeypatch)


def open_cuda(machine: Machine) -> CudaDevice:
    device = open_device("cuda")
    assert isinstance(device, CudaDevice)
    machine.take()
    return device


def raw(stream: object) -> fake_cuda.Stream:
    assert isinstance(stream, CudaStream)
    return stream.raw  # type: ignore[return-value]


def event(point: Point) -> Event:
    assert isinstance(point.event, Event)
    return point.event


# --- streams -----------------------------------------------------------------------------------------


def test_each_stream_is_one_of_the_device_s_own(machine: Machine) -> None:
    device = open_cuda(machine)
    assert device.torch_device == DEVICE
    assert len({raw(stream).number for stream in device.streams}) == len(device.streams) == machine.num_streams
    assert all(raw(stream) is not machine.default for stream in device.streams)
    names = [stream.name for stream in device.streams]
    assert names == [name for name in StreamName if name is not StreamName.HOST]


def test_a_point_is_an_event_recorded_on_its_stream(machine: Machine) -> None:
    device = open_cuda(machine)
    for stream in device.streams:
        with device.copy.active():  # whatever is current
            first, second = stream.record(), stream.record()
        calls = [call for call in machine.take() if call[0] != "enter"]
        assert calls == [("record", raw(stream), event(first)), ("record", raw(stream), event(second))]
        assert event(first) is not event(second)
        assert not first.passed and not second.passed


@pytest.mark.parametrize("edge", EDGES.values(), ids=lambda edge: edge.name)
def test_the_waiter_waits_for_the_source_s_event_not_the_host(machine: Machine, edge: object) -> None:
    device = open_cuda(machine)
    by_name = {stream.name: stream for stream in device.streams}
    for waiter, source in edge.pairs:  # type: ignore[attr-defined]
        point = by_name[source].record()
        machine.take()
        if waiter is StreamName.HOST:
            by_name[source].synchronize(point, edge)  # type: ignore[arg-type]
            assert machine.take() == [("block", event(point))] and point.passed
        else:
            by_name[waiter].wait(point, edge)  # type: ignore[arg-type]
            assert machine.take() == [("wait", raw(by_name[waiter]), event(point))] and not point.passed


def test_of_several_points_each_is_waited_for(machine: Machine) -> None:
    device = open_cuda(machine)
    own, of_load = device.forward.record(), device.load.record()
    machine.take()
    device.forward.wait(Points.of(own, of_load), FORWARD_AFTER_LOAD)
    assert machine.take() == [("wait", raw(device.forward), event(of_load))], "program order holds already"


def test_what_is_known_to_have_passed_is_not_waited_for_again(machine: Machine) -> None:
    device = open_cuda(machine)
    first, second = device.copy.record(), device.copy.record()
    device.copy.synchronize(second, HOST_AFTER_COPY)
    machine.take()
    device.copy.synchronize(first, HOST_AFTER_COPY)
    assert device.copy.ask(first) and machine.take() == []
    done = device.forward.record()
    device.forward.note_passed(done)
    machine.take()
    device.copy.wait(done, COPY_AFTER_FORWARD)
    assert machine.take() == []


def test_a_worker_blocks_whatever_the_scheduler_knows(machine: Machine) -> None:
    device = open_cuda(machine)
    point = device.store.record()
    machine.take()
    device.store.synchronize_from_worker(point, HOST_PAGE_REUSE)
    assert machine.take() == [("block", event(point))] and not point.passed
    device.store.note_passed(point)
    device.store.synchronize_from_worker(point, HOST_PAGE_REUSE)
    assert machine.take() == [("block", event(point))]


def test_asking_does_not_block_and_the_host_learns_it_when_told(machine: Machine) -> None:
    device = open_cuda(machine)
    point = device.load.record()
    machine.take()
    assert not device.load.ask(point) and not point.passed
    machine.passed.add(event(point))
    assert device.load.ask(point) and not point.passed
    assert machine.take() == [("query", event(point))] * 2
    device.load.learn(point)
    assert point.passed and device.load.ask(point) and machine.take() == []


def test_inside_active_the_stream_is_current(machine: Machine) -> None:
    device = open_cuda(machine)
    for stream in device.streams:
        with stream.active():
            assert machine.current is raw(stream)
        assert machine.current is machine.default


def test_a_stream_that_is_current_is_not_entered_again(machine: Machine) -> None:
    """Entering takes several times as long as asking, and a step does it many times."""
    device = open_cuda(machine)
    forward, copy = device.forward, device.copy
    with forward.active():
        assert machine.take() == [("enter", raw(forward))] and forward.is_current
        with forward.active():
            assert machine.take() == [] and machine.current is raw(forward)
            with copy.active():
                assert machine.take() == [("enter", raw(copy))] and not forward.is_current
        assert machine.current is raw(forward)
    assert machine.current is machine.default


def test_copies_run_on_their_stream_and_block_nobody(machine: Machine) -> None:
    device = open_cuda(machine)
    there, pinned, pageable = Buffer("cuda"), Buffer("cpu", pinned=True), Buffer("cpu")
    with device.schedule.active():  # whatever is current
        for dst, src in ((there, pinned), (pinned, there), (there, Buffer("cuda"))):
            machine.take()
            device.load.copy(dst, src)  # type: ignore[arg-type]
            assert machine.take()[-1] == ("copy", raw(device.load), dst, src, True)
            assert machine.current is raw(device.schedule)
        for dst, src in ((there, pageable), (pageable, there)):
            with pytest.raises(AssertionError, match="pageable memory would block the host"):
                device.load.copy(dst, src)  # type: ignore[arg-type]
    assert not [call for call in machine.take() if call[0] == "copy"]


def test_transfers_are_timed_in_seconds_and_nothing_else_is(machine: Machine) -> None:
    device = open_cuda(machine)
    for stream in device.streams:
        first, last = stream.record(), stream.record()
        event(first).time_ms, event(last).time_ms = 250.0, 1750.0
        timed = stream in (device.load, device.store)
        assert event(first).enable_timing == event(last).enable_timing == timed, "timing costs something"
        assert stream.seconds_between(first, last) == (1.5 if timed else None)


# --- graphs ------------------------------------------------------------------------------------------


def captured(device: CudaDevice, body: Callable[[], None] = lambda: None) -> CudaGraph:
    graph = device.capture("decode[1]", device.make_graph_pool("decode"), body)
    assert isinstance(graph, CudaGraph)
    return graph


def test_a_capture_is_of_forward_in_the_owner_s_pool(machine: Machine) -> None:
    device = open_cuda(machine)
    pool, other = device.make_graph_pool("decode"), device.make_graph_pool("prefill")
    assert pool.raw is not other.raw and (pool.owner, other.owner) == ("decode", "prefill")
    seen: list[object] = []

    def body() -> None:
        seen.extend((machine.current, gc.isenabled(), machine.calls[0][0]))

    assert gc.isenabled()
    graph = device.capture("decode[1]", pool, body)
    assert isinstance(graph, CudaGraph) and graph.pool is pool
    # Another thread may use the device meanwhile, the garbage collector may not.
    assert seen == [raw(device.forward), False, "capture"] and gc.isenabled()
    calls = machine.take()
    assert calls[0] == ("capture", graph.raw, pool.raw, raw(device.forward), "thread_local")
    assert calls[-1] == ("captured", graph.raw)


def test_the_collector_stays_off_and_comes_back_after_an_error(machine: Machine) -> None:
    device = open_cuda(machine)

    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        captured(device, fail)
    assert gc.isenabled()
    gc.disable()
    try:
        captured(device)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_replay_is_work_of_forward_whatever_is_current(machine: Machine) -> None:
    device = open_cuda(machine)
    graph = captured(device)
    with pytest.raises(GraphError, match="CAPTURED, not yet REPLAYABLE"):
        graph.replay()
    graph.register()
    graph.allow_replay()
    machine.take()
    for stream in (device.schedule, device.copy):
        with stream.active():
            graph.replay()
            assert machine.current is raw(stream)
        assert machine.take()[-1] == ("replay", raw(device.forward), graph.raw)
    with device.forward.active():
        machine.take()
        graph.replay()
        graph.bind()()
    # A stream that is current is not entered again: that costs several times what the question does.
    assert machine.take() == [("replay", raw(device.forward), graph.raw)] * 2


# --- memory ------------------------------------------------------------------------------------------


def test_host_memory_is_pinned_and_large_pieces_by_ourselves(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_cuda(machine)
    assert device.host_buffer(4096).nbytes == 4096
    assert device.device_buffer(512).nbytes == 512
    assert machine.take() == [("empty", 4096, None, True), ("empty", 512, DEVICE, False)]
    asked: list[int] = []
    monkeypatch.setattr(cuda, "pin_for_cuda", lambda nbytes: asked.append(nbytes))
    monkeypatch.setattr(cuda, "MIN_MAPPED_BYTES", 8192)
    device.host_buffer(8191)
    device.host_buffer(8192)
    assert asked == [8192] and machine.take() == [("empty", 8191, None, True)]


def test_the_device_says_its_memory_and_waits_as_a_whole(machine: Machine) -> None:
    device = open_cuda(machine)
    assert device.memory_info() == (3 << 30, 8 << 30)
    device.synchronize()
    assert machine.take() == [("synchronize", DEVICE)]


def test_only_too_little_memory_ends_a_start_that_compiles_ahead(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """The message is then about memory, and no rank goes on while others wait for it inside the walk."""
    pytest.importorskip("triton", reason="Triton is not installed")
    device = open_cuda(machine)

    def walk(error: Exception) -> None:
        raise error

    assert not device.compile_ahead(lambda: walk(RuntimeError("an odd result")))
    assert "an odd result" in caplog.text and machine.take() == [("synchronize", DEVICE)]
    with pytest.raises(torch.OutOfMemoryError):
        device.compile_ahead(lambda: walk(torch.OutOfMemoryError("8 GiB")))


def test_a_full_stop_is_one_unless_its_guard_is_severed(machine: Machine) -> None:
    device = open_cuda(machine)
    device.full_stop(GROWTH_STOP)
    assert machine.take() == [("synchronize", DEVICE)]
    severed = CudaDevice(frozenset({GROWTH_STOP.name}))
    machine.take()
    severed.full_stop(GROWTH_STOP)
    assert machine.take() == []
    severed.full_stop(STARTUP_STOP)
    assert machine.take() == [("synchronize", DEVICE)], "the other guards hold"


def test_a_worker_waits_in_its_own_thread(machine: Machine) -> None:
    device = open_cuda(machine)
    asked, answered = device.make_channel(), device.make_channel()
    point = device.store.record()
    machine.take()

    def work() -> None:
        number = asked.get()
        device.store.synchronize_from_worker(point, HOST_PAGE_REUSE)
        answered.put((number, threading.get_ident()))
        raise RuntimeError("and then it fails")

    worker = device.start_worker("writer", work)
    assert answered.poll() is None, "nothing has been asked for"
    asked.put(7)
    number, thread = answered.get()
    assert number == 7 and thread != threading.get_ident()
    assert machine.take() == [("block", event(point))]
    with pytest.raises(RuntimeError, match="and then it fails"):
        worker.join()


def fields(num_rows: int = 4) -> list[FillField]:
    target, reset = torch.full((num_rows,), 7), torch.full((num_rows,), 7)
    return [FillField(target, torch.tensor([5, 6]), 2, 1), FillField(reset, None, 0, 3)]


@pytest.mark.parametrize("kernels", [None, Kernels()], ids=["torch", "kernels"])
def test_a_fill_writes_heads_and_tails(monkeypatch: pytest.MonkeyPatch, kernels: Kernels | None) -> None:
    machine = fake_cuda.install(monkeypatch, kernels)
    device, rows = open_cuda(machine), fields()
    for _ in range(2):
        device.fill_rows(rows)
        assert [field.target.tolist() for field in rows] == [[5, 6, 1, 1], [3, 3, 3, 3]]
        rows[1].target.fill_(9)
    expected = [("plan", kernels), ("fill", 2), ("fill", 2)] if kernels else []
    assert machine.take() == expected, "checked once, then launched"
    device.fill_rows(fields(6))
    assert len(machine.take()) == len(expected[:2]), "other rows are another plan"


def test_forward_writes_results_to_the_host_by_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fake_cuda.install(monkeypatch, kernels := Kernels())
    device = open_cuda(machine)
    assert device.writes_host and device._kernels is kernels
    host, source = torch.zeros(24, dtype=torch.uint8), torch.ones(24, dtype=torch.uint8)
    with device.copy.active():  # whatever is current
        machine.take()
        device.write_host(host, source)
    stream = raw(device.forward).cuda_stream
    assert machine.take() == [("copy_words", host.data_ptr(), source.data_ptr(), 3, DEVICE, stream)]
    with pytest.raises(AssertionError):
        device.write_host(host, source[:16])
    with pytest.raises(AssertionError):
        device.write_host(host, torch.ones(48, dtype=torch.uint8)[::2])


def test_without_our_kernels_everything_works_more_slowly(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        device = open_cuda(machine)
    assert not device.writes_host and "cannot be used, so decode is slower: no compiler" in caplog.text
    monkeypatch.setattr(cuda, "fenceline_kernel", None)
    assert not open_cuda(machine).writes_host


def test_without_a_gpu_the_remedy_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device is available: use --device cpu"):
        open_device("cuda")


def test_an_edge_can_be_severed_here_too(machine: Machine) -> None:
    device = open_device("cuda", severed=frozenset({"copy_after_forward"}))
    point = device.forward.record()
    machine.take()
    device.copy.wait(point, COPY_AFTER_FORWARD)
    assert machine.take() == []


def test_each_rank_opens_a_gpu_of_its_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    open_device("cuda")
    assert chosen == [], "the current one"
    open_device("cuda", index=1)
    assert chosen == [1]
    with pytest.raises(
        ValueError, match="rank 2 of this host needs a GPU of its own, and there are 2: lower --tp-size"
    ):
        open_device("cuda", index=2)
