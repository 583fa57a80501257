"""EXAONE 4.0 (arXiv:2507.11407): norms after the branches, normalised heads, windows with positions and full attention
without."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import BranchNorms, DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class Exaone4ForCausalLM(CausalLM):
    """In a model that has windows, layers without one have no position embedding."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        window = config.window(index)
        rotates = window is not None or not config.windows
        attention = SelfAttention(
            config, context, layer_id, rotary if rotates else rotary.without_rotation, qkv_bias=False, o_bias=False,
            qk_norm=True, norms=BranchNorms(after="post_attention_layernorm"), window=window,
        )  # fmt: skip
        norms = BranchNorms(after="post_feedforward_layernorm")
        return DecoderLayer(attention, GatedMLP(config, context, bias=False, norms=norms))
