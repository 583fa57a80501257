"""GLM-4.5 and GLM-4.6 (arXiv:2508.06471): experts chosen by sigmoids with a correction, and a shared expert."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.experts import ExpertNames, ExpertsMLP
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class Glm4MoeForCausalLM(CausalLM):
    """The first layers have a dense MLP. Heads are normalised if config.json says so."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=config.attention_bias, o_bias=False,
            qk_norm=config.hf_config.get("use_qk_norm") is True,
        )  # fmt: skip
        names = ExpertNames(shared="shared_experts", correction="gate.e_score_correction_bias")
        dense = config.experts is None or index in config.experts.dense_layers
        mlp = GatedMLP(config, context, bias=False) if dense else ExpertsMLP(config, context, names)
        return DecoderLayer(attention, mlp)
