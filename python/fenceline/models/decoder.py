"""The decoder that all model families share. Each family makes its layers, which may differ from one another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise

import torch

from fenceline.config.families import OWN_MTP
from fenceline.config.model_config import ModelConfig
from fenceline.config.quantization import FUSED
from fenceline.config.state_layout import StateSpec
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.context import LayerContext
from fenceline.layers.decoder_layer import Branch, DecoderLayer, LayerSite
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.layers.linear import VocabParallelEmbedding
from fenceline.layers.rotary import RotaryEmbedding, make_rotary
from fenceline.layers.weight import WeightSlots, fill_slots
from fenceline.memory_order import ArenaField, Role
from fenceline.models.vision import TOWERS, VisionTower

ROTARY_TABLES = "rotary_emb."  # in the names of tensors that old checkpoints store and that are not needed
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale")  # needed only if the KV cache is in FP8
OTHER_SCALES = (".q_scale", ".prob_scale")  # of queries and scores, which are never in FP8
# Suffixes of names and what we call such a tensor. The first two are those of transformers 5 for FP8 with a scale for
# each tensor.
_OTHER_NAMES = {
    ".weight_scale_inv": ".weight_scale",
    ".activation_scale": ".input_scale",
    ".k_proj.k_scale": ".k_scale",
    ".v_proj.v_scale": ".v_scale",
}

LAYERS = "model.layers."  # the prefix of the tensors of a model's layers

LayerMaker = Callable[[LayerSite], DecoderLayer | Branch]
Weights = Iterable[tuple[str, torch.Tensor]]  # tensors with their names, in any order

logger = logging.getLogger(__name__)


class CausalLM:
    """Embedding, decoder layers, norm and language-model head.

    A forward pass runs as a whole (``hidden_states``), or in pieces with attention between them::

        run_piece(0)                embedding, layer 0 up to attention
        attend(0)                   attention of layer 0
        run_piece(1)                layer 0 after attention, layer 1 up to attention
        ...
        run_piece(num_layers)       the end of the last layer

    The kernels of a piece depend only on the number of tokens, so a graph can capture it. Pieces hand on their results
    in ``batch.buffers``.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        make_layer: LayerMaker,
        own_weights: Callable[[Weights], Weights] | None = None,
        first_layer: int = 0,
    ) -> None:
        """Parameters are allocated on the default device and not initialised. ``own_weights`` takes those of a
        checkpoint that the layers have, under their names there; None: all. ``first_layer`` is the index of the first
        layer in the KV pool, where the layers of a draft model follow those of the target."""
        context = replace(context, norm_offset=config.norm_offset)
        self._own_weights = own_weights
        self.config = config
        self.context = context
        sizes = config.vocab_size, config.hidden_size
        scales = config.multipliers.embedding, config.multipliers.logits, config.logits_soft_cap
        self.embed_tokens = VocabParallelEmbedding(*sizes, context, *scales)
        self.rotary = make_rotary(config)
        self.vision = None if config.vision is None else VisionTower(config.vision, context.dtype)
        self.layers = make_layers(make_layer, config, context, LAYERS, self.rotary, first_layer)
        self._num_deepstack = 0 if config.vision is None else len(config.vision.deepstack)
        for layer, following in pairwise(self.layers[self._num_deepstack :]):  # before these nothing else is added
            layer.last.next_norm = following.self_attn.input_norm
        self.norm = context.norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens  # also of a model for embeddings, whose head nobody asks
        if not config.tie_word_embeddings and not config.embeds:
            self.lm_head = VocabParallelEmbedding(*sizes, context, *scales)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [L, vocab_size] in the model's dtype for the rows ``batch.logits_index`` (for all T if it is None).
        Writes the batch's keys and values into ``batch.kv_pool``. Runs on the current stream."""
        return self.compute_logits(self.hidden_states(batch), batch)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """What the first layer reads, [T, hidden_size], which layers add to in place."""
        if batch.input_embeds is not None:
            return batch.input_embeds.clone()
        x = self.embed_tokens.forward(batch.input_ids)
        return x if batch.images is None else batch.images.merged(x)

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """The output of the last layer before the final norm, [T, hidden_size]. Fills ``batch.aux_hidden`` if given."""
        if len(batch.positions) > 1:
            batch = self.rotary.placed(batch)
        x, kept, images = self.embed(batch), batch.aux_hidden, batch.images
        if kept is not None:
            kept.keep(0, x)
        for index, layer in enumerate(self.layers, start=1):
            x = layer.forward(x, batch)
            if images is not None and index <= self._num_deepstack:
                images.add_to(x, index)
            if kept is not None:
                kept.keep(index, x)
        return x

    def compute_logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``hidden_states`` [T, hidden_size] → logits [L, vocab_size] of the rows ``batch.logits_index``."""
        return self.lm_head.whole_logits(self.own_logits(x, batch))

    def own_logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """This rank's columns of ``compute_logits``: see ``VocabParallelEmbedding``."""
        return self.lm_head.own_logits(logits_rows(x, batch), self.norm, batch.logits_out)

    def embeddings(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """``hidden_states`` x [T, hidden_size] → what the head would read of its rows ``index`` [E], in float32."""
        return self.norm.forward(x.index_select(0, index)).float()

    @property
    def attention_rules(self) -> dict[int, LayerRules]:
        """The rules of the layers that compute more than softmax(scale q k^T) v, by their index in the KV pool."""
        return rules_of(self.layers)

    @property
    def state_specs(self) -> list[StateSpec]:
        """What the recurrent layers keep, in the order of the pool of states."""
        return [layer.self_attn.state_spec for layer in self.layers if layer.self_attn.state_spec is not None]

    # --- in pieces

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, each of which has a mixer of tokens. There is one piece more than layers."""
        return len(self.layers)

    def run_piece(self, index: int, batch: ForwardBatch) -> None:
        """Run what is between the attention of layer ``index - 1`` and that of layer ``index``. Leaves the residual
        stream in the buffer ``hidden``, which after the last piece has what ``hidden_states`` returns."""
        assert batch.buffers is not None, "pieces meet in buffers"
        x = batch.buffers.tensors["hidden"]
        if index == 0:
            x.copy_(self.embed(batch))
        else:
            layer = self.layers[index - 1]
            layer.after_mixing(layer.self_attn.add_output(x, batch), batch)
            if batch.images is not None and index <= self._num_deepstack:
                batch.images.add_to(x, index)
        if batch.aux_hidden is not None:
            batch.aux_hidden.keep(index, x)
        if index < len(self.layers):
            self.layers[index].self_attn.project(x, batch)

    def attend(self, index: int, batch: ForwardBatch) -> None:
        """Compute the attention of layer ``index`` from what ``run_piece(index)`` has left in the buffers."""
        self.layers[index].self_attn.attend_between_pieces(batch)

    def arena_fields(self) -> Sequence[ArenaField]:
        """The arena fields of the buffers that pieces need, with one row for each token."""
        hidden_size = self.config.hidden_size
        fields = [ArenaField("hidden", self.context.dtype, Role.OUTPUT, pad=0, shape=(hidden_size,))]
        for layer in self.layers:
            fields += [field for field in layer.self_attn.arena_fields() if field not in fields]
        return fields

    # --- weights

    def load_weights(self, weights: Weights, partly: bool = False, only_check: bool = False) -> None:
        """Fill every parameter from (name, tensor) pairs with Hugging Face's names, in any order. With ``partly`` only
        the parameters for which a tensor comes are filled. With ``only_check`` nothing is written. Raises
        ``ValueError`` for missing, unexpected, repeated and mis-shaped weights."""
        tied = self.lm_head is self.embed_tokens
        first = len(self.layers) if self.config.appended_mtp else 0
        of_mtp = mtp_modules(self.config, range(first, first + self.config.num_mtp_layers))

        kv_scales: list[str] = []

        def ignored(name: str) -> bool:
            # Some checkpoints store a tied head a second time, and old ones store the rotary table. Multi-token
            # prediction layers are a draft model (models/draft_families.py).
            if name.endswith(KV_SCALES):
                kv_scales.append(name)
                return True
            return (
                (tied and name.startswith("lm_head."))
                or ROTARY_TABLES in name
                or name.endswith(OTHER_SCALES)
                or name.startswith(of_mtp)
                or (self.vision is None and name.startswith(TOWERS))
            )

        slots = self.weight_slots()
        weights = weights if self._own_weights is None else self._own_weights(weights)
        fill_slots(slots, split_fused(slots, weights), ignored, partly, only_check)
        if kv_scales and self.context.kv_dtype not in (None, self.context.dtype) and not only_check:
            logger.warning(
                "the checkpoint has scales of keys and values (%s, ...) that its config.json does not announce as"
                " kv_cache_scheme: keys and values are stored in FP8 without a scale", kv_scales[0],
            )  # fmt: skip

    def weight_slots(self) -> WeightSlots:
        """Where each tensor of the checkpoint goes. Together the slots cover every parameter."""
        slots = self.embed_tokens.weight_slots("model.embed_tokens")
        for layer in self.layers:
            slots |= layer.weight_slots()
        slots |= self.norm.weight_slots("model.norm")
        if self.lm_head is not self.embed_tokens:
            slots |= self.lm_head.weight_slots("lm_head")
        if self.vision is not None:
            slots |= self.vision.weight_slots()
        return slots

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.weight_slots().values())


def rules_of(layers: Iterable[DecoderLayer]) -> dict[int, LayerRules]:
    """The rules of those of ``layers`` that have any, by their index in the KV pool."""
    mixers = [layer.self_attn for layer in layers]
    return {mixer.layer_id: mixer.rules for mixer in mixers if not mixer.rules.plain}


def make_layers(
    make: LayerMaker, config: ModelConfig, context: LayerContext, prefix: str, rotary: RotaryEmbedding, first: int
) -> list[DecoderLayer]:
    """All layers of ``config``: their names in the checkpoint are ``prefix`` and their indices. In the KV pool those
    that attend are the ones from ``first`` on, and in the pool of states the others are the ones from 0 on. One that is
    an MLP alone completes the layer before it."""
    of_pages, of_states, layers = count(first), count(), list[DecoderLayer]()
    for index in config.layer_indices:
        layer_id = 0
        if index not in config.mlp_layers:
            layer_id = next(of_states if index in config.recurrent_layers else of_pages)
        made = make(LayerSite(config, context.inside(f"{prefix}{index}"), rotary, layer_id, index))
        if isinstance(made, Branch):
            layers[-1].complete(made)
        else:
            layers.append(made)
    return layers


def mtp_modules(config: ModelConfig, indices: Iterable[int]) -> tuple[str, ...]:
    """What the names of the tensors of the multi-token prediction layers ``indices`` begin with."""
    if config.mtp_prefix == OWN_MTP:
        return (OWN_MTP.removesuffix("layers."),)
    return tuple(f"{config.mtp_prefix}{index}." for index in indices)


def logits_rows(x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """The rows of x [T, features] for which ``batch`` needs logits, [L, features]."""
    return x if batch.logits_index is None else x.index_select(0, batch.logits_index)


def split_fused(slots: WeightSlots, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """``weights``, with fused matrices split if the model has slots for their parts, and under our names where other
    tools have given a tensor another one."""
    for given, tensor in weights:
        for name in (given, _our_name(given), f"model.{given}"):  # without it in the files of embedding models
            module = name.rsplit(".", 2)[-2] if name.count(".") > 1 else ""
            of_parts = (
                [name.replace(f".{module}.", f".{part}.") for part in ps] for fused, ps in FUSED if fused == module
            )
            names = next((each for each in of_parts if all(part in slots for part in each)), None)
            if names is not None:
                shapes = [slots[part].full_shape for part in names]
                yield from zip(names, _parts(given, tensor, shapes), strict=True)
                break
            if name in slots:
                yield name, tensor
                break
        else:
            yield given, tensor


def _our_name(name: str) -> str:
    for suffix, ours in _OTHER_NAMES.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + ours
    return name


def _parts(name: str, tensor: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[torch.Tensor]:
    """Splits a fused ``tensor`` into parts of ``shapes``, along the axis on which they are concatenated: the rows of
    most tensors, the columns of some packed ones. A value of a quantised checkpoint that applies to all parts, such as
    one scale, is given to each of them."""
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
