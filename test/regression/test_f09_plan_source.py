"""F9: what a batch is planned from stays as it was filled, bit by bit, however many replays derive from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guarded_runs import check_random_steps, corruption, kinds, page_sizes, runners, trace_shape, unguarded
from sala_reference import save_sala
from scheduler_driver import Driver, answers, request
from speculative_driver import EAGLE, STANDALONE, models
from speculative_guards import by_kind, run
from step_traces import PLAIN, random_trace
from trace_runner import play

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.memory_order import Role, open_device
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


def _selecting(directory: Path, severed: str, **flags: object) -> Driver:
    args = ServerArgs(
        model_path=str(directory), device="cpu", page_size=16, max_total_tokens=1024, max_running_requests=4,
        random_seed=1, **flags,  # type: ignore[arg-type]
    )  # fmt: skip
    device = open_device("cpu", frozenset({severed} if severed else ()))
    config = resolve(args)
    return Driver(config, ModelRunner(config, device, show_progress=False))


def _answered(driver: Driver) -> list[list[int]]:
    """Requests that go on to select other blocks, of which one row after the other ends."""
    prompts = [[(7 * i + number) % 101 for i in range(50 + 20 * number)] for number in range(4)]
    asked = [
        request(str(i), prompt, temperature=0.0, max_new_tokens=12 + 9 * i, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    return answers(driver, asked)


@pytest.mark.parametrize("severed", ["", "plan_source"])
def test_selections_leave_what_a_batch_is_planned_from(severed: str, tmp_path: Path) -> None:
    """As MiniCPM-SALA was served, a replay wrote the ends of its selections over the array from which the next batch
    was planned: it fell from 36,606 to 34,891 where it must rise (OpenBMB/sglang#2)."""
    save_sala(tmp_path)
    driver = _selecting(tmp_path, severed, cuda_graph_bs=(1, 2, 4))
    runner = driver.worker.decode  # type: ignore[attr-defined]
    arena, filled, changed = runner.arena, {}, set()
    fill, step = arena.fill, driver.step

    def watched_fill(*args: Any, **kwargs: Any) -> None:
        fill(*args, **kwargs)
        filled.update({f.name: arena[f.name].clone() for f in arena.fields.values() if f.role is Role.PLAN})

    def watched_step() -> None:
        step()
        changed.update(name for name, tensor in filled.items() if not torch.equal(arena[name], tensor))

    arena.fill, driver.step = watched_fill, watched_step  # type: ignore[method-assign]
    found = _answered(driver)
    assert runner.stats.replays > 30 and filled
    assert bool(changed) == bool(severed)
    assert (found == _answered(_selecting(tmp_path, "", disable_cuda_graph=True))) == (not severed)
