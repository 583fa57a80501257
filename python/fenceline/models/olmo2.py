"""OLMo 2 (arXiv:2501.00656): norms after each branch and none before it; queries and keys are normalised too."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import BranchNorms, DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class Olmo2ForCausalLM(CausalLM):
    """Queries and keys are normalised over all heads at once."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        bias = config.attention_bias
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=bias, o_bias=bias, wide_qk_norm=True,
            norms=BranchNorms(after="post_attention_layernorm"),
        )  # fmt: skip
        norms = BranchNorms(after="post_feedforward_layernorm")
        return DecoderLayer(attention, GatedMLP(config, context, bias=False, norms=norms))
