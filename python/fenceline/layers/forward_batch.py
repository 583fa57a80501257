"""ForwardBatch: all inputs of a forward pass in one frozen value, which the model runner builds once per step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from fenceline.config.families import BlocksConfig
from fenceline.memory_order import Best

if TYPE_CHECKING:
    from fenceline.layers.recurrent_state import StateStep
    from fenceline.mem_cache.kv_pool import KVPool


SINK_ROW = 0  # of the rows of image embeddings: no image has it


class ForwardMode(Enum):
    """What a step computes. ``EXTEND``: new prompt tokens, after a cached prefix if there is one. ``DECODE``: one token
    for each request. ``VERIFY``: a few tokens for each request, which form a chain or a tree; only the device knows the
    requests' lengths."""

    EXTEND = "extend"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What an attention backend plans from. The queries of request i are ``query_lens_cpu[i]`` entries of the T axis,
    from ``query_lens_cpu[:i].sum()`` on. They are the *last* tokens of its sequence."""

    mode: ForwardMode
    page_table: torch.Tensor  # [num_rows, max_pages_per_req] int32, all request rows
    rows: torch.Tensor  # [B] int64, row of each request in page_table
    seq_lens: torch.Tensor  # [B] int64, tokens of each request including this step's
    seq_lens_cpu: npt.NDArray[np.int64]  # [B]
    query_lens_cpu: npt.NDArray[np.int64]  # [B], tokens of this step; all 1 in DECODE
    query_starts: torch.Tensor | None = None  # [B + 1] int32, where each request's queries start; EXTEND only
    # (request, first, end): queries of a request, counted from its first, that attend to one another, whatever their
    # order. EXTEND only, and only the backend torch computes them.
    whole: tuple[tuple[int, int, int], ...] = ()

    def check(self) -> None:
        """Assert that there are requests, and that the queries of each are among its tokens."""
        lens = self.query_lens_cpu
        assert len(lens) > 0, "an empty batch has nothing to attend to"
        assert bool((lens >= 1).all()), "a request without new tokens does not belong in a batch"
        assert bool((lens <= self.seq_lens_cpu).all()), "seq_lens include this step's tokens"
        assert self.mode is not ForwardMode.DECODE or bool((lens == 1).all()), "decode has one query per request"

    def each_query(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The row of each query's request [T] and how many tokens the query sees [T], both int64. EXTEND only."""
        assert self.query_starts is not None, "EXTEND says where each request's queries start"
        ends = self.query_starts[1:].long()
        queries = torch.arange(int(self.query_lens_cpu.sum()), device=ends.device)
        requests = torch.searchsorted(ends, queries, right=True)
        return self.rows[requests], (self.seq_lens - ends)[requests] + queries + 1


@dataclass(frozen=True, slots=True)
class GraphDecodeInputs:
    """What the attention of a captured decode step reads: tensors at fixed addresses, whose *values* are read when the
    graph is replayed. Padded requests have row 0 (the sink) and length 1."""

    page_table: torch.Tensor  # [num_rows, max_pages_per_req] int32, all request rows
    rows: torch.Tensor  # [B] int64
    seq_lens: torch.Tensor  # [B] int64, tokens of each request including this step's
    max_seq_len: int  # no request is longer


@dataclass(frozen=True, slots=True)
class QueryTree:
    """What the queries of each request attend to. The last ``num_nodes`` tokens of a request are the nodes of a tree or
    a chain, and the last ``num_queries`` of these are the queries. All queries see all tokens before the nodes.
    ``ancestors`` [B, num_queries] int64: bit n says that the query attends to node n. A query always attends to its own
    node, whatever that bit says, so 0 is a safe pad value. None: the nodes are a chain, and attention is causal."""

    num_queries: int
    num_nodes: int  # num_queries to 64
    ancestors: torch.Tensor | None = None

    def check(self, batch: int) -> None:
        """Assert that the sizes are valid for ``batch`` requests."""
        assert 1 <= self.num_queries <= self.num_nodes <= 64, (self.num_queries, self.num_nodes)
        if self.ancestors is not None:
            assert self.ancestors.shape == (batch, self.num_queries), (self.ancestors.shape, batch)
            assert self.ancestors.dtype == torch.int64 and self.ancestors.is_contiguous()


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """What the attention of a verify step reads: tensors at fixed addresses, whose *values* are read when the step
    runs. Only the device knows the lengths; the host knows bounds, which determine the shapes. The queries of request i
    are ``[i * num_queries, (i + 1) * num_queries)`` of the T axis. Padding has row 0 and length ``num_nodes``."""

    page_table: torch.Tensor  # [num_rows, max_pages_per_req] int32, with columns for all of seq_lens
    rows: torch.Tensor  # [B] int64
    seq_lens: torch.Tensor  # [B] int64, tokens of each request including the tree's nodes
    max_seq_lens_cpu: npt.NDArray[np.int64]  # [B], bounds of seq_lens
    tree: QueryTree
    num_heads: int  # of q


@dataclass(frozen=True, slots=True, eq=False)
class IndexQueries:
    """By what an indexer scores the tokens that T queries see: a token's score for a query is the sum over heads of
    weight * relu(query . key), where the key is the token's ``index`` row. ``top_k`` tokens are selected."""

    queries: torch.Tensor  # [T, heads, features]
    weights: torch.Tensor  # [T, heads] float32
    top_k: int
    best: Best  # guard ``tie_order``


@dataclass(frozen=True, slots=True, eq=False)
class BlockQueries:
    """By what a layer selects blocks of tokens, for each of its key heads with the queries that share the head."""

    queries: torch.Tensor  # [T, num_heads, head_dim], possibly a strided view
    scale: float  # of scores
    blocks: BlocksConfig
    best: Best  # guard ``tie_order``


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The tokens to which the queries of one step attend in some layers. ``tokens`` are in the form that the step's
    plan has given them, and only the plan reads them."""

    layer_id: int  # whose indexer has selected them
    out_slots: torch.Tensor  # of the step's batch, by which it is known to be this step's
    tokens: Sequence[torch.Tensor]


@dataclass(slots=True, eq=False)
class SparseState:
    """What the layers of one forward hand on beside queries, keys and values. From a layer's projections to its
    attention: ``queries`` of the indexer with their weights, and ``gates`` [T, num_heads * head_dim] of its result; a
    forward in pieces has buffers for them. ``selection``: the latest one, for the layers that have no indexer of their
    own. Only attention touches it, and that is in no piece."""

    queries: tuple[torch.Tensor, torch.Tensor] | None = None
    selection: Selection | None = None
    gates: torch.Tensor | None = None


AttendNew = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class PlanSection:
    """Some successive requests of an EXTEND step, with their tokens. If all of them are new prompts, ``attend_new`` is
    theirs (``AttentionBackend.plan_new``), else ``plan`` is."""

    tokens: slice
    plan: AttentionPlan | None = None
    attend_new: AttendNew | None = None


class AttentionPlan(ABC):
    """How the attention of one batch is computed. All layers use the same plan.

    ``sections``: of an EXTEND step with new prompts whose keys and values layers of latents may compute; else empty."""

    sections: Sequence[PlanSection] = ()

    def prepare(self) -> None:
        """Submit the work that all layers share. Called at the beginning of a step that a graph captures, so that each
        replay does this work again with the current values. Plans of eager steps do it when they are made."""
        return

    @abstractmethod
    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Causal attention over the prefix and the new tokens, all of which are in the pool. q [T, num_heads, head_dim]
        and this step's own k, v [T, num_kv_heads, head_dim], possibly strided views whose last axis is contiguous →
        contiguous [T, num_heads, head_dim] in q's dtype. On the current stream (FORWARD)."""

    def forward_into(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        """Like ``forward``, but the result is written to ``out``, contiguous [T, num_heads, head_dim] in q's dtype,
        where the graph of the next piece reads it."""
        out.copy_(self.forward(layer_id, q, k, v, scale))

    def select(self, layer_id: int, index: IndexQueries) -> Sequence[torch.Tensor]:
        """Of the tokens that each query sees, those with the best scores, all if there are at most ``top_k``. Of equal
        scores the first tokens are taken, because relu gives many exact zeros. This step's own keys are in the layer's
        ``index`` rows."""
        raise AssertionError(f"the attention of layer {layer_id} selects no tokens")

    def select_blocks(self, layer_id: int, wanted: BlockQueries) -> Sequence[torch.Tensor]:
        """The tokens of the blocks to which each query attends with each key head: see ``BlocksConfig``. Of equal
        scores the first blocks are taken. The means of this step's own keys are in the layer's ``index`` rows."""
        raise AssertionError(f"the attention of layer {layer_id} selects no blocks")

    def forward_selected(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        tokens: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Like ``forward``, over the ``tokens`` that ``select`` or ``select_blocks`` has returned."""
        raise AssertionError(f"the attention of layer {layer_id} selects no tokens")


class PieceBuffers:
    """The part of the arena through which the pieces of one forward pass hand on their results: tensors [T, features]
    under the names of ``CausalLM.arena_fields``. Layers keep views of them in ``views``, made once per step."""

    __slots__ = ("tensors", "views")

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.views: dict[str, tuple[torch.Tensor, ...]] = {}


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Where tokens of a step take the embeddings of images in place of their own. ``rows`` [T] int64: a token's row of
    ``embeddings`` [num_rows, hidden_size], or the sink's for a token that keeps its own. Behind these, rows may have
    more embeddings of the same size, which are added to hidden states."""

    rows: torch.Tensor
    embeddings: torch.Tensor

    def merged(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], the embeddings of all tokens, with those of images in their places."""
        return torch.where((self.rows == SINK_ROW).unsqueeze(1), x, self._taken(0, x.shape[1]))

    def add_to(self, x: torch.Tensor, number: int) -> None:
        """x [T, hidden_size] += the embeddings ``number``, in place, where tokens are of images."""
        x += self._taken(number, x.shape[1]).masked_fill_((self.rows == SINK_ROW).unsqueeze(1), 0)

    def _taken(self, number: int, size: int) -> torch.Tensor:
        return self.embeddings[:, number * size : (number + 1) * size].index_select(0, self.rows)


@dataclass(frozen=True, slots=True)
class AuxHiddenStates:
    """The residual stream before chosen layers, concatenated, for draft models that read it (EAGLE-3). In a model with
    n layers, layer n stands for the output of the last one. A layer may be named twice."""

    layers: tuple[int, ...]
    out: torch.Tensor  # [T, len(layers) * hidden_size]

    def keep(self, layer: int, x: torch.Tensor) -> None:
        """Copy x [T, hidden_size], the residual stream before ``layer``, to its place in ``out`` if that was chosen."""
        if layer in self.layers:
            parts = self.out.chunk(len(self.layers), dim=1)
            for part in (part for part, wanted in zip(parts, self.layers, strict=True) if wanted == layer):
                part.copy_(x)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Device views of one step's inputs. B requests, T tokens in request order, L rows of logits. All tensors live on
    the model's device and are written on FORWARD before the model runs."""

    mode: ForwardMode
    input_ids: torch.Tensor  # [T] int64
    # Of each axis [T] int64: the positions of the tokens in their requests. Text has one axis. Prompts with images have
    # three in a model with ``rope_axes``. If there are ``angles``, the tokens' rows of these.
    positions: tuple[torch.Tensor, ...]
    out_slots: torch.Tensor  # [T] int64, KV slot each token's K and V are written to
    logits_index: torch.Tensor | None  # [L] int64 into the T tokens; None: logits of every token
    attn: AttentionPlan  # how this batch's attention is computed, planned once for all layers
    kv_pool: KVPool  # where keys and values go
    # [L, this rank's columns]: where the logits go; None: memory of their own.
    logits_out: torch.Tensor | None = None
    # Called before each layer first reads or writes the pool, outside graphs. It makes FORWARD wait until this layer of
    # the pages that are being loaded for the batch is complete. None: nothing is being loaded.
    layer_ready: Callable[[int], None] | None = None
    # [T, hidden_size]: embeddings in place of those of ``input_ids``, which then say nothing. None: those of the ids.
    input_embeds: torch.Tensor | None = None
    # Where tokens take embeddings of images. None: the step has no such tokens.
    images: ImageRows | None = None
    # [T, 3 * head_dim / 2] float32, rows as in the table of a RotaryEmbedding, in place of that table. None: the table.
    angles: torch.Tensor | None = None
    # If the forward is cut into pieces at attention, the pieces hand on their results in these. None: the forward runs
    # as a whole and allocates these tensors.
    buffers: PieceBuffers | None = None
    # Where the model writes hidden states that a draft model reads. None: nothing reads them, and none are kept.
    aux_hidden: AuxHiddenStates | None = None
    # By norm: its result for the residual stream, if an all-reduce has computed it as well. The branch that has the
    # norm takes the entry out.
    normed: dict[object, torch.Tensor] = field(default_factory=dict, compare=False)
    # None: the model has no recurrent layers.
    states: StateStep | None = None
    # Empty when the forward begins.
    sparse: SparseState = field(default_factory=SparseState, compare=False)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[0]
