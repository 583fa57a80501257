"""Gemma 3, the text model (arXiv:2503.19786): most layers have a window and their own rotary angles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fenceline.config.model_config import ModelConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import BranchNorms, DecoderLayer, GatedMLP, SelfAttention
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.models.decoder import CausalLM


class Gemma3ForCausalLM(CausalLM):
    """Gemma 2's layers, with normalised heads in place of soft caps."""

    @staticmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        bias, window = config.attention_bias, config.window(index)
        attention = SelfAttention(
            config, context, layer_id, rotary if window is None else rotary.local, qkv_bias=bias, o_bias=bias,
            qk_norm=True, norms=BranchNorms("input_layernorm", "post_attention_layernorm"), window=window,
        )  # fmt: skip
        norms = BranchNorms("pre_feedforward_layernorm", "post_feedforward_layernorm")
        return DecoderLayer(attention, GatedMLP(config, context, bias=False, norms=norms))


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model of a checkpoint that also has a vision tower, which is left out."""

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], partly: bool = False, only_check: bool = False
    ) -> None:
        super().load_weights(_of_text(weights), partly, only_check)


def _of_text(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the text model, renamed as in a checkpoint of the text model alone. transformers 5 writes other
    names than earlier versions."""
    for name, tensor in weights:
        if name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
            continue
        name = name.replace("model.language_model.", "model.", 1)
        yield name.removeprefix("language_model."), tensor
