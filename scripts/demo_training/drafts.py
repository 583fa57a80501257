"""The demo model's drafts in plain torch: an EAGLE-3 head, and two layers of multi-token prediction (MTP).

Row i of a sequence is computed from token i + 1 and the target's hidden states of token i. Step s of its chain predicts
token i + 2 + s from the preceding token. In training this is always the true token, because the tokens of a chain after
its first wrong one are not used.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from .model import DemoModel, rms_norm, rotate


@dataclass(frozen=True, slots=True)
class States:
    """What the target computes for ids [rows, length], without gradients."""

    ids: Tensor  # int64
    residuals: list[Tensor]  # before each layer and after the last, [rows, length, hidden] fp32
    normed: Tensor  # after the final norm


@torch.no_grad()
def target_states(target: DemoModel, ids: Tensor) -> States:
    """The states of the target for ids [rows, length] int64."""
    residuals = [x.view(*ids.shape, -1) for x in target.residuals(ids)]
    normed = rms_norm(residuals[-1], target.final_norm, target.shape.rms_norm_eps)
    return States(ids, residuals, normed)


class Block(nn.Module):
    """Attention and SwiGLU of one layer. Matrices have a leading dimension of 1, as the optimizer expects."""

    def __init__(
        self, in_size: int, size: int, heads: int, kv_heads: int, head_dim: int, inner: int, qk_norm: bool
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj, self.k_proj = matrix(heads * head_dim, in_size), matrix(kv_heads * head_dim, in_size)
        self.v_proj, self.o_proj = matrix(kv_heads * head_dim, in_size), matrix(size, heads * head_dim, 0)
        self.gate_proj, self.up_proj = matrix(inner, size), matrix(inner, size)
        self.down_proj = matrix(size, inner, 0)
        self.mlp_norm = nn.Parameter(torch.ones(size))
        self.q_norm = nn.Parameter(torch.full((head_dim,), SHARPNESS)) if qk_norm else None
        self.k_norm = nn.Parameter(torch.full((head_dim,), SHARPNESS)) if qk_norm else None

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The weights under their published names."""
        attention = {name: getattr(self, f"{name}_proj")[0] for name in ("q", "k", "v", "o")}
        mlp = {name: getattr(self, f"{name}_proj")[0] for name in ("gate", "up", "down")}
        named = {f"{prefix}self_attn.{name}_proj": weight for name, weight in attention.items()}
        named |= {f"{prefix}mlp.{name}_proj": weight for name, weight in mlp.items()}
        named |= {f"{prefix}post_attention_layernorm": self.mlp_norm}
        if self.q_norm is not None and self.k_norm is not None:
            named |= {f"{prefix}self_attn.q_norm": self.q_norm, f"{prefix}self_attn.k_norm": self.k_norm}
        return named

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, in_size], positions [B, T] → [B, heads, T, head_dim]."""
        return self._heads(x, self.q_proj, self.q_norm, positions)

    def key(self, x: Tensor, positions: Tensor) -> Tensor:
        """Like `query`, with every key head repeated for its group of query heads."""
        return self._heads(x, self.k_proj, self.k_norm, positions).repeat_interleave(self.heads // self.kv_heads, 1)

    def value(self, x: Tensor) -> Tensor:
        """Like `key`, neither normalised nor rotated."""
        v = F.linear(x, self.v_proj[0]).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return v.repeat_interleave(self.heads // self.kv_heads, 1)

    def add(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual x [B, T, size] after attention [B, heads, T, head_dim] and the feed-forward block."""
        x = x + F.linear(attended.transpose(1, 2).flatten(2), self.o_proj[0])
        h = rms_norm(x, self.mlp_norm, EPS)
        h = F.silu(F.linear(h, self.gate_proj[0])) * F.linear(h, self.up_proj[0])
        return x + F.linear(h, self.down_proj[0])

    def _heads(self, x: Tensor, weight: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        y = F.linear(x, weight[0]).unflatten(-1, (-1, self.head_dim))
        if norm is not None:
            y = rms_norm(y, norm, EPS)
        half = torch.arange(0, self.head_dim, 2, device=x.device).float() / self.head_dim
        angles = positions.flatten()[:, None].float() * ROPE_THETA**-half
        return rotate(y.flatten(0, 1), angles.cos(), angles.sin()).view_as(y).transpose(1, 2)


EPS = 1e-6
ROPE_THETA = 100_000.0
SHARPNESS = 1.5  # initial weight of the norms of queries and keys; with 1 it takes long to learn to copy long lists
SCALE = 0.2  # initial scale of the draft's logits relative to the target's, whose probabilities are close to 0 or 1


def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    """A parameter [1, rows, columns], drawn so that products keep the size of their input."""
    return nn.Parameter(torch.randn(1, rows, columns) * columns**-0.5 * scale)


class Draft(nn.Module):
    """The common parts of both drafts: chains of `steps` predictions, the target's embedding and head, a checkpoint."""

    steps: int
    published: str  # the directory's name

    @abstractmethod
    def chains(self, states: States, rows: Tensor, target: DemoModel) -> list[Tensor]:
        """Logits [B, M, vocabulary] of each step for rows [B, M] of each sequence (0 <= row <= length - 2 - steps)."""

    @abstractmethod
    def named(self) -> dict[str, Tensor]:
        """The weights under their published names, without `.weight`."""

    @abstractmethod
    def config(self) -> dict[str, object]:
        """The entries of config.json that only this draft has."""

    def save(self, directory: Path) -> None:
        """Writes bf16 weights and config.json into `directory` as such drafts are published."""
        directory.mkdir(parents=True, exist_ok=True)
        weights = {
            f"{name}.weight": t.detach().to("cpu", torch.bfloat16).contiguous()
            for name, t in sorted(self.named().items())
        }
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        config = {
            **self.config(), "vocab_size": 1024, "hidden_size": 256, "max_position_embeddings": 4096,
            "rms_norm_eps": EPS, "rope_theta": ROPE_THETA, "hidden_act": "silu", "attention_bias": False,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        }  # fmt: skip
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that Muon updates."""
        return [p for p in self.parameters() if p.dim() == 3]

    def others(self) -> list[nn.Parameter]:
        """The parameters that AdamW updates."""
        return [p for p in self.parameters() if p.dim() != 3]


def take(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, T, size] at rows [B, M] → [B, M, size]."""
    return x.gather(1, rows.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class Eagle3(Draft):
    """One layer that continues its own hidden states (arXiv:2503.01840). It is trained on chains as in speculation."""

    steps, published = 3, "eagle3"
    layers = (2, 3, 4)  # the target's layers whose inputs are read; 4 stands for the output of the last
    heads, kv_heads, head_dim, inner = 2, 1, 64, 128

    def __init__(self, target: DemoModel) -> None:
        super().__init__()
        size = target.shape.hidden_size
        self.fc = matrix(size, len(self.layers) * size, 0.1)
        with torch.no_grad():  # it begins with the target's last hidden states
            self.fc[0, :, -size:] += torch.eye(size)
        self.block = Block(2 * size, size, self.heads, self.kv_heads, self.head_dim, self.inner, qk_norm=False)
        self.input_norm, self.hidden_norm = (nn.Parameter(torch.ones(size)) for _ in range(2))
        self.norm = nn.Parameter(target.final_norm * SCALE)

    def chains(self, states: States, rows: Tensor, target: DemoModel) -> list[Tensor]:
        block, num_rows = self.block, states.ids.shape[1] - 1
        aux = torch.cat([states.residuals[layer][:, :num_rows] for layer in self.layers], -1)
        hidden = F.linear(aux, self.fc[0])
        both = self._input(target.embed[states.ids[:, 1:]], hidden)
        positions = torch.arange(num_rows, device=rows.device).expand(len(rows), -1)
        keys, values = block.key(both, positions), block.value(both)
        hidden, both = take(hidden, rows), take(both, rows)
        later = (positions.unsqueeze(1) > rows.unsqueeze(-1)).unsqueeze(1)  # [B, 1, M, rows]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        logits = []
        for step in range(self.steps):
            if step > 0:
                ids = states.ids.gather(1, rows + 1 + step)
                both = self._input(target.embed[ids], hidden)
                own_keys.append(block.key(both, rows + step))
                own_values.append(block.value(both))
            q = block.query(both, rows + step) * self.head_dim**-0.5
            scores = (q @ keys.mT).masked_fill(later, float("-inf"))
            own = [(q * key).sum(-1, keepdim=True) for key in own_keys]
            weights = torch.cat((scores, *own), -1).softmax(-1)
            attended = weights[..., :num_rows] @ values
            for index, value in enumerate(own_values):
                attended = attended + weights[..., num_rows + index, None] * value
            hidden = block.add(hidden, attended)
            logits.append(F.linear(rms_norm(hidden, self.norm, EPS), target.embed))
        return logits

    def _input(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((rms_norm(embedded, self.input_norm, EPS), rms_norm(hidden, self.hidden_norm, EPS)), -1)

    def named(self) -> dict[str, Tensor]:
        norms = {
            "midlayer.input_layernorm": self.input_norm,
            "midlayer.hidden_norm": self.hidden_norm,
            "norm": self.norm,
        }
        return {"fc": self.fc[0], **norms, **self.block.named("midlayer.")}

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "intermediate_size": self.inner, "draft_vocab_size": 1024,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.layers]},
        }  # fmt: skip


class MTP(Draft):
    """Two layers; layer k predicts from token i + 1 + k and the hidden state that layer k - 1 has computed for row
    i."""

    steps, published = 2, "nextn"
    heads, kv_heads, head_dim, inner = 2, 1, 64, 32

    def __init__(self, target: DemoModel) -> None:
        super().__init__()
        size = target.shape.hidden_size
        self.blocks = nn.ModuleList(
            Block(size, size, self.heads, self.kv_heads, self.head_dim, self.inner, qk_norm=True)
            for _ in range(self.steps)
        )
        self.input_proj = nn.ParameterList(matrix(size, 2 * size, 0.1) for _ in range(self.steps))
        with torch.no_grad():  # they begin with the hidden states that they are given
            for weight in self.input_proj:
                weight[0, :, :size] += torch.eye(size)
        names = ("token_layernorm", "hidden_layernorm", "input_layernorm")
        self.norms = nn.ModuleList(
            nn.ParameterDict({name: torch.ones(size) for name in names}) for _ in range(self.steps)
        )
        for norms in self.norms:
            norms["final_layernorm"] = nn.Parameter(target.final_norm * SCALE)

    def chains(self, states: States, rows: Tensor, target: DemoModel) -> list[Tensor]:
        hidden, logits = states.normed, []
        for step in range(self.steps):
            num_rows = states.ids.shape[1] - 1 - step
            embedded = target.embed[states.ids[:, 1 + step :]].clone()
            embedded[:, 0] = 0.0
            norms, block = self.norms[step], self.blocks[step]
            assert isinstance(norms, nn.ParameterDict) and isinstance(block, Block)
            parts = (
                rms_norm(hidden[:, :num_rows], norms["hidden_layernorm"], EPS),
                rms_norm(embedded, norms["token_layernorm"], EPS),
            )
            x = F.linear(torch.cat(parts, -1), self.input_proj[step][0])
            normed = rms_norm(x, norms["input_layernorm"], EPS)
            positions = torch.arange(num_rows, device=rows.device).expand(len(rows), -1)
            attended = F.scaled_dot_product_attention(
                block.query(normed, positions), block.key(normed, positions), block.value(normed),
                is_causal=True,
            )  # fmt: skip
            hidden = rms_norm(block.add(x, attended), norms["final_layernorm"], EPS)
            logits.append(F.linear(take(hidden, rows), target.embed))
        return logits

    def named(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for step in range(self.steps):
            prefix = f"model.mtp_layers.{step}."
            norms, block = self.norms[step], self.blocks[step]
            assert isinstance(norms, nn.ParameterDict) and isinstance(block, Block)
            named |= {f"{prefix}{name}": weight for name, weight in norms.items()}
            named |= {f"{prefix}input_proj": self.input_proj[step][0], **block.named(prefix)}
        return named

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 4,
            "num_nextn_predict_layers": self.steps, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.inner,
        }  # fmt: skip
