"""The triton attention backend on the CPU: its kernels in Triton's interpreter against the textbook, and compiled for
GPUs that are not there.

Run as a script this file is the checks themselves: the interpreter must be chosen before triton is imported and must
not leak into other tests. Under pytest it starts that script and reports each check.
"""

from __future__ import annotations

import copy
import sys
from functools import partial

import numpy as np
import pytest
import torch
from attention_cases import SCALE, case, decode, requests_of, spoil, verify_cases
from triton_interpreter import compile_kernel, in_front_of_nan, outcomes_of, print_outcomes, set_up_interpreter

from fenceline.layers.attention.base import PLAIN

INTERPRETED = (
    "decode_at_page_boundaries",
    "decode_with_every_group",
    "decode_with_every_head_size",
    "decode_in_every_precision",
    "decode_however_it_is_cut",
    "decode_reads_no_column_past_the_end",
    "decode_of_padded_requests",
    "decode_of_strided_queries",
    "graph_plan_follows_its_tensors",
    "verify_of_random_trees",
    "verify_of_chains",
    "verify_in_every_precision",
    "verify_however_it_is_cut",
    "verify_reads_no_column_past_the_end",
    "verify_of_padded_requests",
    "verify_plan_follows_its_tensors",
    "extend_at_page_boundaries",
    "extend_with_every_group",
    "extend_with_every_head_size",
    "extend_in_every_precision",
    "extend_of_many_requests",
    "extend_with_split_keys",
    "extend_grid_fills_the_gpu",
    "extend_reads_no_column_past_the_end",
    "decode_with_rules",
    "verify_with_rules",
    "extend_with_rules",
    "windows_read_no_column_in_front",
    "decode_of_latents",
    "verify_of_latents",
    "extend_of_latents",
    "new_prompts",
    "random_shapes",
    "impossible_batches_are_refused",
    "impossible_trees_are_refused",
)
COMPILED = ("sm_80", "sm_90", "sm_100")
HEAD_DIMS = (16, 32, 64, 128, 8, 20, 80, 96)  # those that are no power of two are padded in registers
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter multiplies no bfloat16 matrices

interpreted = outcomes_of(__file__)
compiled = outcomes_of(__file__, "compile")


@pytest.mark.long
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


@pytest.mark.long
@pytest.mark.parametrize("arch", COMPILED)
def test_compiles_without_a_gpu(arch: str, compiled: dict[str, str]) -> None:
    assert compiled[arch] == ""


# --- the checks, run in the script -------------------------------------------------------------------------------


def extend(step, block_m: int = 16, block_n: int = 16, num_splits: int = 1) -> torch.Tensor:  # type: ignore[no-untyped-def]
    from fenceline.layers.kernels.triton.extend_attention import ExtendConfig, ExtendGrid, extend_attention

    keys, values = step.caches
    queries = in_front_of_nan(torch.cat(step.queries))
    lens = np.array(step.query_lens)
    group = queries.shape[1] // keys.shape[1]
    grid = ExtendGrid(int((-(-lens * group // block_m)).sum()), num_splits)
    config = ExtendConfig(block_m, block_n, 4, 2)
    return extend_attention(
        queries, keys, values, requests_of(step), starts_of(lens), grid, SCALE, config,
        rules=step.rules,
    )  # fmt: skip


def starts_of(query_lens: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
    return torch.from_numpy(np.concatenate([[0], np.cumsum(query_lens)])).int()


def agree(output: torch.Tensor, step, trees=None) -> None:  # type: ignore[no-untyped-def]
    """In the features that are defined."""
    expected = torch.cat(step.expected(trees))
    assert output.dtype == step.queries[0].dtype and output.is_contiguous()
    defined = output[..., : expected.shape[2]].double()
    torch.testing.assert_close(defined, expected, atol=TOLERANCES[output.dtype], rtol=0)


def check_decode_at_page_boundaries() -> None:
    for page_size in (1, 16, 64):
        lens = [1, page_size, page_size + 1, 2 * page_size, max(page_size - 1, 1), 2 * page_size + 1]
        step = case(lens, [1] * len(lens), page_size, (6, 2))
        agree(decode(step), step)


def check_decode_with_every_group() -> None:
    for group in (*range(1, 9), 17, 70):
        step = case([37, 16], [1, 1], 16, (2 * group, 2))
        agree(decode(step), step)
    agree(backend_output(step, decoding=True, queries=torch.cat(step.queries)), step)


def check_decode_with_every_head_size() -> None:
    for head_dim in HEAD_DIMS:
        step = case([70, 5], [1, 1], 16, (4, 2), head_dim=head_dim)
        agree(decode(step, 5), step)


def check_decode_in_every_precision() -> None:
    for dtype in TOLERANCES:
        for kv_dtype in (dtype, torch.float8_e4m3fn):
            step = case([70, 5], [1, 1], 16, (4, 2), head_dim=64, dtype=dtype, kv_dtype=kv_dtype)
            agree(decode(step), step)


def check_decode_however_it_is_cut() -> None:
    """Stretches that are empty, that end where a request ends, that cut one request many times or two requests."""
    random = np.random.default_rng(5)
    for num_workers in range(1, 9):
        lens = [int(n) for n in random.integers(1, 90, size=random.integers(1, 5))]
        step = case(lens, [1] * len(lens), 1, (1, 1), seed=num_workers)
        agree(decode(step, num_workers), step)
    step = case([128], [1], 1, (3, 1))
    for merge_elements in (2048, 64, 16):  # 8 pieces at once, 4 and 1
        agree(decode(step, 8, merge_elements=merge_elements), step)


def check_decode_reads_no_column_past_the_end() -> None:
    """Such columns name pages far outside the pool here: to follow one is to crash."""
    for page_size in (1, 64):
        step = case([1, 65, 64], [1, 1, 1], page_size, (2, 1))
        spoil(step)
        agree(decode(step), step)


def check_decode_of_padded_requests() -> None:
    """Row 0 and length 1 read the first slot of the sink page, and nothing of them reaches the others."""
    step = case([40, 9], [1, 1], 16, (2, 1))
    step.rows = step.rows + 1
    step.page_table = torch.cat([torch.zeros_like(step.page_table[:1]), step.page_table])
    alone = decode(step)
    step.rows = torch.cat([step.rows, torch.zeros(3, dtype=torch.int64)])
    step.seq_lens = step.seq_lens + [1, 1, 1]
    step.queries = step.queries + [torch.randn(1, 2, 16) for _ in range(3)]
    step.pool.row(1, "v")[0] = 7.0
    together = decode(step)
    torch.testing.assert_close(together[:2], alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(together[2:], torch.full_like(together[2:], 7.0))


def check_decode_of_strided_queries() -> None:
    """q as a view of qkv, as models hand it over."""
    step = case([40, 9], [1, 1], 16, (4, 2))
    qkv = torch.full((2, 8, 16), float("nan"))
    qkv[:, :4] = torch.cat(step.queries)
    step.queries = list(qkv[:, :4].split(1))
    agree(backend_output(step, decoding=True, queries=qkv[:, :4]), step)


def backend_output(step, decoding: bool, queries: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend
    from fenceline.layers.forward_batch import AttentionInputs, ForwardMode

    query_lens = np.array(step.query_lens)
    inputs = AttentionInputs(
        mode=ForwardMode.DECODE if decoding else ForwardMode.EXTEND,
        page_table=step.page_table,
        rows=step.rows,
        seq_lens=torch.tensor(step.seq_lens),
        seq_lens_cpu=np.array(step.seq_lens),
        query_lens_cpu=query_lens,
        query_starts=None if decoding else starts_of(query_lens),
    )
    heads = queries.shape[1]
    plan = TritonAttentionBackend(step.pool, first_layer=1, rules=step.rules_there(), num_heads=heads).plan(inputs)
    plan.prepare()
    k = torch.cat([keys[-new:] for keys, new in zip(step.keys, step.query_lens, strict=True)])
    output = plan.forward(1, queries, k, k, SCALE)
    given = torch.full_like(output, torch.nan)
    plan.forward_into(1, queries, k, k, SCALE, given)
    assert torch.equal(given[..., : step.rules.value_dim], output[..., : step.rules.value_dim])
    return output


def check_graph_plan_follows_its_tensors() -> None:
    """A plan made once serves whatever rows and lengths its tensors hold later."""
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend
    from fenceline.layers.forward_batch import GraphDecodeInputs

    step = case([50, 90, 33], [1, 1, 1], 16, (2, 1))
    rows, seq_lens = step.rows[:2].clone(), torch.tensor(step.seq_lens[:2])
    plan = TritonAttentionBackend(step.pool).plan_graph(GraphDecodeInputs(step.page_table, rows, seq_lens, 90))
    assert plan is not None
    expected = step.expected()
    for members in ([0, 1], [1, 2], [2, 0]):
        rows.copy_(step.rows[members])
        seq_lens.copy_(torch.tensor(step.seq_lens)[members])
        q = torch.cat([step.queries[i] for i in members])
        output = plan.forward(1, q, q[:, :1], q[:, :1], SCALE)
        torch.testing.assert_close(output.double(), torch.cat([expected[i] for i in members]), atol=1e-5, rtol=0)


def verify(step, num_nodes: int, trees, num_sms: int = 3) -> torch.Tensor:  # type: ignore[no-untyped-def]
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend

    backend = TritonAttentionBackend(step.pool, first_layer=1, rules=step.rules_there())
    backend.num_sms = num_sms
    backend._workspaces.clear()  # they have as many workers as there are multiprocessors
    output = step.verify(backend, num_nodes, trees)
    for workspace in backend._workspaces.values():
        assert not workspace.num_done.any()
    return output


def check_verify_of_random_trees() -> None:
    for lens, trees, num_queries, page_size, heads in verify_cases():
        step = case(lens, [num_queries] * len(lens), page_size, heads)
        agree(verify(step, len(trees[0]), trees), step, trees)


def check_verify_of_chains() -> None:
    """Without masks attention is causal."""
    for page_size, num_queries, num_nodes in ((1, 4, 4), (16, 2, 5), (64, 33, 33)):
        step = case([num_nodes, num_nodes + 40, 90], [num_queries] * 3, page_size, (4, 2))
        agree(verify(step, num_nodes, None), step)


def check_verify_in_every_precision() -> None:
    for dtype in TOLERANCES:
        for head_dim in (64, 96, 128):
            trees = [[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 3]]
            step = case([70, 6], [5, 5], 16, (4, 2), head_dim=head_dim, dtype=dtype)
            agree(verify(step, 5, trees), step, trees)


def check_verify_however_it_is_cut() -> None:
    """Workers whose section holds none of a query's tokens, and several tiles of rows."""
    trees = [[-1, 0, 0, 1, 2, 2, 0, 6] * 5] * 2
    trees = [[-1, *(min(parent + 1, node) for node, parent in enumerate(tree[:-1]))] for tree in trees]
    step = case([64 + 40, 40], [40, 40], 1, (3, 1))
    for num_sms in (1, 2, 5, 9):
        agree(verify(step, 40, trees, num_sms=num_sms), step, trees)


def check_verify_reads_no_column_past_the_end() -> None:
    for page_size in (1, 64):
        trees = [[-1, 0, 0]] * 3
        step = case([3, 65, 64], [3] * 3, page_size, (2, 1))
        spoil(step)
        agree(verify(step, 3, trees), step, trees)


def check_verify_of_padded_requests() -> None:
    """Row 0, the sink: finite numbers, even for requests shorter than their queries, and nothing of them reaches the
    others."""
    trees = [[-1, 0, 0, 1]] * 2
    step = case([40, 9], [4, 4], 16, (2, 1))
    step.rows = step.rows + 1
    step.page_table = torch.cat([torch.zeros_like(step.page_table[:1]), step.page_table])
    alone = verify(step, 4, trees)
    for length in (1, 4):
        padded = copy.copy(step)
        padded.rows = torch.cat([step.rows, torch.zeros(2, dtype=torch.int64)])
        padded.seq_lens, padded.query_lens = step.seq_lens + [length] * 2, [4] * 4
        padded.queries = step.queries + [torch.randn(4, 2, 16) for _ in range(2)]
        padded.keys, padded.values = step.keys + step.keys, step.values + step.values
        together = verify(padded, 4, trees * 2)
        torch.testing.assert_close(together[:8], alone, atol=1e-6, rtol=0)
        assert together.isfinite().all()


def check_verify_plan_follows_its_tensors() -> None:
    """A plan made once serves whatever rows, lengths and masks its tensors hold later."""
    from attention_cases import bits_of

    from fenceline.layers.attention.triton_backend import TritonAttentionBackend
    from fenceline.layers.forward_batch import QueryTree, VerifyInputs

    trees = [[-1, 0, 1], [-1, 0, 0], [-1, 0, 0]]
    step = case([50, 90, 33], [3, 3, 3], 16, (2, 1))
    lens, masks = torch.tensor(step.seq_lens), bits_of(trees, 3)
    rows, seq_lens, ancestors = step.rows[:2].clone(), lens[:2].clone(), masks[:2].clone()
    inputs = VerifyInputs(step.page_table, rows, seq_lens, np.array([90, 90]), QueryTree(3, 3, ancestors), num_heads=2)
    plan = TritonAttentionBackend(step.pool).plan_verify(inputs)
    assert plan is not None
    expected = step.expected(trees)
    for members in ([0, 1], [1, 2], [2, 0]):
        for tensor, values in ((rows, step.rows), (seq_lens, lens), (ancestors, masks)):
            tensor.copy_(values[members])
        q = torch.cat([step.queries[i] for i in members])
        output = plan.forward(1, q, q[:, :1], q[:, :1], SCALE)
        torch.testing.assert_close(output.double(), torch.cat([expected[i] for i in members]), atol=1e-5, rtol=0)


def check_layers_of_a_draft() -> None:
    """A backend is made for the layers that it attends in; those in front of them may have other heads."""
    from fenceline.config.kv_layout import KVLayout, keys_and_values
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend
    from fenceline.layers.forward_batch import GraphDecodeInputs
    from fenceline.mem_cache.kv_pool import KVPool

    for num_queries in (1, 3):
        step = case([50, 90, 33], [num_queries] * 3, 16, (4, 2))
        own, others = step.pool.layout.layers[1], keys_and_values(3, 64, "float32")
        pool = KVPool(step.pool.num_pages, KVLayout(16, (others, own)), torch.device("cpu"))
        pool.row(1, "k").copy_(step.pool.row(1, "k"))
        pool.row(1, "v").copy_(step.pool.row(1, "v"))
        step.pool = pool
        backend = TritonAttentionBackend(pool, first_layer=1)
        agree(step.verify(backend, num_queries, None), step)
        plan = backend.plan_graph(GraphDecodeInputs(step.page_table, step.rows, torch.tensor(step.seq_lens), 90))
        if num_queries == 1:
            assert plan is not None
            q = torch.cat(step.queries)
            agree(plan.forward(1, q, q[:, :2], q[:, :2], SCALE), step)


def check_impossible_trees_are_refused() -> None:
    step = case([70], [2], 16, (2, 1))
    for num_nodes, trees in ((1, None), (65, None), (2, [[-1, 0]] * 2)):
        with pytest.raises(AssertionError):
            verify(step, num_nodes, trees)


def check_extend_at_page_boundaries() -> None:
    for page_size in (1, 16, 64):
        p = page_size
        requests = [(0, 1), (p, p), (p - 1, 2), (2 * p, 1), (0, p + 1), (1, 7)]
        step = case([prefix + new for prefix, new in requests], [new for _, new in requests], p, (4, 2))
        agree(extend(step), step)


def check_extend_with_every_group() -> None:
    for group in range(1, 9):
        step = case([37, 5], [9, 5], 16, (group, 1))
        agree(extend(step, 32, 16), step)


def check_extend_with_every_head_size() -> None:
    for head_dim in HEAD_DIMS:
        step = case([70, 5], [30, 5], 16, (4, 2), head_dim=head_dim)
        agree(extend(step, 16, 32, 1 if head_dim < 80 else 3), step)
    agree(backend_output(step, decoding=False, queries=torch.cat(step.queries)), step)


def check_extend_in_every_precision() -> None:
    for dtype in TOLERANCES:
        for kv_dtype in (dtype, torch.float8_e4m3fn):
            step = case([70, 5], [30, 5], 16, (4, 2), head_dim=64, dtype=dtype, kv_dtype=kv_dtype)
            agree(extend(step, 64, 32), step)


def check_extend_of_many_requests() -> None:
    random = np.random.default_rng(3)
    lens = [int(n) for n in random.integers(1, 60, size=20)]
    step = case(lens, [int(random.integers(1, n + 1)) for n in lens], 16, (2, 1))
    agree(extend(step, 16, 32), step)
    agree(backend_output(step, decoding=False, queries=torch.cat(step.queries)), step)


def check_extend_with_split_keys() -> None:
    """Splits that a short request leaves empty, splits of which early rows see nothing."""
    for num_splits in (2, 3, 7):
        step = case([70, 3, 64], [30, 3, 1], 16, (3, 1))
        agree(extend(step, 16, 16, num_splits), step)


def check_extend_grid_fills_the_gpu() -> None:
    from fenceline.layers.kernels.triton.extend_attention import ExtendConfig, ExtendGrid, extend_grid

    config = ExtendConfig(64, 64, 4, 3)

    def grid(query_lens: list[int], seq_lens: list[int]) -> ExtendGrid:
        return extend_grid(np.array(query_lens), np.array(seq_lens), (32, 8), config, 132)

    assert grid([16], [8192]) == ExtendGrid(1, 16)
    assert grid([16], [700]) == ExtendGrid(1, 2)
    assert grid([17, 1], [400, 9]) == ExtendGrid(3, 1)
    assert grid([1024], [8192]) == ExtendGrid(64, 1)


def check_extend_reads_no_column_past_the_end() -> None:
    for page_size in (1, 64):
        step = case([1, 65, 64, 40], [1, 3, 64, 2], page_size, (2, 1))
        spoil(step)
        agree(extend(step), step)


def rules_of(num_heads: int):  # type: ignore[no-untyped-def]
    """Windows of less than a block, of several blocks and of more than any request has; soft caps and sinks."""
    from fenceline.layers.attention.base import LayerRules

    sinks = torch.randn(num_heads, generator=torch.Generator().manual_seed(9))
    yield LayerRules(window=5)
    yield LayerRules(1000, 0.8)
    yield LayerRules(41, 0.8, sinks)


def check_decode_with_rules() -> None:
    for rules in rules_of(4):
        for num_workers in (1, 5):
            step = case([70, 5, 33, 90], [1] * 4, 16, (4, 2), rules=rules)
            agree(decode(step, num_workers), step)
        agree(decode(case([90], [1], 1, (4, 2), rules=rules)), case([90], [1], 1, (4, 2), rules=rules))


def check_verify_with_rules() -> None:
    for rules in rules_of(4):
        for num_queries, num_nodes in ((2, 5), (12, 12)):
            step = case([num_nodes, num_nodes + 40, 90], [num_queries] * 3, 16, (4, 2), rules=rules)
            agree(verify(step, num_nodes, None), step)
    for lens, trees, num_queries, page_size, heads in list(verify_cases())[:3]:
        for rules in rules_of(heads[0]):
            if rules.window is None or rules.window >= len(trees[0]):
                step = case(lens, [num_queries] * len(lens), page_size, heads, rules=rules)
                agree(verify(step, len(trees[0]), trees), step, trees)


def check_extend_with_rules() -> None:
    for rules in rules_of(6):
        for block_m, block_n, num_splits in ((32, 16, 1), (16, 32, 3)):
            step = case([70, 3, 64, 50], [30, 3, 1, 50], 16, (6, 2), rules=rules)
            agree(extend(step, block_m, block_n, num_splits), step)
        agree(backend_output(step, decoding=False, queries=torch.cat(step.queries)), step)


def check_windows_read_no_column_in_front() -> None:
    """Pages in front of a window may be another request's by now: to follow one here is to crash."""
    from fenceline.layers.attention.base import LayerRules

    rules = LayerRules(window=20)
    for page_size in (1, 16):
        for query_lens in ([1, 1], [3, 30]):
            step = case([90, 70], query_lens, page_size, (2, 1), rules=rules)
            for row, length, new in zip(step.rows, step.seq_lens, query_lens, strict=True):
                step.page_table[row, : (length - new - 19) // page_size] = 1 << 30
            agree(decode(step) if query_lens == [1, 1] else extend(step), step)


def latents(value_dim: int = 32):  # type: ignore[no-untyped-def]
    from fenceline.layers.attention.base import LayerRules

    return LayerRules(rows=("latent", "latent"), value_dim=value_dim)


# Features of a row and how many of them are the value; a row may be all value.
LATENTS = ((48, 32), (34, 24), (64, 64), (40, 16))


def rows_in_front_of_nan(step) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """The step's queries as a layer of latents hands them over: in front of each token's row, which is NaN here."""
    queries = torch.cat(step.queries)
    rows = queries.new_full((len(queries), queries.shape[1] + 1, queries.shape[2]), torch.nan)
    rows[:, :-1] = queries
    return rows[:, :-1]


def check_decode_of_latents() -> None:
    """For few and many heads, which take several tiles, and a worker with more blocks than its share."""
    for page_size, (width, value_dim), heads in zip((1, 16, 64, 16), LATENTS, (4, 20, 5, 70), strict=True):
        options = {"head_dim": width, "rules": latents(value_dim)}
        step = case([70, 1, page_size, 33], [1] * 4, page_size, (heads, 1), **options)
        spoil(step)
        for num_workers, min_blocks, merge_apart in ((1, 1, True), (7, 2, True), (7, 1, False)):
            cut = {"min_blocks": min_blocks, "merge_apart": merge_apart}
            agree(decode(step, num_workers, queries=rows_in_front_of_nan(step), **cut), step)
        agree(backend_output(step, decoding=True, queries=rows_in_front_of_nan(step)), step)
    alone = case([90], [1], 16, (20, 1), head_dim=176, rules=latents(160))  # its sums are merged in two chunks
    agree(decode(alone, 8, merge_apart=True), alone)
    plain = case([70, 5, 33], [1] * 3, 16, (4, 2))  # a merge apart is for any rows
    agree(decode(plain, 5, merge_apart=True), plain)
    many = case(
        [3, 40] * 33, [1] * 66, 16, (4, 1), head_dim=48, rules=latents()
    )  # requests merged by some rows at once
    agree(decode(many, 8, merge_apart=True), many)
    for dtype in TOLERANCES:
        step = case(
            [70, 5], [1, 1], 16, (20, 1), head_dim=48, dtype=dtype, kv_dtype=torch.float8_e4m3fn, rules=latents()
        )
        agree(backend_output(step, decoding=True, queries=rows_in_front_of_nan(step)), step)


def check_verify_of_latents() -> None:
    for lens, trees, num_queries, page_size, heads in list(verify_cases())[:4]:
        step = case(lens, [num_queries] * len(lens), page_size, (5 * heads[0], 1), head_dim=48, rules=latents())
        agree(verify(step, len(trees[0]), trees), step, trees)
    step = case([5, 45, 90], [2] * 3, 1, (20, 1), head_dim=34, rules=latents(24))
    spoil(step)
    agree(verify(step, 5, None), step)


def check_extend_of_latents() -> None:
    """Tiles within a token's heads and over several tokens, with split keys and without."""
    for page_size, (width, value_dim), heads in zip((1, 16, 64, 16), LATENTS, (4, 20, 5, 70), strict=True):
        lens, new = [70, 3, 64], [12 if heads < 70 else 3, 3, 1]
        step = case(lens, new, page_size, (heads, 1), head_dim=width, rules=latents(value_dim))
        spoil(step)
        for block_m, block_n, num_splits in ((32, 32, 1), (64, 32, 3)):
            agree(extend(step, block_m, block_n, num_splits), step)
    agree(backend_output(step, decoding=False, queries=rows_in_front_of_nan(step)), step)


def check_new_prompts() -> None:
    """Keys are wider than values, as wide, or wide in odd ways; some prompts have few tokens."""
    from fenceline.layers.attention.base import AttentionBackend
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend

    step = case([3], [1], 16, (3, 1), head_dim=48, rules=latents())
    backend = TritonAttentionBackend(step.pool, 1, step.rules_there(), num_heads=3)
    for (key_dim, value_dim), dtype in zip(((48, 32), (34, 24), (32, 32)), (*TOLERANCES, torch.float32), strict=True):
        lens = np.array([70, 1, 33])
        starts = torch.tensor([0, 70, 71, 104], dtype=torch.int32)
        q, k, v = (torch.randn(104, 3, dim).to(dtype) for dim in (key_dim, key_dim, value_dim))
        wanted = AttentionBackend.plan_new(backend, lens, starts)(q.double(), k.double(), v.double(), 0.3)
        found = backend.plan_new(lens, starts)(q, k, v, 0.3)
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCES[dtype], rtol=0)


def check_random_shapes() -> None:
    """Lengths, pages, groups, head sizes, rules and cuts at random. Behind the tokens of a request are NaN and pages
    that do not exist, behind the queries is NaN."""
    random = np.random.default_rng(11)
    for number in range(8):
        page_size, head_dim, group, cut = (
            int(random.choice(of)) for of in ((1, 16, 64), HEAD_DIMS, (1, 2, 3), range(1, 6))
        )
        lens = [int(n) for n in random.integers(1, 130, size=random.integers(1, 4))]
        rules = [PLAIN, *rules_of(2 * group)][number % 4]
        for new in ([1] * len(lens), [int(random.integers(1, min(n, 20) + 1)) for n in lens]):
            step = case(lens, new, page_size, (2 * group, 2), seed=number, head_dim=head_dim, rules=rules)
            spoil(step)
            if max(new) == 1:
                agree(decode(step, cut), step)
            else:
                agree(extend(step, (16, 32)[number % 2], (16, 32)[cut % 2], cut), step)


def check_impossible_batches_are_refused() -> None:
    step = case([9, 9], [9, 9], 16, (4, 2))
    for query_lens in ([0, 9], [9, 10]):
        step.query_lens = query_lens
        with pytest.raises(AssertionError):
            backend_output(step, decoding=False, queries=torch.cat(step.queries))


def compile_for(arch: str) -> None:
    """The kernels as an 8B model uses them, down to machine code, with at most a GPU's shared memory. For sm_90 in all
    their variants, for the others the largest of each: their memory and their instructions are what differs."""
    from fenceline.layers.kernels.triton import decode_attention, extend_attention
    from fenceline.layers.kernels.triton import kv_rows as kv_rows_triton

    moved = compile_kernel(kv_rows_triton._move_kernel, {"STEPS": 8, "BLOCK": 512}, arch, 4, 1, False)
    gathers, scatters = moved.split("bar.sync")  # one thread's targets are others' sources
    assert "st.global" not in gathers and "ld.global" not in scatters
    common = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "DIM_PAD": 128, "GROUP": 4, "PAGE_SIZE": 1}
    common |= {"BATCH_PAD": 64, "BLOCK_N": 64, "SEGMENT": 0, "WINDOW": 0, "CAPS": False, "SINKS": False}
    common |= {"TAIL": 0, "TAIL_PAD": 16, "SHARED": False}
    pdl = arch != "sm_80"
    decode = {
        "NUM_WORKERS": 33,
        "MIN_BLOCKS": 1,
        "APART": False,
        "MAX_SEGMENTS": 0,
        "PATHS": 0,
        "PATH_NODES": 0,
        "MERGE": 16,
        "PDL": pdl,
        "NUM_PREFETCHED": 2 if pdl else 0,
    }
    one = {"NUM_QUERIES": 1, "NUM_NODES": 1, "TREE": False, "ROWS": 16, "MERGED_ROWS": 4, "PART": 4}
    chain = one | {"NUM_QUERIES": 4, "NUM_NODES": 4, "MERGED_ROWS": 16, "PART": 16}
    tree = one | {
        "NUM_QUERIES": 60,
        "NUM_NODES": 64,
        "TREE": True,
        "ROWS": 64,
        "MERGED_ROWS": 64,
        "PART": 64,
        "MERGE": 1,
    }
    extend, strides = extend_attention._extend_kernel, {"Q_STRIDE": 6144}
    ruled = common | {"WINDOW": 4096, "CAPS": True, "SINKS": True}
    compile_kernel(decode_attention._decode_kernel, ruled | decode | tree, arch, 4, 3, pdl)
    compile_kernel(extend, ruled | {"BLOCK_M": 128, "SPLIT": False} | strides, arch, 8, 3, False)
    wide = ruled | {"HEAD_DIM": 256, "DIM_PAD": 256, "GROUP": 2, "BLOCK_N": 32}  # Gemma's heads
    compile_kernel(decode_attention._decode_kernel, wide | decode | tree, arch, 8, 2, pdl)
    compile_kernel(extend, wide | {"BLOCK_M": 64, "SPLIT": False} | strides, arch, 8, 2, False)
    if pdl:  # sm_80 has no instruction for FP8
        compile_kernel(decode_attention._decode_kernel, common | decode | one, arch, 4, 5, pdl, "fp8e4nv")
        compile_kernel(extend, common | {"BLOCK_M": 128, "SPLIT": False} | strides, arch, 8, 3, False, "fp8e4nv")
    if arch != "sm_90":
        return
    for nodes, stages in ((one, 5), (chain, 5), (tree, 3)):
        compile_kernel(decode_attention._decode_kernel, common | decode | nodes, arch, 4, stages, pdl)
    compile_kernel(extend, common | {"BLOCK_M": 128, "SPLIT": False} | strides, arch, 8, 3, False)
    compile_kernel(extend, common | {"BLOCK_M": 16, "SPLIT": True} | strides, arch, 4, 5, False)
    compile_kernel(decode_attention._decode_kernel, wide | decode | one | {"MERGE": 8}, arch, 4, 3, pdl)
    compile_kernel(extend, wide | {"BLOCK_M": 16, "SPLIT": True} | strides, arch, 4, 3, False)
    phi = common | {"HEAD_DIM": 96, "GROUP": 1, "NUM_KV_HEADS": 32}  # Phi-3-mini's heads
    compile_kernel(decode_attention._decode_kernel, phi | decode | one | {"MERGED_ROWS": 1, "PART": 1}, arch, 4, 5, pdl)
    compile_kernel(extend, phi | {"BLOCK_M": 128, "SPLIT": False} | strides, arch, 8, 3, False)
    # A latent row of DeepSeek's models, for 16 and 128 heads, as decode_config and extend_config cut the work.
    row = {"NUM_KV_HEADS": 1, "HEAD_DIM": 512, "DIM_PAD": 512, "TAIL": 64, "TAIL_PAD": 64, "SHARED": True}
    row = common | row | {"BLOCK_N": 64, "PAGE_SIZE": 16}
    few = decode | one | {"GROUP": 16, "MERGED_ROWS": 16, "PART": 16, "MERGE": 1, "MIN_BLOCKS": 2, "APART": True}
    many = few | {"GROUP": 128, "ROWS": 64, "MERGED_ROWS": 64, "PART": 32}
    few |= {"BLOCK_N": 32}
    compile_kernel(decode_attention._decode_kernel, row | few, arch, 4, 3, pdl)
    ptx = compile_kernel(decode_attention._decode_kernel, row | few, arch, 4, 3, pdl, "fp8e4nv")
    assert ptx.count("cvt.rn.f16x2.e4m3x2") == 32 * 576 // 128 // 2, "a block is converted once"
    assert ptx.count("cp.async.cg.shared.global") >= 2 * 32 * 576 // 128 // 16, "and copied ahead of time"
    for kv, stages in (("bf16", 2), ("fp8e4nv", 3)):
        compile_kernel(decode_attention._decode_kernel, row | many, arch, 8, stages, pdl, kv)
    compile_kernel(extend, row | {"GROUP": 128, "BLOCK_M": 64, "SPLIT": False} | strides, arch, 8, 2, False)
    # New prompts of these models, with keys of 192 features and values of 128.
    heads = {"NUM_KV_HEADS": 128, "GROUP": 1, "TAIL": 64, "TAIL_PAD": 64, "BLOCK_M": 128, "BLOCK_N": 128}
    compile_kernel(extend, common | heads | {"SPLIT": False} | strides, arch, 8, 2, False)
    merge = {name: (row | many)[name] for name in decode_attention._merge_pieces_kernel.arg_names if name in row | many}
    for part, chunk in ((1, 128), (4, 512)):
        cut = {"PART": part, "CHUNK": chunk, "MERGE": 8192 // (part * chunk)}
        ptx = compile_kernel(decode_attention._merge_pieces_kernel, merge | cut, arch, 4, 1, True)
        assert "ld.global" not in ptx.split("griddepcontrol.wait")[0].replace("ld.global.b64", "")  # but lengths


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        print_outcomes({arch: partial(compile_for, arch) for arch in COMPILED})
    else:
        set_up_interpreter()
        print_outcomes({name: globals()[f"check_{name}"] for name in INTERPRETED})
