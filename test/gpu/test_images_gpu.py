"""Models that read images on a GPU: answers are transformers' on a CPU, in graphs, in chunks and from every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vision_cases import CASES, VISION_MODELS, image_request, save_vision_checkpoint, theirs, vision_driver

from fenceline.model_executor.model_runner import ModelRunner

pytestmark = pytest.mark.gpu

# Gemma 3 attends both ways within an image, which the GPU's attention does not yet.
MODELS = [name for name in VISION_MODELS if not name.startswith("Gemma3")]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True},
        {"page_size": 16, "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "max_total_tokens": 256},
    ],
    ids=["graphs", "eager", "tiers"],
)
def test_answers_are_those_of_transformers(name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """Twice: the second time prefixes come from the cache."""
    reference = save_vision_checkpoint(name, tmp_path)
    driver = vision_driver(tmp_path, "cuda", **flags)
    runner = driver.worker
    assert isinstance(runner, ModelRunner)
    expected = None
    for turn in range(2):
        sent = [image_request(driver, f"{turn} {i}", *case) for i, case in enumerate(CASES)]
        driver.send(*sent)
        driver.run()
        if expected is None:
            expected = [theirs(reference, req.input_ids, case[1]) for req, case in zip(sent, CASES, strict=True)]
        assert [driver.answers[req.rid].output_ids for req in sent] == expected, f"turn {turn}"
    if "disable_cuda_graph" not in flags:
        assert runner.prefill_graphs is not None and runner.prefill_graphs.stats.replays
        assert runner.decode.stats.replays
