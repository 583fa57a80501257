"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783): grouped-query attention, rotary positions, SwiGLU, RMSNorm."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.shard import Shard
from fenceline.models.decoder import CausalLM, DecoderLayer, GatedMLP, SelfAttention


class LlamaForCausalLM(CausalLM):
    """One ``attention_bias`` for all four projections of attention, one ``mlp_bias`` for the three of the MLP."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        def layer() -> DecoderLayer:
            attention = SelfAttention(
                config, shard, qkv_bias=config.attention_bias, o_bias=config.attention_bias
            )
            return DecoderLayer(config, attention, GatedMLP(config, shard, bias=config.mlp_bias))

        super().__init__(config, shard, layer)
