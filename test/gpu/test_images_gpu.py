"""Models that read images on a GPU: answers are those of a CPU, eager, in graphs and from every tier."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_checkpoints import save_vision_draft
from scheduler_driver import Driver
from vision_cases import CASES, VISION_MODELS, cases_of, image_request, picture, save_vision_checkpoint, vision_driver

from fenceline import LLM
from fenceline.config.model_config import ModelConfig
from fenceline.images.prepare import prepare
from fenceline.layers.context import Shard, torch_context
from fenceline.mem_cache.kv_pool import EmbeddingPool
from fenceline.model_executor.image_encoder import ImageEncoder
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import Encode
from fenceline.models import vision
from fenceline.models.loader import load_model
from fenceline.models.patch_order import Runs, run_bounds
from fenceline_demo.picture_chat import held_out_pictures

pytestmark = pytest.mark.gpu
_WINDOWS = ((3, 16), (16 * 70, 64))  # of how many patches: a few at the edges, and whole ones


def answers(driver: Driver, turn: str) -> list[list[int]]:
    cases = cases_of(driver.config.model.architecture)
    sent = [image_request(driver, f"{turn} {i}", *case) for i, case in enumerate(cases)]
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


@pytest.mark.parametrize(
    "draft",
    [
        ("Qwen2_5_VLForConditionalGeneration", "EAGLE3", 1),
        ("Qwen3VLForConditionalGeneration", "NEXTN", 2),
        ("Gemma3ForConditionalGeneration", "EAGLE3", 1),
    ],
    ids=lambda draft: f"{draft[0]}-{draft[1]}",
)
def test_drafts_that_see_images_fare_as_on_a_cpu(draft: tuple[str, str, int], tmp_path: Path) -> None:
    """At this temperature many proposals are accepted. Of equal tokens a few may be proposed otherwise."""
    made, found = save_vision_draft(*draft, tmp_path), []
    for device in ("cpu", "cuda"):
        driver = vision_driver(made.directory, device, **made.flags)
        sent = [image_request(driver, f"r{i}", *case, temperature=2.0, seed=i) for i, case in enumerate(CASES)]
        driver.send(*sent)
        driver.run()
        counts = [answer.last.spec for answer in driver.answers.values() if answer.last is not None]
        accepted = sum(spec.num_accepted for spec in counts if spec is not None)
        found.append((accepted, [driver.answers[req.rid].output_ids for req in sent]))
    (on_cpu, expected), (on_gpu, tokens) = found
    assert tokens == expected and on_cpu > 2 and abs(on_gpu - on_cpu) <= 2


@pytest.mark.parametrize("runs", [((16, 4784),), ((1, 4), (1, 16_384)), _WINDOWS], ids=["images", "sizes", "windows"])
@pytest.mark.parametrize("head_dim", [72, 80])
def test_a_tower_attends_to_many_images_at_once(runs: Runs, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not wait, and results are those of segments of one size after the other."""
    bounds = torch.from_numpy(run_bounds(runs)).cuda()
    qkv = torch.randn(sum(count * size for count, size in runs), 3, 16, head_dim, device="cuda", dtype=torch.bfloat16)
    segments, (q, k, v) = vision.Segments(runs, bounds), qkv.unbind(1)
    assert vision._has_varlen(q) and not vision._has_varlen(q.float())
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = vision.attend_within(segments, q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(vision, "_has_varlen", lambda q: False)
    torch.testing.assert_close(found, vision.attend_within(segments, q, k, v), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", VISION_MODELS)
@torch.inference_mode()
def test_a_tower_in_bfloat16_is_close_to_float32(name: str, tmp_path: Path) -> None:
    """Many images in one call, which does not make the host wait, against a CPU."""
    save_vision_checkpoint(name, tmp_path)
    made, config = {}, ModelConfig.from_dir(str(tmp_path))
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        place = torch.device(device)
        tower = load_model(config, "auto", place, torch_context(Shard(), dtype), 0, False).vision
        assert tower is not None
        images = [prepare(picture(60 + 40 * i, 90, i), tower.config.images) for i in range(6)]
        pool = EmbeddingPool(1 + sum(image.num_tokens for image in images), tower.width, dtype, place)
        ends = [*accumulate([image.num_tokens for image in images], initial=1)]
        encodes = [Encode(image, np.arange(*span)) for image, span in zip(images, pairwise(ends), strict=True)]
        encoder = ImageEncoder(tower, pool, together=True)
        views = {key: torch.from_numpy(array.copy()).to(place) for key, array in encoder.arrays(encodes).items()}
        torch.cuda.set_sync_debug_mode("error")
        try:
            encoder.encode(encodes, views)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        made[device] = pool.rows[1:].float().cpu()
    distance = (made["cuda"] - made["cpu"]).norm() / made["cpu"].norm()
    assert 0.0 < distance < 0.05


def test_demo_vision_answers_held_out_questions() -> None:
    """In bfloat16 and captured graphs, many at once. A wrong embedding gives a wrong answer."""
    items = held_out_pictures(4, 270)
    model = LLM(model="demo-vision", device="cuda")
    try:
        replies = model.chat([item.messages() for item in items], {"temperature": 0.0, "max_tokens": 40})
    finally:
        model.llm_engine.shutdown()
    texts = [reply.outputs[0].text.strip() for reply in replies]
    wrong = [(item.item_id, text) for item, text in zip(items, texts, strict=True) if text != item.item.answer]
    assert len(wrong) <= 0.05 * len(items), wrong
