"""VTensor: a torch tensor on the virtual GPU. Every operator ends in ``dispatch.dispatch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from fenceline_sim import backend
from fenceline_sim.gpu import Allocation, VirtualGpu
from fenceline_sim.layout import Form, Layout, layout_at, layout_of
from fenceline_sim.memory import Access
from fenceline_sim.place import Place

_NOTHING: Mapping[str, Any] = {}
_dispatch: list[Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]] = []  # set by the module of that name


def set_dispatch(dispatch: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
    _dispatch[:] = [dispatch]


class VTensor(backend.NoTorchFunction, torch.Tensor):  # type: ignore[misc]
    """``plain`` is the memory as a CPU tensor, for kernels when they run; the host must not read it.

    ``generation`` is the one in which it was leased (``Checks.lease``), 0 if it was not.
    """

    plain: torch.Tensor
    allocation: Allocation
    layout_: Layout
    generation: int = 0

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch[0](func, args, kwargs or _NOTHING)

    @property
    def gpu(self) -> VirtualGpu:
        return self.allocation.gpu

    def data_ptr(self) -> int:
        """Where its memory lies: it differs from that of all other memory that is in use."""
        return self.plain.data_ptr()

    def tolist(self) -> Any:
        """As torch: copies to the host, which waits for it."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As torch on a GPU: only with ``force``, which copies to the host."""
        if not force:
            raise TypeError("can't convert a vgpu tensor to numpy: use Tensor.cpu() to copy it to host memory first")
        return self.cpu().numpy()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"vgpu {self.cpu()!r}"


def wrap(plain: torch.Tensor, allocation: Allocation, layout: Layout | None = None) -> VTensor:
    layout = layout_of(plain) if layout is None else layout
    tensor = cast(VTensor, backend.make_wrapper(VTensor, layout.form, layout.offset))
    tensor.plain = plain
    tensor.allocation = allocation
    tensor.layout_ = layout
    return tensor


def access(tensor: VTensor, index: torch.Tensor | None = None) -> Access:
    """All of ``tensor``, or its rows ``index``, as an access of an operation.

    Raises ``GenerationError`` for a view that was leased for an earlier fill of its memory.
    """
    tag = tensor.allocation.tag
    if tensor.generation:
        tensor.gpu.checks.use(tag, tensor.generation)
    return Access(tag, tensor.layout_, index)


def new_tensor(gpu: VirtualGpu, form: Form, place: Place) -> VTensor:
    """An uninitialised (poisoned) tensor on the current stream."""
    plain, allocation = gpu.allocate(form, place)
    return wrap(plain, allocation, layout_at(form, 0))
