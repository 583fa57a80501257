"""Steps with images on the virtual GPU, in pieces and not: tokens are the CPU's on any schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from vision_cases import BEGIN, IMAGE, cases_of, image_request, picture, save_vision_checkpoint, vision_driver

from fenceline.memory_order import Device, open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline_proof.launched_attention import LAUNCHED
from fenceline_sim import VgpuDevice, VirtualGpu

GRAPHS: dict[str, object] = {"piecewise_cuda_graph_tokens": (3, 6, 32), "cuda_graph_bs": (2, 4), "context_length": 256}


def test_prompts_around_a_size_of_graphs(tmp_path: Path) -> None:
    """As in sglang#14193: a token less than a captured size, as many, one more; an image that ends at its edge, and in
    the middle. Each comes twice, and nothing is cached, so that the second runs in what the first has left."""
    save_vision_checkpoint("Qwen2_5_VLForConditionalGeneration", tmp_path)
    prompts = [[*[5] * before, BEGIN, IMAGE, *[6] * behind] for before in (3, 11) for behind in (0, 1, 7, 8, 9)]
    flags: dict[str, object] = {"chunked_prefill_size": 32, "disable_radix_cache": True, "max_running_requests": 1}

    def run(device: Device, **others: object) -> list[list[int]]:
        driver = vision_driver(tmp_path, device, **flags, **others)
        asked = [image_request(driver, f"r{i}", ids, [picture(60, 60, i % 2)]) for i, ids in enumerate(prompts * 2)]
        driver.send(*asked)
        driver.run()
        return [driver.answers[req.rid].output_ids for req in asked]

    expected = run(open_device("cpu"))
    assert expected[: len(prompts)] == expected[len(prompts) :]
    graphs = GRAPHS | {"piecewise_cuda_graph_tokens": (8, 16), "cuda_graph_bs": (1,)}
    assert run(VgpuDevice(gpu=VirtualGpu(seed=2, policy="laziest")), **graphs) == expected


@pytest.mark.parametrize("name", ["Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_tokens_are_those_of_the_cpu_without_a_report(name: str, tmp_path: Path) -> None:
    """The pool of embeddings has room for one large image, so that rows go from one image to the next."""
    save_vision_checkpoint(name, tmp_path)
    cases = cases_of(name)

    def run(device: Device, **flags: object) -> list[list[int]]:
        driver = vision_driver(tmp_path, device, num_embedding_rows=40, **flags)  # type: ignore[arg-type]
        driver.send(*[image_request(driver, f"r{i}", *case) for i, case in enumerate(cases)])
        driver.run()
        worker = driver.scheduler.worker
        assert isinstance(worker, ModelRunner)
        if flags:
            stats = worker.prefill_graph_stats
            assert stats is not None and stats.replays == stats.eligible_steps > 3
        return [driver.answers[f"r{i}"].output_ids for i in range(len(cases))]

    expected = run(open_device("cpu"))
    other: dict[str, object] = {"attention": LAUNCHED}  # which leaves images that are seen whole to torch
    for policy, flags in (("random", {}), ("laziest", GRAPHS | other)):
        assert run(VgpuDevice(gpu=VirtualGpu(seed=1, policy=policy)), **flags) == expected, policy
