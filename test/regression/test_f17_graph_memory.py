"""F17: captured memory has one owner, and what a graph reads or leaves lies outside of it."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from guarded_runs import SPIN_CYCLES, check_random_steps, page_sizes, raw, runners, trace_shape
from scheduler_driver import answers
from speculative_driver import models, requests
from speculative_guards import make_guarded, run
from step_traces import TraceShape, random_trace
from trace_runner import first_difference, make_runner, play

from fenceline.memory_order import Device, Graph, GraphPool, open_device
from fenceline.memory_order.cuda import CudaGraph
from fenceline.model_executor.step import ForwardResult, StepOutput
from fenceline_proof import runs
from fenceline_proof.runs import Trial
from fenceline_sim.errors import StaleMemoryError

__all__ = ["models"]  # a fixture

NUM = 1 << 20


def capture(device: Device, name: str, pool: GraphPool, body: Callable[[], None]) -> Graph:
    """Captured after a first run outside, and ready."""
    with device.forward.active():
        body()
    device.synchronize()
    graph = device.capture(name, pool, body)
    graph.register()
    graph.allow_replay()
    return graph


@pytest.mark.gpu
@page_sizes
def test_random_steps_equal_eager_ones(page_size: int) -> None:
    check_random_steps("cuda", page_size)


@pytest.mark.gpu
def test_target_and_draft_share_a_device() -> None:
    """Two runners with graphs, pools and streams of their own, in turns, while others use and free memory."""
    shape = trace_shape(16)
    traces = [random_trace(seed, 500, shape) for seed in (171, 172)]
    expected = [play(runners("cuda", 16)[0], trace, overlap=False) for trace in traces]
    pair = [make_runner(open_device("cuda"), shape) for _ in traces]
    got: list[list[StepOutput]] = [[], []]
    flights: list[ForwardResult | None] = [None, None]
    for step, batches in enumerate(zip(*traces, strict=True)):
        for which, (runner, batch) in enumerate(zip(pair, batches, strict=True)):
            flight, flights[which] = flights[which], runner.launch(batch)
            if flight is not None:
                got[which].append(flight.wait())
            with runner.device.forward.active():
                torch.full((NUM >> (step % 8),), torch.nan, device="cuda")
        if step % 100 == 0:
            torch.cuda.empty_cache()
    for which, last in enumerate(flights):
        assert last is not None
        got[which].append(last.wait())
        assert first_difference(expected[which], got[which]) == ""


@pytest.mark.gpu
def test_graphs_outlive_others_graphs() -> None:
    """Another owner's graphs come and go; their memory goes back to the allocator and is written by others."""
    batches = random_trace(173, 200, trace_shape(16))
    expected = play(runners("cuda", 16)[0], batches)
    runner = make_runner(open_device("cuda"), trace_shape(16))
    for part in range(4):
        other: object = make_runner(open_device("cuda"), TraceShape(num_rows=12, num_pages=64))
        del other
        torch.cuda.empty_cache()
        torch.full((16 * NUM,), torch.nan, device="cuda")
        steps = slice(part * 50, part * 50 + 50)
        got = play(runner, batches[steps])
        assert first_difference(expected[steps], got) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True], ids=["own pools", "one pool"])
def test_graphs_of_one_pool_overwrite_each_other(shared: bool) -> None:
    """The target's graph is 10 ms between writing and reading a temporary; the draft's runs meanwhile."""
    device = open_device("cuda")
    target = device.make_graph_pool("target")
    draft = target if shared else device.make_graph_pool("draft")
    xs, outs = torch.ones(2, NUM, device="cuda"), torch.zeros(2, NUM, device="cuda")
    xs[1] = 100.0
    temporaries = [0, 0]
    device.synchronize()

    def body(which: int) -> None:
        temporary = xs[which] * 3
        temporaries[which] = temporary.data_ptr()
        if which == 0:
            torch.cuda._sleep(SPIN_CYCLES)
        outs[which].copy_(temporary)

    graphs = [
        capture(device, f"graph {which}", pool, lambda which=which: body(which))  # type: ignore[misc]
        for which, pool in enumerate((target, draft))
    ]
    assert (temporaries[0] == temporaries[1]) == shared
    graphs[0].replay()
    second = graphs[1]
    assert isinstance(second, CudaGraph)
    with device.copy.active():
        torch.cuda._sleep(SPIN_CYCLES // 10)
        second.raw.replay()
    device.synchronize()
    assert (outs[1] == 300.0).all()
    assert bool((outs[0] == 3.0).all()) == (not shared)


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True], ids=["arena before the graphs", "arena in their pool"])
def test_an_arena_in_the_graphs_own_memory_is_overwritten(inside: bool) -> None:
    """A field that is allocated while a graph is captured, and then known to graphs alone, is the next graph's too."""
    device = open_device("cuda")
    pool = device.make_graph_pool("decode")
    source, out, other = (torch.zeros(NUM, device="cuda") for _ in range(3))
    fields = [torch.empty(NUM, device="cuda")]
    device.synchronize()

    def fill() -> None:
        if inside:
            fields[0] = torch.empty(NUM, device="cuda")
        fields[0].copy_(source)

    def step() -> None:
        out.copy_(fields[0])

    def draft() -> None:
        other.copy_(source + 7)

    fill_graph = capture(device, "fill", pool, fill)
    step_graph = capture(device, "step", pool, step)
    if inside:
        fields.clear()
    draft_graph = capture(device, "draft", pool, draft)
    for value in range(1, 4):
        with raw(device.forward).active():
            source.fill_(value)
        for graph in (fill_graph, draft_graph, step_graph):
            graph.replay()
        device.synchronize()
        assert (other == value + 7).all()
        assert bool((out == value).all()) == (not inside)


class _Note:
    """Garbage that notes when it is found."""

    def __init__(self, notes: list[bool]) -> None:
        self.notes, self.cycle = notes, self

    def __del__(self) -> None:
        self.notes.append(torch.cuda.is_current_stream_capturing())


@pytest.mark.gpu
def test_nothing_is_collected_in_the_middle_of_a_capture() -> None:
    """An earlier engine's graphs, say, whose memory would be given back there and then."""
    device = open_device("cuda")
    with device.forward.active():
        x = torch.zeros(8, device="cuda")
    notes: list[bool] = []

    def body() -> None:
        _Note(notes)
        kept = [[] for _ in range(20_000)]  # type: ignore[var-annotated]  # the collector's turn, many times over
        x.add_(len(kept))

    graph = device.capture("adds", device.make_graph_pool("adds"), body)
    gc.collect()
    assert notes == [False]
    assert gc.isenabled()
    graph.register()
    graph.allow_replay()
    graph.replay()
    device.synchronize()
    assert x.tolist() == [20_000.0] * 8


@pytest.mark.gpu
def test_a_drafts_graphs_keep_their_memory(models: dict[str, Path]) -> None:
    """While others use all memory that is free, and give it back to the driver, after each step."""
    expected = run(models, "cuda")
    driver, drafts = make_guarded(models, "cuda")
    step, num_steps = driver.step, 0

    def step_and_litter() -> None:
        nonlocal num_steps
        step()
        num_steps += 1
        for size in range(6):
            torch.full((NUM >> 3 * size,), torch.nan, device="cuda")
        if num_steps % 10 == 0:
            torch.cuda.empty_cache()

    driver.step = step_and_litter  # type: ignore[method-assign,assignment]
    assert (answers(driver, requests(3, num=12)), drafts) == expected and num_steps > 10


@pytest.mark.parametrize("severed", ["", "graph_pool"], ids=["a pool of their own", "the pool that all use"])
def test_a_drafts_graphs_write_no_memory_of_others(severed: str) -> None:
    """On the virtual GPU, which knows whose memory it is, an engine that speculates."""
    outcome = runs.run(Trial("speculation", 0, frozenset({severed} - {""})))
    if not severed:
        assert outcome.clean, outcome.report
    else:
        assert outcome.checker == StaleMemoryError.checker and "graph_pool" in outcome.edges, outcome.report
        assert re.match(r"lifetime: \w+\[\d+\] of depth \d+ writes ", outcome.report), outcome.report
