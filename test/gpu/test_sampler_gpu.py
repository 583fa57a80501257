"""The sampler on a GPU: equal to the CPU's where the arithmetic is exact, batch-independent, free of host
synchronisation, and within bounded memory at a real vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fenceline.sampling import gumbel
from fenceline.sampling.sampler import SampleOutput, Sampler
from fenceline.sampling.sampling_batch import ReqSampling, SamplingBatch, sampling_arrays
from fenceline.sampling.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")
VOCAB = 151_936

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=50),
    SamplingParams(min_p=0.02),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5),
    SamplingParams(temperature=0, logit_bias={3: 5.0, VOCAB - 1: -100.0}, min_new_tokens=3),
]


def make_reqs(num: int) -> list[ReqSampling]:
    return [
        ReqSampling(PARAMS[i % len(PARAMS)], 1000 + i, i, 4, (7,), return_logprob=i % 3 == 0, top_logprobs_num=5)
        for i in range(num)
    ]


def make_batch(reqs: Sequence[ReqSampling], device: torch.device) -> SamplingBatch:
    views = {name: torch.from_numpy(array).to(device) for name, array in sampling_arrays(reqs).items()}
    return SamplingBatch.from_views(reqs, views)


def make_logits(num: int, vocab: int = VOCAB) -> torch.Tensor:
    """As a bf16 model gives them: many ties."""
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(num, vocab, generator=generator) * 3).bfloat16().float()


def run(reqs: list[ReqSampling], logits: torch.Tensor, device: torch.device, position: int = 6) -> SampleOutput:
    sampler = Sampler(logits.shape[1], len(reqs) + 64, device)
    for req in reqs:
        if req.params.needs_penalties:
            sampler.begin_request(
                req.row, torch.tensor([1, 2, 3, 4], device=device), torch.tensor([9, 9], device=device)
            )
    positions = torch.full((len(reqs),), position, device=device)
    return sampler.forward(logits.to(device), positions, make_batch(reqs, device))


def test_hash_bits_equal_the_cpus() -> None:
    seeds, positions = torch.from_numpy(gumbel.mix_seeds(range(64))), torch.arange(64) * 1001
    on_cpu = gumbel.GumbelSampler(VOCAB, CPU)._hash(*gumbel._row_keys(seeds, positions))
    on_gpu = gumbel.GumbelSampler(VOCAB, GPU)._hash(*gumbel._row_keys(seeds.to(GPU), positions.to(GPU)))
    assert torch.equal(on_cpu, on_gpu.cpu())


def test_noise_is_finite_and_near_the_cpus() -> None:
    keys = gumbel._row_keys(torch.from_numpy(gumbel.mix_seeds(range(200))), torch.arange(200))
    on_cpu = gumbel.GumbelSampler(VOCAB, CPU)._noise(*keys)
    on_gpu = gumbel.GumbelSampler(VOCAB, GPU)._noise(*(key.to(GPU) for key in keys)).cpu()
    assert torch.isfinite(on_gpu).all()
    # float32 resolves v near 1 coarsely: the lower tail, which never wins a draw, may be off by more.
    upper = on_cpu > -1.5
    torch.testing.assert_close(on_gpu[upper], on_cpu[upper], atol=2e-5, rtol=1e-5)
    assert (on_gpu - on_cpu).abs().max() < 0.05


def test_tokens_and_logprobs_equal_the_cpus() -> None:
    reqs, logits = make_reqs(64), make_logits(64)
    on_cpu, on_gpu = run(reqs, logits, CPU), run(reqs, logits, GPU)
    # The last bit of a logarithm may tip a draw between two tokens that are level to 1e-6.
    assert (on_cpu.next_tokens == on_gpu.next_tokens.cpu()).sum() >= 63
    assert on_cpu.logprobs is not None and on_gpu.logprobs is not None
    torch.testing.assert_close(on_gpu.logprobs.top_logprobs.cpu(), on_cpu.logprobs.top_logprobs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("num_others", [1, 7, 40, 200])
def test_a_row_gives_the_same_bits_in_any_batch(num_others: int) -> None:
    reqs, logits = make_reqs(8 + num_others), make_logits(8 + num_others).to(GPU)
    together = run(reqs, logits, GPU)
    assert together.logprobs is not None
    for i in range(8):
        alone = run([reqs[i]], logits[i : i + 1], GPU)
        assert alone.next_tokens[0] == together.next_tokens[i]
        if alone.logprobs is not None:
            assert torch.equal(alone.logprobs.chosen[0], together.logprobs.chosen[i])


def test_forward_does_not_synchronise_with_the_host() -> None:
    reqs, logits = make_reqs(16), make_logits(16).to(GPU)
    sampler, batch = Sampler(VOCAB, 16, GPU), make_batch(reqs, GPU)
    prompt, output = torch.tensor([1, 2], device=GPU), torch.tensor([3], device=GPU)
    positions = torch.full((16,), 6, device=GPU)
    sampler.begin_request(6, prompt, output)  # the first call allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row in (6, 14):
            sampler.begin_request(row, prompt, output)
        sampler.forward(logits, positions, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_give_a_token_of_the_vocabulary(value: float) -> None:
    reqs = make_reqs(16)
    for logits in (torch.full((16, VOCAB), value), make_logits(16).index_fill_(1, torch.tensor([77]), value)):
        tokens = run(reqs, logits, GPU).next_tokens
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


def test_scratch_memory_stays_bounded() -> None:
    """At 256 requests: the scaled logits, one float64 piece chain, and what a sort needs for one piece."""
    reqs = [ReqSampling(SamplingParams(top_p=0.9), i, i, 1) for i in range(256)]
    logits = torch.randn(256, VOCAB, device=GPU)
    sampler, batch = Sampler(VOCAB, 256, GPU), make_batch(reqs, GPU)
    positions = torch.zeros(256, dtype=torch.int64, device=GPU)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sampler.forward(logits, positions, batch)
    scratch = torch.cuda.max_memory_allocated() - before
    assert scratch < logits.nbytes + 80 * gumbel.CHUNK_ELEMENTS
