"""Graphs: what the detector finds in them, and their memory. test_conformance.py has what CUDA does and forbids."""

from __future__ import annotations

import gc

import pytest
import torch
from conformance_vgpu import make_gpu

from fenceline_sim import CaptureError, Graph, RaceError, VirtualGpu
from fenceline_sim.errors import StaleMemoryError


def captured_double(gpu: VirtualGpu, x: torch.Tensor) -> tuple[Graph, torch.Tensor]:
    graph = gpu.graph("double")
    with gpu.capture(graph):
        y = x * 2 + 1
    return graph, y


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


FORBIDDEN = {
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
