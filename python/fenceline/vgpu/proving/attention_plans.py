"""Attention of random batches, under each kind of plan of the torch backend: what each query attends to, computed again
token by token, and how much memory a call reads for it.

Models of the proof have few windows, no batch has all kinds of requests, and what is read beside what is needed changes
no answer. So plans are made for random page tables, lengths, windows, soft caps, sinks and trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.attention import torch_backend
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    ForwardMode,
    GraphDecodeInputs,
    QueryTree,
    VerifyInputs,
)
from fenceline.vgpu.proving.limits import small_limits

_F64 = npt.NDArray[np.float64]
_NUM_BATCHES = 6
_HEAD_DIM = 16  # so that a few tokens are as much as is gathered at once
_SCALE = 0.6
_TOLERANCE = 1e-4


class _Cache:
    """The keys or the values of a pool; notes which slots are read at once."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self.reads: list[torch.Tensor] = []

    def index_select(self, dim: int, slots: torch.Tensor) -> torch.Tensor:
        self.reads.append(slots)
        return self._rows.index_select(dim, slots)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


class _Pool:
    """A KV pool of one layer."""

    dtype = torch.float32

    def __init__(self, num_slots: int, num_kv_heads: int, page_size: int, generator: torch.Generator) -> None:
        self.page_size = page_size
        shape = (num_slots, num_kv_heads, _HEAD_DIM)
        self.rows = [torch.randn(shape, generator=generator) for _ in range(2)]
        self._caches = [_Cache(rows) for rows in self.rows]

    def k(self, layer: int) -> _Cache:
        return self._caches[0]

    def v(self, layer: int) -> _Cache:
        return self._caches[1]

    def taken_reads(self) -> list[torch.Tensor]:
        """The slots of each read of the keys since the last call."""
        found, self._caches[0].reads = self._caches[0].reads, []
        return found


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests by their lengths and numbers of queries, which are their last tokens. ``slots``: of each one's tokens;
    ``seen[i][j]``: the positions to which query j of request i attends."""

    pool: _Pool
    rules: LayerRules
    num_heads: int
    page_table: torch.Tensor
    lens: list[int]
    queries: list[int]
    slots: list[list[int]]
    seen: list[list[list[int]]]
    q: torch.Tensor

    def expected(self) -> _F64:
        """[T, heads, head_dim], query by query."""
        keys, values = (rows.double().numpy() for rows in self.pool.rows)
        sinks = None if self.rules.sinks is None else self.rules.sinks.double().numpy()
        group = self.num_heads // keys.shape[1]
        found, q = np.empty(tuple(self.q.shape)), self.q.double().numpy()
        of_query = [(i, seen) for i, own in enumerate(self.seen) for seen in own]
        for token, (request, seen) in enumerate(of_query):
            slots = [self.slots[request][position] for position in seen]
            for head in range(self.num_heads):
                scores = keys[slots, head // group] @ q[token, head] * _SCALE
                if self.rules.soft_cap:
                    scores = np.tanh(scores / self.rules.soft_cap) * self.rules.soft_cap
                total = np.exp(scores).sum() + (0.0 if sinks is None else np.exp(sinks[head]))
                found[token, head] = np.exp(scores) @ values[slots, head // group] / total
        return found

    def inputs(self, mode: ForwardMode) -> AttentionInputs:
        return AttentionInputs(
            mode,
            self.page_table,
            torch.arange(len(self.lens)),
            torch.tensor(self.lens),
            np.array(self.lens, np.int64),
            np.array(self.queries, np.int64),
        )

    def attend(self, plan: AttentionPlan) -> torch.Tensor:
        """The plan's result. Keys and values of the step's own tokens are given beside those in the pool."""
        new = [slot for own, num in zip(self.slots, self.queries, strict=True) for slot in own[-num:]]
        k, v = (rows[new] for rows in self.pool.rows)
        return plan.forward(0, self.q, k, v, _SCALE)


def compare_attention(random: Random) -> str:
    """The first batch whose attention is not right, or reads more than it must; "" if there is none."""
    with small_limits():
        for _ in range(_NUM_BATCHES):
            kind = random.choice((_compare_decode, _compare_extend, _compare_extend, _compare_verify))
            wrong = kind(random)
            if wrong:
                return f"attention: {wrong}"
    return ""


def _compare_decode(random: Random) -> str:
    batch = _batch(random, lambda num_tokens: 1)
    backend, inputs = _backend(batch), batch.inputs(ForwardMode.DECODE)
    plan = torch_backend._plan_decode(backend._source, inputs)
    attended = [len(seen) for (seen,) in batch.seen]
    return (
        _difference(batch, {"decode": plan, "decode on a CPU": backend.plan(inputs)})
        or _wrong_groups(batch, plan, sorted(attended, reverse=True))
        or _compare_graph(batch, backend, max(batch.lens) + random.randrange(3))
    )


def _wrong_groups(batch: _Batch, plan: torch_backend._DecodePlan, attended: list[int]) -> str:
    """Requests that are gathered together are padded a little, and gather few tokens at once. ``attended``: how many
    tokens each attends to, in falling order."""
    most, place = _most_tokens(batch), 0
    for group in plan.groups:
        lens = attended[group.first : group.last]
        if group.first != place or not lens:
            return f"groups {[(one.first, one.last) for one in plan.groups]} of {attended}"
        place, padded = group.last, lens[0] - lens[-1]
        if len(group.slots) != len(lens) * lens[0] or (len(lens) > 1 and len(group.slots) > most):
            return f"{len(group.slots)} tokens are gathered for {lens}, at most {most} at once"
        if padded > max(lens[0] / 4, torch_backend._SLACK_TOKENS):
            return f"{lens} are padded to the first"
        if (group.mask is not None) != (padded > 0):
            return f"there is {'a' if padded == 0 else 'no'} mask for {lens}"
    return "" if place == len(attended) else f"{place} of {len(attended)} requests are in a group"


def _compare_graph(batch: _Batch, backend: torch_backend.TorchAttentionBackend, longest: int) -> str:
    inputs = batch.inputs(ForwardMode.DECODE)
    plan = backend.plan_graph(GraphDecodeInputs(inputs.page_table, inputs.rows, inputs.seq_lens, longest))
    assert plan is not None, "the limit is that of the runs"
    plan.prepare()
    return _difference(batch, {"a graph's decode": plan})


def _compare_extend(random: Random) -> str:
    lone = random.choice((0.0, 0.5, 0.9))  # requests with one query

    def queries(num_tokens: int) -> int:
        return (
            1
            if random.random() < lone
            else random.choice((num_tokens, min(2, num_tokens), random.randint(1, num_tokens)))
        )

    batch = _batch(random, queries)
    backend, inputs = _backend(batch), batch.inputs(ForwardMode.EXTEND)
    plan = torch_backend._plan_extend(backend._source, inputs)
    batch.pool.taken_reads()
    wrong = _difference(batch, {"extend": plan})
    read = [slots.tolist() for slots in batch.pool.taken_reads()]
    wrong = wrong or _difference(batch, {"extend on a CPU": backend.plan(inputs)})
    needed, masked = [], False
    for own, num, slots, seen in zip(batch.lens, batch.queries, batch.slots, batch.seen, strict=True):
        first = min(position for some in seen for position in some)
        if num < own or len(seen[-1]) < own:  # otherwise the step's own keys are all that is needed
            needed.append(slots[first:])
            masked |= num > 1
    if not wrong and read != needed:
        return f"keys in slots {read} are read, those in {needed} are needed"
    if not wrong and (plan.mask is not None) != masked:
        return f"there is {'no' if masked else 'a'} mask for {batch.queries} queries of {batch.lens} tokens"
    return wrong


def _compare_verify(random: Random) -> str:
    """A chain or a tree at the end of each request. A chain may be longer than its request, which then has queries
    before its first token."""
    is_tree = random.random() < 0.6
    num_nodes = random.choice((2, 3, 5, 64)) if is_tree else random.choice((1, 2, 4))
    num_queries = random.choice((num_nodes, random.randint(1, num_nodes)))
    window = random.choice((None, num_nodes + random.randrange(3), num_nodes + random.randrange(9)))
    batch = _batch(random, lambda num_tokens: num_queries, window, shortest=num_nodes if is_tree else 1)
    parents = [[random.randrange(-1, node) for node in range(num_nodes)] for _ in batch.lens]
    ancestors, seen = [], []
    for own, above in zip(batch.lens, parents, strict=True):
        start, paths = own - num_nodes, [_path(node, above) for node in range(num_nodes)]
        if not is_tree:
            paths = [[*range(node + 1)] for node in range(num_nodes)]
        ancestors.append([sum(1 << node for node in path) for path in paths[-num_queries:]])
        seen.append([_seen(start, path, window) for path in paths[-num_queries:]])
    bits = torch.tensor([[_signed(one) for one in own] for own in ancestors])
    tree = QueryTree(num_queries, num_nodes, bits if is_tree else None)
    inputs = batch.inputs(ForwardMode.VERIFY)
    bounds = np.array([own + random.randrange(4) for own in batch.lens], np.int64)
    plan = _backend(batch).plan_verify(
        VerifyInputs(inputs.page_table, inputs.rows, inputs.seq_lens, bounds, tree, batch.num_heads)
    )
    assert isinstance(plan, torch_backend._VerifyPlan), "the backend has one kind"
    plan.prepare()
    batch.seen[:] = seen
    wrong = _difference(batch, {f"a tree of {num_nodes}" if is_tree else f"a chain of {num_nodes}": plan})
    # With a window, the tree's first row may see as many tokens before it as fit.
    most = [min(int(bound), (window or int(bound)) + num_nodes - 1) for bound in bounds]
    for (first, last), slots in zip(plan._ranges, batch.pool.taken_reads(), strict=True):
        num = last - first
        if len(slots) > num * max(most[first:last]) or (num > 1 and len(slots) > _most_tokens(batch)):
            wrong = wrong or f"{len(slots)} tokens are read for {most[first:last]} that may be there"
    return wrong


def _path(node: int, parents: Sequence[int]) -> list[int]:
    """``node`` and all nodes above it."""
    return [] if node < 0 else [*_path(parents[node], parents), node]


def _seen(start: int, path: list[int], window: int | None) -> list[int]:
    """What the last node of ``path`` sees, if node 0 is at position ``start``. The window counts the tokens of its own
    path. A query before the first token sees that one."""
    own = [start + node for node in path if start + node >= 0]
    before = [*range(max(start, 0))]
    return (before + own)[-window if window else None :] or [0]


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _batch(random: Random, queries: Any, window: int | None = 0, shortest: int = 1) -> _Batch:
    """``queries``: of the number of a request's tokens. ``window`` 0: a random one, or none."""
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    page_size, num_kv_heads, group = random.choice((1, 2, 4)), random.choice((1, 2)), random.choice((1, 2))
    lens = [shortest + random.choice((0, 3, random.randrange(12))) for _ in range(random.randint(1, 6))]
    nums = [queries(own) for own in lens]
    width, num_pages = -(-(max(lens) + 4) // page_size), 1
    table: list[list[int]] = []
    for own, num in zip(lens, nums, strict=True):
        # Pages before a request's queries may be another's too, from the first one on.
        other = random.randrange(len(table)) if table and random.random() < 0.7 else -1
        shared = min(own - num, lens[other] - nums[other]) // page_size if other >= 0 else 0
        stem = (
            table[other][: random.choice((max(shared, 0), random.randint(0, max(shared, 0))))]
            if other >= 0
            else []
        )
        table.append([*stem, *range(num_pages, num_pages + width - len(stem))])
        num_pages += width
    pool = _Pool(num_pages * page_size, num_kv_heads, page_size, generator)
    slots = [
        [pages[at // page_size] * page_size + at % page_size for at in range(own)]
        for own, pages in zip(lens, table, strict=True)
    ]
    window = random.choice((None, None, 1, 3, 6)) if window == 0 else window
    seen = [
        [
            [at for at in range(own) if at <= last and (window is None or at > last - window)]
            for last in range(own - num, own)
        ]
        for own, num in zip(lens, nums, strict=True)
    ]
    sinks = torch.randn(num_kv_heads * group, generator=generator) if random.random() < 0.3 else None
    rules = LayerRules(window, random.choice((0.0, 0.0, 1.5)), sinks)
    q = torch.randn(sum(nums), num_kv_heads * group, _HEAD_DIM, generator=generator)
    page_table = torch.tensor(table, dtype=torch.int32)
    return _Batch(pool, rules, num_kv_heads * group, page_table, lens, nums, slots, seen, q)


def _backend(batch: _Batch) -> torch_backend.TorchAttentionBackend:
    pool: Any = batch.pool
    return torch_backend.TorchAttentionBackend(pool, {0: batch.rules})


def _most_tokens(batch: _Batch) -> int:
    """How many tokens' keys and values are gathered at once at most."""
    return torch_backend._GATHER_BYTES_DEFAULT // sum(rows[0].nbytes for rows in batch.pool.rows)


def _difference(batch: _Batch, plans: dict[str, AttentionPlan]) -> str:
    expected = batch.expected()
    for name, plan in plans.items():
        found = batch.attend(plan).double().numpy()
        off = abs(found - expected).max(axis=(1, 2))
        wrong: Iterable[int] = np.flatnonzero(~(off < _TOLERANCE)).tolist()
        for token in wrong:
            rules = f"window {batch.rules.window}, cap {batch.rules.soft_cap}, sinks {batch.rules.sinks}"
            return (
                f"query {token} of a batch with {batch.queries} queries of {batch.lens} tokens ({rules}) gets"
                f" {found[token].tolist()} in place of {expected[token].tolist()} from {name}"
            )
    return ""
