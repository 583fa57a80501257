"""Mistral 7B and its dense successors (arXiv:2310.06825): Llama without biases, with a head_dim of its own.

The sliding window of the first release never binds: ModelConfig refuses contexts longer than the window.
"""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.shard import Shard
from fenceline.models.decoder import CausalLM, DecoderLayer, GatedMLP, SelfAttention


class MistralForCausalLM(CausalLM):
    """No biases anywhere."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        def layer() -> DecoderLayer:
            attention = SelfAttention(config, shard, qkv_bias=False, o_bias=False)
            return DecoderLayer(config, attention, GatedMLP(config, shard, bias=False))

        super().__init__(config, shard, layer)
