"""The draft of each algorithm that --speculative-algorithm names, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType

import torch

from fenceline.config.draft_config import DraftConfig, SpeculativeAlgorithm, read_token_map
from fenceline.config.families import APPENDED_MTP, OWN_MTP
from fenceline.config.quantization import ON_LINE_METHOD
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import BranchNorms, DecoderLayer, GatedMLP, LayerSite, SelfAttention
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.embed_join import JoinNorms
from fenceline.layers.linear import ReplicatedLinear
from fenceline.layers.weight import WeightSlots, whole
from fenceline.models.decoder import CausalLM, Weights, logits_rows, make_layers, mtp_modules
from fenceline.models.draft import DraftModel, SharingDraft, StandaloneDraft
from fenceline.models.families import MODELS, make_model


class EagleDraft(SharingDraft):
    """EAGLE (arXiv:2401.15077): decoder layers of the target's family that read embeddings and hidden states. x =
    fc([embedding, hidden state]), then the layers, the first of which does not normalise its input. It continues the
    target's hidden states *after* the final norm, so the head reads them without another norm. With a token map
    (FR-Spec, arXiv:2502.14856) the draft has a head of its own: the map's rows of the target's, or of that in its
    checkpoint."""

    def __init__(self, config: DraftConfig, context: LayerContext, target: CausalLM, names: Set[str]) -> None:
        super().__init__(config, context, target, names)
        self._context = context
        model, size = config.model, config.model.hidden_size
        self.fc = ReplicatedLinear("fc", 2 * size, size, "fc.bias" in names, context)
        make_layer = MODELS[model.architecture].make_layer
        self.layers = make_layers(
            make_layer, model, context, "layers.", self.rotary, target.config.num_attention_layers
        )
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
        batch = self.rotary.placed(batch)
        x = self.fc.forward(self.joined(batch, hidden_states))
        for layer in self.layers:
            x = layer.forward(x, batch)
        return self.logits(logits_rows(x, batch), batch.logits_out), x

    def weight_slots(self) -> WeightSlots:
        slots = super().weight_slots() | self.fc.weight_slots("")
        for layer in self.layers:
            slots |= layer.weight_slots()
        return slots


class Eagle3Draft(SharingDraft):
    """EAGLE-3 (arXiv:2503.01840): one layer that reads embeddings and hidden states from several depths of the target.
    hidden = fc(the target's auxiliary hidden states). Attention reads [norm(embedding), norm(hidden)] and adds to
    hidden. The next step continues with the layer's output before ``norm``, which is applied only for the head. The
    head may have only a part of the vocabulary. The checkpoint's ``d2t`` says which: the target's id of the draft's
    token i is i + d2t[i]."""

    ignored = frozenset({"t2d"})  # it also says which tokens the head has, like d2t

    def __init__(self, config: DraftConfig, context: LayerContext, target: CausalLM, names: Set[str]) -> None:
        super().__init__(config, context, target, names)
        model, size, eps = config.model, config.model.hidden_size, config.model.rms_norm_eps
        aux_size = len(config.aux_layers) * target.config.hidden_size
        self.fc = ReplicatedLinear("fc", aux_size, size, "fc.bias" in names, context)
        bias, inside = model.attention_bias, context.inside("midlayer")
        site = LayerSite(model, inside, self.rotary, target.config.num_attention_layers, 0)
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
        batch = self.rotary.placed(batch)
        both = self.joined(batch, hidden_states, norms)
        attention = self.midlayer.self_attn
        attended = attention.attend(attention.project(both, batch), batch)
        x = self.midlayer.after_mixing(attention.add_output(hidden_states.clone(), batch, attended), batch)
        return self.logits(logits_rows(x, batch), batch.logits_out), x

    def weight_slots(self) -> WeightSlots:
        slots = super().weight_slots() | self.fc.weight_slots("")
        slots |= self.midlayer.weight_slots()
        slots |= self.input_norm.weight_slots("midlayer.input_layernorm")
        slots |= self.hidden_norm.weight_slots("midlayer.hidden_norm")
        slots |= self.norm.weight_slots("norm")
        if self._d2t is not None:
            slots["d2t"] = whole(self._d2t)
        return slots

    def load_weights(self, weights: Weights) -> None:
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


@dataclass(frozen=True, slots=True)
class _MTPNames:
    """The names in a checkpoint of what a multi-token prediction layer has around its decoder layer."""

    token_norm: str
    hidden_norm: str
    input_proj: str
    final_norm: str


_MTP_NAMES: Mapping[str, _MTPNames] = MappingProxyType(  # by what is before the layer's index
    {
        "model.mtp_layers.": _MTPNames("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        APPENDED_MTP: _MTPNames("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        OWN_MTP: _MTPNames("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),  # beside the layer
    }
)


class MTPLayer:
    """final_norm(block(input_proj(token_norm(embedding) and hidden_norm(hidden state)))), where ``block`` is a decoder
    layer of the target's family."""

    def __init__(self, config: DraftConfig, context: LayerContext, block: DecoderLayer, tensors: Set[str]) -> None:
        """``context`` is that of what is around the ``block``. ``tensors``: the names of those in the checkpoint. One
        that is quantised may leave the projection plain without saying so, as DeepSeek-V3's does."""
        size, eps = config.model.hidden_size, config.model.rms_norm_eps
        self.names = names = _MTP_NAMES[config.model.mtp_prefix]
        self.block = block
        self.token_norm = context.norm(size, eps)
        self.hidden_norm = context.norm(size, eps)
        own, stored = f"{context.module}{names.input_proj}.", context.format
        is_plain = not any(name.startswith(own) and not name.endswith(".weight") for name in tensors)
        if stored is not None and stored.method != ON_LINE_METHOD and is_plain:
            context = replace(context, format=None)
        self.input_proj = ReplicatedLinear(names.input_proj, 2 * size, size, False, context)
        self.final_norm = context.norm(size, eps)

    def forward(self, both: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The normalised embeddings and hidden states, [T, 2 * hidden_size], → the next hidden states, normalised,
        [T, hidden_size]."""
        return self.final_norm.forward(self.block.forward(self.input_proj.forward(both), batch))

    def weight_slots(self, prefix: str) -> WeightSlots:
        """``prefix``: that of the names of what is around the block."""
        return {
            **self.block.weight_slots(),
            **self.token_norm.weight_slots(f"{prefix}{self.names.token_norm}"),
            **self.hidden_norm.weight_slots(f"{prefix}{self.names.hidden_norm}"),
            **self.input_proj.weight_slots(prefix),
            **self.final_norm.weight_slots(f"{prefix}{self.names.final_norm}"),
        }


class MTPDraft(SharingDraft):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): layers in the target's checkpoint that
    predict further tokens. Layer k computes step k. If there is a single layer, it computes all steps, one after the
    other. DeepSeek's and Qwen's families join the embedding and the hidden state in this order; MiMo (arXiv:2505.07608)
    joins them in the other, and replaces the embedding at position 0 by zero. Qwen's (since Qwen3-Next, 2025) have what
    is around the layer beside it in the checkpoint."""

    def __init__(self, config: DraftConfig, context: LayerContext, target: CausalLM, names: Set[str]) -> None:
        super().__init__(config, context, target, names)
        model, family = config.model, MODELS[config.model.architecture]
        first = target.config.num_attention_layers
        self.layers = make_layers(family.make_layer, model, context, model.mtp_prefix, self.rotary, first)
        self._own_weights = family.own_weights
        self._around = mtp_modules(model, model.layer_indices)
        self.mtp_layers = [
            MTPLayer(config, context.inside(around.removesuffix(".")), layer, names)
            for around, layer in zip(self._around, self.layers, strict=True)
        ]
        self.max_steps = None if model.num_layers == 1 else model.num_layers

    def hidden_states_from(self, x: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        return self.target.norm.forward(x)

    def forward(
        self, batch: ForwardBatch, hidden_states: torch.Tensor, step: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.max_steps is None or step < self.max_steps, f"step {step} of {self.max_steps} layers"
        layer = self.mtp_layers[0 if self.max_steps is None else step]
        positions, batch = batch.positions, self.rotary.placed(batch)
        if self.config.model.mtp_prefix in (APPENDED_MTP, OWN_MTP):
            norms = JoinNorms(layer.token_norm.weight, layer.hidden_norm.weight, layer.token_norm.eps)
            both = self.joined(batch, hidden_states, norms)
        else:
            is_first = reduce(torch.maximum, positions) == 0
            embedded = self.embedded(batch).masked_fill(is_first.unsqueeze(1), 0.0)
            both = torch.cat((layer.hidden_norm.forward(hidden_states), layer.token_norm.forward(embedded)), dim=-1)
        x = layer.forward(both, batch)
        return self.logits(logits_rows(x, batch), batch.logits_out), x

    def weight_slots(self) -> WeightSlots:
        slots = super().weight_slots()
        for around, layer in zip(self._around, self.mtp_layers, strict=True):
            slots |= layer.weight_slots(around)
        return slots

    def load_weights(self, weights: Weights) -> None:
        super().load_weights(weights if self._own_weights is None else self._own_weights(weights))


def _standalone(config: DraftConfig, context: LayerContext, target: CausalLM, names: Set[str]) -> DraftModel:
    return StandaloneDraft(make_model(config.model, context, first_layer=target.config.num_attention_layers))


_DRAFTS: Mapping[SpeculativeAlgorithm, Callable[[DraftConfig, LayerContext, CausalLM, Set[str]], DraftModel]] = (
    MappingProxyType(
        {
            SpeculativeAlgorithm.EAGLE: EagleDraft,
            SpeculativeAlgorithm.EAGLE3: Eagle3Draft,
            SpeculativeAlgorithm.NEXTN: MTPDraft,
            SpeculativeAlgorithm.STANDALONE: _standalone,
        }
    )
)


def make_draft_model(config: DraftConfig, context: LayerContext, target: CausalLM, names: Set[str]) -> DraftModel:
    """The draft of ``config.algorithm`` for ``target``, with uninitialised parameters on the default device. ``names``:
    the names of the tensors in its checkpoint."""
    return _DRAFTS[config.algorithm](config, replace(context, norm_offset=config.model.norm_offset), target, names)
