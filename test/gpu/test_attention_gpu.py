"""The torch attention backend against the textbook on a GPU, in every precision a model runs in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import Case

from fenceline.layers.forward_batch import ForwardMode

pytestmark = pytest.mark.gpu


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def case(seq_lens: list[int], query_lens: list[int], page_size: int, seed: int, dtype: torch.dtype) -> Case:
    heads = [(4, 2), (4, 4), (8, 1), (6, 2)][seed % 4]
    return Case(seq_lens, query_lens, page_size, heads, seed, dtype, head_dim=64, device="cuda")


@dtypes
@pytest.mark.parametrize("num_queries", [1, 2, 63, 64, 65, 129, 193, 255, 256, 257, 321, 577])
def test_extend_after_a_prefix_at_every_kind_of_last_block(num_queries: int, dtype: torch.dtype) -> None:
    """65 = 64 + 1 queries and the like: a kernel's last block of a single query."""
    for prefix in (1, 100, 1500):
        for heads in ((4, 2), (4, 4), (8, 1)):
            lens = [prefix + num_queries], [num_queries]
            step = Case(*lens, 1, heads, num_queries, dtype, head_dim=64, device="cuda")
            step.check(ForwardMode.EXTEND, TOLERANCES[dtype])


@dtypes
def test_random_batches(dtype: torch.dtype) -> None:
    random = np.random.default_rng(1)
    for seed in range(40):
        seq_lens = random.integers(1, 700, size=random.integers(1, 6)).tolist()
        query_lens = [int(random.integers(1, n + 1)) for n in seq_lens]
        page_size = [1, 16, 64][seed % 3]
        case(seq_lens, query_lens, page_size, seed, dtype).check(ForwardMode.EXTEND, TOLERANCES[dtype])
        ones = [1] * len(seq_lens)
        case(seq_lens, ones, page_size, seed, dtype).check(ForwardMode.DECODE, TOLERANCES[dtype])
