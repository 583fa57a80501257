"""Sampling of random batches on the CPU: each request's tokens are those that the oracle draws for it alone, and its
filters keep the tokens that they must.

A run's requests have few kinds of parameters, and one wrong token more or less in a filter is seldom drawn.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from random import Random

import numpy as np
import numpy.typing as npt
import torch

from fenceline.sampling.sampler import Sampler, TokenCounts, keep_thresholds
from fenceline.sampling.sampling_batch import ReqSampling, SamplingBatch, sampling_arrays
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.vgpu.proving.limits import small_limits
from fenceline.vgpu.proving.oracle import Query, choose, kept

_NUM_BATCHES = 3
_NUM_STEPS = 2
_NUM_ROWS = 7
_MOST_COUNTED = 2**14 - 1  # of one token in a request's output
_INDICES = ("filter_index", "penalty_index", "logprob_index")


def compare_sampling(random: Random) -> str:
    """The first wrong token or filter, "" if there is none."""
    with small_limits() if random.random() < 0.5 else nullcontext():
        for _ in range(_NUM_BATCHES):
            wrong = _compare(random)
            if wrong:
                return f"sampling: {wrong}"
    wrong = _compare_unpenalized(random)
    return f"sampling: {wrong}" if wrong else ""


def _compare_unpenalized(random: Random) -> str:
    """Penalties change the logits of the tokens that they are for, and no others."""
    vocab_size, num_reqs = 16, 3
    generator = np.random.default_rng(random.getrandbits(32))
    counts = TokenCounts(_NUM_ROWS, vocab_size, torch.device("cpu"))
    rows = random.sample(range(_NUM_ROWS), num_reqs)
    prompts, outputs = (
        [random.sample(range(vocab_size), random.randint(1, 5)) for _ in range(num_reqs)] for _ in range(2)
    )
    for row, prompt, output in zip(rows, prompts, outputs, strict=True):
        counts.begin(row, torch.tensor(prompt), torch.tensor(output))
    logits = torch.from_numpy(_logits(random, generator, (num_reqs, vocab_size)))
    repetition, frequency, presence = (
        torch.tensor([random.choice((neutral, other)) for _ in range(num_reqs)])
        for neutral, other in ((1.0, 1.3), (0.0, 0.7), (0.0, -0.4))
    )
    penalized = counts.apply(logits, torch.tensor(rows), repetition, frequency, presence)
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        changed = set(np.flatnonzero((penalized[index] != logits[index]).numpy()).tolist())
        may_change = set(output) if frequency[index] or presence[index] else set()
        may_change |= {*prompt, *output} if repetition[index] != 1 else set()
        if not changed <= may_change:
            return f"penalties change the logits of {sorted(changed - may_change)}, which they are not for"
    return ""


def _compare(random: Random) -> str:
    vocab_size = random.choice((4, 30, 64))
    generator = np.random.default_rng(random.getrandbits(32))
    sampler = Sampler(vocab_size, _NUM_ROWS, torch.device("cpu"))
    alike = random.random() < 0.3  # all requests with the same kinds of parameters
    kinds = random.getrandbits(5)
    reqs, prompts, outputs = [], [], []
    for row in random.sample(range(_NUM_ROWS), random.randint(1, 5)):
        prompt = [random.randrange(vocab_size) for _ in range(random.randint(1, 6))]
        output = [random.randrange(vocab_size) for _ in range(random.randrange(6))]
        if random.random() < 0.1:
            output += [random.randrange(vocab_size)] * (_MOST_COUNTED + random.randint(-1, 40))
        params = _params(random, vocab_size, kinds if alike else random.getrandbits(5), len(output))
        stops = tuple(random.sample(range(vocab_size), 2)) if params.min_new_tokens else (0, 1)
        wants = bool(kinds & 1 if alike else random.getrandbits(1))
        reqs.append(
            ReqSampling(params, random.getrandbits(63), row, len(prompt), stops, return_logprob=wants)
        )
        prompts.append(prompt)
        outputs.append(output)
        if params.needs_penalties:
            sampler.begin_request(row, torch.tensor(prompt), torch.tensor(output, dtype=torch.int64))
    arrays = sampling_arrays(reqs)
    for name in _INDICES:
        if name in arrays and not 0 < len(arrays[name]) < len(reqs):
            return f"{name} {arrays[name]} names none or all of {len(reqs)} requests"
    masked = {index for index, req in enumerate(reqs) if req.params.min_new_tokens}
    if {*arrays.get("stop_index", np.empty(0)).tolist()} != masked:
        return f"stop_index {arrays.get('stop_index')} is given, requests {masked} must not end yet"
    batch = SamplingBatch.from_views(reqs, {name: torch.from_numpy(one) for name, one in arrays.items()})
    queries = [_query(req, prompt) for req, prompt in zip(reqs, prompts, strict=True)]
    for _ in range(_NUM_STEPS):
        logits = _logits(random, generator, (len(reqs), vocab_size))
        positions = torch.tensor([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)])
        tokens = sampler.forward(torch.from_numpy(logits), positions, batch).next_tokens.tolist()
        for index, token in enumerate(tokens):
            step = choose(logits[index].astype(np.float64), *_counted(queries[index], outputs[index]))
            if token not in step.close | {step.token}:
                return (
                    f"{token} is drawn in place of {step.token} for {reqs[index]} after {outputs[index][-8:]}"
                )
            outputs[index].append(token)
    return _compare_filters(batch, queries, _logits(random, generator, (len(reqs), vocab_size)))


def _compare_filters(batch: SamplingBatch, queries: list[Query], logits: npt.NDArray[np.float32]) -> str:
    scaled = logits - logits.max(axis=1, keepdims=True)
    thresholds = keep_thresholds(torch.from_numpy(scaled), batch)
    for index, (query, scores) in enumerate(zip(queries, scaled, strict=True)):
        if query.greedy:
            continue
        mine = np.full(len(scores), True) if thresholds is None else scores >= thresholds[index].item()
        _, surely, perhaps = kept(scores.astype(np.float64), query)
        if (surely & ~mine).any() or (mine & ~perhaps).any():
            return f"{np.sort(scores[mine])} are kept of {np.sort(scores)} for {query}"
    return ""


def _logits(
    random: Random, generator: np.random.Generator, shape: tuple[int, int]
) -> npt.NDArray[np.float32]:
    """Some with ties."""
    found = generator.normal(0, random.choice((0.5, 3.0)), shape)
    return (np.round(found * 4) / 4 if random.random() < 0.4 else found).astype(np.float32)


def _params(random: Random, vocab_size: int, kinds: int, num_outputs: int) -> SamplingParams:
    """``kinds``: a bit for each kind of parameters."""
    options: dict[str, object] = {"temperature": random.choice((0.0, 0.5, 1.0, 1.7)) if kinds & 1 else 0.0}
    if kinds & 2:
        options["top_k"] = random.choice((-1, 1, 2, vocab_size - 1, vocab_size, vocab_size + 1))
    if kinds & 4:
        options |= {
            "top_p": random.choice((1e-9, 0.3, 0.7, 0.95, 1.0)),
            "min_p": random.choice((0.0, 0.05, 0.3)),
        }
    if kinds & 8:
        options |= {"repetition_penalty": random.choice((0.7, 1.0, 1.5)), "presence_penalty": 0.3}
        options["frequency_penalty"] = random.choice((0.0, -0.2, 0.4, 1e-4))
    if kinds & 16:
        options["min_new_tokens"] = num_outputs + random.randint(1, 2)
        options["logit_bias"] = {random.randrange(vocab_size): 2.5, random.randrange(vocab_size): -2.0}
    return SamplingParams(**options)  # type: ignore[arg-type]


def _query(req: ReqSampling, prompt: list[int]) -> Query:
    params = req.params
    return Query(
        tuple(prompt),
        req.seed,
        frozenset(req.stop_ids),
        min_new_tokens=params.min_new_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=tuple((params.logit_bias or {}).items()),
    )


def _counted(query: Query, outputs: list[int]) -> tuple[Query, list[int]]:
    """The same without the occurrences of a token that are not counted. The position, and the number of tokens until
    the answer may end, stay what they are."""
    if len(outputs) <= _MOST_COUNTED:
        return query, outputs
    token = outputs[_MOST_COUNTED // 2]
    surplus = max(outputs.count(token) - _MOST_COUNTED, 0)
    outputs = [*outputs]
    for _ in range(surplus):
        outputs.remove(token)
    prompt = (*query.prompt, *query.prompt[:1] * surplus)
    return replace(query, prompt=prompt, min_new_tokens=query.min_new_tokens - surplus), outputs
