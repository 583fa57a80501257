"""What a report of two unordered accesses says: the hazard, the edge that is missing, the rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fenceline.memory_order.edges import EDGES, Edge, Hazard

_MAX_RUNS = 6


def hazard_of(first_writes: bool, second_writes: bool) -> Hazard:
    """What order would prevent, of two accesses to the same memory in program order; one of them writes."""
    if first_writes:
        return Hazard.WAW if second_writes else Hazard.RAW
    return Hazard.WAR


def fitting_edges(hazard: Hazard, first: str, second: str) -> list[Edge]:
    """Declared edges that would have ordered an access on stream ``first`` before one on ``second``.

    An exclusive resource may be held by either of the two first.
    """
    return [edge for edge in EDGES.values() if hazard in edge.hazards and _fits(edge, hazard, first, second)]


def _fits(edge: Edge, hazard: Hazard, first: str, second: str) -> bool:
    pairs = [(waiter.value, source.value) for waiter, source in edge.pairs]
    return (second, first) in pairs or (hazard is Hazard.EXCLUSIVE and (first, second) in pairs)


def missing_edge(edges: list[Edge], first: str, second: str) -> str:
    """The last line of a report; ``first`` and ``second`` are where the two accesses were made."""
    if edges:
        return f"nothing orders them; missing edge: {' or '.join(edge.name for edge in edges)}"
    return (
        "nothing orders them; no edge of memory_order/edges.py fits: "
        f"{second} has to wait, before 2, for {first} after 1"
    )


def row_numbers(rows: npt.NDArray[np.int64]) -> str:
    """``17-32, 40`` for those numbers, ascending."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    runs = [(int(run[0]), int(run[-1])) for run in np.split(rows, breaks) if len(run)]
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_MAX_RUNS]]
    return ", ".join(shown) + (f" and {len(runs) - _MAX_RUNS} more runs" if len(runs) > _MAX_RUNS else "")
