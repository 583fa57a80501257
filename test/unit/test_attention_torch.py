"""The torch attention backend against the textbook in float64, over random page tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import Case
from hypothesis import given
from hypothesis import strategies as st

from fenceline.layers.attention.torch_backend import TorchAttentionBackend, decode_groups
from fenceline.layers.forward_batch import AttentionInputs, ForwardMode
from fenceline.mem_cache.kv_pool import KVLayout, KVPool

heads = st.sampled_from([(1, 1), (4, 4), (6, 2), (4, 1)])
page_sizes = st.sampled_from([1, 16, 32, 64])


@given(st.lists(st.integers(1, 140), min_size=1, max_size=9), page_sizes, heads, st.integers(0, 99))
def test_decode_equals_the_textbook(
    seq_lens: list[int], page_size: int, heads: tuple[int, int], seed: int
) -> None:
    Case(seq_lens, [1] * len(seq_lens), page_size, heads, seed).check(ForwardMode.DECODE)


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=5), page_sizes, heads)
def test_extend_equals_the_textbook(
    requests: list[tuple[int, int]], page_size: int, heads: tuple[int, int]
) -> None:
    seq_lens = [prefix + new for prefix, new in requests]
    Case(seq_lens, [new for _, new in requests], page_size, heads, seed=7).check(ForwardMode.EXTEND)


def test_extend_in_several_query_blocks() -> None:
    """Chunks longer than a block, after prefixes of different lengths, share one mask."""
    Case([700, 300, 258, 600], [600, 257, 256, 1], 16, (2, 1), seed=1).check(ForwardMode.EXTEND)


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
    pool = KVPool(4, KVLayout.uniform(16, 1, 1, 8, torch.float32), torch.device("cpu"))
    inputs = AttentionInputs(
        mode=ForwardMode.EXTEND,
        page_table=torch.ones(1, 2, dtype=torch.int32),
        rows=torch.zeros(len(seq_lens), dtype=torch.int64),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        seq_lens_cpu=np.array(seq_lens, dtype=np.int64),
        query_lens_cpu=np.array(query_lens, dtype=np.int64),
    )
    with pytest.raises(AssertionError):
        TorchAttentionBackend(pool).plan(inputs)
