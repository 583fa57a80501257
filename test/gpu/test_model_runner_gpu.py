"""The engine on a CUDA device: overlap, reuse and retraction change no token, run after run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from captured_graphs import KeptGraphs
from demo_requests import greedy_requests, sampled_requests
from embedding_model import PROMPTS, embed
from scheduler_driver import answers, make_model_driver

import fenceline
from fenceline.config.engine_config import cuda_is_available, torch_cuda_version
from fenceline.memory_order import open_device

pytestmark = pytest.mark.gpu


def test_the_gpu_is_found_without_torch() -> None:
    assert cuda_is_available()
    assert torch_cuda_version() == torch.version.cuda


def test_greedy_equals_the_cpu() -> None:
    assert answers(make_model_driver(device="cuda"), greedy_requests()) == answers(
        make_model_driver(device="cpu"), greedy_requests()
    )


@pytest.mark.parametrize(
    "flags", [{}, {"page_size": 1}, {"chunked_prefill_size": 16}, {"disable_radix_cache": True}], ids=str
)
def test_seeded_sampling_does_not_depend_on_how_it_is_computed(flags: dict[str, object]) -> None:
    alone = make_model_driver(device="cuda", disable_overlap_schedule=True, disable_radix_cache=True)
    reference = [answers(alone, [req])[0] for req in sampled_requests()]
    driver = make_model_driver(device="cuda", **flags)
    for _ in range(5):
        driver.answers.clear()
        assert answers(driver, sampled_requests()) == reference


def test_retraction_keeps_every_token() -> None:
    driver = make_model_driver(
        device="cuda", page_size=1, max_total_tokens=300, schedule_conservativeness=0.01, chunked_prefill_size=64
    )
    roomy = make_model_driver(device="cuda")
    assert answers(driver, sampled_requests()) == answers(roomy, sampled_requests())
    assert driver.scheduler.stats.num_retractions > 0


@pytest.mark.parametrize(
    "flags", [{}, {"disable_cuda_graph": True}, {"chunked_prefill_size": 16}, {"page_size": 1}], ids=str
)
def test_embeddings_equal_the_cpu(flags: dict[str, object]) -> None:
    reference = embed(make_model_driver(device="cpu", is_embedding=True))
    driver = make_model_driver(device="cuda", is_embedding=True, **flags)
    for turn in ("new", "cached"):
        for state, right in zip(embed(driver, name=turn), reference, strict=True):
            np.testing.assert_allclose(state, right, atol=1e-2)


def test_embeddings_have_the_same_bits_in_company() -> None:
    driver = make_model_driver(device="cuda", dtype="bfloat16", enable_deterministic_inference=True)
    alone = [embed(driver, [ids], f"alone{i}")[0].tobytes() for i, ids in enumerate(PROMPTS)]
    driver.scheduler.memory.flush()
    driver.send(*sampled_requests())
    assert [state.tobytes() for state in embed(driver)] == alone


DRAFT = {
    "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3,
    "speculative_draft_model_path": f"{fenceline.demo_model_path()}/eagle3",
}  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        {"model_path": fenceline.demo_model_path()},
        {"model_path": fenceline.demo_model_path("demo-moe")},
        {"enable_deterministic_inference": True},
        DRAFT,
        DRAFT | {"speculative_eagle_topk": 4},
        {"speculative_algorithm": "NGRAM"},
    ],
    ids=["dense", "experts", "deterministic", "chains", "trees", "looked up"],
)
def test_captured_graphs_keep_the_declared_order(
    flags: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = KeptGraphs(monkeypatch)
    make_model_driver(device="cuda", **{"dtype": "bfloat16", **flags})
    report = kept.report(tmp_path)
    assert kept.graphs and not report, report


def test_work_of_another_stream_in_a_graph_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept, device, x = KeptGraphs(monkeypatch), open_device("cuda"), torch.zeros(64, device="cuda")

    def body() -> None:
        side = torch.cuda.Stream()
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        x.mul_(3)
        torch.cuda.current_stream().wait_stream(side)
        x.add_(y)

    device.capture("forked", device.make_graph_pool("test"), body)
    report = kept.report(tmp_path)
    assert report.startswith("0 forked: 1 faults\n  nothing orders graph_"), report
