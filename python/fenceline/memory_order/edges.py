"""Every cross-stream edge of the system, declared once. Code applies an edge by its name.

An edge enters the table with the commit that applies it; ``docs/edges.md`` is generated from the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from fenceline.memory_order.guards import GUARDS


class StreamName(Enum):
    """The streams of a device, named and fixed; HOST is the CPU thread that submits to them."""

    HOST = "host"
    SCHEDULE = "schedule"  # uploads of a step's inputs
    FORWARD = "forward"  # arena fill, page tables, model, sampler
    COPY = "copy"  # results to the host
    LOAD = "load"  # KV pages host → device
    STORE = "store"  # KV pages device → host


class Hazard(Enum):
    """What would go wrong without the edge."""

    RAW = "RAW"  # reading before it is written
    WAR = "WAR"  # writing before it is read
    WAW = "WAW"  # two writers
    EXCLUSIVE = "exclusive"  # two users of a resource that bears one


@dataclass(frozen=True, slots=True)
class Edge:
    """``waiter`` does not touch ``protects`` before ``source`` has passed its Point."""

    name: str
    waiter: StreamName
    source: StreamName
    hazards: tuple[Hazard, ...]
    protects: str
    failure: str  # the F-number of docs/architecture.md, "" where none has been reported


FORWARD_AFTER_SCHEDULE = Edge(
    name="forward_after_schedule",
    waiter=StreamName.FORWARD,
    source=StreamName.SCHEDULE,
    hazards=(Hazard.RAW,),
    protects="device staging uploaded for this batch",
    failure="",
)
SCHEDULE_AFTER_FORWARD = Edge(
    name="schedule_after_forward",
    waiter=StreamName.SCHEDULE,
    source=StreamName.FORWARD,
    hazards=(Hazard.WAR,),
    protects="device staging slots about to be reused",
    failure="F13",
)
COPY_AFTER_FORWARD = Edge(
    name="copy_after_forward",
    waiter=StreamName.COPY,
    source=StreamName.FORWARD,
    hazards=(Hazard.RAW,),
    protects="sampled tokens and logprobs in the result ring",
    failure="",
)
HOST_AFTER_COPY = Edge(
    name="host_after_copy",
    waiter=StreamName.HOST,
    source=StreamName.COPY,
    hazards=(Hazard.RAW, Hazard.WAR),
    protects="results in pinned memory, and the device result slot they came from",
    failure="",
)
STAGING_REUSE = Edge(
    name="staging_reuse",
    waiter=StreamName.HOST,
    source=StreamName.SCHEDULE,
    hazards=(Hazard.WAR,),
    protects="pinned staging slots about to be rewritten",
    failure="F12",
)

EDGES: dict[str, Edge] = {
    edge.name: edge
    for edge in (
        FORWARD_AFTER_SCHEDULE,
        SCHEDULE_AFTER_FORWARD,
        COPY_AFTER_FORWARD,
        HOST_AFTER_COPY,
        STAGING_REUSE,
    )
}


# What ``python -m fenceline.vgpu.prove --write-docs`` has found, in source trees only.
PROOF_FILE = Path(__file__).with_name("proof.json")


def edges_markdown() -> str:
    """The text of ``docs/edges.md``: the tables of edges and guards with the proof's record of each."""
    proved = _Proved(json.loads(PROOF_FILE.read_text()) if PROOF_FILE.exists() else [])
    lines = [
        "# Edges",
        "",
        "Every cross-stream edge, generated from `python/fenceline/memory_order/edges.py`",
        "(`python -m fenceline.memory_order > docs/edges.md`). Do not edit by hand. The last columns are written by",
        "`python -m fenceline.vgpu.prove --write-docs` ([prove.md](prove.md)): with the edge severed, the workload",
        "fails under that seed, and the checker says why.",
        "",
        "| edge | waiter ← source | hazard | protects | failure | status | workload, seed | caught by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for edge in EDGES.values():
        hazards = ", ".join(h.value for h in edge.hazards)
        lines.append(
            f"| {edge.name} | {edge.waiter.value} ← {edge.source.value} | {hazards} "
            f"| {edge.protects} | {edge.failure or '-'} | {proved.cells(edge.name)} |"
        )
    lines += [
        "",
        "## Guards",
        "",
        "What memory relies on beside the edges, from `python/fenceline/memory_order/guards.py`. A dormant guard is",
        "kept for a feature that is not there yet.",
        "",
        "| guard | protects | failure | status | workload, seed | caught by |",
        "|---|---|---|---|---|---|",
    ]
    for guard in GUARDS.values():
        lines.append(
            f"| {guard.name} | {guard.protects} | {guard.failure or '-'} | {proved.cells(guard.name)} |"
        )
    lines += [""] + [f"`{g.name}` is dormant: {g.dormant}." for g in GUARDS.values() if g.dormant]
    return "\n".join(lines) + "\n"


class _Proved:
    def __init__(self, entries: list[dict[str, object]]) -> None:
        self._entries = {entry["name"]: entry for entry in entries}

    def cells(self, name: str) -> str:
        entry = self._entries.get(name)
        if entry is None:
            return "unproven | - | -"
        run = "-" if entry["seed"] is None else f"{entry['workload']}, {entry['seed']}"
        return f"{entry['status']} | {run} | {entry['caught_by'] or '-'}"
