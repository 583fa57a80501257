"""Writes a model as a directory that `transformers` and Fenceline can load."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from fenceline_demo.documents import END_OF_TEXT, IM_END
from fenceline_demo.tokenizer import save_tokenizer

from .model import DemoModel


def _layer_weights(model: DemoModel) -> dict[str, Tensor]:
    """The stacked weights by their names within a layer."""
    named = {
        "self_attn.q_proj": model.wq, "self_attn.k_proj": model.wk, "self_attn.v_proj": model.wv,
        "self_attn.o_proj": model.wo, "self_attn.q_norm": model.q_norm, "self_attn.k_norm": model.k_norm,
        "input_layernorm": model.attn_norm, "post_attention_layernorm": model.mlp_norm,
    }  # fmt: skip
    mlp = {"gate_proj": model.w_gate, "up_proj": model.w_up, "down_proj": model.w_down}
    experts = model.shape.num_experts
    if not experts:
        return named | {f"mlp.{name}": weight for name, weight in mlp.items()}
    named["mlp.gate"] = model.router
    return named | {
        f"mlp.experts.{e}.{name}": weight[e::experts] for e in range(experts) for name, weight in mlp.items()
    }


def named_weights(model: DemoModel) -> dict[str, Tensor]:
    """The weights under their Hugging Face names, bf16, contiguous, on the CPU."""
    out: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.final_norm}
    for i in range(model.shape.num_hidden_layers):
        for name, stacked in _layer_weights(model).items():
            out[f"model.layers.{i}.{name}.weight"] = stacked[i]
    return {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in sorted(out.items())}


def load_weights(model: DemoModel, directory: Path) -> None:
    """Fills the model with what `export` has written."""
    saved = load_file(directory / "model.safetensors")
    parts = dict(model.named_parameters())
    with torch.no_grad():
        parts["embed"].copy_(saved["model.embed_tokens.weight"])
        parts["final_norm"].copy_(saved["model.norm.weight"])
        for name, stacked in _layer_weights(model).items():
            for i in range(model.shape.num_hidden_layers):
                stacked[i].copy_(saved[f"model.layers.{i}.{name}.weight"])


def export(model: DemoModel, tokenizer: Tokenizer, directory: Path, chat_template: str) -> None:
    """Writes config, generation config, tokenizer and bf16 weights into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    end, pad = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)
    shape = asdict(model.shape)
    theta = shape.pop("rope_theta")
    num_experts, per_token = shape.pop("num_experts"), shape.pop("num_experts_per_tok")
    family = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    experts = {}
    if num_experts:
        family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        experts = {
            "num_experts": num_experts,
            "num_experts_per_tok": per_token,
            "moe_intermediate_size": shape["intermediate_size"],
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    config = {
        **family,
        **shape,
        **experts,
        "rope_theta": theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, directory, model.shape.max_position_embeddings, chat_template)
    save_file(named_weights(model), directory / "model.safetensors", metadata={"format": "pt"})


def check_export(model: DemoModel, tokenizer: Tokenizer, directory: Path) -> float:
    """Loads the export with `transformers` and returns the largest logit difference on a sample (fp32).

    The model's weights are rounded to bf16 first, as they are on disk.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = DemoModel(model.shape, torch.float32, compiled=False)
    reference.load_state_dict({k: v.cpu().bfloat16().float() for k, v in model.state_dict().items()})
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    chat = AutoTokenizer.from_pretrained(directory)
    text = chat.apply_chat_template(
        [{"role": "user", "content": "What is 12 + 30?"}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([chat(text)["input_ids"] * 8])
    assert ids[0].tolist() == tokenizer.encode(text).ids * 8, "transformers tokenizes differently"
    with torch.no_grad():
        x = reference.hidden(ids)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.shape.rms_norm_eps) * reference.final_norm
        return float((x @ reference.embed.T - theirs(ids).logits[0]).abs().max())
