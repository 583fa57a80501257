"""The decoder that Llama and its relatives share, in pieces that a family puts together.

A layer is cut at attention into two functions of tensors, ``before_attention`` and ``after_attention``, so that the
stretch between two attention calls can be captured as one graph. The residual stream is one tensor, added to in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from fenceline.config.model_config import ModelConfig
from fenceline.layers.embedding import VocabParallelEmbedding
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.base import HeadLayout, LayerKernels, QKNorm
from fenceline.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from fenceline.layers.norm import RMSNorm
from fenceline.layers.rotary import RotaryEmbedding
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

    @cached_property
    def heads(self) -> HeadLayout:
        """This rank's heads."""
        return HeadLayout(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, self.head_dim)

    @cached_property
    def norms(self) -> QKNorm | None:
        """The normalisation of queries and keys, in families that have it."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

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

    def weight_slots(self, prefix: str) -> WeightSlots:
        """Slots by their names in the checkpoint."""
        return {**self.gate_up_proj.weight_slots(prefix), **self.down_proj.weight_slots(prefix)}


@dataclass(frozen=True, slots=True)
class _LayerParams:
    """What a layer computes with, looked up once: nn.Module looks its parameters up in Python each time, and a step
    over few tokens takes the GPU less time than the CPU needs to submit it. Biases are what this rank adds."""

    heads: HeadLayout
    norms: QKNorm | None
    scale: float
    eps: float
    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class DecoderLayer(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, self_attn: SelfAttention, mlp: GatedMLP) -> None:
        super().__init__()
        dtype = torch_dtype(config)
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    @cached_property
    def params(self) -> _LayerParams:
        """Parameters are filled in place, so looking them up once is enough."""
        attn, mlp = self.self_attn, self.mlp
        return _LayerParams(
            heads=attn.heads,
            norms=attn.norms,
            scale=attn.scale,
            eps=self.input_layernorm.eps,
            attention_norm=self.input_layernorm.weight,
            qkv=attn.qkv_proj.weight,
            qkv_bias=attn.qkv_proj.bias,
            o=attn.o_proj.weight,
            o_bias=attn.o_proj.own_bias,
            mlp_norm=self.post_attention_layernorm.weight,
            gate_up=mlp.gate_up_proj.weight,
            gate_up_bias=mlp.gate_up_proj.bias,
            down=mlp.down_proj.weight,
            down_bias=mlp.down_proj.own_bias,
        )

    def before_attention(
        self, x: torch.Tensor, kernels: LayerKernels, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, hidden_size] → queries, keys and values [T, size of ``params.heads``], not yet rotated; in ``out`` if
        given."""
        p = self.params
        return kernels.norm_linear(x, p.attention_norm, p.eps, p.qkv, p.qkv_bias, out)

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor, kernels: LayerKernels) -> torch.Tensor:
        """The layer's input x [T, hidden_size] and attention's output [T, heads, head_dim] → its output, in x."""
        p = self.params
        x = kernels.linear_add(x, attended.flatten(1), p.o, p.o_bias)
        h = kernels.norm_gate_up(x, p.mlp_norm, p.eps, p.gate_up, p.gate_up_bias)
        return kernels.linear_add(x, h, p.down, p.down_bias)

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
        """Logits [L, vocab_size] in the model's dtype of the rows ``batch.logits_index`` (all T where it is None).

        Writes the batch's keys and values into ``batch.kv_pool``. Runs on the current stream.
        """
        return self.compute_logits(self.hidden_states(batch), batch)

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """Output of the last layer before the final norm, [T, hidden_size]."""
        assert self.shard.size == 1, "the ranks' partial sums have nobody to add them up yet"
        x: torch.Tensor = self.embed_tokens(batch.input_ids)
        kernels, pool, table = batch.kernels, batch.kv_pool, self.rotary.table
        positions, out_slots, attn, ready = batch.positions, batch.out_slots, batch.attn, batch.layer_ready
        for layer_id, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            p = layer.params
            qkv = layer.before_attention(x, kernels)
            if ready is not None:
                ready(
                    layer_id
                )  # before the store too: the last page loaded may be one that this batch goes on with
            k_cache, v_cache = pool.k(layer_id), pool.v(layer_id)
            kernels.rotate_and_store(qkv, p.heads, p.norms, table, positions, k_cache, v_cache, out_slots)
            attended = attn.forward(layer_id, *p.heads.split(qkv), p.scale)
            x = layer.after_attention(x, attended, kernels)
        return x

    def compute_logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``hidden_states`` [T, hidden_size] → logits [L, vocab_size] of the rows ``batch.logits_index``."""
        rows = x if batch.logits_index is None else x.index_select(0, batch.logits_index)
        norm, head = self.norm, self.lm_head
        return batch.kernels.norm_linear(rows, norm.weight, norm.eps, head.weight, None, out=batch.logits_out)

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
