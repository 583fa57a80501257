"""Writes GGUF files as llama.cpp's conversion does, with the package gguf: its writer, and its names of tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import torch
import transformers
from safetensors.torch import load_file, save_file

Type = gguf.GGMLQuantizationType
# By the beginning of transformers' class names: the architecture in llama.cpp.
ARCHITECTURES = {
    "Llama": "llama", "Mistral": "llama", "Mixtral": "llama", "Qwen2": "qwen2", "Qwen2Moe": "qwen2moe",
    "Qwen3": "qwen3", "Qwen3Moe": "qwen3moe", "Gemma2": "gemma2", "Gemma3": "gemma3", "Phi3": "phi3",
    "Olmo2": "olmo2", "Olmo3": "olmo2", "Exaone4": "exaone4", "Granite": "granite", "SmolLM3": "smollm3",
    "Ernie4_5": "ernie4_5", "Ernie4_5_Moe": "ernie4_5-moe", "MiniMaxM2": "minimax-m2",
    "Glm4": "glm4", "Glm4Moe": "glm4moe", "SeedOss": "seed_oss",
}  # fmt: skip
_PERMUTED = ("llama", "granite", "smollm3")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


def quantised(values: torch.Tensor, kind: Type) -> torch.Tensor:
    """The numbers that a file in the format ``kind`` has for ``values``, in float32."""
    stored = gguf.quants.quantize(values.detach().float().numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(stored, kind)).view(values.shape)


def round_checkpoint(directory: Path, kind: Type) -> None:
    """Round the matrices of the checkpoint in ``directory`` as a file in the format ``kind`` would."""
    for path in sorted(directory.glob("*.safetensors")):
        tensors = {name: quantised(each, kind) if each.dim() > 1 else each for name, each in load_file(path).items()}
        save_file(tensors, path)


def write_gguf(
    path: Path,
    directory: Path,
    kind: Type = Type.F32,
    metadata: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    others: Mapping[str, Type] = MappingProxyType({}),
    **split: int,
) -> Path:
    """A file at ``path`` with the checkpoint in ``directory``, its matrices in the format ``kind``. ``metadata`` adds
    to what config.json says, for example a tokenizer. ``others``: matrices in another format, without .weight.
    ``split``: arguments of the writer, for a file in parts."""
    config = transformers.AutoConfig.from_pretrained(directory)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.architectures[0].removesuffix("ForCausalLM")], **split)
    _describe(writer, config)
    metadata(writer)
    for name, values in _tensors(config, directory, writer.arch).items():
        array = values.float().contiguous().numpy()
        own = others.get(name.removesuffix(".weight"), kind)
        if values.dim() > 1 and own is not Type.F32:
            writer.add_tensor(name, gguf.quants.quantize(array, own), raw_dtype=own)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig) -> None:
    arch = writer.arch
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(_num_blocks(config))
    writer.add_nextn_predict_layers(_num_blocks(config) - config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if original is not None:
        writer.add_rope_scaling_orig_ctx_len(original)
    if rope.get("rope_type") == "longrope":
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
    if "attention_factor" in rope:
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if arch == "gemma3":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if (window := getattr(config, "sliding_window", None)) and arch not in ("llama", "qwen2", "qwen3", "qwen3moe"):
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    adders: Mapping[str, Callable[[float], object]] = {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "n_routed_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "n_shared_experts": writer.add_expert_shared_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "moe_num_experts": writer.add_expert_count,
        "moe_k": writer.add_expert_used_count,
        "moe_num_shared_experts": writer.add_expert_shared_count,
        "moe_layer_interval": writer.add_interleave_moe_layer_step,
        "moe_layer_start_index": writer.add_leading_dense_block_count,
    }
    written = set()
    for key, add in adders.items():
        value = getattr(config, key, None)
        if value is not None and add.__name__ not in written:
            written.add(add.__name__)
            add(value)
    if getattr(config, "norm_topk_prob", False):
        writer.add_expert_weights_norm(True)


def _num_blocks(config: transformers.PreTrainedConfig) -> int:
    """Layers, and those behind them that predict further tokens."""
    return config.num_hidden_layers + (getattr(config, "num_nextn_predict_layers", None) or 0)


def _tensors(config: transformers.PreTrainedConfig, directory: Path, arch: str) -> dict[str, torch.Tensor]:
    """The tensors in ``directory`` as llama.cpp names and reorders them."""
    number = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, _num_blocks(config))
    stored: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    files = map(load_file, sorted(directory.glob("*.safetensors")))
    for name, values in sorted((item for tensors in files for item in tensors.items()), key=_by_number):
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if arch in _PERMUTED and re.search(r"\.[qk]_proj\.", name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        if found := _EXPERT.fullmatch(name):
            experts.setdefault(f"{found[1]}.{found[3]}", []).append(values)
            continue
        if name.endswith("e_score_correction_bias"):
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        stored[_renamed(names, name)] = values
    stored.update((_renamed(names, name), torch.stack(matrices)) for name, matrices in experts.items())
    divisors = _llama3_divisors(config)
    if divisors is not None:
        stored["rope_freqs.weight"] = divisors
    rope = config.rope_parameters
    for kind in ("long", "short"):
        if rope.get(f"{kind}_factor") is not None:
            stored[f"rope_factors_{kind}.weight"] = torch.tensor(rope[f"{kind}_factor"])
    return stored


def _renamed(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _by_number(item: tuple[str, torch.Tensor]) -> list[tuple[int, str]]:
    """Experts in their order."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in item[0].split(".")]


def _llama3_divisors(config: transformers.PreTrainedConfig) -> torch.Tensor | None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head_dim = 2 * len(scaled)
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)) / scaled


def tokenizer_metadata(folder: Path, pre: str) -> Callable[[gguf.GGUFWriter], None]:
    """Adds the byte-level tokenizer and the chat template in ``folder``, as the conversion does. ``pre``: what
    llama.cpp calls the way in which it splits texts."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = dict(tokenizer["model"]["vocab"])
    kinds = dict.fromkeys(vocab.values(), gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        vocab[added["content"]] = added["id"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    by_id = {number: token for token, number in vocab.items()}
    size = max(by_id) + 1
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([by_id.get(number, f"[PAD{number}]") for number in range(size)])
        writer.add_token_types([kinds.get(number, gguf.TokenType.UNUSED) for number in range(size)])
        writer.add_token_merges(merges)
        for key, method in (("eos_token", writer.add_eos_token_id), ("bos_token", writer.add_bos_token_id)):
            token = config.get(key)
            token = token["content"] if isinstance(token, dict) else token
            if token is not None:
                method(vocab[token])
        if template := config.get("chat_template"):
            writer.add_chat_template(template)

    return add
