"""Qwen2, Qwen2.5 (arXiv:2407.10671) and MiMo (arXiv:2505.07608): Llama with biases on queries, keys and values."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """The biases are part of the architecture: config.json has no field for them."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=True, o_bias=False,
            window=config.window(index),
        )  # fmt: skip
        return DecoderLayer(attention, GatedMLP(config, context, bias=False))
