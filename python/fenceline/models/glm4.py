"""GLM-4-0414 (arXiv:2406.12793): sandwich norms; half of each head's features rotate, in pairs of adjacent ones."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import BranchNorms, DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class Glm4ForCausalLM(CausalLM):
    """Biases on queries, keys and values."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=config.attention_bias, o_bias=False,
            norms=BranchNorms("input_layernorm", "post_self_attn_layernorm"),
        )  # fmt: skip
        norms = BranchNorms("post_attention_layernorm", "post_mlp_layernorm")
        return DecoderLayer(attention, GatedMLP(config, context, bias=False, norms=norms))
