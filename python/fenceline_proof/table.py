"""The proof's results: a table for people, JSON for programs, and the record that edges.md is made of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import fenceline
from fenceline_proof.answers import MAX_CLOSE_SHARE
from fenceline_proof.arms import Row
from fenceline_proof.events import EVENTS
from fenceline_proof.runs import Outcome
from fenceline_sim.pairs import Pair


@dataclass(slots=True)
class Proof:
    rows: list[Row] = field(default_factory=list)
    num_intact: int = 0
    num_tokens: int = 0  # of the intact engine, compared with the oracle's
    num_close: int = 0  # of them, those that differ because of rounding
    # In how many runs of ``everything`` each event was seen; empty if too few runs were made to expect all events.
    events: Mapping[str, int] = field(default_factory=dict)
    runs_by_workload: dict[str, int] = field(default_factory=dict)
    failures: list[Outcome] = field(default_factory=list)
    telling: list[Outcome] = field(default_factory=list)  # failed runs whose schedules are explained
    # The conflicting accesses that runs of the intact engine met; and what of the table of edges was not met, if enough
    # runs were made to expect all of it.
    pairs: set[Pair] = field(default_factory=set)
    missed_pairs: list[str] = field(default_factory=list)
    # Functions that apply an edge without being named in the table of edges: each must be severed separately.
    undeclared: list[str] = field(default_factory=list)
    # Of small workloads, by name: schedules tried.
    schedules: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether runs were made, the intact engine is clean, all events have happened, and every edge and guard is
        necessary or has a reason."""
        any_run = self.num_intact > 0 or any(row.num_runs for row in self.rows) or bool(self.schedules)
        fine = self.few_close and not self.unseen and all(row.fine for row in self.rows)
        return any_run and fine and not (self.failures or self.undeclared or self.missed_pairs)

    def count(self, outcomes: Sequence[Outcome], runs: dict[str, int]) -> None:
        """Add their tokens, and their number by workload to ``runs``."""
        for outcome in outcomes:
            runs[outcome.trial.workload] = runs.get(outcome.trial.workload, 0) + 1
            self.num_tokens += outcome.num_tokens
            self.num_close += outcome.num_close

    @property
    def unseen(self) -> list[str]:
        return [event for event, count in self.events.items() if count == 0]

    @property
    def few_close(self) -> bool:
        """Whether few enough tokens differ because of rounding."""
        return self.num_close <= 1 + self.num_tokens * MAX_CLOSE_SHARE


def as_text(proof: Proof) -> str:
    lines, verdict = [], f"{len(proof.failures)} FAILED" if proof.failures else "clean"
    if proof.rows:
        head = ("name", "kind", "status", "workload", "seed", "caught", "caught by")
        cells = [head, *(_cells(row) for row in proof.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        lines += [""] + [f"{row.name}: {row.status}: {row.report}" for row in proof.rows if not row.fine]
    if proof.schedules:
        parts = ", ".join(f"{name} {count}" for name, count in proof.schedules.items())
        which = "NOT ALL" if proof.failures else "all"
        total = sum(proof.schedules.values())
        lines.append(f"{which} schedules with up to two preemptions: {total}, {verdict} ({parts})")
        lines.append(f"answers: {proof.num_tokens} tokens compared with each request computed alone")
    if proof.num_intact:
        parts = ", ".join(f"{name} {count}" for name, count in proof.runs_by_workload.items())
        lines.append(f"intact engine: {proof.num_intact} seeds, {verdict} ({parts})")
        close = f"{proof.num_close} differ because of rounding" + ("" if proof.few_close else ": TOO MANY")
        lines.append(f"answers: {proof.num_tokens} tokens compared with each request computed alone, {close}")
    if proof.events:
        lines.append(f"events: {len(proof.events) - len(proof.unseen)} of {len(proof.events)} seen")
        lines += [f"  NOT SEEN: {event} ({EVENTS[event]})".replace(" ()", "") for event in proof.unseen]
    lines += [f"NEVER MET: {what}" for what in proof.missed_pairs]
    lines += [f"UNDECLARED SITE: {site}: name it in the edge's sites" for site in proof.undeclared]
    rate = sum(proof.schedules.values()) + proof.num_intact + sum(row.num_runs for row in proof.rows)
    lines.append(f"{rate} runs in {proof.seconds:.0f} s")
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    caught = f"{row.num_caught}/{row.num_runs}" if row.num_runs else "-"
    seed = "-" if row.seed is None else str(row.seed)
    return (row.name, row.kind, row.status, row.workload or "-", seed, caught, row.caught_by or "-")


def as_json(proof: Proof) -> dict[str, object]:
    return {
        "clean": proof.clean,
        "edges": [{**asdict(row), "seeds_caught": row.num_caught, "seeds_run": row.num_runs} for row in proof.rows],
        "intact": {
            "seeds": proof.num_intact, "by_workload": proof.runs_by_workload, "tokens": proof.num_tokens,
            "close": proof.num_close,
            "failures": [
                {"command": f.trial.command, "checker": f.checker, "report": f.report} for f in proof.failures
            ],
        },
        "pairs": [pair._asdict() for pair in sorted(proof.pairs)], "never_met": proof.missed_pairs,
        "schedules": dict(proof.schedules), "events": dict(proof.events), "seconds": round(proof.seconds, 1),
    }  # fmt: skip


def record(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The part of the rows that is kept in the repository: what is the same in every run."""
    return [
        {"name": row.name, "status": row.status, "workload": row.workload, "seed": row.seed, "caught_by": row.caught_by}
        for row in rows
    ]


def write_docs(rows: Sequence[Row]) -> list[Path]:
    """Write the record and the page made of it, in a source tree; the files written."""
    root = Path(fenceline.__file__).resolve().parents[2]
    record_file = root / "scripts" / "edges_page.json"
    entries = ",\n".join("  " + json.dumps(entry) for entry in record(rows))
    record_file.write_text(f"[\n{entries}\n]\n")
    subprocess.run([sys.executable, root / "scripts" / "edges_page.py"], check=True)
    return [record_file, root / "docs" / "internals" / "edges.md"]
