"""--memory-check order: a race of declared accesses is refused at submission, by the name of the missing edge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recording_device import RecordingDevice
from ring_transfers import ring_transfers
from scheduler_driver import Driver, answers, make_model_driver, request
from tiny_model import tiny_driver, tiny_requests

from fenceline.memory_order import Device, InputRing, OrderChecker, OrderError, ResultRing, open_device
from fenceline.memory_order.access import Memory, PagedMemory
from fenceline.memory_order.edges import GROWTH_STOP, HOST_AFTER_FORWARD, RING_EDGES, Hazard, StreamName
from fenceline.model_executor.model_runner import ModelRunner
from fenceline_sim import VirtualGpu
from fenceline_sim.device import VgpuDevice

RINGS = [edge.name for edge in RING_EDGES]
FORWARD, LOAD, STORE, HOST = StreamName.FORWARD, StreamName.LOAD, StreamName.STORE, StreamName.HOST


def open_checked(kind: str, severed: frozenset[str] = frozenset()) -> Device:
    """A device with the checker on: synchronous, lagging, or virtual without a detector of its own."""
    if kind == "vgpu":
        device: Device = VgpuDevice(severed, VirtualGpu(seed=3, detect=False))
    else:
        device = RecordingDevice(severed) if kind == "recording" else open_device(kind, severed)
    device.check_order()
    return device


DEVICES = ["cpu", "recording", "vgpu"]


@pytest.mark.parametrize("kind", DEVICES)
def test_the_rings_are_silent(kind: str) -> None:
    ring_transfers(open_checked(kind))


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("edge", RING_EDGES, ids=lambda edge: edge.name)
def test_a_severed_edge_is_named(edge, kind: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(OrderError) as caught:
        ring_transfers(open_checked(kind, frozenset({edge.name})))
    error = caught.value
    assert error.edges == (edge.name,) and error.hazard in edge.hazards
    assert "_ring." in error.memory and f"missing edge: {edge.name}" in str(error)


def test_a_report_names_both_operations() -> None:
    device = open_checked("cpu", frozenset({"copy_after_forward"}))
    device.checker.begin_step()
    with pytest.raises(OrderError) as caught:
        ResultRing(device).download({"y": torch.ones(3)})
    assert str(caught.value).splitlines() == [
        "memory order: RAW on result_ring.device[0]",
        "  1. pack of the step's results writes it on forward (forward#1, step 1)",
        "  2. copy of the step's results reads it on copy (copy#1, step 1)",
        "  nothing orders them; missing edge: copy_after_forward",
    ]


def test_the_copy_is_not_submitted() -> None:
    """The error comes before the device is given the work that would race."""
    device = open_checked("vgpu", frozenset({"copy_after_forward"}))
    with pytest.raises(OrderError), torch.inference_mode():
        ResultRing(device).download({"y": torch.ones(3, device=device.torch_device)})
    assert isinstance(device, VgpuDevice)
    labels = [op.label for stream in device.gpu.streams for op in stream.queue]
    assert labels and not any("copy to host" in label for label in labels)


def test_growth_waits_for_the_old_slot() -> None:
    big = {"x": np.zeros(1 << 16, dtype=np.int64)}
    for severed in (frozenset[str](), frozenset({GROWTH_STOP.name})):
        device = open_checked("cpu", severed)
        ring = InputRing(device)
        ring.upload({"x": np.zeros(1, dtype=np.int64)})
        if not severed:
            ring.upload(big)
            continue
        with pytest.raises(OrderError, match="return of a slot to the allocator") as caught:
            ring.upload(big)
        assert caught.value.memory.startswith("input_ring.")


# --- the engine ------------------------------------------------------------------------------------


def workload() -> list:  # type: ignore[type-arg]
    prompts = [list(range(5, 60)), list(range(5, 50)), [9] * 20, [7, 8], list(range(5, 60))]
    return [
        request(f"r{i}", ids, seed=i, temperature=0.9 * (i % 2), max_new_tokens=6 + 3 * i, ignore_eos=True)
        for i, ids in enumerate(prompts)
    ]


FLAGS = {"max_total_tokens": 256, "page_size": 16, "chunked_prefill_size": 32}


# Small results go by FORWARD alone where the copy engine is busy with backups.
TIER = {"enable_hierarchical_cache": True, "hicache_io_backend": "direct"}


def severed_driver(edge: str) -> Driver:
    flags = FLAGS | (TIER if edge == HOST_AFTER_FORWARD.name else {})
    config = make_model_driver(4, memory_check="order", **flags).config
    return Driver(config, ModelRunner(config, open_device("cpu", frozenset({edge})), show_progress=False))


def test_the_engine_is_silent_and_its_tokens_are_the_same() -> None:
    driver = make_model_driver(4, memory_check="order", **FLAGS)
    assert answers(driver, workload()) == answers(make_model_driver(4, **FLAGS), workload())
    assert isinstance(driver.worker, ModelRunner)
    order = driver.worker.parts.accesses
    assert driver.worker.device.checker.step > 20, "steps were counted, so they were declared"
    assert order.pages.last_writes.keys() == order.last_tokens.last_writes.keys() != set()
    # The mirror of the page table is the device's, where anything was written.
    np.testing.assert_array_equal(order.pages._page_table, driver.worker.req_pool.page_table.numpy())


@pytest.mark.parametrize("edge", RINGS)
def test_the_engine_without_an_edge_is_refused(edge: str) -> None:
    with pytest.raises(OrderError) as caught:
        answers(severed_driver(edge), workload())
    assert caught.value.edge == edge


def test_the_engine_on_vgpu() -> None:
    """Under vgpu's own detector: both are silent on the whole engine; without an edge the checker speaks first."""
    expected = answers(tiny_driver("cpu"), tiny_requests())
    device = VgpuDevice(gpu=VirtualGpu(seed=5))
    assert answers(tiny_driver(device, memory_check="order"), tiny_requests()) == expected
    for edge in RINGS:
        device = VgpuDevice(frozenset({edge}), VirtualGpu(seed=5, policy="laziest", collect=True))
        flags = TIER if edge == HOST_AFTER_FORWARD.name else {}
        with pytest.raises(OrderError) as caught:
            answers(tiny_driver(device, memory_check="order", **flags), tiny_requests())
        assert caught.value.edge == edge


def test_off_declares_nothing() -> None:
    driver = make_model_driver(4, **FLAGS)
    assert isinstance(driver.worker, ModelRunner)
    assert (
        not driver.worker.parts.accesses.pages.last_writes and not driver.worker.parts.accesses.last_tokens.last_writes
    )
    assert driver.worker.device.forward.record().passed, "points of a synchronous device pass at once"


def test_a_load_into_pages_that_a_step_reads_is_refused() -> None:
    """F3: what a host tier would do, against the declarations that the real steps made."""
    driver = make_model_driver(4, memory_check="order", **FLAGS)
    driver.send(*workload())
    for _ in range(8):
        driver.step()
    worker = driver.worker
    assert isinstance(worker, ModelRunner) and driver.flight is not None
    checker, order = worker.device.checker, worker.parts.accesses
    assert isinstance(checker, OrderChecker)
    row = driver.scheduler.running.reqs[0].row
    page = int(worker.req_pool.page_table[row, 0])
    with pytest.raises(OrderError) as caught:
        checker.write(checker.begin(LOAD, "load of a page"), order.pages, np.array([page]))
    assert caught.value.memory == f"kv_pool page {page}"
    assert "step" in str(caught.value) and "on forward" in str(caught.value)
    checker.wait(LOAD, checker.record(FORWARD))
    checker.write(checker.begin(LOAD, "load of a page"), order.pages, np.array([page]))
    with pytest.raises(OrderError) as caught:
        for _ in range(4):
            driver.step()
    assert caught.value.memory == f"kv_pool page {page}" and caught.value.hazard is Hazard.RAW


# --- the checker -----------------------------------------------------------------------------------


def test_waits_are_transitive_and_cover_no_more_than_their_point() -> None:
    checker = OrderChecker()
    memory = Memory("m", 8)
    rows = np.array([2, 3])
    checker.write(checker.begin(FORWARD, "a"), memory, rows)
    early = checker.record(FORWARD)
    checker.write(checker.begin(FORWARD, "b"), memory, np.array([5]))
    checker.wait(LOAD, early)
    checker.wait(STORE, checker.record(LOAD))
    checker.read(checker.begin(STORE, "c"), memory, rows)
    with pytest.raises(OrderError, match="RAW on m row 5"):
        checker.read(checker.begin(STORE, "d"), memory, np.array([3, 5]))


def test_an_access_to_all_rows_is_one_to_each() -> None:
    checker = OrderChecker()
    memory = Memory("m", 8)
    checker.write(checker.begin(FORWARD, "a"), memory)
    with pytest.raises(OrderError, match="RAW on m row 5"):
        checker.read(checker.begin(STORE, "b"), memory, np.array([5]))


def test_what_the_host_waited_for_is_before_all_it_submits() -> None:
    checker = OrderChecker()
    memory = Memory("m")
    checker.write(checker.begin(FORWARD, "a"), memory)
    done = checker.record(FORWARD)
    with pytest.raises(OrderError, match="no edge of memory_order/edges.py fits: store has to wait"):
        checker.write(checker.begin(STORE, "b"), memory)
    checker.host_waited(done)
    checker.write(checker.begin(STORE, "b"), memory)
    checker.host_waited_for_all()
    checker.write(checker.begin(HOST, "c"), memory)
    checker.read(checker.begin(LOAD, "d"), memory)


def test_old_operations_are_forgotten_by_name_only() -> None:
    checker = OrderChecker()
    memory = Memory("m", 2)
    checker.write(checker.begin(FORWARD, "the first"), memory, np.array([1]))
    for _ in range(5000):
        checker.begin(FORWARD, "other")
    with pytest.raises(OrderError, match="too long ago to be named, forward#1"):
        checker.read(checker.begin(LOAD, "late"), memory)


Action = tuple[int, int, int, int]


@given(st.lists(st.tuples(st.integers(0, 5), *[st.integers(0, 3)] * 3), max_size=40))
def test_pages_read_through_rows_are_as_if_each_had_been_noted(actions: list[Action]) -> None:
    """Against memory that notes every page of every step: the same answer for a write to each page by LOAD."""
    checker, num_pages = OrderChecker(), 12
    pages = PagedMemory("pages", num_pages, 2, (4, 4), FORWARD)
    plain = Memory("plain", num_pages, "page")
    table, lengths = np.zeros((4, 4), np.int32), np.zeros(4, np.int64)
    known = checker.record(FORWARD)
    rows = np.array([1, 2])
    for kind, a, b, c in actions:
        op = checker.begin(FORWARD, "step")
        if kind == 0:  # a request takes a row
            ids = (np.arange(4) + 3 * b + c) % num_pages
            pages.write_table(np.full(4, a), np.arange(4), ids)
            table[a], lengths[a] = ids, b
        elif kind == 1:  # a page is exchanged
            pages.write_table(np.array([a]), np.array([b]), np.array([c]))
            table[a, b] = c
        elif kind == 2:
            known = checker.record(FORWARD)
        else:  # a step over two rows
            if kind == 3 or (lengths[rows] >= 8).any() or a == 0:
                rows = np.array([a, (a + 1 + b % 3) % 4])
                lengths[rows] = np.clip(lengths[rows], 0, 7 if c else 2)  # or fewer than before
            lengths[rows] += 1
            now = lengths[rows]
            read = np.concatenate([table[r, : -(-n // 2)] for r, n in zip(rows, now, strict=True)])
            written = table[rows, (now - 1) // 2]
            if kind == 5:
                checker.append_pages(op, pages, rows, now)
                checker.write(op, plain, written)
            else:
                checker.write(op, pages, written)
                checker.read_pages(op, pages, rows, now)
                checker.write(op, plain, written)
            checker.read(op, plain, read)
    clock = checker.begin(LOAD, "load").clock
    clock = tuple(max(x, y) for x, y in zip(clock, known, strict=True))
    load = list(StreamName).index(LOAD)
    for page in range(num_pages):
        ids = np.array([page])
        for write in (True, False):
            mine, theirs = (m.unordered(load, clock, write, ids) for m in (pages, plain))
            assert (mine is None) == (theirs is None), (page, write)
            assert mine is None or (mine.tick, mine.was_write) == (theirs.tick, theirs.was_write)  # type: ignore[union-attr]


def test_pages_that_a_row_no_longer_reads_were_read_all_the_same() -> None:
    checker = OrderChecker()
    pages = PagedMemory("pages", 8, 2, (4, 4), FORWARD)
    pages.write_table(np.full(4, 1), np.arange(4), np.arange(1, 5))
    checker.read_pages(checker.begin(FORWARD, "long"), pages, np.array([1]), np.array([8]))
    checker.read_pages(checker.begin(FORWARD, "short"), pages, np.array([1]), np.array([3]))
    with pytest.raises(OrderError, match=r"WAR on pages page 4\n  1. long reads it"):
        checker.write(checker.begin(LOAD, "load"), pages, np.array([4]))
    with pytest.raises(OrderError, match=r"WAR on pages page 1\n  1. short reads it"):
        checker.write(checker.begin(LOAD, "load"), pages, np.array([1]))
