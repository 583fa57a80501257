"""Speculating schedulers with all guards and with one guard severed, and records of their answers and drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scheduler_driver import Driver, answers
from speculative_driver import NEXTN, make_driver, requests

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.memory_order import open_device
from fenceline.model_executor.model_runner import ModelRunner


def by_kind(*drafts: tuple[SpeculativeAlgorithm, str]) -> pytest.MarkDecorator:
    """Runs a test with each of ``drafts`` on each kind of device, and with drafts over latents on a CPU."""
    on_gpu = [pytest.param("cuda", *draft, marks=pytest.mark.gpu) for draft in drafts]
    on_cpu = [pytest.param("cpu", *draft) for draft in drafts]
    on_cpu.append(pytest.param("cpu", NEXTN, "glm-5-shared"))
    return pytest.mark.parametrize(("kind", "algorithm", "draft"), [*on_cpu, *on_gpu])


Drafts = list[list[list[int]]]  # by step and request: the last token, then the proposed ones


def make_guarded(
    models: dict[str, Path],
    kind: str,
    severed: str = "",
    algorithm: SpeculativeAlgorithm = SpeculativeAlgorithm.EAGLE,
    draft: str = "eagle",
    **flags: object,
) -> tuple[Driver, Drafts]:
    """A scheduler whose steps are replays, without the guard ``severed``, and its drafts, which are filled as it
    runs."""
    device = open_device(kind, severed=frozenset({severed} if severed else ()))
    sizes: dict[str, object] = {"num_rows": 5, "max_total_tokens": 640, "cuda_graph_bs": (2, 5)}
    if kind == "cuda":
        # The models have heads of 8 features, which only the torch backend supports.
        sizes |= {"attention_backend": "torch", "disable_piecewise_cuda_graph": True}
    driver = make_driver(models, algorithm, draft, device=device, **(sizes | flags))  # type: ignore[arg-type]
    assert isinstance(driver.worker, ModelRunner) and driver.worker.speculative is not None
    assert driver.worker.decode.has_graphs
    runner, drafts = driver.worker.speculative, Drafts()
    accept = runner.accept

    def accept_and_note(drawn: torch.Tensor | None) -> dict[str, torch.Tensor]:
        results = accept(drawn)
        num_reqs, width = results["next_tokens"].shape
        drafts.append(runner.arena["input_ids"].view(-1)[: num_reqs * width].view(num_reqs, width).tolist())
        return results

    runner.accept = accept_and_note  # type: ignore[method-assign]
    return driver, drafts


def run(
    models: dict[str, Path], kind: str, severed: str = "", num: int = 12, **options: object
) -> tuple[object, Drafts]:
    """The answers to random requests, and all drafts that were proposed meanwhile."""
    driver, drafts = make_guarded(models, kind, severed, **options)  # type: ignore[arg-type]
    return answers(driver, requests(3, num=num)), drafts
