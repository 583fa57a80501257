"""Granite 3 (IBM, 2024): Llama with multipliers of embeddings, branches, scores and logits."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class GraniteForCausalLM(CausalLM):
    """The multipliers are config.json's; layers read them where they multiply."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        bias = config.attention_bias
        attention = SelfAttention(config, context, layer_id, rotary, qkv_bias=bias, o_bias=bias)
        return DecoderLayer(attention, GatedMLP(config, context, bias=config.mlp_bias))
