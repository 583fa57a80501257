"""The decoder that Llama and its relatives share, in pieces that a family puts together.

A layer is cut at attention into two pure functions of tensors, ``before_attention`` and ``after_attention``, so that
the stretch between two attention calls can be captured as one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from fenceline.config.model_config import ModelConfig
from fenceline.layers.activation import silu_and_mul
from fenceline.layers.embedding import VocabParallelEmbedding
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from fenceline.layers.norm import RMSNorm
from fenceline.layers.rotary import RotaryEmbedding, apply_rotary
from fenceline.layers.shard import Shard
from fenceline.layers.weight_slot import WeightSlots, whole
from fenceline.models.weights import fill_slots

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(config: ModelConfig) -> torch.dtype:
    """The torch type that ``config.dtype`` names."""
    return _DTYPES[config.dtype]


class SelfAttention(nn.Module):
    """Projections around attention, with rotary positions and, in some families, normalised queries and keys."""

    def __init__(
        self, config: ModelConfig, shard: Shard, qkv_bias: bool, o_bias: bool, qk_norm: bool = False
    ) -> None:
        super().__init__()
        dtype = torch_dtype(config)
        head_dim, hidden_size = config.head_dim, config.hidden_size
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.qkv_proj = QKVParallelLinear(
            hidden_size, config.num_heads, config.num_kv_heads, head_dim, qkv_bias, shard, dtype
        )
        self.o_proj = RowParallelLinear(
            "o_proj", config.num_heads * head_dim, hidden_size, o_bias, shard, dtype
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if qk_norm else None

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] → q [T, heads, head_dim], k and v [T, kv heads, head_dim] of this rank."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv_proj.split(self.qkv_proj(x)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """[T, heads, head_dim] → [T, hidden_size]."""
        y: torch.Tensor = self.o_proj(attended.flatten(1))
        return y

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots by their names in the checkpoint."""
        slots = {**self.qkv_proj.weight_slots(prefix), **self.o_proj.weight_slots(prefix)}
        if self.q_norm is not None and self.k_norm is not None:
            slots[f"{prefix}q_norm.weight"] = whole(self.q_norm.weight)
            slots[f"{prefix}k_norm.weight"] = whole(self.k_norm.weight)
        return slots


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, shard: Shard, bias: bool) -> None:
        super().__init__()
        dtype = torch_dtype(config)
        hidden_size, size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, {"gate_proj": size, "up_proj": size}, bias, shard, dtype
        )
        self.down_proj = RowParallelLinear("down_proj", size, hidden_size, bias, shard, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        gate, up = self.gate_up_proj.split(self.gate_up_proj(x))
        y: torch.Tensor = self.down_proj(silu_and_mul(gate, up))
        return y

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots by their names in the checkpoint."""
        return {**self.gate_up_proj.weight_slots(prefix), **self.down_proj.weight_slots(prefix)}


class DecoderLayer(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, self_attn: SelfAttention, mlp: GatedMLP) -> None:
        super().__init__()
        dtype = torch_dtype(config)
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def before_attention(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] → q, k, v as ``SelfAttention.project``."""
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's input x [T, hidden_size] and attention's output [T, heads, head_dim] → its output, like x."""
        x = x + self.self_attn.output(attended)
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots by their names in the checkpoint."""
        return {
            **self.self_attn.weight_slots(f"{prefix}self_attn."),
            **self.mlp.weight_slots(f"{prefix}mlp."),
            f"{prefix}input_layernorm.weight": whole(self.input_layernorm.weight),
            f"{prefix}post_attention_layernorm.weight": whole(self.post_attention_layernorm.weight),
        }


class CausalLM(nn.Module):
    """Embedding, decoder layers, norm and language-model head."""

    def __init__(self, config: ModelConfig, shard: Shard, make_layer: Callable[[], DecoderLayer]) -> None:
        """Parameters are allocated, uninitialised, on the default device."""
        super().__init__()
        dtype = torch_dtype(config)
        self.config = config
        self.shard = shard
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, shard, dtype)
        self.rotary = RotaryEmbedding(
            config.head_dim, config.context_length, config.rope_theta, config.rope_scaling
        )
        self.layers = nn.ModuleList(make_layer() for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(config.vocab_size, config.hidden_size, shard, dtype)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [L, vocab_size] float32 of the rows ``batch.logits_index`` (all T where it is None).

        Writes the batch's keys and values into the KV pool through ``batch.attn``. Runs on the current stream.
        """
        return self.compute_logits(self.hidden_states(batch), batch.logits_index)

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """Output of the last layer before the final norm, [T, hidden_size]."""
        assert self.shard.size == 1, "the ranks' partial sums have nobody to add them up yet"
        x: torch.Tensor = self.embed_tokens(batch.input_ids)
        cos, sin = self.rotary(batch.positions)
        for layer_id, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            q, k, v = layer.before_attention(x, cos, sin)
            attended = batch.attn.forward(layer_id, q, k, v, layer.self_attn.scale)
            x = layer.after_attention(x, attended)
        return x

    def compute_logits(self, x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        """``hidden_states`` [T, hidden_size] → logits [L, vocab_size] float32 of the rows in ``index``."""
        rows = x if index is None else x.index_select(0, index)
        return self.lm_head.logits(self.norm(rows))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from (name, tensor) pairs with Hugging Face's names, in any order.

        Raises ``ValueError`` for missing, unexpected, repeated and mis-shaped weights.
        """
        # A tied head is often stored all the same, and old checkpoints store the rotary table.
        ignored = ("lm_head.weight",) if self.lm_head is self.embed_tokens else ()
        fill_slots(self.weight_slots(), weights, ignored=ignored, ignored_suffix=".rotary_emb.inv_freq")

    def weight_slots(self) -> WeightSlots:
        """Where each tensor of the checkpoint goes."""
        slots: WeightSlots = {"model.embed_tokens.weight": self.embed_tokens.weight_slot()}
        for layer_id, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots.update(layer.weight_slots(f"model.layers.{layer_id}."))
        slots["model.norm.weight"] = whole(self.norm.weight)
        if self.lm_head is not self.embed_tokens:
            slots["lm_head.weight"] = self.lm_head.weight_slot()
        return slots
