"""gpt-oss (OpenAI, 2025): experts with biases and a clamped SwiGLU, attention sinks, and windows in every second layer.

https://arxiv.org/abs/2508.10925
"""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, SelfAttention
from fenceline.layers.experts import ExpertNames, ExpertsMLP
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM

_NAMES = ExpertNames(router="router", stacked=True)


class GptOssForCausalLM(CausalLM):
    """Its experts are published in MXFP4 and kept in this format."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        bias = config.attention_bias
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=bias, o_bias=bias, window=config.window(index), sinks=True
        )  # fmt: skip
        return DecoderLayer(attention, ExpertsMLP(config, context, _NAMES))
