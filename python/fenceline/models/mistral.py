"""Mistral 7B and its dense successors (arXiv:2310.06825): Llama without biases, with head_dim given by the config.

The sliding window of the first release has no effect: ModelConfig refuses contexts longer than the window.
"""

from __future__ import annotations

from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.models.decoder import CausalLM


class MistralForCausalLM(CausalLM):
    """No biases anywhere."""

    def make_layer(self, layer_id: int) -> DecoderLayer:
        config, context = self.config, self.context
        attention = SelfAttention(config, context, layer_id, self.rotary, qkv_bias=False, o_bias=False)
        return DecoderLayer(attention, GatedMLP(config, context, bias=False))
