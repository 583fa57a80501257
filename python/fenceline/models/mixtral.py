"""Mixtral 8x7B and 8x22B (arXiv:2401.04088): Mistral with experts in place of every MLP."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, SelfAttention
from fenceline.layers.experts import ExpertNames, ExpertsMLP
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class MixtralForCausalLM(CausalLM):
    """The scores of a token's experts are divided by their sum."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=False, o_bias=False,
            window=config.window(index),
        )  # fmt: skip
        names = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
        return DecoderLayer(attention, ExpertsMLP(config, context, names))
