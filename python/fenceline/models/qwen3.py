"""Qwen3, dense (arXiv:2505.09388): Llama with each query and key head RMS-normalised before the rotation."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.shard import Shard
from fenceline.models.decoder import CausalLM, DecoderLayer, GatedMLP, SelfAttention


class Qwen3ForCausalLM(CausalLM):
    """``attention_bias`` for all four projections of attention, none in the MLP."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        def layer() -> DecoderLayer:
            attention = SelfAttention(
                config, shard, qkv_bias=config.attention_bias, o_bias=config.attention_bias, qk_norm=True
            )
            return DecoderLayer(config, attention, GatedMLP(config, shard, bias=False))

        super().__init__(config, shard, layer)
