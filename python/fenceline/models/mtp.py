"""Multi-token prediction: layers in the target's checkpoint that predict further tokens, as in MiMo (arXiv:2505.07608).
The idea is DeepSeek-V3's (arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

from collections.abc import Set

import torch

from fenceline.config.draft_config import DraftConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.linear import ReplicatedLinear
from fenceline.layers.weight import WeightSlots
from fenceline.models.decoder import MTP_PREFIX, CausalLM, logits_rows, make_layers
from fenceline.models.draft import SharingDraft
from fenceline.models.families import MODELS


class MTPLayer:
    """norm(block(input_proj([norm(hidden state), norm(embedding)]))), where ``block`` is a decoder layer of the
    target's family. The embedding at position 0 is replaced by zero."""

    def __init__(self, config: DraftConfig, context: LayerContext, block: DecoderLayer) -> None:
        size, eps = config.model.hidden_size, config.model.rms_norm_eps
        self.block = block
        self.token_norm = context.norm(size, eps)
        self.hidden_norm = context.norm(size, eps)
        self.input_proj = ReplicatedLinear("input_proj", 2 * size, size, False, context)
        self.final_norm = context.norm(size, eps)

    def forward(self, embedded: torch.Tensor, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``embedded`` and ``hidden_states`` [T, hidden_size] → the next hidden states, normalised, [T,
        hidden_size]."""
        embedded = embedded.masked_fill((batch.positions[0] == 0).unsqueeze(1), 0.0)
        both = self.hidden_norm.forward(hidden_states), self.token_norm.forward(embedded)
        x = self.input_proj.forward(torch.cat(both, dim=-1))
        return self.final_norm.forward(self.block.forward(x, batch))

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {
            **self.block.weight_slots(prefix),
            **self.token_norm.weight_slots(f"{prefix}token_layernorm"),
            **self.hidden_norm.weight_slots(f"{prefix}hidden_layernorm"),
            **self.input_proj.weight_slots(prefix),
            **self.final_norm.weight_slots(f"{prefix}final_layernorm"),
        }


class MTPDraft(SharingDraft):
    """Layer k computes step k. If there is a single layer, it computes all steps, one after the other."""

    def __init__(self, config: DraftConfig, context: LayerContext, target: CausalLM, names: Set[str]) -> None:
        super().__init__(config, context, target, names)
        model, make_layer = config.model, MODELS[config.model.architecture].make_layer
        self.layers = make_layers(make_layer, model, context, MTP_PREFIX, self.rotary, target.num_layers)
        self.mtp_layers = [
            MTPLayer(config, context.inside(f"{MTP_PREFIX}{index}"), layer) for index, layer in enumerate(self.layers)
        ]
        self.max_steps = None if model.num_layers == 1 else model.num_layers

    def hidden_states_from(self, x: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        return self.target.norm.forward(x)

    def forward(
        self, batch: ForwardBatch, hidden_states: torch.Tensor, step: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.max_steps is None or step < self.max_steps, f"step {step} of {self.max_steps} layers"
        layer = self.mtp_layers[0 if self.max_steps is None else step]
        x = layer.forward(self.embed_tokens.forward(batch.input_ids), hidden_states, batch)
        return self.logits(logits_rows(x, batch), batch.logits_out), x

    def weight_slots(self) -> WeightSlots:
        slots = super().weight_slots()
        for index, layer in enumerate(self.mtp_layers):
            slots |= layer.weight_slots(f"{MTP_PREFIX}{index}.")
        return slots
