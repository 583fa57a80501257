"""ForwardBatch: all inputs of a forward in one value. The model runner builds it once per step; it is frozen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from fenceline.mem_cache.kv_pool import KVPool


class ForwardMode(Enum):
    """What a step computes: ``EXTEND`` computes new prompt tokens (after a cached prefix, if any), ``DECODE`` one token
    for each request, ``VERIFY`` a few, of a chain or a tree, whose lengths the device alone knows."""

    EXTEND = "extend"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What an attention backend plans from. The query tokens of request i are the range of the T axis
    ``query_lens_cpu[:i].sum()`` .. ``+ query_lens_cpu[i]``; they are the *last* tokens of its sequence."""

    mode: ForwardMode
    page_table: torch.Tensor  # [num_rows, max_pages_per_req] int32, all request rows
    rows: torch.Tensor  # [B] int64, row of each request in page_table
    seq_lens: torch.Tensor  # [B] int64, tokens of each request including this step's
    seq_lens_cpu: npt.NDArray[np.int64]  # [B]
    query_lens_cpu: npt.NDArray[np.int64]  # [B], tokens of this step; all 1 in DECODE
    query_starts: torch.Tensor | None = None  # [B + 1] int32, where each request's queries start; EXTEND only


@dataclass(frozen=True, slots=True)
class GraphDecodeInputs:
    """What attention of a captured decode step reads: tensors at fixed addresses, whose *values* are read when the
    graph is replayed. Padded requests have row 0, the sink, and length 1."""

    page_table: torch.Tensor  # [num_rows, max_pages_per_req] int32, all request rows
    rows: torch.Tensor  # [B] int64
    seq_lens: torch.Tensor  # [B] int64, tokens of each request including this step's
    max_seq_len: int  # no request is longer


@dataclass(frozen=True, slots=True)
class QueryTree:
    """What the queries of each request attend to: they are its last ``num_queries`` tokens, and its last ``num_nodes``
    are the nodes of a tree (or a chain), of which the queries are the last. Everything in front of the nodes is
    visible to all queries.

    ``ancestors`` [B, num_queries] int64: bit n says that the query attends to node n. Its own node it attends to
    whatever the bit says, so that 0 is a safe pad. None: the nodes are a chain, and attention is causal.
    """

    num_queries: int
    num_nodes: int  # num_queries to 64
    ancestors: torch.Tensor | None = None

    def check(self, batch: int) -> None:
        """Assert that it is one for ``batch`` requests."""
        assert 1 <= self.num_queries <= self.num_nodes <= 64, (self.num_queries, self.num_nodes)
        if self.ancestors is not None:
            assert self.ancestors.shape == (batch, self.num_queries), (self.ancestors.shape, batch)
            assert self.ancestors.dtype == torch.int64 and self.ancestors.is_contiguous()


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """What attention of a few tokens a request reads: tensors at fixed addresses, whose *values* are read when the step
    runs. Lengths are known on the device only; the host knows bounds, which give shapes. The query tokens of request i
    are ``[i * num_queries, (i + 1) * num_queries)`` of the T axis. Padded requests have row 0, the sink, and length
    ``num_nodes``."""

    page_table: torch.Tensor  # [num_rows, max_pages_per_req] int32, with columns for all of seq_lens
    rows: torch.Tensor  # [B] int64
    seq_lens: torch.Tensor  # [B] int64, tokens of each request including the tree's nodes
    max_seq_lens_cpu: npt.NDArray[np.int64]  # [B], bounds of seq_lens
    tree: QueryTree
    num_heads: int  # of q


class AttentionPlan(ABC):
    """One batch's attention, the same for all layers."""

    def prepare(self) -> None:
        """Submit what all layers share. Called at the beginning of a step that a graph captures, so that each replay
        does it again with the current values. Plans of eager steps do it when they are made."""
        return

    @abstractmethod
    def forward(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Causal attention over the prefix and the new tokens, all of which are in the pool.

        q [T, num_heads, head_dim] and this step's own k, v [T, num_kv_heads, head_dim], possibly strided views whose
        last axis is contiguous → contiguous [T, num_heads, head_dim] in q's dtype. On the current stream (FORWARD).
        """

    def forward_into(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """``forward`` that writes its result to ``out``, contiguous [T, num_heads, head_dim] in q's dtype, which the
        graph of the next piece reads."""
        out.copy_(self.forward(layer_id, q, k, v, scale))


class PieceBuffers:
    """The part of the arena through which the pieces of one step's forward pass on their results: tensors [T, features]
    by the names of ``CausalLM.arena_fields``. In ``views`` layers keep views of them, made once per step."""

    __slots__ = ("tensors", "views")

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.views: dict[str, tuple[torch.Tensor, ...]] = {}


@dataclass(frozen=True, slots=True)
class AuxHiddenStates:
    """The residual stream in front of chosen layers, side by side, for drafts that read it (EAGLE-3).

    Layer n of a model with n layers stands for the output of the last one. A layer may be named twice.
    """

    layers: tuple[int, ...]
    out: torch.Tensor  # [T, len(layers) * hidden_size]

    def keep(self, layer: int, x: torch.Tensor) -> None:
        """Copy x [T, hidden_size] to where ``layer`` belongs, if it does."""
        if layer in self.layers:
            parts = self.out.chunk(len(self.layers), dim=1)
            for part in (part for part, wanted in zip(parts, self.layers, strict=True) if wanted == layer):
                part.copy_(x)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Device views of one step's inputs. B requests, T tokens in request order, L rows of logits.

    All tensors live on the model's device and are written on FORWARD before the model runs.
    """

    mode: ForwardMode
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, position of each token in its request
    out_slots: torch.Tensor  # [T] int64, KV slot each token's K and V are written to
    logits_index: torch.Tensor | None  # [L] int64 into the T tokens; None: logits of every token
    attn: AttentionPlan  # how this batch's attention is computed, planned once for all layers
    kv_pool: KVPool  # where keys and values go
    logits_out: torch.Tensor | None = None  # [L, vocab_size]: where the logits go; None: memory of their own
    # Called before each layer first reads or writes the pool, outside graphs. FORWARD then waits until that layer of
    # the pages that are being loaded for this batch is complete. None: nothing is being loaded.
    layer_ready: Callable[[int], None] | None = None
    # Through these the pieces of a forward that is cut at attention pass on their results. None: the forward runs
    # whole and allocates such tensors.
    buffers: PieceBuffers | None = None
    # Where the model leaves hidden states that a draft model reads. None: nobody reads any, and none are kept.
    aux_hidden: AuxHiddenStates | None = None

    def keep_aux_hidden(self, layer: int, x: torch.Tensor) -> None:
        """Keep x [T, hidden_size], the residual stream in front of layer ``layer``, if somebody asks for it."""
        if self.aux_hidden is not None:
            self.aux_hidden.keep(layer, x)

    def logits_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x [T, features] that logits are wanted of, [L, features]."""
        return x if self.logits_index is None else x.index_select(0, self.logits_index)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[0]
