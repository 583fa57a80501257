"""The decoder that all model families share: a list of layers, which each family makes and which may differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from fenceline.config.model_config import ModelConfig
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import DecoderLayer
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.linear import VocabParallelEmbedding
from fenceline.layers.rotary import RotaryEmbedding, make_rotary
from fenceline.layers.weight import WeightSlots, fill_slots
from fenceline.mem_cache.kv_pool import KVRow
from fenceline.memory_order import ArenaField, Role

ROTARY_TABLE = ".rotary_emb.inv_freq"  # old checkpoints store it
KV_SCALES = (".self_attn.k_scale", ".self_attn.v_scale")  # of a KV cache in FP8, if there is one
MTP_PREFIX = "model.mtp_layers."  # of the tensors that predict further tokens


class CausalLM(ABC):
    """Embedding, decoder layers, norm and language-model head.

    A forward runs whole (``hidden_states``), or in pieces with attention between them::

        run_piece(0)                embedding, layer 0 as far as attention
        attend(0)                   attention of layer 0
        run_piece(1)                layer 0 from there, layer 1 as far as attention
        ...
        run_piece(num_layers)       the end of the last layer

    A piece depends on nothing but the number of tokens, so a graph can capture it. Pieces pass their results to each
    other in ``batch.buffers``.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, first_layer: int = 0) -> None:
        """Parameters are allocated, uninitialised, on the default device. ``first_layer`` is the index of the first
        layer in the KV pool: the layers of a draft model follow those of the target."""
        context = replace(context, norm_offset=config.norm_offset)
        self.config = config
        self.context = context
        sizes = config.vocab_size, config.hidden_size
        scales = config.multipliers.embedding, config.multipliers.logits, config.logits_soft_cap
        self.embed_tokens = VocabParallelEmbedding(*sizes, context, *scales)
        self.rotary = make_rotary(config)
        self.layers = [
            self.make_layer(config, context, self.rotary, first_layer + index, index)
            for index in range(config.num_layers)
        ]
        self.norm = context.norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(*sizes, context, *scales)

    @staticmethod
    @abstractmethod
    def make_layer(
        config: ModelConfig, context: LayerContext, rotary: RotaryEmbedding, layer_id: int, index: int
    ) -> DecoderLayer:
        """Layer ``index`` of the family's model, whose keys and values are layer ``layer_id`` of the KV pool."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [L, vocab_size] in the model's dtype of the rows ``batch.logits_index`` (all T where it is None).

        Writes the batch's keys and values into ``batch.kv_pool``. Runs on the current stream.
        """
        return self.compute_logits(self.hidden_states(batch), batch)

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """Output of the last layer before the final norm, [T, hidden_size]. Fills ``batch.aux_hidden``."""
        x = self.embed_tokens.forward(batch.input_ids)
        batch.keep_aux_hidden(0, x)
        for index, layer in enumerate(self.layers, start=1):
            x = layer.forward(x, batch)
            batch.keep_aux_hidden(index, x)
        return x

    def compute_logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``hidden_states`` [T, hidden_size] → logits [L, vocab_size] of the rows ``batch.logits_index``."""
        return self.lm_head.logits(batch.logits_rows(x), self.norm, batch.logits_out)

    def own_logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """This rank's columns of ``compute_logits``: see ``VocabParallelEmbedding``."""
        return self.lm_head.own_logits(batch.logits_rows(x), self.norm, batch.logits_out)

    @property
    def kv_rows(self) -> tuple[tuple[KVRow, ...], ...]:
        """What each token keeps in the KV pool, layer by layer."""
        return tuple(layer.self_attn.kv_rows for layer in self.layers)

    @property
    def attention_rules(self) -> dict[int, LayerRules]:
        """Of the layers that do more than softmax(scale q k^T) v, by their place in the KV pool."""
        layers = [layer.self_attn for layer in self.layers]
        return {layer.layer_id: layer.rules for layer in layers if not layer.rules.plain}

    # --- in pieces

    @property
    def num_layers(self) -> int:
        """Number of decoder layers. There is one piece more than layers."""
        return len(self.layers)

    def run_piece(self, index: int, batch: ForwardBatch) -> None:
        """Run what is between attention of layer ``index - 1`` and attention of layer ``index``. Leaves the residual
        stream in the buffer ``hidden``; after the last piece that is what ``hidden_states`` returns."""
        assert batch.buffers is not None, "pieces meet in buffers"
        x = batch.buffers.tensors["hidden"]
        if index == 0:
            x.copy_(self.embed_tokens.forward(batch.input_ids))
        else:
            layer = self.layers[index - 1]
            layer.mlp.forward(layer.self_attn.add_output(x, batch), batch)
        batch.keep_aux_hidden(index, x)
        if index < len(self.layers):
            self.layers[index].self_attn.project(x, batch)

    def attend(self, index: int, batch: ForwardBatch) -> None:
        """Attention of layer ``index`` over what ``run_piece(index)`` has left in the buffers."""
        self.layers[index].self_attn.attend_between_pieces(batch)

    def arena_fields(self) -> Sequence[ArenaField]:
        """The buffers that pieces need, with one row for each token."""
        hidden_size = self.config.hidden_size
        fields = [ArenaField("hidden", self.context.dtype, Role.OUTPUT, pad=0, shape=(hidden_size,))]
        for layer in self.layers:
            fields += [field for field in layer.self_attn.arena_fields() if field not in fields]
        return fields

    # --- weights

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], partly: bool = False, only_check: bool = False
    ) -> None:
        """Fill every parameter from (name, tensor) pairs with Hugging Face's names, in any order; ``partly``: those
        that come. With ``only_check`` nothing is written.

        Raises ``ValueError`` for missing, unexpected, repeated and mis-shaped weights.
        """
        tied = self.lm_head is self.embed_tokens
        mtp = self.config.num_mtp_layers > 0
        first, more = len(self.layers), self.config.num_appended_layers
        appended = tuple(f"model.layers.{first + index}." for index in range(more))

        def ignored(name: str) -> bool:
            # Some checkpoints store a tied head a second time, and old ones store the rotary table. The layers that
            # predict further tokens are a draft model (models/mtp.py).
            return (
                (tied and name == "lm_head.weight")
                or name.endswith((ROTARY_TABLE, *KV_SCALES))
                or (mtp and name.startswith(MTP_PREFIX))
                or name.startswith(appended)
            )

        slots = self.weight_slots()
        fill_slots(slots, _split_fused(slots, weights), ignored, partly, only_check)

    def weight_slots(self) -> WeightSlots:
        """Where each tensor of the checkpoint goes. Together the slots cover every parameter."""
        slots = self.embed_tokens.weight_slots("model.embed_tokens")
        for layer_id, layer in enumerate(self.layers):
            slots |= layer.weight_slots(f"model.layers.{layer_id}.")
        slots |= self.norm.weight_slots("model.norm")
        if self.lm_head is not self.embed_tokens:
            slots |= self.lm_head.weight_slots("lm_head")
        return slots

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(slot.nbytes for slot in self.weight_slots().values())


# Matrices that some checkpoints store as one, and its parts.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _split_fused(
    slots: WeightSlots, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """``weights``, with fused matrices taken apart where the model has slots for the parts."""
    for name, tensor in weights:
        module = name.rsplit(".", 2)[-2] if name.count(".") > 1 else ""
        names = [name.replace(f".{module}.", f".{part}.") for part in _FUSED.get(module, ())]
        if not names or any(part not in slots for part in names):
            yield name, tensor
            continue
        yield from zip(names, _parts(name, tensor, [slots[part].full_shape for part in names]), strict=True)


def _parts(name: str, tensor: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[torch.Tensor]:
    """Parts of ``shapes``, along whichever axis of the tensor they are: rows of most, columns of some packed ones. What
    a quantised checkpoint says of all parts at once, such as a scale of the whole, each of them gets."""
    shape = tuple(tensor.shape)
    if all(part in ((), shape) for part in shapes):
        return [tensor] * len(shapes)
    for dim in range(tensor.dim()):
        sizes = [part[dim] for part in shapes if len(part) == len(shape)]
        others = [part[:dim] + part[dim + 1 :] for part in shapes]
        if sum(sizes) == shape[dim] and all(other == shape[:dim] + shape[dim + 1 :] for other in others):
            return tensor.split(sizes, dim)
    raise ValueError(
        f"weight {name} has shape {list(shape)}, config.json asks for {' and '.join(str(list(p)) for p in shapes)} in"
        " it; the weights and config.json belong to different models"
    )
