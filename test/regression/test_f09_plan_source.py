"""F9: what a batch is planned from stays as it was filled, bit by bit, however many replays derive from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from guarded_runs import check_random_steps, corruption, kinds, page_sizes, runners, trace_shape, unguarded
from speculative_driver import EAGLE, STANDALONE, models
from speculative_guards import by_kind, run
from step_traces import PLAIN, random_trace
from trace_runner import play

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.memory_order import Role
from fenceline.model_executor.decode_runner import plan_arrays
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import StepBatch
from fenceline.sampling.sampling_batch import sampling_arrays

__all__ = ["models"]  # a fixture
NUM_STEPS = {"cpu": 200, "cuda": 4000}


class SourceChanged(AssertionError):
    """A PLAN field is not what was filled in."""


def play_watched(runner: ModelRunner, batches: Sequence[StepBatch]) -> int:
    """Play, and compare all of the plan with what the batch's fill must have left, after each step. Returns how many
    decode steps were compared; raises SourceChanged."""
    arena = runner.decode.arena
    expected: dict[str, torch.Tensor] = {}
    current, num_compared = -1, 0

    def compare(batch: StepBatch) -> None:
        nonlocal current, num_compared
        if not batch.is_decode:
            return
        if batch.composition != current:
            current = batch.composition
            values = plan_arrays(batch, sampling_arrays(batch.sampling))
            for field in arena.fields.values():
                if field.role is Role.PLAN:
                    whole = torch.full((arena.num_rows,), arena.pads[field.name], dtype=field.dtype)
                    whole[: len(batch.rows)] = torch.from_numpy(np.ascontiguousarray(values[field.name]))
                    expected[field.name] = whole
        with runner.device.forward.active():
            changed = [name for name, whole in expected.items() if not torch.equal(arena[name].cpu(), whole)]
        if changed:
            raise SourceChanged(f"{changed} of composition {current}")
        num_compared += 1

    play(runner, batches, after_launch=compare)
    return num_compared


@kinds
@page_sizes
def test_random_steps_equal_eager_ones(kind: str, page_size: int) -> None:
    check_random_steps(kind, page_size)


@kinds
def test_the_plan_stays_as_it_was_filled(kind: str) -> None:
    batches = random_trace(91, NUM_STEPS[kind], trace_shape(16, sampling=PLAIN))
    assert play_watched(runners(kind, 16)[1], batches) > NUM_STEPS[kind] // 2


@kinds
def test_lengths_derived_in_place_are_seen(kind: str) -> None:
    """Requests are short: a length that grows by one more each step must stay within the page table."""
    batches = random_trace(92, 100, trace_shape(16, outputs=(4, 12)))
    expected = play(runners(kind, 16)[0], batches)
    runner = unguarded(kind, "plan_source", 16)
    assert corruption(expected, runner, batches), "no token shows it"
    with pytest.raises(SourceChanged, match="plan_seq_lens"):
        play_watched(runner, batches)


@by_kind((EAGLE, "eagle"), (STANDALONE, "near"))
def test_the_lengths_of_a_drafts_forwards_are_its_own(
    kind: str, algorithm: SpeculativeAlgorithm, draft: str, models: dict[str, Path]
) -> None:
    expected, _ = run(models, kind, algorithm=algorithm, draft=draft)
    assert run(models, kind, "plan_source", algorithm=algorithm, draft=draft)[0] != expected
