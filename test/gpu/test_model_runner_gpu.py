"""The engine on a CUDA device: overlap, reuse and retraction change no token, run after run."""

from __future__ import annotations

import pytest
import torch
from demo_requests import greedy_requests, sampled_requests
from scheduler_driver import answers, make_model_driver

from fenceline.config.engine_config import cuda_is_available, torch_cuda_version

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
