"""F12: pinned and device staging are written again only when whoever reads them has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from guarded_runs import SHORT_SPIN_CYCLES, play_spinning, runners, spin_after_points, spin_before_copies, trace_shape
from step_traces import FULL, PLAIN, random_trace, swap_trace
from trace_runner import first_difference, make_runner, play

from fenceline.memory_order import Device, open_device

pytestmark = pytest.mark.gpu

BATCHES = swap_trace(120, 24)


def late_copies(device: Device) -> None:
    spin_before_copies(device.schedule)


def late_steps(device: Device) -> None:
    spin_after_points(device.forward)


@pytest.mark.parametrize("page_size", [1, 16])
def test_random_steps_whose_uploads_are_late(page_size: int) -> None:
    shape = trace_shape(page_size, sampling=PLAIN + FULL, logprob_share=0.05, steady=2)
    batches = random_trace(121, 1000, shape)
    runner = make_runner(open_device("cuda"), shape)
    spin_before_copies(runner.device.schedule, SHORT_SPIN_CYCLES)
    reference = runners("cuda", page_size)[0]
    assert first_difference(play(reference, batches, overlap=False), play(runner, batches)) == ""


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
@pytest.mark.parametrize(
    ("name", "spin"), [("staging_reuse", late_copies), ("own_copy", late_steps)], ids=["pinned", "device"]
)
def test_staging_written_too_early_gives_the_next_inputs(
    name: str, spin: Callable[[Device], None], guarded: bool
) -> None:
    """Every step uploads; the copy (or the step that reads the device's half) is 10 ms late."""
    expected = play(runners("cuda", 1)[0], BATCHES, overlap=False)
    runner = make_runner(open_device("cuda"), trace_shape(1))
    got = play_spinning(runner, BATCHES, 4, spin, "" if guarded else name)
    assert bool(first_difference(expected, got)) != guarded
