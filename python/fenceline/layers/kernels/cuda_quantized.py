"""Quantised weights on an NVIDIA GPU: our Triton products for few rows, the GPU's own FP8 product for many where it has
one, and cuBLAS with the plain matrix otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from fenceline.config.quantization import FP8_BLOCK
from fenceline.layers.kernels.base import SILU
from fenceline.layers.kernels.quantized_gemm import quantize_rows, quantized_linear
from fenceline.layers.kernels.skinny_gemm import PLAIN, Fusion, TritonConfig, may_fuse_norm
from fenceline.layers.quantized import (
    FP8,
    Fp8Format,
    QuantizedFormat,
    QuantizedWeight,
    round_to_fp8,
)
from fenceline.layers.weight import RMSNorm

logger = logging.getLogger(__name__)

# Up to this many rows our own products are used: those that read few bytes win while reading takes the time. A guess,
# until it is measured. There is no other product of int4 that reads few bytes.
_FEW_ROWS = {"fp8": 64, "int4": 256}
_MULTIPLE = 16  # of both sides of a matrix that _scaled_mm takes
_ROW_MULTIPLE = 4  # of rows, where scales are for blocks
_TOLERANCE = (
    0.02  # of the probe, relative to the product's size; a wrong layout of scales is off by tens of percent
)

# numbers [T, K] and scales [T, groups] of the input, numbers [N, K] and scales [N, groups] of the weight, both FP8, the
# result's type -> [T, N]
ScaledProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


class QuantizedProducts:
    """Chooses the kernel for a product by its number of rows and its format. A captured graph keeps the choice for its
    size."""

    def __init__(
        self,
        num_sms: int,
        capability: tuple[int, int],
        row_scaled: ScaledProduct | None,
        block_scaled: ScaledProduct | None,
    ) -> None:
        """``row_scaled``, ``block_scaled``: the GPU's products for weights with a scale for each row, or block of 128 x
        128; None: it has none."""
        self._num_sms = num_sms
        self._pdl = capability >= (9, 0)
        self._converts_fp8 = capability >= (8, 9)  # in one instruction, without which Triton does not compile
        # Others have 99 KiB for a block, and gate and up of 32 columns each take 120.
        self._has_large_blocks = capability == (8, 0) or capability[0] in (9, 10)
        self._row_scaled, self._block_scaled = row_scaled, block_scaled

    def few_rows(
        self,
        x: torch.Tensor,
        stored: QuantizedFormat,
        fusion: Fusion = PLAIN,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The product, in ``out``, the residual or a new tensor; None if ``many_rows`` should compute it."""
        if not 0 < len(x) <= _FEW_ROWS[stored.kind] or (stored.kind == "fp8" and not self._converts_fp8):
            return None
        if fusion.norm_weight is not None and not may_fuse_norm(x, fusion.norm_weight):
            return None
        num_out = stored.shape[0] // (2 if fusion.gated else 1)
        if len(x) == 1:
            block_n = next((n for n in (8, 4, 2) if num_out >= 2 * n * self._num_sms), 1)
            config = TritonConfig(block_n, block_k=512, num_warps=4, launch_pdl=self._pdl)
        else:
            fits = self._has_large_blocks or not fusion.gated
            block_n = 32 if fits and num_out >= 64 * self._num_sms else 16
            config = TritonConfig(block_n, block_k=128, num_warps=4, num_stages=3, launch_pdl=self._pdl)
        return quantized_linear(
            x, stored.data, stored.scales, stored.zeros, stored.group, config, fusion, out
        )

    def many_rows(self, x: torch.Tensor, stored: QuantizedFormat) -> torch.Tensor:
        """The product, a new tensor [T, N]."""
        if isinstance(stored, Fp8Format) and len(x) and not any(size % _MULTIPLE for size in stored.shape):
            scaled = self._block_scaled if stored.scales.shape[1] > 1 else self._row_scaled
            if scaled is not None and (stored.scales.shape[1] == 1 or stored.has_whole_blocks):
                numbers, scales = quantize_rows(x, stored.group, stored.input_scale)
                return scaled(numbers, scales, stored.data, stored.scales, x.dtype)
        return F.linear(x, stored.dequantized(x.dtype))


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
        self,
        x: torch.Tensor,
        norm: RMSNorm,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        done = self._products.few_rows(x, self.stored, Fusion(norm.weight, norm.eps, bias), out)
        return self.product(norm.forward(x), bias, out) if done is None else done

    def gated_product(
        self, x: torch.Tensor, norm: RMSNorm, bias: torch.Tensor | None, activation: str = SILU
    ) -> torch.Tensor:
        fusion, done = Fusion(norm.weight, norm.eps, bias, gated=True), None
        if activation == SILU:
            done = self._products.few_rows(x, self.stored, fusion)
        return super().gated_product(x, norm, bias, activation) if done is None else done

    def add_product(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        done = self._products.few_rows(x, self.stored, Fusion(bias=bias, residual=residual))
        return super().add_product(residual, x, bias) if done is None else done


def row_scaled_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """torch._scaled_mm with scales for rows, which yields bfloat16. See ``ScaledProduct``."""
    y = torch._scaled_mm(x, weight.t(), scale_a=x_scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    return y.to(dtype)


def block_scaled_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """torch._scaled_mm with scales for 1 x 128 of the input and 128 x 128 of the weight, whose rows in a block have one
    scale. See ``ScaledProduct``."""
    padding = -len(x) % _ROW_MULTIPLE
    x, x_scales = (
        F.pad(x.view(torch.uint8), (0, 0, 0, padding)).view(FP8),
        F.pad(x_scales, (0, 0, 0, padding)),
    )
    y = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scales.t().contiguous().t(),
        scale_b=scales[::FP8_BLOCK].contiguous().t(),
        out_dtype=torch.bfloat16,
    )
    return y[: len(x) - padding].to(dtype)


def find_quantized_products(device: torch.device) -> QuantizedProducts:
    """The products for ``device``. What torch._scaled_mm can do depends on GPU, CUDA and torch, so it is tried."""
    gpu = torch.cuda.get_device_properties(device)
    find = partial(_working, device)
    return QuantizedProducts(
        gpu.multi_processor_count,
        torch.cuda.get_device_capability(device),
        find(row_scaled_product, group=256),
        find(block_scaled_product, group=FP8_BLOCK),
    )


def _working(device: torch.device, product: ScaledProduct, group: int) -> ScaledProduct | None:
    """``product`` if it runs there and its result is right, else None."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(20, 256, device=device, generator=generator)
    weight = torch.randn(256, 256, device=device, generator=generator)
    weight *= torch.arange(1, 257, device=device)[:, None]  # rows differ, so that exchanged scales show
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
        logger.info("%s cannot be used here: %s", product.__name__, str(error).splitlines()[0])
        return None
    error_size = ((y.float() - expected).norm() / expected.norm()).item()
    if not error_size < _TOLERANCE:
        logger.warning("%s is wrong here by %.3f of the result; it is not used", product.__name__, error_size)
        return None
    return product
