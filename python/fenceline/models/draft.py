"""DraftModel: the interface and the common parts of models that propose tokens, which a target model then verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set

import torch

from fenceline.config.draft_config import DraftConfig
from fenceline.config.model_config import ModelConfig
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.kernels.embed_join import JoinNorms, embed_and_join
from fenceline.layers.linear import VocabParallelEmbedding
from fenceline.layers.rotary import RotaryEmbedding, make_rotary
from fenceline.layers.weight import RMSNorm, WeightSlots, fill_slots
from fenceline.models.decoder import ROTARY_TABLES, CausalLM, Weights, rules_of, split_fused


class DraftModel(ABC):
    """A model whose KV layers follow the target's in the pool (``EngineConfig.kv_layout``).

    A draft that reads hidden states computes row i of a request from token i + 1 and the hidden state of token i, at
    position i, and its logits are for token i + 2. In the first step the hidden states come from the target
    (``hidden_states_from``), afterwards from the preceding row, which the draft has computed itself. If the draft has
    one layer for each step, step k computes row i from token i + 1 + k and the hidden state that step k - 1 has
    computed for row i. A STANDALONE draft reads no hidden states: its row i is computed from token i.
    """

    lm_head: VocabParallelEmbedding
    """The head of the draft vocabulary, which may be the target's."""

    target_ids: torch.Tensor | None = None
    """[draft vocabulary] int64: the target's id of each token of the draft. None: the ids are the same."""

    max_steps: int | None = None
    """How many steps this draft can predict; None: any number, where each step continues from the preceding one."""

    num_heads: int
    """This rank's number of attention heads in each layer."""

    hidden_size: int
    """Features of the hidden states that ``forward`` takes and returns; 0 for a draft that reads none."""

    @abstractmethod
    def hidden_states_from(self, x: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        """The hidden states for the draft's first step, [T, hidden_size], from what the target has computed. x [T,
        target's hidden_size] is the result of ``CausalLM.hidden_states``. ``aux`` is the tensor of
        ``ForwardBatch.aux_hidden``, which only a draft whose config names ``aux_layers`` needs."""

    @abstractmethod
    def forward(
        self, batch: ForwardBatch, hidden_states: torch.Tensor, step: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute step ``step`` from ``batch.input_ids`` at ``batch.positions`` and ``hidden_states`` [T, hidden_size],
        which are not changed → (logits [L, this rank's columns of the draft vocabulary] of the rows
        ``batch.logits_index``, as ``lm_head.own_logits`` gives them, and the next hidden states [T, hidden_size]).
        Writes the batch's keys and values into ``batch.kv_pool``. Runs on the current stream."""

    @abstractmethod
    def logits(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's logits, as :meth:`forward` returns them, in ``out`` if given, for hidden states [L, hidden_size]
        that ``forward`` has returned. Must not be called for drafts that read no hidden states."""

    @property
    @abstractmethod
    def attention_rules(self) -> dict[int, LayerRules]:
        """As ``CausalLM.attention_rules``."""

    @abstractmethod
    def weight_slots(self) -> WeightSlots:
        """Where each tensor of the checkpoint goes. Tensors of the target that the draft shares are not included."""

    @abstractmethod
    def load_weights(self, weights: Weights) -> None:
        """Fill all parameters that the draft does not share with the target. Raises ``ValueError`` as
        ``CausalLM.load_weights`` does."""

    def weights_loaded(self) -> None:  # noqa: B027  # most drafts have nothing to do
        """Called once, when all parameters have their values, on the default device."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters that the draft does not share with the target."""
        return sum(slot.nbytes for slot in self.weight_slots().values())


class StandaloneDraft(DraftModel):
    """A whole model with the target's vocabulary. It reads only the target's tokens."""

    hidden_size = 0

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.lm_head = model.lm_head
        self.num_heads = model.context.shard.divide(model.config.num_heads, "attention heads")

    def hidden_states_from(self, x: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        return x[:, :0]

    def forward(
        self, batch: ForwardBatch, hidden_states: torch.Tensor, step: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.own_logits(self.model.hidden_states(batch), batch), hidden_states

    def logits(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("it leaves no hidden states")

    @property
    def attention_rules(self) -> dict[int, LayerRules]:
        return self.model.attention_rules

    def weight_slots(self) -> WeightSlots:
        return self.model.weight_slots()

    def load_weights(self, weights: Weights) -> None:
        self.model.load_weights(weights)


class SharingDraft(DraftModel):
    """A draft that uses the target's embedding and head unless its checkpoint has its own."""

    layers: list[DecoderLayer]
    head_norm: RMSNorm | None = None  # is applied before the head
    ignored: frozenset[str] = frozenset()  # tensors in such checkpoints that are not needed

    def __init__(self, config: DraftConfig, context: LayerContext, target: CausalLM, names: Set[str]) -> None:
        """``names``: the names of all tensors in the draft's checkpoint. Parameters are uninitialised, on the default
        device. Raises ``ValueError`` if the checkpoint has no embedding or head and the target's has another size."""
        model = config.model
        self.config = config
        self.hidden_size = model.hidden_size
        self.num_heads = context.shard.divide(model.num_heads, "attention heads")
        self.target = target
        self.kernels = context.kernels
        self.rotary = _rotary(model, target)
        head_size = model.vocab_size
        if config.token_map is None:  # else rows are taken from the whole head
            head_size = config.draft_vocab_size or head_size
        self.embed_tokens = self._table("embed_tokens", model.vocab_size, target.embed_tokens, context, names)
        self.lm_head = self._table("lm_head", head_size, target.lm_head, context, names)

    @property
    def attention_rules(self) -> dict[int, LayerRules]:
        return rules_of(self.layers)

    def logits(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.lm_head.own_logits(hidden_states, self.head_norm, out)

    def embedded(self, batch: ForwardBatch) -> torch.Tensor:
        """The embeddings [T, hidden_size] of the batch's tokens, those of images as the target has computed them."""
        x = self.embed_tokens.forward(batch.input_ids)
        return x if batch.images is None else batch.images.merged(x)

    def joined(self, batch: ForwardBatch, hidden_states: torch.Tensor, norms: JoinNorms | None = None) -> torch.Tensor:
        """The embeddings of the batch's tokens concatenated with ``hidden_states`` [T, hidden_size], each normalised if
        ``norms`` is given: [T, 2 * hidden_size]."""
        table = self.embed_tokens
        is_plain = batch.images is None and batch.angles is None  # a kernel that reads angles early may not come next
        if table.shard.size == 1 and table.embedding_scale == 1.0 and is_plain:
            return embed_and_join(batch.input_ids, table.weight.data, hidden_states, norms)
        embedded = self.embedded(batch)
        if norms is not None:
            embedded = self.kernels.rms_norm(embedded, norms.embeddings, norms.eps)
            hidden_states = self.kernels.rms_norm(hidden_states, norms.hidden, norms.eps)
        return torch.cat((embedded, hidden_states), dim=-1)

    def _table(
        self, name: str, vocab_size: int, shared: VocabParallelEmbedding, context: LayerContext, names: Set[str]
    ) -> VocabParallelEmbedding:
        if f"{name}.weight" in names:
            return VocabParallelEmbedding(vocab_size, self.hidden_size, context)
        ours, theirs = (vocab_size, self.hidden_size), (shared.vocab_size, shared.weight.shape[1])
        if ours != theirs:
            raise ValueError(
                f"the draft's checkpoint lacks {name}.weight, and the target's cannot take its place: {list(theirs)},"
                f" not {list(ours)}; check the draft's config.json or download the draft again"
            )
        return shared

    def weight_slots(self) -> WeightSlots:
        slots: WeightSlots = {}
        if self.embed_tokens is not self.target.embed_tokens:
            slots |= self.embed_tokens.weight_slots("embed_tokens")
        if self.lm_head is not self.target.lm_head:
            slots |= self.lm_head.weight_slots("lm_head")
        return slots

    def load_weights(self, weights: Weights) -> None:
        slots = self.weight_slots()
        fill_slots(slots, split_fused(slots, weights), lambda name: name in self.ignored or ROTARY_TABLES in name)
        target = self.target
        # Many drafts have a copy of the target's embedding, of up to a gigabyte. A single rank drops it. Several ranks
        # keep it: each compares only its part, so some ranks might share the table while others do not.
        if target.context.shard.size > 1:
            return
        if _equal(self.embed_tokens, target.embed_tokens):
            self.embed_tokens = target.embed_tokens
        if _equal(self.lm_head, target.lm_head):
            self.lm_head = target.lm_head


def _equal(own: VocabParallelEmbedding, shared: VocabParallelEmbedding) -> bool:
    ours, theirs = own.weight.data, shared.weight.data
    return own.vocab_size == shared.vocab_size and ours.shape == theirs.shape and torch.equal(ours, theirs)


def _rotary(model: ModelConfig, target: CausalLM) -> RotaryEmbedding:
    """The target's rotary table if the draft's would be the same, because it may take a hundred megabytes."""

    def parameters(config: ModelConfig) -> tuple[object, ...]:
        positions = config.context_length, config.rope_theta, config.rope_scaling
        return config.rotary_dim, *positions, config.partial_rotary_factor, config.rope_interleaved, config.rope_axes

    if parameters(model) == parameters(target.config):
        return target.rotary
    return make_rotary(model)
