"""Guards: what keeps memory right beside the edges, in one place each, so that a test can do without one.

An edge orders two streams. A guard is anything else that the ordering relies on: a full stop, a copy of one's own, a
rule about who gets memory next. ``Device(severed=...)`` takes their names too. What a guard does, and what happens in
its place where a test has severed it, stands side by side in the file of this package that does it: whoever uses it
elsewhere calls one thing and asks nothing. A guard is in the table with the workload that shows it to be necessary, or
as dormant: kept for a feature that is not there yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guard:
    """``protects`` what it does. ``dormant``: why it cannot matter yet, "" if it can."""

    name: str
    protects: str
    failure: str = ""  # the F-number of docs/memory_order.md, "" where none has been reported
    dormant: str = ""


STARTUP_STOP = Guard(
    name="startup_stop",
    protects="weights, pools and tables, written on the default stream, which is ordered with no other",
)
GROWTH_STOP = Guard(
    name="growth_stop",
    protects="a ring's slot that goes back to the allocator because a larger one takes its place",
    failure="F16",
)
OWN_COPY = Guard(
    name="own_copy",
    protects="inputs that later steps still use: FORWARD has them in memory of its own, not in the device staging",
    failure="F12",
)
SAME_COMPOSITION = Guard(
    name="same_composition",
    protects="rows, lengths and sampling parameters on the device: used again only by the same batch of requests",
)
RETIRED_AFTER = Guard(
    name="retired_after",
    protects="pages that a step or a transfer in flight still touches: leased out again with its Points",
    failure="F3, F13",
)
QUEUED_MATCH = Guard(
    name="queued_match",
    protects="where a waiting request's prefix lies: found anew once its pages have moved or gone",
    failure="F5",
)
RESULT_LEASE = Guard(
    name="result_lease",
    protects="a result slot that nobody has taken from yet",
    failure="F8",
    dormant="the loop has two steps in flight and the ring is two deep",
)
ARENA_PAD = Guard(
    name="arena_pad",
    protects="the padded rows of a graph's inputs: they hold pads, not what the last batch of that size left",
    failure="F7",
)
OWN_RESULTS = Guard(
    name="own_results",
    protects="a step's results: packed into a slot in FORWARD's order, before the next replay overwrites the outputs",
    failure="F8",
)
PLAN_SOURCE = Guard(
    name="plan_source",
    protects="what a batch is planned from: replays derive their inputs into other memory than the plan's",
    failure="F9",
)
TOTAL_BUCKETS = Guard(
    name="total_buckets",
    protects="batches larger than every captured graph: they run without one, none is cut to fit",
    failure="F11",
)
GRAPH_POOL = Guard(
    name="graph_pool",
    protects="the memory of captured graphs: it stays theirs as long as they can be replayed",
    failure="F17",
)
SINK = Guard(
    name="sink",
    protects="live pages and rows from writes of padding, which names page 0 and row 0",
    failure="F18",
)

GUARDS: dict[str, Guard] = {
    guard.name: guard
    for guard in (
        STARTUP_STOP,
        GROWTH_STOP,
        OWN_COPY,
        SAME_COMPOSITION,
        RETIRED_AFTER,
        QUEUED_MATCH,
        RESULT_LEASE,
        ARENA_PAD,
        OWN_RESULTS,
        PLAN_SOURCE,
        TOTAL_BUCKETS,
        GRAPH_POOL,
        SINK,
    )
}
