"""Functions that make tensors on the device: ``torch.empty(..., device="vgpu")`` and similar ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fenceline_sim import backend
from fenceline_sim.copies import copy_
from fenceline_sim.dispatch import dispatch
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.layout import contiguous_form, form_of
from fenceline_sim.memory import Access
from fenceline_sim.place import here
from fenceline_sim.tensor import new_tensor

_current: list[VirtualGpu] = []


def current_gpu() -> VirtualGpu:
    """The virtual GPU that ``device="vgpu"`` means. If none was chosen, one with seed 0 is made on first use."""
    if not _current:
        use(VirtualGpu())
    return _current[0]


def use(gpu: VirtualGpu) -> torch.device:
    """Let ``device="vgpu"`` mean ``gpu`` from now on; returns the torch device."""
    _current[:] = [gpu]
    return install()


def install() -> torch.device:
    arange = torch.ops.aten.arange
    made: dict[str, Any] = {"empty.memory_format": _empty, "empty_strided": _empty_strided, "_copy_from": _copy_from}
    made |= {"arange": _from_cpu(arange.default), "arange.start": _from_cpu(arange.start)}
    made["arange.start_step"] = _from_cpu(arange.start_step)
    return backend.install(made, {"scaled_dot_product_attention": _attention})


def _empty(size: list[int], dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return new_tensor(current_gpu(), contiguous_form(tuple(size), dtype), here())


def _empty_strided(
    size: list[int], stride: list[int], dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return new_tensor(current_gpu(), form_of(tuple(size), tuple(stride), dtype), here())


def _copy_from(src: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return copy_(dst, src, non_blocking)


def _from_cpu(func: Any) -> Callable[..., torch.Tensor]:
    """A factory whose values are computed by the CPU's kernel and written by an operation that reads nothing."""

    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs = kwargs | {"device": torch.device("cpu"), "pin_memory": False}
        value: torch.Tensor = func(*args, **kwargs)
        gpu, place = current_gpu(), here()
        result = new_tensor(gpu, contiguous_form(tuple(value.shape), value.dtype), place)
        target = result.plain

        def run() -> None:
            target.copy_(value)

        label = func._schema.name.removeprefix("aten::")
        gpu.submit(label, run, (), [Access(result.allocation.tag, result.layout_)], place)
        return result

    return factory


def _attention(*args: Any, **kwargs: Any) -> Any:
    return dispatch(torch.ops.aten.scaled_dot_product_attention.default, args, kwargs)
