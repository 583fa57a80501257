"""F18: padding is named by the sink's row and page, never by -1, which is the last row, and somebody's."""

from __future__ import annotations

from random import Random

import pytest
import torch
from guarded_runs import SIZES, check_random_steps, kinds, page_sizes, trace_shape
from step_traces import GREEDY, TraceMaker
from trace_runner import live_memory, make_runner, play

from fenceline.memory_order import guards, open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import StepBatch

NUM_ROWS = 12


def trace(page_size: int) -> tuple[list[StepBatch], list[StepBatch], list[int]]:
    """All rows are taken; then three of them, not the last, decode in graphs of four. Also the pages of the others."""
    maker = TraceMaker(trace_shape(page_size, NUM_ROWS), Random(180))
    reqs = [req for _ in range(NUM_ROWS) if (req := maker.new_req(40, 20, GREEDY)) is not None]
    assert [req.row for req in reqs] == list(range(1, NUM_ROWS + 1))
    maker.extend(reqs)
    setup, maker.batches = maker.batches, []
    for _ in range(20):
        maker.decode(reqs[:3])
    return setup, maker.batches, [page for req in reqs[3:] for page in req.pages]


def others_memory(runner: ModelRunner, pages: list[int]) -> list[torch.Tensor]:
    """Keys and values of ``pages``, and the last tokens of rows 4 and up."""
    size = runner.kv_pool.page_size
    slots = torch.tensor([(page - 1) * size + offset for page in pages for offset in range(size)])
    *caches, last_tokens = live_memory(runner)
    return [cache[slots] for cache in caches] + [last_tokens[3:]]


def others_change(runner: ModelRunner, page_size: int) -> bool:
    """Whether replays with one padded row change any byte of requests that are not in their batch."""
    setup, steps, pages = trace(page_size)
    play(runner, setup)
    before = others_memory(runner, pages)
    play(runner, steps)
    assert runner.decode.has_graphs
    assert runner.decode.stats.replays == len(steps)
    return not all(map(torch.equal, before, others_memory(runner, pages)))


@kinds
@page_sizes
def test_random_steps_equal_eager_ones(kind: str, page_size: int) -> None:
    check_random_steps(kind, page_size)


@kinds
@page_sizes
def test_padding_touches_nobody(kind: str, page_size: int) -> None:
    runner = make_runner(open_device(kind), trace_shape(page_size, NUM_ROWS), SIZES)
    assert not others_change(runner, page_size)


@kinds
@page_sizes
def test_padding_that_names_the_last_row_writes_its_owners_page(
    kind: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What -1 means to an indexing operation. (A kernel that does not wrap indices reads before the table instead.)"""
    monkeypatch.setattr(guards, "_SINK_ID", NUM_ROWS)
    runner = make_runner(open_device(kind), trace_shape(page_size, NUM_ROWS), SIZES)
    assert others_change(runner, page_size)
