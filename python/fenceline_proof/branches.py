"""Branch coverage of the folders that the proof is about, with the package ``coverage`` if it is installed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import fenceline

FOLDERS = ("scheduler", "model_executor", "sampling", "models", "layers", "mem_cache", "memory_order")


@dataclass(frozen=True, slots=True)
class Branches:
    """How many of a folder's branches were taken."""

    covered: int
    total: int

    def __str__(self) -> str:
        return f"{100 * self.covered / max(self.total, 1):.0f}% ({self.covered} of {self.total})"


@contextmanager
def measured() -> Iterator[dict[str, Branches]]:
    """Inside, branches are counted in this process; the dict is filled at the end. Empty without ``coverage``."""
    found: dict[str, Branches] = {}
    if find_spec("coverage") is None:
        yield found
        return
    import coverage

    package = Path(fenceline.__file__).parent
    folders = {folder: package / folder for folder in FOLDERS}
    tracer = coverage.Coverage(
        branch=True, data_file=None, config_file=False, include=[f"{path}/*" for path in folders.values()]
    )
    tracer.start()
    try:
        yield found
    finally:
        tracer.stop()
    files = _by_file(tracer)
    for folder, path in folders.items():
        mine = [counts for name, counts in files.items() if Path(name).resolve().is_relative_to(path)]
        found[folder] = Branches(sum(covered for covered, _ in mine), sum(total for _, total in mine))


def _by_file(tracer: object) -> dict[str, tuple[int, int]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        tracer.json_report(outfile=str(report))  # type: ignore[attr-defined]
        files = json.loads(report.read_text())["files"]
    return {
        name: (entry["summary"]["covered_branches"], entry["summary"]["num_branches"])
        for name, entry in files.items()
    }
