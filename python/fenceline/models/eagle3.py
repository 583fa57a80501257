"""EAGLE-3 (arXiv:2503.01840): one layer that reads embeddings and hidden states from several depths of the target."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch

from fenceline.config.draft_config import DraftConfig
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import BranchNorms, DecoderLayer, GatedMLP, LayerSite, SelfAttention
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.embed_join import JoinNorms
from fenceline.layers.linear import ReplicatedLinear
from fenceline.layers.weight import WeightSlots, whole
from fenceline.models.decoder import CausalLM, logits_rows
from fenceline.models.draft import SharingDraft


class Eagle3Draft(SharingDraft):
    """hidden = fc(the target's auxiliary hidden states). Attention reads [norm(embedding), norm(hidden)] and adds to
    hidden. The next step continues with the layer's output before ``norm``, which is applied only for the head.

    The head may have only a part of the vocabulary. The checkpoint's ``d2t`` says which: the target's id of the draft's
    token i is i + d2t[i].
    """

    ignored = frozenset({"t2d"})  # it also says which tokens the head has, like d2t

    def __init__(self, config: DraftConfig, context: LayerContext, target: CausalLM, names: Set[str]) -> None:
        super().__init__(config, context, target, names)
        model, size, eps = config.model, config.model.hidden_size, config.model.rms_norm_eps
        aux_size = len(config.aux_layers) * target.config.hidden_size
        self.fc = ReplicatedLinear("fc", aux_size, size, "fc.bias" in names, context)
        bias, inside = model.attention_bias, context.inside("midlayer")
        site = LayerSite(model, inside, self.rotary, target.num_layers, 0)
        attention = SelfAttention(site, qkv_bias=bias, o_bias=bias, norms=BranchNorms(), input_size=2 * size)
        self.midlayer = DecoderLayer(attention, GatedMLP(site, model.mlp_bias))
        self.layers = [self.midlayer]
        self.input_norm = context.norm(size, eps)
        self.hidden_norm = context.norm(size, eps)
        self.norm = self.head_norm = context.norm(size, eps)
        self._d2t: torch.Tensor | None = None
        if "d2t" in names or self.lm_head.vocab_size != model.vocab_size:
            # With dummy weights, the head has the first tokens of the vocabulary.
            self._d2t = torch.zeros(self.lm_head.vocab_size, dtype=torch.int64)
            self.target_ids = torch.arange(self.lm_head.vocab_size)

    def hidden_states_from(self, x: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        assert aux is not None, "EAGLE-3 reads auxiliary hidden states"
        return self.fc.forward(aux)

    def forward(
        self, batch: ForwardBatch, hidden_states: torch.Tensor, step: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norms = JoinNorms(self.input_norm.weight, self.hidden_norm.weight, self.input_norm.eps)
        both = self.joined(batch.input_ids, hidden_states, norms)
        attention = self.midlayer.self_attn
        attended = attention.attend(attention.project(both, batch), batch)
        x = self.midlayer.mlp.forward(attention.add_output(hidden_states.clone(), batch, attended), batch)
        return self.logits(logits_rows(x, batch), batch.logits_out), x

    def weight_slots(self) -> WeightSlots:
        slots = super().weight_slots() | self.fc.weight_slots("")
        slots |= self.midlayer.weight_slots("midlayer.")
        slots |= self.input_norm.weight_slots("midlayer.input_layernorm")
        slots |= self.hidden_norm.weight_slots("midlayer.hidden_norm")
        slots |= self.norm.weight_slots("norm")
        if self._d2t is not None:
            slots["d2t"] = whole(self._d2t)
        return slots

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        if self._d2t is not None:
            ids = torch.arange(len(self._d2t), device=self._d2t.device) + self._d2t
            vocab_size = self.config.model.vocab_size
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
            if len(wrong):
                raise ValueError(
                    f"weight d2t names token {int(wrong[0])}, the vocabulary has {vocab_size}; the draft's weights and"
                    " its config.json belong to different models"
                )
            self.target_ids = ids
