"""PageTags: ``--memory-check full``. KV pages carry tags that say whose rows they hold, and every step compares them.

A tag lies beside the page on the device: the *lease* whose rows the page holds, the page's *position* in its sequence,
and the last *writer* (a step, or a load). Each layer has the lease once more (``arrived``), because loads come layer by
layer while steps read what is there already. A lease begins where the pool has the
page back: its number is given once in the server's life, so one number says both whose the page is and since when. An
owner could not be a request, because requests share pages and leave them to the tree; a lease stays the same however
many share it, and the host knows its number when it writes the page into a row's table. There it writes the number to
``expected``, a second table beside the page table. So a captured kernel that has a row's length knows all that it must
find, and no number is a step late.

* A step compares the pages of its rows before its forward and tags those to whose slots it writes. After its forward
  it compares all of them, so that what was overwritten meanwhile is found too. Both are a kernel each in FORWARD's
  order, inside the graph where there is one.
* A load notes the lease after each layer. A step that reads the pages compares before each layer, once it has waited
  for it.
* A page that is retired loses its lease after its Points. It is the tag that is poisoned, not the rows: kernels read
  masked rows of pages that are not full, where a NaN would spread.
* A backup leaves a checksum of the page's bytes and the position beside the host page, and a load compares what has
  arrived with them. Pages that storage has brought have none: their files have a checksum of their own.

Findings stay in device memory and ride with the results of each step, so nobody waits for them. What the host itself
believes wrongly when it writes a table (a stale list of pages whose leases are by then another's) is not seen here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.kv_pool import KVPool, ReqPool
from fenceline.mem_cache.page_tag_operands import BegunTags, MovedPages, Visit
from fenceline.memory_order import Device, LeasePool, OrderError, Point, Points, Stream
from fenceline.memory_order.access import Memory, writes
from fenceline.memory_order.checker import fitting_edges
from fenceline.memory_order.edges import (
    FORWARD_AFTER_STORE,
    HOST_PAGE_REUSE,
    LOAD_AFTER_STORE,
    QUEUED_MATCH,
    RETIRED_AFTER,
    STEP_SLOTS,
    STORE_AFTER_FORWARD,
    STORE_AFTER_LOAD,
    Hazard,
    StreamName,
)
from fenceline.memory_order.kernel import KernelAccesses, declare_kernel

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Tensor = torch.Tensor

LEASE, POSITION, WRITER = range(3)  # of a tag
ANY_POSITION = -1  # of a page from storage
NO_POSITION = -2  # of a host page whose backup found a page that was not as it should be
SPOILED = -1  # in place of the last layer's lease: the bytes are not those that were backed up
MAX_FINDINGS = 8
_MIN_SLOT_BYTES = 1 << 16  # the lists of 1,600 pages
FIELDS = 11  # see PageFinding


class When(IntEnum):
    """When a step compares tags."""

    BEFORE = 1  # its forward; it then tags the pages that it writes
    LAYER = 2  # before a layer reads pages that have been loaded
    AFTER = 3  # its forward


class Visited(NamedTuple):
    """The rows whose pages a step visits: ``rows`` [B] int64. Row i holds ``starts[i] - back`` tokens, and the step
    writes those up to ``ends[i]``, both [B] int64, to ``slots`` [T] int64, its own from ``query_starts[i]`` on, [B + 1]
    int32; None: T / B for each. Row 0, the sink, is left out."""

    rows: Tensor
    starts: Tensor
    ends: Tensor
    slots: Tensor
    query_starts: Tensor | None = None
    back: int = 0


class PageTags:
    """The tags of one device's pages. ``begin_step``, ``visit`` submit to the current stream, which is FORWARD."""

    def __init__(self, device: Device, kv_pool: KVPool, req_pool: ReqPool, pages: LeasePool) -> None:
        """``pages`` leases the pages of ``kv_pool``; its retirements are observed from now on."""
        where, self._device, self._pages = device.torch_device, device, pages
        self.page_size, self.num_layers = kv_pool.page_size, kv_pool.num_layers
        self._page_table = req_pool.page_table
        self.tags = torch.zeros((kv_pool.num_pages, 3), dtype=torch.int32, device=where)
        # The lease of which each layer of a page has rows.
        self.arrived = torch.zeros((self.num_layers, kv_pool.num_pages), dtype=torch.int32, device=where)
        self.expected = torch.zeros_like(req_pool.page_table)  # the lease of each entry of the page table
        # The number of the latest step, and of the one that has begun. The device counts by itself.
        self.clock = torch.zeros(2, dtype=torch.int32, device=where)
        self._none = torch.zeros((2, 0), dtype=torch.int64, device=where)
        device.name_rows(self.tags, "page_tags")
        device.name_memory(self.arrived, "page_tags.arrived", 4)
        # Their number, in the first row, and the first of them, see PageFinding.
        self.findings = torch.zeros((1 + MAX_FINDINGS, FIELDS), dtype=torch.int32, device=where)
        self.retired_until = Points.none()  # the Point on FORWARD after the latest tags that were taken from pages
        self._leases = np.arange(kv_pool.num_pages, dtype=np.int32)  # of each page, or its next one if it is free
        self._num_leases = kv_pool.num_pages
        self._retired: list[tuple[I32, I32, I32, Points]] = []  # pages, the leases that ended, the next ones, Points
        pages.observers += (self._retire,)

    def leases_of(self, pages: I32) -> I32:
        """The numbers of the leases of ``pages``, [N] as they are."""
        return self._leases[pages]

    def begin_serving(self) -> None:
        """Forget what the warm-up has found: its steps read pages that nobody has written."""
        if self.tags.is_cuda:  # compiles it
            sink = torch.zeros((2, 1), dtype=torch.int64, device=self.tags.device)
            begun = dict.fromkeys(("page_rows", "page_columns", "page_leases"), sink[0])
            self.begin_step({**begun, "retired_pages": sink})
        self.clock.zero_()
        self.findings.zero_()

    # --- a step ----------------------------------------------------------------------------------------

    def arrays(self, pages: I32) -> dict[str, npt.NDArray[np.generic]]:
        """What a step uploads beside its page-table writes of ``pages``."""
        arrays: dict[str, npt.NDArray[np.generic]] = {}
        if len(pages):
            arrays["page_leases"] = self.leases_of(pages).astype(np.int64)
        if self._retired:
            retired = self._take_retired()
            if retired.size:
                arrays["retired_pages"] = retired
        return arrays

    def begin_step(self, views: Mapping[str, Tensor]) -> None:
        """Begin the next step, whose page-table writes and :meth:`arrays` are in ``views``."""
        retired = views.get("retired_pages", self._none)
        if retired.shape[1] or "page_leases" in views:
            names, none = ("page_rows", "page_columns", "page_leases"), self._none[0]
            rows, columns, leases = (views.get(name, none) for name in names)
            operands = BegunTags(self.expected, self.tags, rows, columns, leases, retired)
            if self.tags.is_cuda:
                from fenceline.mem_cache.page_tag_kernels import launch_begin

                launch_begin(operands)
            else:
                begin_tags.launch(_begin_tags, *operands)
        if retired.shape[1]:
            self.retired_until = Points.of(self._device.forward.record())

    def visit(self, visited: Visited, when: When, layer: int | None = None) -> None:
        """Compare the tags of the pages of ``visited``, or with ``When.LAYER`` that ``layer`` has arrived."""
        layer = self.num_layers - 1 if layer is None else layer
        operands = Visit(
            visited.rows, visited.starts, visited.starts if when is When.LAYER else visited.ends, visited.slots,
            visited.query_starts, self._page_table, self.expected, self.tags, self.arrived, self.clock, self.findings,
            visited.back, self.page_size, int(when), layer,
        )  # fmt: skip
        if self.tags.is_cuda:
            from fenceline.mem_cache.page_tag_kernels import launch_visit

            launch_visit(operands)
        else:
            visit_pages.launch(_visit_pages, *operands)

    def read(self, findings: I32) -> tuple[PageFinding, ...]:
        """The findings that a step's results carry, oldest first."""
        num = min(int(findings[0, 0]), MAX_FINDINGS)
        if not num:
            return ()
        return tuple([self._finding(fields.tolist()) for fields in findings[1 : 1 + num]])

    def _finding(self, fields: list[int]) -> PageFinding:
        homes = np.flatnonzero(self._leases == fields[5]).tolist()
        home, num_pages = homes[0] if homes else 0, len(self._leases)
        return PageFinding(*[*fields, self.page_size, num_pages, home])

    # --- retirements -----------------------------------------------------------------------------------

    def _retire(self, pages: I32, after: Points) -> None:
        leases = np.arange(self._num_leases, self._num_leases + len(pages), dtype=np.int32)
        self._num_leases += len(pages)
        self._retired.append((pages.copy(), self._leases[pages], leases, after))
        self._leases[pages] = leases

    def _take_retired(self) -> I64:
        """The retired pages whose Points FORWARD has passed, or the host knows to have passed, and that are free; and
        the leases that have ended. [2, N]."""
        still, ready, forward = [], [np.zeros((2, 0), np.int64)], self._device.forward
        for entry in self._retired:
            pages, ended, following, after = entry
            if all(point.passed or point.stream is forward for point in after):
                free = (self._leases[pages] == following) & ~self._pages.are_leased(pages)
                ready.append(np.stack([pages[free], ended[free]]).astype(np.int64))
            else:
                still.append(entry)
        self._retired = still
        return np.concatenate(ready, axis=1)


# --- transfers --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Slot:
    """The page lists of a transfer, in pinned memory and on the device, and the Point that ends the transfer."""

    host: Tensor  # uint8, as ``device``
    device: Tensor
    host_memory: Memory
    end: Point | None = None


class TransferPages(NamedTuple):
    """The pages of one transfer, on the device: ``pages`` and ``host_pages``, the ``leases`` of the pages, whether the
    host page has a checksum (``known``), and the sums of the layers that have arrived. All [N] int64."""

    pages: Tensor
    host_pages: Tensor
    leases: Tensor
    known: Tensor
    sums: Tensor
    slot: _Slot


class TransferTags:
    """What transfers between device and host do with tags: loads bring them, backups leave them beside host pages. All
    work goes to the transfer's own stream, between its copies and its Points. A load adds up a layer before the Point
    that lets a step read it, because the step may go on writing to a page that is not full."""

    def __init__(self, device: Device, tags: PageTags, kv_pool: KVPool, host_pool: HostPool, rank: int = 0) -> None:
        """``rank``: whose share of replicated rows the host keeps, and alone adds up. Retirements of host pages are
        observed from now on."""
        self._device, self._tags, self._layout = device, tags, kv_pool.layout
        # Of each host page: the checksum of its bytes, and its position.
        self._host = torch.zeros((host_pool.num_pages, 2), dtype=torch.int64, device=device.torch_device)
        device.name_rows(self._host, "host_page_tags")
        self._known = np.zeros(host_pool.num_pages, dtype=np.bool_)  # backed up since they were leased
        self._slots: list[_Slot] = []
        parts = [part[:, rank % part.shape[1]] for part in kv_pool.shares(host_pool.layout)]
        self._by_bytes = any(part.shape[1] % 4 for part in parts)
        self._parts = [part.view(torch.int8 if self._by_bytes else torch.int32) for part in parts]
        self._firsts = [0, *accumulate(part.shape[1] for part in self._parts)]  # words of a page before each part
        host_pool.pages.observers += (self._forget,)

    @property
    def retired_until(self) -> Points:
        """What a load waits for before it tags pages: FORWARD may still take their old leases from them."""
        return self._tags.retired_until

    def begin(self, stream: Stream, device_pages: I32, host_pages: I32, is_load: bool) -> TransferPages:
        """Bring the page lists of a transfer to the device, on ``stream``."""
        num = len(device_pages)
        lists = np.zeros((5, num + num % 2), np.int64)  # each begins where a kernel reads without delay
        lists[:4, :num] = device_pages, host_pages, self._tags.leases_of(device_pages), self._known[host_pages]
        if not is_load:
            self._known[host_pages] = True
        nbytes = lists.size * 8
        slot = self._take(nbytes)
        self._device.declare(StreamName.HOST, "page lists of a transfer", writes, slot.host_memory)
        slot.host[:nbytes].numpy().view(np.int64)[:] = lists.ravel()
        stream.copy(slot.device[:nbytes], slot.host[:nbytes])
        pages, hosts, of_pages, is_known, sums = slot.device[:nbytes].view(torch.int64).view(lists.shape)[:, :num]
        return TransferPages(pages, hosts, of_pages, is_known, sums, slot)

    def stored(self, stream: Stream, moved: TransferPages) -> None:
        """The pages have been copied to the host: leave checksum and position beside the host pages."""
        operands = self._operands(moved)
        with stream.active():
            if self._host.is_cuda:
                from fenceline.mem_cache.page_tag_kernels import launch_seal

                launch_seal(operands, self._words[range(len(self._parts))], self._by_bytes)
            else:
                seal_pages.launch(_seal_pages, *operands, *self._parts)

    def loaded(self, stream: Stream, moved: TransferPages, number: int, layer: int) -> None:
        """Load ``number`` has copied ``layer`` of the pages; after the last one, compare the checksums."""
        parts = self._layout.parts_of(range(layer, layer + 1))
        operands = self._operands(moved)
        with stream.active():
            if self._host.is_cuda:
                from fenceline.mem_cache.page_tag_kernels import launch_arrive

                launch_arrive(operands, self._words[parts], -number, layer, self._by_bytes)
            else:
                numbers = (-number, layer, self._firsts[parts.start])
                arrive_pages.launch(_arrive_pages, *operands, *numbers, *self._parts[parts.start : parts.stop])

    def _operands(self, moved: TransferPages) -> MovedPages:
        return MovedPages(*moved[:5], self._host, self._tags.tags, self._tags.arrived)

    def end(self, moved: TransferPages, end: Point) -> None:
        """The transfer ends with ``end``."""
        moved.slot.end = end

    def warm_up(self) -> None:
        """Compile the kernels for a GPU: with the sink, and the first host page. Waits for the device."""
        first = np.zeros(1, np.int32)
        for stream, is_load in ((self._device.store, False), (self._device.load, True)):
            moved = self.begin(stream, first, first, is_load)
            if is_load:
                for layer in (0, self._tags.num_layers - 1):
                    self.loaded(stream, moved, 0, layer)
            else:
                self.stored(stream, moved)
            self.end(moved, stream.record())
            self._device.synchronize()
        self._tags.tags.zero_()
        self._tags.arrived.zero_()
        self._known[:] = False

    @cached_property
    def _words(self) -> dict[range, Tensor]:
        """Of the parts of each layer, and of all parts: their addresses, their words of a page, those of the parts
        before each, and the words from page to page; int64 [4, P] on the device."""
        addresses = [part.data_ptr() for part in self._parts]
        strides = [part.stride(0) for part in self._parts]
        numbers = np.array([addresses, np.diff(self._firsts), self._firsts[:-1], strides], dtype=np.int64)
        ranges = [self._layout.parts_of(range(layer, layer + 1)) for layer in range(self._tags.num_layers)]
        return {
            parts: torch.from_numpy(numbers[:, parts.start : parts.stop].copy()).to(self._host.device)
            for parts in (*ranges, range(len(self._parts)))
        }

    def _take(self, nbytes: int) -> _Slot:
        for slot in self._slots:
            if slot.host.numel() >= nbytes and slot.end is not None and slot.end.passed:
                slot.end = None
                return slot
        self._device.synchronize()  # what the allocator hands out may be in use on another stream; a few times only
        size, name = max(1 << (nbytes - 1).bit_length(), _MIN_SLOT_BYTES), f"transfer_pages[{len(self._slots)}]"
        host, on_device = self._device.host_buffer(size), self._device.device_buffer(size)
        slot = _Slot(host, on_device, self._device.memory(f"{name}.pinned", host))
        self._slots.append(slot)
        return slot

    def _forget(self, host_pages: I32, _after: Points) -> None:
        self._known[host_pages] = False


# --- what a finding says ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PageFinding:
    """A page whose tag is not what a step's row expects. ``page`` is the entry ``position`` of the table of ``row``.
    ``expected``: the lease that the host gave there. ``lease``, ``held_position``, ``writer``: the tag, all 0 if there
    is no such page, or before a layer. ``arrived``: the lease of ``layer``, SPOILED if its bytes are wrong. ``writer``:
    the step that wrote it, or minus the number of the load. ``home``: the page that the host wrote into the table, 0 if
    that is retired."""

    when: int
    step: int
    row: int
    position: int
    page: int
    expected: int
    lease: int
    held_position: int
    arrived: int
    writer: int
    layer: int
    page_size: int
    num_pages: int
    home: int

    def error(self, request: str, owner: str) -> OrderError:
        """The report. ``request`` reads the page, ``owner`` holds it now, "" if nobody does."""
        why, hazard, remedies = self._cause()
        slots = f"slots {self.page * self.page_size}-{(self.page + 1) * self.page_size - 1}"
        first, last = self.position * self.page_size, (self.position + 1) * self.page_size - 1
        where = f"kv_pool page {self.page}"
        when = ("before its forward", f"before layer {self.layer}", "after its forward")[self.when - 1]
        message = (
            f"memory order: {hazard.value} on {where} ({slots})\n"
            f"  1. {self._writer()}{f', owner {owner}' * bool(owner)}\n"
            f"  2. step {self.step} reads it on forward for request {request} (row {self.row}, tokens {first}-{last},"
            f" lease {self.expected}; found {when})\n"
            f"  {why}; missing: {' or '.join(remedies)}"
        )
        return OrderError(message, tuple(remedies), hazard, where)

    def _writer(self) -> str:
        if self.when == When.LAYER:
            return f"its layer {self.layer} is of lease {self.arrived}"
        if self.writer == 0:
            return "nothing has written it"
        by = f"step {self.writer} writes it on forward" if self.writer > 0 else f"load {-self.writer} writes it on load"
        state = "retired lease" if self.lease < 0 else "lease"
        return f"{by} ({state} {abs(self.lease)}, position {self.held_position})"

    def _cause(self) -> tuple[str, Hazard, Sequence[str]]:
        """Why, what may go wrong, and the edges or guards that would prevent it."""
        table = (STEP_SLOTS.name, QUEUED_MATCH.name)
        forward, load = StreamName.FORWARD.value, StreamName.LOAD.value
        to_load = [edge.name for edge in fitting_edges(Hazard.RAW, load, forward)]
        if not 0 < self.page < self.num_pages:
            return "the page table names no page of a request", Hazard.RAW, table
        if self.home not in (0, self.page):
            return f"the page table or the step's slots should name page {self.home}", Hazard.RAW, table
        if self.when == When.LAYER:
            return f"layer {self.layer} has not been loaded", Hazard.RAW, to_load
        if self.lease == self.expected:
            if self.arrived == SPOILED:
                backup = (STORE_AFTER_FORWARD, FORWARD_AFTER_STORE, STORE_AFTER_LOAD)
                if self.held_position == NO_POSITION:
                    why = "the page was another's, or not yet complete, when it was backed up"
                    return why, Hazard.RAW, [edge.name for edge in backup]
                host = (LOAD_AFTER_STORE, HOST_PAGE_REUSE, *backup)
                return "the host page did not hold what was backed up", Hazard.RAW, [edge.name for edge in host]
            if self.arrived != self.expected:
                return f"layer {self.layer} has not been loaded", Hazard.RAW, to_load
            return "the page holds another position", Hazard.RAW, table
        if self.lease == -self.expected:
            return "the page has been retired", Hazard.WAR, (RETIRED_AFTER.name,)
        if abs(self.lease) < self.expected:
            return "the page has not been written since it was leased", Hazard.RAW, (*to_load, QUEUED_MATCH.name)
        if self.writer < 0:
            edges = fitting_edges(Hazard.WAR, forward, load)
            return "the page has been loaded for another", Hazard.WAR, [edge.name for edge in edges]
        return "the page has been written by another", Hazard.WAR, (RETIRED_AFTER.name,)


# --- kernels ------------------------------------------------------------------------------------------------


@declare_kernel
def begin_tags(op: KernelAccesses, *operands: Any) -> None:
    """Note the leases of entries of the page table, and the ends of leases."""
    it = BegunTags(*operands)
    for operand in (it.columns, it.leases, it.retired):
        op.read(operand)
    op.write(it.expected, it.rows)
    op.write(it.tags, it.retired[0])


def _begin_tags(*operands: Any) -> None:
    expected, tags, rows, columns, leases, retired = BegunTags(*operands)
    expected[rows, columns] = leases.int()
    tags[retired[0], LEASE] = -retired[1].int()


@declare_kernel
def visit_pages(op: KernelAccesses, *operands: Any) -> None:
    """Compare the tags of the pages of ``rows``, see ``Visited``, and before a forward tag those that it writes."""
    it = Visit(*operands)
    for operand in (it.starts, it.ends, it.clock, it.findings):
        op.read(operand)
    if it.when == When.BEFORE:
        op.read(it.slots)
        op.read(it.query_starts)
    op.read(it.page_table, it.rows)
    op.read(it.expected, it.rows)
    op.read_rows(it.arrived[it.layer], _pages_named, it.rows, it.ends, it.page_table, it.page_size)
    if it.when != When.LAYER:
        op.read_rows(it.tags, _pages_named, it.rows, it.ends, it.page_table, it.page_size)
        op.write(it.clock)
    op.write(it.findings)
    if it.when == When.BEFORE:
        for each in (it.tags, *it.arrived):
            op.write_rows(each, _pages_written, it.rows, it.slots, it.query_starts, it.page_size)


def _pages_named(rows: Tensor, ends: Tensor, page_table: Tensor, page_size: int) -> I64:
    inside = torch.arange(page_table.shape[1]) < -(-ends // page_size)[:, None]
    pages = page_table[rows][inside & (rows != 0)[:, None]].long()
    named: I64 = pages[pages > 0].numpy()
    return named


def _pages_written(rows: Tensor, slots: Tensor, query_starts: Tensor | None, page_size: int) -> I64:
    counts = len(slots) // len(rows) if query_starts is None else query_starts.diff()
    pages = slots[(rows != 0).repeat_interleave(counts)] // page_size
    named: I64 = pages[pages > 0].numpy()
    return named


def _visit_pages(*operands: Any) -> None:
    visit = Visit(*operands)
    rows, starts, ends, slots, query_starts, page_table, expected, tags, arrived, clock, findings = visit[:11]
    back, page_size, when, layer = visit[11:]
    step = clock[1] if when == When.AFTER else clock[0] + 1
    if when != When.LAYER:
        clock[int(when == When.BEFORE)] = step
    starts, num = starts - back, -(-ends // page_size)
    most = min(int(num.max()), page_table.shape[1])
    columns = torch.arange(most)
    inside = (rows != 0)[:, None] & (columns < num[:, None])
    pages, want = page_table[rows, :most].long(), expected[rows, :most]
    old = inside & (columns * page_size < starts[:, None])
    named = (pages > 0) & (pages < len(tags))
    place = torch.where(named, pages, 0)
    of_layer = torch.where(named, arrived[layer][place], 0)
    right, tag = named & (of_layer == want), torch.zeros((*pages.shape, 3), dtype=torch.int32)
    if when != When.LAYER:
        tag = torch.where(named[:, :, None], tags[place], 0)
        lease, at, _ = tag.unbind(2)
        right &= (lease == want) & ((at == columns) | (at == ANY_POSITION))
    wrong = (old if when == When.BEFORE else old | (inside & (pages != 0))) & ~right
    if when == When.BEFORE:  # where the first of the step's tokens in each page goes
        new = inside & ((columns + 1) * page_size > starts[:, None])
        wrong |= new & named & ((lease == -want) | (lease.abs() > want))  # retired, or a later lease's
        firsts = torch.arange(len(rows)) * (len(slots) // len(rows)) if query_starts is None else query_starts[:-1]
        positions = torch.maximum(columns * page_size, starts[:, None])
        slot = slots[torch.where(new, firsts[:, None] + positions - starts[:, None], 0)]
        targets = slot // page_size
        astray = new & ((targets != pages) | (slot % page_size != positions % page_size))
        pages, wrong = torch.where(astray & ~wrong, targets, pages), wrong | astray
        written = new & (targets > 0) & (targets < len(tags))
    if wrong.any():
        for req, column in wrong.nonzero().tolist():
            findings[0, 0] += 1
            number = int(findings[0, 0])
            if number <= MAX_FINDINGS:
                lease, at, writer = tag[req, column].tolist()
                fields = [when, int(step), int(rows[req]), column, int(pages[req, column]), int(want[req, column])]
                fields += [lease, at, int(of_layer[req, column]), writer, layer]
                findings[number] = torch.tensor(fields, dtype=torch.int32)
    if when == When.BEFORE:
        tag = torch.stack([want, columns.int().expand_as(want), step.expand_as(want)], dim=2)
        tags[targets[written]] = tag[written]
        arrived[:, targets[written]] = want[written]


@declare_kernel
def seal_pages(op: KernelAccesses, *operands: Any) -> None:
    """Leave checksum and position of pages that have been backed up. After ``MovedPages``: all their parts."""
    it, parts = MovedPages(*operands[:8]), operands[8:]
    for memory in (*parts, it.tags, it.arrived[-1]):
        op.read(memory, it.pages)
    op.read(it.leases)
    op.write(it.host, it.host_pages)


def _seal_pages(*operands: Any) -> None:
    pages, host_pages, leases, _, _, host, tags, arrived = MovedPages(*operands[:8])
    right = (tags[pages, LEASE] == leases) & (arrived[-1, pages] == leases)
    position = torch.where(right, tags[pages, POSITION], NO_POSITION)
    host[host_pages] = torch.stack([_added_up(pages, 0, operands[8:]), position], dim=1)


@declare_kernel
def arrive_pages(op: KernelAccesses, *operands: Any) -> None:
    """Note that a load has brought a layer of pages, and add up its parts. With the last layer the pages get their
    tags, and sums that are not those of the backup are noted. After ``MovedPages``: the writer, the layer, how many
    words come before its parts, and the parts."""
    it, (_, layer, _, *parts) = MovedPages(*operands[:8]), operands[8:]
    for part in parts:
        op.read(part, it.pages)
    op.read(it.leases)
    op.read(it.sums)
    op.write(it.sums)
    op.write(it.arrived[layer], it.pages)
    if layer == len(it.arrived) - 1:
        op.read(it.known)
        op.read(it.host, it.host_pages)
        op.write(it.tags, it.pages)


def _arrive_pages(*operands: Any) -> None:
    pages, host_pages, leases, known, sums, host, tags, arrived = MovedPages(*operands[:8])
    writer, layer, first, *parts = operands[8:]
    sums += _added_up(pages, first, parts)
    if layer < len(arrived) - 1:
        arrived[layer, pages] = leases.int()
        return
    checksum, position = host[host_pages].unbind(1)
    wrong = (known != 0) & ((sums != checksum) | (position == NO_POSITION))
    arrived[layer, pages] = torch.where(wrong, SPOILED, leases).int()
    position = torch.where(known != 0, position, ANY_POSITION)
    tags[pages] = torch.stack([leases, position, torch.full_like(position, writer)], dim=1).int()


def _added_up(pages: Tensor, first: int, parts: Sequence[Tensor]) -> Tensor:
    """The sums [N] int64 of the words of ``parts`` of ``pages`` [N], each by an odd weight of its own."""
    total = torch.zeros_like(pages)
    for part in parts:
        total += (part[pages] * (2 * torch.arange(first, first + part.shape[1]) + 1)).sum(1)
        first += part.shape[1]
    return total
