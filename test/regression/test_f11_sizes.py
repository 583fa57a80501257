"""F11: batches and prompts of every length around the captured sizes, and far beyond the largest."""

from __future__ import annotations

from random import Random

import pytest
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
from step_traces import PLAIN, TraceMaker, TraceReq
from trace_runner import play

from fenceline.model_executor.step import ScheduleBatch

NUM_ROWS = 40
BATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 17, 40)  # graphs are captured for 1, 2, 4 and 8
PROMPTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 300)


def boundary_trace(page_size: int, prompts: tuple[int, ...], batches: tuple[int, ...]) -> list[ScheduleBatch]:
    """Prompts of all ``prompts`` lengths, alone and together; then decode batches of all sizes, up and down."""
    maker = TraceMaker(trace_shape(page_size, NUM_ROWS), Random(11))
    reqs: list[TraceReq] = []

    def join(length: int) -> TraceReq:
        req = maker.new_req(length, 2 * len(batches) * 3, PLAIN[length % len(PLAIN)])
        assert req is not None
        reqs.append(req)
        return req

    for length in prompts:
        maker.extend([join(length)])
        maker.decode([reqs[-1]])
    maker.extend([join(length) for length in prompts])
    while len(reqs) < max(batches):
        maker.extend([join(3 + len(reqs) % 5)])
    for size in (*batches, *reversed(batches)):
        for _ in range(2):
            maker.decode(reqs[-size:])
    return maker.batches


@kinds
@page_sizes
def test_batches_and_prompts_around_every_boundary(kind: str, page_size: int) -> None:
    batches = boundary_trace(page_size, PROMPTS, BATCHES)
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
    batches = boundary_trace(16, (5,), (3, size))
    expected = play(runners(kind, 16, NUM_ROWS)[0], batches)
    assert corruption(expected, unguarded(kind, "total_buckets", 16, NUM_ROWS), batches)
