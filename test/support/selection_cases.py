"""Steps of sparse attention over latents in a page pool, and what each query must find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fenceline.config.kv_layout import KVLayout, index_keys, latent
from fenceline.layers.attention.base import AttentionBackend, LayerRules
from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    ForwardMode,
    IndexQueries,
    QueryTree,
    VerifyInputs,
)
from fenceline.layers.kernels.index_rows import packed, rounded, unpacked
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order.guards import Best, first_of_best

SCALE = 0.7
Read = tuple[int, list[int]]  # a query's request and the positions that it sees, in order; nodes' are of their slots


class Sizes(NamedTuple):
    page_size: int = 4
    top_k: int = 5
    heads: int = 3
    width: int = 6  # of a latent row
    value_dim: int = 6
    index_heads: int = 2
    index_dim: int = 4
    kv_dtype: str = "float32"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


class Steps:
    """Requests of ``lengths``. Their index keys, queries and weights are small whole numbers, so that many scores are
    equal and every sum is exact. All other rows are NaN, except the sink's, and the page table names pages that do not
    exist behind a request's own."""

    def __init__(self, seed: int, lengths: Sequence[int], sizes: Sizes) -> None:
        self.lengths, self.sizes = list(lengths), sizes
        self.generator = torch.Generator().manual_seed(seed)
        page_size = sizes.page_size
        pages = [-(-length // page_size) for length in lengths]
        rows = latent(sizes.width, sizes.kv_dtype) + index_keys(sizes.index_dim, sizes.kv_dtype)
        self.pool = KVPool(sum(pages) + 1, KVLayout(page_size, (rows,)), torch.device(sizes.device), sizes.dtype)
        self.rules = {0: LayerRules(rows=("latent", "latent"), value_dim=sizes.value_dim, selects=True)}
        free = (torch.randperm(sum(pages), generator=self.generator) + 1).tolist()
        table = torch.full((len(pages) + 1, max(pages) + 2), 1 << 25, dtype=torch.int32)
        self.rows = torch.randperm(len(pages) + 1, generator=self.generator)[: len(pages)]
        for row, count in zip(self.rows, pages, strict=True):
            table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        self.host_table, self.table = table, table.to(sizes.device)
        for name in ("latent", "index"):
            row = self.pool.row(0, name)
            row[page_size:] = 0xFF if row.dtype == torch.uint8 else float("nan")
        for i, length in enumerate(self.lengths):
            slots = self.slots(i, list(range(length)))
            keys = self.whole(length, 1, sizes.index_dim)
            if self.pool.row(0, "index").dtype == torch.uint8:
                keys = packed(*rounded(keys))
            self.pool.row(0, "index")[slots] = keys.to(self.pool.row(0, "index"))
            values = torch.randn(length, 1, sizes.width, generator=self.generator)
            self.pool.row(0, "latent")[slots] = values.to(self.pool.row(0, "latent"))

    def whole(self, *shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=self.generator).float()

    def slots(self, request: int, positions: list[int]) -> torch.Tensor:
        at = torch.tensor(positions)
        pages = self.host_table[self.rows[request], at // self.sizes.page_size].long()
        return (pages * self.sizes.page_size + at % self.sizes.page_size).to(self.sizes.device)

    def check(
        self, plan: AttentionPlan, reads: list[Read], best: Best = first_of_best, tolerance: float = 1e-5
    ) -> None:
        """Two layers of ``plan``, the second of which has no indexer, attend to the best of what ``reads`` says."""
        sizes, num = self.sizes, len(reads)
        q = torch.randn(num, sizes.heads, sizes.width, generator=self.generator).to(sizes.dtype).to(sizes.device)
        given = self.whole(num, sizes.index_heads, sizes.index_dim).to(sizes.dtype).to(sizes.device)
        weights = self.whole(num, sizes.index_heads).to(sizes.device)
        tokens = plan.select(0, IndexQueries(given, weights, sizes.top_k, best))
        row = q[:, :1]  # not read: this step's rows are in the pool
        found = plan.forward_selected(0, q, row, row, SCALE, tokens)
        again = plan.forward_selected(0, q, row, row, SCALE, tokens)
        defined = slice(sizes.value_dim)
        assert torch.equal(found[..., defined], again[..., defined])
        rows = self.pool.row(0, "latent")
        for i, (request, positions) in enumerate(reads):
            slots = self.slots(request, positions)
            keys = unpacked(self.pool.row(0, "index").index_select(0, slots)[:, 0])
            scores = ((given[i].float() @ keys.T).relu() * weights[i, :, None]).sum(0)
            chosen = first_of_best(scores[None], sizes.top_k)[0]
            mine = rows.index_select(0, slots[chosen])[:, 0].to(sizes.dtype).double()
            expected = torch.softmax(q[i].double() @ mine.T * SCALE, -1) @ mine[:, defined]
            torch.testing.assert_close(found[i][..., defined].double(), expected, atol=tolerance, rtol=tolerance)

    def extended(self, backend: AttentionBackend, new: list[int]) -> tuple[AttentionPlan, list[Read]]:
        """A step of prompts whose last ``new`` tokens are the queries."""
        spans = [range(length - n, length) for length, n in zip(self.lengths, new, strict=True)]
        reads = [(i, list(range(last + 1))) for i, span in enumerate(spans) for last in span]
        return backend.plan(self.inputs(ForwardMode.EXTEND, new)), reads

    def decoded(self, backend: AttentionBackend) -> tuple[AttentionPlan, list[Read]]:
        reads = [(i, list(range(length))) for i, length in enumerate(self.lengths)]
        return backend.plan(self.inputs(ForwardMode.DECODE, [1] * len(self.lengths))), reads

    def inputs(self, mode: ForwardMode, new: list[int]) -> AttentionInputs:
        lens, device = np.array(self.lengths), self.sizes.device
        starts = torch.tensor([0, *new]).cumsum(0).int().to(device)
        rows = self.rows.to(device)
        return AttentionInputs(mode, self.table, rows, torch.tensor(lens).to(device), lens, np.array(new), starts)

    def verified(
        self, backend: AttentionBackend, tree: list[int] | None, num_queries: int
    ) -> tuple[AttentionPlan, list[Read]]:
        """A step that verifies trees, given by each node's parent, or chains of ``num_queries`` (None): of those
        requests that are long enough."""
        device, num = self.sizes.device, num_queries if tree is None else len(tree)
        paths = [list(range(node + 1)) for node in range(num)]
        if tree is not None:
            for node, parent in enumerate(tree):
                paths[node] = [*(paths[parent] if parent >= 0 else []), node]
        few = [i for i, length in enumerate(self.lengths) if length >= num]
        masks = torch.tensor([[sum(1 << node for node in path) for path in paths]] * len(few)).to(device)
        lens = np.array([self.lengths[i] for i in few])
        shape = QueryTree(num, num, None if tree is None else masks)
        rows, lengths = self.rows[few].to(device), torch.tensor(lens).to(device)
        plan = backend.plan_verify(VerifyInputs(self.table, rows, lengths, lens + 3, shape, self.sizes.heads))
        assert plan is not None
        plan.prepare()
        starts = [self.lengths[i] - num for i in few]
        return plan, [
            (i, [*range(start), *(start + node for node in path)])
            for i, start in zip(few, starts, strict=True)
            for path in paths
        ]
