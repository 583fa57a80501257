"""The pairs of conflicting accesses in a run, ordered or not, which show what each edge had to order.

An edge that orders nothing in a run is not tested by it. So the detector notes every two accesses to the same memory,
on two streams that an edge joins, of which one writes. Beside the pair it matters whether the edge was needed: if the
first access had run before the second was submitted, the second would have come after it in any case.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from fenceline.memory_order.checker import fitting_edges, hazard_of
from fenceline.memory_order.edges import EDGES, Hazard, StreamName
from fenceline_sim.memory import Tag
from fenceline_sim.streams import RELEASE, Operation

_HOST = StreamName.HOST.value
_STREAMS = frozenset(name.value for name in StreamName)


class Pair(NamedTuple):
    """Two accesses that ``edge`` orders.

    ``waiter`` and ``source``: the edge's streams. If the waiter is the host, the second may be an operation that the
    host has submitted after it waited. ``waited``: the first had not run when the second was submitted, or the host had
    to wait for it.
    """

    edge: str
    waiter: str
    source: str
    hazard: str
    waited: bool


class PairsMet:
    def __init__(self) -> None:
        self.found: set[Pair] = set()

    def may_join(self, first: str, first_wrote: bool, second: Operation, second_writes: bool, tag: Tag) -> bool:
        """Whether an edge joins the stream ``first`` to that of ``second``, which accesses ``tag``'s memory."""
        hazard = Hazard.EXCLUSIVE if tag.is_exclusive else hazard_of(first_wrote, second_writes)
        return bool(_edges(hazard, first, stream_name(second)))

    def note(self, first: Operation, first_wrote: bool, second: Operation, second_writes: bool, tag: Tag) -> None:
        """``first`` has accessed units of ``tag``'s memory that ``second`` accesses now."""
        if RELEASE in (first.label, second.label):
            return  # the memory has had another use since
        hazard = Hazard.EXCLUSIVE if tag.is_exclusive else hazard_of(first_wrote, second_writes)
        source = stream_name(first)
        for edge, waiter in _edges(hazard, source, stream_name(second)):
            waited = first.ran_awaited if waiter == _HOST else first.ran >= second.seq
            self.found.add(Pair(edge, waiter, source, hazard.value, waited))


def missed(pairs: Iterable[Pair]) -> list[str]:
    """The parts of the table of edges to which no pair belongs: an edge between two streams; a hazard of an edge; an
    edge between two streams at which nothing had to wait."""
    pairs = list(pairs)
    met = {(pair.edge, pair.waiter, pair.source) for pair in pairs}
    waited = {(pair.edge, pair.waiter, pair.source) for pair in pairs if pair.waited}
    hazards = {(pair.edge, pair.hazard) for pair in pairs}
    found = []
    for edge in EDGES.values():
        for waiter, source in edge.pairs:
            key = (edge.name, waiter.value, source.value)
            if key not in met:
                found.append(f"{edge.name}, {waiter.value} ← {source.value}: no pair of accesses")
            elif key not in waited:
                found.append(f"{edge.name}, {waiter.value} ← {source.value}: nothing had to wait")
        found += [f"{edge.name}, {hazard.value}" for hazard in edge.hazards if (edge.name, hazard.value) not in hazards]
    return found


@cache
def _edges(hazard: Hazard, first: str, second: str) -> list[tuple[str, str]]:
    """The edges that order two such accesses, each with the stream that waits: those between their streams, otherwise
    those by which the host waits before it submits the second."""
    if first == second or second not in _STREAMS:
        return []
    for waiter in (second, _HOST):
        if edges := fitting_edges(hazard, first, waiter):
            return [(edge.name, waiter) for edge in edges]
    return []


def stream_name(op: Operation) -> str:
    """The stream's name in the table of edges; for a kernel's early reads that of the kernel's stream."""
    return _HOST if op.stream is None else op.stream.edge_name
