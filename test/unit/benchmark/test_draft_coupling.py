"""benchmark/draft_coupling.py reckons what drawing finds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


def script() -> ModuleType:
    """The benchmark as a module."""
    path = Path(__file__).resolve().parents[3] / "benchmark" / "draft_coupling.py"
    spec = importlib.util.spec_from_file_location("draft_coupling", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 8.0])
def test_acceptance_is_how_often_both_draw_the_same(sharpness: float) -> None:
    generator = torch.Generator().manual_seed(int(sharpness))
    p, q = (torch.randn(2, 7, generator=generator) * sharpness).softmax(-1)[:, None]
    noise = -(-torch.rand(200_000, 7, generator=generator).log()).log()
    same = ((p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)).float().mean()
    rejection, coupled = script().acceptance(p, q)
    assert coupled.item() == pytest.approx(same.item(), abs=0.006)
    distance = (p - q).abs().sum() / 2
    assert rejection.item() == pytest.approx(1 - distance.item(), abs=1e-6)
    assert (1 - distance) / (1 + distance) <= coupled.item() + 1e-6 <= rejection.item() + 2e-6


def test_a_draft_as_good_as_the_target_is_always_accepted() -> None:
    p = torch.randn(3, 50).softmax(-1)
    for rates in script().acceptance(p, p):
        assert torch.allclose(rates, torch.ones(3), atol=1e-5)
