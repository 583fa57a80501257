"""Qwen3, dense (arXiv:2505.09388): Llama with each query and key head RMS-normalised before the rotation."""

from __future__ import annotations

from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.models.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """``attention_bias`` for all four projections of attention, none in the MLP."""

    def make_layer(self, layer_id: int) -> DecoderLayer:
        config, context = self.config, self.context
        bias = config.attention_bias
        attention = SelfAttention(
            config, context, layer_id, self.rotary, qkv_bias=bias, o_bias=bias, qk_norm=True
        )
        return DecoderLayer(attention, GatedMLP(config, context, bias=False))
