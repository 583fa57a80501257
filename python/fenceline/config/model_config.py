"""ModelConfig: the configuration of a model, read from its directory and checked."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fenceline.config import ConfigError
from fenceline.config.config_reader import MOST, ConfigReader, Entries, check_unread
from fenceline.config.families import (
    APPENDED_MTP,
    FAMILIES,
    BlocksConfig,
    ExpertsConfig,
    Family,
    IndexerConfig,
    LatentConfig,
    Multipliers,
    RecurrentConfig,
    Windows,
)
from fenceline.config.kv_layout import KVRow, group_means, index_keys, keys_and_values, latent
from fenceline.config.model_files import read_model_json, read_optional, token_ids, tokenizer_eos_id
from fenceline.config.quantization import QuantConfig, read_mxfp4, read_quantization
from fenceline.config.vision import VisionConfig

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)

_MOST_LAYERS = 10_000  # far beyond any model; it bounds the lists that are made while config.json is read
# The values of --dtype (SGLang's) and the three types that models run in; auto uses the checkpoint's.
_DTYPES = {"half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float32": "float32"}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling parameters that generation_config.json recommends; None if it does not mention one."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1: the whole vocabulary
    min_p: float | None = None
    repetition_penalty: float | None = None

    def as_dict(self) -> dict[str, float | int]:
        """The parameters that are set, under their ``SamplingParams`` names."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model. Sizes are numbers of elements, lengths are in tokens; ``dtype`` is float32, bfloat16 or
    float16.

    ``context_length`` is the longest sequence that the engine serves. ``windows`` has the sliding window of each layer,
    None for a layer that attends to all tokens (empty: all layers do). ``attention_soft_cap`` and ``logits_soft_cap``
    are 0 if there is none. ``activation`` is that of MLPs (silu, gelu_tanh, gelu or relu). ``norm_offset`` is added to
    the weights of norms. ``local_rope`` has rope_theta and scaling of layers with a window; None: they are those of all
    layers.
    ``eos_token_ids`` is the sorted union of the ids in config.json, generation_config.json and the tokenizer.
    ``attention_bias`` and ``mlp_bias`` are those of config.json; the family's function in models/families.py says which
    projections they are for. ``num_mtp_layers`` is the number of multi-token prediction layers (--speculative-algorithm
    NEXTN), ``mtp_prefix`` what checkpoints call them; ``appended_mtp``: behind the model's. ``first_layer`` is that of
    the first layer, which is not 0 for a draft of such layers. ``rope_interleaved`` and ``partial_rotary_factor``: see
    ``RotaryEmbedding``. ``unrotated_layers`` have no position embedding. ``quantization`` is the number format of the
    linear layers; None: ``dtype``. ``experts`` is None for dense models. ``latent`` is None for models whose layers
    keep keys and values; otherwise all heads share one row, which counts as one key/value head, and ``head_dim`` is
    that of queries. ``indexer`` is None if latents are attended to as keys and values are, and not selected; ``blocks``
    is None if all keys are attended to. ``vision`` is the tower of a model that reads images; None: it reads texts
    alone. ``rope_axes`` says by which axis of a token's position each rotated pair turns: 0 is time, 1 the row and 2
    the column in an image; empty: all turn by time. ``recurrent_layers`` carry a state and do not attend, so that they
    have no rows in the KV pool; ``recurrent`` has the sizes of their heads. ``embeds``: it is served for embeddings, so
    that it needs no head.
    """

    model_path: str
    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    context_length: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    windows: Windows
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    num_mtp_layers: int = 0
    mtp_prefix: str = ""
    first_layer: int = 0
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    unrotated_layers: frozenset[int] = frozenset()
    multipliers: Multipliers = Multipliers()
    attention_soft_cap: float = 0.0
    logits_soft_cap: float = 0.0
    activation: str = "silu"
    norm_offset: float = 0.0
    local_rope: tuple[float, RopeScaling | None] | None = None
    quantization: QuantConfig | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    indexer: IndexerConfig | None = None
    blocks: BlocksConfig | None = None
    vision: VisionConfig | None = None
    rope_axes: tuple[int, ...] = ()
    recurrent_layers: frozenset[int] = frozenset()
    recurrent: RecurrentConfig | None = None
    embeds: bool = False
    sampling_defaults: SamplingDefaults
    hf_config: dict[str, object] = dataclasses.field(repr=False, compare=False)

    @property
    def moves_positions(self) -> bool:
        """Whether images give tokens positions of three axes, and move those of the tokens behind them."""
        return self.vision is not None and bool(self.rope_axes)

    @property
    def layer_indices(self) -> range:
        """The index of each layer."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def appended_mtp(self) -> bool:
        """Whether the names and indices of multi-token prediction layers follow those of the model's layers."""
        return self.mtp_prefix == APPENDED_MTP

    @property
    def num_attention_layers(self) -> int:
        """Layers that have rows in the KV pool."""
        return self.num_layers - len(self.recurrent_layers) - len(self.mlp_layers)

    @property
    def mlp_layers(self) -> frozenset[int]:
        """Layers that are an MLP alone, which follows the layer before."""
        return frozenset() if self.recurrent is None else self.recurrent.mlp_layers

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens; None: it attends to all tokens."""
        return self.windows[layer] if layer < len(self.windows) else None

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """The intermediate sizes of all MLPs: dense MLPs, shared experts and experts."""
        experts = self.experts
        return self.plain_mlp_sizes if experts is None else (*self.plain_mlp_sizes, experts.intermediate_size)

    @property
    def plain_mlp_sizes(self) -> tuple[int, ...]:
        """The intermediate sizes of MLPs that all tokens go through: dense MLPs and shared experts."""
        experts = self.experts
        if experts is None:
            return (self.intermediate_size,)
        dense = (self.intermediate_size,) if experts.dense_layers & set(self.layer_indices) else ()
        return (*dense, experts.shared_size) if experts.shared_size else dense

    def kv_rows(self, dtype: str, num_ranks: int = 1) -> tuple[tuple[KVRow, ...], ...]:
        """What the KV pool of one of ``num_ranks`` ranks stores for each token, layer by layer. Key/value heads are
        divided over the ranks, or repeated if there are fewer of them."""
        if self.latent is not None:
            rows, index = latent(self.latent.width, dtype), self.indexer
            if index is None:
                return (rows,) * self.num_attention_layers
            keys = index_keys(index.head_dim, dtype)
            return tuple(rows + keys if layer in index.layers else rows for layer in self.layer_indices)
        num_heads, blocks = max(self.num_kv_heads // num_ranks, 1), self.blocks
        rows = keys_and_values(num_heads, self.head_dim, dtype)
        if blocks is not None:
            rows += group_means(num_heads, self.head_dim, blocks.stride, dtype)
        return (rows,) * self.num_attention_layers

    @property
    def rotary_dim(self) -> int:
        """Features of a head of which ``partial_rotary_factor`` is rotated."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def layer_weights(self) -> int:
        """How many weights a token is multiplied by in one layer; for models with experts, in a layer that has them."""
        mlp, queries, sizes = 3 * self.active_mlp_size, self.num_heads * self.head_dim, self.latent
        if sizes is None:
            return self.hidden_size * (2 * queries + 2 * self.num_kv_heads * self.head_dim + mlp)
        values, rank = self.num_heads * sizes.v_head_dim, sizes.q_lora_rank
        inside = (rank or 0) * queries + sizes.kv_lora_rank * (self.num_heads * sizes.qk_nope_head_dim + values)
        if self.indexer is not None:
            inside += self._index_size * (rank or 0)
            inside += self.hidden_size * (self.indexer.head_dim + self.indexer.num_heads)
        return inside + self.hidden_size * ((rank or queries) + sizes.width + values + mlp)

    @property
    def score_work(self) -> int:
        """Multiplications of a query's attention for each token that it sees, in one layer; for models with an indexer,
        in a layer that has one. On a CPU tokens that are not selected take as many as the others."""
        return 2 * self.num_heads * (self.head_dim if self.latent is None else self.latent.width) + self._index_size

    @property
    def _index_size(self) -> int:
        """Features of an indexer's queries, all heads."""
        return 0 if self.indexer is None else self.indexer.num_heads * self.indexer.head_dim

    @property
    def active_mlp_size(self) -> int:
        """The sum of the intermediate sizes of the MLPs that a token goes through in one layer; for models with
        experts, in a layer that has them."""
        experts = self.experts
        if experts is None:
            return self.intermediate_size
        return experts.top_k * experts.intermediate_size + experts.shared_size

    @classmethod
    def from_dir(
        cls,
        path: str,
        overrides: Mapping[str, object] | None = None,
        context_length: int | None = None,
        dtype: str = "auto",
        tokenizer_path: str | None = None,
        quantization: str | None = None,
    ) -> ModelConfig:
        """Read a Hugging Face model directory; it must have at least config.json. ``overrides`` replace entries of
        config.json (--json-model-override-args). ``context_length`` (in tokens) may only shorten the model's own limit.
        ``tokenizer_path`` is the directory of the tokenizer's files; None: the model's. ``quantization`` is the value
        of --quantization. Raises ``ConfigError`` (a ``ValueError``), one line with the remedy."""
        directory = Path(path)
        plain = _apply_overrides(read_model_json(directory), overrides or {})
        generation = read_optional(directory / "generation_config.json")
        architecture = _architecture(plain)
        family = FAMILIES[architecture]
        vision = None if family.vision is None else family.vision(plain, directory)
        plain = family.renamed(_of_text(plain, family))
        hf = Entries(plain)
        reader = ConfigReader(hf)
        experts_format = read_mxfp4(hf, quantization) if family.mxfp4 else None
        quantization_config = None if experts_format else read_quantization(hf, directory, quantization)
        formats: tuple[QuantConfig, ...] = ()
        if quantization_config is not None:
            quantization_config = quantization_config.with_names(family.stored_names)
            formats = quantization_config.formats
        if unserved := [each.kind for each in formats if each.kind not in family.quantized]:
            raise ConfigError(
                f"{architecture}: weights of this family in {unserved[0]} are not supported"
                f" ({' and '.join(family.quantized) or 'none'} are); use the model's unquantised weights, without"
                " --quantization"
            )
        vocab_size = reader.size("vocab_size")
        num_heads = reader.size("num_attention_heads")
        sizes = None if family.latent is None else family.latent(reader)
        num_kv_heads = 1 if sizes else reader.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key/value heads")
        max_position = reader.size("max_position_embeddings")
        by_layer_type = family.local_theta is not None
        rope_theta, rope_scaling = parse_rope(hf, max_position, family.rope_theta, by_layer_type)
        # Families with two kinds of rotary angles state the length after scaling.
        limit = max_position if by_layer_type else scaled_context_length(max_position, rope_scaling)
        length = _context_length(context_length, limit)
        attention_cap, logits_cap = family.soft_caps
        usual = family.num_mtp_layers
        usual = reader.count(usual, _MOST_LAYERS) if isinstance(usual, str) else usual
        num_nextn_layers = reader.count("num_nextn_predict_layers", _MOST_LAYERS, usual)
        num_layers = reader.size("num_hidden_layers", most=_MOST_LAYERS)
        head_dim = sizes.head_dim if sizes else _head_dim(reader, family.head_dim, num_heads)
        rotary_dim = sizes.qk_rope_head_dim if sizes else head_dim
        partial_rotary = _partial_rotary(hf, family.partial_rotary, reader.count("rotary_dim"), rotary_dim)
        _check_divisors(rope_scaling, int(rotary_dim * partial_rotary))
        bos = token_ids(hf.get("bos_token_id"))
        windows = family.windows(reader, num_layers)
        indexer = None if family.indexer is None else family.indexer(reader, num_layers)
        recurrent = None if family.recurrent is None else family.recurrent(reader, num_layers)
        if recurrent is not None and len(recurrent.layers | recurrent.mlp_layers) == num_layers:
            raise ConfigError(f"config.json: none of {num_layers} layers attends, at least one must be full_attention")
        if recurrent is None:
            _check_layer_types(reader, windows, num_layers, ("full_attention",) if indexer is None else _INDEXED)
        experts = _experts(family, reader, num_layers, experts_format)
        for key in family.switches:
            reader.switch(key)  # it is read where the layers are made, and checked here
        config = cls(
            model_path=path,
            architecture=architecture,
            model_type=str(hf.get("model_type", "")),
            vocab_size=vocab_size,
            hidden_size=reader.size("hidden_size"),
            intermediate_size=reader.size("intermediate_size", _size_of_all(experts)),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=reader.number("rms_norm_eps", family.rms_norm_eps),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=max_position,
            context_length=length,
            tie_word_embeddings=reader.switch("tie_word_embeddings", family.tied),
            attention_bias=reader.switch("attention_bias", family.attention_bias),
            mlp_bias=reader.switch("mlp_bias"),
            windows=windows,
            eos_token_ids=_eos_ids(hf, generation, Path(tokenizer_path or path), vocab_size),
            bos_token_id=bos[0] if bos else None,
            dtype=_resolve_dtype(dtype, hf),
            num_mtp_layers=num_nextn_layers,
            mtp_prefix=family.mtp_prefix,
            partial_rotary_factor=partial_rotary,
            rope_interleaved=reader.switch("rope_interleave", family.rope_interleaved),
            unrotated_layers=family.unrotated(reader, num_layers),
            multipliers=family.multipliers(reader),
            attention_soft_cap=_soft_cap(reader, "attn_logit_softcapping", attention_cap),
            logits_soft_cap=_soft_cap(reader, "final_logit_softcapping", logits_cap),
            activation=_activation(hf, family),
            norm_offset=family.norm_offset,
            local_rope=parse_local_rope(
                hf, max_position, rope_theta if family.local_theta == 0 else family.local_theta
            ),
            quantization=quantization_config,
            experts=experts,
            latent=sizes,
            indexer=indexer,
            blocks=None if family.blocks is None else family.blocks(reader),
            vision=vision,
            rope_axes=_rope_axes(hf, int(rotary_dim * partial_rotary)),
            recurrent=recurrent,
            recurrent_layers=frozenset() if recurrent is None else recurrent.layers,
            sampling_defaults=_sampling_defaults(generation),
            hf_config=plain,
        )
        check_unread(hf, family.computed)
        return config


def _apply_overrides(hf: dict[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    merged = {**hf, **overrides}
    # transformers 5 keeps theta inside rope_parameters, which takes precedence over a plain `rope_theta` override.
    if "rope_theta" in overrides:
        for key in ("rope_parameters", "rope_scaling"):
            inner = merged.get(key)
            if isinstance(inner, dict) and key not in overrides:
                merged[key] = {**inner, "rope_theta": overrides["rope_theta"]}
    # Likewise a new-style override must win over an old-style entry of the file.
    if "rope_parameters" in overrides and "rope_scaling" not in overrides:
        merged.pop("rope_scaling", None)
    # An old-style override replaces the rule, not the file's theta.
    inner = hf.get("rope_parameters")
    if "rope_scaling" in overrides and isinstance(inner, dict):
        if "rope_theta" in inner and "rope_theta" not in overrides:
            merged["rope_theta"] = inner["rope_theta"]
        merged.pop("rope_parameters")
    return merged


def _of_text(hf: dict[str, object], family: Family) -> dict[str, object]:
    """The entries of the text model, if models of ``family`` also read images and keep them in text_config."""
    text = hf.get("text_config")
    if family.text_defaults is None or not isinstance(text, Mapping):
        return hf
    stated = {key: value for key, value in hf.items() if key not in ("text_config", "vision_config")}
    return {**family.text_defaults, **stated, **text}


# Names that checkpoints had before their family was part of transformers.
_FORMER_NAMES = {"Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM"}


def _architecture(hf: Mapping[str, object]) -> str:
    stated = hf.get("architectures")
    names = (
        [_FORMER_NAMES.get(name, name) for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
    )
    known = [name for name in names if name in SUPPORTED_ARCHITECTURES]
    if known:
        return known[0]
    given = ", ".join(names) or "none"
    near = difflib.get_close_matches(given, SUPPORTED_ARCHITECTURES, n=1)
    raise ConfigError(
        f"config.json: architecture {given} is not supported{f' (the nearest is {near[0]})' if near else ''}; supported"
        f" are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def _activation(hf: Mapping[str, object], family: Family) -> str:
    name = (family.activation_key and hf.get(family.activation_key)) or family.activation
    if family.activation_key == "hidden_activation":
        hf.get("hidden_act")  # Gemma is published with both
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(
            f"config.json: {family.activation_key} {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


_INDEXED = ("indexed_attention", "deepseek_sparse_attention")  # by versions of transformers


def _check_layer_types(reader: ConfigReader, windows: Windows, num_layers: int, plain: Sequence[str]) -> None:
    """Raises ``ConfigError`` if layer_types contradicts ``windows``, which may follow from other entries. ``plain``:
    what it may call layers without a window."""
    for layer, kind in enumerate(reader.strings("layer_types")[:num_layers]):
        window = windows[layer] if layer < len(windows) else None
        if kind not in (plain if window is None else ("sliding_attention",)):
            raise ConfigError(
                f"config.json: layer_types says {kind} of layer {layer}, which other entries contradict"
                " (sliding_window, use_sliding_window) or this architecture does not have"
            )


def _soft_cap(reader: ConfigReader, key: str, default: float | None) -> float:
    """The soft cap ``key``; 0 if the entry is null or the family has no such entry (``default`` is None)."""
    if default is None or (key in reader.values and reader.values[key] is None):
        return 0.0
    cap = reader.number(key, default)
    if cap < 0.0:
        raise ConfigError(f"config.json: {key} must not be negative, got {cap:g}")
    return cap


def _experts(family: Family, reader: ConfigReader, num_layers: int, stored: QuantConfig | None) -> ExpertsConfig | None:
    experts = None if family.experts is None else family.experts(reader, num_layers)
    return None if experts is None else dataclasses.replace(experts, format=stored)


def _size_of_all(experts: ExpertsConfig | None) -> int | None:
    """The default of intermediate_size: a model without a dense MLP may lack it."""
    return None if experts is None or experts.dense_layers else experts.intermediate_size


def _head_dim(reader: ConfigReader, default: int | None, num_heads: int) -> int:
    """``default`` is the family's; None: hidden_size divided by the number of heads."""
    hidden_size = reader.size("hidden_size")
    if default is None and reader.values.get("head_dim") is None and hidden_size % num_heads:
        raise ConfigError(f"config.json: hidden_size {hidden_size} is no multiple of {num_heads} heads; set head_dim")
    head_dim = reader.size("head_dim", default or max(hidden_size // num_heads, 1))
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim must be even for rotary positions, got {head_dim}")
    return head_dim


def _context_length(asked: int | None, limit: int) -> int:
    if min(limit, asked or limit) > MOST:
        raise ConfigError(
            f"config.json: with its rope scaling the context has {limit} tokens, at most {MOST} are possible;"
            " choose a length with --context-length"
        )
    if asked is None:
        return limit
    if asked < 1:
        raise ConfigError(f"--context-length must be at least 1, got {asked}")
    if asked > limit:
        raise ConfigError(
            f"--context-length {asked} is beyond the model's {limit} tokens; use --context-length {limit}, or extend "
            f"the model with --json-model-override-args (rope_scaling)"
        )
    return asked


def _eos_ids(
    hf: Mapping[str, object], generation: Mapping[str, object], tokenizer_dir: Path, vocab_size: int
) -> tuple[int, ...]:
    # All sources are joined, because Llama 3's chat turns end with a token that only generation_config.json lists.
    ids = {*token_ids(hf.get("eos_token_id")), *token_ids(generation.get("eos_token_id"))}
    from_tokenizer = tokenizer_eos_id(tokenizer_dir)
    if from_tokenizer is not None:
        ids.add(from_tokenizer)
    return tuple(sorted(number for number in ids if 0 <= number < vocab_size))


def _resolve_dtype(asked: str, hf: Mapping[str, object]) -> str:
    if asked != "auto":
        if asked not in _DTYPES:
            raise ConfigError(f"--dtype {asked!r} is unknown; use auto, half, float16, bfloat16, float or float32")
        return _DTYPES[asked]
    stored = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    name = str(stored).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"config.json: weights of type {name} are not supported; choose one with --dtype")
    return _DTYPES[name]


def _sampling_defaults(generation: Mapping[str, object]) -> SamplingDefaults:
    reader = ConfigReader(generation)

    def number(key: str) -> float | None:
        return None if generation.get(key) is None else reader.number(key, 0.0)

    top_k = number("top_k")
    # "do_sample": false asks for greedy decoding if it is stated. A missing entry does not, because transformers omits
    # defaults.
    greedy = generation.get("do_sample") is False
    return SamplingDefaults(
        temperature=0.0 if greedy else number("temperature"),
        top_p=number("top_p"),
        # transformers writes 0 for "no limit", the sampler takes -1 for it
        top_k=None if top_k is None else int(top_k) if top_k >= 1 else -1,
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )


SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The parameters of a RoPE scaling rule. ``rope_type`` is linear, llama3, yarn, longrope or dynamic. Fields that a
    rule does not use keep their defaults. ``original_max_position_embeddings`` is in tokens; for dynamic it is the
    model's max_position_embeddings, and linear does not use it."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int = 0
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn and longrope; attention_factor None: derived from factor (and mscale) as the papers say, for yarn times
    # attn_factor
    attention_factor: float | None = None
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    # longrope: one divisor for each frequency, for sequences up to the original length and beyond
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def _partial_rotary(hf: Mapping[str, object], default: float | None, rotary_dim: int, head_dim: int) -> float:
    """The fraction of a head that rotates. ``default`` None: the family always rotates whole heads. ``rotary_dim`` is
    the entry of this name, 0 if there is none."""
    raw = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    inside = raw if isinstance(raw, Mapping) else {}
    stated = rotary_dim / head_dim
    if int(stated * head_dim) < rotary_dim:  # it has been rounded down
        stated = math.nextafter(stated, 1.0)
    whole = 1.0 if default is None else stated or default
    value = _number(inside, "partial_rotary_factor", _number(hf, "partial_rotary_factor", whole))
    if int(value * head_dim) % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor {value:g} rotates {int(value * head_dim)} of {head_dim} features of"
            " a head, which are no pairs"
        )
    if value == 1.0 or (default is not None and 0.0 < value < 1.0):
        return value
    raise ConfigError(f"config.json: partial_rotary_factor {value:g} is not supported for this architecture")


def parse_rope(
    hf: Mapping[str, object],
    max_position_embeddings: int,
    default_theta: float = DEFAULT_ROPE_THETA,
    by_layer_type: bool = False,
) -> tuple[float, RopeScaling | None]:
    """``(rope_theta, scaling)`` of a config.json; scaling None means plain RoPE. ``by_layer_type``: config.json may
    have parameters for each type of layers; then those of layers with full attention are returned. transformers 5
    writes one dict ``rope_parameters`` with ``rope_theta`` inside, older versions ``rope_scaling`` beside
    ``rope_theta``; as in transformers ``rope_scaling`` wins where both are there. Raises ``ConfigError``."""
    newer = hf.get("rope_parameters")
    raw = hf.get("rope_scaling") or newer or {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"config.json: rope_scaling must be an object, got {raw!r}")
    if by_layer_type and isinstance(full := raw.get("full_attention"), Mapping):
        raw = full
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise ConfigError("config.json: rope parameters that differ by layer type are not supported")
    theta = _number(raw, "rope_theta", _number(hf, "rope_theta", default_theta))
    if theta <= 1.0:
        raise ConfigError(f"config.json: rope_theta must be above 1, got {theta:g}")
    rope_type = str(raw.get("rope_type") or raw.get("type") or "default")
    if rope_type == "mrope" and raw.get("mrope_section") is not None:
        rope_type = "default"  # the first files of models that read images; the sections are what it means
    if rope_type in ("su", "yarn") and raw.get("long_factor") is not None:
        rope_type = "longrope"  # the first Phi-3 files have the rule under these names
    if rope_type not in SUPPORTED_ROPE_TYPES or (rope_type == "dynamic" and raw.get("alpha") is not None):
        shown = f"{rope_type} with alpha" if rope_type == "dynamic" else rope_type
        raise ConfigError(
            f"rope type {shown!r} is not supported ({', '.join(SUPPORTED_ROPE_TYPES)} are); another rule would make"
            " another model, so choose a model with one of these"
        )
    hf.get("original_max_position_embeddings")  # has no effect without scaling
    if rope_type == "default":
        return theta, None
    return theta, _scaling(rope_type, raw, hf, max_position_embeddings)


def parse_local_rope(
    hf: Mapping[str, object], max_position_embeddings: int, default_theta: float | None
) -> tuple[float, RopeScaling | None] | None:
    """Like ``parse_rope``, for layers with a window. None: they rotate like the other layers, because the family has no
    ``default_theta`` for them."""
    if default_theta is None:
        return None
    given = hf.get("rope_parameters")
    local = given.get("sliding_attention") if isinstance(given, Mapping) else None
    theta = _number(hf, "rope_local_base_freq", default_theta)
    return parse_rope({"rope_parameters": local or {}}, max_position_embeddings, theta)


def _scaling(
    rope_type: str, raw: Mapping[str, object], hf: Mapping[str, object], max_position_embeddings: int
) -> RopeScaling:
    # A top-level value, as Phi-3 writes it, takes precedence over the one inside the dict, as in transformers.
    inside = _number(raw, "original_max_position_embeddings", float(max_position_embeddings))
    original = _number(hf, "original_max_position_embeddings", inside)
    if rope_type == "dynamic":
        original = float(max_position_embeddings)
    longrope = rope_type == "longrope"
    least = 2 if longrope else 1  # longrope divides by its logarithm
    if not least <= original <= MOST:
        raise ConfigError(f"config.json: original_max_position_embeddings must be from {least} to {MOST}")
    if raw.get("factor") is None and not longrope:
        raise ConfigError(f"config.json: rope scaling of type {rope_type!r} needs a factor")
    factor = _number(raw, "factor", max(max_position_embeddings / original, 1.0) if longrope else 1.0)
    if not 1.0 <= factor <= MOST:
        raise ConfigError(f"config.json: the rope scaling factor must be from 1 to {MOST}, got {factor:g}")
    attention_factor = None if raw.get("attention_factor") is None else _number(raw, "attention_factor", 1.0)
    scaling = RopeScaling(
        rope_type=rope_type,
        factor=factor,
        original_max_position_embeddings=int(original),
        low_freq_factor=_number(raw, "low_freq_factor", 1.0),
        high_freq_factor=_number(raw, "high_freq_factor", 4.0),
        attention_factor=attention_factor,
        attn_factor=_number(raw, "attn_factor", 1.0),
        beta_fast=_number(raw, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(raw, "beta_slow", 1.0) or 1.0,
        mscale=_number(raw, "mscale", 0.0),
        mscale_all_dim=_number(raw, "mscale_all_dim", 0.0),
        truncate=raw.get("truncate") is not False,
        short_factor=_divisors(raw, "short_factor") if longrope else (),
        long_factor=_divisors(raw, "long_factor") if longrope else (),
    )
    if rope_type == "llama3" and not 0.0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise ConfigError("config.json: llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor")
    return scaling


def _divisors(raw: Mapping[str, object], key: str) -> tuple[float, ...]:
    values = raw.get(key)
    numbers = values if isinstance(values, list) else []
    divisors = tuple(_number({key: value}, key, 0.0) for value in numbers)
    if not divisors or min(divisors) <= 0.0:
        raise ConfigError(f"config.json: rope scaling of type 'longrope' needs {key}, a list of numbers above 0")
    return divisors


def _check_divisors(scaling: RopeScaling | None, rotated: int) -> None:
    """Raises ``ConfigError`` where longrope's lists are not for ``rotated`` features of a head."""
    if scaling is None or scaling.rope_type != "longrope":
        return
    for key in ("short_factor", "long_factor"):
        if (length := len(getattr(scaling, key))) != rotated // 2:
            raise ConfigError(
                f"config.json: {key} has {length} numbers, heads of {rotated} rotated features need {rotated // 2}"
            )


def _rope_axes(hf: Mapping[str, object], rotated: int) -> tuple[int, ...]:
    """``ModelConfig.rope_axes`` of a model that rotates so many features of a head: sections one after the other, or
    pairs that take turns, as long as a section has any left."""
    raw = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    reader, num_pairs = ConfigReader(raw if isinstance(raw, Mapping) else {}), rotated // 2
    sections, take_turns = reader.numbers("mrope_section"), reader.switch("mrope_interleaved")
    if sections and (len(sections) != 3 or min(sections) < 0 or sum(sections) != num_pairs):
        raise ConfigError(
            f"config.json: mrope_section {list(sections)} must be three numbers whose sum is {num_pairs}, the pairs of"
            " a head that rotate"
        )
    if not take_turns:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return tuple(pair % 3 if sections and pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs))


def scaled_context_length(max_position_embeddings: int, scaling: RopeScaling | None) -> int:
    """The context length with scaled positions. Linear and yarn configs that were written by hand often have the length
    before scaling in ``max_position_embeddings``; llama3 and longrope have the final length, dynamic ones never."""
    if scaling is None or scaling.rope_type in ("llama3", "longrope"):
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
