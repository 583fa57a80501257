"""Code of the regression tests: a runner with all guards and its reference, runners with one guard severed, and spins
of the device that make a race last longer.

On a GPU the reference runs the same step functions over the same padded arena and plan, eagerly, one step at a time, so
that every bit must be equal. On the CPU, where a capture does no more than that, it is a runner without graphs, and
tokens must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from step_traces import TraceShape, random_trace
from trace_runner import check_same, first_difference, make_runner, play, same_tokens

from fenceline.memory_order import Device, Graph, GraphPool, Point, open_device
from fenceline.memory_order.cuda import CudaDevice, CudaStream
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import StepBatch, StepOutput

# Cycles of the device's clock, about 10 ms: longer than the host takes to launch the next step.
SPIN_CYCLES = 20_000_000
SHORT_SPIN_CYCLES = 200_000  # about 100 us
SIZES = (1, 2, 4, 8)
NUM_STEPS = {"cpu": 120, "cuda": 1000}

kinds = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
page_sizes = pytest.mark.parametrize("page_size", [16])
# Where slots are reckoned from pages, and where pages change hands.
both_page_sizes = pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.long), 16])


class _EagerGraph(Graph):
    def __init__(self, name: str, pool: GraphPool, stream: CudaStream, body: Callable[[], None]) -> None:
        super().__init__(name, pool)
        self._stream = stream
        self._body = body

    def _replay(self) -> None:
        with self._stream.active():
            self._body()


class EagerCudaDevice(CudaDevice):
    """Captures nothing: a replay submits the body's kernels again, one by one."""

    def capture(self, name: str, pool: GraphPool, body: Callable[[], None]) -> Graph:
        return _EagerGraph(name, pool, raw(self.forward), body)


def raw(stream: object) -> CudaStream:
    """``stream`` as the CudaStream that it is on a GPU."""
    assert isinstance(stream, CudaStream)
    return stream


def trace_shape(page_size: int, num_rows: int = 12, **fields: object) -> TraceShape:
    """A shape with the memory that :func:`runners` have."""
    pages = 4800 // page_size
    return TraceShape(page_size=page_size, num_rows=num_rows, num_pages=pages, **fields)  # type: ignore[arg-type]


@cache
def runners(kind: str, page_size: int, num_rows: int = 12) -> tuple[ModelRunner, ModelRunner]:
    """A reference and a runner with graphs and all guards. Callers run the same trace on both."""
    shape = trace_shape(page_size, num_rows)
    if kind == "cuda":
        return make_runner(EagerCudaDevice(), shape, SIZES), make_runner(open_device("cuda"), shape, SIZES)
    return make_runner(open_device("cpu"), shape, sizes=()), make_runner(open_device("cpu"), shape, SIZES)


def check_guarded(kind: str, page_size: int, batches: Sequence[StepBatch], num_rows: int = 12) -> list[StepOutput]:
    """Check that with all guards the answers (and on a GPU all memory) equal the reference's. Returns them."""
    reference, guarded = runners(kind, page_size, num_rows)
    if kind == "cuda":
        return check_same(reference, guarded, batches)
    answers = play(reference, batches)
    assert same_tokens(answers, play(guarded, batches)) == ""
    return answers


@cache
def check_random_steps(kind: str, page_size: int, seed: int = 1, num_rows: int = 12, **fields: object) -> None:
    """:func:`check_guarded` for random steps, 1,000 of them on a GPU, and no step was without its graph or repaired.

    Done once for the same arguments, because with all guards on the run is the same for each of them.
    """
    _, guarded = runners(kind, page_size, num_rows)
    assert guarded.decode.has_graphs
    stats = guarded.decode.stats
    steps, replays = stats.eligible_steps, stats.replays
    shape = trace_shape(page_size, num_rows, **fields)
    check_guarded(kind, page_size, random_trace(seed, NUM_STEPS[kind], shape), num_rows)
    assert stats.eligible_steps - steps > NUM_STEPS[kind] // 4
    if max(shape.batches) <= SIZES[-1]:
        assert stats.replays - replays == stats.eligible_steps - steps, stats.fallbacks
    assert not stats.repairs


def unguarded(kind: str, name: str, page_size: int, num_rows: int = 12) -> ModelRunner:
    """A runner without the edge or guard ``name``."""
    device = open_device(kind, severed=frozenset({name}))
    return make_runner(device, trace_shape(page_size, num_rows), SIZES)


def corruption(expected: Sequence[StepOutput], runner: ModelRunner, batches: Sequence[StepBatch]) -> str:
    """A description of where the answers of ``runner`` differ; "" if they do not."""
    return first_difference(expected, play(runner, batches))


def play_spinning(
    runner: ModelRunner, batches: Sequence[StepBatch], num_setup: int, spin: Callable[[Device], None], severed: str = ""
) -> list[StepOutput]:
    """Run the first ``num_setup`` steps one by one; then the others, two in flight, with ``spin`` on the device and
    without the edge or guard ``severed``. The setup ends with a step like those that follow, so that staging buffers
    have valid values."""
    device = runner.device
    outputs = play(runner, batches[:num_setup], overlap=False)
    device.synchronize()
    spin(device)
    if severed:
        device.severed = frozenset({severed})
        for stream in device.streams:
            stream._severed = device.severed
    outputs += play(runner, batches[num_setup:])
    device.synchronize()
    return outputs


def spin_before_copies(stream: object, cycles: int = SPIN_CYCLES) -> None:
    """Submit a spin before each copy on ``stream``."""
    slow = raw(stream)
    copy = slow.copy

    def late_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
        _spin(slow, cycles)
        copy(dst, src)

    slow.copy = late_copy  # type: ignore[method-assign]


def spin_after_waits(stream: object, cycles: int = SPIN_CYCLES) -> None:
    """Submit a spin after each wait of ``stream``."""
    slow = raw(stream)
    wait = slow.wait

    def late(after: object, edge: object) -> None:
        wait(after, edge)  # type: ignore[arg-type]
        _spin(slow, cycles)

    slow.wait = late  # type: ignore[method-assign]


def spin_after_points(stream: object, cycles: int = SPIN_CYCLES) -> None:
    """Submit a spin after each Point on ``stream``."""
    slow = raw(stream)
    record = slow.record

    def record_and_spin() -> Point:
        point = record()
        _spin(slow, cycles)
        return point

    slow.record = record_and_spin  # type: ignore[method-assign]


def _spin(stream: CudaStream, cycles: int) -> None:
    with stream.active():
        torch.cuda._sleep(cycles)
