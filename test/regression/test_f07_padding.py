"""F7: padded rows of a replay hold pads, not the last batch of that size."""

from __future__ import annotations

from pathlib import Path

import pytest
from guarded_runs import (
    NUM_STEPS,
    SHORT_SPIN_CYCLES,
    SIZES,
    check_random_steps,
    corruption,
    kinds,
    page_sizes,
    runners,
    spin_after_points,
    trace_shape,
    unguarded,
)
from speculative_driver import EAGLE, STANDALONE, models
from speculative_guards import by_kind, run
from step_traces import random_trace
from trace_runner import first_difference, make_runner, play

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.memory_order import open_device

__all__ = ["models"]  # a fixture


@kinds
@page_sizes
def test_padded_replays_equal_eager_steps(kind: str, page_size: int) -> None:
    check_random_steps(kind, page_size)


@kinds
@page_sizes
def test_every_replay_equals_its_step_without_the_graph(kind: str, page_size: int) -> None:
    """--debug-cuda-graph: each step runs both ways on the same arena, and every field is compared bit by bit."""
    shape = trace_shape(page_size)
    runner = make_runner(open_device(kind), shape, SIZES, debug_cuda_graph=True)
    batches = random_trace(71, NUM_STEPS[kind], shape)
    play(runner, batches)
    assert runner.decode.has_graphs
    stats = runner.decode.stats
    assert stats.replays == stats.eligible_steps > NUM_STEPS[kind] // 2


@kinds
@page_sizes
def test_without_pads_the_last_batch_shows(kind: str, page_size: int) -> None:
    batches = random_trace(72, 100, trace_shape(page_size, outputs=(2, 12)))
    expected = play(runners(kind, page_size)[0], batches)
    assert corruption(expected, unguarded(kind, "arena_pad", page_size), batches)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["schedule", "forward", "copy"])
def test_padding_holds_however_late_a_stream_is(name: str) -> None:
    """Fills, derivations and replays are in FORWARD's order: no other stream's pace shows."""
    shape = trace_shape(16)
    batches = random_trace(73, 300, shape)
    runner = make_runner(open_device("cuda"), shape, SIZES)
    device = runner.device
    stream = {"schedule": device.schedule, "forward": device.forward, "copy": device.copy}[name]
    spin_after_points(stream, SHORT_SPIN_CYCLES)
    assert first_difference(play(runners("cuda", 16)[0], batches), play(runner, batches)) == ""


@by_kind((EAGLE, "eagle"), (STANDALONE, "near"))
def test_without_pads_the_last_batch_shows_in_speculative_steps(
    kind: str, algorithm: SpeculativeAlgorithm, draft: str, models: dict[str, Path]
) -> None:
    expected, drafts = run(models, kind, algorithm=algorithm, draft=draft)
    assert run(models, kind, algorithm=algorithm, draft=draft) == (expected, drafts)
    assert run(models, kind, "arena_pad", algorithm=algorithm, draft=draft)[0] != expected
