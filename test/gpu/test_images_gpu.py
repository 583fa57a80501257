"""Models that read images on a GPU: answers are those of a CPU, eager, in graphs and from every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scheduler_driver import Driver
from vision_cases import CASES, VISION_MODELS, image_request, save_vision_checkpoint, vision_driver

from fenceline.model_executor.model_runner import ModelRunner

pytestmark = pytest.mark.gpu


def answers(driver: Driver, turn: str) -> list[list[int]]:
    sent = [image_request(driver, f"{turn} {i}", *case) for i, case in enumerate(CASES)]
    driver.send(*sent)
    driver.run()
    return [driver.answers[req.rid].output_ids for req in sent]


@pytest.mark.parametrize("name", VISION_MODELS)
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True},
        {"page_size": 16, "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "max_total_tokens": 256},
    ],
    ids=["graphs", "eager", "tiers"],
)
def test_answers_are_those_of_a_cpu(name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """Twice: the second time prefixes come from the cache."""
    save_vision_checkpoint(name, tmp_path)
    driver, cpu = (vision_driver(tmp_path, device, **flags) for device in ("cuda", "cpu"))
    runner = driver.worker
    assert isinstance(runner, ModelRunner)
    expected = answers(cpu, "")
    for turn in ("first", "second"):
        assert answers(driver, turn) == expected, turn
    if "disable_cuda_graph" not in flags:
        assert runner.prefill_graphs is not None and runner.prefill_graphs.stats.replays
        assert runner.decode.stats.replays
