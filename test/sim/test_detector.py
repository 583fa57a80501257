"""The detector against an oracle: random programs whose order is computed the slow way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fenceline.memory_order.access import row_numbers
from fenceline_sim import RaceError, VirtualGpu, use
from fenceline_sim.layout import contiguous_form, form_of, layout_at

NUM_STREAMS = 3
SIZE = 12  # elements of 16 bytes: the unit in which unnamed memory is watched

_streams = st.integers(0, NUM_STREAMS - 1)
_ranges = st.tuples(st.integers(0, SIZE - 1), st.integers(1, 4))
_steps = st.one_of(
    st.tuples(st.just("write"), _streams, _ranges),
    st.tuples(st.just("read"), _streams, _ranges),
    st.tuples(st.just("rows"), _streams, st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=3)),
    st.tuples(st.just("wait"), _streams, _streams),
    st.tuples(st.just("sync"), _streams, st.none()),
)


class Oracle:
    """Happens-before as a set of predecessors for each operation."""

    def __init__(self) -> None:
        self.latest: list[frozenset[int]] = [frozenset()] * NUM_STREAMS
        self.host: frozenset[int] = frozenset()
        self.accesses: list[tuple[frozenset[int], set[int], bool]] = []
        self.has_race = False

    def access(self, stream: int, units: set[int], write: bool) -> None:
        before = self.latest[stream] | self.host
        number = len(self.accesses)
        for other, (_, others, wrote) in enumerate(self.accesses):
            if other not in before and units & others and (write or wrote):
                self.has_race = True
        self.accesses.append((before, units, write))
        self.latest[stream] = before | {number}

    def wait(self, waiter: int, source: int) -> None:
        self.latest[waiter] = self.latest[waiter] | self.latest[source] | self.host

    def sync(self, stream: int) -> None:
        self.host = self.host | self.latest[stream]


def run(steps: list, gpu: VirtualGpu, oracle: Oracle) -> list[list[float]]:
    """The values at the end, of the memory and of what was read from it."""
    device = use(gpu)
    memory = torch.zeros(SIZE, 4, device=device)
    gpu.name_memory(memory, "memory", row_bytes=16)
    streams = [gpu.stream(f"s{i}") for i in range(NUM_STREAMS)]
    indexes = {}
    for number, (kind, _, what) in enumerate(steps):
        if kind == "rows":
            indexes[number] = torch.tensor(what, device=device)
    gpu.synchronize_all()
    kept = []
    for number, (kind, stream, what) in enumerate(steps):
        with gpu.on(streams[stream]):
            match kind:
                case "write":
                    memory[what[0] : what[0] + what[1]].mul_(3).add_(number)
                    oracle.access(stream, set(range(what[0], min(sum(what), SIZE))), True)
                case "read":
                    kept.append(memory[what[0] : what[0] + what[1]].clone())
                    oracle.access(stream, set(range(what[0], min(sum(what), SIZE))), False)
                case "rows":
                    memory.index_fill_(0, indexes[number], number)
                    oracle.access(stream, set(what), True)
                case "wait":
                    gpu.wait(streams[stream], gpu.record(streams[what]))
                    oracle.wait(stream, what)
                case "sync":
                    gpu.synchronize(gpu.record(streams[stream]))
                    oracle.sync(stream)
    gpu.synchronize_all()
    return [memory[:, 0].tolist(), *[tensor[:, 0].tolist() for tensor in kept]]


@settings(max_examples=150)
@given(
    st.lists(_steps, min_size=2, max_size=14), st.sampled_from(["fifo", "laziest", "random", "pct"]), st.integers(0, 3)
)
def test_a_race_is_found_exactly_where_there_is_one(steps: list, policy: str, seed: int) -> None:
    gpu, oracle = VirtualGpu(seed=seed, policy=policy, collect=True), Oracle()
    run(steps, gpu, oracle)
    assert bool(gpu.races) == oracle.has_race, [str(race) for race in gpu.races]


@settings(max_examples=60)
@given(st.lists(_steps, min_size=2, max_size=10))
def test_a_silent_program_has_one_outcome(steps: list) -> None:
    """What the detector passes gives the same values on every schedule."""
    first = VirtualGpu(policy="fifo", collect=True)
    expected = run(steps, first, Oracle())
    if first.races:
        return
    for policy in ("eager", "laziest", "random", "pct"):
        for seed in range(2):
            assert run(steps, VirtualGpu(seed=seed, policy=policy), Oracle()) == expected, f"{policy} {seed}"


def test_one_run_raises_and_the_gpu_stays_failed() -> None:
    gpu = VirtualGpu(policy="laziest")
    device = use(gpu)
    memory = torch.zeros(4, device=device)
    other = gpu.stream("other")
    with gpu.on(other):
        memory.add_(1)
    with pytest.raises(RaceError):
        gpu.synchronize_all()
    with pytest.raises(RaceError):
        memory.sum().item()


def test_of_several_races_the_first_in_the_program_is_raised() -> None:
    """The schedule shows the second race first: the cause is still what is raised."""
    gpu = VirtualGpu(policy="laziest")
    device = use(gpu)
    first, second = torch.zeros(4, device=device), torch.zeros(4, device=device)
    streams = [gpu.stream("a"), gpu.stream("b")]
    gpu.name_memory(first, "first")
    gpu.name_memory(second, "second")
    gpu.synchronize_all()
    for memory in (first, second):
        for stream in streams:
            with gpu.on(stream):
                memory.add_(1)
    with pytest.raises(RaceError, match="on first"):
        gpu.synchronize_all()
    assert {race.memory.split()[0] for race in gpu.races} == {"first", "second"}


def test_strided_views_cover_only_their_bytes() -> None:
    """Columns of one matrix on two streams do not meet."""
    gpu = VirtualGpu()
    device = use(gpu)
    matrix = torch.zeros(6, 8, device=device)
    left, right = gpu.stream("left"), gpu.stream("right")
    gpu.synchronize_all()
    with gpu.on(left):
        matrix[:, :4].fill_(1)
    with gpu.on(right):
        matrix[:, 4:].fill_(2)
    gpu.synchronize_all()
    assert matrix[0].tolist() == [1] * 4 + [2] * 4


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3), st.integers(0, 5))
def test_byte_ranges_of_a_view_equal_those_of_its_elements(dims: list[tuple[int, int]], offset: int) -> None:
    shape, stride = tuple(d[0] for d in dims), tuple(d[1] for d in dims)
    covered = set()
    for index in np.ndindex(*shape):
        element = offset + sum(i * s for i, s in zip(index, stride, strict=True))
        covered |= set(range(element * 4, element * 4 + 4))
    ranges = layout_at(form_of(shape, stride, torch.float32), offset).ranges
    assert {byte for first, last in ranges for byte in range(first, last)} == covered
    assert list(ranges) == sorted(ranges) and all(a[1] < b[0] for a, b in zip(ranges, ranges[1:], strict=False))


def test_contiguous_form_has_torchs_strides() -> None:
    for shape in [(), (3,), (2, 0, 4), (2, 3, 4)]:
        assert contiguous_form(shape, torch.float32).stride == torch.empty(shape).stride()


def test_row_numbers_are_written_as_runs() -> None:
    assert row_numbers(np.array([3, 17, 18, 19, 40])) == "3, 17-19, 40"
