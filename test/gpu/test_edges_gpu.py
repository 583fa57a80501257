"""Each edge is necessary on a GPU: without it, and with a spin that holds its window open, a step gets or gives the
values of another; with it, the same spin changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from guarded_runs import corruption, play_spinning, runners, spin_after_waits, spin_before_copies, trace_shape
from step_traces import random_trace, swap_trace
from trace_runner import first_difference, make_runner, play

from fenceline.memory_order import Device, ResultRing, open_device
from fenceline.memory_order.edges import HOST_AFTER_FORWARD, RING_EDGES
from fenceline.model_executor.model_runner import ModelRunner

pytestmark = pytest.mark.gpu

# Every step uploads and downloads the same layout, so that another step's values are valid, and wrong.
BATCHES = swap_trace(50, 24)
TRACES = {"decode": BATCHES, "mixed": swap_trace(50, 24, mixed=True)}


def late_uploads(device: Device) -> None:
    spin_before_copies(device.schedule)


def late_steps(device: Device) -> None:
    """FORWARD is late between its wait for the inputs and its copy of them, and with all that follows."""
    spin_after_waits(device.forward)


def late_results(device: Device) -> None:
    spin_before_copies(device.copy)


SPINS: dict[str, Callable[[Device], None]] = {
    "forward_after_schedule": late_uploads,
    "schedule_after_forward": late_steps,
    "copy_after_forward": late_steps,
    "host_after_copy": late_results,
    "host_after_forward": late_steps,
    "staging_reuse": late_uploads,
}


def send_by_forward(runner: ModelRunner) -> None:
    """As with a host tier whose backups keep the copy engine busy."""
    runner._results = ResultRing(runner.device, small_by_forward=True)


def test_every_edge_of_the_rings_has_its_spin() -> None:
    assert SPINS.keys() == {edge.name for edge in RING_EDGES}


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
@pytest.mark.parametrize("steps", TRACES)
@pytest.mark.parametrize("name", SPINS)
def test_an_edge_is_necessary(name: str, steps: str, guarded: bool) -> None:
    """``steps``: of rows that decode, or of these beside prompts."""
    batches = TRACES[steps]
    expected = play(runners("cuda", 1)[0], batches, overlap=False)
    runner = make_runner(open_device("cuda"), trace_shape(1))
    if name == HOST_AFTER_FORWARD.name:
        send_by_forward(runner)
    got = play_spinning(runner, batches, 4, SPINS[name], "" if guarded else name)
    assert bool(first_difference(expected, got)) != guarded


def test_without_spins_the_answers_are_the_same() -> None:
    expected = play(runners("cuda", 1)[0], BATCHES, overlap=False)
    assert corruption(expected, runners("cuda", 1)[1], BATCHES) == ""


def test_small_results_that_forward_writes_itself_are_the_same() -> None:
    """Tokens alone, with logprobs of a few requests, and chunks without any result."""
    shape = trace_shape(16, logprob_share=0.1, chunk=16)
    batches = random_trace(51, 500, shape)
    runner = make_runner(open_device("cuda"), shape)
    assert runner.device.writes_host, "fenceline_kernel is there"
    send_by_forward(runner)
    assert corruption(play(runners("cuda", 16)[0], batches), runner, batches) == ""
