"""A simple reference for drafts: dense, one request at a time, in float64, from the tensors of their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import transformers
from draft_checkpoints import DraftCheckpoint


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: torch.Tensor, theta: float, positions: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, heads, head_dim]. ``positions`` [rows, head_dim / 2]: by which each pair turns; None: row i is at
    position i."""
    half = x.shape[-1] // 2
    turns = torch.arange(len(x))[:, None] if positions is None else positions
    angles = turns * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@dataclass
class Reference:
    """The computation of a draft for whole sequences: rows [n, ...] at positions 0 to n - 1, or at ``positions``, see
    :func:`rotate`. ``images`` [tokens, size]: embeddings in place of those of the ids, where they are not NaN."""

    tolerance: ClassVar[float] = 1e-4
    made: DraftCheckpoint
    embedding: torch.Tensor  # the draft's own or the target's
    head: torch.Tensor
    positions: torch.Tensor | None = None
    images: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.tensors = {name: tensor.double() for name, tensor in self.made.tensors.items()}
        eps = self.made.config["rms_norm_eps"]
        assert isinstance(eps, float)
        self.eps = eps

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, self.tensors[f"{name}.weight"], self.eps)

    def heads(self, x: torch.Tensor, name: str, num: int) -> torch.Tensor:
        return self.linear(x, name).view(len(x), num, -1)

    def attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        config = self.made.config
        heads, kv_heads = self.made.size("num_attention_heads"), self.made.size("num_key_value_heads")
        parameters = config.get("rope_parameters") or config
        theta = parameters["rope_theta"]  # type: ignore[index]
        q, k = self.heads(x, f"{prefix}q_proj", heads), self.heads(x, f"{prefix}k_proj", kv_heads)
        v = self.heads(x, f"{prefix}v_proj", kv_heads)
        if f"{prefix}q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{prefix}q_norm"), self.norm(k, f"{prefix}k_norm")
        places = None if self.positions is None else self.positions[: len(x)]
        q, k = rotate(q, theta, places), rotate(k, theta, places)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores.masked_fill_(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        return self.linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1), f"{prefix}o_proj")

    def block(self, x: torch.Tensor, prefix: str, attention_input: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(attention_input, f"{prefix}self_attn.")
        y = self.norm(x, f"{prefix}post_attention_layernorm")
        gate, up = self.linear(y, f"{prefix}mlp.gate_proj"), self.linear(y, f"{prefix}mlp.up_proj")
        return x + self.linear(torch.nn.functional.silu(gate) * up, f"{prefix}mlp.down_proj")

    def first(self, target: TargetStates) -> torch.Tensor:
        """The hidden states of the first step."""
        if "midlayer.hidden_norm.weight" in self.tensors:
            return self.linear(target.aux, "fc")
        return target.normed

    def step(self, ids: torch.Tensor, hidden: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and next hidden states of all rows."""
        embedded = self.embedding[ids]
        if self.images is not None:
            shifted = self.images[1 + step : 1 + step + len(ids)]
            embedded = torch.where(shifted.isnan(), embedded, shifted)
        if "midlayer.hidden_norm.weight" in self.tensors:
            both = (self.norm(embedded, "midlayer.input_layernorm"), self.norm(hidden, "midlayer.hidden_norm"))
            x = self.block(hidden, "midlayer.", torch.cat(both, -1))
            return self.norm(x, "norm") @ self.head.T, x
        if "fc.weight" in self.tensors:
            x = self.linear(torch.cat((embedded, hidden), -1), "fc")
            for index in range(self.made.size("num_hidden_layers")):
                prefix = f"layers.{index}."
                x = self.block(x, prefix, self.norm(x, f"{prefix}input_layernorm") if index else x)
            return x @ self.head.T, x
        prefix = f"model.mtp_layers.{step if self.made.size('num_nextn_predict_layers') > 1 else 0}."
        embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
        both = self.norm(hidden, f"{prefix}hidden_layernorm"), self.norm(embedded, f"{prefix}token_layernorm")
        x = self.linear(torch.cat(both, -1), f"{prefix}input_proj")
        x = self.block(x, prefix, self.norm(x, f"{prefix}input_layernorm"))
        x = self.norm(x, f"{prefix}final_layernorm")
        return x @ self.head.T, x


@dataclass
class AppendedReference:
    """The same for a layer behind the target's (``save_appended_mtp``), whose decoder layer is transformers'."""

    tolerance: ClassVar[float] = 1e-3  # each step of a chain of such layers amplifies the rounding of the last one
    target: transformers.PreTrainedModel
    block: torch.nn.Module
    made: DraftCheckpoint

    def first(self, target: TargetStates) -> torch.Tensor:
        """The hidden states of the first step."""
        return target.normed

    def step(self, ids: torch.Tensor, hidden: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and next hidden states of all rows."""
        model, eps = self.target.model, self.target.config.rms_norm_eps

        def weight(name: str) -> torch.Tensor:
            return self.made.tensors[f"model.layers.{len(model.layers)}.{name}.weight"].double()

        embedded = model.embed_tokens.weight[ids].double()
        both = rms(embedded, weight("enorm"), eps), rms(hidden, weight("hnorm"), eps)
        x = (torch.cat(both, -1) @ weight("eh_proj").T)[None]
        positions = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        angles = model.rotary_emb(x, positions)
        with torch.no_grad():
            out = self.block(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        x = out[0] if isinstance(out, tuple) else out  # GLM-5's layers return what they have selected too
        x = rms(x[0].double(), weight("shared_head.norm"), eps)
        return x @ self.target.lm_head.weight.double().T, x


@dataclass
class OwnReference(Reference):
    """The same for the layer of Qwen3-Next and Qwen3.5 (``save_own_mtp``), which transformers does not read: gated
    attention, of which a part of each head rotates, then an MLP or experts beside a shared one."""

    tolerance: ClassVar[float] = 1e-3  # that of models with states

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, 1 + self.tensors[f"{name}.weight"], self.eps)

    def first(self, target: TargetStates) -> torch.Tensor:
        """The hidden states of the first step."""
        return target.normed

    def attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        made, rope = self.made, self.made.config["rope_parameters"]
        heads, kv_heads, size = (
            made.size(f"{kind}") for kind in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        q, gate = self.heads(x, f"{prefix}q_proj", heads).split(size, -1)
        k, v = self.heads(x, f"{prefix}k_proj", kv_heads), self.heads(x, f"{prefix}v_proj", kv_heads)
        q, k = self.norm(q, f"{prefix}q_norm"), self.norm(k, f"{prefix}k_norm")
        turned = int(size * rope["partial_rotary_factor"])  # type: ignore[index]
        q, k = (torch.cat((rotate(t[..., :turned], rope["rope_theta"]), t[..., turned:]), -1) for t in (q, k))  # type: ignore[index]
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        scores.masked_fill_(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v) * gate.sigmoid()
        return self.linear(out.flatten(1), f"{prefix}o_proj")

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up = self.linear(x, f"{prefix}gate_proj"), self.linear(x, f"{prefix}up_proj")
        return self.linear(torch.nn.functional.silu(gate) * up, f"{prefix}down_proj")

    def experts(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        scores = self.linear(x, f"{prefix}gate").softmax(-1)
        best, chosen = scores.topk(self.made.size("num_experts_per_tok"), -1)
        best /= best.sum(-1, keepdim=True)
        out = self.mlp(x, f"{prefix}shared_expert.") * self.linear(x, f"{prefix}shared_expert_gate").sigmoid()
        for expert in range(scores.shape[1]):
            share = (best * (chosen == expert)).sum(-1, keepdim=True)
            out += share * self.mlp(x, f"{prefix}experts.{expert}.")
        return out

    def step(self, ids: torch.Tensor, hidden: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and next hidden states of all rows."""
        prefix = "mtp.layers.0."
        both = self.norm(self.embedding[ids], "mtp.pre_fc_norm_embedding"), self.norm(hidden, "mtp.pre_fc_norm_hidden")
        x = self.linear(torch.cat(both, -1), "mtp.fc")
        x = x + self.attention(self.norm(x, f"{prefix}input_layernorm"), f"{prefix}self_attn.")
        y, has_experts = self.norm(x, f"{prefix}post_attention_layernorm"), f"{prefix}mlp.gate.weight" in self.tensors
        x = self.norm(x + (self.experts if has_experts else self.mlp)(y, f"{prefix}mlp."), "mtp.norm")
        return x @ self.head.T, x


@dataclass(frozen=True)
class TargetStates:
    """The results of transformers' model for one sequence, in float64."""

    normed: torch.Tensor  # after the final norm
    aux: torch.Tensor


def target_states(model: transformers.PreTrainedModel, ids: torch.Tensor, layers: Sequence[int]) -> TargetStates:
    """``layers``: the layers whose inputs are kept; the number of layers stands for the output of the last one."""
    last: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    with torch.no_grad():
        states = model.model(ids[None], output_hidden_states=True).hidden_states
    handle.remove()
    inputs = [*states[:-1], last[0]]
    aux = [inputs[layer][0].double() for layer in layers]
    return TargetStates(states[-1][0].double(), torch.cat(aux, -1) if aux else torch.empty(0))
