"""A Python backend of torch called ``vgpu``, on the PrivateUse1 key. Only this file uses torch's private functions.

torch offers this through ``torch.utils.backend_registration`` without guaranteeing that it stays; ``test_backend.py``
fails if it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import backend_registration

if TYPE_CHECKING:
    from fenceline_sim.layout import Form

NAME = "vgpu"
TORCH_DEVICE_INDEX = 0

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

Kernel = Callable[..., Any]

_libraries: list[torch.library.Library] = []  # torch undoes registrations with the library's life


def install(kernels: Mapping[str, Kernel], autograd_kernels: Mapping[str, Kernel]) -> torch.device:
    """Make ``vgpu`` a device of torch, once per process.

    ``kernels`` are operators without a tensor argument on this device (factories). ``autograd_kernels`` are composite
    operators that must not be decomposed outside inference mode. Raises ``RuntimeError`` if another package uses
    torch's only key for external backends.
    """
    if not _libraries:
        taken = torch._C._get_privateuse1_backend_name()
        if taken not in ("privateuseone", NAME):
            raise RuntimeError(f"torch's PrivateUse1 backend is already in use by {taken!r}; vgpu needs it")
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        library = torch.library.Library("aten", "IMPL")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "PrivateUse1")
        for name, kernel in autograd_kernels.items():
            library.impl(name, kernel, "AutogradPrivateUse1")
        _libraries.append(library)
    return torch.device(NAME, TORCH_DEVICE_INDEX)


def make_wrapper(cls: type, form: Form, offset: int) -> Any:
    """A tensor of class ``cls`` on the vgpu that has sizes but no memory allocated by torch."""
    return torch.Tensor._make_wrapper_subclass(
        cls, form.shape, strides=form.stride, storage_offset=offset, dtype=form.dtype, device=_DEVICE
    )


def inference() -> AbstractContextManager[object]:
    """Inference mode, unless it is on already, as in the engine: then it need not be entered for each operation."""
    return _AS_IT_IS if torch.is_inference_mode_enabled() else torch.inference_mode()


_AS_IT_IS = nullcontext()


def is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether torch can decompose ``func`` into other operators. Under inference mode it is not decomposed before."""
    return bool(func._can_decompose())


def decompose(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func`` as those other operators."""
    if _COMPOSITE in func.py_kernels:
        return func.decompose(*args, **kwargs)
    # torch's own ``decompose`` would check on every call whether the operator can be decomposed.
    return func._op_dk(_COMPOSITE, *args, **kwargs)


class NoTorchFunction:
    """Base of tensor classes that take part in dispatch only, below torch's Python API."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl


_DEVICE: Any = f"{NAME}:{TORCH_DEVICE_INDEX}"
