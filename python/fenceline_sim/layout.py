"""Form and Layout: a tensor's shape and which bytes it covers. Interned, so they are compared by identity."""

from __future__ import annotations

from functools import cache

import torch

Ranges = tuple[tuple[int, int], ...]

_MAX_RANGES = 1 << 14  # of one view; a view of more pieces counts as the whole span


class Form:
    """Shape, strides and dtype. ``nbytes`` is the memory that a tensor of this form needs."""

    __slots__ = ("dtype", "itemsize", "nbytes", "numel", "shape", "stride")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.stride = stride
        self.dtype = dtype
        self.itemsize = dtype.itemsize
        numel, last = 1, 0
        for size, step in zip(shape, stride, strict=True):
            numel *= size
            last += (size - 1) * step
        self.numel = numel
        self.nbytes = (last + 1) * self.itemsize if numel else 0


class Layout:
    """A form at ``offset`` elements from the start of the memory."""

    __slots__ = ("_ranges", "form", "offset")

    def __init__(self, form: Form, offset: int) -> None:
        self.form = form
        self.offset = offset
        self._ranges: Ranges | None = None

    @property
    def ranges(self) -> Ranges:
        """The bytes covered: disjoint half-open ranges in ascending order."""
        if self._ranges is None:
            self._ranges = _ranges(self.form, self.offset)
        return self._ranges


def _ranges(form: Form, offset: int) -> Ranges:
    if form.numel == 0:
        return ()
    size, start = form.itemsize, offset * form.itemsize
    dims = sorted((step * size, n) for n, step in zip(form.shape, form.stride, strict=True) if n > 1 and step)
    run = size  # bytes of the innermost contiguous piece
    while dims and dims[0][0] <= run:
        step, n = dims.pop(0)
        run += step * (n - 1)
    pieces = 1
    for _, n in dims:
        pieces *= n
    if pieces > _MAX_RANGES:
        return ((start, start + form.nbytes),)
    starts = [start]
    for step, n in reversed(dims):
        starts = [s + step * i for s in starts for i in range(n)]
    merged: list[tuple[int, int]] = []
    for s in sorted(starts):
        if merged and s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], s + run))
        else:
            merged.append((s, s + run))
    return tuple(merged)


@cache
def form_of(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Form:
    return Form(shape, stride, dtype)


@cache
def layout_at(form: Form, offset: int) -> Layout:
    return Layout(form, offset)


def layout_of(tensor: torch.Tensor) -> Layout:
    form = form_of(tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return layout_at(form, int(tensor.storage_offset()))


def contiguous_form(shape: tuple[int, ...], dtype: torch.dtype) -> Form:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return form_of(shape, tuple(reversed(strides)), dtype)
