"""Random small checkpoints in Hugging Face's format, the logits of transformers, and ours with paged memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import transformers
from recurrence_cases import empty_states

from fenceline.config.kv_layout import KVLayout
from fenceline.config.model_config import ModelConfig
from fenceline.config.state_layout import GRID
from fenceline.layers.attention.backends import AttentionSetting, make_attention_backends
from fenceline.layers.attention.base import plan_extend
from fenceline.layers.context import LayerContext, Shard, torch_context
from fenceline.layers.forward_batch import AttentionInputs, AuxHiddenStates, ForwardBatch, ForwardMode
from fenceline.layers.recurrent_state import StateRows, StateStep
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order.device import CpuDevice
from fenceline.models.decoder import CausalLM
from fenceline.models.draft import DraftModel
from fenceline.models.loader import load_model

CONTEXT = 256
SIZES: dict[str, object] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_ROPES: dict[str, dict[str, object]] = {
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
}

_LONGROPE: dict[str, object] = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "original_max_position_embeddings": 64,
    "short_factor": [0.9, 1.2, 1.5, 2.0],
    "long_factor": [1.1, 2.0, 5.0, 9.0],
}
_MINICPM3: dict[str, object] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "dim_model_base": 32,
}
# Rules whose angles depend on a sequence's length in transformers, for the numbers of rotated features there are.
LENGTH_ROPES: dict[str, tuple[str, dict[str, object]]] = {
    "phi3-longrope": (
        "Phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0, 1.2, 1.5, 2.0],
                "long_factor": [1.1, 2.0, 5.0, 9.0],
            },
        },
    ),
    "phi3-longrope-partial": (  # Phi-4-mini
        "Phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [1.3, 5.0, 9.0],
            },
        },
    ),
    # As MiniCPM3 writes it, with the attention factor in config.json.
    "llama-longrope": ("Llama", {"rope_parameters": {**_LONGROPE, "attention_factor": 1.4}}),
    "minicpm3-lengths": ("MiniCPM3", {**_MINICPM3, "q_lora_rank": None, "rope_parameters": _LONGROPE}),
    "llama-dynamic": (
        "Llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        },
    ),
}

_HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
_EXPERTS: dict[str, object] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_ERNIE: dict[str, object] = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}
_GPT_OSS: dict[str, object] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 40,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 33,
    "swiglu_limit": 2.0,
    "rope_parameters": {**_ROPES["yarn"], "truncate": False, "factor": 8.0, "original_max_position_embeddings": 32},
}

# With the published epsilon, the norm of a head whose result is nearly zero would magnify differences of roundings.
_DELTA_NET: dict[str, object] = {
    "rms_norm_eps": 1e-2,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}

_MAMBA2: dict[str, object] = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "n_groups": 4,
    "ssm_state_size": 12,
    "time_step_min": 1e-9,
    "chunk_size": 32,
}

# As DeepSeek-V2-Lite is published, with the angles and the temperature of yarn.
_DEEPSEEK: dict[str, object] = {
    "num_key_value_heads": None,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "rope_parameters": {**_ROPES["yarn"], "mscale": 0.7, "mscale_all_dim": 0.7},
}

_GROUPED: dict[str, object] = {
    **_DEEPSEEK,
    "q_lora_rank": 24,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": {**_ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 1.0},
}
_DEEPSEEK_V3 = {**_GROUPED, "num_mtp_layers": 0}
_GLM_FLASH = {**_GROUPED, "num_key_value_heads": 6}

# As DeepSeek-V3.2 and GLM-5 are published. Sixteen heads of the indexer: of fewer, relu makes so many exact zeros that
# transformers' choice among equal scores counts.
_SPARSE: dict[str, object] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 18,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "index_n_heads": 16,
    "index_head_dim": 28,
    "index_topk": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}

# The family and the entries of config.json that differ from SIZES. The names are test ids.
CHECKPOINTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-relu": ("Llama", {"hidden_act": "relu", "num_hidden_layers": 1}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama-gelu-new": ("Llama", {"hidden_act": "gelu_new", "num_hidden_layers": 1}),
    "llama-mha-one-layer": ("Llama", {"num_key_value_heads": 6, "num_hidden_layers": 1, "vocab_size": 1009}),
    **{f"llama-{name}": ("Llama", {"rope_parameters": rope}) for name, rope in _ROPES.items()},
    "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen2-tied-yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": _ROPES["yarn"]}),
    "qwen3": ("Qwen3", {"head_dim": 20, "rms_norm_eps": 1e-5}),
    "qwen3-tied-biased": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "mistral": ("Mistral", {"head_dim": 14, "sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 40}),
    "mistral-loose-window": ("Mistral", {"sliding_window": CONTEXT}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}),
    "qwen3-windows": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 50,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": (
        "Gemma2",
        {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 33, "query_pre_attn_scalar": 24, **_CAPS},
    ),
    "gemma2-uncapped": (
        "Gemma2",
        {"head_dim": 12, "sliding_window": 100, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3-untied": (
        "Gemma3Text",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "sliding_window": 20,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 4.0,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-all-experts": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 14}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**_EXPERTS, "head_dim": 16, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    ),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-partial": ("Phi3", {"pad_token_id": 0, "rope_parameters": _HALF_ROTATED}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 20}),
    "seed-oss-other-biases": (
        "SeedOss",
        {"head_dim": 16, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "deepseek-v2-lite": ("DeepseekV2", _DEEPSEEK),
    "deepseek-v2-query-rank": (  # the norms of latents do not have rms_norm_eps
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "q_lora_rank": 18,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**_ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
        },
    ),
    "deepseek-v3": ("DeepseekV3", _DEEPSEEK_V3),
    "deepseek-v3-halves": ("DeepseekV3", {**_DEEPSEEK_V3, "rope_interleave": False, "q_lora_rank": None}),
    "kimi-k2": (
        "DeepseekV3",
        {
            **_DEEPSEEK_V3,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "routed_scaling_factor": 2.827,
            "n_shared_experts": 2,
            "rope_parameters": {**_ROPES["yarn"], "beta_fast": 1.0},
        },
    ),
    "glm4.7-flash": (
        "Glm4MoeLite",
        {
            **_GLM_FLASH,
            "first_k_dense_replace": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "glm4.7-flash-mixed": (
        "Glm4MoeLite",
        {
            **_GLM_FLASH,
            "num_hidden_layers": 4,
            "rms_norm_eps": 1e-2,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "norm_topk_prob": False,
        },
    ),
    "minicpm3-longrope": (  # of which the original length is the longest, as in the published model
        "MiniCPM3",
        {
            **_MINICPM3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            # Some versions of transformers ask for the factor, which follows from the lengths.
            "rope_parameters": {**_LONGROPE, "original_max_position_embeddings": CONTEXT, "factor": 1.0},
        },
    ),
    "minicpm3": ("MiniCPM3", {**_MINICPM3, "scale_depth": None, "dim_model_base": None, "v_head_dim": 24}),
    "deepseek-v3.2": (
        "DeepseekV32",
        {**_SPARSE, "rope_parameters": {**_ROPES["yarn"], "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "glm-5": ("GlmMoeDsa", {**_SPARSE, "attention_bias": True, "rms_norm_eps": 1e-2}),
    "glm-5-shared": (
        "GlmMoeDsa",
        {**_SPARSE, "num_hidden_layers": 5, "indexer_types": ["full", "shared", "full", "shared", "shared"]},
    ),
    "ernie4.5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "ernie4.5-moe": ("Ernie4_5_Moe", {**_ERNIE, "moe_num_shared_experts": 2}),
    "ernie4.5-moe-some-layers": (
        "Ernie4_5_Moe",
        {
            **_ERNIE,
            "num_hidden_layers": 5,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 3,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
    ),
    "exaone4": (
        "Exaone4",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "sliding_window": 33,
            "sliding_window_pattern": "LG",
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "exaone4-no-windows": (
        "Exaone4",
        {
            "head_dim": 16,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPES["llama3"],
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 33,
            "attention_bias": True,
            "rope_parameters": {"full_attention": _ROPES["yarn"], "sliding_attention": {"rope_theta": 300.0}},
        },
    ),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_mtp_layers": 0,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rotary_dim": 6,
            "rope_parameters": _HALF_ROTATED,  # earlier versions of transformers read this instead
        },
    ),
    "gpt-oss": ("GptOss", _GPT_OSS),
    "gpt-oss-few-experts": (
        "GptOss",
        {**_GPT_OSS, "num_local_experts": 4, "num_experts_per_tok": 4, "attention_bias": False},
    ),
    "qwen2-moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3-next": (
        "Qwen3Next",
        {
            **_EXPERTS,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "rope_parameters": _HALF_ROTATED,
            "shared_expert_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
            + ["full_attention"],
            **_DELTA_NET,
        },
    ),
    "qwen3.5": (
        "Qwen3_5Text",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "rope_parameters": _HALF_ROTATED,
            "attention_bias": True,
            "full_attention_interval": 2,
            **_DELTA_NET,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeText",
        {
            **_EXPERTS,
            "head_dim": 16,
            "rope_parameters": _HALF_ROTATED,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **_DELTA_NET,
            "linear_num_value_heads": 4,
        },
    ),
    "kimi-linear": (
        "KimiLinear",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 6,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 20,
            "qk_rope_head_dim": 16,
            "v_head_dim": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 12,
            "rms_norm_eps": 1e-2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 100,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.25,
            "norm_eps": 1e-3,
            "conv_bias": True,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        },
    ),
    # Nearly no least time step, which transformers has in prefill only.
    "nemotron-h": (
        "NemotronH",
        {
            **_MAMBA2,
            "num_hidden_layers": 8,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
            + ["linear_attention", "full_attention", "linear_attention"],
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_limit": [0.0, 1e9],
        },
    ),
    "nemotron-h-latent": (
        "NemotronH",
        {
            **_MAMBA2,
            "num_hidden_layers": 8,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"] * 2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 20,
        },
    ),
    "nemotron-h-moe": (
        "NemotronH",
        {
            **_MAMBA2,
            "num_hidden_layers": 8,
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"]
            + ["linear_attention", "mlp", "full_attention"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "qwen2-moe-no-bias": (
        "Qwen2Moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 32, "norm_topk_prob": True, "qkv_bias": False},
    ),
}

# Entries of config.json that have no defaults, beside SIZES, or must go with them.
_REQUIRED = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_k",
             "moe_intermediate_size", "num_key_value_heads", "layers_block_type")  # fmt: skip


def shortest_config(name: str) -> tuple[transformers.PreTrainedConfig, dict[str, object]]:
    """A config.json of the family of ``CHECKPOINTS[name]`` from which every entry with a default is left out, and what
    transformers makes of it."""
    family, changes = CHECKPOINTS[name]
    entries = {**SIZES, "num_hidden_layers": 8, **{key: changes[key] for key in _REQUIRED if key in changes}}
    padding = {"pad_token_id": 0}  # for transformers: some defaults are outside this vocabulary
    config = getattr(transformers, f"{family}Config")(**entries, **padding)
    return config, {**entries, "architectures": [f"{family.removesuffix('Text')}ForCausalLM"]}


def save_checkpoint(
    name: str, directory: Path, others: Mapping[str, object] | None = None
) -> transformers.PreTrainedModel:
    """A random model of ``CHECKPOINTS[name]``, saved in several safetensors files; float32, in eval mode. ``others``:
    entries of its config.json that are replaced."""
    family, changes = (CHECKPOINTS | LENGTH_ROPES)[name]
    config_class = getattr(transformers, f"{family}Config")
    name_of_class = f"{family.removesuffix('Text')}ForCausalLM"
    model_class: Callable[..., transformers.PreTrainedModel] = getattr(transformers, name_of_class)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = config_class(**{**SIZES, **changes, **(others or {}), **eager})
    model = model_class(config).eval()
    if hasattr(config, "swiglu_limit"):  # earlier versions of transformers always use 7
        for layer in model.model.layers:
            layer.mlp.experts.limit = config.swiglu_limit
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # transformers keeps the corrections of a router's scores in buffers, not in parameters.
        buffers = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for param in (*model.parameters(), *buffers):
            # The spread is so large that attention is not uniform and every bias and norm weight affects the logits.
            offset = 1.0 if param.dim() == 1 else 0.0
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3 + offset)
    model.save_pretrained(directory, max_shard_size="40KB")
    return model


def reference_logits(model: transformers.PreTrainedModel, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """transformers' logits [len(prompt), vocab_size] of every prompt, each computed alone."""
    with torch.no_grad():
        return [model(prompt.to(model.device)[None], use_cache=False).logits[0].float().cpu() for prompt in prompts]


class PagedModel:
    """Our model with a KV pool whose pages are leased in random order."""

    def __init__(
        self,
        directory: Path,
        page_size: int,
        device: str,
        num_rows: int = 8,
        context: LayerContext | None = None,
        make_draft: Callable[[CausalLM], tuple[DraftModel, ModelConfig]] | None = None,
        context_length: int | None = None,
        quantization: str | None = None,
    ) -> None:
        """``context``: what its layers are made with; None: torch's operators. ``make_draft`` makes a draft from the
        model, whose layers follow the model's in the pool, and returns its config too."""
        self.config = ModelConfig.from_dir(str(directory), context_length=context_length, quantization=quantization)
        self.device = torch.device(device)
        if context is None:
            context = torch_context(Shard(), torch.float32)
        self.model = load_model(self.config, "auto", self.device, context, 0, progress=False)
        self.page_size = page_size
        self.least_expanded: int | None = None  # see ``plan_extend``
        pages_per_row = -(-CONTEXT // page_size)
        num_pages = num_rows * pages_per_row + 1
        self.draft, configs = None, [self.config]
        if make_draft is not None:
            self.draft, draft_config = make_draft(self.model)
            configs.append(draft_config)
        dtype, num_ranks = str(context.kv_dtype or context.dtype).removeprefix("torch."), context.shard.size
        rows = tuple(chain.from_iterable(config.kv_rows(dtype, num_ranks) for config in configs))
        self.pool = KVPool(num_pages, KVLayout(page_size, rows), self.device, context.dtype)
        # Slots that have not been written must not be used, so all but the sink are NaN.
        for layer in range(self.pool.num_layers):
            for row in self.pool.rows[layer].values():
                row[page_size:] = float("nan") if row.is_floating_point() else 0x7F
        self.states = empty_states(self.model.state_specs, num_rows + 1)  # the slot of a row is the one after it
        rules = self.model.attention_rules | ({} if self.draft is None else self.draft.attention_rules)
        setting = AttentionSetting(self.pool, CpuDevice(), self.config.num_heads, CONTEXT, rules=rules)
        self.backend = make_attention_backends("torch", "torch", setting).prefill
        pages = np.random.default_rng(3).permutation(np.arange(1, num_pages))
        self.page_table = pages.reshape(num_rows, pages_per_row).astype(np.int32)

    def share_prefix(self, source: int, target: int, num_pages: int) -> None:
        """Let row ``target`` begin with the first pages of row ``source``, as after a prefix hit, and with its
        states."""
        self.page_table[target, :num_pages] = self.page_table[source, :num_pages]
        for state, spec in zip(self.states, self.model.state_specs, strict=True):
            for part in spec.carried:
                state[part.name][target + 1] = state[part.name][source + 1]

    def step(
        self,
        work: Sequence[tuple[int, torch.Tensor, int, int]],
        mode: ForwardMode,
        logits_index: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Run tokens ``[start, end)`` of each (row, prompt, start, end) in one batch → one tensor of logits for
        each."""
        with torch.inference_mode():
            logits = self.model.forward(self.batch(work, mode, logits_index)).cpu()
        if logits_index is not None:
            return [logits]
        return list(logits.split([end - start for *_, start, end in work]))

    def batch(
        self,
        work: Sequence[tuple[int, torch.Tensor, int, int]],
        mode: ForwardMode,
        logits_index: Sequence[int] | None = None,
        aux_hidden: AuxHiddenStates | None = None,
    ) -> ForwardBatch:
        """The inputs of ``step``."""
        spans = [np.arange(start, end) for _, _, start, end in work]
        slots = [
            self.page_table[row, span // self.page_size].astype(np.int64) * self.page_size + span % self.page_size
            for (row, *_), span in zip(work, spans, strict=True)
        ]
        out_slots = self._tensor(np.concatenate(slots))
        seq_lens = np.array([end for *_, end in work], dtype=np.int64)
        starts = np.cumsum([0, *map(len, spans)]).astype(np.int32)
        inputs = AttentionInputs(
            mode=mode,
            page_table=self._tensor(self.page_table),
            rows=self._tensor(np.array([row for row, *_ in work], dtype=np.int64)),
            seq_lens=self._tensor(seq_lens),
            seq_lens_cpu=seq_lens,
            query_lens_cpu=np.array([len(span) for span in spans], dtype=np.int64),
            query_starts=self._tensor(starts),
        )
        state_rows = StateRows(
            starts=self._tensor(np.array([start for *_, start, _ in work], dtype=np.int64)),
            absorbed=self._tensor(np.array([start // GRID * GRID for *_, start, _ in work], dtype=np.int64)),
            query_starts=self._tensor(starts),
            query_lens_cpu=inputs.query_lens_cpu,
            slots=inputs.rows + 1,
        )
        return ForwardBatch(
            mode=mode,
            input_ids=torch.cat([prompt[start:end] for _, prompt, start, end in work]).to(self.device),
            positions=(self._tensor(np.concatenate(spans)),),
            out_slots=out_slots,
            logits_index=None
            if logits_index is None
            else torch.tensor(logits_index, dtype=torch.int64, device=self.device),
            attn=plan_extend(self.backend, inputs, self.least_expanded),
            kv_pool=self.pool,
            aux_hidden=aux_hidden,
            states=StateStep(state_rows, self.states) if self.states else None,
        )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.copy()).to(self.device)


def check_parity(
    directory: Path, reference: transformers.PreTrainedModel, page_size: int, device: str, atol: float = 1e-4
) -> None:
    """Prefill, chunked prefill, prefix hit and decode of ragged batches against ``reference``, to ``atol``. With
    recurrent layers to twenty times that: each of the two is up to 9e-4 beside float64 then, on some CPUs."""
    generator = torch.Generator().manual_seed(2)
    vocab_size = reference.config.vocab_size
    prompts = [torch.randint(0, vocab_size, (n,), generator=generator) for n in (150, 3, 67, 1)]
    # States are shared where they are: at the last point of the grid.
    recurrent = bool(ModelConfig.from_dir(str(directory)).recurrent_layers)
    shared, atol = (GRID, 20 * atol) if recurrent else (96, atol)
    hit = torch.cat([prompts[0][:shared], torch.randint(0, vocab_size, (41,), generator=generator)])
    prompts.append(hit)
    expected = reference_logits(reference, prompts)
    ours = PagedModel(directory, page_size, device)
    rows = [5, 0, 3, 7, 2]
    decode_from = [140, 2, 61, 1, len(hit) - 7]  # the rest of each prompt is decoded, fed token by token

    def run(work: list[tuple[int, int, int]], mode: ForwardMode) -> None:
        results = ours.step([(rows[i], prompts[i], start, end) for i, start, end in work], mode)
        for (i, start, end), logits in zip(work, results, strict=True):
            torch.testing.assert_close(logits, expected[i][start:end], atol=atol, rtol=0.0)

    # One request is computed in three chunks, together with others that are computed in one step.
    run([(0, 0, 53), (1, 0, 2)], ForwardMode.EXTEND)
    run([(2, 0, 61), (0, 53, 54), (3, 0, 1)], ForwardMode.EXTEND)
    run([(0, 54, 100)], ForwardMode.EXTEND)
    ours.share_prefix(rows[0], rows[4], shared // page_size)
    run([(0, 100, 140)], ForwardMode.EXTEND)
    run([(4, shared, len(hit) - 7)], ForwardMode.EXTEND)
    positions = list(decode_from)
    while live := [i for i, prompt in enumerate(prompts) if positions[i] < len(prompt)]:
        run([(i, positions[i], positions[i] + 1) for i in live], ForwardMode.DECODE)
        for i in live:
            positions[i] += 1
