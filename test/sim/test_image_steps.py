"""Steps with images on the virtual GPU, in pieces and not: tokens are the CPU's on any schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from vision_cases import CASES, VISION_MODELS, image_request, save_vision_checkpoint, vision_driver

from fenceline.memory_order import Device, open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline_sim import VgpuDevice, VirtualGpu

GRAPHS: dict[str, object] = {"piecewise_cuda_graph_tokens": (3, 6, 32), "cuda_graph_bs": (2, 4), "context_length": 256}


@pytest.mark.parametrize("name", VISION_MODELS)
def test_tokens_are_those_of_the_cpu_without_a_report(name: str, tmp_path: Path) -> None:
    """The pool of embeddings has room for one large image, so that rows go from one image to the next."""
    save_vision_checkpoint(name, tmp_path)

    def run(device: Device, **flags: object) -> list[list[int]]:
        driver = vision_driver(tmp_path, device, num_embedding_rows=40, **flags)
        driver.send(*[image_request(driver, f"r{i}", *case) for i, case in enumerate(CASES)])
        driver.run()
        worker = driver.scheduler.worker
        assert isinstance(worker, ModelRunner)
        if flags:
            stats = worker.prefill_graph_stats
            assert stats is not None and stats.replays == stats.eligible_steps > 3
        return [driver.answers[f"r{i}"].output_ids for i in range(len(CASES))]

    expected = run(open_device("cpu"))
    for policy in ("laziest", "random"):
        for flags in ({}, GRAPHS):
            assert run(VgpuDevice(gpu=VirtualGpu(seed=1, policy=policy)), **flags) == expected, policy
