"""F11: batches and prompts of every length around the captured sizes, and far beyond the largest."""

from __future__ import annotations

import pytest
import torch
from bucket_traces import boundary_trace, difference_across_ranks
from guarded_runs import (
    check_guarded,
    check_random_steps,
    corruption,
    kinds,
    page_sizes,
    runners,
    trace_shape,
    unguarded,
)
from trace_runner import play

from fenceline.layers.context import Shard
from fenceline.memory_order import open_device
from fenceline.memory_order.edges import TOTAL_BUCKETS

NUM_ROWS = 40
BATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 17, 40)  # graphs are captured for 1, 2, 4 and 8
PROMPTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 300)


@kinds
@page_sizes
def test_batches_and_prompts_around_every_boundary(kind: str, page_size: int) -> None:
    batches = boundary_trace(trace_shape(page_size, NUM_ROWS), PROMPTS, BATCHES)
    _, guarded = runners(kind, page_size, NUM_ROWS)
    assert guarded.decode.has_graphs
    stats = guarded.decode.stats
    before = stats.eligible_steps, stats.replays, stats.fallbacks.get("size", 0)
    check_guarded(kind, page_size, batches, NUM_ROWS)
    beyond = sum(size > 8 for size in BATCHES) * 4
    steps = len(PROMPTS) + 4 * len(BATCHES)
    after = stats.eligible_steps, stats.replays, stats.fallbacks["size"]
    assert [b - a for a, b in zip(before, after, strict=True)] == [steps, steps - beyond, beyond]


@kinds
@page_sizes
def test_random_steps_equal_eager_ones(kind: str, page_size: int) -> None:
    check_random_steps(kind, page_size, seed=110, num_rows=NUM_ROWS, batches=BATCHES, prompts=PROMPTS)


@kinds
@pytest.mark.parametrize("size", [9, 17, 40])
def test_a_batch_that_is_cut_to_fit_is_seen(kind: str, size: int) -> None:
    batches = boundary_trace(trace_shape(16, NUM_ROWS), (5,), (3, size))
    expected = play(runners(kind, 16, NUM_ROWS)[0], batches)
    assert corruption(expected, unguarded(kind, "total_buckets", 16, NUM_ROWS), batches)


@pytest.mark.parametrize("experts", [False, True])
def test_prompts_around_both_kinds_of_graphs_change_no_token(experts: bool) -> None:
    """The case of test_two_ranks_gpu.py, of one rank; of a dense model and a mixture of experts."""
    with torch.inference_mode():
        assert difference_across_ranks(open_device("cpu"), Shard(), experts) == ""


def test_a_prompt_that_is_cut_to_fit_a_graph_of_prefill_is_seen() -> None:
    with torch.inference_mode():
        device = open_device("cpu", severed=frozenset({TOTAL_BUCKETS.name}))
        assert difference_across_ranks(device, Shard())
