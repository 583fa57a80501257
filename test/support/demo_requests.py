"""Requests to the demo model, and the answers of a driver."""

from __future__ import annotations

from functools import lru_cache

import torch
from scheduler_driver import answers, make_model_driver, request
from transformers import AutoModelForCausalLM, AutoTokenizer

import fenceline
from fenceline.ipc.io_struct import TokenizedGenerateReq

TEXTS = [
    "Q: 12 + 7 = ?\nA:",
    "Hello, who are you?",
    "Copy: apple pear plum fig. " * 9,
    "1 2 3 4 5 6",
    "Once upon a time there was a girl named Mia. " * 5,
]


@lru_cache
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(fenceline.demo_model_path())
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def greedy_requests(num_tokens: int = 24) -> list[TokenizedGenerateReq]:
    return [
        request(f"r{i}", ids, temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
        for i, ids in enumerate(prompts())
    ]


def sampled_requests(num_tokens: int = 40) -> list[TokenizedGenerateReq]:
    """Requests with every sampling feature, so that a resumed request must restore all of its state."""
    return [
        request(
            f"r{i}",
            ids,
            seed=100 + i,
            temperature=0.7 + 0.1 * i,
            top_p=0.95,
            top_k=50,
            min_p=0.01,
            max_new_tokens=num_tokens,
            min_new_tokens=5,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.1,
            logit_bias={7: 2.0},
            ignore_eos=True,
        )
        for i, ids in enumerate(prompts())
    ]


@lru_cache
def sampled_reference() -> list[list[int]]:
    """The answers to each request alone: one step at a time, whole prompts, nothing cached."""
    driver = make_model_driver(disable_overlap_schedule=True, disable_radix_cache=True, chunked_prefill_size=-1)
    return [answers(driver, [req])[0] for req in sampled_requests()]


def check_logprobs_equal_transformers(**flags: object) -> None:
    """Check the logprobs of a prompt and its output, and the best tokens at two positions, of a driver with these
    flags."""
    model = AutoModelForCausalLM.from_pretrained(fenceline.demo_model_path(), dtype=torch.float32)
    ids = prompts()[2]
    req = request(
        "a",
        ids,
        temperature=0.0,
        max_new_tokens=6,
        ignore_eos=True,
        stream=False,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
    )
    driver = make_model_driver(chunked_prefill_size=32, **flags)
    output = answers(driver, [req])[0]
    last = driver.answers["a"].last
    assert last is not None
    with torch.no_grad():
        logprobs = model(torch.tensor([ids + output])).logits[0].log_softmax(-1)
    chosen = [float(logprobs[p - 1, t]) for p, t in enumerate(ids + output) if p > 0]
    first, second = driver.first_logprobs["a"], driver.output_logprobs["a"]
    assert first.token_ids == ids and first.logprobs[0] is None
    torch.testing.assert_close(torch.tensor(first.logprobs[1:] + second), torch.tensor(chosen), rtol=1e-4, atol=1e-4)
    tops = list(first.top_logprobs)
    for position in (1, len(ids) - 1):
        best = logprobs[position - 1].topk(3)
        assert [token for _, token in tops[position]] == best.indices.tolist()
