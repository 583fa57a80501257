"""The triton attention backend on a GPU against the textbook, eager and in graphs replayed with other requests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention_cases import SCALE, Case, bits_of, random_tree, replays, verify_cases

from fenceline.layers.attention.base import LayerRules
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.attention.triton_backend import TritonAttentionBackend
from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    ForwardMode,
    GraphDecodeInputs,
    QueryTree,
    VerifyInputs,
)
from fenceline.layers.kernels.base import HeadLayout
from fenceline.layers.kernels.triton.decode_attention import DecodeConfig, decode_attention
from fenceline.layers.kernels.triton.rotate_store import rotate_and_store

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Every group, page size and head size, and every pair of the latter two with few and with many heads.
SHAPES = [
    *((page_size, (2 * group, 2), 64) for group, page_size in enumerate((1, 16, 64, 1, 16, 64, 1, 16), 1)),
    *((page_size, heads, 128) for page_size in (1, 16, 64) for heads in ((4, 2), (7, 1))),
    (32, (32, 8), 128),
    (1, (16, 8), 128),
    (16, (4, 4), 32),
    (64, (4, 2), 16),
]
shapes = pytest.mark.parametrize(("page_size", "heads", "head_dim"), SHAPES, ids=str)


def inputs_of(step: Case, mode: ForwardMode) -> AttentionInputs:
    lens = np.array(step.query_lens)
    return AttentionInputs(
        mode=mode,
        page_table=step.page_table.cuda(),
        rows=step.rows.cuda(),
        seq_lens=torch.tensor(step.seq_lens).cuda(),
        seq_lens_cpu=np.array(step.seq_lens),
        query_lens_cpu=lens,
        query_starts=torch.from_numpy(np.concatenate([[0], np.cumsum(lens)])).int().cuda(),
    )


def attend(plan: AttentionPlan, step: Case) -> torch.Tensor:
    """With q as models hand it over, a view of qkv."""
    num_heads, head_dim = step.queries[0].shape[1:]
    num_kv_heads = step.pool.row(1, "k").shape[1]
    qkv = torch.zeros(sum(step.query_lens), num_heads + 2 * num_kv_heads, head_dim, dtype=step.queries[0].dtype)
    qkv[:, :num_heads] = torch.cat(step.queries)
    q, k, v = qkv.cuda().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    plan.prepare()
    return plan.forward(1, q, k, v, SCALE)


def check(step: Case, mode: ForwardMode) -> None:
    backend = TritonAttentionBackend(step.pool, rules=step.rules_there())
    output = attend(backend.plan(inputs_of(step, mode)), step)
    assert output.is_contiguous() and output.dtype == step.queries[0].dtype
    torch.testing.assert_close(output.double().cpu(), torch.cat(step.expected()), atol=TOLERANCES[output.dtype], rtol=0)


def decode_case(
    lens: list[int], page_size: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> Case:
    return Case(lens, [1] * len(lens), page_size, heads, 1, dtype, head_dim, device="cuda")


@shapes
def test_decode(page_size: int, heads: tuple[int, int], head_dim: int) -> None:
    """Lengths on both sides of every boundary: of pages, of blocks, of what one worker takes."""
    edges = sorted({n + d for n in (1, page_size, 64, 128, 640) for d in (-1, 0, 1) if n + d > 0})
    check(decode_case(edges, page_size, heads, head_dim), ForwardMode.DECODE)
    for lens in ([1], [page_size], [777], [5000, 3], [4000] * 3 + [1] * 40):
        check(decode_case(lens, page_size, heads, head_dim), ForwardMode.DECODE)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_decode_of_random_batches(dtype: torch.dtype) -> None:
    random = np.random.default_rng(2)
    for size in (1, 2, 17, 100, 300):
        lens = [int(n) for n in random.integers(1, 600, size)]
        check(decode_case(lens, 16, (4, 2), 64, dtype), ForwardMode.DECODE)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_windows_soft_caps_and_sinks(head_dim: int) -> None:
    """In decode, in prefill after a prefix and without one, and for chains and trees."""
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(2))
    given = torch.bfloat16, head_dim, "cuda"
    for rules in (LayerRules(window=70), LayerRules(soft_cap=2.0), LayerRules(130, 2.0, sinks)):
        lens = [1, 69, 70, 71, 500, 4000, 33]
        check(Case(lens, [1] * len(lens), 16, (8, 4), 1, *given, rules=rules), ForwardMode.DECODE)
        for new in ([1, 69, 1, 71, 300, 17, 2], lens):
            check(Case(lens, new, 16, (8, 4), 1, *given, rules=rules), ForwardMode.EXTEND)
        trees = [[-1, 0, 0, 1, 3]] * 3
        step = Case([500, 5, 80], [5] * 3, 16, (8, 4), 1, *given, rules=rules)
        check_verify(step, trees, 5)
        check_verify(step, None, 5)


def check_verify(step: Case, trees: list[list[int]] | None, num_nodes: int) -> None:
    expected = torch.cat(step.expected(trees))
    rules = step.rules_there()
    backends = TritonAttentionBackend(step.pool, rules=rules), ReferenceAttentionBackend(step.pool, rules)
    for backend in backends:
        output = step.verify(backend, num_nodes, trees, bound=1)
        torch.testing.assert_close(output.double(), expected, atol=TOLERANCES[output.dtype], rtol=0)


@shapes
def test_verify(page_size: int, heads: tuple[int, int], head_dim: int) -> None:
    """Chains and trees, up to the largest; requests that are nothing but nodes, and long ones that are cut."""
    random = np.random.default_rng(page_size)
    for num_queries, num_nodes in ((4, 4), (8, 8), (10, 30), (60, 60), (64, 64)):
        for committed in ([0], [5000, 3], [600] * 3 + [1] * 40, [63, 64, 65, 127, 128]):
            lens = [num_nodes + n for n in committed]
            trees = None if num_queries == 4 else [random_tree(random, num_nodes) for _ in lens]
            queries = [num_queries] * len(lens)
            step = Case(lens, queries, page_size, heads, 1, torch.bfloat16, head_dim, device="cuda")
            check_verify(step, trees, num_nodes)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_verify_of_the_cases_that_the_interpreter_runs(dtype: torch.dtype) -> None:
    for lens, trees, num_queries, page_size, heads in verify_cases():
        step = Case(lens, [num_queries] * len(lens), page_size, heads, 1, dtype, 64, device="cuda")
        check_verify(step, trees, len(trees[0]))


@pytest.mark.parametrize(("bucket", "num_queries"), [(1, 4), (8, 8), (32, 4), (32, 26)])
def test_verify_graph_replays_follow_rows_lengths_and_trees(bucket: int, num_queries: int) -> None:
    """One graph, many batches: each replay equals the textbook, and an eager run on the same tensors bit for bit."""
    random = np.random.default_rng(bucket)
    lens = [num_queries + int(n) for n in random.integers(0, 1500, 40)]
    trees = [random_tree(random, num_queries) for _ in lens]
    step = Case(lens, [num_queries] * 40, 16, (8, 2), 1, torch.bfloat16, 128, device="cuda")
    expected, masks = step.expected(trees), bits_of(trees, num_queries)
    bounds = np.full(bucket, 1500 + num_queries)

    def plan(*tensors: torch.Tensor) -> AttentionPlan | None:
        tree = QueryTree(num_queries, num_queries, tensors[3])
        return TritonAttentionBackend(step.pool).plan_verify(VerifyInputs(*tensors[:3], bounds, tree, num_heads=8))

    for output, eager, members in replays(step, bucket, num_queries, 2, plan, masks):
        assert torch.equal(output, eager)
        wanted = torch.cat([expected[i] for i in members])
        torch.testing.assert_close(output[: len(wanted)].double().cpu(), wanted, atol=3e-2, rtol=0)
        assert output.isfinite().all()


@shapes
def test_extend(page_size: int, heads: tuple[int, int], head_dim: int) -> None:
    """Tiles of every kind, prefixes on both sides of a page's end, keys split and not."""
    p = page_size
    batches = (
        [(0, 1), (0, p), (p, p), (2 * p - 1, 2), (1, 65)],
        [(0, 300), (700, 129), (64, 1)],
        [(1500, 3)],
        [(0, 1)],
    )
    for batch in batches:
        lens = [prefix + new for prefix, new in batch], [new for _, new in batch]
        step = Case(*lens, page_size, heads, 1, torch.bfloat16, head_dim, device="cuda")
        check(step, ForwardMode.EXTEND)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_extend_of_random_batches(dtype: torch.dtype) -> None:
    random = np.random.default_rng(3)
    for size in (1, 3, 30):
        lens = [int(n) for n in random.integers(1, 500, size)]
        new = [int(random.integers(1, n + 1)) for n in lens]
        check(Case(lens, new, 16, (4, 2), size, dtype, 64, device="cuda"), ForwardMode.EXTEND)


@pytest.mark.parametrize("bucket", [1, 8, 64])
def test_graph_replays_follow_rows_and_lengths(bucket: int) -> None:
    """One graph, many batches: each replay equals the textbook, and an eager run on the same tensors bit for bit."""
    random = np.random.default_rng(bucket)
    lens = [int(n) for n in random.integers(1, 1500, 40)]
    step = decode_case(lens, 16, (8, 2), 128)
    expected = step.expected()

    def plan(*tensors: torch.Tensor) -> AttentionPlan | None:
        return TritonAttentionBackend(step.pool).plan_graph(GraphDecodeInputs(*tensors[:3], 1500))

    for output, eager, members in replays(step, bucket, 1, 2, plan):
        assert torch.equal(output, eager)
        wanted = torch.cat([expected[i] for i in members])
        torch.testing.assert_close(output[: len(members)].double().cpu(), wanted, atol=3e-2, rtol=0)


def test_a_merge_does_not_depend_on_timing() -> None:
    """Requests cut among all workers, again and again: whoever is last merges in the same order."""
    step = decode_case([9000, 1, 7000], 1, (8, 2), 128)
    backend = TritonAttentionBackend(step.pool)
    plan = backend.plan(inputs_of(step, ForwardMode.DECODE))
    first = attend(plan, step)
    for _ in range(200):
        assert torch.equal(attend(plan, step), first)
    assert not backend.workspace.num_done.any()


@pytest.mark.parametrize("batch", [1, 6, 16, 40])
def test_decode_behind_the_kernel_that_writes_its_last_tokens(batch: int) -> None:
    """Layer upon layer in a graph, each launch overlapping the preceding one, equals launches one at a time bit for
    bit: what is fetched ahead of the wait is never an old q or an old last token."""
    random = np.random.default_rng(batch)
    step = decode_case([int(n) for n in random.integers(1, 700, batch)], 1, (8, 2), 128)
    backend = TritonAttentionBackend(step.pool)
    requests = backend.requests_of(inputs_of(step, ForwardMode.DECODE))
    positions = requests.seq_lens - 1
    slots = requests.page_table[requests.rows, positions].long()
    table = torch.tensor([0.6, 0.6, 0.8], device="cuda").repeat_interleave(64).repeat(700, 1)
    qkv = torch.randn(batch, 12 * 128, device="cuda").bfloat16()
    start = qkv.clone()
    config = backend.decode_config(batch)
    keys, values = step.pool.row(1, "k"), step.pool.row(1, "v")

    def layers(overlap: bool) -> list[torch.Tensor]:
        qkv.copy_(start)
        outputs = []
        for _ in range(20):
            rotate_and_store(qkv, HeadLayout(8, 2, 128), None, table, positions, keys, values, slots, pdl=overlap)
            q = qkv.view(batch, 12, 128)[:, :8]
            cut = dataclasses.replace(config, launch_pdl=overlap)
            outputs.append(decode_attention(q, keys, values, requests, SCALE, backend.workspace, cut))
        return outputs

    expected = layers(overlap=False)
    layers(overlap=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = layers(overlap=True)
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))
    assert not torch.equal(expected[0], expected[1]) and not backend.workspace.num_done.any()


@pytest.mark.parametrize("num_workers", [1, 2, 5, 16])
def test_decode_however_it_is_cut(num_workers: int) -> None:
    step = decode_case([1200, 64, 65, 300, 1], 1, (4, 2), 128)
    backend = TritonAttentionBackend(step.pool)
    config = DecodeConfig(64, num_workers, 4, 3)
    requests = backend.requests_of(inputs_of(step, ForwardMode.DECODE))
    q = torch.cat(step.queries).cuda()
    output = decode_attention(
        q, step.pool.row(1, "k"), step.pool.row(1, "v"), requests, SCALE, backend.workspace, config
    )
    torch.testing.assert_close(output.double().cpu(), torch.cat(step.expected()), atol=3e-2, rtol=0)
