"""Writes docs/internals/edges.md from the declarations of edges and guards, and from the proof's record of each."""

from __future__ import annotations

import json
from pathlib import Path

from fenceline.memory_order.edges import EDGE_PARTS, EDGES, GUARDS, UNDER_SPECULATION

RECORD = Path(__file__).with_suffix(".json")  # ``python -m fenceline_proof.prove --write-docs`` writes it
PAGE = Path(__file__).parents[1] / "docs" / "internals" / "edges.md"


def render() -> str:
    """The tables of edges and guards with the proof's record of each, as Markdown."""
    proved = _Proved(json.loads(RECORD.read_text(encoding="utf-8")))
    lines = [
        "# Edges",
        "",
        "Every cross-stream edge, generated from `python/fenceline/memory_order/edges.py`",
        "by `python scripts/edges_page.py`. The last columns are written by",
        "`python -m fenceline_proof.prove --write-docs` ([prove.md](../proof/prove.md)): with the edge severed, the",
        "workload fails under that seed, and the checker says why. An edge between several pairs of streams is severed",
        "for each pair separately, and one that several functions apply in each of them separately.",
        "",
        "| edge | waiter ← source | hazard | protects | failure | status | workload, seed | caught by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for edge in EDGES.values():
        hazards = ", ".join(h.value for h in edge.hazards)
        for part in edge.parts:
            where = f" at {part.site}" if part.site else ""
            lines.append(
                f"| {edge.name} | {part.waiter.value} ← {part.source.value}{where} | {hazards} "
                f"| {edge.protects} | {edge.failure or '-'} | {proved.cells(part.name)} |"
            )
    lines += [
        "",
        "## Guards",
        "",
        "What memory relies on besides the edges. A dormant guard is kept for a feature that does not exist yet.",
        "",
        "| guard | protects | failure | status | workload, seed | caught by |",
        "|---|---|---|---|---|---|",
    ]
    for guard in GUARDS.values():
        lines.append(f"| {guard.name} | {guard.protects} | {guard.failure or '-'} | {proved.cells(guard.name)} |")
    lines += [
        "",
        "## Under speculation",
        "",
        "The same, severed in an engine that speculates.",
        "",
        "| edge or guard | status | workload, seed | caught by |",
        "|---|---|---|---|",
    ]
    lines += [f"| {severed} | {proved.cells(row)} |" for row, severed in UNDER_SPECULATION.items()]
    lines += [""] + [f"`{g.name}` is dormant: {g.dormant}." for g in GUARDS.values() if g.dormant]
    lines += ["", *(f"`{p.name}` is redundant: {p.covered}." for p in EDGE_PARTS.values() if p.covered)]
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


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
