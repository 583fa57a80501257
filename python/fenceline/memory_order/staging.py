"""Rings of leased memory through which values get from the host to the device and back.

Inputs: the host packs a step's arrays into one pinned slot, SCHEDULE copies it to a device slot, FORWARD takes its own
copy. Token masks go from a slot straight to the table that the draw reads. Results: FORWARD packs them into a device
slot, COPY brings it to pinned memory, the host reads. There is one copy each way, whatever the number of fields.
Tensors are never passed between streams in any other memory (F16). If backups of KV pages may keep the copy engine
busy, so that COPY would have to wait for it, FORWARD writes small results into pinned memory itself.

Plans: libraries whose host side plans each batch (FlashInfer) keep one pinned buffer each, write it in ``plan()`` and
copy it with cudaMemcpyAsync. The caller has to ensure that the copy of the last plan has run before the next plan is
written (F12). Here the ring owns the buffers and orders their use: a plan borrows a slot, the library writes the slot's
pinned half and submits the copy to the device half itself, on SCHEDULE, where it need not wait for the step in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from fenceline.memory_order.access import Memory, copies, reads, releases, writes
from fenceline.memory_order.device import Device
from fenceline.memory_order.edges import (
    COPY_AFTER_FORWARD,
    FORWARD_AFTER_SCHEDULE,
    GROWTH_STOP,
    HOST_AFTER_COPY,
    HOST_AFTER_FORWARD,
    MASK_ROWS,
    OWN_RESULTS,
    SCHEDULE_AFTER_FORWARD,
    STAGING_REUSE,
    StreamName,
)
from fenceline.memory_order.guards import own_copy
from fenceline.memory_order.lease import LeaseError
from fenceline.memory_order.stream import Point, Points

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

_ALIGN = 16
_WORD = 8
_MIN_SLOT_BYTES = 1 << 16
# Writing results of up to this size, the tokens of 512 requests, takes a kernel 2 us; larger ones, with logprobs,
# would delay FORWARD.
_SMALL_BYTES = 4096


@dataclass(slots=True)
class Slot:
    """A pinned buffer and one of the same size on the device, with the Points after which each may be written again."""

    host: torch.Tensor  # uint8
    device: torch.Tensor  # uint8
    host_memory: Memory
    device_memory: Memory
    host_after: Point | None = None
    device_after: Points = Points()
    leased: bool = False

    def begin_write(self, on: Device, what: str) -> None:
        """The host may write the pinned buffer from now on."""
        if self.host_after is not None:  # WAR: an earlier copy may still read it
            on.schedule.synchronize(self.host_after, STAGING_REUSE)
        on.declare(StreamName.HOST, what, writes, self.host_memory)

    def begin_upload(self, on: Device, what: str, target: Memory | None = None) -> None:
        """SCHEDULE may copy the pinned buffer to the device's from now on, or to ``target``."""
        on.schedule.wait(self.device_after, SCHEDULE_AFTER_FORWARD)  # WAR: an earlier step may still read it
        on.declare(StreamName.SCHEDULE, what, copies, self.host_memory, target or self.device_memory)

    def upload_packed(
        self, on: Device, arrays: Mapping[str, npt.NDArray[np.generic]], nbytes: int, what: str
    ) -> dict[str, torch.Tensor]:
        """Copy arrays with the shapes and dtypes of ``arrays``, which are in the first ``nbytes`` of the pinned buffer,
        to the device. Returns FORWARD's own copies of them, which what is submitted to FORWARD from now on may use."""
        self.begin_upload(on, f"upload of {what}")
        on.schedule.copy(self.device[:nbytes], self.host[:nbytes])
        self.end_upload(on)
        on.declare(StreamName.FORWARD, f"FORWARD's own copy of {what}", reads, self.device_memory)
        with on.forward.active():
            block = own_copy(on, self.device[:nbytes])  # the next upload may overwrite the slot from here on
        self.device_after = Points.of(on.forward.record())
        return _views(block, arrays)

    def end_upload(self, on: Device) -> None:
        """Call it when the copy has been submitted to SCHEDULE: FORWARD may read the device buffer from now on."""
        self.host_after = on.schedule.record()
        on.forward.wait(self.host_after, FORWARD_AFTER_SCHEDULE)  # RAW: the copy brings our inputs


def _aligned(nbytes: int) -> int:
    return (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN


class _Ring:
    name: str

    def __init__(self, device: Device, depth: int, nbytes: int | None = None) -> None:
        nbytes = _MIN_SLOT_BYTES if nbytes is None else nbytes
        self._device = device
        self._slots = [self._make(index, nbytes) for index in range(depth)]
        self._next = 0

    def _make(self, index: int, nbytes: int) -> Slot:
        make, host, device = (self._device.memory, self._device.host_buffer(nbytes), self._device.device_buffer(nbytes))
        names = f"{self.name}.pinned[{index}]", f"{self.name}.device[{index}]"
        return Slot(host, device, make(names[0], host), make(names[1], device))

    def _take(self, nbytes: int) -> Slot:
        """The next slot, made larger if necessary, which waits for the device, but happens only a few times."""
        index = self._next
        self._next = (index + 1) % len(self._slots)
        if self._slots[index].host.numel() < nbytes:
            # The old slot goes back to the allocator, which knows nothing of our streams.
            self._device.full_stop(GROWTH_STOP)
            old = self._slots[index]
            label = "return of a slot to the allocator"
            self._device.declare(StreamName.HOST, label, releases, old.host_memory, old.device_memory)
            self._slots[index] = self._make(index, 1 << (nbytes - 1).bit_length())
        return self._slots[index]


class InputRing(_Ring):
    """Host arrays to FORWARD's tensors, through SCHEDULE. One slot is enough, and the host does not wait for it: when a
    step is launched the last but one has been published, so FORWARD has reached the last step, which copies its inputs
    first of all, and the slot is free. With a second slot the loop's order would hide a missing edge."""

    name = "input_ring"

    def __init__(self, device: Device, depth: int = 1) -> None:
        super().__init__(device, depth)

    def upload(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, torch.Tensor]:
        """Device tensors with the values that ``arrays`` have now, same shapes and dtypes. They are allocated on
        FORWARD and ordered by it: use them only there. The host may change the arrays as soon as this returns."""
        offsets, nbytes = _layout(arrays)
        slot = self._take(nbytes)
        slot.begin_write(self._device, "pack of the step's inputs")
        _pack(slot.host, arrays, offsets)
        return slot.upload_packed(self._device, arrays, nbytes, "the step's inputs")


@dataclass(frozen=True, slots=True)
class _Masks:
    """The masks of one step in the slot: those of its rows ``rows``, and behind them, if all its requests have one
    (``is_whole``), those of padding. The draw reads ``num_rows`` rows of the table."""

    slot: Slot
    rows: I64
    is_whole: bool
    num_rows: int
    pinned: torch.Tensor  # int32, in rows


class MaskTable(_Ring):
    """Which tokens each request that a step samples may draw: bits [num_rows, ceil(V / 32)] int32 on the device.

    The host knows them only when the tokens of the step before have arrived, so they have a slot of their own, beside
    that of the step's inputs. Draws read ``table``, whose memory is always the same, so that they can be captured. If
    all of a step's requests have a mask, SCHEDULE copies these to the table itself, else to the slot, and FORWARD
    writes the table. Every step that reads the table has written the rows that it reads: those of requests without a
    mask, and of padding, allow every token.
    """

    name = "mask_table"

    def __init__(self, device: Device, num_rows: int, vocab_size: int) -> None:
        super().__init__(device, depth=1)
        num_words = -(-vocab_size // 32)
        self.table = torch.full((num_rows, num_words), -1, dtype=torch.int32, device=device.torch_device)
        self._memory = device.memory("token_masks", self.table)
        device.name_rows(self.table, "token_masks")
        self._begun: _Masks | None = None
        self._is_read = False  # whether work that reads the masks may still be submitted
        # A slot, and its pinned memory as rows of the table.
        self._rows_of: tuple[Slot, torch.Tensor] | None = None

    def begin(self, rows: I64, num_reqs: int, num_rows: int) -> I32:
        """Pinned memory [M, ceil(V / 32)] int32 for the masks of the requests ``rows`` [M], which ascend, among the
        ``num_reqs`` that a step samples; the draw reads ``num_rows`` rows, at least as many. The host, in any of its
        threads, may write the memory until :meth:`upload`. Its values are those of an earlier step."""
        assert not self._is_read, "the draw under the last masks has been submitted"
        device, num, row_bytes = self._device, len(rows), self.table.shape[1] * 4
        is_whole = num == num_reqs
        num_pinned = num_rows if is_whole and device.keeps(MASK_ROWS) else num
        first = _aligned(num_pinned * row_bytes)  # of the rows' numbers
        slot = self._take(first + rows.nbytes)
        slot.begin_write(device, "fill of the step's masks")
        pinned = self._pinned_rows(slot)[:num_pinned]
        assert len(pinned) == num_pinned and pinned.data_ptr() == slot.host.data_ptr(), "the rows of this slot"
        masks: I32 = pinned.numpy()
        if is_whole:
            masks[num:] = -1
        else:
            slot.host.numpy()[first : first + rows.nbytes].view(np.int64)[:] = rows
        self._begun = _Masks(slot, rows, is_whole, num_rows, pinned)
        return masks[:num]

    def upload(self) -> torch.Tensor:
        """The step's masks [num_rows, ceil(V / 32)] int32: the first rows of ``table``. They have been written to the
        memory of :meth:`begin`. Good on FORWARD for work that is submitted before :meth:`drawn`."""
        assert self._begun is not None, "masks are written before they are uploaded"
        device, begun, self._begun = self._device, self._begun, None
        self._is_read = True
        slot, pinned, table = begun.slot, begun.pinned, self.table[: begun.num_rows]
        device.begin_fill([table], MASK_ROWS)
        if begun.is_whole:
            slot.begin_upload(device, "upload of the step's masks", self._memory)
            device.schedule.copy(table[: len(pinned)] if len(pinned) < len(table) else table, pinned)
            slot.end_upload(device)
        else:
            arrays = {"masks": pinned.numpy(), "rows": begun.rows}
            nbytes = _aligned(pinned.nbytes) + _aligned(begun.rows.nbytes)
            views = slot.upload_packed(device, arrays, nbytes, "the step's masks")
            device.declare(StreamName.FORWARD, "the step's masks to their rows", writes, self._memory)
            with device.forward.active():
                if device.keeps(MASK_ROWS):
                    table.fill_(-1)
                table.index_copy_(0, views["rows"], views["masks"])
        device.declare(StreamName.FORWARD, "draw under the step's masks", reads, self._memory)
        return table

    def drawn(self, done: Point) -> None:
        """The tokens have been drawn under the masks of the last :meth:`upload` after ``done``, on FORWARD."""
        self._slots[0].device_after = Points.of(done)
        self._is_read = False

    def _pinned_rows(self, slot: Slot) -> torch.Tensor:
        """The pinned memory of ``slot`` as rows of the table."""
        if self._rows_of is None or self._rows_of[0] is not slot:
            num_words = self.table.shape[1]
            num_rows = slot.host.numel() // (4 * num_words)
            rows = slot.host[: 4 * num_rows * num_words].view(torch.int32).view(num_rows, num_words)
            self._rows_of = slot, rows
        return self._rows_of[1]


class PlanRing(_Ring):
    """Slots of ``nbytes`` for plans that FORWARD reads. With two of them a plan is copied while the step before still
    reads its own. A slot is FORWARD's from the end of :meth:`planning` until the next one begins: work that reads it
    has to be submitted in between."""

    def __init__(self, device: Device, nbytes: int, depth: int = 2, name: str = "plan_ring") -> None:
        self.name = name
        super().__init__(device, depth, nbytes)
        self.num_plans = 0

    @contextmanager
    def planning(self) -> Iterator[Slot]:
        """Inside, the host may write ``slot.host`` and submit its copy to ``slot.device``, on SCHEDULE, the current
        stream. Afterwards FORWARD may read ``slot.device``."""
        device, depth = self._device, len(self._slots)
        if self.num_plans:  # work that was submitted to FORWARD since the last plan may read it
            last = self._slots[(self.num_plans - 1) % depth]
            device.declare(StreamName.FORWARD, "step that reads its plan", reads, last.device_memory)
            last.device_after = Points.of(device.forward.record())
        slot = self._slots[self.num_plans % depth]
        self.num_plans += 1
        slot.begin_write(device, "plan of a batch")
        slot.begin_upload(device, "upload of a plan")
        with device.schedule.active():
            yield slot
        slot.end_upload(device)


class ResultLease:
    """Results on their way to the host. :meth:`wait` may be called once; it ends the lease. ``produced`` is the Point
    on FORWARD after which the results were packed, with all work before it."""

    def __init__(
        self,
        device: Device,
        slot: Slot,
        layout: Mapping[str, _Field],
        produced: Point,
        copied: Point,
        sources: Sequence[torch.Tensor],
    ) -> None:
        self.produced = produced
        self._sources = sources  # what is copied to the host stays allocated until it has been (F16)
        self._device = device
        self._slot: Slot | None = slot
        self._layout = layout
        self._copied = copied

    def arrived(self) -> bool:
        """Whether :meth:`wait` would not block. Asks the device, so call it once a step; before :meth:`wait`, by which
        alone the host learns it: one rank's may arrive before another's, and both lease the same memory next."""
        return self._copied.stream.ask(self._copied)

    def wait(self) -> dict[str, npt.NDArray[np.generic]]:
        """Block the host until the results have arrived. Returns copies, with the shapes and dtypes of the tensors,
        which stay valid when the ring's slot is used again. Raises :class:`LeaseError` when called again: the slot may
        by then hold another step's results."""
        if self._slot is None:
            raise LeaseError("these results were already taken")
        slot, self._slot = self._slot, None
        device, copied = self._device, self._copied
        edge = HOST_AFTER_FORWARD if copied.stream is device.forward else HOST_AFTER_COPY
        copied.stream.synchronize(copied, edge)
        device.declare(StreamName.HOST, "read of the step's results", reads, slot.host_memory)
        self.produced.stream.note_passed(self.produced)  # the copy has run after it
        host = slot.host.numpy()
        values = {name: field.read(host) for name, field in self._layout.items()}
        slot.leased = False
        self._sources = ()
        return values


@dataclass(frozen=True, slots=True)
class _Field:
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def of(self, slot: torch.Tensor) -> torch.Tensor:
        """The field's bytes in ``slot``, uint8."""
        count = prod(self.shape)
        return slot[self.offset : self.offset + count * self.dtype.itemsize]

    def read(self, host: npt.NDArray[np.uint8]) -> npt.NDArray[np.generic]:
        count = prod(self.shape)
        flat = np.frombuffer(host, dtype=self.dtype, count=count, offset=self.offset)
        return flat.reshape(self.shape).copy()


class ResultRing(_Ring):
    """FORWARD's tensors to host arrays, through COPY. Depth 2: one step publishes while the next runs.
    ``small_by_forward``: small results are written into pinned memory by FORWARD itself, where the device can do so."""

    name = "result_ring"

    def __init__(self, device: Device, depth: int = 2, small_by_forward: bool = False) -> None:
        super().__init__(device, depth)
        self._small_by_forward = small_by_forward

    def download(self, tensors: Mapping[str, torch.Tensor], small_by_forward: bool = False) -> ResultLease:
        """Start copying ``tensors`` to the host; work submitted to FORWARD from now on may overwrite them.
        ``small_by_forward``: as if the ring had been made so. Raises :class:`LeaseError` if the slot's earlier results
        have not been taken: more steps are in flight than the ring is deep."""
        layout, nbytes = _tensor_layout(tensors)
        if self._slots[self._next].leased:
            raise LeaseError("the result ring is full: publish the earlier step first")
        slot = self._take(nbytes)
        slot.leased = True
        device = self._device
        # The device slot needs no edge: the host waited for its last copy before the lease ended.
        if (small_by_forward or self._small_by_forward) and nbytes <= _SMALL_BYTES and device.writes_host:
            return self._write(slot, layout, tensors, nbytes)
        device.declare(StreamName.FORWARD, "pack of the step's results", writes, slot.device_memory)
        with device.forward.active():
            pieces = self._pack(slot, layout, tensors, nbytes)
        produced = device.forward.record()
        device.copy.wait(produced, COPY_AFTER_FORWARD)  # RAW: the step's results
        label = "copy of the step's results"
        device.declare(StreamName.COPY, label, copies, slot.device_memory, slot.host_memory)
        for place, source in pieces:
            device.copy.copy(place, source)
        sources = [source for _, source in pieces]
        return ResultLease(device, slot, layout, produced, device.copy.record(), sources)

    def _write(
        self, slot: Slot, layout: Mapping[str, _Field], tensors: Mapping[str, torch.Tensor], nbytes: int
    ) -> ResultLease:
        """:meth:`download` without COPY."""
        device = self._device
        label = "write of the step's results to the host"
        if nbytes:  # a step in the middle of prompts has no results
            device.declare(StreamName.FORWARD, label, writes, slot.host_memory)
        alone = next(iter(tensors.values()))
        with device.forward.active():
            if len(tensors) == 1 and alone.nbytes % _WORD == 0:
                # FORWARD's program order keeps the tensor as it is until it has been written to the host (F8).
                place, block = slot.host[: alone.nbytes], alone.contiguous().view(-1).view(torch.uint8)
            else:
                device.declare(StreamName.FORWARD, "pack of the step's results", writes, slot.device_memory)
                self._pack(slot, layout, tensors, nbytes)
                place, block = slot.host[:nbytes], slot.device[:nbytes]
        if block.nbytes:
            device.write_host(place, block)
        written = device.forward.record()
        return ResultLease(device, slot, layout, written, written, ())

    def _pack(
        self, slot: Slot, layout: Mapping[str, _Field], tensors: Mapping[str, torch.Tensor], nbytes: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy the tensors' bytes to the device slot, on FORWARD; returns COPY's copies, each (target, source)."""
        sources = {name: tensor.contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()}
        if not self._device.keeps(OWN_RESULTS):  # directly from memory that the next step may write
            return [(layout[name].of(slot.host), source) for name, source in sources.items()]
        for name, source in sources.items():
            layout[name].of(slot.device).copy_(source)
        return [(slot.host[:nbytes], slot.device[:nbytes])]


def _layout(arrays: Mapping[str, npt.NDArray[np.generic]]) -> tuple[list[int], int]:
    offsets, nbytes = [], 0
    for array in arrays.values():
        offsets.append(nbytes)
        nbytes += _aligned(array.nbytes)
    return offsets, nbytes


def _pack(host: torch.Tensor, arrays: Mapping[str, npt.NDArray[np.generic]], offsets: list[int]) -> None:
    target = host.numpy()
    for array, offset in zip(arrays.values(), offsets, strict=True):
        target[offset : offset + array.nbytes].view(array.dtype)[:] = array.ravel()


def _views(block: torch.Tensor, arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, torch.Tensor]:
    """``arrays`` as they are laid out in ``block``, all by one operator, since the GPU waits for it."""
    sizes: list[int] = []
    for array in arrays.values():
        num_words = -(-array.nbytes // _WORD)
        sizes += (num_words, _aligned(array.nbytes) // _WORD - num_words)
    parts = block.view(torch.int64).split_with_sizes(sizes)[::2]
    views = {}
    for (name, array), part in zip(arrays.items(), parts, strict=True):
        if array.itemsize != _WORD or array.dtype.kind != "i":
            part = part.view(_TORCH_DTYPES[array.dtype])[: array.size]
        views[name] = part if array.ndim == 1 else part.view(array.shape)
    return views


def _tensor_layout(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, _Field], int]:
    layout, nbytes = {}, 0
    for name, tensor in tensors.items():
        layout[name] = _Field(nbytes, tuple(tensor.shape), _NUMPY_DTYPES[tensor.dtype])
        nbytes += _aligned(tensor.nbytes)
    return layout, nbytes


_NUMPY_DTYPES: dict[torch.dtype, np.dtype[np.generic]] = {
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
}
_TORCH_DTYPES = {array: tensor for tensor, array in _NUMPY_DTYPES.items()}
