"""Batches in a page pool with the expected attention, computed in float64 by its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from triton_interpreter import in_front_of_nan

from fenceline.config.kv_layout import KVLayout, keys_and_values, latent
from fenceline.layers.attention.base import PLAIN, AttentionBackend, LayerRules
from fenceline.layers.attention.cpu_backend import CpuAttentionBackend
from fenceline.layers.attention.fixed_order import FixedOrderAttentionBackend
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.forward_batch import AttentionInputs, AttentionPlan, ForwardMode, QueryTree, VerifyInputs
from fenceline.mem_cache.kv_pool import KVPool

SCALE = 0.3


class Case:
    """Requests with histories in a pool whose other slots are NaN, and this step's q, k and v."""

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
        """``kv_dtype``: the pool's dtype, to which keys and values are rounded; ``dtype`` unless given. ``rules``:
        those of layer 1, which is the layer used; their sinks are on the CPU. With one row for keys and values these
        are the keys' first ``rules.value_dim`` features."""
        self.rules = rules
        self.device = torch.device(device)
        self.seq_lens, self.query_lens = seq_lens, query_lens
        num_heads, num_kv_heads = heads
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-n // page_size) for n in seq_lens]
        num_pages = sum(pages) + 3
        stored = str(kv_dtype or dtype).removeprefix("torch.")
        of_layer = latent(head_dim, stored) if rules.shared else keys_and_values(num_kv_heads, head_dim, stored)
        self.pool = KVPool(num_pages, KVLayout(page_size, (of_layer,) * 2), self.device, dtype)
        for tensor in self.caches:
            tensor[page_size:] = float("nan")
        free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
        # Columns past a request's pages name other requests' pages, because rows are not cleared when they are leased
        # again.
        self.page_table = torch.randint(1, num_pages, (len(seq_lens) + 2, max(pages) + 2), generator=generator).int()
        self.rows = torch.randperm(len(seq_lens) + 2, generator=generator)[: len(seq_lens)]
        self.slots = []
        for row, count, length in zip(self.rows, pages, seq_lens, strict=True):
            self.page_table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
            position = torch.arange(length)
            self.slots.append(self.page_table[row, position // page_size].long() * page_size + position % page_size)
        self.keys, self.values = (
            [
                torch.randn(n, num_kv_heads, head_dim, generator=generator).to(kv_dtype or dtype).to(dtype)
                for n in seq_lens
            ]
            for _ in range(2)
        )
        if rules.shared:
            self.values = [keys[..., : rules.value_dim] for keys in self.keys]
        self.queries = [torch.randn(n, num_heads, head_dim, generator=generator).to(dtype) for n in query_lens]
        for slots, keys, values in zip(self.slots, self.keys, self.values, strict=True):
            k_cache, v_cache = self.caches
            v_cache[slots.to(self.device), :, : values.shape[2]] = values.to(v_cache)
            k_cache[slots.to(self.device)] = keys.to(k_cache)

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool's keys and values of its layer."""
        keys, values = (self.pool.row(1, name) for name in self.rules.rows)
        return keys, values

    def begin_alike(self, requests: list[int], num_tokens: int) -> None:
        """Let all ``requests`` share the pages of the first one that lie within its first ``num_tokens`` tokens."""
        first, size = requests[0], self.pool.page_size
        num_pages = num_tokens // size
        num = num_pages * size
        for i in requests[1:]:
            self.page_table[self.rows[i], :num_pages] = self.page_table[self.rows[first], :num_pages]
            for of_request in (self.slots, self.keys, self.values):
                of_request[i][:num] = of_request[first][:num]

    @property
    def backends(self) -> list[AttentionBackend]:
        """Those that are made of torch's operators; the last one is what ``torch`` names on its device."""
        kinds: list[type[ReferenceAttentionBackend]] = [ReferenceAttentionBackend]
        if self.device.type == "cpu":
            kinds += [FixedOrderAttentionBackend, CpuAttentionBackend]
        return [kind(self.pool, self.rules_there()) for kind in kinds]

    def run(self, mode: ForwardMode, backend: AttentionBackend | None = None) -> list[torch.Tensor]:
        inputs = AttentionInputs(
            mode=mode,
            page_table=self.page_table.to(self.device),
            rows=self.rows.to(self.device),
            seq_lens=torch.tensor(self.seq_lens).to(self.device),
            seq_lens_cpu=np.array(self.seq_lens, dtype=np.int64),
            query_lens_cpu=np.array(self.query_lens, dtype=np.int64),
        )
        plan = (backend or self.backends[-1]).plan(inputs)
        step = (torch.cat(self.queries), torch.cat(self._last(self.keys)), torch.cat(self._last(self.values)))
        output = plan.forward(1, *(tensor.to(self.device) for tensor in step), SCALE)
        return list(output.cpu().split(self.query_lens))

    def rules_there(self) -> dict[int, LayerRules]:
        """The rules of its layer, on its device, as backends take them."""
        sinks = self.rules.sinks
        there = None if sinks is None else sinks.to(self.device)
        return {1: replace(self.rules, sinks=there)}

    def expected(self, trees: list[list[int]] | None = None) -> list[torch.Tensor]:
        """softmax(q k^T) v for one head at a time, in float64. ``trees``: each request's last tokens are the nodes of a
        tree, given by the parents of the nodes; None: attention is causal."""
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
            result = torch.empty(*q.shape[:2], v.shape[2], dtype=torch.float64)
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
        for backend in self.backends:
            for ours, expected in zip(self.run(mode, backend), self.expected(), strict=True):
                torch.testing.assert_close(ours[..., : expected.shape[2]].double(), expected, atol=tolerance, rtol=0)

    def check_verify(
        self, num_nodes: int, trees: list[list[int]] | None, bound: int = 0, tolerance: float = 1e-5
    ) -> None:
        for backend in self.backends:
            output, expected = self.verify(backend, num_nodes, trees, bound), torch.cat(self.expected(trees))
            output = output[..., : expected.shape[2]].double()
            torch.testing.assert_close(output, expected, atol=tolerance, rtol=0)

    def _last(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor[-new:] for tensor, new in zip(tensors, self.query_lens, strict=True)]

    def verify(
        self, backend: AttentionBackend, num_nodes: int, trees: list[list[int]] | None, bound: int = 0
    ) -> torch.Tensor:
        """What the backend computes for queries that are the last nodes of a tree; see :meth:`expected`. ``bound``: by
        how much the host's bounds of the lengths exceed them."""
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
    """The parent of each node, which is an earlier node; the root's is -1."""
    return [-1, *(int(random.integers(0, node)) for node in range(1, num_nodes))]


def path_to(tree: list[int], node: int) -> list[int]:
    """``node`` and its ancestors."""
    return [] if node < 0 else [node, *path_to(tree, tree[node])]


def bits_of(trees: list[list[int]], num_queries: int) -> torch.Tensor:
    """Masks [B, num_queries] int64 of the last nodes. The bit of a query's own node is set for every second query,
    because it must make no difference."""
    masks = [
        [sum(1 << n for n in path_to(tree, node) if n != node or node % 2) for node in range(len(tree))]
        for tree in trees
    ]
    return torch.from_numpy(np.array(masks, np.uint64).view(np.int64))[:, -num_queries:].contiguous()


def verify_cases() -> Iterator[tuple[list[int], list[list[int]], int, int, tuple[int, int]]]:
    """Random trees: (lengths including the nodes, parents, number of queries, page size, heads). Among them are nodes
    on both sides of a page's or block's boundary, requests with only nodes, trees as large as a mask, and rows of one
    tile and of several."""
    random = np.random.default_rng(7)
    shapes = (
        (4, 4, 1, (4, 1)), (1, 1, 16, (2, 1)), (7, 7, 64, (6, 2)), (3, 11, 16, (4, 2)), (64, 64, 16, (2, 1)),
        (20, 20, 1, (8, 1)), (5, 64, 64, (2, 2)), (16, 17, 16, (16, 1)),
    )  # fmt: skip
    for num_queries, num_nodes, page_size, heads in shapes:
        lens = [num_nodes + int(n) for n in (0, *random.integers(0, 70, size=2))]
        yield lens, [random_tree(random, num_nodes) for _ in lens], num_queries, page_size, heads


def case(seq_lens: list[int], query_lens: list[int], page_size: int, heads: tuple[int, int], **options):  # type: ignore[no-untyped-def]
    """A ``Case``, which computes the expected result. Slots that belong to no request are NaN."""
    return Case(seq_lens, query_lens, page_size, heads, **({"seed": 1, "head_dim": 16} | options))


def requests_of(step):  # type: ignore[no-untyped-def]
    from fenceline.layers.kernels.triton.decode_attention import PagedRequests

    return PagedRequests(step.page_table, step.rows, torch.tensor(step.seq_lens), step.pool.page_size)


def decode(  # type: ignore[no-untyped-def]
    step,
    num_workers: int = 3,
    workspace=None,
    queries=None,
    launch_pdl=False,
    merge_elements=2048,
    min_blocks=1,
    merge_apart=False,
) -> torch.Tensor:
    """One launch with blocks of 16 tokens. The queries of each request are a chain. Afterwards the workspace must be as
    before."""
    from fenceline.layers.kernels.triton.decode_attention import (
        DecodeConfig,
        DecodeWorkspace,
        decode_attention,
        query_tiles,
    )

    keys, values = step.caches
    num_queries, num_heads, _ = step.queries[0].shape
    tiles = query_tiles(num_queries * num_heads // keys.shape[1])
    workspace = workspace or DecodeWorkspace(keys.shape[1], step.values[0].shape[2], 8, keys.device, tiles)
    tree = QueryTree(num_queries, num_queries)
    config = DecodeConfig(
        16, num_workers, 4, 2, launch_pdl,
        merge_elements=merge_elements, min_blocks=min_blocks, merge_apart=merge_apart,
    )  # fmt: skip
    queries = in_front_of_nan(torch.cat(step.queries)) if queries is None else queries
    output = decode_attention(queries, keys, values, requests_of(step), SCALE, workspace, config, tree, step.rules)
    assert not workspace.num_done.any()
    return output


def spoil(step) -> None:  # type: ignore[no-untyped-def]
    for row, length in zip(step.rows, step.seq_lens, strict=True):
        step.page_table[row, -(-length // step.pool.page_size) :] = 1 << 30


MakePlan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], AttentionPlan | None]


def replays(
    step: Case, bucket: int, num_queries: int, num_kv_heads: int, make_plan: MakePlan, masks: torch.Tensor | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Twenty batches of up to ``bucket`` requests of ``step``, in the memory of one graph, on a GPU: its output, what
    its plan computes without it, and the requests. ``make_plan`` gets the page table and that memory: rows, lengths,
    and ancestors, which are the ``masks`` of the requests."""
    random = np.random.default_rng(bucket)
    step.page_table[0] = 0  # the sink's row; Case never gives out its page
    alive = [i for i, row in enumerate(step.rows.tolist()) if row != 0]
    rows = torch.zeros(bucket, dtype=torch.int64, device="cuda")
    seq_lens = torch.full((bucket,), num_queries, dtype=torch.int64, device="cuda")
    ancestors = torch.zeros(bucket, num_queries, dtype=torch.int64, device="cuda")
    shape, dtype = step.queries[0].shape[1:], step.queries[0].dtype
    q = torch.zeros(bucket * num_queries, *shape, dtype=dtype, device="cuda")
    plan = make_plan(step.page_table.cuda(), rows, seq_lens, ancestors)
    assert plan is not None
    operands = 1, q, q[:, :num_kv_heads], q[:, :num_kv_heads], SCALE
    plan.forward(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = plan.forward(*operands)
    for _ in range(20):
        members = random.permutation(alive)[: random.integers(1, bucket + 1)].tolist()
        rows.zero_()
        seq_lens.fill_(num_queries)
        ancestors.zero_()
        rows[: len(members)] = step.rows[members].cuda()
        seq_lens[: len(members)] = torch.tensor(step.seq_lens)[members].cuda()
        if masks is not None:
            ancestors[: len(members)] = masks[members].cuda()
        q[: len(members) * num_queries] = torch.cat([step.queries[i] for i in members]).cuda()
        graph.replay()
        yield output, plan.forward(*operands), members
