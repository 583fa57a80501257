"""Products with quantised weights on a GPU: few and many rows, against float64 of the numbers that are stored, and the
same bits again in a graph."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fenceline.config.gguf_file import TENSOR_TYPES
from fenceline.config.quantization import QuantConfig
from fenceline.layers.cuda_quantized import (
    CudaQuantizedProduct,
    CudaQuantizedWeight,
    QuantizedProducts,
    find_cuda_quantized,
    find_quantized_products,
)
from fenceline.layers.kernels.base import LayerKernels
from fenceline.layers.kernels.triton.int4_gemm import Int4Config, SplitWorkspace, int4_linear
from fenceline.layers.kernels.triton.skinny_gemm import Fusion
from fenceline.layers.quantized import FP8, QuantizedFormat, make_format
from fenceline.layers.skinny_table import MAX_DIRECT_ROWS, CudaConfig, shared_bytes
from fenceline.layers.weight import RMSNorm, fill_slots
from fenceline.models.gguf_weights import FORMATS as GGUF_FORMATS
from fenceline.models.gguf_weights import dequantised

pytestmark = pytest.mark.gpu

FORMATS = {
    "fp8-rows": QuantConfig(method="on-line", kind="fp8"),
    "fp8-blocks": QuantConfig(method="on-line", kind="fp8", scales="block"),
    "int4-128": QuantConfig(method="on-line", kind="int4", group_size=128),
    "int4-64": QuantConfig(method="on-line", kind="int4", group_size=64),
    "int4-32": QuantConfig(method="on-line", kind="int4", group_size=32),
}
SHAPES = ((4096, 1024), (272, 640))  # weight rows and K
ROWS = (1, 2, 16, 17, 64, 65, 256, 300, 600)
WEIGHTS_ONLY, INPUTS_TOO = 0.01, 0.05  # norms of the error, relative to the result's
FUSIONS = ("plain", "bias", "norm", "gated", "residual")
CUTS = (
    CudaConfig(depth=2),
    CudaConfig(tiles=2, warps_n=2, warps_k=2, depth=6, prefetch_bytes=512),
    CudaConfig(tiles=2, warps_k=4, depth=2, num_ctas=4),
    CudaConfig(tiles=6, warps_k=2, depth=4, pdl=False, num_ctas=100),
    CudaConfig(tiles=2, warps_k=1, cluster=4, prefetch_bytes=4096),
    CudaConfig(tiles=4, warps_n=2, warps_k=2, cluster=2, num_ctas=6, depth=2),
    CudaConfig(tiles=2, warps_n=4, warps_k=1, depth=3),
    CudaConfig(tiles=2, warps_k=3, depth=2, direct=True),
    CudaConfig(tiles=2, warps_n=3, warps_k=4, depth=4, pdl=False, direct=True),
)
INT4_CUTS = (
    Int4Config(64, 16, 128, 4, 4, split=4),
    Int4Config(64, 32, 128, 4, 4),
    Int4Config(64, 32, 64, 4, 6, split=4, reorder=True),
    Int4Config(128, 64, 128, 8, 4, split=2),
    Int4Config(64, 64, 128, 4, 3, reorder=True, launch_pdl=False),
    Int4Config(64, 32, 32, 4, 4, split=2),
    Int4Config(128, 128, 64, 8, 4),
    Int4Config(128, 128, 128, 8, 3, split=4, reorder=True),
    Int4Config(64, 128, 128, 4, 3, split=2),
    Int4Config(256, 128, 64, 16, 3),
)


class FusedCase:
    """Random operands for a product of ``rows`` rows with ``stored`` and what ``fused`` (one of FUSIONS) says around
    it, and what it should be, ``want``, in float64. ``rounds_norm``: the normed rows are rounded before the product."""

    def __init__(self, stored: QuantizedFormat, rows: int, fused: str, rounds_norm: bool = False) -> None:
        (n, k), device = stored.shape, stored.data.device
        self._fused = fused
        self.x = torch.randn(rows, k, device=device).bfloat16()
        self._norm = torch.rand(k, device=device).bfloat16() + 0.5
        self._bias = torch.randn(n, device=device).bfloat16() if fused == "bias" else None
        gated = fused == "gated"
        self.out = torch.randn(rows, n // (2 if gated else 1), device=device).bfloat16()
        wide = self.x.double()
        if fused in ("norm", "gated"):
            wide = F.rms_norm(wide, (k,), self._norm.double(), 1e-6)
            wide = wide.bfloat16().double() if rounds_norm else wide
        bias = None if self._bias is None else self._bias.double()
        self.want = F.linear(wide, stored.dequantized(torch.float64), bias)
        if gated:
            gate, up = self.want.chunk(2, -1)
            self.want = F.silu(gate) * up
        if fused == "residual":
            self.want = self.want + self.out.double()

    def fusion(self, out: torch.Tensor) -> Fusion:
        """``out``: the residual, if it is added."""
        norm = self._norm if self._fused in ("norm", "gated") else None
        residual = out if self._fused == "residual" else None
        return Fusion(norm, 1e-6, self._bias, self._fused == "gated", residual)


@functools.cache
def found_products(kind: str) -> QuantizedProducts:
    return find_quantized_products(torch.device("cuda"), kind)


@functools.cache
def found_cuda_product(kind: str) -> CudaQuantizedProduct | None:
    return find_cuda_quantized(torch.device("cuda"), kind)


def make_weight(name: str, n: int, k: int) -> CudaQuantizedWeight:
    with torch.device("cuda"):
        stored = make_format(FORMATS[name], n, k, torch.bfloat16)
    matrix = torch.randn(n, k, device="cuda") / k**0.5 * torch.rand(n, 1, device="cuda")
    fill_slots(stored.slots("x", slice(None), (n, k), 0, 0), [("x.weight", matrix.bfloat16())])
    if name == "fp8-blocks":
        share_block_scales(stored.data, stored.scales)
    return CudaQuantizedWeight(stored, found_products(stored.kind))


def share_block_scales(data: torch.Tensor, scales: torch.Tensor) -> None:
    """Give the rows of each block of 128 the largest of their scales, and round their numbers again."""
    for start in range(0, len(scales), 128):
        rows = slice(start, start + 128)
        largest = scales[rows].amax(0, keepdim=True)
        factors = (scales[rows] / largest).repeat_interleave(128, 1)[:, : data.shape[1]]
        data[rows] = (data[rows].float() * factors).to(data.dtype)
        scales[rows] = largest


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_products(name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    n, k = shape
    weight = make_weight(name, n, k)
    plain = weight.stored.dequantized(torch.float64)
    with torch.device("cuda"):
        norm = RMSNorm(k, 1e-6, torch.bfloat16, LayerKernels())
        norm.weight.uniform_(0.5, 1.5)
        bias = torch.randn(n).bfloat16()
    for rows in ROWS:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        residual = torch.randn(rows, n, device="cuda").bfloat16()
        wide = x.double()
        normed = F.rms_norm(wide, (k,), norm.weight.double(), 1e-6)
        gate, up = F.linear(normed, plain, bias.double()).chunk(2, -1)
        plain_gate, plain_up = F.linear(wide, plain, bias.double()).chunk(2, -1)
        pairs = {
            "plain": (weight.product(x), F.linear(wide, plain)),
            "bias": (weight.product(x, bias), F.linear(wide, plain, bias.double())),
            "norm": (weight.normed_product(x, norm, bias), F.linear(normed, plain, bias.double())),
            "gated": (weight.gated_product(x, norm, bias, norm.kernels), F.silu(gate) * up),
            "gated, without norm": (weight.gated_product(x, None, bias, norm.kernels), F.silu(plain_gate) * plain_up),
            "residual": (weight.add_product(residual.clone(), x, None), residual.double() + F.linear(wide, plain)),
        }
        for what, (got, want) in pairs.items():
            error = ((got.double() - want).norm() / want.norm()).item()
            # From here on the GPU's own product may be taken, which rounds its input as well.
            most = INPUTS_TOO if rows > 4 and name.startswith("fp8") else WEIGHTS_ONLY
            assert error < most, f"{rows} rows, {what}: {error}"


@pytest.mark.parametrize("rows", [1, 8, 32, 80, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_replays_in_a_graph(name: str, rows: int) -> None:
    torch.manual_seed(1)
    weight = make_weight(name, 4096, 1024)
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    expected = weight.product(x)
    graph = torch.cuda.CUDAGraph()
    held = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        y = weight.product(held)
    for _ in range(3):
        held.copy_(x)
        graph.replay()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_cuda_products_agree_with_float64(name: str, cut: CudaConfig) -> None:
    """Every cut, with the same bits again, and rows that do not depend on the others."""
    product = found_cuda_product(FORMATS[name].kind)
    if product is None:
        pytest.skip("fenceline_kernel cannot be used here")
    torch.manual_seed(2)
    for (n, k), rows, fused in itertools.product(((1024, 2048), (272, 640), (6144, 4096)), (1, 3, 8, 9, 16), FUSIONS):
        if (cut.tiles == 6 and (rows > 8 or name in ("int4-64", "int4-32"))) or shared_bytes(
            cut, rows, 4, k=k
        ) > 200 << 10:
            continue
        if cut.direct and (rows > MAX_DIRECT_ROWS or name not in ("fp8-rows", "int4-128")):
            continue
        stored = make_weight(name, n, k).stored
        case = FusedCase(stored, rows, fused)
        x, out, want = case.x, case.out, case.want

        def run(
            x: torch.Tensor, out: torch.Tensor, case: FusedCase = case, stored: QuantizedFormat = stored
        ) -> torch.Tensor:
            out = out.clone()
            fusion = case.fusion(out)
            product(x, stored, cut, fusion, out)
            return out

        got = run(x, out)
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < 8e-3, (n, k, rows, fused, error)
        assert torch.equal(got, run(x, out)), (n, k, rows, fused)
        others = torch.cat([torch.randn(rows - 1, k, device="cuda").bfloat16(), x[-1:]])
        assert torch.equal(run(others, out)[-1], got[-1]), (n, k, rows, fused)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="for sm_80 and later"
)
@pytest.mark.parametrize("cut", INT4_CUTS, ids=str)
@pytest.mark.parametrize("name", ["int4-128", "int4-64", "int4-32"])
def test_triton_products_in_int4_agree_with_float64(name: str, cut: Int4Config) -> None:
    """Every cut, with the same bits again, and rows that do not depend on the others. The weight is multiplied as it is
    stored, so only sums and the result are rounded."""
    if torch.cuda.get_device_capability() < (9, 0):
        cut = replace(cut, launch_pdl=False)
    workspace = SplitWorkspace(torch.device("cuda"))
    torch.manual_seed(3)
    for (n, k), rows, fused in itertools.product(((1024, 2048), (272, 640)), (1, 33, 130), FUSIONS):
        stored = make_weight(name, n, k).stored
        assert stored.zeros is not None
        if cut.block_k > stored.group:
            continue
        case = FusedCase(stored, rows, fused, rounds_norm=True)
        x, out, want = case.x, case.out, case.want

        def run(
            x: torch.Tensor, out: torch.Tensor, case: FusedCase = case, stored: QuantizedFormat = stored
        ) -> torch.Tensor:
            out = out.clone()
            fusion = case.fusion(out)
            assert stored.zeros is not None
            numbers = stored.data, stored.scales, stored.zeros, stored.group
            return int4_linear(x, *numbers, cut, workspace, fusion, None if fusion.residual is not None else out)

        got = run(x, out)
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < 3e-3, (n, k, rows, fused, error)
        assert torch.equal(got, run(x, out)), (n, k, rows, fused)
        others = torch.cat([torch.randn(rows - 1, k, device="cuda").bfloat16(), x[-1:]])
        assert torch.equal(run(others, out)[-1], got[-1]), (n, k, rows, fused)
        assert not workspace.num_done.any()


def test_every_fp8_number_is_itself() -> None:
    product = found_cuda_product("fp8")
    if product is None:
        pytest.skip("fenceline_kernel cannot be used here")
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[~codes.view(FP8).float().isnan()]
    with torch.device("cuda"):
        stored = make_format(FORMATS["fp8-rows"], len(codes), 64, torch.bfloat16)
        out = torch.empty(1, len(codes), dtype=torch.bfloat16)
        x = torch.ones(1, 64, dtype=torch.bfloat16)
    data = torch.zeros(len(codes), 64, dtype=torch.uint8)
    data[torch.arange(len(codes)), torch.arange(len(codes)) % 64] = codes
    stored.data.copy_(data.view(FP8))
    scales = 2.0 ** (torch.arange(len(codes)) % 40 - 30.0)
    stored.scales.copy_(scales[:, None])
    product(x, stored, CudaConfig(tiles=2, warps_k=1), Fusion(), out)
    assert torch.equal(out[0].cpu().float(), codes.view(FP8).float() * scales)


@pytest.mark.parametrize("name", ["fp8-rows", "int4-128"])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_chain_of_early_starts_reads_what_was_written(name: str, rows: int) -> None:
    """Each kernel starts while the preceding one still runs: with a wait missing it would read old data."""
    product = found_cuda_product(FORMATS[name].kind)
    if product is None:
        pytest.skip("fenceline_kernel cannot be used here")
    torch.manual_seed(0)
    hidden, size, layers = 1024, 3072, 12
    with torch.device("cuda"):
        norm = 1 + 0.1 * torch.randn(hidden).bfloat16()
        x = torch.randn(rows, hidden).bfloat16()
        gated = torch.empty(rows, size, dtype=torch.bfloat16)
    ups = [make_weight(name, 2 * size, hidden).stored for _ in range(layers)]
    downs = [make_weight(name, hidden, size).stored for _ in range(layers)]

    def chain(residual: torch.Tensor, cut: CudaConfig) -> None:
        for up, down in zip(ups, downs, strict=True):
            product(residual, up, cut, Fusion(norm, 1e-6, gated=True), gated)
            product(gated, down, cut, Fusion(residual=residual), residual)

    for cut in (CudaConfig(depth=2, warps_k=4), CudaConfig(tiles=2, warps_k=2, cluster=2, prefetch_bytes=4096)):
        want = x.clone()
        chain(want, replace(cut, pdl=False))
        residual = torch.empty_like(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            residual.copy_(x)
            chain(residual, cut)
        for _ in range(50):
            gated.fill_(float("nan"))
            graph.replay()
            assert torch.equal(residual, want), cut


@pytest.mark.parametrize("rows", [32, 256])
def test_a_chain_of_early_starts_in_int4_reads_what_was_written(rows: int) -> None:
    """The same of Triton's products with a split K, whose counters all launches share."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("for sm_90 and later")
    torch.manual_seed(0)
    hidden, size, layers = 1024, 3072, 12
    with torch.device("cuda"):
        norm = 1 + 0.1 * torch.randn(hidden).bfloat16()
        x = torch.randn(rows, hidden).bfloat16()
        gated = torch.empty(rows, size, dtype=torch.bfloat16)
    ups = [make_weight("int4-128", 2 * size, hidden).stored for _ in range(layers)]
    downs = [make_weight("int4-128", hidden, size).stored for _ in range(layers)]
    workspace = SplitWorkspace(torch.device("cuda"))

    def multiply(x: torch.Tensor, stored: QuantizedFormat, cut: Int4Config, fusion: Fusion) -> None:
        assert stored.zeros is not None
        out = None if fusion.residual is not None else gated
        int4_linear(x, stored.data, stored.scales, stored.zeros, 128, cut, workspace, fusion, out)

    def chain(residual: torch.Tensor, cut: Int4Config) -> None:
        for up, down in zip(ups, downs, strict=True):
            multiply(residual, up, cut, Fusion(norm, 1e-6, gated=True))
            multiply(gated, down, cut, Fusion(residual=residual))

    for cut in (Int4Config(64, 32, 128, 4, 4, split=2), Int4Config(128, 128, 128, 8, 3, split=4, reorder=True)):
        want = x.clone()
        chain(want, replace(cut, launch_pdl=False))
        residual = torch.empty_like(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            residual.copy_(x)
            chain(residual, cut)
        for _ in range(50):
            gated.fill_(float("nan"))
            graph.replay()
            assert torch.equal(residual, want), cut


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_blocks_of_gguf_files_are_dequantised_as_on_the_cpu(name: str) -> None:
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    raw = torch.randint(0, 256, (5000, kind.nbytes), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
    raw[:, 1::2] &= 0x3F  # scales are no infinities
    expected = dequantised(kind, raw.flatten(), torch.bfloat16)
    with torch.device("cuda"):
        found = dequantised(kind, raw.flatten(), torch.bfloat16)
    assert found.is_cuda and torch.equal(found.cpu(), expected)
