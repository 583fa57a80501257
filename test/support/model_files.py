"""A model directory with only what the configuration reads: a small Llama's config.json and a file of weights
without tensors."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def make_model_dir(folder: Path) -> Path:
    """Make a new model directory in ``folder``."""
    directory = folder / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG_JSON))
    (directory / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return directory
