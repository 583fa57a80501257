"""cuBLASLt's products with an algorithm of the caller's choice: torch always takes the first that cuBLAS proposes.

The C interface is documented in NVIDIA's cuBLAS manual, "Using the cuBLASLt API"; constants are cublasLt.h's and
library_types.h's. The library is the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p

import torch

_COMPUTE_32F, _REAL_32F = 68, 0
_DATA_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_DESC_TRANSA = 3
_PREFERENCE_MAX_WORKSPACE_BYTES = 1
_TRANSPOSED = 1
_WORKSPACE_BYTES = 32 << 20


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque."""

    _fields_ = (("data", c_uint64 * 8),)


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("num_waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasLt:
    """x [T, K] times weight [N, K] transposed → [T, N], bfloat16 or float16 with float32 sums, on one GPU.

    Owns a workspace that all products share: they must run on one stream, or on streams that take turns.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises OSError where the library cannot be loaded, RuntimeError where it fails."""
        major = (torch.version.cuda or "").partition(".")[0]
        self._library = ctypes.CDLL(f"libcublasLt.so.{major}")
        self._library.cublasLtMatmul.argtypes = (
            *(c_void_p, c_void_p, POINTER(c_float), c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_float)),
            *(c_void_p, c_void_p, c_void_p, c_void_p, POINTER(Algorithm), c_void_p, c_size_t, c_void_p),
        )
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._handle, self._product, self._preference = c_void_p(), c_void_p(), c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._call("cublasLtMatmulDescCreate", byref(self._product), _COMPUTE_32F, _REAL_32F)
        transposed, workspace = c_int(_TRANSPOSED), c_size_t(_WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulDescSetAttribute", self._product, _DESC_TRANSA, byref(transposed), c_size_t(4)
        )
        self._call("cublasLtMatmulPreferenceCreate", byref(self._preference))
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            *(self._preference, _PREFERENCE_MAX_WORKSPACE_BYTES, byref(workspace), c_size_t(8)),
        )
        # By type, features and rows. As many as there are lengths of steps, a hundred bytes each: none is ever dropped.
        self._layouts: dict[tuple[torch.dtype, int, int], c_void_p] = {}

    def proposals(self, rows: int, weight: torch.Tensor, most: int) -> list[Algorithm]:
        """What cuBLAS would try for so many rows, what it thinks best first; torch takes the first."""
        found, number = (_Proposal * most)(), c_int()
        layouts = self._layouts_of(rows, weight)
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(
                self._handle,
                self._product,
                *layouts,
                layouts[-1],
                self._preference,
                most,
                found,
                byref(number),
            ),
        )
        return [Algorithm.from_buffer_copy(one.algorithm) for one in found[: number.value] if one.state == 0]

    def accepts(self, rows: int, weight: torch.Tensor, algorithm: Algorithm) -> bool:
        """Whether ``algorithm``, proposed for some number of rows, can multiply this number."""
        needs = _Proposal()
        layouts = self._layouts_of(rows, weight)
        status: int = self._library.cublasLtMatmulAlgoCheck(
            self._handle, self._product, *layouts, layouts[-1], byref(algorithm), byref(needs)
        )
        return status == 0 and needs.workspace_bytes <= _WORKSPACE_BYTES

    def linear(self, x: torch.Tensor, weight: torch.Tensor, algorithm: Algorithm, out: torch.Tensor) -> None:
        """``out`` [T, N] = x [T, K] times weight [N, K] transposed, on torch's current stream; all contiguous. Does not
        wait. Raises RuntimeError where ``algorithm`` does not do it."""
        assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
        assert x.dtype == weight.dtype == out.dtype
        assert x.shape[1] == weight.shape[1] and out.shape == (x.shape[0], weight.shape[0])
        # To cuBLAS, which counts in columns, the weight is [K, N] and is transposed, x is [K, T] and out [N, T].
        a, b, d = self._layouts_of(x.shape[0], weight)
        result = out.data_ptr()
        self._call(
            "cublasLtMatmul",
            *(self._handle, self._product, self._one, weight.data_ptr(), a, x.data_ptr(), b, self._zero),
            *(result, d, result, d, algorithm, self._workspace.data_ptr(), _WORKSPACE_BYTES),
            torch.cuda.current_stream().cuda_stream,
        )

    def _layouts_of(self, rows: int, weight: torch.Tensor) -> tuple[c_void_p, c_void_p, c_void_p]:
        """Of weight, input and output."""
        n, k = weight.shape
        return (
            self._layout(weight.dtype, k, n),
            self._layout(weight.dtype, k, rows),
            self._layout(weight.dtype, n, rows),
        )

    def _layout(self, dtype: torch.dtype, features: int, rows: int) -> c_void_p:
        key = (dtype, features, rows)
        layout = self._layouts.get(key)
        if layout is None:
            layout = c_void_p()
            sizes = (c_uint64(features), c_uint64(rows), c_int64(features))
            self._call("cublasLtMatrixLayoutCreate", byref(layout), _DATA_TYPES[dtype], *sizes)
            self._layouts[key] = layout
        return layout

    def _call(self, name: str, *args: object) -> None:
        status: int = getattr(self._library, name)(*args)
        if status != 0:
            raise RuntimeError(f"{name} fails with status {status}")
