"""Latent attention on a GPU: the triton backend over rows of 512 + 64 features against the textbook, the kernel that
stores rows, and the engine with a small model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_cases import SCALE, Case, bits_of, random_tree, replays
from model_parity import save_checkpoint
from scheduler_driver import asked_twice

from fenceline.layers.attention.base import AttentionBackend, LayerRules
from fenceline.layers.attention.triton_backend import TritonAttentionBackend
from fenceline.layers.cuda_layers import CudaLayerKernels
from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    ForwardMode,
    GraphDecodeInputs,
    QueryTree,
    VerifyInputs,
)
from fenceline.layers.kernels.base import LayerKernels
from fenceline.layers.kernels.triton.decode_attention import decode_attention
from fenceline.layers.kernels.triton.store_latent import store_latent
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.model_executor import extend_runner

pytestmark = pytest.mark.gpu
Flags = dict[str, object]

RULES = LayerRules(rows=("latent", "latent"), value_dim=512)
WIDTH = 576
TOLERANCE = 3e-2  # of bfloat16
FP8 = torch.float8_e4m3fn
# One tile of 16, 32 and 64 rows, and two of 64.
HEADS = (16, 20, 40, 128)
pools = pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["bf16", "fp8"])
EAGER: Flags = {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True}


def latent_case(
    lens: Sequence[int],
    new: Sequence[int],
    num_heads: int,
    page_size: int = 16,
    kv_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    return Case(list(lens), list(new), page_size, (num_heads, 1), 1, dtype, WIDTH, "cuda", kv_dtype, RULES)


def backend_of(step: Case) -> TritonAttentionBackend:
    return TritonAttentionBackend(step.pool, 1, step.rules_there(), step.queries[0].shape[1])


def queries_of(step: Case) -> torch.Tensor:
    """As the layer hands them over: in front of each token's row, which nothing reads here."""
    queries = torch.cat(step.queries)
    rows = queries.new_full((len(queries), queries.shape[1] + 1, WIDTH), torch.nan)
    rows[:, :-1] = queries
    return rows.cuda()[:, :-1]


def check(output: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(output[..., :512].double().cpu(), expected, atol=tolerance, rtol=0)


def attend(step: Case, mode: ForwardMode) -> torch.Tensor:
    lens = np.array(step.query_lens)
    inputs = AttentionInputs(
        mode=mode,
        page_table=step.page_table.cuda(),
        rows=step.rows.cuda(),
        seq_lens=torch.tensor(step.seq_lens).cuda(),
        seq_lens_cpu=np.array(step.seq_lens),
        query_lens_cpu=lens,
        query_starts=torch.from_numpy(np.concatenate([[0], np.cumsum(lens)])).int().cuda(),
    )
    backend, q = backend_of(step), queries_of(step)
    output = backend.plan(inputs).forward(1, q, q[:, :1], q[:, :1], SCALE)
    assert not backend.workspace.num_done.any()
    return output


@pools
@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_decode(page_size: int, num_heads: int, kv_dtype: torch.dtype | None) -> None:
    """Lengths on both sides of every boundary: of pages, of blocks, of what one worker has at least."""
    edges = sorted({n + d for n in (1, page_size, 32, 128, 640) for d in (-1, 0, 1) if n + d > 0})
    for lens in (edges, [1], [777], [5000, 3], [2000] * 3 + [1] * 40):
        step = latent_case(lens, [1] * len(lens), num_heads, page_size, kv_dtype)
        check(attend(step, ForwardMode.DECODE), torch.cat(step.expected()))


@pools
@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("num_nodes", [4, 13, 64])
def test_verify(num_nodes: int, num_heads: int, kv_dtype: torch.dtype | None) -> None:
    random = np.random.default_rng(num_nodes)
    for committed in ([0], [2000, 3], [31, 32, 33, 127, 128]):
        lens = [num_nodes + n for n in committed]
        for trees in (None, [random_tree(random, num_nodes) for _ in lens]):
            step = latent_case(lens, [num_nodes] * len(lens), num_heads, 16, kv_dtype)
            check(step.verify(backend_of(step), num_nodes, trees, bound=1), torch.cat(step.expected(trees)))


@pools
@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_extend(page_size: int, num_heads: int, kv_dtype: torch.dtype | None) -> None:
    """Prefixes on both sides of a page's end, tiles within a token's heads and over several tokens, keys split or
    not."""
    p = page_size
    for batch in ([(0, 1), (0, p), (p, p), (2 * p - 1, 2), (1, 65)], [(0, 200), (300, 129), (64, 1)], [(1500, 3)]):
        step = latent_case([a + b for a, b in batch], [new for _, new in batch], num_heads, p, kv_dtype)
        check(attend(step, ForwardMode.EXTEND), torch.cat(step.expected()))


@pytest.mark.parametrize(("num_heads", "key_dim", "value_dim"), [(16, 192, 128), (20, 256, 256), (3, 48, 32)])
def test_new_prompts(num_heads: int, key_dim: int, value_dim: int) -> None:
    """Each head's own keys and values, which are as wide as in DeepSeek-V3, in GLM-4.7-Flash, and small."""
    backend, lens = backend_of(latent_case([3], [1], num_heads)), np.array([300, 1, 129])
    starts = torch.tensor([0, 300, 301, 430], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(430, num_heads, dim, device="cuda").bfloat16() for dim in (key_dim, key_dim, value_dim))
    wanted = AttentionBackend.plan_new(backend, lens, starts)(q.double(), k.double(), v.double(), SCALE)
    found = backend.plan_new(lens, starts)(q, k, v, SCALE)
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_types(dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    for num_heads in (16, 128):
        step = latent_case([700, 3, 64], [1] * 3, num_heads, dtype=dtype)
        check(attend(step, ForwardMode.DECODE), torch.cat(step.expected()), tolerance)
        step = latent_case([300, 30], [40, 30], num_heads, dtype=dtype)
        check(attend(step, ForwardMode.EXTEND), torch.cat(step.expected()), tolerance)
        step = latent_case([300, 30], [5, 5], num_heads, dtype=dtype)
        check(step.verify(backend_of(step), 5, None), torch.cat(step.expected()), tolerance)


@pytest.mark.parametrize("num_heads", [20, 128])
@pytest.mark.parametrize(("bucket", "num_queries"), [(1, 1), (8, 1), (64, 1), (8, 4)])
def test_graph_replays_follow_their_tensors(bucket: int, num_queries: int, num_heads: int) -> None:
    """One graph, many batches: each replay equals the textbook, and an eager run on the same tensors bit for bit."""
    random = np.random.default_rng(bucket)
    lens = [num_queries + int(n) for n in random.integers(0, 900, 12)]
    trees = [random_tree(random, num_queries) for _ in lens]
    step = latent_case(lens, [num_queries] * 12, num_heads)
    expected, masks = step.expected(trees), bits_of(trees, num_queries)

    def plan(*tensors: torch.Tensor) -> AttentionPlan | None:
        if num_queries == 1:
            return backend_of(step).plan_graph(GraphDecodeInputs(*tensors[:3], 900))
        tree, bounds = QueryTree(num_queries, num_queries, tensors[3]), np.full(bucket, 900 + num_queries)
        return backend_of(step).plan_verify(VerifyInputs(*tensors[:3], bounds, tree, num_heads))

    for output, eager, members in replays(step, bucket, num_queries, 1, plan, masks):
        assert torch.equal(output[..., :512], eager[..., :512]) and output[..., :512].isfinite().all()
        wanted = torch.cat([expected[i] for i in members])
        check(output[: len(wanted)], wanted)


@pools
@pytest.mark.parametrize("num_heads", [20, 128])
def test_decode_behind_the_kernel_that_writes_its_last_tokens(num_heads: int, kv_dtype: torch.dtype | None) -> None:
    """Layer upon layer in a graph, each launch overlapping the preceding one, equals launches one at a time bit for
    bit: what is fetched ahead of the wait is never an old query or an old last token."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9")
    step = latent_case([1, 33, 500, 129, 64], [1] * 5, num_heads, 1, kv_dtype)
    backend, positions = backend_of(step), torch.tensor(step.seq_lens).cuda() - 1
    inputs = GraphDecodeInputs(step.page_table.cuda(), step.rows.cuda(), positions + 1, 500)
    requests = backend.requests_of(inputs)
    slots = requests.page_table[requests.rows, positions].long()
    table, weight = RotaryEmbedding(64, 600, 1e4).table.cuda(), torch.rand(512).bfloat16().cuda() + 0.5
    queries = torch.randn(5, num_heads, 192, device="cuda").bfloat16()
    row = torch.randn(5, WIDTH, device="cuda").bfloat16()
    start = torch.randn(5, num_heads + 1, WIDTH, device="cuda").bfloat16()
    rows, cache_rows, config = start.clone(), step.caches[0], backend.decode_config(5)

    def layers(overlap: bool) -> list[torch.Tensor]:
        rows.copy_(start)
        outputs, given = [], row
        for _ in range(20):
            store_latent(queries, given, weight, 1e-6, table, positions, rows, cache_rows, slots, pdl=overlap)
            cut = dataclasses.replace(config, launch_pdl=overlap)
            q = rows[:, :num_heads]
            y = decode_attention(
                q, cache_rows, cache_rows, requests, SCALE, backend.workspace, cut, rules=step.rules_there()[1]
            )
            outputs.append(y[..., :512])
            given = torch.cat((y[:, 0, :512], row[:, 512:]), 1)
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


# --- the kernels beside attention ------------------------------------------------------------------------------------


@pools
@pytest.mark.parametrize(
    ("num_heads", "plain", "rank", "rope"), [(128, 128, 512, 64), (20, 192, 512, 64), (3, 20, 33, 6)]
)
def test_store_latent(
    num_heads: int, plain: int, rank: int, rope: int, kv_dtype: torch.dtype | None, pdl: bool
) -> None:
    for num_tokens, dtype in ((1, torch.bfloat16), (3, torch.float32), (300, torch.bfloat16)):
        queries = torch.randn(num_tokens, num_heads, plain + rope, device="cuda").to(dtype)
        row = torch.randn(num_tokens, 24 + rank + rope, device="cuda").to(dtype)[:, 24:]
        weight = torch.randn(rank, device="cuda").to(dtype)
        table = RotaryEmbedding(rope, 4096, 1e6).table.cuda()
        positions = torch.randint(0, 4096, (num_tokens,), device="cuda")
        slots = 369 - torch.randperm(num_tokens, device="cuda")
        out = torch.randn(num_tokens, num_heads + 1, rank + rope, device="cuda").to(dtype)
        pool = torch.zeros(370, 1, rank + rope, device="cuda").to(kv_dtype or dtype)
        wanted, wanted_pool = out.clone(), pool.clone()
        operands = queries, row, weight, 1e-6, table, positions
        LayerKernels().store_latent(*operands, wanted, wanted_pool, slots)
        store_latent(*operands, out, pool, slots, pdl)
        bound = 4 * torch.finfo(dtype).eps
        rtol, atol = (bound, bound) if kv_dtype is None else (1 / 8, 2**-8)  # the next number of FP8
        torch.testing.assert_close(out[:, :-1], wanted[:, :-1], rtol=bound, atol=bound)
        torch.testing.assert_close(out[:, -1:], wanted[:, -1:], rtol=rtol, atol=atol)
        assert torch.equal(pool[slots].to(dtype), out[:, -1:])
        assert kv_dtype is None or (out == wanted).float().mean() > 0.9
        assert not pool[: 370 - num_tokens].float().any(), "a write went astray"


def test_products_by_head_go_to_their_places() -> None:
    """Into the queries' first features and out of the sums, which are parts of wider rows."""
    kernels = CudaLayerKernels(torch.device("cuda"))
    for num_tokens in (1, 3, 300):
        queries = torch.randn(num_tokens, 20, 256, device="cuda").bfloat16()
        matrices = torch.randn(20, 192, 512, device="cuda").bfloat16()
        rows = torch.zeros(num_tokens, 21, WIDTH, device="cuda").bfloat16()
        kernels.by_head(queries[..., :192], matrices.transpose(1, 2), rows[:, :20, :512])
        wanted = torch.einsum("thk,hkn->thn", queries[..., :192].float(), matrices.float())
        torch.testing.assert_close(rows[:, :20, :512].float(), wanted, rtol=2e-2, atol=0.3)
        assert not rows[:, 20].any() and not rows[..., 512:].any()


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deepseek")
    save_checkpoint("deepseek-v2-query-rank", directory)
    return directory


def test_greedy_equals_the_cpu(checkpoint: Path) -> None:
    """In float32: whole prompts and chunks, pages of one token, graphs and none, and pages that were on the host."""
    expected = asked_twice(checkpoint, {}, "cpu")
    ways: tuple[Flags, ...] = (
        {},
        EAGER,
        {"page_size": 1, "chunked_prefill_size": 16},
        {"page_size": 4, "max_total_tokens": 160, "enable_hierarchical_cache": True, "hicache_ratio": 6.0},
        {"debug_cuda_graph": True},
    )
    for flags in ways:
        assert asked_twice(checkpoint, flags) == expected, flags


def test_expanded_prompts_change_no_token(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = asked_twice(checkpoint, {}, "cpu")
    monkeypatch.setattr(extend_runner, "_FEWEST_EXPANDED", 20)
    for flags in (EAGER, EAGER | {"chunked_prefill_size": 32}):
        assert asked_twice(checkpoint, flags) == expected, flags


def test_drafts_change_no_token(checkpoint: Path) -> None:
    expected = asked_twice(checkpoint, {}, "cpu")
    for topk in (1, 2):
        flags: Flags = {
            "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(checkpoint),
            "speculative_eagle_topk": topk, "speculative_num_steps": 3,
        }  # fmt: skip
        assert asked_twice(checkpoint, flags) == expected, topk


def test_fp8_latents_give_the_same_tokens_in_graphs_and_chunks(checkpoint: Path) -> None:
    flags: Flags = {"kv_cache_dtype": "fp8_e4m3"}
    expected = asked_twice(checkpoint, flags | EAGER)
    assert asked_twice(checkpoint, flags) == asked_twice(checkpoint, flags | {"chunked_prefill_size": 16}) == expected
