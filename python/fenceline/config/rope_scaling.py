"""Rotary position scaling as config.json describes it, in the old notation and in transformers 5's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fenceline.config.errors import ConfigError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Parameters of one scaling rule. ``rope_type`` is linear, llama3 or yarn; fields that a rule does not use keep
    their defaults. ``original_max_position_embeddings`` is in tokens and set for llama3 and yarn."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int = 0
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn; attention_factor None: derived from factor (and mscale) as the paper says
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


def parse_rope(hf: Mapping[str, object], max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """``(rope_theta, scaling)`` of a config.json; scaling None means plain RoPE.

    transformers 5 writes one dict ``rope_parameters`` with ``rope_theta`` inside, older versions ``rope_scaling``
    beside ``rope_theta``; as in transformers ``rope_scaling`` wins where both are there. Raises ``ConfigError``.
    """
    raw = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"config.json: rope_scaling must be an object, got {raw!r}")
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise ConfigError("config.json: rope parameters that differ by layer type are not supported")
    if _number(raw, "partial_rotary_factor", _number(hf, "partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor other than 1 is not supported")
    theta = _number(raw, "rope_theta", _number(hf, "rope_theta", DEFAULT_ROPE_THETA))
    if theta <= 1.0:
        raise ConfigError(f"config.json: rope_theta must be above 1, got {theta:g}")
    rope_type = str(raw.get("rope_type") or raw.get("type") or "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ConfigError(
            f"rope type {rope_type!r} is not supported; --json-model-override-args "
            f"'{{\"rope_scaling\": ...}}' can choose one of {', '.join(SUPPORTED_ROPE_TYPES[1:])}"
        )
    if rope_type == "default":
        return theta, None
    return theta, _scaling(rope_type, raw, hf, max_position_embeddings)


def _scaling(
    rope_type: str, raw: Mapping[str, object], hf: Mapping[str, object], max_position_embeddings: int
) -> RopeScaling:
    if raw.get("factor") is None:
        raise ConfigError(f"config.json: rope scaling of type {rope_type!r} needs a factor")
    factor = _number(raw, "factor", 1.0)
    if factor < 1.0:
        raise ConfigError(f"config.json: the rope scaling factor must be at least 1, got {factor:g}")
    # A top-level value wins over the one inside the dict, as in transformers (Phi-3 writes it there).
    inside = _number(raw, "original_max_position_embeddings", float(max_position_embeddings))
    original = _number(hf, "original_max_position_embeddings", inside)
    attention_factor = None if raw.get("attention_factor") is None else _number(raw, "attention_factor", 1.0)
    scaling = RopeScaling(
        rope_type=rope_type,
        factor=factor,
        original_max_position_embeddings=int(original),
        low_freq_factor=_number(raw, "low_freq_factor", 1.0),
        high_freq_factor=_number(raw, "high_freq_factor", 4.0),
        attention_factor=attention_factor,
        beta_fast=_number(raw, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(raw, "beta_slow", 1.0) or 1.0,
        mscale=_number(raw, "mscale", 0.0),
        mscale_all_dim=_number(raw, "mscale_all_dim", 0.0),
        truncate=raw.get("truncate") is not False,
    )
    if scaling.original_max_position_embeddings < 1:
        raise ConfigError("config.json: original_max_position_embeddings must be at least 1")
    if rope_type == "llama3" and not 0.0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise ConfigError("config.json: llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor")
    return scaling


def scaled_context_length(max_position_embeddings: int, scaling: RopeScaling | None) -> int:
    """Tokens that the scaled positions reach. Linear and yarn configs written by hand often leave
    ``max_position_embeddings`` at the length before scaling; llama3 ones give the final length."""
    if scaling is None or scaling.rope_type == "llama3":
        return max_position_embeddings
    if scaling.rope_type == "linear":
        return int(max_position_embeddings * scaling.factor)
    return max(max_position_embeddings, int(scaling.original_max_position_embeddings * scaling.factor))


def _number(values: Mapping[str, object], key: str, default: float) -> float:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"config.json: {key} must be a finite number, got {value!r}")
    return float(value)
