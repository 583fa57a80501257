"""Launches Triton kernels with little CPU time. Triton's own launch looks up the compiled variant each time, which
takes the CPU longer than many kernels run on the GPU. Here a variant is looked up once and then launched directly.

A kernel launched this way takes its tensors first, then its numbers, then its constants (``tl.constexpr``). Its
integers are listed under ``do_not_specialize``, so that a variant depends only on constants and types, and no new one
is compiled when a number has a new value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime.jit import JITFunction

_ALIGNMENT = 16  # of addresses, in bytes; compiled kernels rely on it
# The version of Triton whose launch functions can be called here, and how those declare their leading arguments.
_KNOWN_VERSION = "3.6."
_KNOWN_FORMAT = "iiiKKppOOOOOO"

Tensors = Sequence[torch.Tensor | None]
Grid = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Bound:
    """A compiled kernel; ``function(x, y, z, stream, *before, *addresses, *scalars, *after)`` launches it."""

    function: Callable[..., None]
    before: tuple[object, ...]
    after: tuple[None, ...]


class KernelVariant:
    """A Triton kernel with its constants and launch options. Make it once for each set of them and keep it."""

    __slots__ = ("_bound", "_kernel", "_options", "constants")

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, int | bool],
        num_warps: int,
        pdl: bool = False,
        num_stages: int | None = None,
        **options: int,
    ) -> None:
        """``kernel``: a ``triton.jit`` function. ``pdl``: programmatic dependent launch, see ``rms_norm``.
        ``num_stages``: pipeline stages of its loops; None: Triton's default. ``options``: others of its compiler."""
        self.constants = dict(constants)
        self._kernel = kernel
        self._options: dict[str, int | bool] = {"num_warps": num_warps, "launch_pdl": pdl} | options
        if num_stages is not None:
            self._options["num_stages"] = num_stages
        self._bound: dict[tuple[object, ...], _Bound] = {}

    def launch(self, grid: Grid, tensors: Tensors, scalars: tuple[float, ...] = ()) -> None:
        """Launch on the current stream of the tensors' device, which is the current device. ``grid``: one to three
        sizes, all at least 1. The first tensor is never None. Each number is of the same type, int or float, in every
        launch. Launch hooks (Triton's profilers) see only launches that Triton makes itself."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        key = (device, *[None if tensor is None else tensor.dtype for tensor in tensors])
        bound = self._bound.get(key)
        if bound is None or reduce(or_, addresses) % _ALIGNMENT:
            self._launch_by_triton(grid, tensors, scalars, key)
            return
        x, y, z = (grid + (1, 1))[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        bound.function(x, y, z, stream, *bound.before, *addresses, *scalars, *bound.after)

    def _launch_by_triton(
        self, grid: Grid, tensors: Tensors, scalars: tuple[float, ...], key: tuple[object, ...]
    ) -> None:
        """Launch by Triton, which compiles the variant if necessary, and remember the variant for the next launch with
        the same ``key``."""
        compiled = self._kernel[grid](*tensors, *scalars, **self.constants, **self._options)
        aligned = all(tensor is None or tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors)
        if compiled is None or not aligned:
            return  # the interpreter runs it, or an address is not aligned, which is too rare to remember
        numbers = self._kernel.params[len(tensors) : len(tensors) + len(scalars)]
        for number, value in zip(numbers, scalars, strict=True):
            assert isinstance(value, float) or number.do_not_specialize, f"{number.name} chooses a variant"
        bound = _bind(compiled, len(self.constants))
        if bound is not None:
            self._bound[key] = bound


class _Zeroed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is allocated is zeros."""

    _EMPTY = tuple(
        getattr(torch.ops.aten, name)
        for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in self._EMPTY else made


_LAUNCHED_AHEAD: list[Any] = []


def launched_ahead(kernel: Any) -> Any:
    """``kernel``, which ``compile_ahead`` launches: its results tell kernels that are not Triton's where to read. Its
    own operands are right without any other kernel of Triton's."""
    _LAUNCHED_AHEAD.append(kernel)
    return kernel


def compile_ahead(walk: Callable[[], object], num_threads: int) -> int:
    """Call ``walk`` without Triton's kernels: those that it would launch are compiled, ``num_threads`` at a time, and
    none but those ``launched_ahead`` is launched. Returns when all are compiled: how many were not in Triton's cache on
    disk. One that cannot be compiled is left to its first launch. 0 if this file does not know this Triton's version.

    What the kernels would have written, ``walk``'s other operations see as zeros where it is newly allocated, so that
    an index is in bounds. ``walk`` is called again to launch the kernels."""
    if not triton.__version__.startswith(_KNOWN_VERSION):
        return 0
    from triton.runtime._async_compile import AsyncCompileMode

    run, launch, listener = JITFunction.run, KernelVariant.launch, knobs.compilation.listener
    seen: set[tuple[object, ...]] = set()
    compiled: list[str] = []

    def compile_only(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        kinds = [(x.dtype, x.data_ptr() % _ALIGNMENT) if isinstance(x, torch.Tensor) else x for x in args]
        key = (id(kernel), *kinds, *options.items())
        if any(kernel is one for one in _LAUNCHED_AHEAD):
            run(kernel, *args, grid=grid, warmup=warmup, **options)
        elif key not in seen:  # a layer launches what the others have launched
            seen.add(key)
            run(kernel, *args, grid=grid, warmup=True, **options)

    def compile_variant(variant: KernelVariant, grid: Grid, tensors: Tensors, scalars: tuple[float, ...] = ()) -> None:
        variant._kernel[grid](*tensors, *scalars, **variant.constants, **variant._options)

    def count(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled.append(src.name)

    try:
        JITFunction.run, KernelVariant.launch = compile_only, compile_variant  # type: ignore[method-assign, assignment]
        knobs.compilation.listener = count
        with ThreadPoolExecutor(num_threads) as pool, AsyncCompileMode(pool, ignore_errors=True), _Zeroed():  # type: ignore[no-untyped-call]
            walk()
    finally:
        JITFunction.run, KernelVariant.launch = run, launch  # type: ignore[method-assign]
        knobs.compilation.listener = listener
    return len(compiled)


def _bind(compiled: Any, num_constants: int) -> _Bound | None:
    """How to launch ``compiled`` directly. None if this file does not know this version of Triton or the kernel's
    format; then Triton launches it."""
    try:
        from triton.backends.nvidia import driver

        if not triton.__version__.startswith(_KNOWN_VERSION) or driver._BASE_ARGS_FORMAT != _KNOWN_FORMAT:
            return None
        launcher, metadata = compiled.run, compiled.packed_metadata
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        options = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
        return _Bound(launcher.launch, (*options, None, None, metadata, None, None, None), (None,) * num_constants)
    except (ImportError, AttributeError):
        return None
