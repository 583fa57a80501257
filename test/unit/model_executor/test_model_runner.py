"""The model runner under the scheduler, with the demo model: same tokens however a request is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from demo_requests import (
    check_logprobs_equal_transformers,
    greedy_requests,
    prompts,
    sampled_reference,
    sampled_requests,
)
from scheduler_driver import answers, make_model_driver, request
from step_traces import TraceShape, random_trace
from trace_runner import make_runner, play
from transformers import AutoModelForCausalLM

import fenceline
from fenceline.memory_order import Device, MaskTable, open_device
from fenceline.model_executor import extend_runner, parts
from fenceline.sampling.sampler import OutputLogprobs, prompt_logprobs


def test_greedy_equals_transformers() -> None:
    model = AutoModelForCausalLM.from_pretrained(fenceline.demo_model_path(), dtype=torch.float32)
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[
            0, len(ids) :
        ].tolist()
        for ids in prompts()
    ]
    assert answers(make_model_driver(), greedy_requests()) == expected


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"page_size": 1, "chunked_prefill_size": 16},
        {"disable_overlap_schedule": True, "page_size": 64, "max_total_tokens": 2048},
        {"disable_radix_cache": True},
    ],
    ids=str,
)
def test_seeded_sampling_does_not_depend_on_how_it_is_computed(flags: dict[str, object]) -> None:
    driver = make_model_driver(**flags)
    assert answers(driver, sampled_requests()) == sampled_reference()
    if not flags.get("disable_radix_cache"):
        driver.answers.clear()
        assert answers(driver, sampled_requests()) == sampled_reference(), "the same with cached prefixes"


@pytest.mark.parametrize("flags", [{"grammar_backend": "none"}, {"skip_tokenizer_init": True}, {}], ids=str)
def test_masks_take_memory_only_where_answers_may_be_constrained(
    flags: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, ...]] = []

    class Counted(MaskTable):
        def __init__(self, device: Device, num_rows: int, vocab_size: int) -> None:
            sizes.append((num_rows, vocab_size))
            super().__init__(device, num_rows, vocab_size)

    monkeypatch.setattr(parts, "MaskTable", Counted)
    config = make_model_driver(**flags).config
    assert sizes == ([] if flags else [(config.max_running_requests + 1, config.model.vocab_size)])


def test_retraction_keeps_every_token() -> None:
    driver = make_model_driver(
        page_size=1, max_total_tokens=230, schedule_conservativeness=0.01, chunked_prefill_size=64
    )
    assert answers(driver, sampled_requests()) == sampled_reference()
    assert driver.scheduler.stats.num_retractions > 0


def test_logprobs_of_prompt_and_output_equal_transformers() -> None:
    check_logprobs_equal_transformers()


def test_named_tokens_are_reported_for_prompt_and_output() -> None:
    """Beside requests that name others or none, over chunks of the prompt, with a part of the prompt cached."""
    model = AutoModelForCausalLM.from_pretrained(fenceline.demo_model_path(), dtype=torch.float32)
    ids = prompts()[2]
    driver = make_model_driver(chunked_prefill_size=32)
    answers(driver, [request("first", ids, temperature=0.0, max_new_tokens=1)])
    names = {"a": [5, 900, 5], "b": [], "c": [7]}
    start = len(ids) - 20
    reqs = [
        request(
            rid, ids, temperature=0.0, max_new_tokens=6, ignore_eos=True,
            return_logprob=True, logprob_start_len=start, token_ids_logprob=named,
        )
        for rid, named in names.items()
    ]  # fmt: skip
    outputs = answers(driver, reqs)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids + outputs[0]])).logits[0].log_softmax(-1)
    for rid, named in names.items():
        prompt = list(driver.first_logprobs[rid].token_ids_logprobs)
        if not named:
            assert prompt == driver.output_named[rid] == []
            continue
        assert prompt[0] == [], "the first position asked for has no logprob"
        assert len(prompt) == 20 and len(driver.output_named[rid]) == 6
        for position, found in enumerate(prompt[1:] + driver.output_named[rid], start + 1):
            assert [token for _, token in found] == named
            torch.testing.assert_close(
                torch.tensor([value for value, _ in found]), logprobs[position - 1, named], rtol=1e-4, atol=1e-4
            )


def test_prompt_logits_stay_in_the_models_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position of a chunk in float32 is gigabytes that nobody has set aside."""
    dtypes = []

    def spy(logits: torch.Tensor, targets: torch.Tensor, top_k: int, *others: Any) -> OutputLogprobs:
        dtypes.append(logits.dtype)
        values = prompt_logprobs(logits, targets, top_k, *others)
        wide = prompt_logprobs(logits.float(), targets, top_k)
        assert torch.equal(values.chosen, wide.chosen)
        assert torch.equal(values.top_logprobs, wide.top_logprobs)
        return values

    monkeypatch.setattr(extend_runner, "prompt_logprobs", spy)
    shape = TraceShape(num_rows=8, num_pages=60, logprob_share=0.5)
    play(make_runner(open_device("cpu"), shape, (), dtype="bfloat16"), random_trace(3, 40, shape))
    assert dtypes and set(dtypes) == {torch.bfloat16}
