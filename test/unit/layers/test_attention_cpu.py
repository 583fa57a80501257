"""The CPU's attention backend and the reference against the textbook in float64, over random page tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import SCALE, Case, random_tree, verify_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fenceline.config.kv_layout import KVLayout
from fenceline.layers.attention import cpu_backend, shared_prefixes
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.attention.cpu_backend import CpuAttentionBackend, decode_groups
from fenceline.layers.attention.reference import max_tokens
from fenceline.layers.attention.shared_prefixes import SharedPrefix, find_shared_prefixes
from fenceline.layers.forward_batch import AttentionInputs, ForwardMode, GraphDecodeInputs
from fenceline.mem_cache.kv_pool import KVPool


class Work(TorchDispatchMode):
    """Counts what a step does in one layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.reads: list[int] = []  # tokens of the pool's keys, for each gather
        self.attention_calls = 0
        self._keys = case.pool.row(1, "k").data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.index_select.default and args[0].data_ptr() == self._keys:
            self.reads.append(len(args[2]))
        self.attention_calls += "attention" in func.name()
        return func(*args, **(kwargs or {}))


def work_of(case: Case, mode: ForwardMode) -> Work:
    with Work(case) as work:
        case.run(mode)
    return work


heads = st.sampled_from([(1, 1), (4, 4), (6, 2), (4, 1)])
page_sizes = st.sampled_from([1, 16, 32, 64])
few = settings(max_examples=40)  # each is a step of several requests


@few
@given(st.lists(st.integers(1, 140), min_size=1, max_size=9), page_sizes, heads, st.integers(0, 99))
def test_decode_equals_the_textbook(seq_lens: list[int], page_size: int, heads: tuple[int, int], seed: int) -> None:
    Case(seq_lens, [1] * len(seq_lens), page_size, heads, seed).check(ForwardMode.DECODE)


@few
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=5), page_sizes, heads)
def test_extend_equals_the_textbook(requests: list[tuple[int, int]], page_size: int, heads: tuple[int, int]) -> None:
    seq_lens = [prefix + new for prefix, new in requests]
    Case(seq_lens, [new for _, new in requests], page_size, heads, seed=7).check(ForwardMode.EXTEND)


def test_extend_in_several_query_blocks() -> None:
    """Chunks longer than a block, after prefixes of different lengths, share one mask."""
    Case([700, 300, 258, 600], [600, 257, 256, 1], 16, (2, 1), seed=1).check(ForwardMode.EXTEND)


@few
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5),
    st.integers(1, 64).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))),
    page_sizes,
    heads,
    st.booleans(),
)
def test_verify_equals_the_textbook(
    committed: list[int], sizes: tuple[int, int], page_size: int, heads: tuple[int, int], is_chain: bool
) -> None:
    num_queries, num_nodes = sizes
    lens = [prefix + num_nodes for prefix in committed]
    random = np.random.default_rng(sum(lens))
    trees = None if is_chain else [random_tree(random, num_nodes) for _ in lens]
    step = Case(lens, [num_queries] * len(lens), page_size, heads, seed=4)
    step.check_verify(num_nodes, trees, bound=2)


rules_of_six = st.builds(
    LayerRules,
    st.sampled_from([None, 1, 7, 30, 64, 500]),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([None, torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -2.0])]),
)


@few
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=5),
    page_sizes,
    st.sampled_from([(6, 2), (6, 6), (6, 1)]),
    rules_of_six,
    st.booleans(),
)
def test_windows_soft_caps_and_sinks_equal_the_textbook(
    requests: list[tuple[int, int]], page_size: int, heads: tuple[int, int], rules: LayerRules, decodes: bool
) -> None:
    requests = [(prefix, 1 if decodes else new) for prefix, new in requests]
    seq_lens, query_lens = [a + b for a, b in requests], [new for _, new in requests]
    step = Case(seq_lens, query_lens, page_size, heads, seed=7, rules=rules)
    step.check(ForwardMode.DECODE if decodes else ForwardMode.EXTEND)
    if not decodes:
        return
    # The same from inside a graph.
    inputs = GraphDecodeInputs(step.page_table, step.rows, torch.tensor(seq_lens), max(seq_lens))
    for backend in step.backends:
        plan = backend.plan_graph(inputs)
        assert plan is not None
        plan.prepare()
        q = torch.cat(step.queries)
        kv = q[:, : heads[1]]
        output = plan.forward(1, q, kv, kv, SCALE)
        torch.testing.assert_close(output.double(), torch.cat(step.expected()), atol=1e-5, rtol=0)


def test_extend_with_rules_in_several_query_blocks() -> None:
    rules = LayerRules(window=200, soft_cap=0.8)
    Case([700, 300, 258, 600], [600, 257, 256, 1], 16, (2, 1), seed=1, rules=rules).check(ForwardMode.EXTEND)


@few
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5),
    st.integers(1, 30).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))),
    rules_of_six,
    st.booleans(),
)
def test_verify_with_rules_equals_the_textbook(
    committed: list[int], sizes: tuple[int, int], rules: LayerRules, is_chain: bool
) -> None:
    num_queries, num_nodes = sizes
    is_chain = is_chain or (rules.window is not None and rules.window < num_nodes)
    lens = [prefix + num_nodes for prefix in committed]
    random = np.random.default_rng(sum(lens))
    trees = None if is_chain else [random_tree(random, num_nodes) for _ in lens]
    step = Case(lens, [num_queries] * len(lens), 16, (6, 2), seed=4, rules=rules)
    step.check_verify(num_nodes, trees, bound=2)


def test_a_tree_that_is_larger_than_the_window_is_refused() -> None:
    step = Case([9], [3], 16, (2, 1), seed=4, rules=LayerRules(window=2))
    with pytest.raises(AssertionError, match="a window of 2 tokens and a tree of 3"):
        step.check_verify(3, [[-1, 0, 1]])


def test_verify_of_the_trees_of_the_triton_kernel_s_tests() -> None:
    for lens, trees, num_queries, page_size, heads in verify_cases():
        step = Case(lens, [num_queries] * len(lens), page_size, heads, seed=1, head_dim=16)
        step.check_verify(len(trees[0]), trees)


def test_verify_of_more_tokens_than_are_gathered_at_once() -> None:
    lens, tree = [900, 17, 800, 300, 1000], [-1, 0, 0, 2]
    step = Case(lens, [4] * 5, 16, (4, 2), seed=1, head_dim=64)
    most = max_tokens(step.pool, cpu_backend._GATHER_BYTES)
    with Work(step) as work:
        step.verify(CpuAttentionBackend(step.pool), 4, [tree] * 5)
    assert max(work.reads) <= most < sum(work.reads)
    step.check_verify(4, [tree] * 5)


def test_decode_of_many_requests_with_a_few_long_ones() -> None:
    lens = [50 + i % 7 for i in range(60)] + [1500, 900]
    Case(lens, [1] * len(lens), 16, (2, 1), seed=5).check(ForwardMode.DECODE)


@pytest.mark.parametrize("mode", list(ForwardMode))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(mode: ForwardMode, dtype: torch.dtype, tolerance: float) -> None:
    new = [1, 1, 1] if mode is ForwardMode.DECODE else [5, 30, 2]
    case = Case([5, 90, 40], new, 16, (4, 2), seed=2, dtype=dtype, head_dim=16)
    assert all(output.dtype == dtype for output in case.run(mode))
    case.check(mode, tolerance)


def test_a_batch_does_not_change_a_requests_result() -> None:
    """Padding to a longer neighbour must not leak in: alone and in company the output is the same."""
    together = Case([60, 61, 100, 9], [1] * 4, 16, (4, 2), seed=3)
    outputs = together.run(ForwardMode.DECODE)
    for i, length in enumerate(together.seq_lens):
        alone = Case([length], [1], 16, (4, 2), seed=3)
        alone.pool, alone.page_table = together.pool, together.page_table
        alone.rows, alone.slots = together.rows[i : i + 1], together.slots[i : i + 1]
        alone.keys, alone.values = together.keys[i : i + 1], together.values[i : i + 1]
        alone.queries = together.queries[i : i + 1]
        torch.testing.assert_close(alone.run(ForwardMode.DECODE)[0], outputs[i], atol=1e-6, rtol=0)


# --- pages that several requests begin with ----------------------------------------------------------


@pytest.fixture
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of any length are attended to on their own, and single queries of extend steps together."""
    monkeypatch.setattr(shared_prefixes, "_WORTH_PAIRS", 1)
    monkeypatch.setattr(cpu_backend, "_MIN_SINGLES", 1)


@pytest.mark.usefixtures("always_worth_it")
@settings(few, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=2, max_size=8),
    groups=st.lists(st.tuples(st.integers(0, 7), st.integers(2, 8), st.integers(1, 70)), max_size=3),
    mode=st.sampled_from(list(ForwardMode)),
    page_size=page_sizes,
    heads=heads,
)
def test_shared_pages_do_not_change_the_result(
    requests: list[tuple[int, int]],
    groups: list[tuple[int, int, int]],
    mode: ForwardMode,
    page_size: int,
    heads: tuple[int, int],
) -> None:
    """Groups of requests begin with the same pages, nested or not, up to the last token before the step's own."""
    requests = [(prefix, 1 if mode is ForwardMode.DECODE else new) for prefix, new in requests]
    case = Case([a + b for a, b in requests], [new for _, new in requests], page_size, heads, seed=11)
    for first, num, num_tokens in groups:
        members = list(range(len(requests)))[first : first + num]
        if members:
            case.begin_alike(members, min(num_tokens, *(requests[i][0] for i in members), 70))
    case.check(mode)


@pytest.mark.usefixtures("always_worth_it")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_shared_pages_in_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    case = Case([90, 95, 80, 40], [1, 1, 1, 1], 16, (4, 2), seed=2, dtype=dtype, head_dim=16)
    case.begin_alike([0, 1, 2], 64)
    assert all(output.dtype == dtype for output in case.run(ForwardMode.DECODE))
    case.check(ForwardMode.DECODE, tolerance)


@pytest.mark.parametrize("mode", list(ForwardMode))
def test_a_prefix_of_many_requests_is_read_once(mode: ForwardMode) -> None:
    """Samples of one prompt, or copies of a cached one, cost their own tokens and the prompt's once."""
    case = Case([1000 + i % 3 for i in range(40)], [1] * 40, 16, (4, 2), seed=4)
    case.begin_alike(list(range(40)), 960)
    work = work_of(case, mode)
    assert 960 <= sum(work.reads) <= 960 + 40 * 64
    assert work.attention_calls <= 8
    case.check(mode)


def test_single_queries_beside_a_chunk_are_attended_to_together() -> None:
    """Cached prompts of which the last token is computed are not one call each because another prompt has more."""
    case = Case([50 + i % 3 for i in range(40)] + [90], [1] * 40 + [30], 16, (4, 2), seed=4)
    assert work_of(case, ForwardMode.EXTEND).attention_calls <= 8
    case.check(ForwardMode.EXTEND)


def table_of(rows: list[list[int]]) -> np.ndarray:
    width = max(len(row) for row in rows)
    return np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int32)


def find(rows: list[list[int]], queries: list[int] | None = None, page_size: int = 100) -> list[SharedPrefix]:
    num_pages = np.array([len(row) for row in rows])
    return find_shared_prefixes(table_of(rows), num_pages, np.array(queries or [1] * len(rows)), page_size)


def test_a_short_prefix_of_all_hides_no_long_one_of_some() -> None:
    a, b = list(range(10, 60)), list(range(100, 150))
    rows = [[7, *a], [7, *b], [7, *a, 60], [7, *b], [7, 5], [7]]
    assert find(rows) == [SharedPrefix((0, 2), 51), SharedPrefix((1, 3), 51)]
    assert find([[7, *a], [7, *a], [7, *a, 3, 4], [7, *a, 3, 5]]) == [SharedPrefix((0, 1, 2, 3), 51)]


def test_a_prefix_is_taken_only_where_it_saves_much() -> None:
    assert find([[1], [1]]) == []
    assert find([list(range(21)), list(range(21))]) == [SharedPrefix((0, 1), 21)]
    assert find([list(range(20)), list(range(100, 120))]) == [], "nothing is shared"
    assert find([list(range(30))], queries=[8]) == [SharedPrefix((0,), 30)], "one request, many queries"
    assert find([list(range(30))], queries=[1]) == []


@given(
    st.lists(st.lists(st.integers(1, 2), max_size=9), min_size=1, max_size=9),
    st.lists(st.integers(1, 9), min_size=9, max_size=9),
)
def test_shared_prefixes_are_shared(rows: list[list[int]], queries: list[int]) -> None:
    prefixes = find(rows, queries[: len(rows)], page_size=1000)
    members = [i for prefix in prefixes for i in prefix.requests]
    assert len(members) == len(set(members))
    for prefix in prefixes:
        begins = {tuple(rows[i][: prefix.num_pages]) for i in prefix.requests}
        assert len(begins) == 1 and all(len(begin) == prefix.num_pages for begin in begins)


def test_prefixes_within_prefixes_are_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request begins as the one before it and is longer: 500 levels."""
    compared = 0
    right = shared_prefixes._Grouping._num_alike

    def counting(self: Any, requests: Any, first: int, last: int) -> int:
        nonlocal compared
        compared += len(requests) * (last - first)
        return right(self, requests, first, last)

    monkeypatch.setattr(shared_prefixes._Grouping, "_num_alike", counting)
    find([list(range(1, i + 2)) for i in range(500)])
    assert compared <= 17 * 500


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200), st.integers(1, 20000))
def test_decode_groups_bound_waste_and_memory(lens: list[int], max_tokens: int) -> None:
    descending = np.array(sorted(lens, reverse=True), dtype=np.int64)
    groups = decode_groups(descending, max_tokens)
    assert [first for first, _ in groups] == [0, *(last for _, last in groups[:-1])]
    assert groups[-1][1] == len(lens)
    for first, last in groups:
        longest, shortest = int(descending[first]), int(descending[last - 1])
        assert last - first == 1 or (last - first) * longest <= max_tokens
        assert longest - shortest <= max(longest // 4, 64)


def test_a_few_long_requests_cost_only_themselves() -> None:
    lens = np.array([3500] * 4 + [100] * 196, dtype=np.int64)
    gathered = sum((last - first) * int(lens[first]) for first, last in decode_groups(lens, 4096))
    assert gathered == lens.sum()


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"), [([], []), ([4], [0]), ([4], [5])], ids=["empty", "no query", "query beyond"]
)
def test_impossible_batches_are_refused(seq_lens: list[int], query_lens: list[int]) -> None:
    pool = KVPool(4, KVLayout.uniform(16, 1, 1, 8, "float32"), torch.device("cpu"))
    inputs = AttentionInputs(
        mode=ForwardMode.EXTEND,
        page_table=torch.ones(1, 2, dtype=torch.int32),
        rows=torch.zeros(len(seq_lens), dtype=torch.int64),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        seq_lens_cpu=np.array(seq_lens, dtype=np.int64),
        query_lens_cpu=np.array(query_lens, dtype=np.int64),
    )
    with pytest.raises(AssertionError):
        CpuAttentionBackend(pool).plan(inputs)
