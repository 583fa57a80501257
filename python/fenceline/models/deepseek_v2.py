"""DeepSeek-V2-Lite (arXiv:2405.04434): latent attention, experts chosen by softmaxes, and shared experts."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP
from fenceline.layers.experts import ExpertNames, ExpertsMLP
from fenceline.layers.latent_attention import LatentAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class DeepseekV2ForCausalLM(CausalLM):
    """The first layers have a dense MLP. DeepSeek-V2 itself, whose experts are chosen from groups by another rule, is
    refused."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        attention = LatentAttention(config, context, layer_id, rotary, bias=config.attention_bias)
        assert config.experts is not None, "the family reads its experts from config.json"
        if index in config.experts.dense_layers:
            return DecoderLayer(attention, GatedMLP(config, context, bias=config.mlp_bias))
        names = ExpertNames(shared="shared_experts" if config.experts.shared_size else None)
        return DecoderLayer(attention, ExpertsMLP(config, context, names))
