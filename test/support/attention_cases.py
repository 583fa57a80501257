"""Batches in a page pool whose attention is computed in float64 by its definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from fenceline.layers.attention.base import PLAIN, AttentionBackend, LayerRules
from fenceline.layers.attention.torch_backend import TorchAttentionBackend
from fenceline.layers.forward_batch import AttentionInputs, ForwardMode, QueryTree, VerifyInputs
from fenceline.mem_cache.kv_pool import KVLayout, KVPool

SCALE = 0.3


class Case:
    """Requests with histories in a pool whose other bytes are NaN, and this step's q, k, v."""

    def __init__(
        self,
        seq_lens: list[int],
        query_lens: list[int],
        page_size: int,
        heads: tuple[int, int],
        seed: int,
        dtype: torch.dtype = torch.float32,
        head_dim: int = 8,
        device: str = "cpu",
        kv_dtype: torch.dtype | None = None,
        rules: LayerRules = PLAIN,
    ) -> None:
        """``kv_dtype``: of the pool, whose keys and values are rounded to it; ``dtype`` unless given. ``rules``: of
        layer 1, in which it attends; their sinks are on the CPU."""
        self.rules = rules
        self.device = torch.device(device)
        self.seq_lens, self.query_lens = seq_lens, query_lens
        num_heads, num_kv_heads = heads
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-n // page_size) for n in seq_lens]
        num_pages = sum(pages) + 3
        self.pool = KVPool(
            num_pages,
            KVLayout.uniform(page_size, 2, num_kv_heads, head_dim, kv_dtype or dtype),
            self.device,
            dtype,
        )
        for tensor in (self.pool.k(1), self.pool.v(1)):
            tensor[page_size:] = float("nan")
        free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
        # Columns past a request's pages name other requests' pages: a row is not cleared when it is leased again.
        self.page_table = torch.randint(
            1, num_pages, (len(seq_lens) + 2, max(pages) + 2), generator=generator
        ).int()
        self.rows = torch.randperm(len(seq_lens) + 2, generator=generator)[: len(seq_lens)]
        self.slots = []
        for row, count, length in zip(self.rows, pages, seq_lens, strict=True):
            self.page_table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
            position = torch.arange(length)
            self.slots.append(
                self.page_table[row, position // page_size].long() * page_size + position % page_size
            )
        self.keys, self.values = (
            [
                torch.randn(n, num_kv_heads, head_dim, generator=generator).to(kv_dtype or dtype).to(dtype)
                for n in seq_lens
            ]
            for _ in range(2)
        )
        self.queries = [
            torch.randn(n, num_heads, head_dim, generator=generator).to(dtype) for n in query_lens
        ]
        for slots, keys, values in zip(self.slots, self.keys, self.values, strict=True):
            self.pool.k(1)[slots.to(self.device)] = keys.to(self.pool.k(1))
            self.pool.v(1)[slots.to(self.device)] = values.to(self.pool.v(1))

    def begin_alike(self, requests: list[int], num_tokens: int) -> None:
        """Let ``requests`` have the first one's whole pages of the first ``num_tokens`` tokens."""
        first, size = requests[0], self.pool.page_size
        num_pages = num_tokens // size
        num = num_pages * size
        for i in requests[1:]:
            self.page_table[self.rows[i], :num_pages] = self.page_table[self.rows[first], :num_pages]
            for of_request in (self.slots, self.keys, self.values):
                of_request[i][:num] = of_request[first][:num]

    def run(self, mode: ForwardMode) -> list[torch.Tensor]:
        inputs = AttentionInputs(
            mode=mode,
            page_table=self.page_table.to(self.device),
            rows=self.rows.to(self.device),
            seq_lens=torch.tensor(self.seq_lens).to(self.device),
            seq_lens_cpu=np.array(self.seq_lens, dtype=np.int64),
            query_lens_cpu=np.array(self.query_lens, dtype=np.int64),
        )
        plan = TorchAttentionBackend(self.pool, self.rules_there()).plan(inputs)
        step = (torch.cat(self.queries), torch.cat(self._last(self.keys)), torch.cat(self._last(self.values)))
        output = plan.forward(1, *(tensor.to(self.device) for tensor in step), SCALE)
        return list(output.cpu().split(self.query_lens))

    def rules_there(self) -> dict[int, LayerRules]:
        """The rules of its layer, on its device, as backends take them."""
        sinks = self.rules.sinks
        there = None if sinks is None else sinks.to(self.device)
        return {1: replace(self.rules, sinks=there)}

    def expected(self, trees: list[list[int]] | None = None) -> list[torch.Tensor]:
        """softmax(q k^T) v for one head at a time, in float64. ``trees``: the parents of each request's nodes, which
        are its last tokens, in place of causal attention."""
        results = []
        for i, (q, k, v) in enumerate(zip(self.queries, self.keys, self.values, strict=True)):
            group = q.shape[1] // k.shape[1]
            last = len(k) - len(q) + torch.arange(len(q))
            hidden = torch.arange(len(k)) > last[:, None]
            window = len(k) if self.rules.window is None else self.rules.window
            hidden |= torch.arange(len(k)) <= last[:, None] - window
            if trees is not None:
                first_node = len(k) - len(trees[i])
                for query in range(len(q)):
                    path = path_to(trees[i], len(trees[i]) - len(q) + query)
                    hidden[query] = torch.arange(len(k)) <= first_node + len(path) - 1 - window
                    hidden[query, first_node:] = True
                    hidden[query, [first_node + node for node in path]] = False
            result = torch.empty(q.shape, dtype=torch.float64)
            for head in range(q.shape[1]):
                keys, values = k[:, head // group].double(), v[:, head // group].double()
                scores = q[:, head].double() @ keys.T * SCALE
                if self.rules.soft_cap:
                    scores = torch.tanh(scores / self.rules.soft_cap) * self.rules.soft_cap
                scores = scores.masked_fill(hidden, float("-inf"))
                if self.rules.sinks is not None:
                    sink = self.rules.sinks[head].double().expand(len(q), 1)
                    scores = torch.cat((scores, sink), 1)
                result[:, head] = torch.softmax(scores, dim=1)[:, : len(k)] @ values
            results.append(result)
        return results

    def check(self, mode: ForwardMode, tolerance: float = 1e-5) -> None:
        for ours, expected in zip(self.run(mode), self.expected(), strict=True):
            torch.testing.assert_close(ours.double(), expected, atol=tolerance, rtol=0)

    def _last(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor[-new:] for tensor, new in zip(tensors, self.query_lens, strict=True)]

    def verify(
        self, backend: AttentionBackend, num_nodes: int, trees: list[list[int]] | None, bound: int = 0
    ) -> torch.Tensor:
        """What the backend computes for queries that are the last of a tree's nodes; see :meth:`expected`. ``bound``:
        how much longer than they are the host believes the requests to be."""
        num_queries, num_heads, _ = self.queries[0].shape
        inputs = VerifyInputs(
            page_table=self.page_table.to(self.device),
            rows=self.rows.to(self.device),
            seq_lens=torch.tensor(self.seq_lens).to(self.device),
            max_seq_lens_cpu=np.array(self.seq_lens) + bound,
            tree=QueryTree(
                num_queries, num_nodes, None if trees is None else bits_of(trees, num_queries).to(self.device)
            ),
            num_heads=num_heads,
        )
        plan = backend.plan_verify(inputs)
        assert plan is not None
        plan.prepare()
        step = (torch.cat(self.queries), torch.cat(self._last(self.keys)), torch.cat(self._last(self.values)))
        output = plan.forward(1, *(tensor.to(self.device) for tensor in step), SCALE)
        assert output.is_contiguous() and output.dtype == self.queries[0].dtype
        return output.cpu()


def random_tree(random: np.random.Generator, num_nodes: int) -> list[int]:
    """Each node's parent, an earlier one; the root's is -1."""
    return [-1, *(int(random.integers(0, node)) for node in range(1, num_nodes))]


def path_to(tree: list[int], node: int) -> list[int]:
    """``node`` and its ancestors."""
    return [] if node < 0 else [node, *path_to(tree, tree[node])]


def bits_of(trees: list[list[int]], num_queries: int) -> torch.Tensor:
    """Masks [B, num_queries] int64 of the last nodes. A query attends to its own node whether or not its bit is set: it
    is set for every second one."""
    masks = [
        [sum(1 << n for n in path_to(tree, node) if n != node or node % 2) for node in range(len(tree))]
        for tree in trees
    ]
    return torch.from_numpy(np.array(masks, np.uint64).view(np.int64))[:, -num_queries:].contiguous()


def verify_cases() -> Iterator[tuple[list[int], list[list[int]], int, int, tuple[int, int]]]:
    """Random trees: lengths with the nodes, parents, queries, page size, heads. Nodes that a page or a block of keys
    cuts, requests that are nothing but nodes, trees as large as a mask, rows of one tile and of several."""
    random = np.random.default_rng(7)
    shapes = (
        (4, 4, 1, (4, 1)), (1, 1, 16, (2, 1)), (7, 7, 64, (6, 2)), (3, 11, 16, (4, 2)), (64, 64, 16, (2, 1)),
        (20, 20, 1, (8, 1)), (5, 64, 64, (2, 2)), (16, 17, 16, (16, 1)),
    )  # fmt: skip
    for num_queries, num_nodes, page_size, heads in shapes:
        lens = [num_nodes + int(n) for n in (0, *random.integers(0, 70, size=2))]
        yield lens, [random_tree(random, num_nodes) for _ in lens], num_queries, page_size, heads


def case(seq_lens: list[int], query_lens: list[int], page_size: int, heads: tuple[int, int], **options):  # type: ignore[no-untyped-def]
    """A ``Case``, which computes the expected result; every slot that belongs to no request holds NaN."""
    return Case(seq_lens, query_lens, page_size, heads, **({"seed": 1, "head_dim": 16} | options))


def requests_of(step):  # type: ignore[no-untyped-def]
    from fenceline.layers.kernels.decode_attention import PagedRequests

    return PagedRequests(step.page_table, step.rows, torch.tensor(step.seq_lens), step.pool.page_size)


def decode(step, num_workers: int = 3, workspace=None, queries=None, launch_pdl=False) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """One launch with blocks of 16 tokens, of as many queries as each request has, a chain; the workspace must be as it
    was before."""
    from fenceline.layers.kernels.decode_attention import (
        DecodeConfig,
        DecodeWorkspace,
        decode_attention,
        query_tiles,
    )

    keys, values = step.pool.k(1), step.pool.v(1)
    num_queries, num_heads, _ = step.queries[0].shape
    tiles = query_tiles(num_queries * num_heads // keys.shape[1])
    workspace = workspace or DecodeWorkspace(keys.shape[1], keys.shape[2], 8, keys.device, tiles)
    tree = QueryTree(num_queries, num_queries)
    config = DecodeConfig(16, num_workers, 4, 2, launch_pdl)
    queries = torch.cat(step.queries) if queries is None else queries
    output = decode_attention(
        queries, keys, values, requests_of(step), SCALE, workspace, config, tree, step.rules
    )
    assert not workspace.num_done.any()
    return output


def spoil(step) -> None:  # type: ignore[no-untyped-def]
    for row, length in zip(step.rows, step.seq_lens, strict=True):
        step.page_table[row, -(-length // step.pool.page_size) :] = 1 << 30
