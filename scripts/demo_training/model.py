"""The demo models in plain torch. They are Qwen3 models: RMS norm, q/k norm, RoPE, grouped-query attention, SwiGLU.

The feed-forward block is one SwiGLU, or a mixture of them as in Qwen3-MoE.

Weights of one kind are stacked over the layers, so that the optimizer works on a few large tensors. All
token-wise work runs on [tokens, hidden], whatever the row length is, and therefore compiles once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's dimensions, named as in its config.json."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 832
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100_000.0
    max_position_embeddings: int = 4096
    num_experts: int = 0  # of every layer, `intermediate_size` wide each; 0: one block for all tokens
    num_experts_per_tok: int = 0


MOE_SHAPE = Shape(
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=3,
    head_dim=32,
    max_position_embeddings=1024,
    num_experts=8,
    num_experts_per_tok=2,
)
TOOLS_SHAPE = Shape(hidden_size=128, intermediate_size=384, head_dim=32, max_position_embeddings=1024)
BALANCE_WEIGHT = 0.01  # weight of the loss that keeps the experts equally busy (arXiv:2101.03961)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed and returned in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [tokens, heads, head_dim] by cos, sin [tokens, head_dim / 2] (halves, not pairs)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def project_qkv(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor,
    q_norm: Tensor, k_norm: Tensor, head_dim: int, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim] of the residual x [tokens, hidden]."""
    h = rms_norm(x, norm, eps).to(dtype)
    q = F.linear(h, wq.to(dtype)).unflatten(-1, (-1, head_dim))
    k = F.linear(h, wk.to(dtype)).unflatten(-1, (-1, head_dim))
    v = F.linear(h, wv.to(dtype)).unflatten(-1, (-1, head_dim))
    q = rotate(rms_norm(q, q_norm, eps), cos, sin).to(dtype)
    k = rotate(rms_norm(k, k_norm, eps), cos, sin).to(dtype)
    return q, k, v


def finish_layer(
    x: Tensor, attn: Tensor, wo: Tensor, norm: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor,
    eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The residual x [tokens, hidden] after the output projection of `attn` and the feed-forward block."""
    x = x + F.linear(attn, wo.to(dtype)).float()
    h = rms_norm(x, norm, eps).to(dtype)
    h = F.silu(F.linear(h, w_gate.to(dtype))) * F.linear(h, w_up.to(dtype))
    return x + F.linear(h, w_down.to(dtype)).float()


def mix_experts(
    x: Tensor, attn: Tensor, wo: Tensor, norm: Tensor, router: Tensor, w_gate: Tensor, w_up: Tensor,
    w_down: Tensor, top_k: int, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Like `finish_layer` with a mixture of experts: w_gate and w_up [experts, inner, hidden], w_down likewise.

    Each token goes to the `top_k` experts with the highest probabilities, whose weights are scaled to sum to 1. The
    second result is experts * sum of (share of the choices * mean probability), which is 1 if all are equally busy.
    """
    x = x + F.linear(attn, wo.to(dtype)).float()
    h = rms_norm(x, norm, eps)
    probabilities = F.linear(h, router).softmax(-1)
    chosen, experts = probabilities.topk(top_k)
    chosen = (chosen / chosen.sum(-1, keepdim=True)).flatten()
    order = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=len(router))
    tokens = order // top_k
    rows = h.to(dtype).index_select(0, tokens).split(counts.tolist())
    gate, up, down = w_gate.to(dtype), w_up.to(dtype), w_down.to(dtype)
    parts = [F.linear(F.silu(F.linear(part, gate[e])) * F.linear(part, up[e]), down[e]) for e, part in enumerate(rows)]
    x = x.index_add(0, tokens, torch.cat(parts).float() * chosen[order, None])
    return x, len(router) * (counts / counts.sum() * probabilities.mean(0)).sum()


def output_loss(
    x: Tensor, norm: Tensor, embed: Tensor, targets: Tensor, weights: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy (a scalar) and, per token, whether the most likely token is the target."""
    logits = F.linear(rms_norm(x, norm, eps).to(dtype), embed.to(dtype)).float()
    loss = F.cross_entropy(logits, targets, reduction="none")
    return (loss * weights).sum() / weights.sum(), logits.argmax(-1) == targets


class DemoModel(nn.Module):
    """The model with its training loss. Master weights are fp32; `dtype` is that of the matrix products."""

    def __init__(self, shape: Shape, dtype: torch.dtype, compiled: bool) -> None:
        super().__init__()
        s = self.shape = shape
        self.dtype = dtype
        n, q_dim, kv_dim = (s.num_hidden_layers, s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim)

        def matrix(rows: int, columns: int, experts: int = 1) -> nn.Parameter:
            return nn.Parameter(torch.randn(n * experts, rows, columns) * columns**-0.5)

        def ones(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(*size))

        self.wq, self.wk = matrix(q_dim, s.hidden_size), matrix(kv_dim, s.hidden_size)
        self.wv, self.wo = matrix(kv_dim, s.hidden_size), matrix(s.hidden_size, q_dim)
        experts = max(s.num_experts, 1)  # the experts of a layer are adjacent
        self.w_gate, self.w_up = (matrix(s.intermediate_size, s.hidden_size, experts) for _ in range(2))
        self.w_down = matrix(s.hidden_size, s.intermediate_size, experts)
        self.router = nn.Parameter(torch.randn(n, s.num_experts, s.hidden_size) * 0.02)
        with torch.no_grad():  # each layer starts as the identity
            self.wo.zero_()
            self.w_down.zero_()
        self.attn_norm, self.mlp_norm = ones(n, s.hidden_size), ones(n, s.hidden_size)
        self.q_norm, self.k_norm = ones(n, s.head_dim), ones(n, s.head_dim)
        self.final_norm = ones(s.hidden_size)
        self.embed = nn.Parameter(torch.randn(s.vocab_size, s.hidden_size) * 0.02)

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self._project_qkv, self._finish_layer = wrap(project_qkv), wrap(finish_layer)
        self._output_loss = wrap(output_loss)

    def matrices(self) -> list[nn.Parameter]:
        """The stacked weight matrices, [layers (times experts), out, in] each."""
        return [self.wq, self.wk, self.wv, self.wo, self.w_gate, self.w_up, self.w_down]

    def others(self) -> list[nn.Parameter]:
        """Embedding, norms and routers."""
        norms = [self.final_norm, self.attn_norm, self.mlp_norm, self.q_norm, self.k_norm]
        return [self.embed, *norms] + ([self.router] if self.shape.num_experts else [])

    def rotary(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [rows * length, head_dim / 2] of positions 0 .. length - 1 in each row, fp32."""
        half = torch.arange(0, self.shape.head_dim, 2, device=self.embed.device).float() / self.shape.head_dim
        angles = torch.outer(torch.arange(length, device=self.embed.device).float(), self.shape.rope_theta**-half)
        angles = angles.repeat(rows, 1)
        return angles.cos(), angles.sin()

    def hidden(self, ids: Tensor) -> Tensor:
        """The residual stream after the last layer, [rows * length, hidden] fp32, of ids [rows, length]."""
        return self.residuals(ids)[-1]

    def residuals(self, ids: Tensor) -> list[Tensor]:
        """The residual stream before each layer and after the last, [rows * length, hidden] fp32 each."""
        return self.layers(self.embedded(ids), self.rotary(*ids.shape), ids.shape)[0]

    def embedded(self, ids: Tensor) -> Tensor:
        """The embeddings of ids, [rows * length, hidden] fp32."""
        return F.embedding(ids.flatten(), self.embed)

    def layers(
        self, x: Tensor, angles: tuple[Tensor, Tensor], size: torch.Size, added: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor], Tensor]:
        """The residual stream before each layer and after the last, and the loss of the experts' balance. `x` [rows *
        length, hidden], `angles` (cos and sin) as of `rotary`, `size` (rows, length). `added`: [rows * length, hidden]
        each, what the first layers' results are increased by."""
        s, (rows, length), (cos, sin) = self.shape, size, angles
        found, balance = [x], torch.zeros((), device=x.device)
        for i in range(s.num_hidden_layers):
            qkv = self._project_qkv(
                x, cos, sin, self.attn_norm[i], self.wq[i], self.wk[i], self.wv[i],
                self.q_norm[i], self.k_norm[i], s.head_dim, s.rms_norm_eps, self.dtype,
            )  # fmt: skip
            q, k, v = (t.unflatten(0, (rows, length)).transpose(1, 2) for t in qkv)
            attn = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            attn = attn.transpose(1, 2).reshape(rows * length, -1)
            if s.num_experts:
                own = slice(i * s.num_experts, (i + 1) * s.num_experts)
                x, busy = mix_experts(
                    x, attn, self.wo[i], self.mlp_norm[i], self.router[i], self.w_gate[own], self.w_up[own],
                    self.w_down[own], s.num_experts_per_tok, s.rms_norm_eps, self.dtype,
                )  # fmt: skip
                balance = balance + busy / s.num_hidden_layers
            else:
                x = self._finish_layer(
                    x, attn, self.wo[i], self.mlp_norm[i], self.w_gate[i], self.w_up[i], self.w_down[i],
                    s.rms_norm_eps, self.dtype,
                )  # fmt: skip
            if i < len(added):
                x = x + added[i]
            found.append(x)
        return found, balance

    def forward(self, ids: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Loss (a scalar) and hits [rows, length] bool; ids, targets int64 and weights fp32, [rows, length]."""
        found, balance = self.layers(self.embedded(ids), self.rotary(*ids.shape), ids.shape)
        loss, hits = self.output(found[-1], targets, weights)
        return loss + BALANCE_WEIGHT * balance, hits

    def output(self, x: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Loss (a scalar) and hits [rows, length] bool, of the residual stream after the last layer."""
        loss, hits = self._output_loss(
            x, self.final_norm, self.embed, targets.flatten(), weights.flatten(),
            self.shape.rms_norm_eps, self.dtype,
        )  # fmt: skip
        return loss, hits.view_as(targets)
