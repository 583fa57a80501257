"""Arena fill: live rows and padding of up to 32 graph inputs in one launch (include/fenceline/arena_fill.h)."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fenceline_kernel.library import FILL_FIELD, KernelLibrary, load

MAX_FILL_FIELDS = 32


@dataclass(frozen=True, slots=True)
class FillField:
    """One graph input.

    ``dst`` [size, *row], on the GPU, contiguous: what the graph reads.
    ``src`` [rows, *row], same dtype, on the same GPU or in pinned host memory; each row contiguous, any stride between
    rows. With two dimensions its rows may be shorter than dst's: the missing columns are padded. None: all padding.
    ``pad``: the value of every element that is not live. ``name`` is used in error messages.
    The caller orders other reads and writes of the tensors; a FillPlan keeps them alive.
    """

    dst: torch.Tensor
    src: torch.Tensor | None
    pad: int | float | bool
    name: str = "field"


class FillPlan:
    """Destinations and pads, checked once and filled many times, in one launch each and without uploads."""

    def __init__(self, fields: Sequence[FillField], library: KernelLibrary | None = None) -> None:
        """Raises ValueError naming the field and the remedy; KernelUnavailable if there are no kernels."""
        if not 1 <= len(fields) <= MAX_FILL_FIELDS:
            raise ValueError(
                f"a fill takes 1 to {MAX_FILL_FIELDS} fields, got {len(fields)}: split them over two fills"
            )
        self.device = fields[0].dst.device
        self._library = library if library is not None else load(self.device)
        if self.device.type != self._library.device_type:
            raise ValueError(f"{fields[0].name}: dst is on {self.device}: it must be on {self._library.device_type}")
        self._fields = tuple(fields)  # keeps the tensors alive whose addresses are used below
        self._targets = [_make_target(field, self.device) for field in fields]
        self._spans = sorted(target.span for target in self._targets)
        for (_, end, _), (start, _, name) in itertools.pairwise(self._spans):
            if start < end:
                raise ValueError(f"{name}: its memory overlaps another destination: give each its own buffer")
        self._room = min(target.size for target in self._targets)
        self._packed, self.max_live = self._bind([field.src for field in fields])

    def fill(
        self,
        num_live: int | torch.Tensor,
        sources: Sequence[torch.Tensor | None] | None = None,
        stream: int | None = None,
    ) -> None:
        """Copy rows [0, num_live) of every source and pad every other row, on ``stream`` (None: torch's current one).

        ``num_live``: an int is fixed when a graph is captured; an int64 tensor of one element on the same GPU is read
        when the kernel runs and limited to each field's rows. ``sources``: one for each field (None: only padding),
        used instead of those that the plan was made with, for example a ring's next slot. The caller keeps them alive.
        Raises ValueError if something does not fit, RuntimeError if the launch fails.
        """
        packed, max_live = (self._packed, self.max_live) if sources is None else self._bind(sources)
        if isinstance(num_live, torch.Tensor):
            if num_live.dtype != torch.int64 or num_live.numel() != 1 or num_live.device != self.device:
                raise ValueError(f"num_live must be one int64 on {self.device}: got {_describe(num_live)}")
            number, pointer = 0, num_live.data_ptr()
        else:
            if not 0 <= num_live <= max_live:
                raise ValueError(f"num_live is {num_live}, these fields take 0 to {max_live}: use a larger bucket")
            number, pointer = num_live, None
        self._library.arena_fill(packed, len(self._targets), number, pointer, self.device, stream)

    def _bind(self, sources: Sequence[torch.Tensor | None]) -> tuple[bytes, int]:
        """Descriptors for ``sources``, and the largest number of rows that all fields and sources have."""
        if len(sources) != len(self._targets):
            raise ValueError(f"{len(sources)} sources for {len(self._targets)} fields: give one, or None, for each")
        packed, max_live = [], self._room
        for target, src in zip(self._targets, sources, strict=True):
            if src is None:
                packed.append(_pack(target, 0, 0, 0, 0))
                continue
            _check_source(target, src, self.device)
            num_rows = len(src)
            max_live = min(max_live, num_rows)
            if src.numel() == 0:
                packed.append(_pack(target, 0, 0, 0, 0))
                continue
            start, row_bytes = src.data_ptr(), src.nbytes // num_rows
            row_stride = src.stride(0) * target.itemsize
            self._check_not_written(start, start + (num_rows - 1) * row_stride + row_bytes, target.name)
            packed.append(_pack(target, start, num_rows, row_bytes, row_stride))
        return b"".join(packed), max_live

    def _check_not_written(self, start: int, end: int, name: str) -> None:
        """Check that a fill does not write what it reads (F9: sources must not change; and blocks run in any order)."""
        # The last destination that starts before ``end``.
        before = bisect.bisect_left(self._spans, (end, 0, "")) - 1
        if before >= 0 and self._spans[before][1] > start:
            raise ValueError(f"{name}: src overlaps the destination {self._spans[before][2]}: give each its own buffer")


def arena_fill(
    fields: Sequence[FillField],
    num_live: int | torch.Tensor,
    stream: int | None = None,
    library: KernelLibrary | None = None,
) -> None:
    """``FillPlan(fields).fill(num_live)``: for fields that are filled once. Filling a FillPlan again is several
    times faster."""
    FillPlan(fields, library).fill(num_live, stream=stream)


@dataclass(frozen=True, slots=True)
class _Target:
    """The part of a descriptor for a destination; ``row`` is a row's shape, ``span`` its first byte, end and name."""

    name: str
    dtype: torch.dtype
    itemsize: int
    row: torch.Size
    size: int
    row_bytes: int
    pad: int
    span: tuple[int, int, str]


def _make_target(field: FillField, device: torch.device) -> _Target:
    dst, name = field.dst, field.name
    if dst.device != device:
        raise ValueError(f"{name}: dst is on {dst.device}: all fields of a fill must be on one device, here {device}")
    if dst.dim() == 0 or dst.numel() == 0 or not dst.is_contiguous():
        raise ValueError(f"{name}: dst must be contiguous [size, ...] and not empty, got {_describe(dst)}")
    start, nbytes, size = dst.data_ptr(), dst.nbytes, len(dst)
    return _Target(
        name=name,
        dtype=dst.dtype,
        itemsize=dst.element_size(),
        row=dst.shape[1:],
        size=size,
        row_bytes=nbytes // size,
        pad=pad_pattern(field.pad, dst.dtype, name),
        span=(start, start + nbytes, name),
    )


def _pack(target: _Target, source: int, num_rows: int, row_bytes: int, row_stride: int) -> bytes:
    return FILL_FIELD.pack(
        source, target.span[0], target.pad, num_rows, row_bytes, row_stride, target.size, target.row_bytes, 0
    )


def _check_source(target: _Target, src: torch.Tensor, device: torch.device) -> None:
    name, row, wanted = target.name, src.shape[1:], target.row
    if src.dtype is not target.dtype:
        raise ValueError(f"{name}: src is {src.dtype}, dst is {target.dtype}: make them equal")
    if src.device != device and src.numel() > 0 and not src.is_pinned():  # an empty tensor is never pinned
        raise ValueError(f"{name}: src is on {src.device}: put it on {device} or into pinned memory (pin_memory())")
    if src.dim() == 0 or not (row == wanted or (len(row) == len(wanted) == 1 and row[0] <= wanted[0])):
        raise ValueError(f"{name}: rows of src are {tuple(row)}, of dst {tuple(wanted)}: rows must be alike")
    if not src.is_contiguous() and len(src) > 0 and not src[0].is_contiguous():
        raise ValueError(f"{name}: the rows of src must be contiguous: call contiguous() on it")


@functools.lru_cache(maxsize=1024)
def pad_pattern(pad: int | float | bool, dtype: torch.dtype, name: str = "field") -> int:
    """``pad`` repeated to eight bytes, as a little-endian number. Raises ValueError if ``dtype`` cannot hold
    it."""
    if dtype.is_complex or dtype.itemsize > 8:
        raise ValueError(f"{name}: {dtype} has no pad pattern of 8 bytes: view it as a smaller dtype")
    if not dtype.is_floating_point:
        limits = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if not isinstance(pad, int) or not limits[0] <= pad <= limits[1]:
            raise ValueError(f"{name}: pad {pad!r} is no {dtype}")
    one = bytes(torch.tensor([pad], dtype=dtype).view(torch.uint8).tolist())
    return int.from_bytes(one * (8 // len(one)), "little")


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, strides {tensor.stride()}"
