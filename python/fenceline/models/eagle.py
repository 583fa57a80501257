"""EAGLE (arXiv:2401.15077): decoder layers of the target's family that read embeddings and hidden states."""

from __future__ import annotations

from collections.abc import Set

import torch

from fenceline.config.draft_config import DraftConfig, read_token_map
from fenceline.layers.context import LayerContext
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.linear import ReplicatedLinear
from fenceline.layers.weight import WeightSlots
from fenceline.models.decoder import CausalLM, logits_rows, make_layers
from fenceline.models.draft import SharingDraft
from fenceline.models.families import MODELS


class EagleDraft(SharingDraft):
    """x = fc([embedding, hidden state]), then the layers, the first of which does not normalise its input.

    It continues the target's hidden states *after* the final norm, so the head reads them without another norm. With a
    token map (FR-Spec, arXiv:2502.14856) the draft has a head of its own: the map's rows of the target's, or of that
    in its checkpoint.
    """

    def __init__(self, config: DraftConfig, context: LayerContext, target: CausalLM, names: Set[str]) -> None:
        super().__init__(config, context, target, names)
        self._context = context
        model, size = config.model, config.model.hidden_size
        self.fc = ReplicatedLinear("fc", 2 * size, size, "fc.bias" in names, context)
        make_layer = MODELS[model.architecture].make_layer
        self.layers = make_layers(make_layer, model, context, "layers.", self.rotary, target.num_layers)
        self.layers[0].self_attn.input_norm = None

    def weights_loaded(self) -> None:
        if self.config.token_map is None:
            return
        ids = torch.tensor(read_token_map(self.config.token_map, self.lm_head.vocab_size))
        self.lm_head, self.target_ids = self.lm_head.with_rows(ids, self._context), ids

    def hidden_states_from(self, x: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        return self.target.norm.forward(x)

    def forward(
        self, batch: ForwardBatch, hidden_states: torch.Tensor, step: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fc.forward(self.joined(batch.input_ids, hidden_states))
        for layer in self.layers:
            x = layer.forward(x, batch)
        return self.logits(logits_rows(x, batch), batch.logits_out), x

    def weight_slots(self) -> WeightSlots:
        slots = super().weight_slots() | self.fc.weight_slots("")
        for index, layer in enumerate(self.layers):
            slots |= layer.weight_slots(f"layers.{index}.")
        return slots
