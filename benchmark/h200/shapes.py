"""Makes model directories to serve with dummy weights: a real config.json and a tokenizer of the real size.

The tokenizer is byte-level BPE with as many tokens as Qwen3's, of about four letters each, and with Qwen3's special
tokens and their ids, so that requests, streams and detokenization cost as much as with the real one.
"""

from __future__ import annotations

import itertools
import json
import shutil
import string
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fenceline.config.model_config import ModelConfig
from fenceline.config.model_files import DEMOS, demo_model_path

SHAPES = {
    "0.6b": "qwen3-0.6b",
    "8b": "qwen3-8b",
    "llama-8b": "llama-3.1-8b",
    "30b-a3b": "qwen3-30b-a3b",
    "gpt-oss-20b": "gpt-oss-20b",
    "glm-4.7-flash": "glm-4.7-flash",
    "deepseek-v3-cut": "deepseek-v3-cut",  # 11 of 61 layers in FP8, 8 of them with experts: what fits in one H200
    "glm-5-cut": "glm-5-cut",  # 11 of 78
    "qwen3-next-fp8": "qwen3-next-80b-fp8",  # the whole model, with states
    "minicpm-sala": "minicpm-sala",
    "qwen2.5-7b": "qwen2.5-7b",
    "qwen2.5-vl-7b": "qwen2.5-vl-7b",  # the same with a tower; config.json as published, and preprocessor_config.json
    "tiny": "tiny",
    "tiny-states": "tiny-states",  # a small Qwen3-Next
    "tiny-latent": "tiny-latent",  # a small DeepSeek-V2
}
NUM_PLAIN_TOKENS = 151643  # special tokens follow; the model's vocabulary is padded to 151,936

_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
_MARKS = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
]

# For models with a tower: an image is one token, which the server repeats.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def make_tokenizer(num_plain: int = NUM_PLAIN_TOKENS) -> Tokenizer:
    """A tokenizer with single bytes, letter pairs, pairs of pairs, and most of them again after a space, ``num_plain``
    in all, and the special tokens behind them. Takes about a second."""
    letters = string.ascii_lowercase
    pairs = [a + b for a, b in itertools.product(letters, letters)]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(pair[0], pair[1]) for pair in pairs]
    merges += [("Ġ", pair) for pair in pairs]
    num_words = num_plain - len(tokens) - len(merges)
    words = list(itertools.islice(itertools.product(pairs, pairs), (num_words + 1) // 2))
    merges += words
    merges += [("Ġ", first + second) for first, second in words[: num_words // 2]]
    tokens += [first + second for first, second in merges]
    assert len(set(tokens)) == num_plain
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in _MARKS])
    return tokenizer


def _config(shape: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(_config_file(shape).read_text())
    return config


def has_tower(shape: str) -> bool:
    """Whether the model of ``shape`` reads images."""
    return "vision_config" in _config(shape)


def _config_file(shape: str) -> Path:
    if shape in DEMOS:
        return Path(demo_model_path(shape)) / "config.json"
    return Path(__file__).parent / "models" / SHAPES[shape] / "config.json"


def num_plain_tokens(shape: str) -> int:
    """How many ids, from 0 on, are plain tokens in the vocabulary of the model of ``shape``."""
    return min(NUM_PLAIN_TOKENS, int(_config(shape)["vocab_size"]) - 256)  # special tokens come last


def kv_bytes_per_token(shape: str) -> int:
    """Bytes of what one token keeps in all layers, with 16-bit types."""
    rows = ModelConfig.from_dir(str(_config_file(shape).parent)).kv_rows("bfloat16")
    return sum(row.nbytes for layer in rows for row in layer)


def make_model_dir(shape: str, parent: Path) -> Path:
    """The folder ``parent``/NAME with config.json, tokenizer.json and tokenizer_config.json, which is made once. Some
    also have drafts, each in a folder with the name of its algorithm, where the server looks for it. For demo models it
    is the package's folder."""
    if shape in DEMOS:
        return Path(demo_model_path(shape))
    folder = parent / SHAPES[shape]
    if (folder / "tokenizer_config.json").is_file():
        return folder
    shutil.copytree(_config_file(shape).parent, folder, dirs_exist_ok=True)
    make_tokenizer(num_plain_tokens(shape)).save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    if has_tower(shape):
        config["chat_template"] = _CHAT_TEMPLATE
    # This file is written last: it shows that the folder is complete.
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
