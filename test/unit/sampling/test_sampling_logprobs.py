"""Prompt logprobs against log_softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scheduler_driver import make_model_driver, request

from fenceline.sampling import gumbel, logprobs
from fenceline.sampling.logprobs import spread, token_logprobs
from fenceline.sampling.sampler import prompt_logprobs


@pytest.mark.parametrize("top_k", [0, 1, 5, 30, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [0, 1, 13])
def test_prompt_logprobs(num: int, dtype: torch.dtype, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gumbel, "CHUNK_ELEMENTS", 4 * 30)
    generator = torch.Generator().manual_seed(num)
    logits = (torch.randn(num, 30, generator=generator) * 4).to(dtype)
    targets = torch.randint(0, 30, (num,), generator=generator)
    out = prompt_logprobs(logits, targets, top_k)
    expected = torch.log_softmax(logits.double(), -1)
    width = min(top_k, 30)
    assert out.chosen.shape == (num,) and out.chosen.dtype == torch.float32
    assert out.top_logprobs.shape == out.top_ids.shape == (num, width)
    assert out.top_ids.dtype == torch.int64
    torch.testing.assert_close(out.chosen.double(), expected.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=0)
    top = expected.sort(-1, descending=True).values[:, :width]
    torch.testing.assert_close(out.top_logprobs.double(), top, atol=1e-5, rtol=0)
    torch.testing.assert_close(expected.gather(1, out.top_ids), top, atol=1e-5, rtol=0)


def test_each_row_names_tokens_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gumbel, "CHUNK_ELEMENTS", 2 * 30)
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    named_ids = torch.tensor([[3, 29, 3], [0, 1, 2], [7, 7, 7]])
    index = torch.tensor([4, 0, 2])
    part = token_logprobs(logits, torch.zeros(5, dtype=torch.int64), 1, index, named_ids)
    assert part.named is not None
    torch.testing.assert_close(part.named, expected[index].gather(1, named_ids))
    whole = spread(part, index, 5)
    assert whole.named is not None and whole.named[1].tolist() == [0, 0, 0]
    torch.testing.assert_close(whole.named[4], expected[4, [3, 29, 3]])


def test_values_survive_json() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [torch.nan, 0.0, 1.0]])
    out = prompt_logprobs(logits, torch.tensor([1, 2]), 3)
    assert out.chosen.tolist() == [torch.finfo(torch.float32).min] * 2
    assert torch.isfinite(out.top_logprobs).all()


@pytest.mark.parametrize("flag", [True, False])
def test_only_with_the_flag_equal_alternatives_have_an_order(flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sampled tokens and of prompts. Without it nothing is computed that it needs."""
    ordered: list[int] = []

    def first_of_best(of: torch.Tensor, num: int) -> torch.Tensor:
        ordered.append(len(of))
        return found(of, num)

    found = logprobs.first_of_best
    monkeypatch.setattr(logprobs, "first_of_best", first_of_best)
    ties = token_logprobs(torch.zeros(2, 30), torch.zeros(2, dtype=torch.int64), 4, fixed_order=flag)
    assert ordered == [2] * flag
    assert not flag or ties.top_ids.tolist() == [[0, 1, 2, 3]] * 2
    driver = make_model_driver(enable_deterministic_inference=flag, disable_cuda_graph=True)
    ordered.clear()
    asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
    driver.send(request("a", [5, 6, 7, 8], temperature=0.0, max_new_tokens=2, ignore_eos=True, **asked))
    driver.run()
    assert sorted(ordered) == [1, 1, 3] * flag
