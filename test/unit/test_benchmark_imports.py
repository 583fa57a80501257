"""The programs in benchmark/ import what there is: most of them run on a GPU only, where they would fail too late."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmark"


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
