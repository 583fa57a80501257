"""Few rows times a large weight at memory bandwidth (include/fenceline/skinny_gemm.h): bfloat16 in and out, float32
sums. The weight's numbers are bfloat16, E4M3 or whole numbers of four bits."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from fenceline_kernel.library import KernelLibrary, load

MAX_ROWS = 16


class SkinnyGemmRequestC(ctypes.Structure):
    """fenceline::SkinnyGemmRequest."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("norm_weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("num_out", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("gated", ctypes.c_int32),
        ("tiles", ctypes.c_int32),
        ("warps_n", ctypes.c_int32),
        ("warps_k", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("cluster", ctypes.c_int32),
        ("num_ctas", ctypes.c_int32),
        ("prefetch_bytes", ctypes.c_int32),
        ("pdl", ctypes.c_int32),
        ("direct", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How the product is divided over the GPU; every choice gives the same sums except for their order.

    A CTA of ``warps_n * warps_k`` warps takes ``warps_n * tiles * 8`` rows of the weight at a time; its ``warps_k``
    warps, and ``cluster`` CTAs, share K. ``tiles`` is 2 or 4; 6 is also possible for bfloat16, and for up to 8 rows of
    x unless int4 has groups of less than 128; 3 for up to 8 rows of bfloat16. ``depth`` stages of 128 bytes of each row
    are in flight for each warp. ``num_ctas``: upper bound of the grid (0: none). ``prefetch_bytes`` of each row of a
    CTA's first block are prefetched into L2 before the preceding kernel has ended. ``pdl``: start before it has ended.

    ``direct``: weights go from memory into registers, and x into shared memory; for E4M3 with a scale for each row, K a
    multiple of 64, and four bits in groups of 128, up to 8 rows of x, ``tiles`` 2, up to 12 warps, ``depth`` 2 or 4, no
    cluster, ``num_ctas`` 0, ``prefetch_bytes`` of each row's part for each warp.
    """

    tiles: int = 4
    warps_n: int = 1
    warps_k: int = 8
    depth: int = 3
    cluster: int = 1
    num_ctas: int = 0
    prefetch_bytes: int = 0
    pdl: bool = True
    direct: bool = False


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """What the bytes of a quantised weight [N, K] mean: E4M3 numbers, or with ``zeros`` whole numbers of four bits,
    [N, K / 2] bytes. Eight of these are a little-endian word, in which number 2 j begins at bit 4 j and number 2 j + 1
    at bit 16 + 4 j.

    ``scales`` float32 and ``zeros`` uint8, [N, K / group], whose columns are contiguous in memory: each number of the
    weight, minus its zero, is multiplied by its scale. ``group``: 0 (a whole row, for E4M3) or 128, for four bits
    also 64 or 32.
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int


_UNITS = {16: "skinny_gemm", 8: "skinny_fp8", 4: "skinny_int4"}


class SkinnyGemm:
    """The kernel on one GPU, for weights whose numbers have ``bits`` bits: 16, 8 or 4."""

    def __init__(self, library: KernelLibrary | None = None, bits: int = 16) -> None:
        """``library``: from ``load``; None: the current GPU's, compiled on first use. Raises KernelUnavailable."""
        unit = _UNITS[bits]
        function = (library or load()).function(unit, f"fenceline_{unit}")
        function.argtypes = (ctypes.POINTER(SkinnyGemmRequestC), ctypes.c_void_p)
        self._function = function
        self._bits = bits

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        config: SkinnyConfig,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
        numbers: StoredNumbers | None = None,
    ) -> None:
        """``out`` [T, N] = x [T, K] times weight [N, K], 1 ≤ T ≤ 16, K a multiple of 8, on torch's current stream.

        ``norm_weight`` [K] with ``eps``: rms_norm(x) comes first. ``bias`` [N]. ``residual`` [T, N] is added; it may
        be ``out``. ``gated``: weight [2 N, K], gates first, bias [2 N], and ``out`` is silu(gate) * up. All tensors are
        bfloat16, contiguous, on the current GPU; operands start at multiples of 16 bytes. The bytes of a quantised
        weight are those of ``numbers``: then K is a multiple of 16 for E4M3, of the group for four bits, and of these
        N a multiple of 8. With ``config.pdl``, the weight, ``numbers``, norm_weight and bias must not have been written
        by the preceding launch. Raises RuntimeError if the configuration does not fit the GPU or the launch fails.
        """
        rows, k = x.shape
        num_out = out.shape[1]
        weight_rows = num_out * (2 if gated else 1)
        assert weight.shape == (weight_rows, k * self._bits // (8 * weight.itemsize)) and out.shape[0] == rows
        for tensor in (x, out, norm_weight, bias, residual):
            assert tensor is None or (tensor.dtype == torch.bfloat16 and tensor.is_contiguous())
        assert weight.is_contiguous() and (numbers is None) == (weight.dtype == torch.bfloat16)
        if numbers is not None:
            groups = -(-k // numbers.group) if numbers.group else 1
            for tensor in (numbers.scales, numbers.zeros):
                assert tensor is None or (tensor.shape == (weight_rows, groups) and tensor.t().is_contiguous())
        request = SkinnyGemmRequestC(
            x.data_ptr(),
            weight.data_ptr(),
            None if norm_weight is None else norm_weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            None if numbers is None else numbers.scales.data_ptr(),
            None if numbers is None or numbers.zeros is None else numbers.zeros.data_ptr(),
            rows,
            num_out,
            k,
            eps,
            gated,
            config.tiles,
            config.warps_n,
            config.warps_k,
            config.depth,
            config.cluster,
            config.num_ctas,
            config.prefetch_bytes,
            config.pdl,
            config.direct,
            self._bits,
            0 if numbers is None else numbers.group,
        )
        stream = torch.cuda.current_stream().cuda_stream
        error = self._function(ctypes.byref(request), stream)
        if error is not None:
            raise RuntimeError(f"skinny_gemm {rows}x{num_out}x{k} {config}: {error.decode()}")
