"""Quantised weights on an NVIDIA GPU, with a choice of kernels for their products. Those of few rows use our kernels in
CUDA C++ or in Triton; in Triton's product of several rows with a weight in FP8, the input is rounded to FP8 too. Those
of up to 512 rows with a weight in int4 use Triton on Hopper. Those of many rows use the FP8 product of torch where
there is one, otherwise cuBLAS with the dequantised matrix."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fenceline.config.quantization import FP8_BLOCK, INT4_GROUPS, QuantConfig
from fenceline.layers.cuda_layers import find_skinny_gemm, gated_fusion, gpu_traits, is_right, probe_cut, skinny_cut
from fenceline.layers.kernels.base import SILU, LayerKernels
from fenceline.layers.kernels.triton.int4_gemm import MAX_INT4_ROWS, Int4Config, int4_linear
from fenceline.layers.kernels.triton.quantized_gemm import dequantize, quantize_rows, quantized_linear
from fenceline.layers.kernels.triton.skinny_gemm import (
    MAX_ROWS,
    PLAIN,
    Fusion,
    SplitWorkspace,
    TritonConfig,
    fixed_linear,
    fixed_scaled_linear,
    may_fuse_norm,
    scaled_linear,
)
from fenceline.layers.quantized import FP8, Fp8Format, QuantizedFormat, QuantizedWeight, make_format, round_to_fp8
from fenceline.layers.skinny_table import (
    MAX_CUDA_ROWS,
    MAX_DIRECT_ROWS,
    SHARED_BYTES,
    CudaConfig,
    SkinnyChoice,
    SkinnyTable,
    load_table,
    shared_bytes,
)
from fenceline.layers.weight import RMSNorm, fill_slots

logger = logging.getLogger(__name__)

# Without a measurement the CUDA product is used up to this many rows. For int4 this may take two launches, which still
# pays where Triton's product cannot be used, because the plain matrix has four times as many bytes.
_GUESSED_CUDA_ROWS = {"fp8": 4, "int4": 32}
_BITS = {"fp8": 8, "int4": 4}  # of the formats that fenceline_kernel multiplies
# Of Triton's product in int4, as in the table of measurements: a tile of more warps and rows than any guess has.
_LARGE_TILE: Mapping[str, Any] = {"block_n": 128, "num_warps": 8, "num_stages": 3}
_LARGE_GPU = 132  # multiprocessors, for which K is split in a fixed order
_MULTIPLE = 16  # both sides of a matrix must be multiples of this for _scaled_mm
_ROW_MULTIPLE = 4  # with scales for blocks, the number of rows must be a multiple of this
_TOLERANCE = 0.02  # of the probe, relative to the product's size; a wrong layout of scales is off by tens of percent

# FP8 numbers [T, K] and scales [T, groups] of the input, FP8 numbers [N, K] and scales [N, groups] of the weight, the
# result's dtype → [T, N]
ScaledProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
# Arguments: x (at most 16 rows), weight, configuration, fusion, output
CudaQuantizedProduct = Callable[[torch.Tensor, QuantizedFormat, CudaConfig, Fusion, torch.Tensor], None]


class QuantizedProducts:
    """Chooses the kernel for a product by its number of rows and the weight's format. A captured graph keeps the choice
    for its size."""

    def __init__(
        self,
        num_sms: int,
        capability: tuple[int, int],
        row_scaled: ScaledProduct | None,
        block_scaled: ScaledProduct | None,
        cuda_product: CudaQuantizedProduct | None = None,
        table: SkinnyTable | None = None,
        multiplies_fp8: bool = True,
        int4: SplitWorkspace | None = None,
    ) -> None:
        """``row_scaled``, ``block_scaled``: torch's FP8 products for weights with a scale for each row or for each
        block of 128 x 128; ``cuda_product``: that of fenceline_kernel. None: there is none for this GPU. ``table``: the
        measurements, if there are any. ``multiplies_fp8``: whether Triton's product of several rows may be used.
        ``int4``: the memory of Triton's product with a weight in int4; None: it may not be used."""
        self._num_sms = num_sms
        self._pdl = capability >= (9, 0)
        self._converts_fp8 = capability >= (8, 9)  # Triton needs the GPU's instruction for this conversion
        self._multiplies_fp8 = self._converts_fp8 and multiplies_fp8
        self._is_hopper = capability[0] == 9
        # Whether a block has enough shared memory for six stages of 128 rows, which take 144 KiB. Other GPUs that
        # convert FP8 have 99 KiB.
        self._has_large_blocks = capability[0] in (9, 10)
        self._row_scaled, self._block_scaled = row_scaled, block_scaled
        self._cuda_product = cuda_product
        self._table = table
        self._int4 = int4

    def few_rows(
        self, x: torch.Tensor, stored: QuantizedFormat, fusion: Fusion = PLAIN, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The product, in ``out``, the residual or a new tensor; None if ``many_rows`` should compute it."""
        if not len(x) or (fusion.norm_weight is not None and not may_fuse_norm(x, fusion.norm_weight)):
            return None
        choice = self._choose(x, stored, fusion.gated, fusion.norm_weight is not None)
        if choice is None:
            return None
        if isinstance(choice, Int4Config):
            assert self._int4 is not None and stored.zeros is not None
            return int4_linear(
                x, stored.data, stored.scales, stored.zeros, stored.group, choice, self._int4, fusion, out
            )
        if isinstance(choice, TritonConfig):
            if len(x) > 1:
                return self._scaled_product(x, stored, choice, fusion, out)
            return quantized_linear(x, stored.data, stored.scales, stored.zeros, stored.group, choice, fusion, out)
        if out is None:
            out = fusion.residual
        if out is None:
            out = x.new_empty(len(x), stored.shape[0] // (2 if fusion.gated else 1))
        assert self._cuda_product is not None
        for start in range(0, len(x), MAX_CUDA_ROWS):
            rows = slice(start, start + MAX_CUDA_ROWS)
            part = fusion
            if fusion.residual is not None:
                part = replace(fusion, residual=fusion.residual[rows])
            self._cuda_product(x[rows], stored, choice, part, out[rows])
        return out

    def _choose(self, x: torch.Tensor, stored: QuantizedFormat, gated: bool, normed: bool = False) -> SkinnyChoice:
        """The configuration of one of our kernels; None: ``many_rows`` computes the product."""
        (n, k), rows = stored.shape, len(x)
        guess: SkinnyChoice = None
        has_cuda = self._cuda_product is not None and cuda_takes(x, stored)
        has_int4 = self._int4 is not None and rows > 1 and int4_takes(x, stored)
        if has_cuda and rows <= (MAX_DIRECT_ROWS if has_int4 else _GUESSED_CUDA_ROWS[stored.kind]):
            guess = guess_cuda(min(rows, MAX_CUDA_ROWS), stored, self._num_sms, self._pdl)
        elif has_int4 and rows <= MAX_INT4_ROWS:
            guess = guess_int4(rows, stored, self._num_sms, self._pdl, normed)
        elif rows == 1 or (rows <= MAX_ROWS and stored.kind == "fp8"):
            guess = self._guess_triton(rows, stored, gated)
        if self._table is None:
            return guess
        found = self._table.choose_quantized(rows, n, k, gated, numbers_name(stored), guess)
        if isinstance(found, Int4Config):
            possible = has_int4
        elif isinstance(found, TritonConfig):
            possible = self._multiplies_fp8 or rows == 1
        else:
            possible = has_cuda
        return found if found is None or possible else guess

    def _guess_triton(self, rows: int, stored: QuantizedFormat, gated: bool) -> TritonConfig | None:
        if stored.kind == "fp8" and not (self._converts_fp8 if rows == 1 else self._multiplies_fp8):
            return None
        if rows > 1 and not self._is_hopper and self._library_product(stored) is not None:
            return None  # our product has been measured on Hopper only
        num_out = stored.shape[0] // (2 if gated else 1)
        if rows == 1:
            block_n = next((n for n in (8, 4, 2) if num_out >= 2 * n * self._num_sms), 1)
            return TritonConfig(block_n, block_k=512, num_warps=4, launch_pdl=self._pdl)
        num_stages = (4 if gated else 6) if self._has_large_blocks else 2
        return TritonConfig(64, block_k=128, num_warps=4, num_stages=num_stages, launch_pdl=self._pdl)

    def _scaled_product(
        self, x: torch.Tensor, stored: QuantizedFormat, config: TritonConfig, fusion: Fusion, out: torch.Tensor | None
    ) -> torch.Tensor:
        """The product with the input rounded to FP8."""
        assert isinstance(stored, Fp8Format)
        numbers, x_scales = quantize_rows(
            x, stored.group, stored.input_scale, fusion.norm_weight, fusion.eps, self._pdl
        )
        if out is None and fusion.residual is None:
            out = x.new_empty(len(x), stored.shape[0] // (2 if fusion.gated else 1))
        rest = replace(fusion, norm_weight=None)
        return scaled_linear(numbers, x_scales, stored.data, stored.scales, stored.group, config, rest, out)

    def _library_product(self, stored: QuantizedFormat) -> ScaledProduct | None:
        """Torch's FP8 product for such a weight, if there is one."""
        if not isinstance(stored, Fp8Format) or any(size % _MULTIPLE for size in stored.shape):
            return None
        if stored.scales.shape[1] == 1:
            return self._row_scaled
        return self._block_scaled if stored.has_whole_blocks else None

    def many_rows(self, x: torch.Tensor, stored: QuantizedFormat) -> torch.Tensor:
        """The product, a new tensor [T, N]."""
        scaled = self._library_product(stored) if len(x) else None
        if scaled is not None:
            assert isinstance(stored, Fp8Format)
            numbers, scales = quantize_rows(x, stored.group, stored.input_scale)
            return scaled(numbers, scales, stored.data, stored.scales, x.dtype)
        return F.linear(x, self._plain(stored, x.dtype))

    def _plain(self, stored: QuantizedFormat, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in ``dtype``."""
        if stored.kind == "fp8" and not self._converts_fp8:
            return stored.dequantized(dtype)
        return dequantize(stored.data, stored.scales, stored.zeros, stored.group, stored.shape[1], dtype)


class FixedQuantizedProducts(QuantizedProducts):
    """Products of any number of rows whose sums have a fixed order, see ``fixed_linear``: in FP8 and in int4 on the
    stored numbers where the GPU can do that, otherwise with the matrix made plain."""

    def __init__(self, capability: tuple[int, int], workspace: SplitWorkspace, fp8: bool, int4: bool) -> None:
        """``fp8``, ``int4``: whether these products on stored numbers may be used."""
        super().__init__(1, capability, None, None, multiplies_fp8=fp8, int4=workspace if int4 else None)
        self._workspace = workspace

    def few_rows(
        self, x: torch.Tensor, stored: QuantizedFormat, fusion: Fusion = PLAIN, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ``QuantizedProducts``; all rows are few."""
        x = x.contiguous()
        if isinstance(stored, Fp8Format) and self._multiplies_fp8:
            norm = fusion.norm_weight, fusion.eps
            numbers, x_scales = quantize_rows(x, stored.group, stored.input_scale, *norm, self._pdl)
            fusion = replace(fusion, norm_weight=None)
            matrix = stored.data, stored.scales, stored.group
            return fixed_scaled_linear(numbers, x_scales, *matrix, self._workspace, x.dtype, fusion, out, self._pdl)
        if self._int4 is not None and len(x) and int4_takes(x, stored):
            assert stored.zeros is not None
            split = guess_int4(1, stored, _LARGE_GPU, self._pdl).split
            config = replace(guess_int4(len(x), stored, 1, self._pdl), split=split, looped=len(x) > MAX_ROWS)
            return int4_linear(
                x, stored.data, stored.scales, stored.zeros, stored.group, config, self._workspace, fusion, out
            )
        return fixed_linear(x, self._plain(stored, x.dtype), self._workspace, fusion, out, self._pdl)


class CudaQuantizedWeight(QuantizedWeight):
    """A quantised weight whose products are chosen by ``QuantizedProducts``."""

    def __init__(self, stored: QuantizedFormat, products: QuantizedProducts) -> None:
        super().__init__(stored)
        self._products = products

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        done = self._products.few_rows(x, self.stored, Fusion(bias=bias), out)
        if done is not None:
            return done
        y = self._products.many_rows(x, self.stored)
        if bias is not None:
            y += bias
        return y if out is None else out.copy_(y)

    def normed_product(
        self, x: torch.Tensor, norm: RMSNorm, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        done = self._products.few_rows(x, self.stored, Fusion(norm.weight, norm.eps, bias), out)
        return self.product(norm.forward(x), bias, out) if done is None else done

    def gated_product(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None,
        bias: torch.Tensor | None,
        kernels: LayerKernels,
        activation: str = SILU,
    ) -> torch.Tensor:
        done = None
        if activation == SILU:
            done = self._products.few_rows(x, self.stored, gated_fusion(norm, bias))
        return super().gated_product(x, norm, bias, kernels, activation) if done is None else done

    def add_product(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        done = self._products.few_rows(x, self.stored, Fusion(bias=bias, residual=residual))
        return super().add_product(residual, x, bias) if done is None else done


def row_scaled_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """torch._scaled_mm with scales for rows; it computes bfloat16. See ``ScaledProduct``."""
    y = torch._scaled_mm(x, weight.t(), scale_a=x_scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    return y.to(dtype)


def block_scaled_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """torch._scaled_mm with scales for 1 x 128 numbers of the input and 128 x 128 of the weight; all rows of the
    weight's block have the same scale. See ``ScaledProduct``."""
    padding, groups = -len(x) % _ROW_MULTIPLE, scales.shape[1]
    x, x_scales = (F.pad(x.view(torch.uint8), (0, 0, 0, padding)).view(FP8), F.pad(x_scales, (0, 0, 0, padding)))
    y = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scales.t().contiguous().t(),
        # The scales of a row of blocks must begin at a multiple of four.
        scale_b=F.pad(scales[::FP8_BLOCK], (0, -groups % 4))[:, :groups].t(),
        out_dtype=torch.bfloat16,
    )
    return y[: len(x) - padding].to(dtype)


def numbers_name(stored: QuantizedFormat) -> str:
    """How the weight's numbers are stored, in the table of measurements: ``int4/128``, ``fp8/128``, ``fp8``."""
    has_groups = stored.group < stored.shape[1]
    return f"{stored.kind}/{stored.group}" if stored.kind == "int4" or has_groups else stored.kind


def cuda_takes(x: torch.Tensor, stored: QuantizedFormat) -> bool:
    """Whether fenceline_kernel has a product of ``x`` with such a weight."""
    n, k = stored.shape
    fits = k % _MULTIPLE == 0 if stored.kind == "fp8" else n % _MULTIPLE == 0
    return fits and x.dtype == torch.bfloat16 and x.is_contiguous()


def direct_takes(stored: QuantizedFormat) -> bool:
    """Whether fenceline_kernel has a direct product with such a weight, of up to MAX_DIRECT_ROWS rows."""
    k = stored.shape[1]
    if stored.kind == "int4":
        return stored.group == 128
    return stored.scales.shape[1] == 1 and k % 64 == 0


def guess_cuda(rows: int, stored: QuantizedFormat, num_sms: int, pdl: bool) -> CudaConfig:
    """A configuration for ``rows`` rows, at most 16, that every GPU with fenceline_kernel can launch."""
    n, k = stored.shape
    bits = _BITS[stored.kind]
    tiles = 4 if n >= 32 * num_sms else 2
    most = max(1, k * bits // 2048)
    config = CudaConfig(tiles=tiles, warps_k=min(8, most), depth=4, pdl=pdl)
    while shared_bytes(config, rows, bits, stored.group) > SHARED_BYTES:
        config = replace(config, depth=3) if config.depth > 3 else replace(config, warps_k=config.warps_k // 2)
    return config


def int4_takes(x: torch.Tensor, stored: QuantizedFormat) -> bool:
    """Whether Triton has a product of ``x`` with such a weight in int4."""
    fits = stored.kind == "int4" and stored.shape[0] % _MULTIPLE == 0
    return fits and x.dtype == torch.bfloat16 and x.is_contiguous()


def guess_int4(rows: int, stored: QuantizedFormat, num_sms: int, pdl: bool, normed: bool = False) -> Int4Config:
    """A configuration for ``rows`` rows, like the fastest on an H100. ``normed``: a norm is in front."""
    n, k = stored.shape
    block_rows = next((size for size in (16, 32, 64) if rows <= size), 128)
    config = Int4Config(
        block_n=64,
        block_rows=block_rows,
        block_k=stored.group,
        num_warps=4,
        num_stages=3 if block_rows == 128 else 4,
        reorder=normed,
        launch_pdl=pdl,
    )
    tiles = -(-n // config.block_n) * -(-rows // block_rows)
    split, most = 1, (3 if block_rows <= 32 else 2) * num_sms
    while tiles * split * 2 <= most and split < 8 and k >= 1024 * split:
        split *= 2
    return replace(config, split=split)


def find_quantized_products(device: torch.device, kind: str) -> QuantizedProducts:
    """The products with weights of ``kind`` for ``device``. What torch._scaled_mm supports depends on GPU, CUDA and
    torch, so it is tried. Compiles fenceline_kernel on first use if it is installed (a minute at most, once)."""
    find = partial(_working, device)
    product = find_cuda_quantized(device, kind) if kind in _BITS else None
    if product is not None and not _agrees(device, product, kind):
        product = None
    gpu = gpu_traits(device, product is not None)
    int4 = SplitWorkspace(device) if kind == "int4" and gpu.capability[0] == 9 else None
    if int4 is not None and not _multiplies_int4(device, int4):
        int4 = None
    return QuantizedProducts(
        gpu.num_sms,
        gpu.capability,
        find(row_scaled_product, group=256) if kind == "fp8" else None,
        find(block_scaled_product, group=FP8_BLOCK) if kind == "fp8" else None,
        product,
        load_table(gpu),
        kind == "fp8" and gpu.capability >= (8, 9) and _multiplies_fp8(device, gpu.capability),
        int4,
    )


def find_fixed_products(device: torch.device, kind: str, workspace: SplitWorkspace) -> FixedQuantizedProducts:
    """The products in a fixed order with weights of ``kind`` for ``device``. They are tried."""
    capability = torch.cuda.get_device_capability(device)
    fp8 = kind == "fp8" and capability >= (8, 9) and _multiplies_fp8(device, capability)
    int4 = kind == "int4" and capability[0] == 9 and _multiplies_int4(device, workspace)
    return FixedQuantizedProducts(capability, workspace, fp8, int4)


def _multiplies_int4(device: torch.device, workspace: SplitWorkspace) -> bool:
    """Whether Triton's product with a weight in int4 runs on ``device`` and is right: gated and behind a norm, which
    puts x into another order, with K split and added to a residual, and with large tiles. If not, this is logged."""
    draw = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    trials: tuple[tuple[int, int, int, int, bool, Mapping[str, Any]], ...] = (
        (128, 256, 1024, 32, True, {}),
        (64, 192, 2048, 130, False, {}),
        (128, 256, 1024, 130, True, _LARGE_TILE),
    )
    for group, n, k, rows, gated, changed in trials:
        with device:
            stored = make_format(QuantConfig(method="on-line", kind="int4", group_size=group), n, k, torch.bfloat16)
        assert stored.zeros is not None
        matrix = draw(n, k) / k**0.5 * torch.arange(1, n + 1, device=device)[:, None]
        fill_slots(stored.slots("probe", slice(None), (n, k), 0, 0), [("probe.weight", matrix.bfloat16())])
        x, norm, residual = draw(rows, k).bfloat16(), (1 + 0.1 * draw(k)).bfloat16(), draw(rows, n).bfloat16()
        fusion = Fusion(norm, 1e-6, gated=True) if gated else Fusion(residual=residual.clone())
        wide = F.rms_norm(x.float(), (k,), norm.float(), 1e-6) if gated else x.float()
        want = F.linear(wide, stored.dequantized(torch.float32))
        if gated:
            gate, up = want.chunk(2, -1)
            want = F.silu(gate) * up
        else:
            want += residual
        config = replace(guess_int4(rows, stored, 132, pdl=True, normed=gated), **changed)
        try:
            got = int4_linear(x, stored.data, stored.scales, stored.zeros, group, config, workspace, fusion, None)
        except Exception as error:  # Triton's compiler raises what it likes
            logger.warning("Triton's product in int4 cannot be used here: %s", str(error).splitlines()[0])
            return False
        error_size = ((got.float() - want).norm() / want.norm()).item()
        if not error_size < _TOLERANCE:
            logger.warning("Triton's product in int4 is wrong here by %.3f of the result; it is not used", error_size)
            return False
    return True


def _multiplies_fp8(device: torch.device, capability: tuple[int, int]) -> bool:
    """Whether Triton's product of several rows in FP8 runs on ``device`` and is right, with scales for rows, gated and
    behind a norm, and with scales for blocks, added to a residual. If not, this is logged."""
    draw = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    products = QuantizedProducts(1, capability, None, None)
    for scales, n, k, rows in (("channel", 256, 512, 32), ("block", 192, 384, 5)):
        with device:
            stored = make_format(QuantConfig(method="on-line", kind="fp8", scales=scales), n, k, torch.bfloat16)
        assert isinstance(stored, Fp8Format)
        matrix = draw(n, k) / k**0.5 * torch.arange(1, n + 1, device=device)[:, None]
        fill_slots(stored.slots("probe", slice(None), (n, k), 0, 0), [("probe.weight", matrix.bfloat16())])
        x, norm = draw(rows, k).bfloat16(), (1 + 0.1 * draw(k)).bfloat16()
        gated = scales == "channel"
        wide = F.rms_norm(x.float(), (k,), norm.float(), 1e-6) if gated else x.float()
        numbers, factors = round_to_fp8(wide, stored.group)
        rounded = numbers.float() * factors.repeat_interleave(stored.group, 1)[:, :k]
        want = F.linear(rounded, stored.dequantized(torch.float32))
        residual = draw(rows, n).bfloat16()
        fusion = Fusion(residual=residual.clone())
        if gated:
            gate, up = want.chunk(2, -1)
            want, fusion = F.silu(gate) * up, Fusion(norm, 1e-6, gated=True)
        else:
            want += residual
        config = products._guess_triton(rows, stored, gated)
        assert config is not None
        try:
            got = products._scaled_product(x, stored, config, fusion, None)
        except Exception as error:  # Triton's compiler raises what it likes
            logger.warning("the product of several rows in FP8 cannot be used here: %s", str(error).splitlines()[0])
            return False
        error_size = ((got.float() - want).norm() / want.norm()).item()
        if not error_size < _TOLERANCE:
            logger.warning(
                "the product of several rows in FP8 is wrong here by %.3f of the result; it is not used", error_size
            )
            return False
    return True


def find_cuda_quantized(device: torch.device, kind: str) -> CudaQuantizedProduct | None:
    """fenceline_kernel's skinny GEMM for weights of ``kind``; None if it cannot be used."""
    gemm = find_skinny_gemm(device, _BITS[kind])
    if gemm is None:
        return None
    from fenceline_kernel.skinny import StoredNumbers

    def product(
        x: torch.Tensor, stored: QuantizedFormat, config: CudaConfig, fusion: Fusion, out: torch.Tensor
    ) -> None:
        group = stored.group if stored.zeros is not None or stored.scales.shape[1] > 1 else 0
        gemm(
            x, stored.data, out, skinny_cut(config),
            norm_weight=fusion.norm_weight, eps=fusion.eps, bias=fusion.bias, residual=fusion.residual,
            gated=fusion.gated, numbers=StoredNumbers(stored.scales, stored.zeros, group),
        )  # fmt: skip

    return product


def _agrees(device: torch.device, product: CudaQuantizedProduct, kind: str) -> bool:
    """Whether ``product`` runs on ``device`` and its results are right for every format of ``kind``, for different
    numbers of rows and with each of its fusions. If not, this is logged."""
    formats = [QuantConfig(method="on-line", kind="int4", group_size=size) for size in INT4_GROUPS]
    if kind == "fp8":
        formats = [QuantConfig(method="on-line", kind="fp8", scales=scales) for scales in ("channel", "block")]
    n, k = 96, 512
    draw = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    for config in formats:
        with device:
            stored = make_format(config, n, k, torch.bfloat16)
        matrix = draw(n, k) / k**0.5 * torch.arange(1, n + 1, device=device)[:, None]
        fill_slots(stored.slots("probe", slice(None), (n, k), 0, 0), [("probe.weight", matrix.bfloat16())])
        trial = partial(_multiply, product, stored)
        cuts = [
            (rows, probe_cut(tiles))
            for rows, tiles in itertools.product((1, 2, 8, 16), (2, 4, 6))
            if tiles < 6 or (rows <= 8 and stored.group >= FP8_BLOCK)
        ]
        if direct_takes(stored):
            cuts += [(rows, probe_cut(2, direct=True)) for rows in (1, MAX_DIRECT_ROWS)]
        if not is_right(f"product of {numbers_name(stored)}", trial, stored.dequantized(torch.float32), cuts):
            return False
    return True


def _multiply(
    product: CudaQuantizedProduct,
    stored: QuantizedFormat,
    x: torch.Tensor,
    cut: CudaConfig,
    fusion: Fusion,
    out: torch.Tensor,
) -> None:
    product(x, stored, cut, fusion, out)


def _working(device: torch.device, product: ScaledProduct, group: int) -> ScaledProduct | None:
    """``product`` if it runs on ``device`` and its result is right, otherwise None."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(20, 256, device=device, generator=generator)
    weight = torch.randn(256, 256, device=device, generator=generator)
    weight *= torch.arange(1, 257, device=device)[:, None]  # rows differ, so that scales in the wrong order are noticed
    numbers, scales = round_to_fp8(weight, group)
    if group < 256:
        scales = scales.view(-1, FP8_BLOCK, scales.shape[1]).amax(1).repeat_interleave(FP8_BLOCK, 0)
        numbers = (weight / scales.repeat_interleave(group, 1)).to(FP8)
    inputs, input_scales = round_to_fp8(x, group)
    expected = (inputs.float() * input_scales.repeat_interleave(group, 1)) @ (
        numbers.float() * scales.repeat_interleave(group, 1)
    ).t()
    try:
        y = product(inputs.contiguous(), input_scales, numbers.contiguous(), scales, torch.bfloat16)
    except (RuntimeError, ValueError, AttributeError) as error:
        # Which products a GPU has is no news: another one is used.
        logger.debug("%s cannot be used here: %s", product.__name__, str(error).splitlines()[0])
        return None
    error_size = ((y.float() - expected).norm() / expected.norm()).item()
    if not error_size < _TOLERANCE:
        logger.warning("%s is wrong here by %.3f of the result; it is not used", product.__name__, error_size)
        return None
    return product
