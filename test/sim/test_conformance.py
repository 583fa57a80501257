"""The virtual GPU reaches every outcome that CUDA allows the conformance programs, and no other.

A real GPU is held against the same programs by ``test/gpu/test_conformance_gpu.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import conformance_copies  # noqa: F401 - their programs register themselves
import conformance_graphs  # noqa: F401
import conformance_streams  # noqa: F401
import pytest
from conformance import PROGRAMS, Outcome, Program
from conformance_vgpu import VgpuMachine

from fenceline_sim import RaceError, VirtualGpu

NUM_SEEDS = 40  # that every outcome shows
NUM_DETECTED_SEEDS = 12  # the detector answers on every schedule alike, but for programs that say "sometimes"

every_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())


def schedules(num_seeds: int, detect: bool) -> Iterator[VirtualGpu]:
    for policy in ("fifo", "eager", "laziest"):
        yield VirtualGpu(policy=policy, detect=detect)
    for seed in range(num_seeds):
        for policy in ("random", "pct"):
            yield VirtualGpu(seed=seed, policy=policy, detect=detect)


@every_program
def test_outcomes_are_those_allowed(program: Program) -> None:
    seen: Counter[Outcome] = Counter(program.run(VgpuMachine(gpu)) for gpu in schedules(NUM_SEEDS, detect=False))
    assert set(seen) == program.allowed, f"seen {dict(seen)}, allowed {set(program.allowed)}"


@every_program
def test_the_detector_objects_to_what_has_several_outcomes(program: Program) -> None:
    """Whatever the schedule; where one outcome is certain it is silent."""
    num_races, num_runs = 0, 0
    for gpu in schedules(NUM_DETECTED_SEEDS, detect=True):
        num_runs += 1
        try:
            program.run(VgpuMachine(gpu))
        except RaceError:
            num_races += 1
    expected = {"never": num_races == 0, "always": num_races == num_runs, "sometimes": 0 < num_races < num_runs}
    assert expected[program.race], f"{num_races} races in {num_runs} runs"


def test_a_program_without_a_race_has_one_outcome() -> None:
    for program in PROGRAMS.values():
        assert (program.race == "never") == (len(program.allowed) == 1), program.name
