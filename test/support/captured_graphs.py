"""Whether a captured graph keeps the order that its capture declared, read from CUDA's own print of it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from fenceline.memory_order import cuda
from fenceline.memory_order.graph import GraphPool

_EDGE = re.compile(r'^"(\w+)" -> "(\w+)"', re.MULTILINE)
_NODE = re.compile(r'^"(\w+)"\[.*?label="([^"]*)"', re.MULTILINE | re.DOTALL)
_WORK = re.compile(r"\b(KERNEL|MEMCPY|MEMSET)\b")


def faults_of(dot: str) -> list[str]:
    """What contradicts ``Graph``'s declaration: all captured work is FORWARD's, so that the nodes are one chain, and
    none waits for, or signals, anything outside. ``dot``: what cudaGraphDebugDotPrint wrote, as
    ``CUDAGraph.debug_dump`` does."""
    labels = {name: f"{name} ({' '.join(label.split())[:90]})" for name, label in _NODE.findall(dot)}
    if not labels:
        return ["there are no nodes"]
    edges = _EDGE.findall(dot)
    sources, targets = (Counter(edge[end] for edge in edges) for end in (1, 0))
    first = [name for name in labels if not sources[name]]
    faults = [f"{label} is no work" for label in labels.values() if not _WORK.search(label)]
    if len(first) != 1:
        faults += [f"{labels[name]} follows nothing: a lost edge, or another stream" for name in first]
    faults += [f"{sources[name]} nodes are in front of {label}" for name, label in labels.items() if sources[name] > 1]
    faults += [f"{targets[name]} nodes follow {label}" for name, label in labels.items() if targets[name] > 1]
    return faults


class KeptGraphs:
    """Graphs that CUDA devices capture from now on can be printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[cuda.CudaGraph] = []
        kept = self.graphs

        class Kept(cuda.CudaGraph):
            def __init__(self, name: str, pool: GraphPool, stream: object) -> None:
                super().__init__(name, pool, stream)  # type: ignore[arg-type]
                self.raw.enable_debug_mode()  # type: ignore[no-untyped-call]
                kept.append(self)

        monkeypatch.setattr(cuda, "CudaGraph", Kept)

    def faults(self, folder: Path) -> dict[str, list[str]]:
        """By the graph's name; ``folder`` keeps the prints."""
        found = {}
        for number, graph in enumerate(self.graphs):
            file = folder / f"{number}.dot"
            graph.raw.debug_dump(str(file))  # type: ignore[no-untyped-call]
            if faults := faults_of(file.read_text(encoding="utf-8")):
                found[f"{number} {graph.name}"] = faults
        return found
