"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783): grouped-query attention, rotary positions, SwiGLU, RMSNorm."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class LlamaForCausalLM(CausalLM):
    """``attention_bias`` is for all four projections of attention, ``mlp_bias`` for all three of the MLP.

    Granite 3 is the same model with multipliers, which the layers read from the config."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        bias = config.attention_bias
        attention = SelfAttention(config, context, layer_id, rotary, qkv_bias=bias, o_bias=bias)
        return DecoderLayer(attention, GatedMLP(config, context, bias=config.mlp_bias))
