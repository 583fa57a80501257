"""Arena fill: live rows and padding of up to 32 graph inputs in one launch (include/fenceline/arena_fill.h)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fenceline_kernel.library import FillFieldC, KernelLibrary, load

MAX_FILL_FIELDS = 32


@dataclass(frozen=True, slots=True)
class FillField:
    """One graph input.

    ``dst`` [size, *row], on the GPU, contiguous: what the graph reads.
    ``src`` [rows, *row], same dtype, on the same GPU or in pinned host memory; each row contiguous, any stride between
    rows. With two dimensions its rows may be shorter than dst's: the missing columns are padded. None: all padding.
    ``pad``: the value of every element that is not live. ``name`` stands in error messages.
    The tensors stay the caller's; a FillPlan keeps their addresses, not their memory.
    """

    dst: torch.Tensor
    src: torch.Tensor | None
    pad: int | float | bool
    name: str = "field"


class FillPlan:
    """Fields checked once, filled many times: a fill is one launch and copies no descriptor to the GPU."""

    def __init__(self, fields: Sequence[FillField], library: KernelLibrary | None = None) -> None:
        """Raises ValueError naming the field and the remedy; KernelUnavailable if there are no kernels."""
        if not 1 <= len(fields) <= MAX_FILL_FIELDS:
            raise ValueError(
                f"a fill takes 1 to {MAX_FILL_FIELDS} fields, got {len(fields)}: split them over two fills"
            )
        self.device = fields[0].dst.device
        self._library = library if library is not None else load(self.device)
        for field in fields:
            _check_field(field, self.device, self._library.device_type)
        _check_no_overlap(fields)
        self._fields = (FillFieldC * len(fields))(*map(_descriptor, fields))
        # The most rows that every field has room for and every source holds.
        rows = [len(tensor) for field in fields for tensor in (field.dst, field.src) if tensor is not None]
        self.max_live = min(rows)

    def fill(self, num_live: int | torch.Tensor, stream: int | None = None) -> None:
        """Copy rows [0, num_live) of every source and pad every other row, on ``stream`` (None: torch's current one).

        An int is fixed when a graph is captured; an int64 tensor of one element on the same GPU is read when the kernel
        runs and taken as at most each field's rows. Raises ValueError if num_live is none of these or out of range,
        RuntimeError if the launch fails.
        """
        if isinstance(num_live, torch.Tensor):
            if num_live.dtype != torch.int64 or num_live.numel() != 1 or num_live.device != self.device:
                raise ValueError(f"num_live must be one int64 on {self.device}: got {_describe(num_live)}")
            self._library.arena_fill(self._fields, 0, num_live.data_ptr(), self.device, stream)
        else:
            if not 0 <= num_live <= self.max_live:
                raise ValueError(
                    f"num_live is {num_live}, these fields take 0 to {self.max_live}: use a larger bucket"
                )
            self._library.arena_fill(self._fields, num_live, None, self.device, stream)


def arena_fill(
    fields: Sequence[FillField],
    num_live: int | torch.Tensor,
    stream: int | None = None,
    library: KernelLibrary | None = None,
) -> None:
    """``FillPlan(fields).fill(num_live)``: for fields that are not filled again."""
    FillPlan(fields, library).fill(num_live, stream)


def _check_field(field: FillField, device: torch.device, device_type: str) -> None:
    dst, src, name = field.dst, field.src, field.name
    if dst.device != device or dst.device.type != device_type:
        raise ValueError(
            f"{name}: dst is on {dst.device}: all fields of a fill must be on one {device_type} device"
        )
    if dst.dim() == 0 or dst.numel() == 0 or not dst.is_contiguous():
        raise ValueError(f"{name}: dst must be contiguous [size, ...] and not empty, got {_describe(dst)}")
    _check_pad(field)
    if src is None:
        return
    if src.dtype != dst.dtype:
        raise ValueError(f"{name}: src is {src.dtype}, dst is {dst.dtype}: make them equal")
    if src.device != device and not src.is_pinned():
        raise ValueError(
            f"{name}: src is on {src.device}: put it on {device} or into pinned memory (pin_memory())"
        )
    narrower = src.dim() == dst.dim() == 2 and src.shape[1] <= dst.shape[1]
    if src.dim() == 0 or not (narrower or src.shape[1:] == dst.shape[1:]):
        raise ValueError(
            f"{name}: src {tuple(src.shape)} does not fit dst {tuple(dst.shape)}: rows must be alike"
        )
    if len(src) > 0 and not src[0].is_contiguous():
        raise ValueError(f"{name}: the rows of src must be contiguous: call contiguous() on it")


def _check_pad(field: FillField) -> None:
    dtype, pad = field.dst.dtype, field.pad
    if dtype.is_complex or dtype.itemsize > 8:
        raise ValueError(f"{field.name}: {dtype} has no pad pattern of 8 bytes: view it as a smaller dtype")
    if dtype.is_floating_point:
        return
    limits = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not isinstance(pad, int) or not limits[0] <= pad <= limits[1]:
        raise ValueError(f"{field.name}: pad {pad!r} is no {dtype}")


def _check_no_overlap(fields: Sequence[FillField]) -> None:
    """What a fill writes nobody else may read or write in the same launch (F9: the source stays as it was)."""
    spans = []
    for field in fields:
        spans.append((*_span(field.dst), True, field.name))
        if field.src is not None and field.src.numel() > 0:
            spans.append((*_span(field.src), False, field.name))
    spans.sort()
    end, written_end = 0, 0
    for start, stop, written, name in spans:
        if start < (end if written else written_end):
            raise ValueError(
                f"{name}: its memory overlaps another source or destination: give each its own buffer"
            )
        end = max(end, stop)
        written_end = max(written_end, stop) if written else written_end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _descriptor(field: FillField) -> FillFieldC:
    dst, src = field.dst, field.src
    size = dst.element_size()
    live = src is not None and src.numel() > 0
    return FillFieldC(
        src=src.data_ptr() if src is not None and live else None,
        dst=dst.data_ptr(),
        pad=pad_pattern(field.pad, dst.dtype),
        src_rows=len(src) if src is not None and live else 0,
        src_row_bytes=math.prod(src.shape[1:]) * size if src is not None else 0,
        src_row_stride=src.stride(0) * size if src is not None else 0,
        size=len(dst),
        row_bytes=math.prod(dst.shape[1:]) * size,
    )


def pad_pattern(pad: int | float | bool, dtype: torch.dtype) -> int:
    """``pad`` as ``dtype``, repeated to eight bytes, as a little-endian number."""
    one = bytes(torch.tensor([pad], dtype=dtype).view(torch.uint8).tolist())
    return int.from_bytes(bytes(itertools.islice(itertools.cycle(one), 8)), "little")


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, strides {tensor.stride()}"
