"""Sparse attention on a GPU: the tokens that the triton backend selects, at the sizes of published models, and its
attention to them; and the engine with small models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from block_cases import BlockSteps
from draft_checkpoints import save_appended_mtp
from model_parity import save_checkpoint
from scheduler_driver import asked_twice
from selection_cases import SCALE, Sizes, Steps

from fenceline.config.families import BlocksConfig
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.attention.triton_backend import TritonAttentionBackend
from fenceline.layers.forward_batch import AttentionPlan, GraphDecodeInputs, IndexQueries, QueryTree, VerifyInputs
from fenceline.layers.kernels.base import LayerKernels
from fenceline.layers.kernels.index_rows import unpacked
from fenceline.layers.kernels.triton import select_tokens
from fenceline.layers.kernels.triton.select_blocks import store_means
from fenceline.layers.kernels.triton.store_index import store_index
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.memory_order.guards import first_of_best

pytestmark = pytest.mark.gpu
Flags = dict[str, object]

TOLERANCE = 3e-2  # of bfloat16
TREE = [-1, 0, 0, 1, 2]  # the parent of each node
# Query heads and heads of the indexer: of GLM-5, DeepSeek-V3.2, and of a rank of eight.
HEADS = ((64, 32), (128, 64), (16, 64))
# Of MiniCPM-SALA. The first two requests select.
BLOCKS = BlocksConfig(size=64, top_k=96, first=1, local=32, width=32, stride=16)
BLOCK_LENGTHS = (20_000, 6_145, 6_144, 70)
EAGER: Flags = {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True}


def sizes_of(heads: tuple[int, int], kv_dtype: str, page_size: int = 64, top_k: int = 2048) -> Sizes:
    return Sizes(page_size, top_k, heads[0], 576, 512, heads[1], 128, kv_dtype, torch.bfloat16, "cuda")


def backend_of(steps: Steps) -> TritonAttentionBackend:
    return TritonAttentionBackend(steps.pool, 0, steps.rules, steps.sizes.heads)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_queries_attend_to_the_best_tokens(page_size: int, heads: tuple[int, int], kv_dtype: str) -> None:
    """Lengths on both sides of the number that is selected, and long ones; many scores are equal."""
    for lengths in ((1, 2047, 2048, 2049, 9000), (40_000, 5, 2500)):
        steps = Steps(page_size, lengths, sizes_of(heads, kv_dtype, page_size))
        backend = backend_of(steps)
        steps.check(*steps.decoded(backend), tolerance=TOLERANCE)
        steps.check(*steps.verified(backend, None, 4), tolerance=TOLERANCE)
        steps.check(*steps.verified(backend, TREE, 5), tolerance=TOLERANCE)
        steps.check(*steps.extended(backend, [min(length, 20) for length in lengths]), tolerance=TOLERANCE)


def test_other_types() -> None:
    for dtype, name, tolerance in ((torch.float32, "float32", 1e-4), (torch.float16, "float16", 4e-3)):
        sizes = sizes_of((16, 64), name, 16, 300)._replace(dtype=dtype)
        steps = Steps(1, (299, 300, 301, 5000), sizes)
        for plan, reads in (steps.decoded(backend_of(steps)), steps.extended(backend_of(steps), [9, 1, 4, 7])):
            steps.check(plan, reads, tolerance=tolerance)


def test_real_scores_select_what_torch_selects() -> None:
    """Scores of random numbers, in several launches: sets may differ where scores differ by rounding alone."""
    steps = Steps(2, (30_000, 3000, 8192), sizes_of((16, 64), "bfloat16"))
    generator = torch.Generator("cuda").manual_seed(0)
    rows = steps.pool.row(0, "index")
    rows.copy_(torch.randn(rows.shape, generator=generator, device="cuda"))
    new = [700, 1, 64]
    queries = torch.randn(sum(new), 64, 128, generator=generator, device="cuda").bfloat16()
    weights = torch.randn(sum(new), 64, generator=generator, device="cuda")
    index = IndexQueries(queries, weights, 2048, first_of_best)
    plan, _ = steps.extended(backend_of(steps), new)
    slots, counts = plan.select(0, index)
    again, _ = plan.select(0, index)
    assert counts.tolist() == [2048] * sum(new) and torch.equal(slots, again)
    plan, reads = steps.extended(ReferenceAttentionBackend(steps.pool, steps.rules), new)
    expected = [mask for part in plan.select(0, index) for mask in part[0]]
    for i in (0, 1, 350, 699, 700, 701, 764):
        request, positions = reads[i]
        own = steps.slots(request, positions)
        wanted = own[expected[i][: len(own)]].tolist()
        assert len(wanted) == 2048 and len(set(wanted) & set(slots[i].tolist())) >= 2046


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("bucket", "num_queries"), [(1, 1), (8, 1), (64, 1), (8, 4)])
def test_graph_replays_follow_their_tensors(bucket: int, num_queries: int, kv_dtype: str) -> None:
    """One graph of two layers that share a selection, many batches: each replay equals an eager run on the same
    tensors bit for bit, and what a request selects does not depend on those beside it."""
    random = np.random.default_rng(bucket)
    lengths = [num_queries + int(n) for n in random.integers(0, 6000, 12)]
    steps = Steps(bucket, lengths, sizes_of((16, 64), kv_dtype))
    backend, longest, num = backend_of(steps), max(lengths), bucket * num_queries
    table = torch.cat((torch.zeros_like(steps.table[:1]), steps.table))  # the sink's row in front
    rows = torch.zeros(bucket, dtype=torch.int64, device="cuda")
    seq_lens = torch.full((bucket,), num_queries, dtype=torch.int64, device="cuda")
    plan: AttentionPlan | None
    if num_queries == 1:
        plan = backend.plan_graph(GraphDecodeInputs(table, rows, seq_lens, longest))
    else:
        bounds, tree = np.full(bucket, longest), QueryTree(num_queries, num_queries)
        plan = backend.plan_verify(VerifyInputs(table, rows, seq_lens, bounds, tree, 16))
    assert plan is not None
    index_of = steps.whole(len(lengths) * num_queries, 64, 128).bfloat16().cuda()
    weights_of = steps.whole(len(lengths) * num_queries, 64).cuda()
    queries = torch.zeros(num, 64, 128, dtype=torch.bfloat16, device="cuda")
    weights = torch.zeros(num, 64, device="cuda")
    q = torch.randn(num, 16, 576, device="cuda").bfloat16()

    def layers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slots, counts = plan.select(0, IndexQueries(queries, weights, 2048, first_of_best))
        first = plan.forward_selected(0, q, q[:, :1], q[:, :1], SCALE, (slots, counts))
        given = torch.cat((first[..., :512], q[..., 512:]), -1)
        second = plan.forward_selected(0, given, q[:, :1], q[:, :1], SCALE, (slots, counts))
        return slots, counts, second[..., :512]

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layers()
    found: dict[tuple[int, int], list[int]] = {}
    for _ in range(10):
        members = random.permutation(len(lengths))[: random.integers(1, bucket + 1)].tolist()
        rows.zero_()
        seq_lens.fill_(num_queries)
        rows[: len(members)] = steps.rows[members].cuda() + 1
        seq_lens[: len(members)] = torch.tensor(lengths)[members].cuda()
        for given, of in ((queries, index_of), (weights, weights_of)):
            given[: len(members) * num_queries] = of.unflatten(0, (-1, num_queries))[members].flatten(0, 1)
        graph.replay()
        eager = layers()
        assert torch.equal(replayed[1], eager[1]) and torch.equal(replayed[2], eager[2])
        assert replayed[2][: len(members) * num_queries].isfinite().all()
        for place, member in enumerate(members):
            for query in range(num_queries):
                i = place * num_queries + query
                chosen = replayed[0][i, : int(replayed[1][i])].tolist()
                assert len(chosen) == min(lengths[member] - num_queries + query + 1, 2048)
                assert found.setdefault((member, query), chosen) == chosen


def test_radix_counts_agree_whatever_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of bits that a pass counts by, which has an effect on speed alone."""
    steps = Steps(4, (9000, 3000), sizes_of((16, 64), "bfloat16"))
    generator = torch.Generator("cuda").manual_seed(0)
    rows = steps.pool.row(0, "index")
    rows.copy_(torch.randn(rows.shape, generator=generator, device="cuda"))
    queries = torch.randn(2, 64, 128, generator=generator, device="cuda").bfloat16()
    index = IndexQueries(queries, torch.randn(2, 64, generator=generator, device="cuda"), 2048, first_of_best)
    plan, _ = steps.decoded(backend_of(steps))
    expected = plan.select(0, index)[0]
    for bits in (5, 8):
        monkeypatch.setattr(select_tokens, "_BITS", bits)
        select_tokens._select_variant.cache_clear()
        assert torch.equal(plan.select(0, index)[0], expected), bits
    select_tokens._select_variant.cache_clear()


@pytest.mark.parametrize("in_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("num_heads", [64, 32, 3])
def test_store_index(num_heads: int, in_fp8: bool, pdl: bool) -> None:
    """Nearly what torch computes: numbers of FP8 may round to a neighbour."""
    for num_tokens in (1, 3, 300):
        queries = torch.randn(num_tokens, num_heads, 128, device="cuda").bfloat16()
        key, norm = torch.randn(num_tokens, 128, device="cuda").bfloat16(), torch.randn(2, 128, device="cuda")
        weights, table = torch.randn(num_tokens, num_heads, device="cuda"), RotaryEmbedding(64, 4096, 1e6).table.cuda()
        positions, slots = torch.randint(0, 4096, (num_tokens,), device="cuda"), 369 - torch.randperm(num_tokens).cuda()
        pool = torch.zeros(
            370, 1, 132 if in_fp8 else 128, device="cuda", dtype=torch.uint8 if in_fp8 else torch.bfloat16
        )
        found, wanted = ((torch.empty_like(queries), torch.empty_like(weights), pool.clone()) for _ in range(2))
        operands = (queries, key, *norm, 1e-6, table, positions, weights, 0.4)
        LayerKernels().store_index(*operands, *wanted, slots)
        store_index(*operands, *found, slots, pdl)
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-6)
        rows, expected = (unpacked(made[2][slots, 0]) for made in (found, wanted))
        bound = 1 / 8 if in_fp8 else 2**-6
        torch.testing.assert_close(found[0], wanted[0], rtol=bound, atol=bound)
        torch.testing.assert_close(rows, expected, rtol=bound, atol=bound / 16 * float(expected.abs().max()))
        assert not in_fp8 or (found[0] == wanted[0]).float().mean() > 0.99
        assert not found[2][: 370 - num_tokens].any(), "a write went astray"


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models that select 16 tokens; that of GLM-5 has layers that share a selection, and a draft behind them."""
    folder = tmp_path_factory.mktemp("sparse")
    save_checkpoint("deepseek-v3.2", folder / "deepseek-v3.2", {"index_head_dim": 32})
    save_appended_mtp("glm-5-shared", folder / "glm-5-shared", {"index_head_dim": 32})
    return {name: folder / name for name in ("deepseek-v3.2", "glm-5-shared")}


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5-shared"])
def test_greedy_equals_the_cpu(name: str, checkpoints: dict[str, Path]) -> None:
    """In float32: whole prompts and chunks, pages of one token, graphs and none, pages that were on the host, and the
    other backend."""
    expected = asked_twice(checkpoints[name], {}, "cpu")
    ways: tuple[Flags, ...] = (
        {},
        EAGER,
        {"page_size": 1, "chunked_prefill_size": 16},
        {"page_size": 4, "max_total_tokens": 160, "enable_hierarchical_cache": True, "hicache_ratio": 6.0},
        {"debug_cuda_graph": True},
        {"attention_backend": "torch"},
    )
    for flags in ways:
        assert asked_twice(checkpoints[name], flags) == expected, flags


def test_drafts_change_no_token(checkpoints: dict[str, Path]) -> None:
    """Chains and trees of GLM-5's own layer, which has an indexer of its own, and of a whole model."""
    path = checkpoints["glm-5-shared"]
    expected = asked_twice(path, {}, "cpu")
    whole: Flags = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(path)}
    for draft in ({"speculative_algorithm": "NEXTN"}, whole):
        for topk in (1, 2):
            flags = {**draft, "speculative_eagle_topk": topk, "speculative_num_steps": 3}
            assert asked_twice(path, flags) == expected, flags


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5-shared"])
def test_fp8_gives_the_same_tokens_in_graphs_and_chunks(name: str, checkpoints: dict[str, Path]) -> None:
    flags: Flags = {"kv_cache_dtype": "fp8_e4m3"}
    expected = asked_twice(checkpoints[name], flags | EAGER)
    assert asked_twice(checkpoints[name], flags) == expected
    assert asked_twice(checkpoints[name], flags | {"chunked_prefill_size": 16}) == expected


def test_queries_attend_to_the_blocks_of_the_definition() -> None:
    steps = BlockSteps(1, BLOCK_LENGTHS, BLOCKS, 64, (2, 16, 128), store_means, "cuda")
    backend = TritonAttentionBackend(steps.pool, 0, steps.rules, 32)
    steps.check(backend)
    steps.check(backend, [3] * len(BLOCK_LENGTHS))


def test_company_changes_no_bit_of_selected_blocks_in_a_fixed_order() -> None:
    """In a step of decode or of a prompt, beside others or alone, from lists of tokens or without."""
    num = len(BLOCK_LENGTHS)
    steps = BlockSteps(1, BLOCK_LENGTHS, BLOCKS, 64, (2, 16, 128), store_means, "cuda", "bfloat16")
    backend = TritonAttentionBackend(steps.pool, 0, steps.rules, 32, 32_768)
    queries = 2 * torch.randn(num, 32, 128, generator=steps.generator)
    together = steps.results(backend, queries, None, range(num))
    alone = [steps.results(backend, queries[i : i + 1], None, [i]) for i in range(num)]
    prompts = steps.results(backend, queries.repeat_interleave(5, 0), [5] * num, range(num))
    assert bool(together.isfinite().all())
    assert torch.equal(together, torch.cat(alone)) and torch.equal(together, prompts[4::5])
