"""A published model in a GGUF file, served and compared with transformers. Not part of the CPU suite: it needs the file
that ``fenceline fetch-demo smollm2`` downloads.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
import transformers

import fenceline
from fenceline.cli.fetch_demo import MODELS, cache_folder
from fenceline.frontend.tokenizer import load_tokenizer

FILE = cache_folder() / MODELS["smollm2"].file
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not FILE.is_file(), reason=f"needs {FILE}: run fenceline fetch-demo smollm2"),
    pytest.mark.timeout(900),
]
PROMPTS = [
    "The capital of France is", "Once upon a time, there was", "def fibonacci(n):\n", "1, 2, 3, 4,", "Water boils at",
    "The quick brown fox", "To make a cup of tea,", "In 1969, humans", "import numpy as np\n", "Q: What is 2 + 2?\nA:",
    "Roses are red,", "The largest planet is", "She opened the door and", "Dear Sir or Madam,", "Photosynthesis is",
    "SELECT name FROM", "My favourite colour is", "The meaning of life", "Les enfants jouent", "Python is a language",
]  # fmt: skip


def reference(path: Path) -> transformers.LlamaForCausalLM:
    """The model in transformers, float32, read by the package gguf."""
    reader = gguf.GGUFReader(path)

    def number(key: str) -> float:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = int(number("attention.head_count")), int(number("attention.head_count_kv"))
    config = transformers.LlamaConfig(
        vocab_size=int(number("vocab_size")),
        hidden_size=int(number("embedding_length")),
        intermediate_size=int(number("feed_forward_length")),
        num_hidden_layers=int(number("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(number("context_length")),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base"),
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, param in model.named_parameters():
            tensor = stored[names.get_name(name, try_suffixes=(".weight",)) or name]
            values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).view(param.shape)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parts = heads if "q_proj" in name else kv_heads
                values = values.view(parts, -1, 2, param.shape[1]).transpose(1, 2).reshape(param.shape)
            param.copy_(values)
    return model


def test_twenty_prompts_have_the_tokens_of_transformers() -> None:
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    with fenceline.Engine(str(FILE), dtype="float32", log_level="warning", max_total_tokens=4096) as engine:
        found = engine.generate(PROMPTS, sampling, return_logprob=True)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = engine.chat(question, temperature=0, max_tokens=24)["choices"][0]
    assert "Paris" in answer["message"]["content"] and answer["finish_reason"] == "stop"
    model, tokenizer = reference(FILE), load_tokenizer(FILE)
    for prompt, ours in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        theirs = model.generate(
            ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, ids.shape[1] :]
        assert ours["output_ids"] == theirs.tolist(), prompt
        with torch.no_grad():
            logprobs = model(torch.cat((ids, theirs[None]), 1)).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, theirs[:, None])[:, 0]
        got = torch.tensor([value for value, *_ in ours["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
