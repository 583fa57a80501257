"""Shadow tags: a record of what each slot of KV memory holds, which is compared with what it must hold.

A tag names a token prefix (all tokens up to the slot's own, in one namespace) and a part of the page (for example a
layer's keys). It is written when a step stores keys and values, copied with every copy between the tiers, to storage
and back, and compared when the slot is read. All of this happens when the operation itself runs, in the order of its
stream and in replays too. So a page in the wrong place is reported at the first operation that puts or finds it there,
with the operation that wrote it, long before a token is wrong.

What a slot must hold follows from a list of each request's tokens outside the engine's memory: its prompt as it
arrived, and what each step has sampled for it, added when that step samples.

A draft that reads hidden states computes its row of a token from the token after it, so that is the token at which the
row's prefix ends. Where the tree's pages depend on tokens behind them, so does what they must hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view

from fenceline.layers.kernels.accesses import list_attention
from fenceline.mem_cache.host.host_states import Pairs
from fenceline.mem_cache.transfer import TransferKind
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import RadixCache, TreeNode
from fenceline.memory_order import Points
from fenceline.memory_order.edges import COMMITTED_STATE, LOADED_STATE
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import StepBatch
from fenceline.models.loader import NewWeights
from fenceline.scheduler.req import Req
from fenceline.scheduler.scheduler import Scheduler
from fenceline_sim.accounts import GUESS, I32, I64, NOTHING, Account, Prefixes, Seq
from fenceline_sim.errors import CheckError, FootprintError, TagError
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.image_tags import ImageTags, StepImages
from fenceline_sim.layout import Layout, layout_of
from fenceline_sim.memory import Access, Tag, row_values
from fenceline_sim.ownership import Leases
from fenceline_sim.place import here
from fenceline_sim.state_tags import StateCopy, StateTags, StepStates
from fenceline_sim.streams import Operation, who
from fenceline_sim.tensor import VTensor

SINK_PAGE = 0
HOLE = "which the draft has not computed"


class SlotMemory:
    """A piece of memory with KV slots, in the order of their bytes: what each slot is for, and what it holds."""

    def __init__(self, name: str, page_size: int, parts: Mapping[int, Layout], ops: list[Operation | None]) -> None:
        """``parts``: the bytes of each part in the memory, uint8 [num_pages, bytes of a page's part], by its number.
        ``ops``: None, and the operations that have written to any memory of the engine. Arrays have their places there:
        Python's garbage collector does not look into arrays of objects."""
        self._ops = ops
        self.name = name
        self.page_size = page_size
        starts, numbers, pages, offsets = [], [], [], []
        for number, layout in parts.items():
            num_pages, nbytes = layout.form.shape
            of_page = np.arange(num_pages) * layout.form.stride[0]
            of_token = np.arange(page_size) * (nbytes // page_size)
            starts.append((layout.offset + of_page[:, None] + of_token).reshape(-1))
            numbers.append(np.full(num_pages * page_size, number))
            pages.append(np.arange(num_pages).repeat(page_size))
            offsets.append(np.tile(np.arange(page_size), num_pages))
        order = np.argsort(np.concatenate(starts))
        self._starts = np.concatenate(starts)[order]
        self.part, self.page, self.offset = (np.concatenate(a)[order] for a in (numbers, pages, offsets))
        self.held: I64 = np.full(len(order), NOTHING, np.int64)
        self.writers: I64 = np.zeros(len(order), np.int64)  # the operation that put it there
        self.origins: I64 = np.zeros(len(order), np.int64)  # the operation that computed it
        self._of_layout: dict[Layout, I64] = {}

    def slots(self, access: Access) -> I64:
        """The slots that an operation accesses, in the order in which it names them."""
        if access.rows is not None:
            return self._of_rows(access.layout, row_values(access.rows))
        slots = self._of_layout.get(access.layout)
        if slots is None:
            starts, nbytes = _pieces(access.layout)
            slots = self._of_layout[access.layout] = self.between(starts, nbytes)
        return slots

    def between(self, starts: I64, nbytes: int) -> I64:
        """The slots of the pieces of ``nbytes`` bytes that begin at ``starts``."""
        first = np.searchsorted(self._starts, starts, side="right") - 1
        num = np.searchsorted(self._starts, starts + nbytes) - first
        if (num == 1).all():
            return first
        return np.concatenate([np.arange(f, f + n) for f, n in zip(first.tolist(), num.tolist(), strict=True)])

    def _of_rows(self, layout: Layout, rows: I64) -> I64:
        form = layout.form
        numbers = np.clip(np.where(rows < 0, rows + form.shape[0], rows), 0, form.shape[0] - 1)
        step = form.stride[0] * form.itemsize
        return self.between(layout.offset * form.itemsize + numbers * step, form.nbytes - (form.shape[0] - 1) * step)

    def write(self, slots: I64, tags: I64 | int, op: Operation) -> None:
        """``op`` has computed the present contents of ``slots``."""
        self.held[slots] = tags
        self.writers[slots] = self.origins[slots] = self.number_of(op)

    def number_of(self, op: Operation) -> int:
        """The place of ``op``, which writes now, among the operations."""
        if self._ops[-1] is not op:
            self._ops.append(op)
        return len(self._ops) - 1

    def writer(self, slot: int) -> Operation | None:
        """The operation that put there what it holds; None if that was before the memory was watched."""
        return self._ops[self.writers[slot]]

    def describe(self, slot: int) -> str:
        """``host_pool page 3, token 2 of it``."""
        return f"{self.name} page {self.page[slot]}, slot {self.offset[slot]} of it"

    def history(self, slot: int) -> list[str]:
        writer, origin = self.writer(slot), self._ops[self.origins[slot]]
        if writer is None:
            return ["  not written since it is watched"]
        lines = [f"  written by {who(writer)}"]
        if origin is not None and origin is not writer:
            lines.append(f"  a copy of what {who(origin)} computed")
        return lines


def _pieces(layout: Layout) -> tuple[I64, int]:
    """The contiguous pieces of a layout in the order of its elements: where they begin, and their bytes."""
    form = layout.form
    nbytes, dims = form.itemsize, list(zip(form.shape, form.stride, strict=True))
    while dims and (dims[-1][0] == 1 or dims[-1][1] * form.itemsize == nbytes):
        nbytes *= dims.pop()[0]
    starts = np.array([layout.offset * form.itemsize])
    for size, step in dims:
        starts = (starts[:, None] + np.arange(size) * step * form.itemsize).reshape(-1)
    return starts, nbytes


class Step:
    """The purpose of a step's operations."""

    def __init__(
        self, tags: Tags, seqs: Sequence[Seq], images: StepImages | None = None, states: StepStates | None = None
    ) -> None:
        self._tags = tags
        self.images = images
        self.states = states
        self.seqs = seqs
        self._some_decode = any(seq.decodes for seq in seqs)
        self._kind = "decode step" if all(seq.decodes for seq in seqs) else "prefill step"
        self._pages = frozenset(chain.from_iterable(seq.pages.tolist() for seq in seqs))
        self._by_row = {seq.row: seq for seq in seqs}
        self._next_part = 0  # to be stored
        # Pages that it has declared: to be accessed, and to be written; None: nobody asks.
        self.declared: tuple[frozenset[int], frozenset[int]] | None = None
        self._begun: set[int] = set()  # parts that it has stored
        # Of each part: the requests whose slots its latest pass has not read.
        self._unread: dict[int, list[Seq]] = {}
        self._in_order: dict[int, bool] = {}  # of each part: whether all requests are read at once, in their order
        self._ends: dict[int, list[I64]] = {}

    def ran(self, op: Operation) -> None:
        tags = self._tags
        for access, writes in (*((read, False) for read in op.reads), *((write, True) for write in op.writes)):
            memory = tags.memories.get(access.tag)
            if memory is not None:
                slots = memory.slots(access)
                self._check_declared(op, memory, slots, writes)
                if not writes and op.label == list_attention.name:
                    self._read_some(op, memory, slots)
                else:
                    (self._write if writes else self._read)(op, memory, slots)
            elif writes and access.tag is tags.page_table:
                self._enter_pages(op, access)
            elif writes and access.tag is tags.last_tokens:
                self._sample(op, access)
            elif self.images is not None:
                self.images.ran(op, access, writes)
            elif self.states is not None:
                self.states.ran(op, access, writes)

    def _prefixes(self, seq: Seq, part: int) -> I64:
        """The prefixes on which its tokens' slots of ``part`` depend; all steps before this one have sampled, and where
        a draft stores its rows, this one has."""
        shift = self._tags.shifts[part]
        found = self._ends.get(shift)
        if found is None:
            found = self._ends[shift] = [
                np.array(self._tags.ends_from(s.account, shift, s.length), np.int64) for s in self.seqs
            ]
        return found[self.seqs.index(seq)]

    def declare(self, accessed: frozenset[int], written: frozenset[int]) -> None:
        """It has declared these pages: those of its requests, and to be written those of their new tokens."""
        self.declared = accessed, written
        if not self._tags.compares_declared:
            return
        new = {
            page
            for seq in self.seqs
            for page in seq.pages[seq.first // self._tags.page_size : -(-seq.length // self._tags.page_size)].tolist()
        }
        if accessed != self._pages or written != new:
            declared, right = (sorted(accessed), sorted(written)), (sorted(self._pages), sorted(new))
            raise FootprintError(f"footprint: a {self._kind} declares pages {declared}, {right} are its own")

    def check_declared(self) -> None:
        """It has been submitted."""
        if self.declared is None and self._tags.compares_declared:
            raise FootprintError(f"footprint: a {self._kind} has declared no pages")

    def _check_declared(self, op: Operation, memory: SlotMemory, slots: I64, writes: bool) -> None:
        if self.declared is None:  # pages that arrive layer by layer are declared behind the last layer
            return
        declared = self.declared[writes]
        pages = np.unique(memory.page[slots]).tolist()
        page = next((page for page in pages if page != SINK_PAGE and page not in declared), None)
        if page is not None:
            slot = int(slots[memory.page[slots] == page][0])
            what = "writes" if writes else "reads"
            self._tags.found(memory, slot, f"{self._kind} {what} a page that it has not declared", op)

    # --- reading

    def _read(self, op: Operation, memory: SlotMemory, slots: I64) -> None:
        """Check a read of attention: the slots of one request after the other, in order; padding reads the sink's."""
        slots = self._own(op, memory, slots)
        if len(slots) == 0:
            return
        part = int(memory.part[slots[0]])
        unread = self._unread.setdefault(part, [])
        window = self._tags.windows[part]
        if not unread:
            unread += self.seqs
            num_unread = sum(seq.length - seq.first_read(window) for seq in unread)
            self._in_order[part] = not self._some_decode or len(slots) >= num_unread
        left = self._left_of(unread, memory, slots, part)
        if left is not None:
            unread[:] = left
            return
        rest: Sequence[Seq] = unread
        while fitting := list(self._fitting(rest, memory, slots, part)):
            rest, slots = fitting[0]
        first = next(self._candidates(rest, self._in_order[part]), self.seqs[0])
        self._misread_as(op, memory, slots, first, self._to_read(first, part), first.first_read(window))

    def _read_some(self, op: Operation, memory: SlotMemory, slots: I64) -> None:
        """Check a read of sparse attention: of slots that are tokens of the step's requests, in any order."""
        slots = self._own(op, memory, slots)
        if len(slots) == 0:
            return
        part = int(memory.part[slots[0]])
        wrong = np.flatnonzero(~np.isin(memory.held[slots], np.concatenate(self._readable(part))))
        if len(wrong):
            self._tags.found(memory, int(slots[wrong[0]]), f"{self._kind} reads it as a token of its requests", op)
        self._unread[part] = []

    def _readable(self, part: int) -> Sequence[I64]:
        """What the slots of ``part`` hold that each request may read."""
        return [self._to_read(seq, part) for seq in self.seqs]

    def _own(self, op: Operation, memory: SlotMemory, slots: I64) -> I64:
        """Those of ``slots`` that ``op`` reads which are not the sink's; they must be of the step's pages."""
        slots = slots[memory.page[slots] != SINK_PAGE]
        foreign = next((page for page in memory.page[slots].tolist() if page not in self._pages), None)
        if foreign is not None:
            readers = f"a {self._kind} of {', '.join(seq.account.name for seq in self.seqs)}"
            self._tags.pages.refuse(foreign, readers, op)
        return slots

    def _left_of(self, unread: Sequence[Seq], memory: SlotMemory, slots: I64, part: int) -> Sequence[Seq] | None:
        """What is left of ``unread`` behind a read of ``slots``; None if these are not the slots of requests. All ways
        to divide the slots are tried: a request that may be left out can fit where a longer one with the same first
        tokens is read."""
        if not len(slots):
            return unread
        fitting = self._fitting(unread, memory, slots, part)
        ways = (self._left_of(rest, memory, others, part) for rest, others in fitting)
        return next((left for left in ways if left is not None), None)

    def _fitting(
        self, unread: Sequence[Seq], memory: SlotMemory, slots: I64, part: int
    ) -> Iterator[tuple[Sequence[Seq], I64]]:
        """For each request whose slots may come first: the requests that are then unread, and the other slots. Of
        several with the same slots to read it is the first."""
        in_order, window = self._in_order[part], self._tags.windows[part]
        nums = set[int]()
        for seq in self._candidates(unread, in_order):
            num = seq.length - seq.first_read(window)
            if num not in nums and np.array_equal(memory.held[slots[:num]], self._to_read(seq, part)):
                nums.add(num)
                index = unread.index(seq)
                yield [*unread[: 0 if in_order else index], *unread[index + 1 :]], slots[num:]

    def _candidates(self, unread: Sequence[Seq], in_order: bool) -> Iterator[Seq]:
        """The requests that may be read next: the first; prompts without a prefix may be left out; those that decode
        may be sorted by length, for attention in groups."""
        for seq in unread:
            yield seq
            if seq.decodes or seq.first > 0:
                break
        if not in_order:
            longest = max([seq.length for seq in unread if seq.decodes], default=0)
            yield from (seq for seq in unread[1:] if seq.decodes and seq.length == longest)

    def _to_read(self, seq: Seq, part: int) -> I64:
        """What the slots of ``part`` hold that it has to read: all, or those that a window leaves."""
        first = seq.first_read(self._tags.windows[part])
        return self._tags.tag(self._prefixes(seq, part)[first:], part)

    def _misread_as(
        self, op: Operation, memory: SlotMemory, slots: I64, seq: Seq, expected: I64, first: int = 0
    ) -> None:
        """``expected``: of its slots from token ``first`` on."""
        num = min(len(slots), len(expected))
        wrong = np.flatnonzero(memory.held[slots[:num]] != expected[:num])
        place = int(wrong[0]) if len(wrong) else num
        if place == len(slots):
            text = f"token {first + place} of {seq.account.name} is left out"
            self._tags.found(memory, int(slots[-1]), f"{self._kind}: {text}", op)
        else:
            what = f"{self._kind} reads it as token {first + place} of {seq.account.name}"
            self._tags.found(memory, int(slots[place]), what, op)

    def _check_all_read(self, op: Operation, rows: Sequence[int]) -> None:
        """Reads of the sink's slots are not compared, so a request all of whose reads went there has been left out."""
        sampled = set(rows)
        for part in range(self._tags.num_parts):
            for seq in self._unread.get(part, self.seqs):
                if seq.row not in sampled or not seq.decodes:
                    continue
                self._not_read(op, seq, part)
                return

    def _begin_pass(self, op: Operation, part: int) -> None:
        """``op`` stores ``part``, and attention reads it afterwards. With ``--debug-cuda-graph`` a step computes all
        layers twice: what the first pass has not read must be what may be left out."""
        unread = self._unread.pop(part, self.seqs) if part in self._begun else ()
        self._begun.add(part)
        for seq in unread:
            if seq.decodes or seq.first > 0:
                self._not_read(op, seq, part)
                return

    def _not_read(self, op: Operation, seq: Seq, part: int) -> None:
        name = self._tags.part_names[part]
        self._tags.report(op, name, f"{self._kind} has not read {name} of {seq.account.name}\n  by the time of")

    # --- writing

    def _write(self, op: Operation, memory: SlotMemory, slots: I64) -> None:
        """Check a store: the step's tokens are stored in order, part by part; rows after them are padding."""
        tags, part = self._tags, self._next_part
        self._next_part = (part + 1) % tags.num_parts
        size = memory.page_size
        if len(slots) and memory.part[slots[0]] != part:
            names = tags.part_names
            text = f"{self._kind} stores {names[part]} in {names[int(memory.part[slots[0]])]}"
            tags.found(memory, int(slots[0]), text, op)
        self._begin_pass(op, part)
        ends = np.concatenate([self._prefixes(seq, part)[seq.first :] for seq in self.seqs])
        meant = np.concatenate([seq.slots(size)[seq.first :] for seq in self.seqs])
        num_live = min(len(ends), len(slots), len(meant))
        numbers = memory.page[slots] * size + memory.offset[slots]
        self._check_padding(op, memory, slots, len(meant))
        wrong = np.flatnonzero(numbers[:num_live] != meant[:num_live])
        if len(wrong):
            self._misplaced(op, memory, int(slots[wrong[0]]), *self._of_token(int(wrong[0])), int(meant[wrong[0]]))
        memory.write(slots[:num_live], tags.tag(ends[:num_live], part), op)

    def _check_padding(self, op: Operation, memory: SlotMemory, slots: I64, num_live: int) -> None:
        padded = np.flatnonzero(memory.page[slots[num_live:]] != SINK_PAGE)
        if len(padded):
            row = num_live + int(padded[0])
            text = f"row {row} of {self._kind}, which is padding ({num_live} are live), writes it"
            self._tags.found(memory, int(slots[row]), text, op)

    def _misplaced(self, op: Operation, memory: SlotMemory, slot: int, seq: Seq, position: int, meant: int) -> None:
        """``meant``: the slot of that token, -1 if there is none."""
        name, page = seq.account.name, int(memory.page[slot])
        if page not in seq.pages and page != SINK_PAGE:
            self._tags.pages.refuse(page, f"a {self._kind} of {name}", op)
        right = f"not in slot {meant % memory.page_size} of page {meant // memory.page_size}"
        text = f"{self._kind} stores token {position} of {name} here, {right if meant >= 0 else 'and it ends before'}"
        self._tags.found(memory, slot, text, op)

    def _of_token(self, row: int) -> tuple[Seq, int]:
        for seq in self.seqs:
            if row < seq.length - seq.first:
                return seq, seq.first + row
            row -= seq.length - seq.first
        raise AssertionError("a live row")

    # --- the request rows

    def _rows(self, access: Access) -> list[int]:
        if access.rows is None:
            return list(self._by_row)
        return np.unique(row_values(access.rows)).tolist()

    def _enter_pages(self, op: Operation, access: Access) -> None:
        table = access.tag.region.view(self._tags.table_layout).numpy()
        for row in self._rows(access):
            seq = self._by_row.get(row)
            if seq is None:
                continue  # of a request that has left, or of another step: not read in this one
            wrong = np.flatnonzero(table[row, : len(seq.pages)] != seq.pages)
            if len(wrong):
                column = int(wrong[0])
                names = f"names page {table[row, column]}, not {seq.pages[column]}"
                text = f"the page table of {seq.account.name} (row {row}), column {column}, {names}\n  written by"
                self._tags.report(op, f"req_pool.page_table row {row}", text)

    def _sample(self, op: Operation, access: Access) -> None:
        """Last tokens have been written: what the step has sampled. Who decodes has read the whole prefix by then."""
        if self._some_decode:
            self._check_all_read(op, self._rows(access))
        values = access.tag.region.view(self._tags.last_layout).numpy()
        for row in self._rows(access):
            seq = self._by_row.get(row)
            if seq is not None and seq.samples:
                self._add_tokens(seq, int(values[row]))
            elif seq is None and row != 0:
                memory = f"req_pool.last_tokens row {row}"
                text = f"{memory} is written by a {self._kind} that has no request there\n  written by"
                self._tags.report(op, memory, text)

    def _add_tokens(self, seq: Seq, last_token: int) -> None:
        if len(seq.account.ends) >= seq.length:
            seq.account.sampled(seq.length, last_token)


class Transfer:
    """The purpose of the copies of one transfer. ``expected``: what pages at the destination must get, as prefixes by
    token, with the lookahead, as far as it is known; later tokens may be anything."""

    def __init__(
        self, tags: Tags, kind: TransferKind, pairs: set[tuple[int, int]], expected: Mapping[int, I64]
    ) -> None:
        """``pairs`` of source and destination."""
        self._tags = tags
        self._kind = kind
        self._pairs = pairs
        self._expected = expected

    def ran(self, op: Operation) -> None:
        memories, states = self._tags.memories, self._tags.states
        if len(op.reads) != len(op.writes) or (states is not None and states.moved(op)):
            return
        for read, write in zip(op.reads, op.writes, strict=True):
            if write.tag in memories:
                source, target = memories[read.tag], memories[write.tag]
                self.copy(op, source, source.slots(read), target, target.slots(write))

    def copy(self, op: Operation, source: SlotMemory, a: I64, target: SlotMemory, b: I64) -> None:
        tags = self._tags
        tags.carry(op, source, a, target, b)
        wrong = np.flatnonzero((source.part[a] != target.part[b]) | (source.offset[a] != target.offset[b]))
        if len(wrong):
            i = int(wrong[0])
            names = tags.part_names
            text = f"{self._kind.value} brings {names[source.part[a[i]]]} to {names[target.part[b[i]]]}"
            tags.found(target, int(b[i]), text, op, (source, int(a[i])))
        for i, pair in enumerate(zip(source.page[a].tolist(), target.page[b].tolist(), strict=True)):
            if pair not in self._pairs:
                text = f"{self._kind.value} brings {source.name} page {pair[0]}, which does not go here"
                tags.found(target, int(b[i]), text, op, (source, int(a[i])))
                break
        self._check(op, source, a, target, b)

    def _check(self, op: Operation, source: SlotMemory, a: I64, target: SlotMemory, b: I64) -> None:
        for taken, slot in zip(a.tolist(), b.tolist(), strict=True):
            ends = self._expected.get(int(target.page[slot]), _NO_ENDS)
            offset = int(target.offset[slot])
            if offset < len(ends) - self._tags.lookahead and not self._tags.holds(target, slot, ends):
                text = f"{self._kind.value} fills it for {self._tags.prefixes.describe(int(ends[offset]))}"
                self._tags.found(target, slot, text, op, (source, taken))
                return


_NO_ENDS: I64 = np.zeros(0, np.int64)


class _Kept(NamedTuple):
    """A page that storage has: its bytes, the tags of its slots in order, and the operations that computed them, as in
    ``SlotMemory``."""

    digest: bytes
    tags: I64
    origins: I64


class Tags:
    """The tags of an engine's KV memory on every tier, the requests' tokens, and the leases of its pages."""

    def __init__(self, gpu: VirtualGpu, runner: ModelRunner) -> None:
        pool, req_pool = runner.kv_pool, runner.req_pool
        self.prefixes = Prefixes()
        self.part_names = [f"layer{part.layer}.{part.row.name}" for part in pool.layout.parts]
        self.num_parts = len(self.part_names)
        # How many tokens after its own a slot of each part depends on.
        self.num_target_parts = len(pool.layout.parts_of(range(runner.model.config.num_attention_layers)))
        draft = runner.draft if runner.draft is not None and runner.draft.hidden_size else None
        most = 0 if draft is None else draft.max_steps or 1
        num_layers = runner.model.config.num_attention_layers
        self.shifts = [max(min(part.layer + 1 - num_layers, most), 0) for part in pool.layout.parts]
        # The reads of images' embeddings in a step: by the target, then by each layer of a draft that sees them.
        sees_images = (told := runner.parts.config.draft) is not None and told.sees_images
        of_draft = () if not sees_images else range(1, most + 1) if draft is not None else (0,)
        self._reads_ahead = (0, *of_draft)
        # How many tokens, its own among them, a query reads of each part; None: all in front of it.
        self.windows = [_window(runner, part.layer) for part in pool.layout.parts]
        self.memories: dict[Tag, SlotMemory] = {}
        self.sampling_uses_pages = runner.speculative is not None
        self.compares_declared = False  # with its requests' pages what a step declares, and that it does
        # With something severed, a race must be reported by its edge; a report of missing Points says less.
        whole = not runner.device.severed
        self._streams = {stream.name: stream for stream in gpu.streams}
        self.pages = Leases(gpu, runner.pages, self.add, whole)
        self.rows = Leases(gpu, req_pool.rows, self.add, whole)
        self.page_table, self.table_layout = memory_of(req_pool.page_table)
        self.last_tokens, self.last_layout = memory_of(req_pool.last_tokens)
        self.looked_up = None if req_pool.tokens is None else memory_of(req_pool.tokens)
        self.images = None
        if runner.parts.embeddings is not None and req_pool.position_deltas is not None:
            pool_tag, _ = memory_of(runner.parts.embeddings.rows)
            self.images = ImageTags(pool_tag, memory_of(req_pool.position_deltas), self.report)
        self.states = None
        if (states := runner.states) is not None:
            self.snapshots = Leases(gpu, states.snapshots, self.add, whole)
            carried, _ = memory_of(states.carried)
            nbytes = states.carried.shape[1]
            self.states = StateTags(carried, nbytes, states.grid, self.prefixes.describe, self.report)
        self._gpu = gpu
        self.page_size = pool.page_size
        self._accounts: dict[int, Account] = {}
        self._old_accounts: list[Account] = []  # kept for the sake of id()
        self._weights = ""  # their name, "" for the first ones
        self._first_weights = runner.model.config.model_path
        self._kept: dict[bytes, list[_Kept]] = {}  # what was written to storage, by key
        self._scheduler: Scheduler | None = None
        self._submitted: Step | None = None
        ops: list[Operation | None] = [None]
        for number, (name, part) in enumerate(zip(self.part_names, pool.parts, strict=True)):
            tag, layout = memory_of(part)
            self.memories[tag] = SlotMemory(f"kv_pool.{name}", pool.page_size, {number: layout}, ops)
        self.on_device = list(self.memories.values())  # by part
        if runner.hicache is not None:
            host = runner.hicache.host_pool
            self.host_pages = Leases(gpu, host.pages, self.add, whole)
            layouts = {number: layout_of(part) for number, part in enumerate(host.parts)}
            self._host = SlotMemory("host_pool", pool.page_size, layouts, ops)
            self._host_start = host.buffer.data_ptr()
            host_tag = gpu.pinned.find(host.buffer)
            assert host_tag is not None, "the host tier is pinned"
            self.memories[host_tag] = self._host
            if self.states is not None and runner.hicache.host_states is not None:
                host_states = runner.hicache.host_states
                self.host_states = Leases(gpu, host_states.slots, self.add, whole)
                self.states.host = gpu.pinned.find(host_states.buffer)
                self._states_start = host_states.buffer.data_ptr()
                self._kept_states: dict[bytes, dict[bytes, dict[int, int]]] = {}  # in storage, by key and digest

    def watch(self, scheduler: Scheduler) -> None:
        """Use the requests and the tree of ``scheduler``. Called before its first step."""
        self._scheduler = scheduler

    def tag(self, ends: I64 | int, part: int) -> I64:
        """The tags of slots of ``part`` whose prefixes are ``ends``."""
        return np.asarray(ends, np.int64) * self.num_parts + part

    def ends_from(self, account: Account, shift: int, num: int) -> list[int]:
        """The prefixes at which the first ``num`` rows of a layer end that looks ``shift`` tokens ahead; of rows that
        stand for tokens which are not known yet, what nobody may take for one's."""
        ends = account.ends[shift : num + shift]
        last, missing = account.ends[-1], range(len(ends), num)
        return ends + [self.prefixes.marked(last, f"{GUESS}, row {row}") for row in missing]

    def holds(self, memory: SlotMemory, slot: int, ends: I64) -> bool:
        """Whether ``slot`` holds what it must in a page whose tokens, and those behind it, are those that ``ends``,
        prefixes by token, end at."""
        part = int(memory.part[slot])
        index = int(memory.offset[slot]) + self.shifts[part]
        return index >= len(ends) or memory.held[slot] == self.tag(ends[index], part)

    # --- what is submitted

    @contextmanager
    def step(self, batch: StepBatch, reqs: Sequence[Req]) -> Iterator[None]:
        """Inside, the step ``batch`` of ``reqs`` is submitted, with what the scheduler adds when it launches it."""
        tree, size = self._tree, self.page_size
        shared = frozenset(tree.all_pages().tolist())
        seqs = []
        for i, req in enumerate(reqs):
            account = self._account(req)
            row, length, samples = int(batch.rows[i]), int(batch.seq_lens[i]), bool(batch.samples[i])
            decodes = i >= len(batch.chunks)
            first = length - 1 if decodes else int(batch.starts[i])
            pages = np.array(req.pages[: -(-length // size)], np.int32)
            num_shared = req.shared_len // size
            self.pages.share(pages[:num_shared].tolist(), account.name, shared)
            self.pages.claim(pages[num_shared:].tolist(), account.name, account, shared)
            self.rows.claim([row], account.name, account)
            seqs.append(Seq(account, row, first, length, samples, pages, decodes))
        self._submitted = self._purpose(seqs, batch)
        with self._gpu.submitting_for(self._submitted):
            yield
        self._submitted.check_declared()
        self._used_by_step()
        if self.states is not None:
            snapshots = [slot for _, slot in batch.snapshots]
            self.snapshots.used(snapshots, self._streams["forward"], "a snapshot of its step")

    def _used_by_step(self, pages: bool = True) -> None:
        assert self._submitted is not None, "a step has been launched"
        for seq in self._submitted.seqs:
            forward, who = self._streams["forward"], f"a step of {seq.account.name}"
            if pages:
                self.pages.used(seq.pages.tolist(), forward, who)
            self.rows.used([seq.row], forward, who)

    @contextmanager
    def rest_of_step(self) -> Iterator[None]:
        """Inside, the sampling of the latest step is submitted, which has waited for its masks. Unless the engine
        speculates it uses no pages: some of them may have been retired since the forward, after that."""
        assert self._submitted is not None, "a step has been launched"
        with self._gpu.submitting_for(self._submitted):
            yield
        self._used_by_step(self.sampling_uses_pages)

    def declared(self, accessed: frozenset[int], written: frozenset[int]) -> None:
        if self._submitted is not None:
            self._submitted.declare(accessed, written)

    def _purpose(self, seqs: Sequence[Seq], batch: StepBatch) -> Step:
        return Step(self, seqs, self._images_of(seqs, batch), self._states_of(seqs, batch))

    def _states_of(self, seqs: Sequence[Seq], batch: StepBatch) -> StepStates | None:
        if self.states is None:
            return None
        self.snapshots.claim([slot for _, slot in batch.snapshots], "a snapshot of its step")
        return StepStates(self.states, seqs, batch.snapshots)

    @contextmanager
    def state_copy(self, source: int, slot: int, after: Points) -> Iterator[None]:
        """Inside, a copy of a state is submitted: to the row of a request that begins, or of one that has left."""
        assert self.states is not None and self._scheduler is not None, "there are states and a scheduler"
        num_rows, right = self.snapshots.reserved, None
        guard = COMMITTED_STATE
        if source < num_rows:
            leaving = self._scheduler.population.leaving
            req = next(one for one in (*self._scheduler.reqs.values(), *leaving) if one.row == source)
            length, guard = (req.snapshots[-1][0], guard) if req.left else (req.committed_len, LOADED_STATE)
            right = self._account(req).ends[length - 1]
        self._use_states("forward", [source, slot], "a copy of a state", claim=True)
        with self._gpu.submitting_for(StateCopy(self.states, source, slot, right, guard)):
            yield
        self._use_states("forward", [source, slot], "a copy of a state")

    def _use_states(self, stream: str, slots: Sequence[int], who: str, claim: bool = False) -> None:
        """Work on ``slots`` of the device is submitted, or to be submitted if ``claim``."""
        for slot in slots:
            leases = self.rows if slot < self.snapshots.reserved else self.snapshots
            if not claim:
                leases.used([slot], self._streams[stream], who)
            elif leases is self.snapshots:
                leases.claim([slot], who)

    def _images_of(self, seqs: Sequence[Seq], batch: StepBatch) -> StepImages | None:
        if self.images is None:
            return None
        return StepImages(self.images, seqs, batch, self._weights, self._reads_ahead)

    @contextmanager
    def transfer(self, kind: TransferKind, device_pages: I32, host_pages: I32, states: Pairs) -> Iterator[None]:
        """Inside, copies between these pages are submitted, and between these slots of states."""
        device, host = device_pages.tolist(), host_pages.tolist()
        slots, host_slots = [slot for slot, _ in states], [slot for _, slot in states]
        if self.states is not None:
            self._use_states(kind.value, slots, f"a {kind.value}", claim=True)
            self.host_states.claim(host_slots, f"a {kind.value}")
            if kind is TransferKind.LOAD:
                self.states.begun -= set(slots)
                self.states.loaded |= set(slots)
        self.pages.claim(device, f"a {kind.value}")
        self.host_pages.claim(host, f"a {kind.value}")
        if kind is TransferKind.LOAD:
            pairs, expected = set(zip(host, device, strict=True)), self._wanted(set(device))
        else:
            pairs, expected = set(zip(device, host, strict=True)), self._cached("host_pages")
        with self._gpu.submitting_for(Transfer(self, kind, pairs, expected)):
            yield
        stream = self._streams["load" if kind is TransferKind.LOAD else "store"]
        self.pages.used(device, stream, f"a {kind.value}")
        self.host_pages.used(host, stream, f"a {kind.value}")
        if self.states is not None:
            self._use_states(kind.value, slots, f"a {kind.value}")
            self.host_states.used(host_slots, stream, f"a {kind.value}")

    def _wanted(self, pages: set[int]) -> dict[int, I64]:
        """The prefixes by token, except of new tokens, that requests need in ``pages``, which are to be loaded."""
        assert self._scheduler is not None, "there is a scheduler"
        found = {}
        for req in self._scheduler.reqs.values():
            for column, page in enumerate(req.pages):
                if page in pages:
                    first = column * self.page_size
                    end = min(first + self.page_size, req.committed_len) + self.lookahead
                    found[page] = np.array(self._account(req).ends[first:end], np.int64)
        return found

    def _cached(self, tier: str) -> dict[int, I64]:
        """What the pages of a tier (``pages`` or ``host_pages``) hold according to the tree: prefixes by token, with
        the lookahead."""
        found: dict[int, I64] = {}
        size = self.page_size
        for node, ends in self._node_ends():
            pages = getattr(node, tier)
            if pages is not None and len(pages):
                windows = sliding_window_view(np.array(ends, np.int64), size + self.lookahead)[::size]
                found.update(zip(pages.tolist(), windows, strict=True))
        return found

    def _node_ends(self) -> Iterator[tuple[TreeNode, list[int]]]:
        """The nodes of the tree, parents first, with the prefixes by token, the lookahead's too."""
        last: dict[TreeNode, int] = {}  # the prefix at which each node's pages end
        nodes = list(self._tree.root.children.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            assert node.parent is not None, "the root is left out"
            end, ends = last.get(node.parent) or self.prefixes.root(self._tree.namespace(node), self._weights), []
            for token in node.tokens.tolist():
                token = token if self.images is None else self.images.token_of(token, self._tree.images)
                end = self.prefixes.then(end, token, "a prefix in the tree")
                ends.append(end)
            last[node] = ends[node.num_pages * self.page_size - 1]
            yield node, ends

    @property
    def lookahead(self) -> int:
        """Tokens behind a page that the tree finds it by."""
        return self._tree.lookahead

    @property
    def _tree(self) -> RadixCache:
        assert self._scheduler is not None, "there is a scheduler"
        return self._scheduler.memory.tree

    def _account(self, req: Req) -> Account:
        account = self._accounts.get(id(req.source))
        if account is None:
            tokens = req.token_ids().tolist() if self.images is None else self.images.tokens_of(req)
            account = Account(req.source, tokens, self.prefixes, self._weights, req.images)
            self._accounts[id(req.source)] = account
        return account

    def weights_replaced(self, weights: NewWeights) -> None:
        """From now on every slot holds what these weights have computed. The same checkpoint computes the same."""
        self._weights = "" if weights.directory == self._first_weights else f"weights {weights.label}"
        self._old_accounts += self._accounts.values()
        self._accounts.clear()

    # --- copies and storage

    def carry(self, op: Operation, source: SlotMemory, a: I64, target: SlotMemory, b: I64) -> None:
        target.held[b], target.origins[b] = source.held[a], source.origins[a]
        target.writers[b] = target.number_of(op)

    def storing(self, keys: Sequence[bytes], pages: Sequence[Sequence[npt.NDArray[np.uint8]]]) -> None:
        for key, parts in zip(keys, pages, strict=True):
            slots = self._slots_of(parts)
            self.host_pages.claim([int(self._host.page[slots[0]])], "a write to storage")
            held, kept = self._host.held[slots], self._kept.setdefault(key, [])
            if kept and not np.array_equal(kept[0].tags, held):
                text = f"storage is given it under a key that stands for {self._describe(kept[0].tags[-1])}"
                self.found(self._host, int(slots[-1]), text)
            kept.append(_Kept(_digest(parts), held, self._host.origins[slots]))

    def fetched(
        self, found: Sequence[bool], keys: Sequence[bytes], pages: Sequence[Sequence[npt.NDArray[np.uint8]]]
    ) -> None:
        """Storage has read pages: those for which ``found`` is true."""
        for there, key, parts in zip(found, keys, pages, strict=True):
            if not there:
                continue
            slots, digest = self._slots_of(parts), _digest(parts)
            self.host_pages.claim([int(self._host.page[slots[0]])], "a fetch from storage")
            op = Operation("fetch from storage", here(), None)
            op.where = self._gpu.thread.name
            self._host.write(slots, NOTHING, op)
            kept = next((kept for kept in self._kept.get(key, ()) if kept.digest == digest), None)
            if kept is None:
                text = "storage fills it with bytes that it was not given under this key"
                self.found(self._host, int(slots[0]), text, op)
            else:
                self._host.held[slots], self._host.origins[slots] = kept.tags, kept.origins

    def storing_state(self, keys: Sequence[bytes], pages: Sequence[Sequence[npt.NDArray[np.uint8]]]) -> None:
        self._kept_states.setdefault(keys[0], {})[_digest(pages[0])] = self.states_on_host(pages[0][0]).copy()

    def fetched_state(
        self, found: Sequence[bool], keys: Sequence[bytes], pages: Sequence[Sequence[npt.NDArray[np.uint8]]]
    ) -> None:
        """Storage has read a state, if ``found``: it holds what was given under the key, or nothing known."""
        held, kept = self.states_on_host(pages[0][0]), self._kept_states.get(keys[0], {})
        held.clear()
        if found[0]:
            held.update(kept.get(_digest(pages[0]), {}))

    def states_on_host(self, piece: npt.NDArray[np.uint8]) -> dict[int, int]:
        """What the parts of a slot on the host hold, whose bytes are ``piece``; work may be submitted on the slot."""
        assert self.states is not None, "there are states"
        slot = (piece.ctypes.data - self._states_start) // piece.nbytes
        self.host_states.claim([slot], "a storage worker")
        return self.states.on_host.setdefault(slot, {})

    def _slots_of(self, parts: Sequence[npt.NDArray[np.uint8]]) -> I64:
        pieces = [(np.array([part.ctypes.data - self._host_start]), part.nbytes) for part in parts]
        return np.concatenate([self._host.between(*piece) for piece in pieces])

    # --- findings

    def audit(self) -> None:
        """At the end, when nothing is in transfer: check that the pages of the tree hold what the tree says."""
        if self.states is not None:
            for node, ends in self._node_ends():
                self.states.audit(ends[node.num_pages * self.page_size - 1], node.state, node.host_state)
        for tier in ("pages", "host_pages"):
            expected = self._cached(tier)
            for memory in self.memories.values():
                if (memory.name == "host_pool") == (tier == "host_pages"):
                    self._audit(memory, expected)

    def _audit(self, memory: SlotMemory, expected: Mapping[int, I64]) -> None:
        shifts = np.array(self.shifts)
        ends = np.zeros((int(memory.page.max()) + 1, memory.page_size + int(shifts.max())), np.int64)
        for page, numbers in expected.items():
            ends[page, : len(numbers)] = numbers[: ends.shape[1]]
        meant = ends[memory.page, memory.offset + shifts[memory.part]]
        wrong = np.flatnonzero((meant > 0) & (memory.held != meant * self.num_parts + memory.part))
        if len(wrong):
            slot = int(wrong[0])
            text = f"the tree has it for {self.prefixes.describe(int(meant[slot]))}"
            self.found(memory, slot, text)

    def left_over(self) -> list[str]:
        """Lines of a report: what is leased, and belongs neither to the tree nor to a request."""
        assert self._scheduler is not None, "there is a scheduler"
        reqs = [*self._scheduler.reqs.values(), *self._scheduler.population.leaving]
        pages = {*self._tree.all_pages().tolist(), *(page for req in reqs for page in req.pages)}
        lines = self.pages.besides(pages) + self.rows.besides({req.row for req in reqs})
        if not reqs and isinstance(self._tree, HiRadixCache):
            lines += self.host_pages.besides(self._tree.all_host_pages().tolist())
            if self.states is not None:
                held = {node.host_state for node, _ in self._node_ends() if node.host_state is not None}
                lines += self.host_states.besides(held)
        return lines

    def found(
        self, memory: SlotMemory, slot: int, text: str, op: Operation | None = None,
        source: tuple[SlotMemory, int] | None = None,
    ) -> None:  # fmt: skip
        """``slot`` does not hold what it should: ``text`` says what ``op`` does with it, or what it should hold.
        ``source``: the slot that it is a copy of."""
        place = memory.describe(slot)
        lines = [f"tags: {place}, holds {self._describe(int(memory.held[slot]))}: {text}"]
        places = []
        if op is not None:
            lines.append(f"  by {who(op)}")
            places.append(str(op.place))
        if source is not None:
            memory, slot = source
            lines.append(f"  from {memory.describe(slot)}")
        writer = memory.writer(slot)
        if writer is not op:
            lines += memory.history(slot)
            places[:0] = [] if writer is None else [str(writer.place)]
        self.add(TagError("\n".join(lines), "", place, tuple(places), 0 if op is None else op.seq))

    def _describe(self, tag: int) -> str:
        if tag == NOTHING:
            return "nothing"
        end, part = divmod(int(tag), self.num_parts)
        return f"{self.prefixes.describe(end)}, {self.part_names[part]}"

    def report(self, op: Operation, memory: str, text: str, guard: str = "") -> None:
        """Add an error of ``memory``; the last words of ``text`` are about ``op``. ``guard``: what is missing."""
        self.add(TagError(f"tags: {text} {who(op)}", guard, memory, (str(op.place),), op.seq))

    def add(self, error: CheckError) -> None:
        """Raise ``error``; without the detector keep it, for a report of wrong tokens."""
        if self._gpu.detector is None:
            self._gpu.findings.errors.append(error)
        else:
            self._gpu.findings.add_errors([error])


def _window(runner: ModelRunner, layer: int) -> int | None:
    """The window of a layer of the KV pool. Of drafts a whole model alone has layers with windows."""
    num_layers, speculative = runner.model.config.num_attention_layers, runner.speculative
    if layer < num_layers:
        return runner.model.config.window(layer)
    assert speculative is not None and speculative.config.draft is not None, "layers behind the target's are a draft's"
    return (
        None
        if speculative.draft.parts.draft.hidden_size > 0
        else speculative.config.draft.model.window(layer - num_layers)
    )


def memory_of(tensor: torch.Tensor) -> tuple[Tag, Layout]:
    assert isinstance(tensor, VTensor), "the engine runs on the virtual GPU"
    return tensor.allocation.tag, tensor.layout_


def _digest(parts: Sequence[npt.NDArray[np.uint8]]) -> bytes:
    return hashlib.blake2b(b"".join(part.tobytes() for part in parts)).digest()
