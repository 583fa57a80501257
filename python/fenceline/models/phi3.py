"""Phi-3 (arXiv:2404.14219) and Phi-4 (arXiv:2412.08905): Llama, stored with fused matrices."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class Phi3ForCausalLM(CausalLM):
    """There are no biases, and in some models only a part of each head rotates."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=False, o_bias=False,
            window=config.window(index),
        )  # fmt: skip
        return DecoderLayer(attention, GatedMLP(config, context, bias=False))
