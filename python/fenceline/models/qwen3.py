"""Qwen3, dense (arXiv:2505.09388): Llama with each query and key head RMS-normalised before the rotation."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """``attention_bias`` for all four projections of attention, none in the MLP."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        bias = config.attention_bias
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=bias, o_bias=bias, qk_norm=True,
            window=config.window(index),
        )  # fmt: skip
        return DecoderLayer(attention, GatedMLP(config, context, bias=False))
