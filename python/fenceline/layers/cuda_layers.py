"""Layers on an NVIDIA GPU: our own fused products for few rows, cuBLAS between Triton kernels for many."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton

from fenceline.layers.cuda_four_bit import four_bits_agree, product_by_parts
from fenceline.layers.kernels.base import SILU, LayerKernels, Routing
from fenceline.layers.kernels.triton.activation import silu_and_mul
from fenceline.layers.kernels.triton.by_head import MAX_ROWS, by_head
from fenceline.layers.kernels.triton.grouped_gemm import combine_experts, grouped_config, grouped_product
from fenceline.layers.kernels.triton.lightning_inputs import lightning_inputs
from fenceline.layers.kernels.triton.recurrence import (
    delta_inputs,
    gated_norm,
    mamba_inputs,
    recurrence,
    short_convolution,
)
from fenceline.layers.kernels.triton.rms_norm import rms_norm
from fenceline.layers.kernels.triton.rotate_store import rotate_and_store
from fenceline.layers.kernels.triton.routing import normed_logits, of_experts, route, router_logits
from fenceline.layers.kernels.triton.select_blocks import store_means
from fenceline.layers.kernels.triton.skinny_gemm import (
    PLAIN,
    Fusion,
    SplitWorkspace,
    TritonConfig,
    fixed_linear,
    may_fuse_norm,
    skinny_linear,
)
from fenceline.layers.kernels.triton.store_index import store_index
from fenceline.layers.kernels.triton.store_latent import store_latent
from fenceline.layers.skinny_table import ROW_BUCKETS, SHARED_BYTES, CudaConfig, GpuTraits, SkinnyTable, load_table
from fenceline.layers.weight import DenseWeight, RMSNorm

if TYPE_CHECKING:
    from fenceline_kernel.skinny import SkinnyConfig, SkinnyGemm

logger = logging.getLogger(__name__)

_TOLERANCE = 0.02  # of the trial at start, relative to the result's norm: rounding to bfloat16 makes an error of 0.004
_FEW_ROWS = ROW_BUCKETS[-1]  # the kernels for few rows never multiply more than this
_FIXED_TILE = 64  # pairs of an expert, the fewest with which Hopper's tensor core uses its own instruction

# Arguments: x, configuration, fusion, output. A product with one weight, see ``is_right``.
Trial = Callable[[torch.Tensor, CudaConfig, Fusion, torch.Tensor], object]

FixedProduct = Callable[..., torch.Tensor]  # ``fixed_linear`` with its workspace

# x, weight, configuration, fusion, output (None: a new tensor) → output
CudaProduct = Callable[[torch.Tensor, torch.Tensor, CudaConfig, Fusion, torch.Tensor | None], torch.Tensor]


# Methods of LayerKernels that are one kernel: its function has the method's parameters, and ``pdl``.
TRITON: Mapping[str, Callable[..., object]] = {
    "rms_norm": rms_norm,
    "activate": silu_and_mul,
    "rotate_and_store": rotate_and_store,
    "store_latent": store_latent,
    "store_index": store_index,
    "router_logits": router_logits,
    "normed_logits": normed_logits,
    "route": route,
    "of_experts": of_experts,
    "combine_experts": combine_experts,
    "short_convolution": short_convolution,
    "delta_inputs": delta_inputs,
    "mamba_inputs": mamba_inputs,
    "recurrence": recurrence,
    "gated_norm": gated_norm,
}


def _programmatic(kernel: Any) -> Callable[..., object]:
    """``kernel`` with another default of its last parameter, ``pdl``. A partial takes a microsecond in each launch."""
    defaults = kernel.__defaults__
    assert defaults is not None and defaults[-1] is False
    return FunctionType(
        kernel.__code__, kernel.__globals__, kernel.__name__, (*defaults[:-1], True), kernel.__closure__
    )


class CudaLayerKernels(LayerKernels):
    """Triton kernels. From sm_90 on they may start before the preceding kernel has ended. Before they wait for that
    kernel they read weights; ``rotate_and_store``, ``store_latent`` and ``store_index`` also read the table, positions
    and out_slots. So there must be another kernel between the one that writes these and the one that reads them."""

    lightning_inputs = staticmethod(lightning_inputs)  # type: ignore[assignment]  # these never start early
    store_means = staticmethod(store_means)  # type: ignore[assignment]

    def __init__(self, device: torch.device, fixed: SplitWorkspace | None = None) -> None:
        """``fixed``: that of products in a fixed order, which all sums then have; see ``LayerKernels.fixed_order``."""
        self._pdl, self._device = torch.cuda.get_device_capability(device) >= (9, 0), device
        self.fixed_order = fixed is not None
        for name, kernel in TRITON.items():
            setattr(self, name, _programmatic(kernel) if self._pdl else kernel)
        if fixed is not None:
            for name in ("rotate_and_store", "route", "router_logits", "normed_logits"):
                setattr(self, name, partial(getattr(self, name), fixed=fixed))
        # By group size and whether there are zero points: whether the grouped products of such numbers passed the
        # trial.
        self._four_bits: dict[tuple[int, bool], bool] = {}

    def by_head(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.fixed_order or len(x) <= MAX_ROWS:
            return by_head(x, weight, out, self._pdl, self.fixed_order)
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out

    def grouped_product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        routing: Routing,
        gated: bool = False,
        bias: torch.Tensor | None = None,
        limit: float = 0.0,
        scales: torch.Tensor | None = None,
        zeros: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if weight.dtype == torch.uint8:
            assert scales is not None
            if not self._four_bits[x.shape[1] // scales.shape[2], zeros is not None]:
                return product_by_parts(self.grouped_product, x, weight, routing, gated, bias, limit, scales, zeros)
        config = None
        if self.fixed_order:
            config = grouped_config(_FIXED_TILE * len(weight), len(weight), x.element_size())
        return grouped_product(
            x, weight, routing, gated, config, bias=bias, limit=limit, scales=scales, pdl=self._pdl, zeros=zeros
        )

    def prepare_four_bits(self, group: int, has_zeros: bool) -> None:
        if (group, has_zeros) not in self._four_bits:
            product = partial(grouped_product, pdl=self._pdl)
            self._four_bits[group, has_zeros] = four_bits_agree(self._device, product, group, has_zeros)


class SkinnyProducts:
    """Our own products of few rows with a dense weight, fused with the operations before and after them. The table of
    measurements says which of our kernels is used for a shape, if any. The choice depends on the number of rows, so a
    captured graph keeps the choice for its size."""

    def __init__(self, cuda_product: CudaProduct | None, table: SkinnyTable, workspace: SplitWorkspace) -> None:
        """``cuda_product`` is fenceline_kernel's. If it is None, ``table`` must not name it."""
        self._cuda_product = cuda_product
        self._table, self._workspace = table, workspace

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, fusion: Fusion = PLAIN, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The product, in ``out``, the residual or a new tensor; None if cuBLAS should compute it."""
        if x.dtype == torch.float32:
            return None
        choice = self._table.choose(x.shape[0], weight.shape[0], x.shape[1], fusion.gated)
        if isinstance(choice, CudaConfig) and x.dtype == torch.bfloat16:
            assert self._cuda_product is not None
            return self._cuda_product(x, weight, choice, fusion, out)
        if choice is None or isinstance(choice, CudaConfig):
            return None
        assert isinstance(choice, TritonConfig), choice
        return skinny_linear(x, weight, choice, fusion, out, self._workspace)


def gated_fusion(norm: RMSNorm | None, bias: torch.Tensor | None) -> Fusion:
    """What ``Weight.gated_product`` does around the product."""
    if norm is None:
        return Fusion(bias=bias, gated=True)
    return Fusion(norm.weight, norm.eps, bias, gated=True)


class CudaDenseWeight(DenseWeight):
    """A dense weight. Products of few rows are computed by our own fused kernels where these are faster."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, products: SkinnyProducts) -> None:
        super().__init__(out_features, in_features, dtype)
        self._products = products

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.shape[0] <= _FEW_ROWS and x.is_contiguous():
            done = self._products.multiply(x, self.data, PLAIN if bias is None else Fusion(bias=bias), out)
            if done is not None:
                return done
        return self._cublas(x, bias, out)

    def _cublas(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is None:
            return F.linear(x, self.data, bias)
        if bias is None:
            return torch.mm(x, self.data.t(), out=out)
        return torch.addmm(bias, x, self.data.t(), out=out)

    def normed_product(
        self, x: torch.Tensor, norm: RMSNorm, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.shape[0] <= _FEW_ROWS and may_fuse_norm(x, norm.weight):
            done = self._products.multiply(x, self.data, Fusion(norm.weight, norm.eps, bias), out)
            if done is not None:
                return done
            return self._cublas(norm.forward(x), bias, out)
        return self.product(norm.forward(x), bias, out)

    def gated_product(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None,
        bias: torch.Tensor | None,
        kernels: LayerKernels,
        activation: str = SILU,
    ) -> torch.Tensor:
        if activation != SILU:
            return super().gated_product(x, norm, bias, kernels, activation)
        few = x.shape[0] <= _FEW_ROWS and x.is_contiguous()
        if few and (norm is None or may_fuse_norm(x, norm.weight)):
            done = self._products.multiply(x, self.data, gated_fusion(norm, bias))
            if done is not None:
                return done
        return kernels.activate(F.linear(x if norm is None else norm.forward(x), self.data, bias), SILU)

    def add_product(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] <= _FEW_ROWS:
            done = self._products.multiply(x, self.data, Fusion(bias=bias, residual=residual))
            if done is not None:
                return residual
        if bias is None:
            return residual.addmm_(x, self.data.t())
        return residual.add_(F.linear(x, self.data, bias))


class FixedDenseWeight(DenseWeight):
    """A dense weight whose products have sums in a fixed order, see ``fixed_linear``."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, multiply: FixedProduct) -> None:
        super().__init__(out_features, in_features, dtype)
        self._multiply = multiply

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._multiply(x.contiguous(), self.data, fusion=Fusion(bias=bias), out=out)

    def gated_product(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None,
        bias: torch.Tensor | None,
        kernels: LayerKernels,
        activation: str = SILU,
    ) -> torch.Tensor:
        if activation != SILU:
            return super().gated_product(x, norm, bias, kernels, activation)
        return self._multiply(x.contiguous(), self.data, fusion=gated_fusion(norm, bias))

    def add_product(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._multiply(x.contiguous(), self.data, fusion=Fusion(bias=bias, residual=residual))


def find_fixed_product(device: torch.device) -> tuple[FixedProduct, SplitWorkspace]:
    """``fixed_linear`` for ``device`` and its workspace. From now on Triton joins no product with a sum into one
    operation: whether it could depends on what is around them. Raises ``ValueError`` if a row's product depends on the
    number of rows here."""
    triton.knobs.language.default_fp_fusion = False
    workspace = SplitWorkspace(device)
    multiply = partial(fixed_linear, workspace=workspace, pdl=torch.cuda.get_device_capability(device) >= (9, 0))
    x, weight = torch.randn(2, _FEW_ROWS + 2, 1088, device=device, generator=torch.Generator(device).manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        row, few, many = (multiply(x[:rows].to(dtype), weight.to(dtype)) for rows in (1, 17, len(x)))
        if not torch.equal(few, many[:17]) or not torch.equal(row, many[:1]):
            raise ValueError(
                "--enable-deterministic-inference: on this GPU a row's product depends on the number of rows; leave it"
                " out"
            )
    return multiply, workspace


def find_skinny_products(device: torch.device) -> SkinnyProducts:
    """The products for ``device``. Compiles fenceline_kernel on first use where it is installed (seconds, once)."""
    product = _find_cuda_product(device)
    return SkinnyProducts(product, load_table(gpu_traits(device, product is not None)), SplitWorkspace(device))


def gpu_traits(device: torch.device, has_cuda_kernels: bool) -> GpuTraits:
    """The traits of ``device`` on which a guess depends."""
    return GpuTraits(
        name=torch.cuda.get_device_name(device),
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        capability=torch.cuda.get_device_capability(device),
        has_cuda_kernels=has_cuda_kernels,
    )


def find_skinny_gemm(device: torch.device, bits: int) -> SkinnyGemm | None:
    """fenceline_kernel's skinny GEMM for weights whose numbers have ``bits`` bits; None if the package is not installed
    or cannot be used. Compiles it on first use."""
    gpu = torch.cuda.get_device_properties(device)
    if gpu.shared_memory_per_block_optin < SHARED_BYTES:  # type: ignore[attr-defined]  # missing in torch's stubs
        return None
    try:
        from fenceline_kernel import KernelUnavailable, load
        from fenceline_kernel.skinny import SkinnyGemm
    except ImportError:
        return None
    try:
        return SkinnyGemm(load(device), bits)
    except KernelUnavailable:
        return None


@functools.cache
def skinny_cut(config: CudaConfig) -> SkinnyConfig:
    """``config`` in fenceline_kernel's type."""
    from fenceline_kernel.skinny import SkinnyConfig

    return SkinnyConfig(**asdict(config))


def _find_cuda_product(device: torch.device) -> CudaProduct | None:
    """fenceline_kernel's skinny GEMM; None if the package is not installed or cannot be used."""
    gemm = find_skinny_gemm(device, 16)
    if gemm is None:
        return None

    def product(
        x: torch.Tensor, weight: torch.Tensor, config: CudaConfig, fusion: Fusion, out: torch.Tensor | None
    ) -> torch.Tensor:
        if out is None:
            out = fusion.residual
        if out is None:
            out = x.new_empty(x.shape[0], weight.shape[0] // (2 if fusion.gated else 1))
        gemm(
            x, weight, out, skinny_cut(config),
            norm_weight=fusion.norm_weight, eps=fusion.eps, bias=fusion.bias,
            residual=fusion.residual, gated=fusion.gated,
        )  # fmt: skip
        return out

    return product if _is_product_right(device, product) else None


def _is_product_right(device: torch.device, product: CudaProduct) -> bool:
    weight = torch.randn(96, 512, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()

    def trial(x: torch.Tensor, cut: CudaConfig, fusion: Fusion, out: torch.Tensor) -> None:
        product(x, weight, cut, fusion, out)

    cuts = [(rows, probe_cut(tiles)) for rows, tiles in ((1, 2), (1, 6), (2, 4), (8, 2), (8, 6), (16, 4))]
    return is_right("skinny GEMM", trial, weight.float(), cuts)


def probe_cut(tiles: int, direct: bool = False) -> CudaConfig:
    """A configuration with so many tiles for a small weight, see :func:`is_right`."""
    return CudaConfig(tiles=tiles, warps_k=2, depth=2, direct=direct)


def is_right(name: str, product: Trial, weight: torch.Tensor, cuts: Iterable[tuple[int, CudaConfig]]) -> bool:
    """Whether ``product`` and torch's operators have the same result for ``weight`` [N, K] float32, on its device: once
    with a norm and a gate, once added to a residual. ``cuts``: pairs of the number of rows and the configuration; its
    ``pdl`` is chosen here. If not, this is logged with ``name``."""
    device, (n, k) = weight.device, weight.shape
    draw = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(1))
    norm = (1 + 0.1 * draw(k)).bfloat16()
    has_pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    for rows, given in cuts:
        cut = replace(given, pdl=has_pdl)
        x, residual = draw(rows, k).bfloat16(), draw(rows, n).bfloat16()
        gate, up = F.linear(F.rms_norm(x.float(), (k,), norm.float(), 1e-6), weight).chunk(2, -1)
        gated, added = x.new_empty(rows, n // 2), residual.clone()
        try:
            product(x, cut, Fusion(norm, 1e-6, gated=True), gated)
            product(x, cut, Fusion(residual=added), added)
        except RuntimeError as error:
            logger.warning("the CUDA %s cannot be used here: %s", name, error)
            return False
        for got, want in ((gated, F.silu(gate) * up), (added, residual.float() + F.linear(x.float(), weight))):
            error_size = ((got.float() - want).norm() / want.norm()).item()
            if not error_size < _TOLERANCE:
                logger.warning(
                    "the CUDA %s with %d rows is wrong here by %.3f of the result; it is not used",
                    name, rows, error_size,
                )  # fmt: skip
                return False
    return True
