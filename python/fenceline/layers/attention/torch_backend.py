"""The reference attention backend: torch's scaled_dot_product_attention over gathered pages, on any device.

Grouped-query attention without repeating keys: query heads are laid out as [num_kv_heads, group], so that a group
shares its key/value head, either as further query rows (decode) or through a stride-0 axis (extend).

Nothing here makes the host wait for the device: shapes come from the ``*_cpu`` arrays, indices are computed on the
device, and what depends on the batch alone is computed once in ``plan``, not once for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.forward_batch import AttentionInputs, AttentionPlan, ForwardMode, GraphDecodeInputs
from fenceline.mem_cache.kv_pool import KVPool

# Bytes of keys and values gathered at once in decode. On a CPU they should still be in its cache when they are used:
# fetching them from memory costs several times the arithmetic. On a GPU the bound only keeps the workspace small.
_GATHER_BYTES = {"cpu": 2 << 20}
_GATHER_BYTES_DEFAULT = 256 << 20
_GRAPH_GATHERS = 4  # a graph gathers all requests at once; it may gather this many times as much
# Requests share a gather if padding them to its longest adds at most a quarter, or these few tokens.
_SLACK_TOKENS = 64
# Rows of the causal mask in extend; longer chunks take several calls, each over only the keys its rows can see.
_QUERY_BLOCK = 256
# Masked elements of a gather read the sink page, never a page that may belong to another request by now.
_SINK_SLOT = 0


class TorchAttentionBackend(AttentionBackend):
    """Plans over one KV pool. Keeps no state between batches, so plans never share memory."""

    def __init__(self, kv_pool: KVPool) -> None:
        self.kv_pool = kv_pool
        if kv_pool.k(0).is_cuda:
            # cuDNN's attention builds a plan for each new shape, tens of milliseconds each, and every step here
            # has new shapes: on an H200 a bf16 evaluation took 86 s with it and as long as fp32's 5 s without.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        """A plan that pads all requests to the longest possible length, so only small contexts can be captured."""
        if len(inputs.rows) * inputs.max_seq_len > _max_gather_tokens(self.kv_pool) * _GRAPH_GATHERS:
            return None
        return _GraphDecodePlan(self.kv_pool, inputs)

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """A plan for the batch; allocates its index tensors on the current stream. No host synchronisation."""
        assert len(inputs.seq_lens_cpu) > 0, "an empty batch has nothing to attend to"
        assert bool((inputs.query_lens_cpu >= 1).all()), (
            "a request without new tokens does not belong in a batch"
        )
        assert bool((inputs.query_lens_cpu <= inputs.seq_lens_cpu).all()), (
            "seq_lens include this step's tokens"
        )
        if inputs.mode is ForwardMode.DECODE:
            return _plan_decode(self.kv_pool, inputs)
        return _plan_extend(self.kv_pool, inputs)


def _token_slots(
    page_table: torch.Tensor, rows: torch.Tensor, num_tokens: int, page_size: int
) -> torch.Tensor:
    """KV slots of positions 0..num_tokens of ``rows`` [B] → [B, num_tokens] int32; undefined past a row's length."""
    num_pages = -(-num_tokens // page_size)
    pages = page_table[:, :num_pages].index_select(0, rows)
    if page_size == 1:
        return pages
    offsets = torch.arange(page_size, dtype=pages.dtype, device=pages.device)
    slots = pages.unsqueeze(-1) * page_size + offsets
    return slots.view(len(rows), num_pages * page_size)[:, :num_tokens]


# Decode ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Requests ``[first, last)``, longest first, attended together over ``num_tokens`` keys each."""

    first: int
    last: int
    num_tokens: int
    slots: torch.Tensor  # [(last - first) * num_tokens] int32
    # [last - first, 1, 1, num_tokens], 0 or -inf in the pool's dtype; None: no padding.
    mask: torch.Tensor | None


class _DecodePlan(AttentionPlan):
    """One query for each request."""

    def __init__(
        self,
        kv_pool: KVPool,
        groups: Sequence[_DecodeGroup],
        order: torch.Tensor | None,
    ) -> None:
        self.kv_pool = kv_pool
        self.groups = groups
        # [B] int64: requests, longest first, and the place of each in that order. One group keeps the batch's order.
        self.order = order
        self.inverse = None if order is None else torch.argsort(order)

    def forward(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See ``AttentionPlan.forward``."""
        grouped_q = q.view(len(q), k.shape[1], -1, q.shape[2])
        if self.order is None or self.inverse is None:
            group = self.groups[0]
            attended = _attend_gathered(self.kv_pool, layer_id, group.slots, group.mask, grouped_q, scale)
            return attended.reshape(q.shape)
        sorted_q = grouped_q.index_select(0, self.order)
        outputs = [
            _attend_gathered(
                self.kv_pool, layer_id, group.slots, group.mask, sorted_q[group.first : group.last], scale
            )
            for group in self.groups
        ]
        return torch.cat(outputs).view(q.shape).index_select(0, self.inverse)


def _attend_gathered(
    kv_pool: KVPool,
    layer_id: int,
    slots: torch.Tensor,
    mask: torch.Tensor | None,
    q: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [G, num_kv_heads, queries of one kv head, head_dim] over slots [G * tokens] → the same shape."""
    shape = (len(q), len(slots) // len(q), q.shape[1], q.shape[3])
    k = kv_pool.k(layer_id).index_select(0, slots).view(shape).transpose(1, 2)
    v = kv_pool.v(layer_id).index_select(0, slots).view(shape).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _plan_decode(kv_pool: KVPool, inputs: AttentionInputs) -> _DecodePlan:
    assert bool((inputs.query_lens_cpu == 1).all()), "decode has one query for each request"
    lens = -np.sort(-inputs.seq_lens_cpu)
    ranges = decode_groups(lens, _max_gather_tokens(kv_pool))
    order, rows, seq_lens = None, inputs.rows, inputs.seq_lens
    if len(ranges) > 1:
        # Sorted on both sides, so that neither waits for the other: the host needs lengths, the device indices.
        order = torch.argsort(seq_lens, descending=True)
        rows, seq_lens = rows.index_select(0, order), seq_lens.index_select(0, order)
    groups = []
    for first, last in ranges:
        num_tokens = int(lens[first])
        slots = _token_slots(inputs.page_table, rows[first:last], num_tokens, kv_pool.page_size)
        mask = None
        if lens[last - 1] < num_tokens:
            slots, mask = _masked(kv_pool, slots, seq_lens[first:last])
        groups.append(_DecodeGroup(first, last, num_tokens, slots.reshape(-1), mask))
    return _DecodePlan(kv_pool, groups, order)


def _masked(
    kv_pool: KVPool, slots: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``slots`` [G, tokens], replaced by the sink's past a request's length, and the additive mask [G, 1, 1, tokens] in
    the pool's dtype that hides those."""
    positions = torch.arange(slots.shape[1], device=slots.device)
    beyond = positions >= seq_lens.unsqueeze(1)
    mask = torch.zeros(beyond.shape, dtype=kv_pool.k(0).dtype, device=slots.device)
    mask = mask.masked_fill_(beyond, float("-inf"))[:, None, None]
    return slots.masked_fill(beyond, _SINK_SLOT), mask


class _GraphDecodePlan(AttentionPlan):
    """One query for each request. Every request is padded to the longest possible length, so shapes never change."""

    def __init__(self, kv_pool: KVPool, inputs: GraphDecodeInputs) -> None:
        self.kv_pool = kv_pool
        self._inputs = inputs
        self._slots: torch.Tensor | None = None  # [B * max_seq_len] int32
        self._mask: torch.Tensor | None = None

    def prepare(self) -> None:
        """See ``AttentionPlan.prepare``."""
        given, pool = self._inputs, self.kv_pool
        slots = _token_slots(given.page_table, given.rows, given.max_seq_len, pool.page_size)
        slots, self._mask = _masked(pool, slots, given.seq_lens)
        self._slots = slots.reshape(-1)

    def forward(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See ``AttentionPlan.forward``."""
        assert self._slots is not None, "prepare comes first"
        grouped_q = q.view(len(q), k.shape[1], -1, q.shape[2])
        return _attend_gathered(self.kv_pool, layer_id, self._slots, self._mask, grouped_q, scale).reshape(
            q.shape
        )


def decode_groups(lens: npt.NDArray[np.int64], max_tokens: int) -> list[tuple[int, int]]:
    """Cut requests with ``lens`` (descending) into ranges ``[first, last)`` to be padded to their longest.

    In a range each request is padded by at most a quarter of the longest (or ``_SLACK_TOKENS``), so that a few long
    requests do not make the others expensive. A range gathers at most ``max_tokens`` tokens unless it is one request.
    """
    groups = []
    first = 0
    ascending = -lens
    while first < len(lens):
        longest = int(lens[first])
        shortest = min(longest - longest // 4, max(longest - _SLACK_TOKENS, 1))
        last = int(np.searchsorted(ascending, -shortest, side="right"))
        last = min(last, first + max(max_tokens // longest, 1))
        groups.append((first, last))
        first = last
    return groups


def _max_gather_tokens(kv_pool: KVPool) -> int:
    keys = kv_pool.k(0)
    token_bytes = 2 * keys[0].numel() * keys.element_size()
    return max(_GATHER_BYTES.get(keys.device.type, _GATHER_BYTES_DEFAULT) // token_bytes, 1)


# Extend ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ExtendRequest:
    """Queries ``[first, last)`` of the T axis, the last tokens of a sequence of ``num_tokens``."""

    first: int
    last: int
    num_tokens: int
    # [num_tokens] int32 into the pool; None: there is no prefix, so this step's k and v are all keys and values.
    slots: torch.Tensor | None


class _ExtendPlan(AttentionPlan):
    """Any number of queries for each request, after a prefix that is in the pool."""

    def __init__(
        self,
        kv_pool: KVPool,
        requests: Sequence[_ExtendRequest],
        mask: torch.Tensor | None,
    ) -> None:
        self.kv_pool = kv_pool
        self.requests = requests
        # [rows, width], true or 0 where visible, with the causal triangle in its bottom right corner. Any block of
        # queries over any number of keys has as its mask the part in that corner, so one mask serves the whole batch.
        self.mask = mask

    def forward(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See ``AttentionPlan.forward``."""
        group = q.shape[1] // k.shape[1]
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        for request in self.requests:
            tokens = slice(request.first, request.last)
            queries = _heads_first(q[tokens], group)
            result = _heads_first(output[tokens], group)
            if request.slots is None:
                keys, values = _shared_heads(k[tokens], group), _shared_heads(v[tokens], group)
                result.copy_(
                    F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
                )
            else:
                keys = _shared_heads(self.kv_pool.k(layer_id).index_select(0, request.slots), group)
                values = _shared_heads(self.kv_pool.v(layer_id).index_select(0, request.slots), group)
                self._attend_blocks(result, queries, keys, values, scale)
        return output

    def _attend_blocks(
        self, result: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> None:
        """Causal attention of the last tokens of a sequence, block by block.

        q, result [group, num_kv_heads, queries, head_dim]; k, v [group, num_kv_heads, tokens, head_dim].
        """
        num_queries, num_tokens = q.shape[2], k.shape[2]
        for first in range(0, num_queries, _QUERY_BLOCK):
            last = min(first + _QUERY_BLOCK, num_queries)
            visible = num_tokens - num_queries + last
            mask = self._causal_mask(last - first, visible)
            result[:, :, first:last] = F.scaled_dot_product_attention(
                q[:, :, first:last], k[:, :, :visible], v[:, :, :visible], attn_mask=mask, scale=scale
            )

    def _causal_mask(self, num_queries: int, num_tokens: int) -> torch.Tensor | None:
        if num_queries == 1:
            return None  # one query, the last token: it sees every key
        assert self.mask is not None
        rows, width = self.mask.shape
        return self.mask[rows - num_queries :, width - num_tokens :]


# The group is the *batch* axis of the calls below, where its stride 0 is harmless. As the heads' axis it is not: with
# heads at stride 0 torch's memory-efficient CUDA kernel takes a last block of one query for single-token decoding
# and puts wrong values into that row (65, 129, 193, ... queries with a mask; seen with torch 2.11 on an H200).


def _heads_first(x: torch.Tensor, group: int) -> torch.Tensor:
    """A view: [tokens, num_heads, head_dim] → [group, num_kv_heads, tokens, head_dim]."""
    return x.unflatten(1, (-1, group)).permute(2, 1, 0, 3)


def _shared_heads(x: torch.Tensor, group: int) -> torch.Tensor:
    """A view: [tokens, num_kv_heads, head_dim] → [group, num_kv_heads, tokens, head_dim], the group at stride 0."""
    return x.permute(1, 0, 2).unsqueeze(0).expand(group, -1, -1, -1)


def _plan_extend(kv_pool: KVPool, inputs: AttentionInputs) -> _ExtendPlan:
    requests = []
    rows = width = first = 0
    for i, (num_queries, num_tokens) in enumerate(
        zip(inputs.query_lens_cpu, inputs.seq_lens_cpu, strict=True)
    ):
        num_queries, num_tokens = int(num_queries), int(num_tokens)
        slots = None
        if num_queries < num_tokens:
            slots = _token_slots(
                inputs.page_table, inputs.rows[i : i + 1], num_tokens, kv_pool.page_size
            ).view(-1)
            rows, width = max(rows, min(num_queries, _QUERY_BLOCK)), max(width, num_tokens)
        requests.append(_ExtendRequest(first, first + num_queries, num_tokens, slots))
        first += num_queries
    return _ExtendPlan(kv_pool, requests, _corner_mask(rows, width, kv_pool.k(0)))


def _corner_mask(rows: int, width: int, like: torch.Tensor) -> torch.Tensor | None:
    if rows <= 1:
        return None
    query = torch.arange(rows, device=like.device).unsqueeze(1)
    visible = torch.arange(width, device=like.device) <= query + (width - rows)
    if like.device.type != "cpu":
        return visible  # made additive on each use: a new tensor has the alignment that the kernel needs
    return torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, float("-inf"))
