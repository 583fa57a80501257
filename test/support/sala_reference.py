"""MiniCPM-SALA by its definition, in plain torch: transformers has no class of it. Written from the public description
(README and published config.json of openbmb/MiniCPM-SALA, arXiv:2401.04658, arXiv:2509.24663), and a whole prompt at a
time; nothing of the engine is used. Also random checkpoints of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn

SPARSE = {
    "kernel_size": 8,
    "kernel_stride": 4,
    "block_size": 16,
    "topk": 3,
    "init_blocks": 1,
    "window_size": 16,
    "use_nope": False,
    "dense_len": 0,
}
# Published models have larger numbers, and a dense_len of 8192: shorter prompts attend to all tokens.
ENTRIES: dict[str, object] = {
    "architectures": ["MiniCPMSALAForCausalLM"],
    "model_type": "minicpm_sala",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mixer_types": ["minicpm4", "lightning-attn", "minicpm4", "lightning-attn"],
    "lightning_nh": 6,
    "lightning_nkv": 6,
    "lightning_head_dim": 16,
    "lightning_scale": "1/sqrt(d)",
    "lightning_use_rope": True,
    "attn_use_rope": False,
    "attn_use_output_gate": True,
    "use_output_gate": True,
    "use_output_norm": True,
    "qk_norm": True,
    "scale_emb": 3.0,
    "scale_depth": 1.4,
    "dim_model_base": 32,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": [1],
    "dtype": "float32",
    "sparse_config": SPARSE,
}


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self._eps) * self.weight


def _rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [T, heads, features], of which token t is at position t; the halves of a head are pairs."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class _Lightning(nn.Module):
    def __init__(self, entries: SimpleNamespace) -> None:
        super().__init__()
        self._heads, dim, hidden = entries.lightning_nh, entries.lightning_head_dim, entries.hidden_size
        self._theta, bias = entries.rope_theta, entries.attention_bias
        self.q_proj, self.k_proj, self.v_proj, self.z_proj = (
            nn.Linear(hidden, self._heads * dim, bias) for _ in range(4)
        )
        self.o_proj = nn.Linear(self._heads * dim, hidden, bias)
        self.q_norm, self.k_norm = _Norm(dim, entries.rms_norm_eps), _Norm(dim, entries.rms_norm_eps)
        self.o_norm = _Norm(self._heads * dim, entries.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(1, (self._heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotated(self.q_norm(q), self._theta), _rotated(self.k_norm(k), self._theta)
        decay = torch.tensor([math.exp(-slope) for slope in _slopes(self._heads)])[:, None, None]
        state, outputs = torch.zeros(self._heads, q.shape[2], v.shape[2]), []
        for token in range(len(x)):
            state = state * decay + k[token][:, :, None] * v[token][:, None, :]
            outputs.append((q[token][:, None, :] @ state)[:, 0] / math.sqrt(q.shape[2]))
        mixed = torch.stack(outputs).flatten(1)
        return self.o_proj(self.o_norm(mixed) * torch.sigmoid(self.z_proj(x)))


def _slopes(heads: int) -> list[float]:
    if math.log2(heads).is_integer():
        return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]
    power = 2 ** int(math.log2(heads))
    return _slopes(power) + _slopes(2 * power)[::2][: heads - power]


class _Attention(nn.Module):
    def __init__(self, entries: SimpleNamespace) -> None:
        super().__init__()
        self._heads, self._kv_heads = entries.num_attention_heads, entries.num_key_value_heads
        dim, hidden, bias = entries.head_dim, entries.hidden_size, entries.attention_bias
        self.q_proj, self.o_gate = (nn.Linear(hidden, self._heads * dim, bias) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(hidden, self._kv_heads * dim, bias) for _ in range(2))
        self.o_proj = nn.Linear(self._heads * dim, hidden, bias)
        self._sparse = entries.sparse_config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x).unflatten(1, (self._heads, -1))
        k, v = (p(x).unflatten(1, (self._kv_heads, -1)) for p in (self.k_proj, self.v_proj))
        group, scale = self._heads // self._kv_heads, q.shape[2] ** -0.5
        attended = torch.zeros_like(q)
        for kv_head in range(self._kv_heads):
            for token in range(len(x)):
                own = q[token, kv_head * group : (kv_head + 1) * group]
                seen = torch.arange(token + 1)
                if self._sparse is not None and len(x) >= self._sparse["dense_len"]:
                    blocks = selected_blocks(own, k[: token + 1, kv_head], self._sparse)
                    seen = seen[torch.isin(seen // self._sparse["block_size"], torch.tensor(blocks))]
                weights = torch.softmax(own @ k[seen, kv_head].T * scale, -1)
                attended[token, kv_head * group : (kv_head + 1) * group] = weights @ v[seen, kv_head]
        return self.o_proj(attended.flatten(1) * torch.sigmoid(self.o_gate(x)))


def selected_blocks(q: torch.Tensor, keys: torch.Tensor, sparse: Mapping[str, int]) -> list[int]:
    """The blocks that the last of the tokens with ``keys`` [n, features] attends to, with the queries q [group,
    features] of the heads that share a key head."""
    size, stride, block = sparse["kernel_size"], sparse["kernel_stride"], sparse["block_size"]
    scale, num_tokens = keys.shape[1] ** -0.5, len(keys)

    def means(width: int, step: int) -> list[torch.Tensor]:
        return [keys[first : first + width].mean(0) for first in range(0, num_tokens - width + 1, step)]

    fine, coarse = means(size, stride), means(4 * size, 4 * stride)
    scores = torch.zeros(len(fine))
    if coarse:
        norm = torch.logsumexp(q @ torch.stack(coarse).T * scale, -1, keepdim=True)
        scores = torch.exp(q @ torch.stack(fine).T * scale - norm).sum(0)
    own, by_block = (num_tokens - 1) // block, {}
    for number in range(own + 1):
        if number < sparse["init_blocks"] or own - number <= sparse["window_size"] // block:
            by_block[number] = math.inf
            continue
        begin, end = number * block, (number + 1) * block
        overlapping = [i for i in range(len(fine)) if i * stride < end and i * stride + size > begin]
        by_block[number] = max((float(scores[i]) for i in overlapping), default=0.0)
    most = sparse["topk"] + sparse["window_size"] // block
    return sorted(sorted(by_block, key=lambda number: (-by_block[number], number))[:most])


class _MLP(nn.Module):
    def __init__(self, entries: SimpleNamespace) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(entries.hidden_size, entries.intermediate_size, False) for _ in range(2)
        )
        self.down_proj = nn.Linear(entries.intermediate_size, entries.hidden_size, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, entries: SimpleNamespace, kind: str) -> None:
        super().__init__()
        self.self_attn = _Attention(entries) if kind == "minicpm4" else _Lightning(entries)
        self.mlp = _MLP(entries)
        self.input_layernorm, self.post_attention_layernorm = (
            _Norm(entries.hidden_size, entries.rms_norm_eps) for _ in range(2)
        )
        self._scale = entries.scale_depth / math.sqrt(entries.num_hidden_layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._scale * self.self_attn(self.input_layernorm(x))
        return x + self._scale * self.mlp(self.post_attention_layernorm(x))


class _Model(nn.Module):
    def __init__(self, entries: SimpleNamespace) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(entries.vocab_size, entries.hidden_size)
        self.layers = nn.ModuleList(_Layer(entries, kind) for kind in entries.mixer_types)
        self.norm = _Norm(entries.hidden_size, entries.rms_norm_eps)


class SalaReference(nn.Module):
    """Called and answers as a model of transformers does: ids [1, T] → ``logits`` [1, T, vocab_size]."""

    device = torch.device("cpu")

    def __init__(self, entries: Mapping[str, object]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**entries)
        self.model = _Model(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, False)

    def forward(self, ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        x = self.model.embed_tokens(ids[0]) * self.config.scale_emb
        for layer in self.model.layers:
            x = layer(x)
        logits = self.lm_head(self.model.norm(x) / (self.config.hidden_size / self.config.dim_model_base))
        return SimpleNamespace(logits=logits[None])


def save_sala(directory: Path, others: Mapping[str, object] | None = None) -> SalaReference:
    """A random model of ``ENTRIES``, of which ``others`` replace some, saved as a checkpoint; float32."""
    entries = ENTRIES | dict(others or {})
    model, generator = SalaReference(entries).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            offset = 1.0 if param.dim() == 1 else 0.0
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3 + offset)
    save_file(model.state_dict(), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(entries))
    return model
