"""The CPU's attention backend: torch's scaled_dot_product_attention over gathered pages.

Grouped-query attention without repeating keys: query heads are laid out as [num_kv_heads, group], so that a group
shares its key/value head, either as further query rows (decode) or through a stride-0 axis (extend). Requests of
similar lengths are gathered together, as many keys at a time as fit a cache. What depends on the batch alone is
computed once in ``plan``, not once for each layer.

Planning reads the page table, which is in the host's memory. Pages with which several requests begin are read once for
all of them, and each request attends separately to the tokens that follow. The results over two sets of keys are
averaged, weighted by the sums of their exponentials; attention also returns the logarithms of these sums.

Layers with a window gather the tokens of the window only. With a soft cap or sinks attention is computed step by step,
because scaled_dot_product_attention has neither.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fenceline.layers.attention.base import NO_RULES, PLAIN, LayerRules
from fenceline.layers.attention.reference import ReferenceAttentionBackend, ReferencePlan, gathered, max_tokens
from fenceline.layers.attention.shared_prefixes import find_shared_prefixes
from fenceline.layers.forward_batch import AttentionInputs, AttentionPlan, ForwardMode
from fenceline.mem_cache.kv_pool import KVPool

# Bytes of keys and values gathered at once. They should still be in the CPU's cache when they are used: fetching them
# from memory costs several times the arithmetic.
_GATHER_BYTES = 2 << 20
# Requests share a gather if padding them to its longest adds at most a quarter of that length, or this many tokens.
_SLACK_TOKENS = 64
# Rows of the causal mask in extend; longer chunks take several calls, each over only the keys its rows can see.
_QUERY_BLOCK = 256
# If at least this many requests of an extend step have one query, their attention is computed together, as in decode.
_MIN_SINGLES = 8
# Masked elements of a gather read the sink page and never a page that may belong to another request by now.
_SINK_SLOT = 0


class CpuAttentionBackend(ReferenceAttentionBackend):
    """Plans batches for a CPU. The plans of verify steps and graphs are the reference's, with its own attention."""

    def __init__(self, kv_pool: KVPool, rules: Mapping[int, LayerRules] = NO_RULES) -> None:
        super().__init__(kv_pool, rules)
        self.plan_type = _PaddedPlan
        self._max_tokens = max_tokens(kv_pool, _GATHER_BYTES)
        self._source = _Source(kv_pool, rules, self.window)

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        if inputs.whole or any(rules.selects for rules in self._source.rules.values()):
            return super().plan(inputs)  # with a mask for each query
        inputs.check()
        return _plan(self._source, inputs)


class _PaddedPlan(ReferencePlan):
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, rules: LayerRules
    ) -> torch.Tensor:
        return _attention(q, k, v, _Scores(scale, rules.soft_cap, rules.sinks), None, visible)


@dataclass(frozen=True, slots=True)
class _Source:
    """The pool that plans read, and the rules of its layers."""

    kv_pool: KVPool
    rules: Mapping[int, LayerRules]
    window: int | None

    def scores(self, layer_id: int, scale: float) -> _Scores:
        """How ``layer_id`` turns products of queries and keys into attention weights."""
        rules = self.rules.get(layer_id, PLAIN)
        return _Scores(scale, rules.soft_cap, rules.sinks)

    def gathered(self, layer_id: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return gathered(self.kv_pool, layer_id, self.rules.get(layer_id, PLAIN), slots, dtype)

    def num_attended(self, num_tokens: int) -> int:
        """To how many tokens the last of ``num_tokens`` attends."""
        return num_tokens if self.window is None else min(num_tokens, self.window)


@dataclass(frozen=True, slots=True, eq=False)
class _Scores:
    """The scale, and the soft cap and sinks of ``LayerRules``. ``sinks`` has the shape [batch, heads, queries] of a
    call or one that expands to it."""

    scale: float
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None

    def by_rows(self, num_kv_heads: int, repeats: int = 1) -> _Scores:
        """For calls whose query rows are the query heads that share a KV head, with ``repeats`` rows for each."""
        if self.sinks is None:
            return self
        sinks = self.sinks.view(num_kv_heads, -1).repeat_interleave(repeats, 1)
        return replace(self, sinks=sinks)

    def by_group(self, num_kv_heads: int) -> _Scores:
        """For calls whose batch axis has the query heads that share a KV head."""
        if self.sinks is None:
            return self
        return replace(self, sinks=self.sinks.view(num_kv_heads, -1).t().unsqueeze(-1))


def _token_slots(
    page_table: torch.Tensor, rows: torch.Tensor, num_tokens: int, page_size: int, first: torch.Tensor | None = None
) -> torch.Tensor:
    """The KV slots of ``num_tokens`` positions of ``rows`` [B], from 0 or from ``first`` [B] on → [B, num_tokens]
    int32. Past a row's length they are undefined."""
    if first is not None:
        positions = first.unsqueeze(1) + torch.arange(num_tokens, device=first.device)
        columns = (positions // page_size).clamp_(max=page_table.shape[1] - 1)
        pages = page_table.index_select(0, rows).gather(1, columns)
        return (pages * page_size + positions % page_size).int()
    num_pages = -(-num_tokens // page_size)
    pages = page_table[:, :num_pages].index_select(0, rows)
    if page_size == 1:
        return pages
    offsets = torch.arange(page_size, dtype=pages.dtype, device=pages.device)
    slots = pages.unsqueeze(-1) * page_size + offsets
    return slots.view(len(rows), num_pages * page_size)[:, :num_tokens]


class _Part(AttentionPlan):
    """A plan that may be part of another plan: for some of the queries, or for some of their keys."""

    source: _Source

    @abstractmethod
    def attend(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: _Scores,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Like ``AttentionPlan.forward``. If ``lse`` [T, num_heads] float32 is given, the logarithms of the sums of
        exponentials are written to it."""

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return self.attend(layer_id, q, k, v, self.source.scores(layer_id, scale))


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: _Scores,
    lse: torch.Tensor | None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention, or the same step by step for a soft cap or sinks. q, k and v are [batch, heads,
    queries or tokens, head_dim]; ``lse`` [batch, heads, queries] is written. ``mask`` is additive, or true where a key
    is visible."""
    if scores.soft_cap or scores.sinks is not None:
        return _attention_by_steps(q, k, v, scores, lse, mask, causal)
    if lse is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scores.scale)
    # scaled_dot_product_attention calls this on a CPU; it also returns the log-sums.
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scores.scale
    )
    lse.copy_(sums)
    return output  # type: ignore[no-any-return]


def _attention_by_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: _Scores,
    lse: torch.Tensor | None,
    mask: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """``_attention`` with a soft cap and sinks; ``lse`` includes the sinks. Softmax is computed in float32."""
    products = (q @ k.transpose(2, 3)).float() * scores.scale
    if scores.soft_cap:
        products = products.div_(scores.soft_cap).tanh_().mul_(scores.soft_cap)
    if causal:
        mask = torch.ones(products.shape[2:], dtype=torch.bool, device=q.device).tril_()
    if mask is not None and mask.dtype == torch.bool:
        products = products.masked_fill_(~mask, float("-inf"))
    elif mask is not None:
        products = products + mask
    sums = products.logsumexp(-1)
    if scores.sinks is not None:
        sums = torch.logaddexp(sums, scores.sinks)
    if lse is not None:
        lse.copy_(sums)
    return products.sub_(sums.unsqueeze(-1)).exp_().to(v.dtype) @ v


# Decode ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Requests ``[first, last)`` in the order of falling lengths. Their attention is computed in one call, with
    ``num_tokens`` keys for each."""

    first: int
    last: int
    num_tokens: int
    slots: torch.Tensor  # [(last - first) * num_tokens] int32
    # [last - first, 1, 1, num_tokens], 0 or -inf in the pool's dtype; None: no padding.
    mask: torch.Tensor | None


class _DecodePlan(_Part):
    """One query for each request."""

    def __init__(self, source: _Source, groups: Sequence[_DecodeGroup], order: torch.Tensor | None) -> None:
        self.source = source
        self.groups = groups
        # [B] int64: requests, longest first, and the place of each in that order. One group keeps the batch's order.
        self.order = order
        self.inverse = None if order is None else torch.argsort(order)

    def attend(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: _Scores,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scores = scores.by_rows(k.shape[1])
        grouped_q = q.view(len(q), k.shape[1], -1, q.shape[2])
        grouped_lse = None if lse is None else lse.view(grouped_q.shape[:3])
        if self.order is None or self.inverse is None:
            group = self.groups[0]
            attended = _attend_gathered(self.source, layer_id, group.slots, group.mask, grouped_q, scores, grouped_lse)
            return attended.reshape(q.shape)
        sorted_q = grouped_q.index_select(0, self.order)
        sorted_lse = None if grouped_lse is None else torch.empty_like(grouped_lse)
        outputs = []
        for group in self.groups:
            members = slice(group.first, group.last)
            sums = None if sorted_lse is None else sorted_lse[members]
            outputs.append(
                _attend_gathered(self.source, layer_id, group.slots, group.mask, sorted_q[members], scores, sums)
            )
        if grouped_lse is not None and sorted_lse is not None:
            torch.index_select(sorted_lse, 0, self.inverse, out=grouped_lse)
        return torch.cat(outputs).view(q.shape).index_select(0, self.inverse)


def _attend_gathered(
    source: _Source,
    layer_id: int,
    slots: torch.Tensor,
    mask: torch.Tensor | None,
    q: torch.Tensor,
    scores: _Scores,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [G, num_kv_heads, queries of one kv head, head_dim] over slots [G * tokens] → the same shape."""
    shape = (len(q), len(slots) // len(q), q.shape[1], q.shape[3])
    k, v = (rows.view(shape).transpose(1, 2) for rows in source.gathered(layer_id, slots, q.dtype))
    return _attention(q, k, v, scores, lse, mask)


def _plan_decode(source: _Source, inputs: AttentionInputs) -> _DecodePlan:
    kv_pool = source.kv_pool
    lens = -np.sort(-inputs.seq_lens_cpu)
    if source.window is not None:
        lens = np.minimum(lens, source.window)
    ranges = decode_groups(lens, max_tokens(kv_pool, _GATHER_BYTES))
    order, rows, seq_lens = None, inputs.rows, inputs.seq_lens
    if len(ranges) > 1:
        order = torch.argsort(seq_lens, descending=True)
        rows, seq_lens = rows.index_select(0, order), seq_lens.index_select(0, order)
    groups = []
    for first, last in ranges:
        num_tokens = int(lens[first])
        slots, num_attended = _attended_slots(
            source, inputs.page_table, rows[first:last], seq_lens[first:last], num_tokens
        )
        mask = None
        if lens[last - 1] < num_tokens:
            slots, mask = _masked(kv_pool, slots, num_attended)
        groups.append(_DecodeGroup(first, last, num_tokens, slots.reshape(-1), mask))
    return _DecodePlan(source, groups, order)


def _attended_slots(
    source: _Source, page_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots [G, num_tokens] to which the last tokens of ``rows`` [G] attend, and how many of them are valid for
    each row; the others are undefined."""
    if source.window is None:
        return _token_slots(page_table, rows, num_tokens, source.kv_pool.page_size), seq_lens
    first = (seq_lens - source.window).clamp_(min=0)
    return _token_slots(page_table, rows, num_tokens, source.kv_pool.page_size, first), seq_lens - first


def _masked(kv_pool: KVPool, slots: torch.Tensor, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``slots`` [G, tokens] with the sink's slot past each request's ``seq_lens``, and the additive mask [G, 1, 1,
    tokens] in the pool's dtype that hides those tokens."""
    positions = torch.arange(slots.shape[1], device=slots.device)
    beyond = positions >= seq_lens.unsqueeze(1)
    mask = torch.zeros(beyond.shape, dtype=kv_pool.dtype, device=slots.device)
    mask = mask.masked_fill_(beyond, float("-inf"))[:, None, None]
    return slots.masked_fill(beyond, _SINK_SLOT), mask


def decode_groups(lens: npt.NDArray[np.int64], max_tokens: int) -> list[tuple[int, int]]:
    """Cut requests with ``lens`` (descending) into ranges ``[first, last)``, each of which is padded to its longest. In
    a range each request is padded by at most a quarter of the longest or by ``_SLACK_TOKENS``, so that a few long
    requests do not make the others expensive. A range has at most ``max_tokens`` tokens, or one request."""
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


# Extend ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ExtendRequest:
    """Queries ``[first, last)`` of the T axis, the last tokens of a sequence of ``num_tokens``."""

    first: int
    last: int
    num_tokens: int
    # int32: the slots of all tokens to which the queries attend, which are the last ones of the sequence. None: there
    # is no prefix and all tokens lie in the window, so this step's k and v are all the keys and values.
    slots: torch.Tensor | None


class _ExtendPlan(_Part):
    """Any number of queries for each request, after a prefix that is in the pool."""

    def __init__(self, source: _Source, requests: Sequence[_ExtendRequest], mask: torch.Tensor | None) -> None:
        self.source = source
        self.requests = requests
        # [rows, width], 0 where a key is visible, else -inf. The causal triangle is in the bottom right corner; with a
        # window there is another triangle to its left. The mask of any block of queries over any number of keys is the
        # bottom right part of this mask, so one mask is enough for the whole batch.
        self.mask = mask

    def attend(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: _Scores,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        scores = scores.by_group(k.shape[1])
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        for request in self.requests:
            tokens = slice(request.first, request.last)
            queries = _heads_first(q[tokens], group)
            result = _heads_first(output[tokens], group)
            sums = None if lse is None else _heads_first(lse[tokens].unsqueeze(-1), group).squeeze(-1)
            if request.slots is None:
                keys, values = _shared_heads(k[tokens], group), _shared_heads(v[tokens], group)
                result.copy_(_attention(queries, keys, values, scores, sums, causal=True))
            else:
                keys, values = self.source.gathered(layer_id, request.slots, q.dtype)
                keys, values = _shared_heads(keys, group), _shared_heads(values, group)
                self._attend_blocks(result, queries, keys, values, scores, sums)
        return output

    def _attend_blocks(
        self,
        result: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: _Scores,
        lse: torch.Tensor | None,
    ) -> None:
        """Causal attention of the last tokens of a sequence, block by block. q, result [group, num_kv_heads, queries,
        head_dim]; k, v [group, num_kv_heads, tokens, head_dim]; lse [group, num_kv_heads, queries]."""
        num_queries, num_tokens, window = q.shape[2], k.shape[2], self.source.window
        for first in range(0, num_queries, _QUERY_BLOCK):
            last = min(first + _QUERY_BLOCK, num_queries)
            end = num_tokens - num_queries + last
            begin = 0 if window is None else max(end - (last - first) - window + 1, 0)
            mask = self._causal_mask(last - first, end - begin)
            sums = None if lse is None else lse[:, :, first:last]
            result[:, :, first:last] = _attention(
                q[:, :, first:last], k[:, :, begin:end], v[:, :, begin:end], scores, sums, mask
            )

    def _causal_mask(self, num_queries: int, num_tokens: int) -> torch.Tensor | None:
        if num_queries == 1:
            return None  # one query, which is the last token: it sees all of these keys
        assert self.mask is not None
        rows, width = self.mask.shape
        return self.mask[rows - num_queries :, width - num_tokens :]


def _heads_first(x: torch.Tensor, group: int) -> torch.Tensor:
    """A view: [tokens, num_heads, head_dim] → [group, num_kv_heads, tokens, head_dim]. The group is the batch axis."""
    return x.unflatten(1, (-1, group)).permute(2, 1, 0, 3)


def _shared_heads(x: torch.Tensor, group: int) -> torch.Tensor:
    """A view: [tokens, num_kv_heads, head_dim] → [group, num_kv_heads, tokens, head_dim], the group at stride 0."""
    return x.permute(1, 0, 2).unsqueeze(0).expand(group, -1, -1, -1)


def _plan_extend(source: _Source, inputs: AttentionInputs) -> _ExtendPlan:
    requests = []
    window, page_size = source.window, source.kv_pool.page_size
    rows = width = start = 0
    for i, (num_queries, num_tokens) in enumerate(zip(inputs.query_lens_cpu, inputs.seq_lens_cpu, strict=True)):
        num_queries, num_tokens = int(num_queries), int(num_tokens)
        slots = None
        # The number of leading tokens to which no query attends.
        num_out = 0 if window is None else max(num_tokens - num_queries - window + 1, 0)
        if num_queries < num_tokens or source.num_attended(num_tokens) < num_tokens:
            slots = _token_slots(inputs.page_table, inputs.rows[i : i + 1], num_tokens, page_size)[0, num_out:]
            rows, width = max(rows, min(num_queries, _QUERY_BLOCK)), max(width, num_tokens - num_out)
        requests.append(_ExtendRequest(start, start + num_queries, num_tokens, slots))
        start += num_queries
    return _ExtendPlan(source, requests, _corner_mask(rows, width, source))


def _corner_mask(rows: int, width: int, source: _Source) -> torch.Tensor | None:
    if rows <= 1:
        return None
    last = torch.arange(rows).unsqueeze(1) + (width - rows)
    key = torch.arange(width)
    hidden = key > last
    if source.window is not None:
        hidden |= key <= last - source.window
    return torch.zeros(hidden.shape, dtype=source.kv_pool.dtype).masked_fill_(hidden, float("-inf"))


# Shared prefixes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Tokens at the beginning of some requests, which all queries of these requests see."""

    queries: torch.Tensor | slice  # of the T axis, int64
    slots: torch.Tensor  # [tokens] int32


class _PrefixPlan(AttentionPlan):
    """For each shared prefix one call with all its queries, and a plan ``rest`` for each request's other tokens."""

    def __init__(self, source: _Source, prefixes: Sequence[_Prefix], rest: _Part) -> None:
        self.source = source
        self.prefixes = prefixes
        self.rest = rest

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        scores = self.source.scores(layer_id, scale)
        output = self.rest.attend(layer_id, q, k, v, scores, lse)
        scores = replace(scores, sinks=None)  # sinks count once, and the rest contains them
        num_kv_heads, head_dim = k.shape[1:]
        for prefix in self.prefixes:
            queries = q[prefix.queries]
            # All queries of a kv head are rows of one product: [1, num_kv_heads, queries * group, head_dim].
            rows = queries.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim)
            sums = torch.empty(rows.shape[:3], dtype=torch.float32)
            attended = _attend_gathered(self.source, layer_id, prefix.slots, None, rows, scores, sums)
            num = len(queries)
            attended = attended.view(num_kv_heads, num, -1, head_dim).transpose(0, 1).reshape(queries.shape)
            sums = sums.view(num_kv_heads, num, -1).transpose(0, 1).reshape(queries.shape[:2])
            share = torch.sigmoid_(sums - lse[prefix.queries]).unsqueeze(-1).to(q.dtype)
            output[prefix.queries] = output[prefix.queries].lerp(attended, share)
        return output


class _SplitPlan(_Part):
    """An extend step in which requests with one query are computed as in decode, apart from all others."""

    def __init__(self, source: _Source, parts: Sequence[tuple[torch.Tensor, _Part]]) -> None:
        self.source = source
        self.parts = parts  # each with its queries, int64 indices into the T axis

    def attend(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: _Scores,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        for tokens, part in self.parts:
            own_q, own_k, own_v = (x.index_select(0, tokens) for x in (q, k, v))
            sums = None if lse is None else lse.new_empty(len(tokens), lse.shape[1])
            output.index_copy_(0, tokens, part.attend(layer_id, own_q, own_k, own_v, scores, sums))
            if lse is not None and sums is not None:
                lse.index_copy_(0, tokens, sums)
        return output


def _plan(source: _Source, inputs: AttentionInputs) -> AttentionPlan:
    if source.window is not None:
        return _plan_parts(source, inputs)  # with a window, queries do not see all tokens of a prefix
    size = source.kv_pool.page_size
    num_pages = -(-inputs.seq_lens_cpu // size)
    table = inputs.page_table[:, : int(num_pages.max())].index_select(0, inputs.rows)
    num_common = (inputs.seq_lens_cpu - inputs.query_lens_cpu) // size
    shared = find_shared_prefixes(table.numpy(), num_common, inputs.query_lens_cpu, size)
    if not shared:
        return _plan_parts(source, inputs)
    starts = np.cumsum(inputs.query_lens_cpu) - inputs.query_lens_cpu
    taken = np.zeros_like(num_pages)
    prefixes = []
    for prefix in shared:
        requests = list(prefix.requests)
        taken[requests] = prefix.num_pages
        slots = _token_slots(table, torch.tensor(requests[:1]), prefix.num_pages * size, size)
        if len(requests) == len(num_pages):
            queries: torch.Tensor | slice = slice(None)
        else:
            queries = torch.from_numpy(
                np.concatenate([np.arange(starts[i], starts[i] + inputs.query_lens_cpu[i]) for i in requests])
            )
        prefixes.append(_Prefix(queries, slots.view(-1)))
    # The rest of a request is planned as if its pages began after the prefix.
    columns = taken[:, None] + np.arange(int((num_pages - taken).max()))
    np.minimum(columns, table.shape[1] - 1, out=columns)
    rest = replace(
        inputs,
        page_table=table.gather(1, torch.from_numpy(columns)),
        rows=torch.arange(len(num_pages)),
        seq_lens=inputs.seq_lens - torch.from_numpy(taken * size),
        seq_lens_cpu=inputs.seq_lens_cpu - taken * size,
    )
    return _PrefixPlan(source, prefixes, _plan_parts(source, rest))


def _plan_parts(source: _Source, inputs: AttentionInputs) -> _Part:
    """A plan for the whole batch without shared prefixes."""
    lens = inputs.query_lens_cpu
    if inputs.mode is ForwardMode.DECODE:
        return _plan_decode(source, inputs)
    single = lens == 1
    if np.count_nonzero(single) < _MIN_SINGLES:
        return _plan_extend(source, inputs)
    if single.all():
        return _plan_decode(source, inputs)
    of_token = np.repeat(single, lens)
    parts = []
    for chosen, tokens, plan in ((single, of_token, _plan_decode), (~single, ~of_token, _plan_extend)):
        index = torch.from_numpy(np.flatnonzero(chosen))
        some = replace(
            inputs,
            rows=inputs.rows.index_select(0, index),
            seq_lens=inputs.seq_lens.index_select(0, index),
            seq_lens_cpu=inputs.seq_lens_cpu[chosen],
            query_lens_cpu=lens[chosen],
        )
        parts.append((torch.from_numpy(np.flatnonzero(tokens)), plan(source, some)))
    return _SplitPlan(source, parts)
