"""The compiled libraries, built ahead or compiled on first use, and their C ABI in ctypes.

The structures mirror include/fenceline/abi.h.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from pathlib import Path

import torch

from fenceline_kernel.cache import PREBUILT, cache_folder, compiled_library, find_sources, prebuilt_library
from fenceline_kernel.errors import KernelUnavailable
from fenceline_kernel.toolchain import arch_of, check_driver, driver_version, find_nvcc

# fenceline::FillField: src, dst, pad; src_rows, src_row_bytes, src_row_stride, size, row_bytes, unit_bytes.
FILL_FIELD = struct.Struct("=3Q6I")


class KernelLibrary:
    """The kernels for GPUs of one capability, for tensors of one device type (``cpu`` in this package's own tests)."""

    def __init__(self, find: Callable[[str], Path], device_type: str = "cuda") -> None:
        """``find`` returns the shared library of a unit (a .cu file's name), compiling it if necessary. The fill is
        loaded now, other units when their functions are first used. Raises KernelUnavailable."""
        self._find = find
        self.device_type = device_type
        self._fill = self.function("arena_fill", "fenceline_arena_fill")
        self._fill.argtypes = (
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p,
        )  # fmt: skip

    def function(self, unit: str, name: str) -> ctypes._NamedFuncPointer:
        """A function of library ``unit`` that returns null or a text; the caller sets its argtypes.

        Raises KernelUnavailable if the unit does not compile or cannot be loaded."""
        path = self._find(unit)
        try:
            function: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(str(path)), name)
        except (OSError, AttributeError) as error:
            raise KernelUnavailable(f"{path} cannot be loaded ({error}): delete it and try again") from error
        function.restype = ctypes.c_char_p
        return function

    def arena_fill(
        self,
        fields: bytes,
        num_fields: int,
        num_live: int,
        num_live_ptr: int | None,
        device: torch.device,
        stream: int | None,
    ) -> None:
        """fenceline_arena_fill of packed FILL_FIELDs on ``stream`` (None: torch's current one).

        Raises RuntimeError if the launch fails."""
        call = functools.partial(self._fill, fields, num_fields, num_live, num_live_ptr)
        self.call("arena_fill", call, device, stream)

    def copy_words(self, dst: int, src: int, num_words: int, device: torch.device, stream: int | None) -> None:
        """``num_words`` times 8 bytes from address ``src`` to ``dst``, each on the GPU or in pinned host memory, on
        ``stream`` (None: torch's current one): a fill without padding. Raises RuntimeError if the launch fails."""
        rows = (num_words, 8, 8, num_words, 8, 0)  # of a word each
        self.arena_fill(FILL_FIELD.pack(src, dst, 0, *rows), 1, num_words, None, device, stream)

    def call(self, name: str, call: Callable[[int], bytes | None], device: torch.device, stream: int | None) -> None:
        """Run ``call(stream)`` with ``device`` as the current one and None replaced by torch's current stream. It
        returns null or a text. Raises RuntimeError with the text."""
        if self.device_type != "cuda":
            error = call(0)
        elif torch.cuda.current_device() == device.index:
            error = call(torch.cuda.current_stream(device).cuda_stream if stream is None else stream)
        else:
            with torch.cuda.device(device):  # a launch needs its stream's device to be the current one
                error = call(torch.cuda.current_stream(device).cuda_stream if stream is None else stream)
        if error is not None:
            raise RuntimeError(f"{name}: {error.decode()}")


def load(device: torch.device | int | None = None) -> KernelLibrary:
    """The library for ``device`` (None: the current GPU), compiled on first use. Raises KernelUnavailable."""
    if not torch.cuda.is_available():
        raise KernelUnavailable("torch sees no NVIDIA GPU: check the driver, and that torch is a CUDA build")
    if torch.version.hip is not None:
        raise KernelUnavailable("torch is a ROCm build: these kernels need an NVIDIA GPU")
    found = _load(torch.cuda.get_device_capability(device))
    if isinstance(found, KernelUnavailable):
        raise KernelUnavailable(str(found))
    return found


def why_unavailable(device: torch.device | int | None = None) -> str | None:
    """Why the kernels cannot be used on ``device``, in one line with the remedy; None if they can.

    Compiles them if that is still to be done (a few seconds, once per machine)."""
    try:
        load(device)
    except KernelUnavailable as error:
        return str(error)
    return None


def available(device: torch.device | int | None = None) -> bool:
    """Whether the kernels can be used on ``device``. Never raises; see ``why_unavailable``."""
    return why_unavailable(device) is None


@functools.cache
def _load(capability: tuple[int, int]) -> KernelLibrary | KernelUnavailable:
    """The library for ``capability``, or why there is none. Failures are cached, so that not every call compiles."""
    try:
        return KernelLibrary(functools.partial(find_library, capability))
    except KernelUnavailable as error:
        return error


def find_library(capability: tuple[int, int], unit: str) -> Path:
    """The shared library of ``unit``: built ahead, else of the cache, else compiled now. Raises KernelUnavailable."""
    sources = find_sources()
    ready = prebuilt_library(sources, unit, capability, PREBUILT)
    if ready is not None:
        return ready
    nvcc = find_nvcc()
    check_driver(nvcc, driver_version())
    return compiled_library(sources, unit, nvcc, [arch_of(capability)], cache_folder())
