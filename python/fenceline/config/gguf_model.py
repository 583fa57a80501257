"""A GGUF file as the model folder that it was made from: config.json, the tokenizer's files, and the names and shapes
of the checkpoint's tensors. ``config/model_files.py`` reads FILE.gguf/config.json here.

llama.cpp's conversion has changed some tensors, which ``StoredPiece`` undoes: rows of queries and keys are in another
order where adjacent features rotate as pairs, Gemma's norms have been increased by one, and experts are one tensor.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from fenceline.config import ConfigError
from fenceline.config.gguf_file import BY_PACKAGE, GGUFArray, GGUFHeader, GGUFTensor, Value, parts_of, read_header
from fenceline.config.gguf_tokenizer import Vocabulary

Entries = dict[str, object]
# Names in a layer and outside, and what checkpoints call them.
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INSIDE: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
        "exp_probs_b": "mlp.gate.e_score_correction_bias",
        "nextn.eh_proj": "eh_proj",
        "nextn.embed_tokens": "embed_tokens",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.shared_head_head": "shared_head.head",
        "nextn.shared_head_norm": "shared_head.norm",
    }
)
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_AROUND = {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
# Tensors of angles, which go into config.json, and those that old conversions have and nobody needs.
_ROPE_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_MOST_EXPERTS = 10_000  # far beyond any model
_NOT_WEIGHTS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.(?P<inside>.+)|(?P<outside>[a-z_]+))\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """What a tensor of the checkpoint is in a GGUF file: ``tensor``, or its matrix ``expert``. ``heads`` not 0: rows of
    this many heads are to be put back into the order of the checkpoint. ``minus`` is to be subtracted. ``part``: a
    matrix in Q4_0 that is kept so has three tensors in the checkpoint, as compressed-tensors calls them."""

    tensor: GGUFTensor
    shape: tuple[int, ...]
    expert: int | None = None
    heads: int = 0
    minus: float = 0.0
    part: str = "weight"


def header_type(piece: StoredPiece) -> str:
    """The type of its numbers when they have been read, as safetensors names it: quantised ones become floats."""
    if piece.part != "weight":
        return {"weight_packed": "I32", "weight_scale": "F32", "weight_shape": "I64"}[piece.part]
    name = piece.tensor.type.name
    return name if name in ("F32", "F16", "BF16") else "BF16"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How models of an architecture of llama.cpp are described. ``names``: those that differ from ``_INSIDE``.
    ``permuted``: rows of queries and keys are reordered. ``plus_one``: norms are increased by one. ``computed`` has the
    values that differ from ``_COMPUTED``. ``more`` returns the entries of config.json that not every family has."""

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    plus_one: bool = False
    computed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    more: Callable[[GGUFModel], Entries] = lambda model: {}


class GGUFModel:
    """The model in ``files``, of which the first has the metadata. Raises ``ConfigError``, one line with the file and
    the remedy, for what cannot be served."""

    def __init__(self, files: Sequence[Path]) -> None:
        path = self.path = files[0]
        self.headers = tuple(map(read_header, files))
        self.metadata = self.headers[0].metadata
        self._read: set[str] = set()  # entries of the architecture that have been asked for
        self.tensors = {name: tensor for header in self.headers for name, tensor in header.tensors.items()}
        others = sorted({tensor.type.name for tensor in self.tensors.values()} & BY_PACKAGE)
        if others and importlib.util.find_spec("gguf") is None:
            raise ConfigError(
                f"{path}: tensors in {', '.join(others)} need the package gguf: pip install gguf, or choose another"
                " quantisation of the model"
            )
        name = self.text("general.architecture")
        found = _FAMILIES.get(name)
        if found is None:
            is_tower = name in ("clip", "mmproj")
            what = "is a vision tower (mmproj), not a model" if is_tower else f"its architecture is {name[:40]!r}"
            raise ConfigError(
                f"{path}: {what}; of GGUF models these are read: {', '.join(_FAMILIES)}. Give the original model in"
                " safetensors"
            )
        self.name, self.family = name, found
        if self.count("expert_count", 0) and name == "llama":
            self.family = _MIXTRAL
        if self.number("attention.sliding_window", 0) and name == "olmo2":
            self.family = _OLMO_3

    # --- the metadata

    def text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.path}: its metadata lacks {key}; download another conversion of the model")
        return value

    def value(self, key: str) -> Value | None:
        """The entry ``key`` of the architecture; None if it is missing. One that is given layer by layer must be the
        same for all."""
        self._read.add(key)
        found = self.metadata.get(f"{self.name}.{key}")
        if isinstance(found, GGUFArray):
            values = set(found.values())
            if len(values) != 1:
                raise ConfigError(f"{self.path}: {self.name}.{key} differs by layer, which is not supported")
            return values.pop()
        return found

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            state = "lacks" if value is None else "has no number for"
            raise ConfigError(
                f"{self.path}: its metadata {state} {self.name}.{key}; download another conversion of the model"
            )
        return _as_written(value) if isinstance(value, float) and abs(value) < 1e38 else value

    def count(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that every model of the architecture has."""
        if name not in self.tensors:
            raise ConfigError(f"{self.path}: has no tensor {name}; download another conversion of the model")
        return self.tensors[name].shape

    # --- the files of the folder

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.path, self.metadata)

    @property
    def num_layers(self) -> int:
        layers = self.count("block_count") - self.count("nextn_predict_layers", 0)
        if not 1 <= layers <= len(self.tensors):
            raise ConfigError(
                f"{self.path}: {self.name}.block_count announces {layers} layers, the file has {len(self.tensors)}"
                " tensors; download it again"
            )
        return layers

    @property
    def head_dim(self) -> int:
        head_dim = self.count("attention.key_length", self.count("embedding_length") // self.num_heads)
        if self.count("attention.value_length", head_dim) != head_dim:
            raise ConfigError(f"{self.path}: keys and values of different sizes are not supported")
        return head_dim

    @property
    def num_heads(self) -> int:
        return max(self.count("attention.head_count"), 1)

    def config(self) -> Entries:
        """config.json."""
        heads, head_dim = self.num_heads, self.head_dim
        rotated = self.count("rope.dimension_count", head_dim)
        plain = all(tensor.type.name == "F32" for tensor in self.tensors.values())
        vocabulary = self.vocabulary
        entries = {
            "architectures": [self.family.architecture],
            "model_type": self.name,
            "vocab_size": self.shape("token_embd.weight")[0],
            "hidden_size": self.count("embedding_length"),
            "intermediate_size": self.count("feed_forward_length"),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            # Rounded up, so that the product is not rounded down below the number of features.
            "partial_rotary_factor": 1.0 if rotated >= head_dim else math.nextafter(rotated / head_dim, 1.0),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self.count("context_length"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            "torch_dtype": "float32" if plain else "bfloat16",
            "bos_token_id": vocabulary.bos_id,
            "eos_token_id": list(vocabulary.stop_ids),
            **self.family.more(self),
        }
        for key, neutral in {**_COMPUTED, **self.family.computed}.items():
            if key not in self._read and (value := self.value(key)) is not None and value not in neutral:
                raise ConfigError(
                    f"{self.path}: {self.name}.{key} {value} is not supported for this architecture; give the original"
                    " model in safetensors"
                )
        return entries

    @property
    def pools_last_token(self) -> bool:
        """Whether it is an embedding model whose embeddings are the states of the last tokens."""
        pooling = self.value("pooling_type")
        if pooling not in (None, _NOT_POOLED, _LAST):
            raise ConfigError(
                f"{self.path}: {self.name}.pooling_type {pooling} is not supported, only embeddings of the last token"
                f" ({_LAST}) are; use a model that has these, such as Qwen3-Embedding"
            )
        return pooling == _LAST

    def _rope_scaling(self) -> Entries | None:
        kind = self.metadata.get(f"{self.name}.rope.scaling.type")
        original = self.count("rope.scaling.original_context_length", self.count("context_length"))
        if _ROPE_FREQS in self.tensors:  # Llama 3's rule: one divisor for each frequency, for all lengths
            divisors = self._floats(_ROPE_FREQS)
            both = {"short_factor": divisors, "long_factor": divisors}
            return {
                "rope_type": "longrope", "attention_factor": 1.0, "original_max_position_embeddings": original, **both
            }  # fmt: skip
        if _LONG in self.tensors and _SHORT in self.tensors:
            return {
                "rope_type": "longrope",
                "attention_factor": self.number("rope.scaling.attn_factor", 1.0),
                "original_max_position_embeddings": original,
                "short_factor": self._floats(_SHORT),
                "long_factor": self._floats(_LONG),
            }
        if kind is None and (factor := self.number("rope.scale_linear", 1.0)) != 1.0:  # of the first files
            return {"rope_type": "linear", "factor": factor}
        if kind in (None, "none", "longrope"):
            return None
        scaling: Entries = {"rope_type": kind, "factor": self.number("rope.scaling.factor", 1.0)}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = original
            for ours, theirs in _YARN.items():
                if self.value(f"rope.scaling.{theirs}") is not None:
                    scaling[ours] = self.number(f"rope.scaling.{theirs}")
        return scaling

    def _floats(self, name: str) -> list[object]:
        tensor = self.tensors[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1:
            raise ConfigError(f"{self.path}: tensor {name} is no list of float32; download another conversion")
        path = next(header.path for header in self.headers if name in header.tensors)
        return list(GGUFArray(path, _FLOAT32, tensor.shape[0], tensor.offset).values())

    def generation_config(self) -> Entries:
        """generation_config.json: what the authors recommend, if the file says it."""
        found: Entries = {}
        for ours, theirs in _SAMPLING.items():
            value = self.metadata.get(f"general.sampling.{theirs}")
            if isinstance(value, int | float):
                found[ours] = value
        return found

    def tokenizer_config(self) -> Entries:
        return self.vocabulary.tokenizer_config()

    def tokenizer(self) -> Entries:
        return self.vocabulary.tokenizer()

    # --- the tensors

    def pieces(self, header: GGUFHeader) -> dict[str, StoredPiece]:
        """The checkpoint's tensors that are in ``header``'s file, by their names there."""
        return {
            piece_name: piece
            for name, tensor in header.tensors.items()
            if not _NOT_WEIGHTS.fullmatch(name)
            for piece_name, piece in self._pieces_of(name, tensor)
        }

    def _pieces_of(self, name: str, tensor: GGUFTensor) -> Iterator[tuple[str, StoredPiece]]:
        found = _NAME.fullmatch(name)
        names = {**_INSIDE, **self.family.names}
        ours = (
            None if found is None else names.get(found["inside"]) if found["layer"] else _OUTSIDE.get(found["outside"])
        )
        if found is None or ours is None:
            raise ConfigError(
                f"{self.path}: tensor {name} is not known for {self.name}; give the original model in safetensors"
            )
        layer, inside, shape = found["layer"], found["inside"], tensor.shape
        stem = f"model.layers.{layer}.{ours}" if layer else ours
        suffix = "" if inside == "exp_probs_b" else f".{found['kind']}"
        if "{}" in stem:
            if len(shape) != 3 or shape[0] > _MOST_EXPERTS:
                raise ConfigError(f"{self.path}: tensor {name} has shape {list(shape)}, which is none of experts")
            for expert in range(shape[0]):
                yield stem.format(expert) + suffix, StoredPiece(tensor, shape[1:], expert)
            return
        heads = 0
        if self.family.permuted and inside in ("attn_q", "attn_k"):
            heads = self.num_heads if inside == "attn_q" else self.count("attention.head_count_kv", self.num_heads)
            if heads < 1 or shape[0] % (2 * heads):
                raise ConfigError(f"{self.path}: tensor {name} has {shape[0]} rows, no multiple of {heads} heads")
        if inside == "ffn_gate_inp_shexp":
            shape = (1, *shape)
        minus = 1.0 if self.family.plus_one and ours.endswith("norm") else 0.0
        yield stem + suffix, StoredPiece(tensor, shape, None, heads, minus)


def _as_written(value: float) -> float:
    """The number with the fewest digits that is ``value`` in float32: 1e-6 for 9.999999974752427e-07."""
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((each for each in shorter if struct.pack("f", each) == struct.pack("f", value)), value)


_FLOAT32 = 6
_NOT_POOLED, _LAST = 0, 3  # of pooling_type
# Entries with which a model computes something else, if the family does not read them, and the values that say that it
# does not.
_COMPUTED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0.0,),
        "attention.scale": (0.0,),
        "attention.temperature_scale": (0.0,),
        "attn_logit_softcapping": (0.0,),
        "embedding_scale": (0.0, 1.0),
        "expert_gating_func": (0, 1),  # softmax
        "expert_group_count": (0, 1),
        "expert_weights_scale": (0.0, 1.0),
        "final_logit_softcapping": (0.0,),
        "logit_scale": (0.0, 1.0),
        "residual_scale": (0.0, 1.0),
        "rope.scaling.yarn_log_multiplier": (0.0,),
    }
)
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"
}  # fmt: skip


# --- what families have in config.json besides


def _window(model: GGUFModel) -> Entries:
    return {"sliding_window": model.count("attention.sliding_window", 0) or None}


def _window_by_layer(model: GGUFModel) -> Entries:
    """A window, and which layers have it: every layer but each n-th, or one by one."""
    entries, layers = _window(model), model.num_layers
    pattern = model.metadata.get(f"{model.name}.attention.sliding_window_pattern")
    if entries["sliding_window"] is None or pattern is None:
        return entries
    if isinstance(pattern, GGUFArray):
        slides = [bool(value) for value in pattern.values()]
    else:
        every = max(model.count("attention.sliding_window_pattern"), 1)
        slides = [(layer + 1) % every != 0 for layer in range(layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in slides[:layers]]
    return {**entries, "layer_types": kinds}


def _gemma(model: GGUFModel, largest: int) -> Entries:
    """Scores are divided by the root of head_dim, and in the model of ``largest`` layers by that of hidden_size over
    the number of heads."""
    size = model.count("embedding_length") // model.num_heads if model.num_layers == largest else model.head_dim
    entries = {**_window_by_layer(model), "query_pre_attn_scalar": size}
    for ours in ("attn_logit_softcapping", "final_logit_softcapping"):
        if model.value(ours) is not None:
            entries[ours] = model.number(ours)
    return entries


def _gemma3(model: GGUFModel) -> Entries:
    return {**_gemma(model, largest=62), "rope_local_base_freq": model.number("rope.freq_base_swa", 1e4)}


def _granite(model: GGUFModel) -> Entries:
    return {
        "attention_multiplier": model.number("attention.scale", 1.0),
        "embedding_multiplier": model.number("embedding_scale", 1.0),
        "residual_multiplier": model.number("residual_scale", 1.0),
        "logits_scaling": model.number("logit_scale", 1.0),
    }


def _first_expert_layer(model: GGUFModel) -> int:
    return next((layer for layer in range(model.num_layers) if f"blk.{layer}.ffn_up_exps.weight" in model.tensors), 0)


def _expert_size(model: GGUFModel) -> int:
    shape = model.shape(f"blk.{_first_expert_layer(model)}.ffn_up_exps.weight")
    return shape[1] if len(shape) == 3 else 0


def _mixtral(model: GGUFModel) -> Entries:
    return {
        "num_local_experts": model.count("expert_count"),
        "num_experts_per_tok": model.count("expert_used_count"),
        "intermediate_size": _expert_size(model),
        "sliding_window": None,
    }


def _qwen_moe(model: GGUFModel, renormalise: bool) -> Entries:
    return {
        "num_experts": model.count("expert_count"),
        "num_experts_per_tok": model.count("expert_used_count"),
        "moe_intermediate_size": _expert_size(model),
        "norm_topk_prob": bool(model.value("expert_weights_norm") or renormalise),
    }


def _qwen2_moe(model: GGUFModel) -> Entries:
    shared = model.shape("blk.0.ffn_up_shexp.weight")[0]
    biases = "blk.0.attn_q.bias" in model.tensors
    return {**_qwen_moe(model, False), "shared_expert_intermediate_size": shared, "qkv_bias": biases}


def _glm4_moe(model: GGUFModel) -> Entries:
    return {
        "n_routed_experts": model.count("expert_count"),
        "num_experts_per_tok": model.count("expert_used_count"),
        "moe_intermediate_size": _expert_size(model),
        "n_shared_experts": model.count("expert_shared_count", 1),
        "first_k_dense_replace": model.count("leading_dense_block_count", _first_expert_layer(model)),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(model.value("expert_weights_norm")),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
        "num_nextn_predict_layers": model.count("nextn_predict_layers", 0),
    }


def _ernie(model: GGUFModel) -> Entries:
    return {"use_bias": "blk.0.attn_q.bias" in model.tensors}


def _ernie_moe(model: GGUFModel) -> Entries:
    layer, size = _first_expert_layer(model), _expert_size(model)
    shared = model.tensors.get(f"blk.{layer}.ffn_up_shexp.weight")
    return {
        **_ernie(model),
        "moe_num_experts": model.count("expert_count"),
        "moe_k": model.count("expert_used_count"),
        "moe_intermediate_size": size,
        "moe_num_shared_experts": 0 if shared is None else shared.shape[0] // max(size, 1),
        "moe_layer_start_index": model.count("leading_dense_block_count", layer),
        "moe_layer_interval": model.count("interleave_moe_layer_step", 1),
    }


def _seed_oss(model: GGUFModel) -> Entries:
    return {"attention_out_bias": "blk.0.attn_output.bias" in model.tensors}


_SHARED_EXPERT = {
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_SPARSE = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
}
_SIGMOID: Mapping[str, tuple[object, ...]] = {"expert_gating_func": (0, 2)}
_MIXTRAL = _Family(architecture="MixtralForCausalLM", names=_SPARSE, permuted=True, more=_mixtral)
_OLMO_3 = _Family(architecture="Olmo3ForCausalLM", names=_AFTER, more=_window_by_layer)
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}
# By the architecture's name in llama.cpp.
_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "llama": _Family(architecture="LlamaForCausalLM", permuted=True),
        "qwen2": _Family(architecture="Qwen2ForCausalLM"),
        "qwen2moe": _Family(architecture="Qwen2MoeForCausalLM", names=_SHARED_EXPERT, more=_qwen2_moe),
        "qwen3": _Family(architecture="Qwen3ForCausalLM"),
        "qwen3moe": _Family(
            architecture="Qwen3MoeForCausalLM", more=functools.partial(_qwen_moe, renormalise=True)
        ),
        "gemma2": _Family(
            architecture="Gemma2ForCausalLM",
            names=_AROUND,
            plus_one=True,
            more=functools.partial(_gemma, largest=46),
        ),
        "gemma3": _Family(architecture="Gemma3ForCausalLM", names=_AROUND, plus_one=True, more=_gemma3),
        "phi3": _Family(architecture="Phi3ForCausalLM", names=_FUSED_MLP, more=_window),
        "olmo2": _Family(architecture="Olmo2ForCausalLM", names=_AFTER),
        "exaone4": _Family(architecture="Exaone4ForCausalLM", names=_AFTER, more=_window_by_layer),
        "ernie4_5": _Family(architecture="Ernie4_5ForCausalLM", more=_ernie),
        "ernie4_5-moe": _Family(
            architecture="Ernie4_5_MoeForCausalLM",
            names={"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
            more=_ernie_moe,
        ),
        "minimax-m2": _Family(
            architecture="MiniMaxM2ForCausalLM", names=_SPARSE, computed=_SIGMOID, more=_mixtral
        ),
        "granite": _Family(architecture="GraniteForCausalLM", permuted=True, more=_granite),
        "smollm3": _Family(architecture="SmolLM3ForCausalLM", permuted=True),
        "glm4": _Family(
            architecture="Glm4ForCausalLM",
            names={
                **_FUSED_MLP,
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
        ),
        "glm4moe": _Family(
            architecture="Glm4MoeForCausalLM",
            names={"post_attention_norm": "post_attention_layernorm"},
            computed=_SIGMOID,
            more=_glm4_moe,
        ),
        "seed_oss": _Family(
            architecture="SeedOssForCausalLM",
            names={"post_attention_norm": "post_attention_layernorm"},
            more=_seed_oss,
        ),
    }
)  # fmt: skip
# What a folder would have.
DESCRIBED: Mapping[str, Callable[[GGUFModel], Entries]] = MappingProxyType(
    {
        "config.json": GGUFModel.config,
        "generation_config.json": GGUFModel.generation_config,
        "tokenizer_config.json": GGUFModel.tokenizer_config,
        "tokenizer.json": GGUFModel.tokenizer,
    }
)


def gguf_model(path: Path) -> GGUFModel:
    """The model of which ``path`` is a file."""
    return _gguf_model(*((part, part.stat().st_mtime_ns) for part in parts_of(path)))


@functools.lru_cache(maxsize=4)
def _gguf_model(*parts: tuple[Path, int]) -> GGUFModel:
    return GGUFModel([path for path, _ in parts])


def described(path: Path) -> Entries:
    """The JSON file at ``path`` inside a GGUF file, one of ``DESCRIBED``."""
    return DESCRIBED[path.name](gguf_model(path.parent))


# Matrices that are products of the same input, and are quantised alike: one kernel multiplies them.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
GROUP = 32  # numbers of Q4_0 that share a scale


def four_bit_modules(path: Path) -> tuple[str, ...]:
    """The linear layers of the GGUF model at ``path`` that are stored in Q4_0, as are all that belong together with
    them. Experts of a layer are named by their parent."""
    model = gguf_model(path)
    pieces = {name: piece for header in model.headers for name, piece in model.pieces(header).items()}
    packed = {name.removesuffix(".weight"): piece.tensor.type.name == "Q4_0" for name, piece in pieces.items()}
    experts: dict[str, bool] = {}
    modules = []
    for module in packed:
        parent, _, last = module.rpartition(".")
        layer, found, _ = module.partition(".experts.")
        group = next((group for group in _TOGETHER if last in group), None)
        if found:
            experts[f"{layer}.experts"] = packed[module] and experts.get(f"{layer}.experts", True)
        elif group is not None and all(packed.get(f"{parent}.{each}") for each in group):
            modules.append(module)
    return (*modules, *(parent for parent, all_packed in experts.items() if all_packed))


def stored_pieces(path: Path, keeps: Callable[[str], object] = lambda module: None) -> dict[str, StoredPiece]:
    """The checkpoint's tensors in the GGUF file at ``path``, by their names in the checkpoint. A matrix in Q4_0 is kept
    so if ``keeps`` returns something for its module."""
    stored: dict[str, StoredPiece] = {}
    for name, piece in gguf_model(path).pieces(read_header(path)).items():
        module, _, last = name.rpartition(".")
        if piece.tensor.type.name != "Q4_0" or last != "weight" or keeps(module) is None:
            stored[name] = piece
            continue
        rows, columns = piece.shape
        shapes = {"weight_packed": (rows, columns // 8), "weight_scale": (rows, columns // GROUP), "weight_shape": (2,)}
        stored |= {f"{module}.{part}": replace(piece, part=part, shape=shape) for part, shape in shapes.items()}
    return stored
