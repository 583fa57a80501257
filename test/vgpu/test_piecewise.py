"""Prefill in pieces on the virtual GPU, where graphs replay concrete storages and every access is watched."""

from __future__ import annotations

import pytest
from tiny_model import answers, tiny_driver, tiny_requests

from fenceline.memory_order import Device, open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.vgpu import VgpuDevice, VgpuError, VirtualGpu

FLAGS: dict[str, object] = {
    "piecewise_cuda_graph_tokens": (6, 16),
    "cuda_graph_bs": (2, 4),
    "context_length": 64,
}


def run(device: Device) -> list[list[int]]:
    """All requests twice, so that memory is handed on and prefixes are found."""
    driver = tiny_driver(device, **FLAGS)
    first = answers(driver, tiny_requests(4))
    driver.answers.clear()
    second = answers(driver, tiny_requests(4))
    worker = driver.scheduler.worker
    assert isinstance(worker, ModelRunner) and worker.prefill_graphs is not None
    assert worker.prefill_graphs.stats.replays > 3
    return first + second


@pytest.mark.parametrize("policy", ["fifo", "laziest", "random"])
def test_tokens_equal_those_of_the_cpu_and_the_detector_is_silent(policy: str) -> None:
    assert run(VgpuDevice(gpu=VirtualGpu(seed=1, policy=policy))) == run(open_device("cpu"))


def test_a_padded_row_of_an_earlier_step_is_noticed() -> None:
    with pytest.raises(VgpuError, match="arena_pad"):
        run(VgpuDevice(frozenset({"arena_pad"}), VirtualGpu(seed=1)))
