"""Seed-OSS-36B (ByteDance, 2025): Llama with biases that config.json switches on, separately for o_proj."""

from __future__ import annotations

from fenceline.config.config_reader import ConfigReader
from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class SeedOssForCausalLM(CausalLM):
    """In the published model queries, keys and values have biases, and o_proj has none."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=config.attention_bias,
            o_bias=ConfigReader(config.hf_config).switch("attention_out_bias"),
        )  # fmt: skip
        return DecoderLayer(attention, GatedMLP(config, context, bias=config.mlp_bias))
