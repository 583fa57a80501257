"""What each guard does, beside what is done instead where a test has severed it: all wrong twins stand here.

``edges.GUARDS`` declares the guards. Other packages call these functions and never ask whether a guard is severed. A
guard that is one call, which is left out where it is severed, stands where that call is: a full stop of the host, the
registration of a graph.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fenceline.config.kv_layout import INDEX, KVLayout
from fenceline.memory_order.device import Device, FillField
from fenceline.memory_order.edges import (
    ACCEPTED_STATE,
    ALL_SHARES,
    ARENA_PAD,
    ENCODED_FIRST,
    ENDS_AT_STATE,
    IN_FLIGHT,
    KEPT_HIDDEN,
    LOADED_STATE,
    MOVED_NODES,
    NEW_WEIGHTS,
    OLD_KV,
    OWN_COPY,
    PLAN_SOURCE,
    RETIRED_AFTER,
    ROW_DELTA,
    ROW_STATE,
    ROW_TOKENS,
    SINK,
    SNAPSHOT_AFTER,
    STEP_IMAGES,
    STEP_SELECTION,
    STEP_SLOTS,
    TIE_ORDER,
    TOTAL_BUCKETS,
    TREE_SLOTS,
    WHOLE_PAGE,
    WHOLE_ROWS,
    Guard,
)
from fenceline.memory_order.lease import Ids, LeasePool
from fenceline.memory_order.stream import Points

T = TypeVar("T")
_Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # of rows: slots, path, counts
_SINK_ID = 0  # the row, page and slot that only padding uses

# --- pages and their slots ---------------------------------------------------------------------------


class _WithoutPoints(LeasePool):
    """Guard ``retired_after``, severed: ids are handed out again without the Points of work that still uses them."""

    def alloc(self, n: int) -> tuple[Ids, Points] | None:
        leased = super().alloc(n)
        return None if leased is None else (leased[0], Points.none())


def tokens_in_flight(device: Device, max_step_tokens: int) -> int:
    """Guard ``in_flight``: how many slots behind its published tokens a request keeps while a step in flight may write
    them. Severed, 0."""
    return max_step_tokens if device.keeps(IN_FLIGHT) else 0


def tree_slots(device: Device, num_spare: int) -> int:
    """Guard ``tree_slots``: how many slots behind those of its tokens a request has in a step, for the nodes of its
    draft tree. Severed, 0, so that the nodes are written to slots that belong to nobody or to another request."""
    return num_spare if device.keeps(TREE_SLOTS) else 0


def page_layers(device: Device, num_layers: int, num_target_layers: int) -> int:
    """Guard ``whole_page``: how many layers of a page a load copies, counted from the first. These are all
    ``num_layers``, the draft's included. Severed, only the target's."""
    return num_layers if device.keeps(WHOLE_PAGE) else num_target_layers


def loaded_parts(device: Device, layout: KVLayout, parts: range) -> Sequence[int]:
    """Guard ``whole_rows``: which ``parts`` of a page a load copies: all. Severed, indexers' rows are left out, as if
    they were in a buffer beside the pages."""
    return parts if device.keeps(WHOLE_ROWS) else [part for part in parts if layout.parts[part].row.name != INDEX]


def exchanges_shares(device: Device, divided: bool) -> bool:
    """Guard ``all_shares``: whether ranks exchange their shares of the pages that they load: if the pages are
    ``divided``. Severed, never."""
    return divided and device.keeps(ALL_SHARES)


def page_leases(device: Device, size: int) -> LeasePool:
    """Guard ``retired_after``: the leases of ``device``'s ``size`` KV pages, of which page 0 is the sink. Pages are
    handed out with the Points after which they may be accessed. Severed, without Points."""
    kind = LeasePool if device.keeps(RETIRED_AFTER) else _WithoutPoints
    return kind("KV pages", size, reserved=1)


def step_table(device: Device, table: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Guard ``step_slots``: returns a function that gives a step the page table [rows, columns] from which it derives
    its slots on FORWARD, as the table is when the function is called. Severed, as it was one step before."""
    if device.keeps(STEP_SLOTS):
        return lambda: table
    last = table.clone()

    def table_of_last_step() -> torch.Tensor:
        stale = last.clone()
        last.copy_(table)
        return stale

    return table_of_last_step


def node_moves(device: Device, move: _Move) -> _Move:
    """Guard ``moved_nodes``: returns the function that moves the KV rows of a draft tree's accepted nodes to their
    tokens' slots in the step that accepts them: ``move(slots, path, counts)``. Severed, the rows are not moved."""
    return move if device.keeps(MOVED_NODES) else _not_yet


def _not_yet(_slots: torch.Tensor, _path: torch.Tensor, _counts: torch.Tensor) -> None:
    """The rows stay where they are."""


def comparison(device: Device, guard: Guard) -> Callable[[int, int], bool]:
    """``guard``: returns a function that tells whether two versions are equal. Severed, it always returns True."""
    return operator.eq if device.keeps(guard) else _always_same


def _always_same(_held: int, _now: int) -> bool:
    return True


# --- inputs, graphs and results of a step --------------------------------------------------------------


def own_copy(device: Device, block: torch.Tensor) -> torch.Tensor:
    """Guard ``own_copy``: FORWARD's copy of ``block`` of the device staging, made on the current stream. Severed, the
    staging itself, which the next upload overwrites."""
    return block.clone() if device.keeps(OWN_COPY) else block


def derived_field(device: Device, name: str, source: str) -> str:
    """Guard ``plan_source``: the field to which replays write what they derive from PLAN field ``source``: ``name``.
    Severed, it is ``source`` itself, from which the next replay derives it again."""
    return name if device.keeps(PLAN_SOURCE) else source


def padded_fields(device: Device, fields: Sequence[FillField]) -> Sequence[FillField]:
    """Guard ``arena_pad``: the fields with all the rows that a fill writes. Severed, only heads: tails keep the values
    of an earlier batch."""
    if device.keeps(ARENA_PAD):
        return fields
    return [replace(f, target=f.target[: f.num_live]) if f.source is not None else f for f in fields]


def pad_value(device: Device, pad: int | float | Guard) -> int | float:
    """The number that ``pad`` stands for: for ``SINK`` the id of the row, page or slot that only padding uses (F18).
    Severed, it is -1, as upstream once had it, which names the last row, and that belongs to a request."""
    if isinstance(pad, Guard):
        assert pad is SINK, f"{pad.name} is no pad"
        return _SINK_ID if device.keeps(SINK) else -1
    return pad


def size_lookup(device: Device, padding: bool) -> Callable[[Sequence[int], int], int | None]:
    """Guard ``total_buckets``: a function that finds the graph of a batch. It takes the captured sizes, ascending, and
    the size of the batch, and returns the smallest size that holds the batch, or without ``padding`` only its exact
    size. If there is none it returns None, and the batch runs without a graph. Severed, a batch that is too large is
    cut to the largest graph that is not larger."""
    if not device.keeps(TOTAL_BUCKETS):
        return _cut_to_fit
    return _padded if padding else _exact


def _padded(sizes: Sequence[int], num: int) -> int | None:
    index = bisect_left(sizes, num)
    return sizes[index] if index < len(sizes) else None


def _exact(sizes: Sequence[int], num: int) -> int | None:
    return num if _padded(sizes, num) == num else None


def _cut_to_fit(sizes: Sequence[int], num: int) -> int:
    return sizes[max(bisect_right(sizes, num) - 1, 0)]


def hidden_copy(device: Device, kept: torch.Tensor, x: torch.Tensor) -> None:
    """Guard ``kept_hidden``: copy ``x`` to ``kept``, both [T, features], on the current stream, for a graph that is
    replayed after the present one. Severed, ``kept`` holds what an earlier step has copied."""
    if device.keeps(KEPT_HIDDEN):
        kept.copy_(x)


# --- the selection of sparse attention ------------------------------------------------------------------

Best = Callable[[torch.Tensor, int], torch.Tensor]


def first_of_best(scores: torch.Tensor, num: int) -> torch.Tensor:
    """Which of the last axis are among the ``num`` with the best ``scores``, bool of their shape. Of those with equal
    scores the first are taken."""
    if scores.shape[-1] <= num:
        return torch.ones_like(scores, dtype=torch.bool)
    least = scores.topk(num, dim=-1).values[..., -1:]
    better, equal = scores > least, scores == least
    return better | equal & (equal.cumsum(-1) <= num - better.sum(-1, keepdim=True))


def _itself(_layer: int, made: Any) -> Any:
    return made


@dataclass(frozen=True, slots=True)
class Selecting:
    """How layers select tokens: ``best`` chooses among scores, and what layers without an indexer use of the selection
    that ``layer`` has ``made`` is ``hand_on(layer, made)``."""

    best: Best = first_of_best
    hand_on: Callable[[int, Any], Any] = _itself


def selecting(device: Device) -> Selecting:
    """Guard ``tie_order``: of equal scores the first tokens are selected. Severed, the last. Guard ``step_selection``:
    a selection is handed on as it was made. Severed, the one that its layer made the last time is."""
    best = first_of_best if device.keeps(TIE_ORDER) else _last_of_best
    return Selecting(best, _itself if device.keeps(STEP_SELECTION) else _Delayed())


def _last_of_best(scores: torch.Tensor, num: int) -> torch.Tensor:
    return first_of_best(scores.flip(-1), num).flip(-1)


class _Delayed:
    def __init__(self) -> None:
        self._last: dict[int, Any] = {}

    def __call__(self, layer: int, made: Any) -> Any:
        before, self._last[layer] = self._last.get(layer, made), made
        return before


# --- images -------------------------------------------------------------------------------------------


def encoded_first(device: Device, encode: Callable[[], None], read: Callable[[], T]) -> T:
    """Guard ``encoded_first``: ``encode`` writes the embeddings of a step's new images, then ``read`` computes the
    layers that read them, both on the current stream; returns what ``read`` does. Severed, they are written after."""
    if device.keeps(ENCODED_FIRST):
        encode()
        return read()
    result = read()
    encode()
    return result


def step_embeddings(device: Device, num_rows: int) -> int:
    """Guard ``step_images``: how many embeddings the images of one step may have in all: the ``num_rows`` of the pool.
    Severed, any number, so that rows of an image that the step reads are given to another one."""
    return num_rows if device.keeps(STEP_IMAGES) else 1 << 30


def told_by(device: Device, guard: Guard) -> Callable[[bytes], bytes]:
    """``guard``, ``image_keys`` or ``image_names``: what tells images apart: their digest. Severed, nothing does."""
    return bytes if device.keeps(guard) else _nothing


def _nothing(_digest: bytes) -> bytes:
    return b""


def write_deltas(device: Device, kept: torch.Tensor, rows: torch.Tensor, deltas: torch.Tensor) -> None:
    """Guard ``row_delta``: ``kept[rows] = deltas`` [n] of a prefill step's requests, on the current stream. Severed,
    requests whose images move no position leave the delta that is there."""
    if not device.keeps(ROW_DELTA):
        deltas = torch.where(deltas == 0, kept.index_select(0, rows), deltas)
    kept.index_copy_(0, rows, deltas)


def tokens_to_keep(device: Device, tokens: Ids, num_computed: int) -> Ids:
    """Guard ``row_tokens``: which of ``tokens``, all up to those that a prefill step computes, the row of their request
    is given: all. Severed, the last ``num_computed``, so that in place of a cached prefix it has other tokens."""
    return tokens if device.keeps(ROW_TOKENS) else tokens[-num_computed:]


# --- states of recurrent layers -----------------------------------------------------------------------


def ends_at_state(device: Device) -> bool:
    """Guard ``ends_at_state``: whether a match ends at the deepest node that has a state. Severed, it ends as in a
    model without states."""
    return device.keeps(ENDS_AT_STATE)


def loads_states(device: Device) -> bool:
    """Guard ``loaded_state``: whether a load brings the states that it is asked for. Severed, the pages alone."""
    return device.keeps(LOADED_STATE)


def states_to_copy(device: Device, copies: Sequence[tuple[int, int]], num_rows: int) -> Sequence[tuple[int, int]]:
    """Guard ``row_state``: which ``copies`` (source, slot) of states are made: all. Severed, none to the slots of rows,
    the first ``num_rows``, so that a request goes on from what its row's last owner has left."""
    return copies if device.keeps(ROW_STATE) else [copy for copy in copies if copy[1] >= num_rows]


def absorbs_drafts(device: Device) -> bool:
    """Guard ``accepted_state``: whether the layers of a step that verifies drafts absorb its tokens where they fill a
    block: no. Severed, they do."""
    return not device.keeps(ACCEPTED_STATE)


def with_snapshots(device: Device, layers: Callable[[], T], copy: Callable[[], None]) -> T:
    """Guard ``snapshot_after``: ``layers`` makes the states of a step, then ``copy`` takes snapshots of them, both on
    the current stream; returns what ``layers`` does. Severed, the snapshots are taken before."""
    if device.keeps(SNAPSHOT_AFTER):
        result = layers()
        copy()
        return result
    copy()
    return layers()


# --- weights -----------------------------------------------------------------------------------------


@contextmanager
def weight_write(device: Device) -> Iterator[None]:
    """Guard ``new_weights``: inside, FORWARD is the current stream, so weights are written after the steps in flight
    have read them and before later steps do. Severed, it is the default stream, which waits for no other."""
    if device.keeps(NEW_WEIGHTS):
        with device.forward.active():
            yield
    else:
        yield


def old_kv_removal(device: Device, forget: Callable[[], int]) -> Callable[[], int]:
    """Guard ``old_kv``: what is called when weights are replaced, ``forget``, which empties the caches of all tiers and
    returns how many pages are free again. Severed, the caches keep what they have."""
    return forget if device.keeps(OLD_KV) else _keep


def _keep() -> int:
    return 0


# --- ranks -------------------------------------------------------------------------------------------


def rank_consensus(device: Device, guard: Guard, agreed: T, own: Callable[[], T]) -> T:
    """``guard``: decisions are made by ``agreed``, which all ranks have received from rank 0. Severed, they are made by
    ``own()``, the state of this rank's own device, which may differ from rank to rank."""
    return agreed if device.keeps(guard) else own()
