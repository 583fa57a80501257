"""What memory relies on: every edge between streams and every guard, declared once. Code applies them by their names.

An edge orders two streams. A guard is anything else that the ordering relies on: a full stop, a private copy, a rule
about when memory is handed out again. ``Device(severed=...)`` takes the names of both, so that a test can leave one
out.
What a guard does, and what is done instead when a test has severed it, is in ``guards``.

An edge or guard enters its table with the commit that applies it. ``scripts/edges_page.py`` makes
``docs/internals/edges.md`` of the tables, with the workload that shows each to be necessary. A guard may be dormant
instead: kept for a feature that does not exist yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


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
    EXCLUSIVE = "exclusive"  # two users of a resource for one


@dataclass(frozen=True, slots=True)
class Edge:
    """In each pair (waiter, source) the waiter does not access ``protects`` before the source has passed its Point."""

    name: str
    pairs: tuple[tuple[StreamName, StreamName], ...]
    hazards: tuple[Hazard, ...]
    protects: str
    failure: str = ""  # the F-number of docs/internals/memory_order.md, "" where none has been reported
    # The functions that apply it, if there are several, each with the reason why it stays there although nothing needs
    # it today, "" if it is needed. The proof severs the edge in each of them separately.
    sites: tuple[tuple[str, str], ...] = ()

    @property
    def waiter(self) -> StreamName:
        """The waiter of the first pair."""
        return self.pairs[0][0]

    @property
    def source(self) -> StreamName:
        """The source of the first pair."""
        return self.pairs[0][1]

    def part(self, waiter: StreamName, source: StreamName, site: str = "") -> str:
        """The name by which a test severs the edge only between these two streams, and only at ``site`` if given."""
        pair = f":{waiter.value}-{source.value}" if len(self.pairs) > 1 else ""
        return f"{self.name}{pair}{'@' if site else ''}{site}"

    @property
    def parts(self) -> tuple[EdgePart, ...]:
        """The parts that the proof severs separately: the edge, or each of its pairs and sites if it has several."""
        return tuple(
            EdgePart(self.part(*pair, site), *pair, site, covered)
            for pair in self.pairs
            for site, covered in self.sites or (("", ""),)
        )


class EdgePart(NamedTuple):
    """An edge between two streams, as it is applied at ``site``, "" if there is only one. ``covered``: why nothing
    needs it there, "" if it is needed."""

    name: str
    waiter: StreamName
    source: StreamName
    site: str
    covered: str


_HOST, _SCHEDULE, _FORWARD = StreamName.HOST, StreamName.SCHEDULE, StreamName.FORWARD
_COPY, _LOAD, _STORE = StreamName.COPY, StreamName.LOAD, StreamName.STORE

# The rings that bring a step's inputs, its masks and its plan to the device.
_RINGS = (("InputRing.upload", ""), ("PlanRing.planning", ""))
_MASKS, _MASKS_BEGIN = "MaskTable.upload", "MaskTable.begin"
_MASKS_COVERED = (
    "masks are made of the tokens of the step before, whose results the host has waited for: FORWARD has read that"
    " step's masks by then. It stays because a slot has the same edges in every ring, and costs nothing"
)

# --- a step's inputs and results ---------------------------------------------------------------------

FORWARD_AFTER_SCHEDULE = Edge(
    "forward_after_schedule",
    ((_FORWARD, _SCHEDULE),),
    (Hazard.RAW,),
    "device staging that was uploaded for this batch, and its plan",
    sites=(*_RINGS, (_MASKS, "")),
)
SCHEDULE_AFTER_FORWARD = Edge(
    "schedule_after_forward",
    ((_SCHEDULE, _FORWARD),),
    (Hazard.WAR,),
    "device staging slots about to be reused",
    "F13",
    sites=(*_RINGS, (_MASKS, _MASKS_COVERED)),
)
COPY_AFTER_FORWARD = Edge(
    "copy_after_forward",
    ((_COPY, _FORWARD),),
    (Hazard.RAW,),
    "sampled tokens, logprobs and embeddings in the result ring",
)
HOST_AFTER_COPY = Edge(
    "host_after_copy",
    ((_HOST, _COPY),),
    (Hazard.RAW, Hazard.WAR),
    "results in pinned memory, and the device result slot they came from",
)
HOST_AFTER_FORWARD = Edge(
    "host_after_forward",
    ((_HOST, _FORWARD),),
    (Hazard.RAW,),
    "results in pinned memory that FORWARD has written there itself",
)
STAGING_REUSE = Edge(
    "staging_reuse",
    ((_HOST, _SCHEDULE),),
    (Hazard.WAR,),
    "pinned staging slots about to be rewritten",
    "F12",
    sites=(*_RINGS, (_MASKS_BEGIN, _MASKS_COVERED)),
)

# --- KV pages on their way between device and host ---------------------------------------------------

STORE_AFTER_FORWARD = Edge(
    "store_after_forward",
    ((_STORE, _FORWARD),),
    (Hazard.RAW,),
    "KV pages being backed up, which a step may still write",
    "F1",
)
FORWARD_AFTER_STORE = Edge(
    "forward_after_store",
    ((_FORWARD, _STORE),),
    (Hazard.WAR,),
    "reused KV pages and snapshots of states whose backup still reads them",
    "F1",
    sites=(("ModelRunner.launch", ""), ("ModelRunner.copy_state", "")),
)
LOAD_AFTER_FORWARD = Edge(
    "load_after_forward",
    ((_LOAD, _FORWARD),),
    (Hazard.WAR, Hazard.WAW),
    "KV pages that were retired while a step in flight uses them",
    "F3",
)
FORWARD_AFTER_LOAD = Edge(
    "forward_after_load",
    ((_FORWARD, _LOAD),),
    (Hazard.RAW, Hazard.WAW),
    "KV pages being loaded, layer by layer, those of a load that nobody needs any more, and states being loaded",
    "F4",
    sites=(
        ("HiCacheController.layer_ready", ""),
        (
            "ModelRunner.launch",
            "a load is submitted with the step that reads it, which waits for it layer by layer, and before it the copy"
            " of a loaded state to a snapshot: what FORWARD is given later comes after it. It stays for states where no"
            " snapshot is free, and for loads that no step reads, and costs nothing where there are none",
        ),
        ("ModelRunner.copy_state", ""),
    ),
)
LOAD_AFTER_STORE = Edge(
    "load_after_store",
    ((_LOAD, _STORE),),
    (Hazard.WAR, Hazard.RAW),
    "KV pages whose backup still reads them; host pages whose backup still writes them",
    "F15",
)
STORE_AFTER_LOAD = Edge(
    "store_after_load",
    ((_STORE, _LOAD),),
    (Hazard.WAR, Hazard.RAW),
    "host pages that a load still reads; KV pages that a load still fills",
    "F15",
)
SM_EXCLUSIVE = Edge(
    "sm_exclusive",
    ((_FORWARD, _STORE), (_STORE, _FORWARD)),
    (Hazard.EXCLUSIVE,),
    "the multiprocessors, of persistent attention and of backups that run on them",
    "F2",
)
HOST_PAGE_REUSE = Edge(
    "host_page_reuse",
    ((_HOST, _LOAD), (_HOST, _STORE)),
    (Hazard.WAR, Hazard.RAW, Hazard.WAW),
    "pinned host pages touched by storage workers",
    "F15",
)

RING_EDGES = (
    FORWARD_AFTER_SCHEDULE,
    SCHEDULE_AFTER_FORWARD,
    COPY_AFTER_FORWARD,
    HOST_AFTER_COPY,
    HOST_AFTER_FORWARD,
    STAGING_REUSE,
)
PAGE_EDGES = (
    STORE_AFTER_FORWARD,
    FORWARD_AFTER_STORE,
    LOAD_AFTER_FORWARD,
    FORWARD_AFTER_LOAD,
    LOAD_AFTER_STORE,
    STORE_AFTER_LOAD,
)
EDGES: dict[str, Edge] = {edge.name: edge for edge in (*RING_EDGES, *PAGE_EDGES, SM_EXCLUSIVE, HOST_PAGE_REUSE)}
EDGE_PARTS: dict[str, EdgePart] = {part.name: part for edge in EDGES.values() for part in edge.parts}
_PAGE_EDGE_OF = {edge.pairs[0]: edge for edge in PAGE_EDGES}


def edge_of(part: str) -> str:
    """The name of the edge to which ``part``, an :class:`EdgePart`'s name or a row's, belongs."""
    return part.partition("/")[0].partition("@")[0].partition(":")[0]


def pages_edge(waiter: StreamName, source: StreamName) -> Edge:
    """The edge by which ``waiter`` takes over KV pages, or host pages, that ``source`` has accessed. Raises
    ``KeyError`` if there is none, because one of the two streams does not access pages."""
    return _PAGE_EDGE_OF[waiter, source]


# --- guards ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Guard:
    """``protects``: what it protects. ``dormant``: why it cannot matter yet, "" if it can."""

    name: str
    protects: str
    failure: str = ""  # the F-number of docs/internals/memory_order.md, "" where none has been reported
    dormant: str = ""


GUARDS: dict[str, Guard] = {}


def _guard(name: str, protects: str, failure: str = "", dormant: str = "") -> Guard:
    """Declares a guard."""
    GUARDS[name] = Guard(name, protects, failure, dormant)
    return GUARDS[name]


STARTUP_STOP = _guard(
    "startup_stop", "weights, pools and tables, written on the default stream, which is ordered with no other"
)
GROWTH_STOP = _guard(
    "growth_stop", "a ring's slot that goes back to the allocator because a larger one takes its place", "F16"
)
OWN_COPY = _guard(
    "own_copy", "inputs that later steps still use: FORWARD has its own copy of them, outside the device staging", "F12"
)
SAME_COMPOSITION = _guard(
    "same_composition",
    "rows, lengths and sampling parameters on the device: used again only by the same batch of requests",
)
RETIRED_AFTER = _guard(
    "retired_after", "pages that a step or a transfer in flight still accesses: leased again with its Points", "F3, F13"
)
QUEUED_MATCH = _guard(
    "queued_match", "where a waiting request's prefix lies: looked up again once its pages have moved or gone", "F5"
)
RESULT_LEASE = _guard(
    "result_lease",
    "a result slot whose results have not been read yet",
    "F8",
    dormant="the loop has two steps in flight and the ring is two deep",
)
ARENA_PAD = _guard(
    "arena_pad", "the padded rows of a graph's inputs: they hold pads, not values of an earlier batch", "F7"
)
OWN_RESULTS = _guard(
    "own_results",
    "a step's results: packed into a slot in FORWARD's order, before the next replay overwrites the outputs",
    "F8",
)
PLAN_SOURCE = _guard(
    "plan_source",
    "what a batch is planned from: replays write their derived inputs to other memory than the plan's",
    "F9",
)
TOTAL_BUCKETS = _guard(
    "total_buckets",
    "batches larger than every captured graph: they run without a graph and are not cut to fit one",
    "F11",
)
GRAPH_POOL = _guard(
    "graph_pool", "the memory of captured graphs: nothing else gets it as long as they can be replayed", "F17"
)
SINK = _guard("sink", "live pages and rows from writes of padding, which names page 0 and row 0", "F18")

STEP_SLOTS = _guard(
    "step_slots", "the slots of a speculative step's rows: derived on the device from the page table of that step", "F5"
)
IN_FLIGHT = _guard(
    "in_flight",
    "slots behind a request's published tokens, which a step in flight may write: they stay the request's",
    "F13",
)
WHOLE_PAGE = _guard("whole_page", "a page's layers, the target's and the draft's: every copy moves all of them", "F14")
WHOLE_ROWS = _guard(
    "whole_rows", "the rows of a layer, an indexer's keys beside the latents: every copy moves all of them", "F20"
)
ALL_SHARES = _guard(
    "all_shares",
    "the rows that all ranks have, of which each keeps a share on the host: a load brings the others' shares too",
)
STEP_SELECTION = _guard(
    "step_selection", "the tokens that an indexer has selected: layers without one use the selection of the same step"
)
TIE_ORDER = _guard(
    "tie_order", "the selection among equal scores: the first tokens, however a sequence was cut and batched"
)
KEPT_HIDDEN = _guard(
    "kept_hidden",
    "the target's hidden states from which the draft computes its rows: kept in each step for that step",
    "F8",
)
TREE_SLOTS = _guard(
    "tree_slots",
    "the slots of a tree's nodes behind those of the tokens that a step may yield: they are the request's",
    "F13",
)
MOVED_NODES = _guard(
    "moved_nodes", "the rows of a tree's accepted nodes: in their tokens' slots before the next step reads these"
)
MASK_ROWS = _guard(
    "mask_rows",
    "the rows of requests without a grammar and of padding: they allow every token, and are not the mask of "
    "the row's last request",
    "F7",
)
REGISTERED_GRAPH = _guard(
    "registered_graph",
    "the addresses of peers' buffers that a graph uses: exchanged after its capture, before its first replay",
    "F10",
)
ONE_STREAM = _guard(
    "one_stream",
    "the order of a communicator's operations: all on one stream, so that it is the same on all ranks",
    "F19",
)
FLAG_GENERATION = _guard(
    "flag_generation", "what peers write for a collective operation: its flags are not those of the last one"
)
PEER_HALVES = _guard(
    "peer_halves",
    "a rank's buffer that it still reads for the last collective operation: the next one has the other half",
)
PEER_WORDS = _guard(
    "peer_words", "a vector that a peer sends in several words: each of them is waited for, not only the first"
)
RANK_RESULTS = _guard(
    "rank_results",
    "decisions by results: they have arrived when they have on all ranks, whatever each one's device says",
    "F19",
)
ENDED_ON_ALL = _guard(
    "ended_on_all", "decisions by transfers between device and host: one has ended when it has on all ranks", "F19"
)
ENCODED_FIRST = _guard(
    "encoded_first", "embeddings of images: they are written before the layers of the step that reads them"
)
STEP_IMAGES = _guard(
    "step_images", "the rows of embeddings that a step reads: no other image of the same step is given them", "F3"
)
IMAGE_KEYS = _guard("image_keys", "prefixes with images, on device and host: their keys tell images apart")
IMAGE_NAMES = _guard("image_names", "pages with images in storage: their names tell images apart")
ROW_DELTA = _guard(
    "row_delta", "positions behind images: a row's delta is that of its request, not of its last owner", "F13"
)
ROW_TOKENS = _guard(
    "row_tokens",
    "tokens in which drafts are looked up: a row has its request's from the first on, not its last owner's",
    "F13",
)
ENDS_AT_STATE = _guard(
    "ends_at_state", "prefixes of a model with recurrent layers: a match ends where there is a state to go on from"
)
ROW_STATE = _guard(
    "row_state", "the state of a request behind a prefix: its row has the prefix's, and not its last owner's", "F13"
)
SNAPSHOT_AFTER = _guard(
    "snapshot_after", "snapshots of states: copied behind the layers of the step that makes these states"
)
COMMITTED_STATE = _guard(
    "committed_state",
    "the last state of a request that leaves: not kept where a step in flight may bring it beyond published tokens",
)
ACCEPTED_STATE = _guard(
    "accepted_state", "states beside drafts: a step that verifies tokens absorbs none of them, for some may be rejected"
)
LOADED_STATE = _guard(
    "loaded_state", "a prefix of a model with recurrent layers that is loaded: its state comes with its pages"
)
NEW_WEIGHTS = _guard("new_weights", "the weights that a step in flight reads: they are replaced on FORWARD, after it")
OLD_KV = _guard(
    "old_kv", "requests from keys, values and embeddings of weights that have been replaced: every tier forgets them"
)

# Edges and guards that are also severed in an engine that speculates, since its runner has its own arena, graphs and
# results: the row of the proof, and what it severs.
_ALSO_UNDER_SPECULATION: tuple[Edge | Guard, ...] = (
    *(HOST_AFTER_COPY, SAME_COMPOSITION, RETIRED_AFTER, ARENA_PAD, OWN_RESULTS),
    *(PLAN_SOURCE, TOTAL_BUCKETS, GRAPH_POOL, SINK),
)
UNDER_SPECULATION = {f"{each.name}/speculation": each.name for each in _ALSO_UNDER_SPECULATION}
UNDER_SPECULATION["whole_page/sparse"] = WHOLE_PAGE.name  # the keys of a draft's indexer are rows of the page too

# All rows of the proof, in the order of its tables.
ROWS = (*EDGE_PARTS, *GUARDS, *UNDER_SPECULATION)
