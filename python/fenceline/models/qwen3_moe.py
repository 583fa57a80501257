"""Qwen3 with experts (arXiv:2505.09388): Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.experts import ExpertsMLP
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class Qwen3MoeForCausalLM(CausalLM):
    """Attention is Qwen3's. The layers that config.json names have a dense MLP."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        bias = config.attention_bias
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=bias, o_bias=bias, qk_norm=True,
            window=config.window(index),
        )  # fmt: skip
        dense = config.experts is None or index in config.experts.dense_layers
        mlp = GatedMLP(config, context, bias=False) if dense else ExpertsMLP(config, context)
        return DecoderLayer(attention, mlp)
