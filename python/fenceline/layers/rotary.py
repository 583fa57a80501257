"""Rotary position embedding (RoFormer, arXiv:2104.09864) with the scalings that checkpoints use.

Frequencies are computed in float32 exactly as transformers does (``modeling_rope_utils``), because a checkpoint was
trained with those roundings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

import torch

from fenceline.config.model_config import ModelConfig, RopeScaling
from fenceline.layers.forward_batch import ForwardBatch

_MAX_STEP_ROWS = 64  # most tokens of a request in one speculative step


class RotaryEmbedding:
    """A table of cosines and sines, float32, on the default device. It has the positions below ``max_positions`` and a
    few more, because a speculative step near the end computes tokens past the last position."""

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        scaling: RopeScaling | None = None,
        partial: float = 1.0,
        interleaved: bool = False,
        axes: Sequence[int] = (),
    ) -> None:
        """``partial``: only this fraction of a head's features, from the first on, is rotated. ``interleaved``: the two
        features of a pair are adjacent in the checkpoint. Here the features of a pair always lie half a head apart, and
        features that are not rotated have angles of zero. ``order`` lists which of the checkpoint's features each of
        ours is, None if all keep their places. Reordering does not change attention scores, because queries and keys
        are reordered in the same way. ``axes``: see ``ModelConfig.rope_axes``."""
        rotated = int(head_dim * partial)
        inv_freq, attention_factor = inverse_frequencies(rotated, theta, scaling, max_positions)
        positions = torch.arange(max_positions + _MAX_STEP_ROWS, dtype=torch.float32, device="cpu")
        angles = positions[:, None] * inv_freq
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        still = len(positions), (head_dim - rotated) // 2
        cos, sin = torch.cat((cos, cos.new_ones(still)), 1), torch.cat((sin, sin.new_zeros(still)), 1)
        self.head_dim = head_dim
        # [positions, 3 * head_dim / 2]: cos twice, because it multiplies the whole head at once, then sin.
        self.table = torch.cat((cos, cos, sin), dim=-1).to(torch.get_default_device())
        self.order = _order(head_dim, rotated, interleaved)
        # By which axis each column of the table turns. (``repeat`` on the device meta would import sympy.)
        self._axes = torch.tensor([*axes, *[0] * (head_dim // 2 - len(axes))] * 3)
        self.local = self
        """The table for layers with a sliding window, which in some families have other angles."""

    def angles(self, positions: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows [T, 3 * head_dim / 2] float32 of tokens at ``positions``, one for each axis [T] int64: each column
        is that of the table at the position in the column's axis."""
        by_column = torch.stack(tuple(positions)).index_select(0, self._axes)
        return self.table.gather(0, by_column.t())

    def placed(self, batch: ForwardBatch) -> ForwardBatch:
        """``batch`` as layers read it: with ``angles`` if its positions have several axes."""
        if len(batch.positions) == 1:
            return batch
        rows = torch.arange(batch.num_tokens, device=self.table.device)
        return replace(batch, positions=(rows,), angles=self.angles(batch.positions))

    @cached_property
    def without_rotation(self) -> RotaryEmbedding:
        """A table of the same shape in which all angles are zero, for layers without position embedding."""
        other = copy(self)
        other.table = torch.cat(
            (torch.ones_like(self.table[:, : self.head_dim]), torch.zeros_like(self.table[:, self.head_dim :])), 1
        )
        return other


def make_rotary(config: ModelConfig) -> RotaryEmbedding:
    """The rotary embedding of a model, with ``local`` if layers with a window have other angles."""

    def make(theta: float, scaling: RopeScaling | None) -> RotaryEmbedding:
        partial, interleaved = config.partial_rotary_factor, config.rope_interleaved
        limit, axes = config.context_length, config.rope_axes
        return RotaryEmbedding(config.rotary_dim, limit, theta, scaling, partial, interleaved, axes)

    rotary = make(config.rope_theta, config.rope_scaling)
    if config.local_rope is not None:
        rotary.local = make(*config.local_rope)
    return rotary


def choice_by_length(config: ModelConfig) -> str | None:
    """For the log: which angles were chosen by the context length; None: the model's rule leaves no choice."""
    scaling, length = config.rope_scaling, config.context_length
    if scaling is None:
        return None
    original = scaling.original_max_position_embeddings
    compared = f"--context-length {length} is {'more than' if length > original else 'within'} the original {original}"
    if scaling.rope_type == "longrope" and scaling.short_factor != scaling.long_factor:
        chosen = f"the {'long' if length > original else 'short'} factors of longrope"
        other = f"at most {original} chooses the short ones" if length > original else "more chooses the long ones"
    elif scaling.rope_type == "dynamic":
        chosen = f"dynamic angles of sequences of {max(length, original)} tokens"
        other = "another one chooses other angles"
    else:
        return None
    return f"{chosen} for sequences of any length, because {compared}; {other}"


def _order(head_dim: int, rotated: int, interleaved: bool) -> tuple[int, ...] | None:
    features = range(rotated)
    first = features[::2] if interleaved else features[: rotated // 2]
    second = features[1::2] if interleaved else features[rotated // 2 :]
    middle = (head_dim + rotated) // 2
    order = (*first, *range(rotated, middle), *second, *range(middle, head_dim))
    return None if order == tuple(range(head_dim)) else order


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, context_length: int = 0
) -> tuple[torch.Tensor, float]:
    """``(frequencies [head_dim / 2] float32 on the CPU, factor of cos and sin)``. With longrope and dynamic scaling
    they depend on the length of a sequence in transformers. Here ``context_length`` takes its place, so that a position
    has the same angle in all sequences and cached keys stay valid."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / (theta**exponents)
    if scaling is None:
        return inv_freq, 1.0
    original = scaling.original_max_position_embeddings
    if scaling.rope_type == "dynamic":
        stretch = scaling.factor * max(context_length, original) / original - (scaling.factor - 1)
        return 1.0 / ((theta * stretch ** (head_dim / max(head_dim - 2, 1))) ** exponents), 1.0
    if scaling.rope_type == "longrope":
        divisors = scaling.long_factor if context_length > original else scaling.short_factor
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32, device="cpu") * theta**exponents), (
            _longrope_attention_factor(scaling)
        )
    if scaling.rope_type == "linear":
        return inv_freq / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    assert scaling.rope_type == "yarn", scaling.rope_type
    return _yarn(head_dim, theta, scaling), _yarn_attention_factor(scaling)


def _llama3(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by ``factor``, short ones kept, and those between interpolated."""
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    slowed = inv_freq / scaling.factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = (original / wavelength - scaling.low_freq_factor) / span
    blended = (1 - keep) * inv_freq / scaling.factor + keep * inv_freq
    result = torch.where(wavelength > original / scaling.low_freq_factor, slowed, blended)
    return torch.where(wavelength < original / scaling.high_freq_factor, inv_freq, result)


def _yarn(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): a linear ramp over the dimensions from extrapolation to interpolation."""

    def dimension_of(num_rotations: float) -> float:
        ratio = scaling.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # otherwise a ramp of length 0 would divide by zero
    steps = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    extrapolated = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    waves = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    return 1.0 / (scaling.factor * waves) * (1 - extrapolated) + 1.0 / waves * extrapolated


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    """LongRoPE's factor of cos and sin (arXiv:2402.13753), the same for short and long sequences."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """YaRN's temperature on the attention logits. Cos and sin are each multiplied by its square root (section 3.3)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    # transformers ignores attn_factor. The models that have it were published for SGLang and vLLM, which do not.
    if scaling.mscale and scaling.mscale_all_dim:
        both = yarn_mscale(scaling, scaling.mscale), yarn_mscale(scaling, scaling.mscale_all_dim)
        return scaling.attn_factor * both[0] / both[1]
    return scaling.attn_factor * yarn_mscale(scaling, 1.0)


def yarn_mscale(scaling: RopeScaling, weight: float) -> float:
    """The square root of YaRN's temperature, whose logarithmic part is multiplied by ``weight``."""
    return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0
