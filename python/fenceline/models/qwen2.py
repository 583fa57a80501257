"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.models.decoder import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """The biases are part of the architecture: config.json has no field for them."""

    def make_layer(self, layer_id: int) -> DecoderLayer:
        config, context = self.config, self.context
        attention = SelfAttention(config, context, layer_id, self.rotary, qkv_bias=True, o_bias=False)
        return DecoderLayer(attention, GatedMLP(config, context, bias=False))
