"""A real GPU shows no outcome of the conformance programs that is not allowed: what vgpu promises is what CUDA does.

Each program runs with its device-side and host-side delays in all combinations, which widens each window both ways.
``CONFORMANCE_REPORT=FILE`` writes what was seen.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import combinations
from typing import Any

import conformance_copies  # noqa: F401 - their programs register themselves
import conformance_graphs  # noqa: F401
import conformance_streams  # noqa: F401
import pytest
import torch
from conformance import PROGRAMS, Outcome, Program
from conformance_cuda import CudaMachine, run_in_new_process

pytestmark = pytest.mark.gpu

NUM_ROUNDS = 8

in_process = [program for program in PROGRAMS.values() if not program.tainting]
tainting = [program for program in PROGRAMS.values() if program.tainting]


def named(programs: list[Program]) -> Any:
    return pytest.mark.parametrize("program", programs, ids=[program.name for program in programs])


@pytest.fixture(scope="module")
def report() -> Iterator[dict[str, Any]]:
    seen: dict[str, Any] = {}
    yield seen
    if path := os.environ.get("CONFORMANCE_REPORT"):
        with open(path, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "programs": seen}, file)


@pytest.fixture(scope="module")
def spoilt() -> Iterator[dict[str, Future[Outcome]]]:
    """Outcomes of the programs that break a capture, each from a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(tainting), context, max_tasks_per_child=1) as pool:
        yield {program.name: pool.submit(run_in_new_process, program.name) for program in tainting}


def delays(program: Program) -> Iterator[frozenset[str]]:
    for size in range(len(program.lags) + 1):
        for chosen in combinations(program.lags, size):
            yield frozenset(chosen)


def note(report: dict[str, Any], program: Program, seen: Counter[Outcome]) -> None:
    counts = {str(outcome): count for outcome, count in seen.items()}
    report[program.name] = {"seen": counts, "allowed": sorted(map(str, program.allowed))}


@named(in_process)
def test_outcomes_are_allowed(program: Program, report: dict[str, Any]) -> None:
    # The first run loads kernels and allocates memory, both of which make the host wait for the device.
    program.run(CudaMachine(frozenset()))
    seen: Counter[Outcome] = Counter()
    for _ in range(NUM_ROUNDS):
        for lags in delays(program):
            seen[program.run(CudaMachine(lags))] += 1
    note(report, program, seen)
    assert set(seen) <= program.allowed, f"seen {dict(seen)}, allowed {set(program.allowed)}"


@named(tainting)
def test_what_a_capture_forbids(program: Program, report: dict[str, Any], spoilt: dict[str, Future[Outcome]]) -> None:
    seen = Counter([spoilt[program.name].result(timeout=100)])
    note(report, program, seen)
    assert set(seen) <= program.allowed, f"seen {dict(seen)}, allowed {set(program.allowed)}"
