"""SmolLM3 (Hugging Face, 2025): Llama with some layers that have no position embedding (NoPE, arXiv:2305.19466)."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class SmolLM3ForCausalLM(CausalLM):
    """In layers without position embedding, queries and keys are not rotated."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        bias = config.attention_bias
        positions = rotary.without_rotation if index in config.unrotated_layers else rotary
        attention = SelfAttention(
            config, context, layer_id, positions, qkv_bias=bias, o_bias=bias,
            window=config.window(index),
        )  # fmt: skip
        return DecoderLayer(attention, GatedMLP(config, context, bias=config.mlp_bias))
