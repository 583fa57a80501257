"""Graphs: capture, replay, and what CUDA forbids."""

from __future__ import annotations

import gc

import pytest
import torch
from conformance_vgpu import make_gpu

from fenceline_sim import CaptureError, Graph, RaceError, VirtualGpu
from fenceline_sim.errors import StaleMemoryError

POLICIES = ("fifo", "eager", "laziest", "random", "pct")


def captured_double(gpu: VirtualGpu, x: torch.Tensor) -> tuple[Graph, torch.Tensor]:
    graph = gpu.graph("double")
    with gpu.capture(graph):
        y = x * 2 + 1
    return graph, y


@pytest.mark.parametrize("policy", POLICIES)
def test_replay_computes_again_on_the_same_memory(policy: str) -> None:
    gpu, device = make_gpu(policy)
    x = torch.zeros(3, device=device)
    graph, y = captured_double(gpu, x)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [value * 2 + 1] * 3
    assert graph.num_replays == 2


def test_capture_runs_nothing() -> None:
    gpu, device = make_gpu("eager")
    x = torch.ones(3, device=device)
    _, y = captured_double(gpu, x)
    assert y.isnan().all(), "outputs hold no values before the first replay"


def test_scalars_are_baked_in() -> None:
    gpu, device = make_gpu()
    x = torch.zeros(2, device=device)
    scale = torch.tensor(3.0)
    graph = gpu.graph()
    with gpu.capture(graph):
        y = (x + 1) * scale
    scale.fill_(100.0)
    graph.replay()
    assert y.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("policy", POLICIES)
def test_forked_streams_join_the_capture_and_keep_their_order(policy: str) -> None:
    for seed in range(6):
        gpu, device = make_gpu(policy, seed)
        side = gpu.stream("side")
        x = torch.zeros(4, device=device)
        gpu.synchronize_all()
        graph = gpu.graph()
        with gpu.capture(graph):
            a = x + 1
            gpu.wait(side, gpu.record(gpu.default_stream))
            with gpu.on(side):
                b = a * 10
            c = a * 100
            gpu.wait(gpu.default_stream, gpu.record(side))
            d = b + c
        for value in (0.0, 1.0):
            x.fill_(value)
            graph.replay()
            assert d.tolist() == [(value + 1) * 110] * 4


def test_a_missing_edge_inside_a_graph_is_reported() -> None:
    gpu, device = make_gpu()
    side = gpu.stream("side")
    x = torch.zeros(4, device=device)
    gpu.synchronize_all()
    graph = gpu.graph()
    with gpu.capture(graph):
        gpu.wait(side, gpu.record(gpu.default_stream))
        x.add_(1)
        with gpu.on(side):
            y = x * 2  # the fork was before the addition
        gpu.wait(gpu.default_stream, gpu.record(side))
    graph.replay()
    with pytest.raises(RaceError, match="add_ writes it on default"):
        gpu.synchronize_all()
    del y


def test_a_branch_that_is_not_joined_is_refused() -> None:
    gpu, device = make_gpu()
    side = gpu.stream("side")
    x = torch.zeros(4, device=device)
    gpu.synchronize_all()
    with pytest.raises(CaptureError, match="side was not joined"):
        with gpu.capture(gpu.graph()):
            gpu.wait(side, gpu.record(gpu.default_stream))
            with gpu.on(side):
                x.add_(1)


FORBIDDEN = {
    "item": lambda gpu, x: x[0].item(),
    "synchronize": lambda gpu, x: gpu.synchronize_all(),
    "query": lambda gpu, x: gpu.query(gpu.record(gpu.default_stream)),
    "pageable copy to the device": lambda gpu, x: x.copy_(torch.ones(4), non_blocking=True),
    "pageable copy to the host": lambda gpu, x: x.cpu(),
    "data-dependent shape": lambda gpu, x: x.nonzero(),
    "numbers of repeats on the device": lambda gpu, x: x.repeat_interleave(x.long()),
    "second capture": lambda gpu, x: gpu.capture(gpu.graph()).__enter__(),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_cannot_be_captured_is_refused(name: str) -> None:
    gpu, device = make_gpu()
    x = torch.zeros(4, device=device)
    gpu.synchronize_all()
    graph = gpu.graph()
    with pytest.raises(CaptureError):
        with gpu.capture(graph):
            FORBIDDEN[name](gpu, x)
    assert gpu.capturing is None
    assert x.tolist() == [0.0] * 4, "the device goes on"
    with pytest.raises(CaptureError, match="has not been captured"):
        graph.replay()


def test_what_is_repeated_a_known_number_can_be_captured() -> None:
    gpu, device = make_gpu()
    x, out = torch.arange(2, device=device), torch.zeros(6, dtype=torch.int64, device=device)
    gpu.synchronize_all()
    graph = gpu.graph()
    with gpu.capture(graph), torch.inference_mode():  # as the runner, with which the operator comes here whole
        out.copy_(x.repeat_interleave(3))
    x.add_(1)
    graph.replay()
    assert out.tolist() == [1, 1, 1, 2, 2, 2]


def test_an_error_inside_breaks_the_capture_even_if_it_is_caught() -> None:
    gpu, device = make_gpu()
    x = torch.zeros(4, device=device)
    with pytest.raises(CaptureError, match="broken by an earlier error"):
        with gpu.capture(gpu.graph()):
            with pytest.raises(CaptureError):
                x.cpu()


def test_waiting_for_work_outside_the_graph_needs_an_event() -> None:
    gpu, device = make_gpu()
    other = gpu.stream("other")
    mark = gpu.record(other)
    with pytest.raises(CaptureError, match="outside the graph"):
        with gpu.capture(gpu.graph()):
            gpu.wait(gpu.default_stream, mark)
    del device


def test_replay_on_freed_memory_is_refused() -> None:
    gpu, device = make_gpu()
    x = torch.ones(4, device=device)
    graph, y = captured_double(gpu, x)
    del x
    gc.collect()
    gpu.synchronize_all()
    with pytest.raises(StaleMemoryError, match="freed memory"):
        graph.replay()
    del y


def test_temporaries_of_a_graph_share_memory_and_outputs_stay() -> None:
    gpu, device = make_gpu()
    x = torch.ones(4, device=device)
    graph = gpu.graph()
    with gpu.capture(graph):
        y = ((x + 1) * 2 + 3) * 4
    used = gpu.pool.used_bytes
    for _ in range(3):
        graph.replay()
        torch.zeros(4, device=device)
    assert y.tolist() == [28.0] * 4
    assert gpu.pool.used_bytes <= used + 512, "a replay allocates nothing"


def test_graphs_of_one_pool_overwrite_each_other() -> None:
    """F17: the second graph's output lies where the first one's was."""
    gpu, device = make_gpu()
    x = torch.ones(4, device=device)
    first = gpu.graph("first")
    with gpu.capture(first):
        a = x + 1
    address = a.allocation.tag.region.number
    del a
    second = gpu.graph("second", pool=first)
    with gpu.capture(second):
        b = x + 2
    assert b.allocation.tag.region.number == address
    second.replay()
    first.replay()
    assert b.tolist() == [2.0] * 4, "replaying the first graph changed the second one's output"
