"""MiniMax-M2 and M2.5 (2025): experts in every layer, chosen by sigmoids with a correction; norms across all heads."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, SelfAttention
from fenceline.layers.experts import ExpertNames, ExpertsMLP
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class MiniMaxM2ForCausalLM(CausalLM):
    """There are no biases, and only a part of each head rotates."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        attention = SelfAttention(config, context, layer_id, rotary, qkv_bias=False, o_bias=False, wide_qk_norm=True)
        names = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias")
        return DecoderLayer(attention, ExpertsMLP(config, context, names))
