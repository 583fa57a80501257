"""Our Triton kernels, compiled, and the CUDA products read and write what they declare: ``test/unit/layers/
test_kernel_accesses.py`` says how, and does the same in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_package_cases import copy_launches, fill_launches
from kernel_surroundings import Launch, check

from fenceline.layers.cuda_layers import CudaProduct, find_skinny_gemm
from fenceline.layers.kernels import accesses
from fenceline.layers.kernels.triton.skinny_gemm import Fusion
from fenceline.layers.quantized import FP8, round_to_fp8, round_to_int4
from fenceline.layers.skinny_table import MAX_DIRECT_ROWS, CudaConfig
from fenceline.memory_order import open_device
from fenceline.memory_order.device import copy_words

pytestmark = pytest.mark.gpu


def test_triton_kernels_touch_what_they_declare(pdl: bool) -> None:
    from kernel_launches import launches

    torch.manual_seed(0)
    checked = set()
    for launch in launches():
        check(launch, "cuda", pdl)
        checked.add(launch.kernel.name)
    assert len(checked) > 20, checked


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("kind", ["norm", "gated", "residual"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_cuda_products_touch_what_they_declare(
    product: CudaProduct, cluster: int, kind: str, rows: int, pdl: bool
) -> None:
    torch.manual_seed(0)
    for k, num_out in ((72, 24), (1032, 1000)):
        gated, adds = kind == "gated", kind == "residual"
        width = num_out * (2 if gated else 1)
        x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((rows, k), (width, k), (width,)))
        norm = None if adds else torch.randn(k).bfloat16()
        out = torch.randn(rows, num_out).bfloat16()

        def run(
            pdl: bool, x: Any, weight: Any, norm: Any, bias: Any, residual: Any, out: Any, gated: bool = gated
        ) -> None:
            fusion = Fusion(norm, 1e-6, bias, gated, residual)
            config = CudaConfig(tiles=2, warps_k=4, cluster=cluster, pdl=pdl, prefetch_bytes=512)
            product(x, weight, config, fusion, None if residual is not None else out)

        operands = (x, weight, norm, bias, out if adds else None, out)
        check(Launch(f"skinny {kind} {rows}", accesses.skinny_linear, operands, run), "cuda", pdl)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("kind", ["norm", "gated", "residual"])
@pytest.mark.parametrize("name", ["fp8", "fp8-direct", "fp8-blocks", "int4", "int4-direct", "int4-32"])
def test_quantized_products_touch_what_they_declare(name: str, kind: str, rows: int, pdl: bool) -> None:
    numbers_of = {"fp8": (8, 0), "fp8-blocks": (8, 128), "int4": (4, 128), "int4-32": (4, 32)}
    direct = name.endswith("-direct")
    bits, group = numbers_of[name.removesuffix("-direct")]
    if direct and rows > MAX_DIRECT_ROWS:
        pytest.skip("weights go into registers for few rows alone")
    gemm = find_skinny_gemm(torch.device("cuda"), bits)
    if gemm is None:
        pytest.skip("fenceline_kernel cannot be used here")
    from fenceline_kernel.skinny import SkinnyConfig, StoredNumbers

    torch.manual_seed(0)
    k, num_out = 384, 104
    gated, adds = kind == "gated", kind == "residual"
    width = num_out * (2 if gated else 1)
    matrix = torch.randn(width, k)
    stored = round_to_int4(matrix, group) if bits == 4 else round_to_fp8(matrix, group or k)
    # As the formats store them, each group's beside each other.
    data, scales, zeros = (stored[0].view(torch.uint8), *(part.t().contiguous() for part in stored[1:]), None)[:3]
    x, bias = torch.randn(rows, k).bfloat16(), torch.randn(width).bfloat16()
    norm = None if adds else torch.randn(k).bfloat16()
    out = torch.randn(rows, num_out).bfloat16()

    def run(
        pdl: bool, x: Any, data: Any, scales: Any, zeros: Any, norm: Any, bias: Any, residual: Any, out: Any
    ) -> None:
        config = SkinnyConfig(tiles=2, warps_k=4, depth=2, pdl=pdl, prefetch_bytes=128, direct=direct)
        numbers = StoredNumbers(scales.t(), None if zeros is None else zeros.t(), group)
        data = data if bits == 4 else data.view(FP8)
        gemm(
            x, data, out, config, norm_weight=norm, eps=1e-6, bias=bias, residual=residual, gated=gated,
            numbers=numbers,
        )  # fmt: skip

    operands = (x, data.contiguous(), scales, zeros, norm, bias, out if adds else None, out)
    check(Launch(f"{name} {kind} {rows}", accesses.quantized_linear, operands, run), "cuda", pdl)


@pytest.mark.usefixtures("product")
def test_fills_touch_what_they_declare() -> None:
    for launch in fill_launches():
        check(launch, "cuda")


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_page_copies_touch_what_they_declare(io_backend: str) -> None:
    for launch in copy_launches(io_backend=io_backend):
        check(launch, "cuda")


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("num_words", [1, 64, 511])
def test_results_that_forward_writes_are_what_it_declares(num_words: int) -> None:
    device = open_device("cuda")
    source, host = (torch.randint(0, 99, (8 * num_words,), dtype=torch.uint8) for _ in range(2))

    def run(pdl: bool, source: torch.Tensor, host: torch.Tensor) -> None:
        torch.cuda.synchronize()
        device.write_host(host, source)

    check(Launch("write to the host", copy_words, (source, host), run, pinned=[host]), "cuda")
