"""ERNIE 4.5 (Baidu, 2025), dense and with experts: Llama in which adjacent features of a head rotate as pairs.

https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fenceline.config.config_reader import ConfigReader
from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.experts import ExpertNames, ExpertsMLP
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM

_CORRECTION = "moe_statics.e_score_correction_bias"


class Ernie4_5ForCausalLM(CausalLM):
    """``use_bias`` in config.json is for all projections; experts have no biases."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        bias = ConfigReader(config.hf_config).switch("use_bias")
        attention = SelfAttention(config, context, layer_id, rotary, qkv_bias=bias, o_bias=bias)
        if config.experts is None or index in config.experts.dense_layers:
            return DecoderLayer(attention, GatedMLP(config, context, bias=bias))
        shared = "shared_experts" if config.experts.shared_size else None
        names = ExpertNames(shared=shared, correction=_CORRECTION)
        return DecoderLayer(attention, ExpertsMLP(config, context, names))


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    """Experts are chosen by softmaxes with a correction. The multi-token prediction layer is not loaded."""

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], partly: bool = False, only_check: bool = False
    ) -> None:
        super().load_weights(_of_model(weights), partly, only_check)


def _of_model(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's own tensors, with the corrections [1, experts] reshaped to [experts]."""
    for name, tensor in weights:
        if not name.startswith("model.mtp_"):
            yield name, tensor.flatten() if name.endswith(_CORRECTION) else tensor
