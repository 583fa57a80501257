"""The random draw: Gumbel-max with noise that is a pure function of (seed, position, token id). There are also
functions that split work on [rows, vocabulary] tensors into pieces of rows.

``argmax_i(s_i + g_i)`` with independent standard Gumbel ``g_i`` is a draw from ``softmax(s)`` (Gumbel 1954). There is
no generator state: the noise is a counter-based hash, so a request draws the same tokens in any batch, on any row,
and again after it was retracted. All integer arithmetic wraps in two's complement, with the same bits on CPU and CUDA.

For each element, the hash is the 32-bit finaliser ``lowbias32`` (C. Wellons, hash-prospector, public domain) of
``token_id * odd + key_a``, with ``key_b`` mixed in between its two rounds. Both keys come from splitmix64's finaliser
(Steele, Lea, Flood 2014) of the mixed seed and the position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_TOKEN_STRIDE = 0x9E3779B1  # odd, so that distinct ids remain distinct
_ROUND_A = 0x7FEB352D
_ROUND_B = 0x846CA68B
_MASK_64 = 2**64 - 1

# 16 MiB of float32: small compared with any model, within a large GPU's L2 cache, and so large that the time of
# launches does not matter.
CHUNK_ELEMENTS = 1 << 22


def row_chunks(num_rows: int, num_columns: int) -> list[slice]:
    """Slices that split ``num_rows`` rows into pieces of at most ``CHUNK_ELEMENTS`` elements, and at least one row."""
    step = max(1, CHUNK_ELEMENTS // max(1, num_columns))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def take_rows(values: torch.Tensor, index: torch.Tensor | None, rows: slice) -> torch.Tensor:
    """A copy of the rows ``index[rows]`` of ``values``; if ``index`` is None, a view of the rows ``rows``."""
    return values[rows] if index is None else values.index_select(0, index[rows])


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN_I64, _MIX_A_I64, _MIX_B_I64 = (_signed(c, 64) for c in (_GOLDEN, _MIX_A, _MIX_B))
_TOKEN_STRIDE_I32, _ROUND_A_I32, _ROUND_B_I32 = (_signed(c, 32) for c in (_TOKEN_STRIDE, _ROUND_A, _ROUND_B))


def mix_seeds(seeds: Sequence[int]) -> npt.NDArray[np.int64]:
    """Hash 64-bit seeds on the host, so that similar seeds (0, 1, 2, ...) give unrelated keys. Returns [B] int64."""
    z = np.array([seed & _MASK_64 for seed in seeds], np.uint64)
    z += np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_A)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_B)
    return (z ^ (z >> np.uint64(31))).view(np.int64)


def uniform(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) [B] float64, a hash of ``keys`` and ``positions`` [B] int64."""
    return (_row_keys(keys, positions)[0] & 0x7FFFFFFF).double() * 2.0**-31


class GumbelSampler:
    """Draws tokens. Its only state is a constant [V] int32 tensor, which is written at construction."""

    def __init__(
        self, vocab_size: int, device: torch.device, first_id: int = 0, token_ids: torch.Tensor | None = None
    ) -> None:
        """``first_id``: the token id of the first column, if the columns are only a part of the vocabulary.
        ``token_ids`` [V] int64: the token id of each column, if they are not ``first_id`` and following."""
        if token_ids is None:
            token_ids = torch.arange(first_id, first_id + vocab_size, dtype=torch.int32, device=device)
        # Computed on the device: a capture may make a sampler too.
        self._token_terms = token_ids.to(torch.int32) * _TOKEN_STRIDE_I32
        # CUDA evaluates log the same way for every element. CPU libraries do not (a vectorised loop with a scalar
        # tail), so the last bit could depend on a row's place in the batch. Computing in float64 and rounding hides
        # that.
        self._dtype = torch.float32 if device.type == "cuda" else torch.float64

    def draw(
        self,
        scaled: torch.Tensor,
        seed_keys: torch.Tensor,
        positions: torch.Tensor,
        noise_scales: torch.Tensor | None = None,
        thresholds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw one token from each row of ``softmax(scaled)``. ``scaled`` [B, V] float32: logits / temperature (not
        changed). ``seed_keys`` [B] int64 from :func:`mix_seeds`. ``positions`` [B] int64. ``noise_scales`` [B] float32:
        with 0 a row's token is the arg-max (of equal scores the lowest id). ``thresholds`` [B] float32: tokens with a
        lower score are not drawn as long as there is another. Returns [B] int64, always within the vocabulary, even for
        NaN."""
        pieces = [
            scores.argmax(dim=-1) for scores in self._noisy(scaled, seed_keys, positions, noise_scales, thresholds)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def best(
        self,
        scaled: torch.Tensor,
        seed_keys: torch.Tensor,
        positions: torch.Tensor,
        noise_scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row the highest score with noise [B] float32, and its column [B] int64, which :meth:`draw` would
        choose. If several samplers each have a part of the vocabulary, the highest of their scores is that of the
        token drawn from the whole vocabulary."""
        pieces = [scores.max(dim=-1) for scores in self._noisy(scaled, seed_keys, positions, noise_scales, None)]
        return torch.cat([best.values for best in pieces]), torch.cat([best.indices for best in pieces])

    def topk(
        self,
        scaled: torch.Tensor,
        seed_keys: torch.Tensor,
        positions: torch.Tensor,
        num: int,
        noise_scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The ``num`` highest scores of each row with noise [B, num] float32, their columns [B, num] int64, beginning
        with that of :meth:`draw`, and the logarithm of the sum of all columns' exponentials [B, 1] float32."""
        values, columns, totals = [], [], []
        for scores in self._noisy(scaled, seed_keys, positions, noise_scales, None):
            best = scores.topk(num, dim=-1)
            values.append(best.values)
            columns.append(best.indices)
            totals.append(scores.logsumexp(dim=-1, keepdim=True))
        return torch.cat(values), torch.cat(columns), torch.cat(totals)

    def _noisy(
        self,
        scaled: torch.Tensor,
        seed_keys: torch.Tensor,
        positions: torch.Tensor,
        noise_scales: torch.Tensor | None,
        thresholds: torch.Tensor | None,
    ) -> Iterator[torch.Tensor]:
        """Yields the scores with noise, [rows, V] float32, some rows at a time; -inf for tokens below the threshold."""
        key_a, key_b = _row_keys(seed_keys, positions)
        for rows in row_chunks(*scaled.shape):
            scores = scaled[rows]
            noise = self._noise(key_a[rows], key_b[rows])
            if noise_scales is not None:
                noise.mul_(noise_scales[rows, None])
            noise.add_(scores)
            if thresholds is not None:
                noise.masked_fill_(scores < thresholds[rows, None], -torch.inf)
            yield noise

    def _noise(self, key_a: torch.Tensor, key_b: torch.Tensor) -> torch.Tensor:
        """Standard Gumbel noise [rows, V] float32, finite."""
        bits = self._hash(key_a, key_b).bitwise_and_(0x7FFFFFFF)
        # The upper tail of the noise decides whether rare tokens can win, so it must be precise. It comes from v near
        # 0, where v in (0, 1) has full precision: E = -log(1 - v) is exponential, and g = -log(E) is at most 22.2.
        v = bits.to(self._dtype).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
        return v.neg_().log1p_().neg_().log_().neg_().to(torch.float32)

    def _hash(self, key_a: torch.Tensor, key_b: torch.Tensor) -> torch.Tensor:
        """[rows, V] int32 of uniform bits."""
        x = self._token_terms + key_a[:, None]
        shifted = torch.empty_like(x)
        _xor_shift_(x, shifted, 16, 32).mul_(_ROUND_A_I32).bitwise_xor_(key_b[:, None])
        _xor_shift_(x, shifted, 15, 32).mul_(_ROUND_B_I32)
        return _xor_shift_(x, shifted, 16, 32)


def _row_keys(seed_keys: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [B] int32 keys of each (seed, position)."""
    z = torch.add(seed_keys, positions, alpha=_GOLDEN_I64)
    shifted = torch.empty_like(z)
    _xor_shift_(z, shifted, 30, 64).mul_(_MIX_A_I64)
    _xor_shift_(z, shifted, 27, 64).mul_(_MIX_B_I64)
    _xor_shift_(z, shifted, 31, 64)
    high = z >> 32  # arithmetic: the upper half as a signed 32-bit number
    low = (z << 32) >> 32
    return high.to(torch.int32), low.to(torch.int32)


def _xor_shift_(x: torch.Tensor, scratch: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
    """``x ^= x >> shift`` in place, with a logical shift: the mask drops the sign bits that torch shifts in."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (bits - shift)) - 1))
