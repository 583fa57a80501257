"""Our Triton kernels beside attention and products, on a GPU: against torch's operators, eager and captured, with and
without programmatic dependent launch; and the draw, token by token, against gumbel.py's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fenceline.layers.kernels.base import ACTIVATIONS, HeadLayout, LayerKernels, QKNorm
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.model_executor.decode_runner import decode_prologue
from fenceline.sampling.draw_kernels import masked, sample_tokens
from fenceline.sampling.gumbel import GumbelSampler, _row_keys, mix_seeds
from fenceline.sampling.sampler import Sampler
from fenceline.sampling.sampling_batch import ReqSampling, SamplingBatch, sampling_arrays
from fenceline.sampling.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
VOCAB = 151_936
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
REFERENCE = LayerKernels()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=GPU).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, ulps: float = 2.0) -> None:
    tolerance = max(ulps * torch.finfo(expected.dtype).eps, 2e-5)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def capture(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """``function`` in a graph; it has run once before, so that all kernels are compiled."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


# --- layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 896, 1024, 4096, 8192])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    from fenceline.layers.kernels.triton.rms_norm import rms_norm

    weight = random(size, dtype=dtype, seed=1)
    for num_rows in (1, 2, 33, 1025):
        x = random(num_rows, size, dtype=dtype)
        close(rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


def test_rms_norm_of_a_row_does_not_depend_on_the_others() -> None:
    from fenceline.layers.kernels.triton.rms_norm import rms_norm

    x, weight = random(16_384, 4096), random(4096, seed=1)
    whole = rms_norm(x, weight, 1e-6)
    for row in (0, 1, 777, 16_383):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [3072, 11_008])
def test_silu_and_mul(size: int, dtype: torch.dtype) -> None:
    from fenceline.layers.kernels.triton.activation import silu_and_mul

    for num_rows in (1, 33, 1025):
        x = random(num_rows, 2 * size, dtype=dtype) * 4
        for name in ACTIVATIONS:
            close(silu_and_mul(x, activation=name), REFERENCE.activate(x.float(), name).to(dtype))


LAYOUTS = [
    (HeadLayout(32, 8, 128), True),
    (HeadLayout(32, 8, 128), False),
    (HeadLayout(16, 8, 128), True),
    (HeadLayout(14, 2, 64), False),
    (HeadLayout(4, 4, 16), True),
    (HeadLayout(9, 3, 80), True),
    (HeadLayout(8, 1, 256), False),
]


@dataclass(frozen=True)
class Rotation:
    """Inputs of one ``rotate_and_store``."""

    qkv: torch.Tensor
    heads: HeadLayout
    norms: QKNorm | None
    table: torch.Tensor
    positions: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out_slots: torch.Tensor

    def copy(self) -> Rotation:
        tensors = self.qkv.clone(), self.k_cache.clone(), self.v_cache.clone()
        return Rotation(tensors[0], self.heads, self.norms, self.table, self.positions, *tensors[1:], self.out_slots)

    def reference(self) -> None:
        REFERENCE.rotate_and_store(
            self.qkv, self.heads, self.norms, self.table, self.positions, self.k_cache, self.v_cache,
            self.out_slots,
        )  # fmt: skip

    def kernel(self, pdl: bool) -> None:
        from fenceline.layers.kernels.triton.rotate_store import rotate_and_store

        rotate_and_store(
            self.qkv, self.heads, self.norms, self.table, self.positions, self.k_cache, self.v_cache,
            self.out_slots, pdl=pdl,
        )  # fmt: skip

    def check(self, expected: Rotation) -> None:
        for name in ("qkv", "k_cache", "v_cache"):
            close(getattr(self, name), getattr(expected, name), ulps=4.0)


def make_rotation(
    heads: HeadLayout, num_tokens: int, normed: bool, dtype: torch.dtype = torch.bfloat16, num_slots: int = 0
) -> Rotation:
    num_slots = num_slots or num_tokens + 70
    weights = random(2, heads.head_dim, dtype=dtype, seed=1)
    generator = torch.Generator(GPU).manual_seed(2)
    cache = torch.zeros(2, num_slots, heads.num_kv_heads, heads.head_dim, dtype=dtype, device=GPU)
    return Rotation(
        qkv=random(num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, dtype=dtype),
        heads=heads,
        norms=QKNorm(weights[0], weights[1], 1e-6) if normed else None,
        table=RotaryEmbedding(heads.head_dim, 4096, 1e6).table.to(GPU),
        positions=torch.randint(0, 4096, (num_tokens,), generator=generator, device=GPU),
        k_cache=cache[0],
        v_cache=cache[1],
        # From the pool's end: the last address is the one that overflows.
        out_slots=num_slots - 1 - torch.randperm(num_tokens, generator=generator, device=GPU),
    )


@pytest.mark.parametrize(("heads", "normed"), LAYOUTS, ids=str)
def test_rotate_and_store(heads: HeadLayout, normed: bool) -> None:
    for num_tokens, dtype in ((1, torch.bfloat16), (3, torch.float32), (300, torch.bfloat16)):
        rotation = make_rotation(heads, num_tokens, normed, dtype)
        expected = rotation.copy()
        expected.reference()
        rotation.kernel(pdl=False)
        rotation.check(expected)


def test_rotate_and_store_many_tokens_into_a_pool_beyond_32_bits() -> None:
    num_slots = 2_200_000  # times 8 heads of 128: more than 2**31 elements
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    rotation = make_rotation(HeadLayout(32, 8, 128), 16_384, True, num_slots=num_slots)
    qkv = rotation.qkv.clone()
    rotation.kernel(pdl=False)
    small = make_rotation(HeadLayout(32, 8, 128), 16_384, True)
    assert torch.equal(small.qkv, qkv)
    small.reference()
    close(rotation.qkv, small.qkv, ulps=4.0)
    for cache, expected in ((rotation.k_cache, small.k_cache), (rotation.v_cache, small.v_cache)):
        close(cache[rotation.out_slots], expected[small.out_slots], ulps=4.0)
        assert not cache[: num_slots - 16_384].any(), "a write went astray"


def test_a_captured_chain_reads_what_the_kernel_in_front_wrote(pdl: bool) -> None:
    """150 kernels, each of the one before; replayed on changing input it equals the same kernels one at a time."""
    from fenceline.layers.kernels.triton.activation import silu_and_mul
    from fenceline.layers.kernels.triton.rms_norm import rms_norm

    heads = HeadLayout(16, 8, 128)
    width = 32 * 128
    for num_tokens in (1, 24, 256):
        rotation = make_rotation(heads, num_tokens, True)
        start, end = random(num_tokens, width), torch.empty(num_tokens, width // 2, device=GPU).bfloat16()
        weights = random(50, width, seed=5) + 1

        def run(overlapped: bool, r: Rotation = rotation, x: torch.Tensor = start, out: torch.Tensor = end,
                weights: torch.Tensor = weights) -> None:  # fmt: skip
            for weight in weights:
                r.qkv.copy_(rms_norm(x, weight, 1e-6, overlapped))
                r.kernel(overlapped)
                half = silu_and_mul(r.qkv, pdl=overlapped)
                x = torch.cat((half, half), dim=1)
            out.copy_(half)

        graph = capture(lambda run=run: run(pdl))
        for seed in range(20):
            start.copy_(random(num_tokens, width, seed=seed))
            graph.replay()
            replayed = [t.clone() for t in (end, rotation.k_cache, rotation.v_cache)]
            run(False)
            assert all(map(torch.equal, replayed, (end, rotation.k_cache, rotation.v_cache)))


def test_a_long_chain_of_norms_is_the_same_with_dependent_launch() -> None:
    from fenceline.layers.kernels.triton.rms_norm import rms_norm

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9")
    x, weight, outs = (random(64, 4096), random(4096, seed=1) + 2, torch.empty(2, 64, 4096, device=GPU).bfloat16())

    def run(index: int) -> None:
        y = x
        for _ in range(400):
            y = rms_norm(y, weight, 1e-6, pdl=bool(index))
        outs[index].copy_(y)

    graphs = [capture(lambda i=i: run(i)) for i in (0, 1)]
    for seed in range(10):
        x.copy_(random(64, 4096, seed=seed))
        for graph in graphs:
            graph.replay()
        assert torch.equal(outs[0], outs[1])


# --- decode prologue ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 32, 160, 512])
def test_decode_prologue_captured(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = torch.randperm(600, generator=generator)[:size] + 1
    rows[size - size // 3 :] = 0
    cpu = [
        rows,
        torch.randint(1, 2000, (size,), generator=generator),
        torch.zeros(size, dtype=torch.int64),
        torch.randint(0, 1 << 30, (601, 140), generator=generator, dtype=torch.int32),
        torch.randint(0, VOCAB, (601,), generator=generator),
    ]
    gpu = [t.to(GPU) for t in cpu]
    expected = [torch.empty(size, dtype=torch.int64) for _ in range(4)]
    actual = [t.to(GPU) for t in expected]
    graph = capture(lambda: decode_prologue(*gpu, 16, *actual))
    for step in range(5):
        cpu[2].fill_(step)
        gpu[2].copy_(cpu[2])
        decode_prologue(*cpu, 16, *expected)
        graph.replay()
        assert all(torch.equal(a.cpu(), e) for a, e in zip(actual, expected, strict=True))


# --- sampling ----------------------------------------------------------------------------------------


def logits_like_a_model(num: int, vocab: int, seed: int = 5) -> torch.Tensor:
    """bfloat16: many ties."""
    return random(num, vocab, dtype=torch.float32, seed=seed).mul_(3).bfloat16()


def draw(
    logits: torch.Tensor,
    seed_keys: torch.Tensor | None,
    positions: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    noise_scales: torch.Tensor | None = None,
    thresholds: torch.Tensor | None = None,
    maxima: torch.Tensor | None = None,
) -> torch.Tensor:
    next_tokens = torch.full_like(positions, -1)
    sample_tokens(
        logits, temperatures, noise_scales, seed_keys, positions, None, None, next_tokens, maxima=maxima,
        thresholds=thresholds,
    )  # fmt: skip
    return next_tokens


def keys(seeds: range, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(mix_seeds(seeds)).to(GPU), positions.to(GPU)


def test_noise_is_gumbels_bit_by_bit() -> None:
    from gumbel_probe import kernel_noise

    seed_keys, positions = keys(range(1000), torch.arange(1000) * 1_000_003)
    expected = GumbelSampler(4096, GPU)._noise(*_row_keys(seed_keys, positions))
    assert torch.equal(kernel_noise(seed_keys, positions, 4096), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_are_gumbels_over_1e5_draws(dtype: torch.dtype) -> None:
    """Real vocabulary for some, a small one for many: 1e5 draws, none different."""
    for num, vocab, rounds in ((256, VOCAB, 8), (4096, 2000, 25)):
        sampler = GumbelSampler(vocab, GPU)
        for number in range(rounds):
            logits = logits_like_a_model(num, vocab, seed=number).to(dtype)
            seed_keys, positions = keys(range(num), torch.arange(num) + 1000 * number)
            temperatures = torch.rand(num, device=GPU, generator=torch.Generator(GPU).manual_seed(number)) + 0.3
            scaled = logits.float() / temperatures[:, None]
            expected = sampler.draw(scaled, seed_keys, positions)
            assert torch.equal(draw(logits, seed_keys, positions, temperatures), expected)


def test_draws_follow_the_softmax() -> None:
    num, vocab = 100_000, 24
    row = torch.linspace(0.0, 4.0, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(1))]
    for seeds, positions in ((range(num), torch.full((num,), 12)), (range(7, 8), torch.arange(num))):
        seed_keys = torch.from_numpy(mix_seeds(seeds)).to(GPU).expand(num).contiguous()
        logits = row.to(GPU).expand(num, vocab)
        tokens = draw(logits, seed_keys, positions.to(GPU)).cpu().numpy()
        observed, expected = (np.bincount(tokens, minlength=vocab), torch.softmax(row.double(), 0).numpy() * num)
        statistic, dof = float(((observed - expected) ** 2 / expected).sum()), vocab - 1
        score = ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))
        assert abs(score) < 3.3  # Wilson-Hilferty: about N(0, 1)


def test_greedy_takes_the_lowest_id_among_the_best() -> None:
    for num, vocab in ((1, VOCAB), (64, VOCAB), (5, 24), (3, 32_000)):
        logits = logits_like_a_model(num, vocab)
        expected = torch.from_numpy(logits.float().cpu().numpy().argmax(axis=-1)).to(GPU)  # numpy: the first
        positions = torch.arange(num, device=GPU)
        assert torch.equal(draw(logits, None, positions), expected)
        seed_keys = torch.from_numpy(mix_seeds(range(num))).to(GPU)
        zeros = torch.zeros(num, device=GPU)
        assert torch.equal(draw(logits, seed_keys, positions, zeros + 1, zeros), expected)


def test_thresholds_keep_what_the_filter_keeps() -> None:
    num = 512
    logits = logits_like_a_model(num, VOCAB).float()
    temperatures = torch.rand(num, device=GPU) + 0.3
    seed_keys, positions = keys(range(num), torch.arange(num))
    maxima = logits.amax(dim=-1)
    scaled = (logits - maxima[:, None]).div_(temperatures[:, None])
    thresholds = scaled.topk(20).values[:, -1].contiguous()
    tokens = draw(logits, seed_keys, positions, temperatures, None, thresholds, maxima)
    assert (scaled.gather(1, tokens[:, None])[:, 0] >= thresholds).all()
    # gumbel.py sees the scores with the maximum taken off: the last bit may tip one of them.
    reference = GumbelSampler(VOCAB, GPU).draw(scaled, seed_keys, positions, None, thresholds)
    assert (tokens != reference).sum() <= 1
    assert len(tokens.unique()) > num / 2
    # No threshold is as good as none at all, bit by bit.
    free = torch.full_like(thresholds, -torch.inf)
    assert torch.equal(
        draw(logits, seed_keys, positions, temperatures, None, free, maxima),
        draw(logits, seed_keys, positions, temperatures),
    )


def test_bad_logits_and_padding_give_a_token_of_the_vocabulary() -> None:
    nan, inf = torch.nan, torch.inf
    logits = logits_like_a_model(8, VOCAB)
    logits[0], logits[1], logits[2], logits[3, 5], logits[4, VOCAB - 1] = nan, inf, -inf, nan, inf
    seed_keys, positions = keys(range(8), torch.arange(8))
    temperatures = torch.tensor([1.0, 1, 1, 1, 1, 0.0, nan, -1.0], device=GPU)
    tokens = draw(logits, seed_keys, positions, temperatures)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert tokens[3] != 5 and tokens[4] == VOCAB - 1


def test_captured_steps_advance_the_rows() -> None:
    """Ten replays; the padded requests share row 0, the sink, and no other row is touched."""
    num, live = 16, 11
    logits = logits_like_a_model(num, VOCAB)
    seed_keys = torch.from_numpy(mix_seeds(range(num))).to(GPU)
    rows = torch.tensor([*range(20, 20 + live), *[0] * (num - live)], device=GPU)
    last_tokens, next_tokens = (torch.full((40,), -1, device=GPU), torch.empty(num, dtype=torch.int64, device=GPU))
    steps, ones = torch.zeros(num, dtype=torch.int64, device=GPU), torch.ones(num, device=GPU)
    positions = torch.zeros(num, dtype=torch.int64, device=GPU)

    def step() -> None:
        positions.copy_(steps + 100)
        sample_tokens(
            logits, ones, ones, seed_keys, positions, rows, last_tokens, next_tokens, steps
        )  # fmt: skip

    graph = capture(step)
    steps.zero_()
    sampler = GumbelSampler(VOCAB, GPU)
    for number in range(10):
        logits.copy_(logits_like_a_model(num, VOCAB, seed=number))
        graph.replay()
        expected = sampler.draw(logits.float(), seed_keys, torch.full_like(rows, 100 + number))
        assert torch.equal(next_tokens, expected)
        assert torch.equal(last_tokens[20 : 20 + live], expected[:live])
        assert last_tokens[0] in expected[live:]
        assert (steps == number + 1).all()
    assert (last_tokens[1:20] == -1).all() and (last_tokens[20 + live :] == -1).all()


def test_the_eager_sampler_draws_what_a_captured_step_draws() -> None:
    """Plain requests beside others that need filters, penalties, bias and logprobs."""
    plain = SamplingParams(temperature=0.7)
    others = [
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=50, min_p=0.01),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(logit_bias={3: 5.0}),
        SamplingParams(temperature=0),
    ]
    params = [plain if i % 2 else others[i // 2 % len(others)] for i in range(64)]
    reqs = [ReqSampling(p, 1000 + i, i, 4, return_logprob=i % 7 == 0) for i, p in enumerate(params)]
    views = {name: torch.from_numpy(array).to(GPU) for name, array in sampling_arrays(reqs).items()}
    sampler, logits = Sampler(VOCAB, 64, GPU), logits_like_a_model(64, VOCAB)
    for req in reqs:
        if req.params.needs_penalties:
            sampler.begin_request(req.row, torch.tensor([1, 2], device=GPU), torch.tensor([9], device=GPU))
    positions = torch.arange(64, device=GPU) + 9
    eager = sampler.forward(logits.float(), positions, SamplingBatch.from_views(reqs, views)).next_tokens
    seed_keys = torch.from_numpy(mix_seeds([req.seed for req in reqs])).to(GPU)
    captured = draw(logits, seed_keys, positions, torch.full((64,), 0.7, device=GPU))
    assert torch.equal(eager[1::2], captured[1::2])


def test_the_draw_under_masks_is_that_of_masked_logits() -> None:
    """With temperatures in one kernel, beside penalties and filters after the logits have been masked."""
    plain = [SamplingParams(temperature=t) for t in (0.0, 0.7, 1.0, 1.3)]
    logits = logits_like_a_model(64, VOCAB)
    words = torch.randint(-(2**31), 2**31, (64, -(-VOCAB // 32)), dtype=torch.int64, device=GPU).int()
    positions = torch.arange(64, device=GPU) + 9
    for extra in ([], [SamplingParams(top_p=0.9)], [SamplingParams(logit_bias={3: 5.0})]):
        params = (plain + extra) * 16
        reqs = [ReqSampling(p, 1000 + i, i, 4) for i, p in enumerate(params[:64])]
        views = {name: torch.from_numpy(array).to(GPU) for name, array in sampling_arrays(reqs).items()}
        batch, sampler = SamplingBatch.from_views(reqs, views), Sampler(VOCAB, 64, GPU)
        for masks in (words, words[:16].contiguous()):
            drawn = sampler.forward(logits, positions, batch, masks).next_tokens
            expected = sampler.forward(masked(logits.float(), masks), positions, batch).next_tokens
            assert torch.equal(drawn, expected)
