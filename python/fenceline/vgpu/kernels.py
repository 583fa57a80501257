"""Custom kernels: any Python function over memory of the device, with a declared footprint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fenceline.vgpu.memory import Access, Bound
from fenceline.vgpu.place import here
from fenceline.vgpu.tensor import VTensor, access


class Rows(NamedTuple):
    """Rows ``ids`` (integers, on the device) of ``tensor``'s first axis."""

    tensor: torch.Tensor
    ids: torch.Tensor


Footprint = Sequence[torch.Tensor | Rows]


def launch(
    label: str, kernel: Callable[..., None], args: Sequence[Any], reads: Footprint, writes: Footprint
) -> None:
    """Queue ``kernel(*args)`` on the current stream of the tensors' GPU.

    When it runs it gets, for the vgpu tensors among ``args``, plain CPU tensors over their memory, and works in place.
    ``reads`` and ``writes`` declare which of their bytes it accesses; the ids of ``Rows`` count as read.
    """
    tensors = [arg for arg in args if isinstance(arg, VTensor)]
    assert tensors, "a kernel works on at least one tensor of the device"
    plain = [arg.plain if isinstance(arg, VTensor) else arg for arg in args]
    indexes = [part for part in (*reads, *writes) if isinstance(part, Rows)]
    read = [_access(part) for part in reads] + [_access(part.ids) for part in indexes]
    bounds = [_bound(part) for part in indexes]
    tensors[0].gpu.submit(
        label, lambda: kernel(*plain), read, [_access(part) for part in writes], here(), bounds=bounds
    )


def _access(part: torch.Tensor | Rows) -> Access:
    tensor, index = part if isinstance(part, Rows) else (part, None)
    assert isinstance(tensor, VTensor), "a footprint lies on the device"
    assert index is None or isinstance(index, VTensor), "an index lies on the device"
    return access(tensor, None if index is None else index.plain)


def _bound(part: Rows) -> Bound:
    tensor, ids = part
    assert isinstance(tensor, VTensor) and isinstance(ids, VTensor), "checked with the access"
    return Bound(tensor.allocation.tag, 0, tensor.shape[0], ids.plain, access(ids))
