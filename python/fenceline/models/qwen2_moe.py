"""Qwen1.5-MoE and Qwen2-57B-A14B (arXiv:2407.10671): Qwen2 with experts and a shared expert."""

from __future__ import annotations

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.experts import ExpertNames, ExpertsMLP
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class Qwen2MoeForCausalLM(CausalLM):
    """The shared expert's result is multiplied by a sigmoid, which is computed for each token."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        bias = config.hf_config.get("qkv_bias") is not False
        attention = SelfAttention(
            config, context, layer_id, rotary, qkv_bias=bias, o_bias=False,
            window=config.window(index),
        )  # fmt: skip
        names = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")
        dense = config.experts is None or index in config.experts.dense_layers
        mlp = GatedMLP(config, context, bias=False) if dense else ExpertsMLP(config, context, names)
        return DecoderLayer(attention, mlp)
