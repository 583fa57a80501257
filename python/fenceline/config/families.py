"""The supported model families by the architecture in config.json, and how each reads the entries that differ. What
they compute is in ``models/``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from fenceline.config import ConfigError
from fenceline.config.config_reader import ConfigReader
from fenceline.config.quantization import QuantConfig
from fenceline.config.vision import VisionConfig, gemma3, qwen2_5_vl, qwen3_vl

_MISTRAL_WINDOW = 4096  # transformers' default where config.json has no sliding_window


# What the names of multi-token prediction layers begin with that are stored behind the model's last layer, or in a
# module of their own.
APPENDED_MTP, OWN_MTP = "model.layers.", "mtp.layers."


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts of a model: ``num_experts`` MLPs of ``intermediate_size``. Each token goes through
    ``top_k`` of them.

    ``sigmoid``: a token's score for an expert is the sigmoid of its logit, otherwise the softmax over all logits. The
    experts are divided into ``num_groups`` groups of equal size, and a token's experts are chosen from its best
    ``top_groups`` groups; a group's score is the sum of those of its ``scored_by`` best experts. ``renormalise``: the
    scores of a token's experts are divided by their sum. Then they are multiplied by ``scaling``. ``shared_size`` is
    the intermediate size of the expert that all tokens go through (0: there is none). ``dense_layers`` have a dense
    MLP. ``limit`` is that of a clamped SwiGLU (0: a plain one). ``format`` is the number format of the experts'
    matrices if only these are quantised. ``latent_size``: the features of a projection of the hidden state that experts
    read, and of what they make, which another one projects back (0: they read the hidden state).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    sigmoid: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scored_by: int = 2
    scaling: float = 1.0
    shared_size: int = 0
    limit: float = 0.0
    format: QuantConfig | None = None
    latent_size: int = 0
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"config.json: num_experts_per_tok {self.top_k} is more than the {self.num_experts} experts"
            )
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ConfigError(
                f"config.json: {self.num_experts} experts in n_group {self.num_groups} groups, topk_group"
                f" {self.top_groups} of them: the groups must be of equal size and enough"
            )
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ConfigError(
                f"config.json: topk_group {self.top_groups} groups hold fewer than num_experts_per_tok {self.top_k}"
                " experts"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), with the names of config.json. A token keeps one row
    of ``kv_lora_rank`` + ``qk_rope_head_dim`` features, which all heads share. A head's key has ``qk_nope_head_dim``
    features and its value ``v_head_dim``, both products of the first part of the row; the second part, which is
    rotated, follows each key. Queries are products of a vector of ``q_lora_rank`` features; None: of the hidden
    state."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        """Features of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def width(self) -> int:
        """Features of a token's row."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Sparse attention over latents (DeepSeek-V3.2, arXiv:2512.02556): a query attends to the ``top_k`` tokens that an
    indexer with ``num_heads`` heads of ``head_dim`` features gives the best scores, to all if there are no more. The
    first features of a head rotate as the latent does: in pairs of adjacent ones if ``interleaved``, else in halves.
    ``layers`` have an indexer. Every other layer attends to the tokens that the last of these has selected."""

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksConfig:
    """Sparse attention to blocks of ``size`` tokens (InfLLM-V2, arXiv:2509.24663). With each key head a query attends
    to ``top_k`` of the blocks that it sees, to all if there are no more: to the ``first`` ones of the sequence, its own
    and the ``local`` before it, and to those with the best scores. A score comes from means of ``width`` keys, one
    begins at every ``stride``-th token: see ``block_selection``."""

    size: int
    top_k: int
    first: int
    local: int
    width: int
    stride: int

    def __post_init__(self) -> None:
        if self.size % self.stride or self.width % self.stride or self.stride < 2:
            raise ConfigError(
                f"config.json: block_size {self.size} and kernel_size {self.width} must be multiples of kernel_stride"
                f" {self.stride}, which is at least 2"
            )
        if self.first + self.local + 1 > self.top_k:
            raise ConfigError(
                f"config.json: {self.first} blocks of init_blocks and {self.local + 1} of window_size are more than the"
                f" {self.top_k} to which a query attends"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """Layers that carry a state in place of attending to all tokens, each with a convolution over ``taps`` tokens (0:
    none). Each of ``num_heads`` has a state of [key_dim, value_dim], and ``num_key_heads`` share out the queries and
    keys; without heads the convolution is all. ``mlp_layers`` have neither a state nor attention: they are an MLP
    alone. ``step_limits``: the least and the greatest time step of Mamba2."""

    layers: frozenset[int]
    taps: int = 0
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    mlp_layers: frozenset[int] = frozenset()
    step_limits: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """The factors of embeddings, branches, logits and attention scores. ``attention`` None: head_dim ** -0.5."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention: float | None = None


def _no_multipliers(reader: ConfigReader) -> Multipliers:
    return Multipliers()


def _granite_multipliers(reader: ConfigReader) -> Multipliers:
    divisor = reader.number("logits_scaling", 1.0)
    if divisor <= 0.0:
        raise ConfigError(f"config.json: logits_scaling must be above 0, got {divisor:g}")
    return Multipliers(
        embedding=reader.number("embedding_multiplier", 1.0),
        residual=reader.number("residual_multiplier", 1.0),
        logits=1.0 / divisor,
        attention=reader.number("attention_multiplier", 1.0),
    )


def _none_unrotated(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    return frozenset()


def _all_unrotated(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    return frozenset(range(num_layers))


def _smollm3_unrotated(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    """The layers without rotation: ``no_rope_layers`` has a 1 for each layer that does rotate, despite its name."""
    rotates = reader.numbers("no_rope_layers")
    reader.overridden("no_rope_layer_interval")
    if not rotates:
        every = reader.size("no_rope_layer_interval", 4)
        rotates = tuple(int((i + 1) % every != 0) for i in range(num_layers))
    if len(rotates) < num_layers:
        raise ConfigError(f"config.json: no_rope_layers tells of {len(rotates)} layers, the model has {num_layers}")
    return frozenset(i for i in range(num_layers) if not rotates[i])


# The sliding window of each layer, None if it attends to all tokens; empty: no layer has one.
Windows = tuple[int | None, ...]


def _no_windows(reader: ConfigReader, num_layers: int) -> Windows:
    return ()


def _by_layer(reader: ConfigReader, num_layers: int, window: int, slides: Callable[[int], bool]) -> Windows:
    """Windows by layer: ``layer_types`` in config.json says which layers have it; without it ``slides`` does."""
    kinds = reader.strings("layer_types")
    if kinds and len(kinds) < num_layers:
        raise ConfigError(f"config.json: layer_types tells of {len(kinds)} layers, the model has {num_layers}")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ConfigError(f"config.json: layer_types {', '.join(sorted(unknown))} are not supported")
    if kinds:
        return tuple(window if kinds[i] == "sliding_attention" else None for i in range(num_layers))
    return tuple(window if slides(i) else None for i in range(num_layers))


def _mistral_windows(reader: ConfigReader, num_layers: int) -> Windows:
    if "sliding_window" in reader.values and reader.values["sliding_window"] is None:
        return ()
    return (reader.size("sliding_window", _MISTRAL_WINDOW),) * num_layers


def _plain_windows(reader: ConfigReader, num_layers: int) -> Windows:
    if reader.values.get("sliding_window") is None:
        return ()
    return (reader.size("sliding_window"),) * num_layers


def _qwen_windows(reader: ConfigReader, num_layers: int) -> Windows:
    """Some layers have a window, but only if use_sliding_window is true."""
    if not reader.switch("use_sliding_window"):
        reader.overridden("sliding_window", "max_window_layers")
        return ()
    first = 0 if reader.values.get("max_window_layers") == 0 else reader.size("max_window_layers", 28)
    return _by_layer(reader, num_layers, reader.size("sliding_window", 4096), lambda i: i >= first)


def _qwen2_moe_windows(reader: ConfigReader, num_layers: int) -> Windows:
    """Without layer_types, every second one of the first layers has a window."""
    if not reader.switch("use_sliding_window"):
        reader.overridden("sliding_window", "max_window_layers")
        return ()
    last = 0 if reader.values.get("max_window_layers") == 0 else reader.size("max_window_layers", 28)
    window = reader.size("sliding_window", 4096)
    return _by_layer(reader, num_layers, window, lambda i: i % 2 == 0 and i < last)


def _qwen3_moe_windows(reader: ConfigReader, num_layers: int) -> Windows:
    if not reader.switch("use_sliding_window"):
        reader.overridden("sliding_window")
        return ()
    return (reader.size("sliding_window", 4096),) * num_layers


def _smollm3_windows(reader: ConfigReader, num_layers: int) -> Windows:
    """Without layer_types, the layers without position embedding have a window."""
    if not reader.switch("use_sliding_window") or reader.values.get("sliding_window") is None:
        reader.overridden("sliding_window")
        return ()
    unrotated = _smollm3_unrotated(reader, num_layers)
    return _by_layer(reader, num_layers, reader.size("sliding_window"), lambda i: i in unrotated)


def _periodic_windows(
    reader: ConfigReader, num_layers: int, period: int | None = None, window: int = 4096, usual_period: int = 6
) -> Windows:
    """All layers except every ``period``-th have a window. If ``period`` is None, config.json may state it;
    ``usual_period`` and ``window`` are the defaults."""
    reader.overridden("sliding_window_pattern", "_sliding_window_pattern")  # by layer_types, or by ``period``
    if "sliding_window" in reader.values and reader.values["sliding_window"] is None:
        return ()

    def slides(layer: int) -> bool:
        # Read only without layer_types: EXAONE 4.0 has both, and the period as a text such as LLLG.
        return (layer + 1) % (period or reader.size("sliding_window_pattern", usual_period)) != 0

    return _by_layer(reader, num_layers, reader.size("sliding_window", window), slides)


def _gemma_multipliers(reader: ConfigReader) -> Multipliers:
    return Multipliers(
        embedding=reader.size("hidden_size") ** 0.5, attention=reader.size("query_pre_attn_scalar", 256) ** -0.5
    )


def _minicpm3_multipliers(reader: ConfigReader) -> Multipliers:
    """Two of them depend on the model's size. null says that they do nothing."""
    depth, width = reader.size("num_hidden_layers"), reader.size("hidden_size")

    def stated(key: str, default: float, neutral: float) -> float:
        return neutral if key in reader.values and reader.values[key] is None else reader.number(key, default)

    return Multipliers(
        embedding=reader.number("scale_emb", 12.0),
        residual=stated("scale_depth", 1.4, depth**0.5) / depth**0.5,
        logits=stated("dim_model_base", 256.0, width) / width,
    )


def _qwen_experts(
    reader: ConfigReader, num_layers: int, shared_size: int = 0, renormalise: bool = False
) -> ExpertsConfig:
    """``shared_size`` and ``renormalise``: the defaults."""
    every = reader.size("decoder_sparse_step", 1)
    named = reader.numbers("mlp_only_layers")
    return ExpertsConfig(
        # transformers 5 writes the second name for some families that were published with the first.
        num_experts=reader.size("num_experts" if "num_experts" in reader.values else "num_local_experts"),
        top_k=reader.size("num_experts_per_tok"),
        intermediate_size=reader.size("moe_intermediate_size"),
        renormalise=reader.switch("norm_topk_prob", renormalise),
        dense_layers=frozenset(named) | {i for i in range(num_layers) if (i + 1) % every},
        shared_size=reader.count("shared_expert_intermediate_size", default=shared_size),
    )


def _renormalised_experts(reader: ConfigReader, num_layers: int, shared_size: int = 0) -> ExpertsConfig:
    """The scores of a token's experts are divided by their sum, whatever norm_topk_prob says."""
    return replace(_qwen_experts(reader, num_layers, shared_size), renormalise=True)


def _glm_experts(
    reader: ConfigReader, num_layers: int, groups: tuple[int, int] = (1, 1), scaling: float = 1.0, num_dense: int = 1
) -> ExpertsConfig:
    """The others are defaults of n_group, topk_group, routed_scaling_factor and first_k_dense_replace."""
    size = reader.size("moe_intermediate_size")
    return ExpertsConfig(
        num_experts=reader.size("n_routed_experts" if "n_routed_experts" in reader.values else "num_local_experts"),
        top_k=reader.size("num_experts_per_tok"),
        intermediate_size=size,
        renormalise=reader.switch("norm_topk_prob", True),
        sigmoid=True,
        num_groups=reader.size("n_group", groups[0]),
        top_groups=reader.size("topk_group", groups[1]),
        scaling=reader.number("routed_scaling_factor", scaling),
        shared_size=size * reader.count("n_shared_experts", default=1),
        dense_layers=_dense_layers(reader, num_layers, num_dense),
    )


def _dense_layers(reader: ConfigReader, num_layers: int, default: int) -> frozenset[int]:
    """The layers without experts: those that mlp_layer_types calls dense, else the first ones."""
    num_dense, kinds = reader.count("first_k_dense_replace", default=default), reader.strings("mlp_layer_types")
    if kinds and (len(kinds) < num_layers or set(kinds) - {"dense", "sparse"}):
        raise ConfigError(f"config.json: mlp_layer_types must say dense or sparse of each of the {num_layers} layers")
    return frozenset(i for i in range(num_layers) if (kinds[i] == "dense" if kinds else i < num_dense))


def _deepseek_experts(reader: ConfigReader, num_layers: int) -> ExpertsConfig:
    """Experts are the best of all by their softmaxes (greedy), or those of the groups with the best experts."""
    method = reader.values.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"config.json: topk_method {method!r} is not supported, greedy and group_limited_greedy are")
    reader.overridden("n_group", "topk_group")
    grouped = method == "group_limited_greedy"
    size = reader.size("moe_intermediate_size", 1407)
    return ExpertsConfig(
        num_experts=reader.size("n_routed_experts", 64),
        top_k=reader.size("num_experts_per_tok"),
        intermediate_size=size,
        renormalise=False,
        num_groups=reader.size("n_group", 1) if grouped else 1,
        top_groups=reader.size("topk_group", 1) if grouped else 1,
        scored_by=1,
        scaling=reader.number("routed_scaling_factor", 1.0),
        shared_size=size * reader.count("n_shared_experts", default=2),
        dense_layers=frozenset(range(min(reader.count("first_k_dense_replace"), num_layers))),
    )


def _deepseek_latent(
    reader: ConfigReader,
    q_rank: int = 1536,
    nope_dim: int = 128,
    v_dim: int = 128,
    kv_rank: int = 512,
    rope_dim: int = 64,
    has_rank: bool = False,
) -> LatentConfig:
    """The sizes are defaults. ``has_rank``: queries without a rank are refused."""
    reader.overridden("head_dim", "qk_head_dim")  # by the sizes of their parts
    num_heads = reader.size("num_attention_heads")
    if reader.size("num_key_value_heads", num_heads) != num_heads:
        raise ConfigError(
            "config.json: with latent attention num_key_value_heads must be num_attention_heads, or left out"
        )
    rope_dim = reader.size("qk_rope_head_dim", rope_dim)
    if rope_dim % 2:
        raise ConfigError(f"config.json: qk_rope_head_dim must be even for rotary positions, got {rope_dim}")
    has_no_rank = "q_lora_rank" in reader.values and reader.values["q_lora_rank"] is None
    if has_no_rank and has_rank:
        raise ConfigError("config.json: q_lora_rank must be a number: the indexer reads the latents of queries")
    return LatentConfig(
        q_lora_rank=None if has_no_rank else reader.size("q_lora_rank", q_rank),
        kv_lora_rank=reader.size("kv_lora_rank", kv_rank),
        qk_nope_head_dim=reader.size("qk_nope_head_dim", nope_dim),
        qk_rope_head_dim=rope_dim,
        v_head_dim=reader.size("v_head_dim", v_dim),
    )


def _kimi_latent(reader: ConfigReader) -> LatentConfig:
    sizes = _deepseek_latent(reader)
    return sizes if reader.values.get("q_lora_rank") is not None else replace(sizes, q_lora_rank=None)


def _minicpm3_latent(reader: ConfigReader) -> LatentConfig:
    value_dim = max(reader.size("hidden_size") // reader.size("num_attention_heads"), 1)
    return _deepseek_latent(reader, q_rank=768, nope_dim=64, v_dim=value_dim, kv_rank=256, rope_dim=32)


def _indexer(
    reader: ConfigReader, num_layers: int, num_heads: int, interleaved: bool = False, shares: bool = False
) -> IndexerConfig:
    """``num_heads`` is a default. ``shares``: some layers may have no indexer of their own."""
    head_dim, rope_dim = reader.size("index_head_dim", 128), reader.size("qk_rope_head_dim", 64)
    if head_dim < rope_dim:
        raise ConfigError(f"config.json: index_head_dim {head_dim} is less than the {rope_dim} features that rotate")
    if not reader.switch("rope_interleave", True):
        raise ConfigError("config.json: rope_interleave false is not supported with an indexer, only true is")
    return IndexerConfig(
        num_heads=reader.size("index_n_heads", num_heads),
        head_dim=head_dim,
        top_k=reader.size("index_topk", 2048),
        interleaved=interleaved,
        layers=_indexed_layers(reader, num_layers) if shares else frozenset(range(num_layers)),
    )


def _indexed_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    """The layers with an indexer: those that indexer_types names, or a pattern of one letter a layer; without either
    the first ones, then every ``index_topk_freq``-th."""
    kinds = reader.strings("indexer_types")
    pattern = reader.values.get("index_topk_pattern")
    every, offset = reader.count("index_topk_freq", default=1), reader.count("index_skip_topk_offset", default=2)
    if not kinds and isinstance(pattern, str):
        kinds = tuple({"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern)
    elif not kinds:
        kinds = reader.strings("index_topk_pattern")
    if not kinds:
        starts = (max(layer - offset + 1, 0) for layer in range(num_layers))
        kinds = tuple("shared" if start % max(every, 1) else "full" for start in starts)
    unknown = set(kinds) - {"full", "shared"}
    if unknown or len(kinds) < num_layers or kinds[0] != "full":
        raise ConfigError(
            f"config.json: indexer_types must say full or shared of each of the {num_layers} layers, and full of the"
            f" first; got {', '.join(kinds[:8])}{', ...' * (len(kinds) > 8)}"
        )
    return frozenset(layer for layer in range(num_layers) if kinds[layer] == "full")


def _delta_net(reader: ConfigReader, num_layers: int) -> RecurrentConfig:
    """The layers that layer_types calls linear_attention; without it all but every ``full_attention_interval``-th."""
    kinds = reader.strings("layer_types")
    every = reader.size("full_attention_interval", 4)
    if not kinds:
        kinds = tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers))
    heads, key_heads = reader.size("linear_num_value_heads", 32), reader.size("linear_num_key_heads", 16)
    if heads % key_heads:
        raise ConfigError(
            f"config.json: linear_num_value_heads {heads} must be a multiple of linear_num_key_heads {key_heads}"
        )
    return RecurrentConfig(
        layers=_linear_layers(kinds, num_layers),
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=reader.size("linear_key_head_dim", 128),
        value_dim=reader.size("linear_value_head_dim", 128),
        taps=reader.size("linear_conv_kernel_dim", 4),
    )


# Kimi-Linear's own names of entries.
_KIMI_LINEAR_NAMES: Mapping[str, str] = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# Those inside linear_attn_config.
_KDA_NAMES: Mapping[str, str] = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def _kimi_linear_renamed(hf: Mapping[str, object]) -> dict[str, object]:
    """Published files have the sizes of recurrent layers in linear_attn_config, and count layers from 1 on."""
    entries = {_KIMI_LINEAR_NAMES.get(key, key): value for key, value in hf.items()}
    inside = entries.pop("linear_attn_config", None)
    if not isinstance(inside, Mapping):
        return entries
    own = {_KDA_NAMES.get(key, key): value for key, value in inside.items() if value is not None}
    own.pop("full_attn_layers", None)  # the others
    layers, num_layers = (
        ConfigReader(own).numbers("kda_layers"),
        ConfigReader(hf).size("num_hidden_layers", most=10_000),
    )
    if layers and not entries.get("layer_types"):
        kinds = ["linear_attention" if i + 1 in layers else "full_attention" for i in range(num_layers)]
        own["layer_types"] = kinds
    own.pop("kda_layers", None)
    return entries | own


def _kimi_delta(reader: ConfigReader, num_layers: int) -> RecurrentConfig:
    """Without layer_types, every fourth layer from the fifth on attends."""
    kinds = reader.strings("layer_types")
    kinds = kinds or tuple("full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers))
    heads, dim = reader.size("linear_num_heads", 32), reader.size("linear_head_dim", 128)
    return RecurrentConfig(
        layers=_linear_layers(kinds, num_layers),
        num_heads=heads,
        num_key_heads=heads,
        key_dim=dim,
        value_dim=dim,
        taps=reader.size("linear_conv_kernel_dim", 4),
    )


_LFM2_NAMES: Mapping[str, str] = {
    "norm_eps": "rms_norm_eps",
    "block_ff_dim": "intermediate_size",
    "tie_embedding": "tie_word_embeddings",
}


def _lfm2_renamed(hf: Mapping[str, object]) -> dict[str, object]:
    """The intermediate size is that of the matrices, which files state through a rule."""
    entries = dict(hf)
    for name, usual in _LFM2_NAMES.items():
        if name in entries:
            entries[usual] = entries.pop(name)
    reader = ConfigReader(entries)
    rule = ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")
    size = reader.size("intermediate_size", 12_288)
    if reader.switch(rule[0], True):
        size, step = int(reader.number(rule[1], 1.0) * int(2 * size / 3)), reader.size(rule[2], 256)
        size = -(-size // step) * step
    return {key: value for key, value in entries.items() if key not in rule} | {"intermediate_size": size}


def _lfm2_convolutions(reader: ConfigReader, num_layers: int) -> RecurrentConfig:
    """The layers that layer_types calls conv; without it those that full_attn_idxs does not name."""
    kinds, attending = reader.strings("layer_types"), reader.numbers("full_attn_idxs")
    if not kinds:
        names_some = reader.values.get("full_attn_idxs") is not None
        kinds = tuple("conv" if names_some and i not in attending else "full_attention" for i in range(num_layers))
    if len(kinds) < num_layers or set(kinds) - {"conv", "full_attention"}:
        raise ConfigError(
            f"config.json: layer_types must say conv or full_attention of each of the {num_layers} layers"
        )
    layers = frozenset(i for i in range(num_layers) if kinds[i] == "conv")
    return RecurrentConfig(layers=layers, taps=reader.size("conv_L_cache", 3))


# What mixer_types calls the layers of MiniCPM-SALA.
_SALA_SPARSE, _SALA_LIGHTNING = ("minicpm4",), ("lightning-attn", "lightning_attn", "lightning")


def _sala_lightning(reader: ConfigReader, num_layers: int) -> RecurrentConfig:
    kinds = reader.strings("mixer_types")
    if len(kinds) < num_layers or set(kinds) - {*_SALA_SPARSE, *_SALA_LIGHTNING}:
        raise ConfigError(
            f"config.json: mixer_types must say minicpm4 or lightning-attn of each of the {num_layers} layers"
        )
    heads, dim = reader.size("lightning_nh"), reader.size("lightning_head_dim")
    if reader.size("lightning_nkv", heads) != heads or dim != reader.size("head_dim"):
        raise ConfigError(
            f"config.json: lightning_nkv must be lightning_nh {heads}, and lightning_head_dim {dim} must be head_dim"
        )
    layers = frozenset(i for i in range(num_layers) if kinds[i] in _SALA_LIGHTNING)
    return RecurrentConfig(layers=layers, num_heads=heads, num_key_heads=heads, key_dim=dim, value_dim=dim)


def _sala_unrotated(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    return frozenset(i for i, kind in enumerate(reader.strings("mixer_types")) if kind in _SALA_SPARSE)


def _sala_blocks(reader: ConfigReader) -> BlocksConfig | None:
    """A length from which on attention is sparse, dense_len, has no effect: all requests take the sparse form, which
    is dense up to ``top_k`` blocks, so that a query's result does not depend on how long its prompt is, or was cut."""
    entries = reader.values.get("sparse_config")
    if not isinstance(entries, Mapping):
        return None
    inside = ConfigReader(entries)
    size = inside.size("block_size", 64)
    local = inside.size("window_size", 2048) // size
    blocks = BlocksConfig(
        size=size,
        top_k=inside.size("topk", 64) + local,
        first=inside.count("init_blocks", default=1),
        local=local,
        width=inside.size("kernel_size", 32),
        stride=inside.size("kernel_stride", 16),
    )
    if inside.switch("use_nope"):
        raise ConfigError("config.json: use_nope true in sparse_config is not supported, only false is")
    if reader.size("head_dim") % blocks.stride:
        raise ConfigError(f"config.json: head_dim must be a multiple of kernel_stride {blocks.stride}")
    return blocks


# The kinds of Nemotron-H's layers: the letters of its pattern, and the names that transformers has had for them.
_NEMOTRON_H_KINDS: Mapping[str, str] = {
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "linear_attention",
    "attention": "full_attention",
}


def _nemotron_h_renamed(hf: Mapping[str, object]) -> dict[str, object]:
    """Published files have a pattern with a letter for each layer. Layers that predict further tokens are left out."""
    entries = {key: value for key, value in hf.items() if not key.startswith("mtp_")}
    entries.pop("num_nextn_predict_layers", None)
    pattern, kinds = entries.pop("hybrid_override_pattern", None), entries.pop("layers_block_type", None)
    stated = kinds or entries.get("layer_types") or pattern
    if isinstance(stated, str | list):
        entries["layer_types"] = [_NEMOTRON_H_KINDS.get(str(kind), str(kind)) for kind in stated]
        if entries.get("num_hidden_layers") is None:
            entries["num_hidden_layers"] = len(stated)
    for name, usual in (("layer_norm_epsilon", "rms_norm_eps"), ("attention_head_dim", "head_dim")):
        if name in entries:
            entries[usual] = entries.pop(name)
    return entries


def _mamba2(reader: ConfigReader, num_layers: int) -> RecurrentConfig:
    kinds = reader.strings("layer_types")[:num_layers]
    if len(kinds) < num_layers or set(kinds) - set(_NEMOTRON_H_KINDS.values()):
        raise ConfigError(
            f"config.json: hybrid_override_pattern must say M, *, - or E of each of the {num_layers} layers"
        )
    alone = [kind in ("mlp", "moe") for kind in kinds]
    if any(alone[i] and (i == 0 or alone[i - 1]) for i in range(num_layers)):
        raise ConfigError("config.json: hybrid_override_pattern has - or E not behind M or *, which is not supported")
    heads, groups = reader.size("mamba_num_heads", 128), reader.size("n_groups", 8)
    if heads % groups:
        raise ConfigError(f"config.json: mamba_num_heads {heads} must be a multiple of n_groups {groups}")
    # The steps with which training begins, how others compute, and what follows from the other sizes.
    reader.overridden("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "chunk_size", "expand")
    reader.overridden("mamba_ssm_cache_dtype", "use_mamba_kernels", "rescale_prenorm_residual", "num_logits_to_keep")
    reader.overridden("norm_eps")
    return RecurrentConfig(
        layers=frozenset(i for i in range(num_layers) if kinds[i] == "linear_attention"),
        taps=reader.size("conv_kernel", 4),
        num_heads=heads,
        num_key_heads=groups,
        key_dim=reader.size("ssm_state_size", 128),
        value_dim=reader.size("mamba_head_dim", 64),
        mlp_layers=frozenset(i for i in range(num_layers) if alone[i]),
        step_limits=_step_limits(reader),
    )


def _step_limits(reader: ConfigReader) -> tuple[float, float]:
    """time_step_limit, the second of which transformers 5 writes as an object if it is infinite."""
    stated = reader.values.get("time_step_limit")
    if stated is None:
        return 0.0, math.inf
    values = stated if isinstance(stated, list) else []
    values = [math.inf if value == {"__float__": "Infinity"} else value for value in values]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(numbers) != 2 or not 0.0 <= numbers[0] <= numbers[1]:
        raise ConfigError(f"config.json: time_step_limit must be two numbers from 0 on, got {stated!r}")
    return numbers[0], numbers[1]


def _nemotron_h_experts(reader: ConfigReader, num_layers: int) -> ExpertsConfig | None:
    kinds = reader.strings("layer_types")[:num_layers]
    if "moe" not in kinds:
        reader.overridden(*(key for key in reader.values if key.startswith(("moe_", "n_"))), "topk_group")
        reader.overridden("num_experts_per_tok", "routed_scaling_factor", "norm_topk_prob")
        return None
    if (num_shared := reader.count("n_shared_experts", default=1)) != 1:
        raise ConfigError(f"config.json: n_shared_experts {num_shared} is not supported, only 1 is")
    if reader.switch("mlp_bias"):
        raise ConfigError("config.json: mlp_bias true is not supported with experts, only false is")
    return replace(
        _glm_experts(reader, num_layers),
        shared_size=reader.size("moe_shared_expert_intermediate_size", 7688),
        latent_size=reader.count("moe_latent_size"),
        dense_layers=frozenset(i for i in range(num_layers) if kinds[i] == "mlp"),
    )


def _linear_layers(kinds: tuple[str, ...], num_layers: int) -> frozenset[int]:
    if len(kinds) < num_layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise ConfigError(
            f"config.json: layer_types must say linear_attention or full_attention of each of the {num_layers} layers"
        )
    return frozenset(i for i in range(num_layers) if kinds[i] == "linear_attention")


def _mixtral_experts(reader: ConfigReader, num_layers: int, sigmoid: bool = False) -> ExpertsConfig:
    return ExpertsConfig(
        sigmoid=sigmoid,
        num_experts=reader.size("num_local_experts"),
        top_k=reader.size("num_experts_per_tok"),
        intermediate_size=reader.size("intermediate_size"),
        renormalise=True,
    )


def _minimax_experts(reader: ConfigReader, num_layers: int) -> ExpertsConfig:
    if set(reader.numbers("attn_type_list")) - {1}:
        raise ConfigError("config.json: attn_type_list has layers of another attention than 1 (softmax)")
    return _mixtral_experts(reader, num_layers, sigmoid=True)


def _ernie_experts(reader: ConfigReader, num_layers: int) -> ExpertsConfig:
    """Every ``moe_layer_interval``-th layer of a range has experts. The index of the range's last layer may be -1,
    which stands for the model's last layer."""
    every, start = reader.size("moe_layer_interval", 1), reader.whole("moe_layer_start_index", 1)
    end = reader.whole("moe_layer_end_index", -1)
    sparse = range(start, num_layers if end == -1 else end + 1)
    size, num_shared = reader.size("moe_intermediate_size"), reader.count("moe_num_shared_experts", default=2)
    return ExpertsConfig(
        num_experts=reader.size("moe_num_experts"),
        top_k=reader.size("moe_k"),
        intermediate_size=size,
        renormalise=True,
        shared_size=size * num_shared,
        dense_layers=frozenset(i for i in range(num_layers) if i not in sparse or (i + 1) % every),
    )


def _gpt_oss_experts(reader: ConfigReader, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=reader.size("num_local_experts"),
        top_k=reader.size("num_experts_per_tok"),
        intermediate_size=reader.size("intermediate_size"),
        renormalise=True,
        limit=reader.number("swiglu_limit", 7.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read the entries of config.json in which families differ, by the rules of their transformers configs.

    ``head_dim`` is a default (None: hidden_size divided by the number of heads). ``windows`` returns the sliding window
    of each layer, ``experts`` the mixture of experts (None: a model without), ``unrotated`` the layers without position
    embedding; all get the number of layers. ``latent`` returns the sizes of latent attention; None: layers keep keys
    and values. ``indexer`` returns how latents are selected (None: none are), and gets the number of layers. ``blocks``
    returns how blocks of keys are (None: all are attended to).
    ``rms_norm_eps``, ``rope_theta``, ``tied`` (embedding and head), ``attention_bias``, ``partial_rotary`` and
    ``activation`` are defaults too; if ``partial_rotary`` is None, whole heads always rotate.
    ``activation_key`` is the entry for the activation, None if there is none.
    ``rope_interleaved``: the features of a pair are adjacent (the default of rope_interleave). ``mtp_prefix``: what the
    names of multi-token prediction layers have before their indices; ``num_mtp_layers``, or the entry that says it:
    how many there are, if num_nextn_predict_layers does not say it. ``quantized``: the kinds of quantised checkpoints
    that are supported; ``mxfp4``: checkpoints in which only the experts are quantised, in this format, are supported.
    ``text_defaults``: config.json has the text model's entries in text_config, and these are the defaults of entries
    that may be missing there; None: the entries are at the top level. ``norm_offset`` is added to the weights of norms.
    ``soft_caps``: the defaults of the soft caps of attention scores and of logits, 0 for none; None: the family has no
    such entry. ``local_theta``: layers with a window have their own rope_theta, with this default; 0: that of the other
    layers. ``switches`` are entries, true or false, that the family's function in models/families.py reads.
    ``computed`` has entries of which only these values are computed; others are refused, except for null. ``vision``
    returns the tower of a model that reads images, from the whole config.json and the model's directory; None: models
    of the family read texts alone. ``recurrent`` returns the layers that carry a state, and gets the number of layers.
    ``renamed`` returns the entries of a published file as transformers writes them. ``stored_names``: parts of names in
    checkpoints, with the dots around them, and what we call them.
    """

    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tied: bool = False
    attention_bias: bool = False
    mxfp4: bool = False
    text_defaults: Mapping[str, object] | None = None
    partial_rotary: float | None = None
    rope_interleaved: bool = False
    mtp_prefix: str = "model.mtp_layers."
    num_mtp_layers: int | str = 0
    quantized: tuple[str, ...] = ("fp8", "int8", "int4")
    activation: str = "silu"
    activation_key: str | None = "hidden_act"
    switches: tuple[str, ...] = ()
    computed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    norm_offset: float = 0.0
    soft_caps: tuple[float | None, float | None] = (None, None)
    local_theta: float | None = None
    multipliers: Callable[[ConfigReader], Multipliers] = _no_multipliers
    unrotated: Callable[[ConfigReader, int], frozenset[int]] = _none_unrotated
    windows: Callable[[ConfigReader, int], Windows] = _no_windows
    experts: Callable[[ConfigReader, int], ExpertsConfig | None] | None = None
    latent: Callable[[ConfigReader], LatentConfig] | None = None
    indexer: Callable[[ConfigReader, int], IndexerConfig] | None = None
    blocks: Callable[[ConfigReader], BlocksConfig | None] | None = None
    vision: Callable[[Mapping[str, object], Path], VisionConfig | None] | None = None
    recurrent: Callable[[ConfigReader, int], RecurrentConfig] | None = None
    renamed: Callable[[Mapping[str, object]], dict[str, object]] = dict
    stored_names: Mapping[str, str] = field(default_factory=dict)


_ERNIE_4_5 = Family(
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    tied=True,
    rope_interleaved=True,
    switches=("use_bias",),
    computed={
        "moe_norm_min": (1e-12,),
        "moe_gate_act": ("softmax",),
        "moe_norm_gate_logits": (True,),
        "compression_ratio": (1.0,),
    },
)
_CORRECTED: Mapping[str, tuple[object, ...]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_DEEPSEEK_V3 = Family(
    rope_interleaved=True,
    mtp_prefix=APPENDED_MTP,
    computed={"moe_layer_freq": (1,), **_CORRECTED},
    experts=partial(_glm_experts, groups=(8, 4), scaling=2.5, num_dense=3),
    latent=_deepseek_latent,
)
_SPARSE = replace(
    _DEEPSEEK_V3,
    computed={
        **_DEEPSEEK_V3.computed,
        "indexer_rope_interleave": (False,),
        "index_share_for_mtp_iteration": (False, True),
    },
    latent=partial(_deepseek_latent, has_rank=True),
    indexer=partial(_indexer, num_heads=64),
)
_GEMMA_3 = Family(
    head_dim=256,
    rope_theta=1e6,
    tied=True,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    norm_offset=1.0,
    soft_caps=(None, 0.0),
    local_theta=1e4,
    multipliers=_gemma_multipliers,
    windows=_periodic_windows,
)
# Published files say what this part of them is, too; the published models have no other.
_QWEN_3_5 = Family(
    head_dim=256,
    partial_rotary=0.25,
    norm_offset=1.0,
    activation_key=None,
    mtp_prefix=OWN_MTP,
    num_mtp_layers="mtp_num_hidden_layers",
    computed={
        "hidden_act": ("silu",),
        "attn_output_gate": (True,),
        "output_gate_type": ("swish",),
        "mamba_ssm_dtype": ("float32",),
        "mlp_only_layers": ([],),
    },
    recurrent=_delta_net,
)
_QWEN_3_5_MOE = replace(_QWEN_3_5, experts=partial(_renormalised_experts, shared_size=512))
_GEMMA_3_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "bos_token_id": 2,
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": Family(
            rope_interleaved=True,
            computed={"moe_layer_freq": (1,), "norm_topk_prob": (False,), "scoring_func": ("softmax",)},
            experts=_deepseek_experts,
            latent=_deepseek_latent,
        ),
        "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
        "DeepseekV32ForCausalLM": _SPARSE,
        "Ernie4_5ForCausalLM": _ERNIE_4_5,
        "Ernie4_5_MoeForCausalLM": replace(_ERNIE_4_5, head_dim=None, experts=_ernie_experts),
        "Exaone4ForCausalLM": Family(
            rms_norm_eps=1e-5, computed={"reorder_qk_norm": (True,)}, windows=partial(_periodic_windows, usual_period=4)
        ),
        "Gemma2ForCausalLM": Family(
            head_dim=256,
            tied=True,
            activation="gelu_pytorch_tanh",
            activation_key="hidden_activation",
            norm_offset=1.0,
            soft_caps=(50.0, 30.0),
            multipliers=_gemma_multipliers,
            windows=partial(_periodic_windows, period=2),
        ),
        "Gemma3ForCausalLM": _GEMMA_3,
        "Gemma3ForConditionalGeneration": replace(_GEMMA_3, text_defaults=_GEMMA_3_DEFAULTS, vision=gemma3),
        "Glm4ForCausalLM": Family(
            head_dim=128, rms_norm_eps=1.5625e-7, attention_bias=True, partial_rotary=0.5, rope_interleaved=True
        ),
        "Glm4MoeForCausalLM": Family(
            rms_norm_eps=1e-5,
            partial_rotary=0.5,
            mtp_prefix=APPENDED_MTP,
            switches=("use_qk_norm",),
            computed=_CORRECTED,
            experts=_glm_experts,
        ),
        "Glm4MoeLiteForCausalLM": replace(
            _DEEPSEEK_V3,
            rms_norm_eps=1e-5,
            experts=partial(_glm_experts, scaling=1.8),
            latent=partial(_deepseek_latent, q_rank=768, nope_dim=192, v_dim=256),
        ),
        "GlmMoeDsaForCausalLM": replace(
            _SPARSE,
            rms_norm_eps=1e-5,
            computed={**_SPARSE.computed, "indexer_rope_interleave": (True,)},
            experts=partial(_glm_experts, scaling=2.5, num_dense=3),
            latent=partial(_deepseek_latent, q_rank=2048, nope_dim=192, v_dim=256, has_rank=True),
            indexer=partial(_indexer, num_heads=32, interleaved=True, shares=True),
        ),
        "GptOssForCausalLM": Family(
            head_dim=64,
            rms_norm_eps=1e-5,
            rope_theta=150000.0,
            attention_bias=True,
            quantized=(),
            mxfp4=True,
            activation_key=None,  # the experts have a clamped SwiGLU, whatever hidden_act says
            computed={"swiglu_alpha": (1.702,), "hidden_act": ("silu",)},
            windows=partial(_periodic_windows, period=2, window=128),
            experts=_gpt_oss_experts,
        ),
        "GraniteForCausalLM": Family(multipliers=_granite_multipliers),
        "KimiLinearForCausalLM": Family(
            rms_norm_eps=1e-5,
            activation_key=None,
            computed={
                "hidden_act": ("silu",),
                "mla_use_nope": (True,),
                "moe_layer_freq": (1,),
                "moe_router_activation_func": ("sigmoid",),
                "use_grouped_topk": (True,),
                # Later models of Moonshot AI have these under the same architecture.
                "attn_res_block_size": (),
                "gate_lower_bound": (),
                "mla_use_output_gate": (False,),
                "routed_expert_hidden_size": (),
                "use_full_rank_gate": (False,),
            },
            unrotated=_all_unrotated,
            experts=partial(_glm_experts, scaling=2.446),
            latent=_kimi_latent,
            recurrent=_kimi_delta,
            renamed=_kimi_linear_renamed,
            # The mixer's usual name: transformers writes this one for dense MLPs too.
            stored_names={".block_sparse_moe.": ".mlp."},
        ),
        "Lfm2ForCausalLM": Family(
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            tied=True,
            activation_key=None,
            switches=("conv_bias",),
            computed={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
            recurrent=_lfm2_convolutions,
            renamed=_lfm2_renamed,
            stored_names={
                ".self_attn.out_proj.": ".self_attn.o_proj.",
                ".self_attn.q_layernorm.": ".self_attn.q_norm.",
                ".self_attn.k_layernorm.": ".self_attn.k_norm.",
                ".feed_forward.w1.": ".mlp.gate_proj.",
                ".feed_forward.w3.": ".mlp.up_proj.",
                ".feed_forward.w2.": ".mlp.down_proj.",
                ".operator_norm.": ".input_layernorm.",
                ".ffn_norm.": ".post_attention_layernorm.",
                ".embedding_norm.": ".norm.",
            },
        ),
        "LlamaForCausalLM": Family(),
        "MiMoForCausalLM": Family(windows=_qwen_windows),
        "MiniMaxM2ForCausalLM": Family(
            head_dim=128,
            rope_theta=5e6,
            partial_rotary=1.0,
            computed={
                "qk_norm_type": ("per_layer",),
                "scoring_func": ("sigmoid",),
                "shared_intermediate_size": (0,),
                "use_qk_norm": (True,),
                "sliding_window": (),
            },
            experts=_minimax_experts,
        ),
        "MiniCPM3ForCausalLM": Family(
            rms_norm_eps=1e-5, tied=True, multipliers=_minicpm3_multipliers, latent=_minicpm3_latent
        ),
        "MiniCPMSALAForCausalLM": Family(
            computed={
                "attn_use_rope": (False,),
                "attn_use_output_gate": (True,),
                "lightning_scale": ("1/sqrt(d)",),
                "lightning_use_rope": (True,),
                "qk_norm": (True,),
                "use_output_gate": (True,),
                "use_output_norm": (True,),
            },
            multipliers=_minicpm3_multipliers,
            unrotated=_sala_unrotated,
            blocks=_sala_blocks,
            recurrent=_sala_lightning,
        ),
        "MistralForCausalLM": Family(windows=_mistral_windows),
        "MixtralForCausalLM": Family(
            rms_norm_eps=1e-5, rope_theta=1e6, windows=_plain_windows, experts=_mixtral_experts
        ),
        "NemotronHForCausalLM": Family(
            head_dim=128,
            rms_norm_eps=1e-5,
            activation_key=None,
            switches=("use_bias", "use_conv_bias"),
            computed={
                "mamba_hidden_act": ("silu",),
                "mamba_proj_bias": (False,),
                "mlp_hidden_act": ("relu2",),
                "moe_shared_expert_overlap": (False, True),
                "residual_in_fp32": (False,),
                "sliding_window": (),
            },
            unrotated=_all_unrotated,
            experts=_nemotron_h_experts,
            recurrent=_mamba2,
            renamed=_nemotron_h_renamed,
            stored_names={"backbone.": "model.", ".embeddings.": ".embed_tokens.", ".norm_f.": ".norm."},
        ),
        "Olmo2ForCausalLM": Family(rms_norm_eps=1e-5),
        "Olmo3ForCausalLM": Family(
            rms_norm_eps=1e-5, rope_theta=5e5, local_theta=0.0, windows=partial(_periodic_windows, period=4)
        ),
        "Phi3ForCausalLM": Family(rms_norm_eps=1e-5, partial_rotary=1.0, windows=_plain_windows),
        "Qwen2ForCausalLM": Family(windows=_qwen_windows),
        "Qwen2_5_VLForConditionalGeneration": Family(
            rope_theta=1e6, text_defaults={}, windows=_qwen_windows, vision=qwen2_5_vl
        ),
        "Qwen2MoeForCausalLM": Family(
            windows=_qwen2_moe_windows, switches=("qkv_bias",), experts=partial(_qwen_experts, shared_size=5632)
        ),
        "Qwen3ForCausalLM": Family(head_dim=128, windows=_qwen_windows),
        "Qwen3MoeForCausalLM": Family(windows=_qwen3_moe_windows, experts=_qwen_experts),
        "Qwen3NextForCausalLM": replace(
            _QWEN_3_5,
            num_mtp_layers=1,  # its config.json does not say it
            computed={"hidden_act": ("silu",)},
            experts=partial(_qwen_experts, shared_size=512, renormalise=True),
        ),
        "Qwen3_5ForCausalLM": _QWEN_3_5,
        "Qwen3_5ForConditionalGeneration": replace(_QWEN_3_5, text_defaults={}),
        "Qwen3_5MoeForCausalLM": _QWEN_3_5_MOE,
        "Qwen3_5MoeForConditionalGeneration": replace(_QWEN_3_5_MOE, text_defaults={}),
        "Qwen3VLForConditionalGeneration": Family(head_dim=128, rope_theta=5e5, text_defaults={}, vision=qwen3_vl),
        "Qwen3VLMoeForConditionalGeneration": Family(
            head_dim=None,
            rope_theta=5e5,
            text_defaults={},
            quantized=(),
            experts=_renormalised_experts,
            vision=qwen3_vl,
        ),
        "SeedOssForCausalLM": Family(head_dim=128, attention_bias=True, switches=("attention_out_bias",)),
        "SmolLM3ForCausalLM": Family(rope_theta=2e6, tied=True, windows=_smollm3_windows, unrotated=_smollm3_unrotated),
    }
)
