"""Whether a captured graph keeps the order that its capture declared, read from CUDA's own print of it."""

from __future__ import annotations

import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

from fenceline.memory_order import cuda
from fenceline.memory_order.graph import GraphPool

_EDGE = re.compile(r'^\s*"(\w+)"\S* -> "(\w+)"', re.MULTILINE)
_NODE = re.compile(r'^\s*"(\w+)"\s*\[[^\]]*?\blabel="([^"]*)"', re.MULTILINE | re.DOTALL)
_WORK = re.compile(r"\{\s*(KERNEL|MEMCPY|MEMSET)\b")
_MAX_FAULTS = 4


def faults_of(dot: str) -> list[str]:
    """What contradicts ``Graph``'s declaration: all captured work is FORWARD's, so that its order is total, and none
    waits for, or signals, anything outside. An edge may skip nodes: a kernel that may start before the one in front of
    it has ended does not end before it. ``dot``: what cudaGraphDebugDotPrint writes with its verbose flag."""
    labels = dict(_NODE.findall(dot))
    if not labels:
        return ["there are no nodes"]
    names = {name: f"{name} ({' '.join(label.split())[:160]})" for name, label in labels.items()}
    faults = [f"{names[name]} is no work" for name, label in labels.items() if not _WORK.match(label)]
    sorter = TopologicalSorter[str](dict.fromkeys(labels, ()))
    for source, target in _EDGE.findall(dot):
        sorter.add(target, source)
    sorter.prepare()
    while sorter.is_active():
        ready = sorter.get_ready()
        if len(ready) > 1:
            faults.append(f"nothing orders {' and '.join(names.get(name, name) for name in ready[:3])}")
        sorter.done(*ready)
    return faults


def _excerpt(dot: str, faults: list[str]) -> str:
    """The beginning of the print, its lines about the first fault's nodes, and the kinds of its edges."""
    lines = dot.splitlines()
    nodes = {f'"{name}"' for name in re.findall(r"\bgraph_\d+_node_\d+", faults[0])}
    named = [line for line in lines[20:] if any(node in line for node in nodes)]
    kinds = Counter(re.findall(r'-> "\w+"(.*)', dot))
    return "\n".join([*lines[:20], "...", *named[:20], f"{len(lines)} lines, edges: {dict(kinds)}"])


class KeptGraphs:
    """Graphs that CUDA devices capture from now on keep their nodes, so that CUDA can print them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[cuda.CudaGraph] = []
        kept = self.graphs

        class Kept(cuda.CudaGraph):
            def __init__(self, name: str, pool: GraphPool, stream: object) -> None:
                super().__init__(name, pool, stream)  # type: ignore[arg-type]
                self.raw = torch.cuda.CUDAGraph(keep_graph=True)  # otherwise torch destroys it after the capture
                kept.append(self)

        monkeypatch.setattr(cuda, "CudaGraph", Kept)

    def report(self, folder: Path) -> str:
        """The faults of all graphs, and what CUDA has printed of the first of them; "" if there are none. ``folder``
        keeps the prints."""
        found, excerpt = [], ""
        for number, graph in enumerate(self.graphs):
            file = folder / f"{number}.dot"
            graph.raw.debug_dump(str(file))
            dot = file.read_text(encoding="utf-8")
            if faults := faults_of(dot):
                found.append(f"{number} {graph.name}: {len(faults)} faults\n  " + "\n  ".join(faults[:_MAX_FAULTS]))
                excerpt = excerpt or f"\n{_excerpt(dot, faults)}"
        return "\n".join(found) + excerpt
