"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.shard import Shard
from fenceline.models.decoder import CausalLM, DecoderLayer, GatedMLP, SelfAttention


class Qwen2ForCausalLM(CausalLM):
    """The biases are part of the architecture: config.json has no switch for them."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        def layer() -> DecoderLayer:
            attention = SelfAttention(config, shard, qkv_bias=True, o_bias=False)
            return DecoderLayer(config, attention, GatedMLP(config, shard, bias=False))

        super().__init__(config, shard, layer)
