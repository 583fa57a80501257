"""Copies within the device, and between it and host memory, pageable or pinned, with CUDA's semantics.

| copy | host memory | blocks the host | when host memory is touched |
|---|---|---|---|
| to the device | pageable, non_blocking | no | at the call: it is staged |
| to the device | pageable | until it has run | at the call |
| to the device | pinned, non_blocking | no | when it runs |
| to the host | pageable | until it has run, non_blocking or not | when it runs |
| to the host | pinned, non_blocking | no | when it runs |
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fenceline_sim import backend
from fenceline_sim.layout import Form, contiguous_form, form_of, layout_of
from fenceline_sim.memory import Access
from fenceline_sim.place import here
from fenceline_sim.streams import Operation
from fenceline_sim.tensor import VTensor, access, new_tensor


def copy_(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``dst.copy_(src)``, broadcasting and converting; at least one of them is on the device."""
    if isinstance(dst, VTensor):
        if isinstance(src, VTensor):
            target, source = dst.plain, src.plain
            dst.gpu.submit("copy", lambda: _run(target, source), [access(src)], [access(dst)], here())
        else:
            _to_device(dst, src, non_blocking)
        return dst
    assert isinstance(src, VTensor), "one of the two tensors is on the device"
    _to_host(dst, src, non_blocking)
    return dst


def _run(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _to_device(dst: VTensor, src: torch.Tensor, non_blocking: bool) -> None:
    tag = dst.gpu.pinned.find(src)
    if tag is None:
        dst.gpu.forbid_in_capture("a copy from pageable memory", dst.gpu.thread.current)
    source = src.detach() if tag is not None and non_blocking else src.detach().clone()
    reads = [Access(tag, layout_of(src))] if tag is not None and non_blocking else []
    target = dst.plain
    op = dst.gpu.submit("copy to device", lambda: _run(target, source), reads, [access(dst)], here())
    if not non_blocking:
        dst.gpu.synchronize(op)


def _to_host(dst: torch.Tensor, src: VTensor, non_blocking: bool) -> Operation:
    tag = src.gpu.pinned.find(dst)
    if tag is None:
        src.gpu.forbid_in_capture("a copy to pageable memory", src.gpu.thread.current)
    writes = [] if tag is None else [Access(tag, layout_of(dst))]
    target, source = dst.detach(), src.plain
    op = src.gpu.submit("copy to host", lambda: _run(target, source), [access(src)], writes, here())
    if tag is None or not non_blocking:
        src.gpu.synchronize(op)
    return op


def to_copy(
    src: VTensor, *, dtype: torch.dtype | None = None, layout: Any = None, device: torch.device | None = None,
    pin_memory: bool | None = None, non_blocking: bool = False, memory_format: torch.memory_format | None = None,
) -> torch.Tensor:  # fmt: skip
    """``src.to(...)`` where it copies. To the host with ``non_blocking`` the result is pinned, as torch makes it."""
    dtype = src.dtype if dtype is None else dtype
    if memory_format in (None, torch.preserve_format):
        form = _preserved(src.layout_.form, dtype)
    else:
        form = contiguous_form(tuple(src.shape), dtype)
    if device is None or torch.device(device).type == backend.NAME:
        gpu, place = src.gpu, here()
        result = new_tensor(gpu, form, place)
        target, source = result.plain, src.plain
        gpu.submit("to", lambda: _run(target, source), [access(src)], [access(result)], place)
        return result
    if torch.device(device).type != "cpu":
        raise RuntimeError(f"a vgpu tensor cannot go to {device}; copy it to the CPU first")
    if non_blocking:
        buffer = src.gpu.pinned.buffer(form.nbytes)
        host = torch.empty(0, dtype=dtype).set_(buffer.untyped_storage(), 0, form.shape, form.stride)
    else:
        host = torch.empty_strided(form.shape, form.stride, dtype=dtype)
    # The device converts, then the copy engine copies.
    converted = src if src.dtype is dtype else to_copy(src, dtype=dtype)
    assert isinstance(converted, VTensor), "no device was given"
    _to_host(host, converted, non_blocking)
    return host


@cache
def _preserved(form: Form, dtype: torch.dtype) -> Form:
    """A fresh tensor of ``dtype`` for values of ``form``, as torch lays it out."""
    like = torch.empty_strided(form.shape, form.stride, device="meta")
    return form_of(form.shape, torch.empty_like(like).stride(), dtype)
