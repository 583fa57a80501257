"""Gemma 2 (arXiv:2408.00118): every second layer attends within a window, and scores and logits are capped."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import BranchNorms, DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class Gemma2ForCausalLM(CausalLM):
    """Norms before and after each branch, GELU, and embeddings multiplied by the square root of their size."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        bias = config.attention_bias
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=bias, o_bias=bias,
            norms=BranchNorms("input_layernorm", "post_attention_layernorm"), window=config.window(index),
        )  # fmt: skip
        norms = BranchNorms("pre_feedforward_layernorm", "post_feedforward_layernorm")
        return DecoderLayer(attention, GatedMLP(config, context, bias=False, norms=norms))
