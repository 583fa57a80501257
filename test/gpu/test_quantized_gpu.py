"""Products with quantised weights on a GPU: few and many rows, against float64 of the numbers that are stored, and the
same bits again in a graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fenceline.config.quantization import QuantConfig
from fenceline.layers.kernels.base import TorchLayerKernels
from fenceline.layers.kernels.cuda_quantized import (
    CudaQuantizedWeight,
    QuantizedProducts,
    find_quantized_products,
)
from fenceline.layers.quantized import make_format
from fenceline.layers.weight import RMSNorm, fill_slots

pytestmark = pytest.mark.gpu

FORMATS = {
    "fp8-rows": QuantConfig(method="on-line", kind="fp8"),
    "fp8-blocks": QuantConfig(method="on-line", kind="fp8", scales="block"),
    "int4-128": QuantConfig(method="on-line", kind="int4", group_size=128),
    "int4-32": QuantConfig(method="on-line", kind="int4", group_size=32),
}
SHAPES = ((4096, 1024), (272, 640))  # weight rows and K
ROWS = (1, 2, 16, 17, 64, 65, 256, 300)
WEIGHTS_ONLY, INPUTS_TOO = 0.01, 0.05  # norms of the error, relative to the result's


@pytest.fixture(scope="module")
def products() -> QuantizedProducts:
    return find_quantized_products(torch.device("cuda"))


def make_weight(name: str, n: int, k: int, products: QuantizedProducts) -> CudaQuantizedWeight:
    with torch.device("cuda"):
        stored = make_format(FORMATS[name], n, k, torch.bfloat16)
    matrix = torch.randn(n, k, device="cuda") / k**0.5 * torch.rand(n, 1, device="cuda")
    fill_slots(stored.slots("x", slice(None), (n, k), 0, 0), [("x.weight", matrix.bfloat16())])
    if name == "fp8-blocks":
        share_block_scales(stored.data, stored.scales)
    return CudaQuantizedWeight(stored, products)


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
def test_products(name: str, shape: tuple[int, int], products: QuantizedProducts) -> None:
    torch.manual_seed(0)
    n, k = shape
    weight = make_weight(name, n, k, products)
    plain = weight.stored.dequantized(torch.float64)
    with torch.device("cuda"):
        norm = RMSNorm(k, 1e-6, torch.bfloat16, TorchLayerKernels())
        norm.weight.uniform_(0.5, 1.5)
        bias = torch.randn(n).bfloat16()
    for rows in ROWS:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        residual = torch.randn(rows, n, device="cuda").bfloat16()
        wide = x.double()
        normed = F.rms_norm(wide, (k,), norm.weight.double(), 1e-6)
        gate, up = F.linear(normed, plain, bias.double()).chunk(2, -1)
        pairs = {
            "plain": (weight.product(x), F.linear(wide, plain)),
            "bias": (weight.product(x, bias), F.linear(wide, plain, bias.double())),
            "norm": (weight.normed_product(x, norm, bias), F.linear(normed, plain, bias.double())),
            "gated": (weight.gated_product(x, norm, bias), F.silu(gate) * up),
            "residual": (
                weight.add_product(residual.clone(), x, None),
                residual.double() + F.linear(wide, plain),
            ),
        }
        for what, (got, want) in pairs.items():
            error = ((got.double() - want).norm() / want.norm()).item()
            most = INPUTS_TOO if rows > 64 and name.startswith("fp8") else WEIGHTS_ONLY
            assert error < most, f"{rows} rows, {what}: {error}"


@pytest.mark.parametrize("rows", [1, 8, 80])
@pytest.mark.parametrize("name", FORMATS)
def test_replays_in_a_graph(name: str, rows: int, products: QuantizedProducts) -> None:
    torch.manual_seed(1)
    weight = make_weight(name, 4096, 1024, products)
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
