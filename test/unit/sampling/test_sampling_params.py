"""SamplingParams: what is refused, with which remedy, and what counts as greedy."""

from __future__ import annotations

import math

import msgspec
import pytest

from fenceline.sampling.sampling_params import SamplingParams

VOCAB = 100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": math.inf}, "temperature must be a finite number"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\]"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]"),
        ({"top_k": 0}, "top_k must be -1 or at least 1"),
        ({"top_k": -2}, "top_k must be -1 or at least 1"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\]"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty must be in \[-2, 2\]"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be in \[0.001, 2\]"),
        ({"repetition_penalty": 1e-320}, r"repetition_penalty must be in \[0.001, 2\]"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be a finite number"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, r"min_new_tokens must be in \[0, max_new_tokens=4\]"),
        ({"seed": 2**63}, "seed must fit in 64 bits"),
        ({"stop": ("",)}, "stop must not have an empty string"),
        ({"stop": ("x",) * 65}, "stop may have at most 64 strings, got 65"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias token id -1 is outside the vocabulary"),
        ({"logit_bias": {3: 101.0}}, "logit_bias values must be in"),
        ({"logit_bias": {3: math.nan}}, "logit_bias values must be in"),
    ],
)
def test_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values).verify(VOCAB)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, top_k=1, top_p=1.0, min_p=1.0, max_new_tokens=0),
        SamplingParams(seed=-(2**63), stop=("x",) * 64, stop_token_ids=(0, VOCAB - 1, VOCAB, -5)),
        SamplingParams(repetition_penalty=1e-3, max_new_tokens=10**12),
        SamplingParams(logit_bias={0: -100.0, VOCAB - 1: 100.0}, repetition_penalty=2.0),
    ],
)
def test_accepted_and_sent_whole(params: SamplingParams) -> None:
    params.verify(VOCAB)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_greedy_is_temperature_zero_or_one_candidate() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-9).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(top_k=2).is_greedy


def test_needs_penalties() -> None:
    assert not SamplingParams(logit_bias={1: 2.0}).needs_penalties
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{name: 0.5}).needs_penalties
