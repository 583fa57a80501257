"""F8: what a replay leaves is used before the next replay, or copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from guarded_runs import (
    SHORT_SPIN_CYCLES,
    check_random_steps,
    kinds,
    page_sizes,
    play_spinning,
    runners,
    spin_before_copies,
    trace_shape,
)
from speculative_driver import EAGLE, models
from speculative_guards import by_kind, run
from step_traces import random_trace, steady_trace
from trace_runner import first_difference, make_runner, play

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.memory_order import LeaseError, open_device

__all__ = ["models"]  # a fixture


@kinds
@page_sizes
def test_results_of_random_steps_are_their_own(kind: str, page_size: int) -> None:
    check_random_steps(kind, page_size)


@kinds
def test_reading_an_output_after_the_next_replay_raises(kind: str) -> None:
    runner = make_runner(open_device(kind), trace_shape(16))
    batches = steady_trace(81, 3)
    play(runner, batches)
    graphs, last = runner.decode, batches[-1]
    assert last.is_decode
    with torch.inference_mode(), runner.device.forward.active():
        outputs = graphs.replay(4, last.seq_lens + 1)
        assert outputs.take("next_tokens", 4).shape == (4,)
        assert outputs.take("seq_lens", 4).tolist() == (last.seq_lens + 1).tolist()
        graphs.replay(4, last.seq_lens + 2)
        with pytest.raises(LeaseError, match="next_tokens of replay .* is gone"):
            outputs.take("next_tokens", 4)
    runner.device.synchronize()


@pytest.mark.gpu
def test_results_are_right_although_they_leave_late() -> None:
    batches = random_trace(82, 500, trace_shape(16))
    runner = make_runner(open_device("cuda"), trace_shape(16))
    spin_before_copies(runner.device.copy, SHORT_SPIN_CYCLES)
    assert first_difference(play(runners("cuda", 16)[0], batches), play(runner, batches)) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("severed", ["", "own_results"], ids=["guarded", "unguarded"])
def test_a_result_that_is_no_copy_is_overwritten(severed: str) -> None:
    """The same batch, step after step: COPY is 10 ms late, by then the next replay has run."""
    batches = steady_trace(83, 24)
    expected = play(runners("cuda", 16)[0], batches)
    runner = make_runner(open_device("cuda"), trace_shape(16))
    got = play_spinning(runner, batches, 2, lambda device: spin_before_copies(device.copy), severed)
    assert bool(first_difference(expected, got)) == bool(severed)


@by_kind((EAGLE, "eagle"))
def test_a_draft_goes_on_from_the_hidden_states_of_its_own_step(
    kind: str, algorithm: SpeculativeAlgorithm, draft: str, models: dict[str, Path]
) -> None:
    """Those of an earlier step change no token, but what is proposed."""
    expected, drafts = run(models, kind, algorithm=algorithm, draft=draft)
    assert run(models, kind, algorithm=algorithm, draft=draft) == (expected, drafts)
    tokens, others = run(models, kind, "kept_hidden", algorithm=algorithm, draft=draft)
    assert tokens == expected and others != drafts
