"""The draw itself: the hash bit by bit, its distribution, its independence of everything but (seed, position)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fenceline.sampling import gumbel
from fenceline.sampling.gumbel import GumbelSampler, mix_seeds

CPU = torch.device("cpu")
M32, M64 = 2**32 - 1, 2**64 - 1


def _splitmix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def _reference_bits(seed: int, position: int, token: int) -> int:
    """The documented hash in unbounded Python integers."""
    seed_key = _splitmix((seed + 0x9E3779B97F4A7C15) & M64)
    key = _splitmix((seed_key + position * 0x9E3779B97F4A7C15) & M64)
    key_a, key_b = key >> 32, key & M32
    x = (token * 0x9E3779B1 + key_a) & M32
    x ^= x >> 16
    x = (x * 0x7FEB352D & M32) ^ key_b
    x ^= x >> 15
    x = x * 0x846CA68B & M32
    return x ^ (x >> 16)


def _bits(sampler: GumbelSampler, seeds: list[int], positions: list[int]) -> torch.Tensor:
    keys = gumbel._row_keys(torch.from_numpy(mix_seeds(seeds)), torch.tensor(positions))
    return sampler._hash(*keys)


def _draw(
    logits: torch.Tensor, seeds: list[int], positions: list[int], sampler: GumbelSampler | None = None
) -> torch.Tensor:
    sampler = sampler or GumbelSampler(logits.shape[1], CPU)
    return sampler.draw(logits, torch.from_numpy(mix_seeds(seeds)), torch.tensor(positions))


def _chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Standardised chi-square: about N(0, 1) if ``expected`` is right (Wilson-Hilferty)."""
    statistic, dof = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    return ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 2**31))
def test_hash_is_the_documented_one(seed: int, position: int) -> None:
    got = _bits(GumbelSampler(50, CPU), [seed], [position])[0]
    assert [int(x) & M32 for x in got] == [_reference_bits(seed, position, t) for t in range(50)]


def test_noise_is_finite_at_the_ends_of_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0, -1, 2**31 - 1, -(2**31), 1, 2**31 - 2]], dtype=torch.int32)
    for dtype in (torch.float32, torch.float64):
        sampler = GumbelSampler(6, CPU)
        sampler._dtype = dtype
        monkeypatch.setattr(sampler, "_hash", lambda *_: ends.clone())
        noise = sampler._noise(torch.zeros(1), torch.zeros(1))
        assert torch.isfinite(noise).all()
        assert noise.max() == pytest.approx(math.log(2**32), rel=1e-6)


def test_noise_is_standard_gumbel() -> None:
    sampler = GumbelSampler(1000, CPU)
    keys = gumbel._row_keys(torch.from_numpy(mix_seeds(list(range(300)))), torch.arange(300))
    noise = sampler._noise(*keys).double()
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    sorted_noise = noise.flatten().sort().values
    cdf = torch.exp(-torch.exp(-sorted_noise))
    steps = torch.arange(1, len(cdf) + 1, dtype=torch.float64) / len(cdf)
    assert (cdf - steps).abs().max().item() < 1.95 / math.sqrt(len(cdf))  # Kolmogorov-Smirnov, p = 0.001


@pytest.mark.parametrize("vary", ["position", "seed", "both"])
def test_draws_follow_the_softmax(vary: str) -> None:
    num, vocab = 40_000, 24
    logits = torch.linspace(0.0, 4.0, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(1))]
    seeds = list(range(num)) if vary != "position" else [7] * num
    positions = list(range(num)) if vary != "seed" else [12] * num
    tokens = _draw(logits.expand(num, vocab), seeds, positions)
    observed = np.bincount(tokens.numpy(), minlength=vocab)
    expected = torch.softmax(logits.double(), 0).numpy() * num
    assert abs(_chi_square(observed, expected)) < 4


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (1, 1), (1, -1), (2**32, 0)])
def test_neighbouring_draws_are_independent(seed_step: int, position_step: int) -> None:
    num, vocab = 32_000, 8
    logits = torch.zeros(num, vocab)
    seeds, positions = list(range(0, 3 * num, 3)), [5 + (i * 7919) % 4096 for i in range(num)]
    first = _draw(logits, seeds, positions)
    second = _draw(logits, [s + seed_step for s in seeds], [p + position_step for p in positions])
    observed = np.bincount((first * vocab + second).numpy(), minlength=vocab * vocab)
    assert abs(_chi_square(observed, np.full(vocab * vocab, num / vocab**2))) < 4


def test_rare_tokens_get_their_share() -> None:
    """One common token against 4095 rare ones that hold 1% together: the noise's tail is fine enough."""
    num, vocab = 4_000, 4096
    logits = torch.full((vocab,), math.log(0.01 / (vocab - 1)))
    logits[100] = math.log(0.99)
    tokens = _draw(logits.expand(num, vocab), [3] * num, list(range(num)))
    assert (tokens != 100).sum().item() == pytest.approx(0.01 * num, abs=4 * math.sqrt(0.01 * num))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([2, 7, 64, 333, 1000]), batch=st.integers(1, 9))
def test_a_row_draws_alike_in_any_batch(data: st.DataObject, vocab: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(batch, vocab, generator=generator)
    seeds = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=batch, max_size=batch))
    positions = data.draw(st.lists(st.integers(0, 100_000), min_size=batch, max_size=batch))
    order = data.draw(st.permutations(range(batch)))
    sampler = GumbelSampler(vocab, CPU)
    together = _draw(logits, seeds, positions, sampler)
    shuffled = _draw(logits[order], [seeds[i] for i in order], [positions[i] for i in order], sampler)
    assert shuffled.tolist() == together[list(order)].tolist()
    for i in range(batch):
        assert _draw(logits[i : i + 1], [seeds[i]], [positions[i]], sampler).item() == together[i]


def test_noise_bits_do_not_depend_on_the_place_in_the_batch() -> None:
    sampler = GumbelSampler(1003, CPU)  # odd: every row starts at another vector lane
    key_a, key_b = gumbel._row_keys(torch.from_numpy(mix_seeds(list(range(9)))), torch.arange(9))
    together = sampler._noise(key_a, key_b)
    for i in range(9):
        assert torch.equal(sampler._noise(key_a[i : i + 1], key_b[i : i + 1])[0], together[i])


def test_pieces_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(11, 50, generator=torch.Generator().manual_seed(0))
    seeds, positions = list(range(11)), list(range(11))
    whole = _draw(logits, seeds, positions)
    monkeypatch.setattr(gumbel, "CHUNK_ELEMENTS", 120)
    assert _draw(logits, seeds, positions).tolist() == whole.tolist()


@given(rows=st.integers(0, 50), columns=st.integers(1, 2**23))
def test_row_chunks_cover_each_row_once(rows: int, columns: int) -> None:
    chunks = gumbel.row_chunks(rows, columns)
    assert [i for c in chunks for i in range(c.start, c.stop)] == list(range(rows))
    assert all((c.stop - c.start) * columns <= gumbel.CHUNK_ELEMENTS or c.stop - c.start == 1 for c in chunks)
