"""The sampler against a naive per-request reference, and a mixed batch against single rows."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from fenceline.sampling import gumbel
from fenceline.sampling.draw_kernels import masked
from fenceline.sampling.sampler import SampleOutput, Sampler
from fenceline.sampling.sampling_batch import ReqSampling, SamplingBatch, sampling_arrays
from fenceline.sampling.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB = 40
NUM_ROWS = 16
LOWEST = torch.finfo(torch.float32).min


def make_batch(reqs: Sequence[ReqSampling]) -> SamplingBatch:
    views = {name: torch.from_numpy(array) for name, array in sampling_arrays(reqs).items()}
    return SamplingBatch.from_views(reqs, views | {"input_ids": torch.zeros(3)})


def ids(tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64)


def sample_one(logits: torch.Tensor, position: int, req: ReqSampling) -> SampleOutput:
    return Sampler(logits.shape[-1], NUM_ROWS, CPU).forward(logits.reshape(1, -1), ids([position]), make_batch([req]))


# --- the naive reference: one request, one token, loops and float64 sums -----------------------------------


def reference_logits(logits: np.ndarray, req: ReqSampling, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    x, p = logits.astype(np.float32).copy(), req.params
    for token, bias in (p.logit_bias or {}).items():
        x[token] += np.float32(bias)
    for token in set(prompt) | set(output):
        penalty = np.float32(p.repetition_penalty)
        x[token] = x[token] * penalty if x[token] < 0 else x[token] / penalty
    for token, count in Counter(output).items():
        x[token] -= np.float32(count) * np.float32(p.frequency_penalty)
        x[token] -= np.float32(p.presence_penalty)
    if len(output) < p.min_new_tokens:
        for token in req.stop_ids:
            x[token] = -np.inf
    return x


def reference_scaled(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    temperature = 1.0 if params.is_greedy else params.temperature
    return (x - x.max()) / np.float32(temperature)


def reference_kept(scaled: np.ndarray, params: SamplingParams) -> set[int]:
    """Tokens that top_k, top_p and min_p leave, ties with the last one kept."""
    probs = np.exp(scaled.astype(np.float64))
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda t: -scaled[t])
    kept = set(range(len(probs)))
    if params.top_k != -1:
        lowest = scaled[order[min(params.top_k, len(order)) - 1]]
        kept &= {t for t in order if scaled[t] >= lowest}
    if params.top_p < 1:
        mass = 0.0
        for t in order:
            lowest = scaled[t]
            mass += probs[t]
            if mass >= params.top_p:
                break
        kept &= {t for t in order if scaled[t] >= lowest}
    if params.min_p > 0:
        kept &= {t for t in order if scaled[t] >= np.float32(math.log(params.min_p))}
    return kept


def reference_token(logits: np.ndarray, req: ReqSampling, prompt: Sequence[int], output: Sequence[int]) -> int:
    x = reference_logits(logits, req, prompt, output)
    if req.params.is_greedy:
        return int(np.argmax(x))
    scaled = reference_scaled(x, req.params)
    kept = reference_kept(scaled, req.params)
    keys = gumbel._row_keys(torch.from_numpy(gumbel.mix_seeds([req.seed])), ids([req.prompt_len + len(output)]))
    noise = gumbel.GumbelSampler(len(x), CPU)._noise(*keys)[0].numpy()
    return max(sorted(kept), key=lambda t: scaled[t] + noise[t])


# --- strategies --------------------------------------------------------------------------------------------

TOKENS = st.integers(0, VOCAB - 1)
# Sums that no subset of a small grid's probabilities hits exactly: the reference and the sampler round differently.
TOP_PS = st.sampled_from([1.0, 0.05012345, 0.31234567, 0.612345678, 0.912345678, 0.99012345])
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([-1, -1, 1, 2, 5, 30, VOCAB, 1000]),
    top_p=TOP_PS,
    min_p=st.sampled_from([0.0, 0.0, 0.0512345, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.6]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.4]),
    logit_bias=st.none() | st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=4),
    min_new_tokens=st.integers(0, 4),
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[ReqSampling, list[int], list[int]]:
    prompt = draw(st.lists(TOKENS, min_size=1, max_size=8))
    output = draw(st.lists(TOKENS, max_size=6))
    req = ReqSampling(
        params=draw(PARAMS),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        row=0,
        prompt_len=len(prompt),
        stop_ids=tuple(draw(st.lists(TOKENS, max_size=3))),
        return_logprob=draw(st.booleans()),
        top_logprobs_num=draw(st.integers(0, 5)),
    )
    return req, prompt, output


def random_logits(seed: int, num_rows: int, vocab: int = VOCAB) -> torch.Tensor:
    """Half of the values on a coarse grid, as bf16 models have them: ties are common."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num_rows, vocab)) * 3
    grid = np.round(values * 2) / 2
    return torch.from_numpy(np.where(rng.random(values.shape) < 0.5, grid, values).astype(np.float32))


Case = tuple[ReqSampling, list[int], list[int]]


def run_batch(logits: torch.Tensor, cases: Sequence[Case]) -> SampleOutput:
    sampler = Sampler(logits.shape[1], NUM_ROWS, CPU)
    for req, prompt, output in cases:
        if req.params.needs_penalties:
            sampler.begin_request(req.row, ids(prompt), ids(output))
    positions = ids([len(prompt) + len(output) for _, prompt, output in cases])
    return sampler.forward(logits, positions, make_batch([req for req, _, _ in cases]))


EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@EXAMPLES
@given(cases=st.lists(requests(), min_size=1, max_size=6), seed=st.integers(0, 10_000))
def test_mixed_batch_equals_the_naive_reference(cases: list[Case], seed: int) -> None:
    cases = [(replace(req, row=3 + 2 * i), p, o) for i, (req, p, o) in enumerate(cases)]
    logits = random_logits(seed, len(cases))
    before = logits.clone()
    out = run_batch(logits, cases)
    expected = [reference_token(logits[i].numpy(), *case) for i, case in enumerate(cases)]
    assert out.next_tokens.tolist() == expected
    assert torch.equal(logits, before), "the caller's logits were changed"


@EXAMPLES
@given(cases=st.lists(requests(), min_size=2, max_size=6), seed=st.integers(0, 10_000))
def test_mixed_batch_equals_single_rows(cases: list[Case], seed: int) -> None:
    cases = [(replace(req, row=i), p, o) for i, (req, p, o) in enumerate(cases)]
    logits = random_logits(seed, len(cases))
    out = run_batch(logits, cases)
    for i, case in enumerate(cases):
        alone = run_batch(logits[i : i + 1], [case])
        assert alone.next_tokens[0] == out.next_tokens[i]
        if not case[0].return_logprob:
            continue
        assert alone.logprobs is not None and out.logprobs is not None
        num = case[0].top_logprobs_num
        assert torch.equal(alone.logprobs.chosen[0], out.logprobs.chosen[i])
        assert torch.equal(alone.logprobs.top_logprobs[0, :num], out.logprobs.top_logprobs[i, :num])


@EXAMPLES
@given(case=requests(), seed=st.integers(0, 10_000))
def test_logprobs_are_log_softmax_after_temperature(case: Case, seed: int) -> None:
    case = (replace(case[0], return_logprob=True), *case[1:])
    logits = random_logits(seed, 1)
    out = run_batch(logits, [case])
    x = reference_logits(logits[0].numpy(), *case)
    scaled = torch.from_numpy(reference_scaled(x, case[0].params)).double()
    expected = torch.log_softmax(scaled, 0).clamp(min=LOWEST)
    assert out.logprobs is not None
    token = out.next_tokens[0]
    torch.testing.assert_close(out.logprobs.chosen[0].double(), expected[token], atol=1e-5, rtol=1e-5)
    num = case[0].top_logprobs_num
    assert out.logprobs.top_ids.shape == out.logprobs.top_logprobs.shape == (1, num)
    top = expected.sort(descending=True).values[:num]
    torch.testing.assert_close(out.logprobs.top_logprobs[0].double(), top, atol=1e-5, rtol=1e-5)
    named = expected[out.logprobs.top_ids[0]]
    torch.testing.assert_close(named, top, atol=1e-5, rtol=1e-5)
    assert len(set(out.logprobs.top_ids[0].tolist())) == num


# --- features one by one -----------------------------------------------------------------------------------


def test_arrays_hold_only_what_a_request_needs() -> None:
    def names(*params: SamplingParams) -> set[str]:
        return set(sampling_arrays([ReqSampling(p, 0, i, 4, stop_ids=(2,)) for i, p in enumerate(params)]))

    greedy, plain = SamplingParams(temperature=0), SamplingParams()
    assert names(greedy) == set()
    assert names(plain) == {"seed_keys", "temperatures"}
    assert names(plain, greedy) == {"seed_keys", "temperatures", "noise_scales"}
    assert names(SamplingParams(top_k=5)) == names(plain) | {"top_ks"}
    assert names(SamplingParams(top_k=1, top_p=0.5, min_p=0.5)) == set()
    assert names(plain, SamplingParams(top_p=0.5)) == names(plain) | {"top_ks", "top_ps", "filter_index"}
    assert names(SamplingParams(min_p=0.5)) == names(plain) | {"min_p_logs"}
    assert names(SamplingParams(temperature=0, min_new_tokens=1)) == {"stop_index", "stop_ids", "stop_until"}
    all_arrays = sampling_arrays(
        [ReqSampling(SamplingParams(top_p=0.5, min_p=0.1, logit_bias={1: 1.0}, presence_penalty=1), 0, 1, 4)]
    )
    assert {a.dtype.name for a in all_arrays.values()} <= {"int64", "float32", "float64"}
    assert all(a.ndim == 1 and a.flags.c_contiguous for a in all_arrays.values())


def test_greedy_requests_draw_nothing_whatever_lies_beside_them() -> None:
    draws = {"seed_keys": ids([0]), "temperatures": torch.ones(1), "noise_scales": torch.zeros(1)}
    greedy, plain = (ReqSampling(p, 0, 0, 4) for p in (SamplingParams(temperature=0), SamplingParams()))
    assert SamplingBatch.from_views([greedy], draws).seed_keys is None
    assert SamplingBatch.from_views([plain], draws).seed_keys is draws["seed_keys"]


def test_empty_batch_needs_nothing() -> None:
    assert sampling_arrays([]) == {}
    out = Sampler(VOCAB, 1, CPU).forward(torch.empty(0, VOCAB), ids([]), make_batch([]))
    assert out.next_tokens.shape == (0,) and out.next_tokens.dtype == torch.int64 and out.logprobs is None


@pytest.mark.parametrize("companion", [None, SamplingParams(), SamplingParams(top_p=0.5)])
def test_greedy_takes_the_lowest_id_of_a_tie(companion: SamplingParams | None) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [31, 7, 19]] = 2.5
    reqs = [ReqSampling(SamplingParams(temperature=0), 1, 0, 3)]
    if companion is not None:
        reqs.append(ReqSampling(companion, 2, 1, 3))
    out = Sampler(VOCAB, 2, CPU).forward(logits[: len(reqs)], ids([3] * len(reqs)), make_batch(reqs))
    assert out.next_tokens[0] == 7


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 1e30, 1e300])
def test_extreme_temperatures_do_not_overflow(temperature: float) -> None:
    logits = torch.linspace(-3e4, 3e4, VOCAB)
    params = SamplingParams(temperature=temperature, logit_bias={3: -100.0}, min_new_tokens=1)
    drawn = {
        sample_one(logits, i, ReqSampling(params, 5, 0, i, stop_ids=(8,), return_logprob=True)).next_tokens.item()
        for i in range(200)
    }
    if temperature < 1:
        assert drawn == {VOCAB - 1}
    else:
        assert 8 not in drawn and len(drawn) > 30


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=4),
        SamplingParams(top_k=4, top_p=0.5),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.1),
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.3),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["one", "all"])
def test_bad_logits_give_a_token_of_the_vocabulary(params: SamplingParams, value: float, where: str) -> None:
    logits = torch.linspace(-2, 2, VOCAB).repeat(2, 1)
    logits[0, 5 if where == "one" else slice(None)] = value
    req = ReqSampling(params, 1, 0, 1, return_logprob=True, top_logprobs_num=3)
    good = replace(req, row=1)
    out = run_batch(logits, [(req, [1], [2]), (good, [1], [2])])
    assert 0 <= out.next_tokens[0] < VOCAB
    assert out.logprobs is not None
    for values in (out.logprobs.chosen, out.logprobs.top_logprobs):
        assert torch.isfinite(values).all()
    assert ((out.logprobs.top_ids >= 0) & (out.logprobs.top_ids < VOCAB)).all()
    alone = run_batch(logits[1:], [(good, [1], [2])])
    assert out.next_tokens[1] == alone.next_tokens[0], "a bad row changed its neighbour"


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=3), {0, 1, 2}),
        (SamplingParams(top_k=2, top_p=0.95), {0, 1}),
        (SamplingParams(top_k=4, top_p=0.6), {0, 1}),
        (SamplingParams(top_p=0.6), {0, 1}),
        (SamplingParams(top_p=0.79), {0, 1, 2}),
        (SamplingParams(top_p=1e-9), {0}),
        (SamplingParams(min_p=0.45), {0, 1}),
        (SamplingParams(min_p=0.252, top_p=0.99), {0, 1, 2}),
        (SamplingParams(min_p=1.0), {0}),
        (SamplingParams(), {0, 1, 2, 3, 4}),
    ],
)
def test_filters_keep_exactly_these(params: SamplingParams, kept: set[int]) -> None:
    """Every kept token is drawn, no other is, and the shares are those of the renormalised distribution."""
    probs = torch.tensor([0.4, 0.3, 0.102, 0.1, 0.098])
    num = 5_000
    reqs = [ReqSampling(params, 11, 0, i) for i in range(num)]
    out = Sampler(5, 1, CPU).forward(probs.log().repeat(num, 1), torch.arange(num), make_batch(reqs))
    counts = np.bincount(out.next_tokens.numpy(), minlength=5)
    assert {t for t in range(5) if counts[t]} == kept
    shares = probs.double().numpy() * [t in kept for t in range(5)]
    shares /= shares.sum()
    assert np.all(np.abs(counts - num * shares) <= 4 * np.sqrt(num * shares * (1 - shares)))


@pytest.mark.parametrize("max_k_elsewhere", [3, 17, 1000])
def test_ties_at_the_edge_do_not_depend_on_the_batch(max_k_elsewhere: int) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 30:] = 1.0
    req = ReqSampling(SamplingParams(top_k=2, top_p=0.7), 5, 0, 0)
    other = ReqSampling(SamplingParams(top_k=max_k_elsewhere), 6, 1, 0)
    sampler = Sampler(VOCAB, 2, CPU)
    drawn = set()
    for position in range(300):
        both = sampler.forward(logits, ids([position] * 2), make_batch([req, other])).next_tokens
        alone = sampler.forward(logits[:1], ids([position]), make_batch([req])).next_tokens
        assert both[0] == alone[0]
        drawn.add(alone.item())
    assert drawn == set(range(30, VOCAB))


def test_each_mask_is_of_the_first_of_a_requests_rows() -> None:
    logits = torch.arange(6 * 40.0).view(6, 40)
    masks = torch.tensor([[-1, -1], [1 << 3, 1 << 2]], dtype=torch.int32)
    out = masked(logits, masks)
    assert torch.equal(out[[0, 1, 2, 4, 5]], logits[[0, 1, 2, 4, 5]])
    assert torch.nonzero(out[3].isfinite()).flatten().tolist() == [3, 34]
    assert torch.equal(out[3, [3, 34]], logits[3, [3, 34]])


def test_min_new_tokens_masks_stops_until_they_exist() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 4] = 5.0, 3.0
    req = ReqSampling(
        SamplingParams(temperature=0, min_new_tokens=2), 0, 0, prompt_len=6, stop_ids=(9, 9), return_logprob=True
    )
    sampler, batch = Sampler(VOCAB, 1, CPU), make_batch([req])
    outs = [sampler.forward(logits, ids([position]), batch) for position in (6, 7, 8, 9)]
    assert [out.next_tokens.item() for out in outs] == [4, 4, 9, 9]


def test_a_vocabulary_of_masked_tokens_still_gives_a_token() -> None:
    params = SamplingParams(min_new_tokens=1)
    req = ReqSampling(params, 0, 0, 6, stop_ids=tuple(range(VOCAB)), return_logprob=True)
    out = sample_one(torch.randn(VOCAB), 6, req)
    assert 0 <= out.next_tokens.item() < VOCAB
    assert out.logprobs is not None and out.logprobs.chosen.item() == LOWEST


# --- penalties ---------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.lists(TOKENS, min_size=1, max_size=20),
    split=st.integers(0, 20),
    penalty=st.floats(0.1, 2.0).filter(lambda p: p != 1.0),
    seed=st.integers(0, 1000),
)
def test_repetition_penalty_is_that_of_transformers(tokens: list[int], split: int, penalty: float, seed: int) -> None:
    logits = random_logits(seed, 1)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = torch.log_softmax(processor(ids(tokens)[None], logits.clone()), dim=-1)[0]
    params = SamplingParams(temperature=0, repetition_penalty=penalty)
    req = ReqSampling(params, 0, 0, len(tokens), return_logprob=True, top_logprobs_num=VOCAB)
    out = run_batch(logits, [(req, tokens[:split], tokens[split:])])
    assert out.logprobs is not None
    got = torch.empty(VOCAB)
    got[out.logprobs.top_ids[0]] = out.logprobs.top_logprobs[0]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


PENALIZED = [
    SamplingParams(temperature=0, frequency_penalty=0.7),
    SamplingParams(presence_penalty=1.1, repetition_penalty=1.4, top_k=12),
    SamplingParams(temperature=0.8, repetition_penalty=1.5, min_new_tokens=9),
]


class Chain:
    """A toy model: the next logits depend on the last token."""

    def __init__(self) -> None:
        self.table = random_logits(99, VOCAB)

    def run(self, sampler: Sampler, reqs: list[ReqSampling], histories: list[list[int]], num_steps: int) -> None:
        """Extend ``histories`` (prompt and outputs) by ``num_steps`` tokens each, one SamplingBatch for all."""
        batch = make_batch(reqs)
        for _ in range(num_steps):
            logits = self.table[ids([h[-1] for h in histories])]
            out = sampler.forward(logits, ids([len(h) for h in histories]), batch)
            for history, token in zip(histories, out.next_tokens.tolist(), strict=True):
                history.append(token)


def start(sampler: Sampler, reqs: list[ReqSampling], histories: list[list[int]]) -> None:
    for req, history in zip(reqs, histories, strict=True):
        if req.params.needs_penalties:
            sampler.begin_request(req.row, ids(history[: req.prompt_len]), ids(history[req.prompt_len :]))


def test_counts_follow_the_sampled_tokens() -> None:
    sampler, prompts = Sampler(VOCAB, NUM_ROWS, CPU), [[1, 2, 3], [7], [4, 4]]
    reqs = [ReqSampling(p, 40 + i, 10 - i, len(prompts[i]), (5,)) for i, p in enumerate(PENALIZED)]
    chain, histories = Chain(), [list(p) for p in prompts]
    start(sampler, reqs, histories)
    chain.run(sampler, reqs, histories, 25)
    for req, prompt, history in zip(reqs, prompts, histories, strict=True):
        for n in range(len(prompt), len(history)):
            logits = chain.table[history[n - 1]].numpy()
            assert reference_token(logits, req, prompt, history[len(prompt) : n]) == history[n]


@pytest.mark.parametrize("cut", [1, 8, 19])
def test_a_resumed_request_goes_on_as_if_never_interrupted(cut: int) -> None:
    chain = Chain()
    params = [*PENALIZED, SamplingParams(temperature=1.2), SamplingParams(top_p=0.8)]
    prompts = [[1, 2, 3], [7], [4, 4], [6], [0, 9]]
    reqs = [ReqSampling(p, -i, i, len(prompts[i])) for i, p in enumerate(params)]
    whole = [list(p) for p in prompts]
    sampler = Sampler(VOCAB, NUM_ROWS, CPU)
    start(sampler, reqs, whole)
    chain.run(sampler, reqs, whole, 20)

    first = [list(p) for p in prompts]
    start(sampler, reqs, first)
    chain.run(sampler, reqs, first, cut)
    # Others use the rows meanwhile; then the requests come back on other rows, in another order, less one.
    strangers = [ReqSampling(PENALIZED[0], 9, row, 1) for row in range(5)]
    others = [[3] for _ in strangers]
    start(sampler, strangers, others)
    chain.run(sampler, strangers, others, 5)
    order = [4, 2, 0, 1]
    moved = [replace(reqs[i], row=4 - n) for n, i in enumerate(order)]
    resumed = [first[i] for i in order]
    start(sampler, moved, resumed)
    chain.run(sampler, moved, resumed, 20 - cut)
    assert resumed == [whole[i] for i in order]


def test_counts_stop_at_their_maximum_instead_of_wrapping() -> None:
    sampler, batch = (
        Sampler(VOCAB, 1, CPU),
        make_batch([ReqSampling(SamplingParams(temperature=0, frequency_penalty=1.0), 0, 0, 1)]),
    )
    sampler.begin_request(0, ids([5]), torch.full((70_000,), 5, dtype=torch.int64))
    logits = torch.full((1, VOCAB), -1e6)
    logits[0, 5], logits[0, 6] = 1e6, 20_000.0
    for position in range(3):  # counted beyond the maximum
        assert sampler.forward(logits, ids([position]), batch).next_tokens.item() == 5
    logits[0, 5] = 30_000.0  # less the maximum, 16383, is below 20000
    assert sampler.forward(logits, ids([3]), batch).next_tokens.item() == 6


def test_counts_are_allocated_at_the_first_penalised_request() -> None:
    sampler = Sampler(VOCAB, NUM_ROWS, CPU)
    sampler.forward(torch.zeros(1, VOCAB), ids([1]), make_batch([ReqSampling(SamplingParams(), 0, 0, 1)]))
    assert sampler._counts is None
    with pytest.raises(AssertionError, match="begin_request"):
        penalised = ReqSampling(PENALIZED[0], 0, 0, 1)
        sampler.forward(torch.zeros(1, VOCAB), ids([1]), make_batch([penalised]))


def test_pieces_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [*PENALIZED, *(SamplingParams(top_p=p, top_k=k) for p, k in itertools.product((0.5, 1), (-1, 9)))]
    reqs = [ReqSampling(p, 3, i, 1, return_logprob=True, top_logprobs_num=3) for i, p in enumerate(params)]
    cases: list[Case] = [(req, [1], [2, 2]) for req in reqs]
    logits = random_logits(4, len(reqs))
    whole = run_batch(logits, cases)
    monkeypatch.setattr(gumbel, "CHUNK_ELEMENTS", 3 * VOCAB)
    pieces = run_batch(logits, cases)
    assert pieces.next_tokens.tolist() == whole.next_tokens.tolist()
    assert pieces.logprobs is not None and whole.logprobs is not None
    assert torch.equal(pieces.logprobs.chosen, whole.logprobs.chosen)
    assert torch.equal(pieces.logprobs.top_logprobs, whole.logprobs.top_logprobs)
