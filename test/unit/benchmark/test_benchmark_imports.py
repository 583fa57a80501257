"""The programs in benchmark/ import what there is: most of them run on a GPU only, where they would fail too late."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from fenceline.scheduler.masked_steps import MaskedSteps
from fenceline.scheduler.scheduler import Scheduler

BENCHMARKS = Path(__file__).parents[3] / "benchmark"


def imported(path: Path) -> list[tuple[str, str]]:
    """Module and name of each import from the package, wherever in the file it is."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return [
        (node.module, alias.name)
        for node in nodes
        if node.module is not None and node.module.partition(".")[0] == "fenceline"
        for alias in node.names
    ]


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_exists(path: Path) -> None:
    for module, name in imported(path):
        found = importlib.import_module(module)
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")


def test_a_benchmark_of_the_engines_thread_runs() -> None:
    """It replaces parts of the engine and names methods, which no import shows."""
    command = [str(BENCHMARKS / "bench_memory_check.py"), "--running", "1", "--steps", "1", "--repeats", "1"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_parts_of_a_step_that_are_timed_are_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (BENCHMARKS, BENCHMARKS / "h200"):
        monkeypatch.syspath_prepend(str(folder))
    for module, name in (("overlap", "_PARTS"), ("bench_masked_step", "PARTS")):
        for part in getattr(importlib.import_module(module), name):
            assert hasattr(Scheduler, part) or hasattr(MaskedSteps, part), f"{module}: {part}"
