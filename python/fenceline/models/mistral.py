"""Mistral 7B and its dense successors (arXiv:2310.06825): Llama without biases, with head_dim given by the config.

All layers of the first release have a sliding window.
"""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class MistralForCausalLM(CausalLM):
    """No biases anywhere."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=False, o_bias=False,
            window=config.window(index),
        )  # fmt: skip
        return DecoderLayer(attention, GatedMLP(config, context, bias=False))
