"""F13: a row and its pages go to the next request while the step of the last one is still in flight."""

from __future__ import annotations

import pytest
from guarded_runs import (
    SHORT_SPIN_CYCLES,
    both_page_sizes,
    check_random_steps,
    kinds,
    play_spinning,
    runners,
    spin_after_points,
    spin_after_waits,
    trace_shape,
)
from step_traces import random_trace, row_reuse_trace
from trace_runner import first_difference, make_runner, play

from fenceline.memory_order import Device, open_device


def late_steps(device: Device) -> None:
    """FORWARD reaches its copy of the inputs 10 ms late."""
    spin_after_waits(device.forward)


@kinds
@both_page_sizes
def test_rows_and_pages_change_hands_in_the_next_step(kind: str, page_size: int) -> None:
    check_random_steps(kind, page_size, seed=130, outputs=(1, 3), steady=2)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16])
def test_and_so_they_do_under_steps_that_are_late(page_size: int) -> None:
    shape = trace_shape(page_size, outputs=(1, 3), steady=2)
    batches = random_trace(131, 1000, shape)
    runner = make_runner(open_device("cuda"), shape)
    spin_after_points(runner.device.forward, SHORT_SPIN_CYCLES)
    assert first_difference(play(runners("cuda", page_size)[0], batches), play(runner, batches)) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("severed", ["", "schedule_after_forward"], ids=["guarded", "unguarded"])
def test_without_the_edge_a_step_computes_its_rows_next_owner(severed: str) -> None:
    """One row: each request ends with its first token, and the next one's prompt is uploaded at once."""
    batches = row_reuse_trace(132, 24)
    expected = play(runners("cuda", 1)[0], batches, overlap=False)
    runner = make_runner(open_device("cuda"), trace_shape(1))
    got = play_spinning(runner, batches, 2, late_steps, severed)
    assert bool(first_difference(expected, got)) == bool(severed)
