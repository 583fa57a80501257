"""The Triton products with quantised weights against float64, in Triton's interpreter, and the choice between them and
the GPU's own FP8 product, of which there is a stand-in here.

The interpreter is chosen when triton is imported, so the checks run in a process of their own: this file as a script.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from triton_interpreter import outcomes_of, print_outcomes, set_up_interpreter

from fenceline.config.quantization import QuantConfig
from fenceline.layers.kernels.base import LayerKernels
from fenceline.layers.quantized import Fp8Format, QuantizedFormat, make_format, round_to_fp8
from fenceline.layers.weight import RMSNorm, fill_slots

pytestmark = pytest.mark.long

ROWS = (1, 5, 70)  # the kernel of one row, and of fp8 a padded block of rows, and more rows
FUSIONS = ("plain", "bias", "norm", "gated", "residual")
FORMATS = {
    "fp8-rows": QuantConfig(method="on-line", kind="fp8"),
    "fp8-blocks": QuantConfig(method="on-line", kind="fp8", scales="block"),
    "int4": QuantConfig(method="on-line", kind="int4", group_size=64),
    "int8": QuantConfig(method="on-line", kind="int8"),
    "int8-groups": QuantConfig(method="on-line", kind="int8", scales="group"),
}
# The interpreter multiplies bfloat16 matrices by their bit patterns, so two rows or more are tried in float16.
DTYPES = {"float32": 1e-6, "float16": 2e-3}
SHAPES = {
    "fp8-rows": ((48, 64), (50, 72)),
    "fp8-blocks": ((48, 256), (34, 200)),
    "int4": ((48, 128), (34, 96)),
    "int8": ((48, 64), (50, 72)),
    "int8-groups": ((48, 256), (34, 200)),
}
PRODUCTS = [
    f"{name} {dtype} {rows} {fusion}"
    for name, dtype, rows, fusion in itertools.product(FORMATS, DTYPES, ROWS, FUSIONS)
    if rows == 1 or not name.startswith("int")
]
OTHERS = (
    "rows of the input are rounded to the nearest numbers",
    "a static scale is used as it is",
    "many rows go to the gpu's own product",
    "a product that the gpu does not have is plain",
    "what _scaled_mm is called with",
    "float16 holds a norm of large numbers",
    "few rows in bfloat16 go to the cuda product",
    "a cuda product that is wrong is not used",
    "a triton product that is wrong is not used",
)

results = outcomes_of(__file__)


@pytest.mark.parametrize("check", (*PRODUCTS, *OTHERS))
def test_quantised_products(check: str, results: dict[str, str]) -> None:
    assert results[check] == ""


# --- the checks, run in the script -------------------------------------------------------------------------------


def stored_in(name: str, n: int, k: int) -> QuantizedFormat:
    stored = make_format(FORMATS[name], n, k, torch.float32)
    matrix = torch.randn(n, k) / k**0.5 * torch.rand(n, 1)
    fill_slots(stored.slots("x", slice(None), (n, k), 0, 0), [("x.weight", matrix)])
    return stored


def want_of(
    x: torch.Tensor, stored: QuantizedFormat, bias: torch.Tensor | None, gated: bool, residual: torch.Tensor | None
) -> torch.Tensor:
    want = F.linear(x, stored.dequantized(torch.float64), None if bias is None else bias.double())
    if gated:
        gate, up = want.chunk(2, -1)
        want = F.silu(gate) * up
    return want if residual is None else want + residual.double()


def check_product(name: str, dtype_name: str, rows: int, fusion_name: str) -> None:
    from fenceline.layers.kernels.triton.quantized_gemm import quantized_linear
    from fenceline.layers.kernels.triton.skinny_gemm import Fusion, TritonConfig, scaled_linear

    dtype = getattr(torch, dtype_name)
    for n, k in SHAPES[name] if rows != 70 else SHAPES[name][1:]:
        gated = fusion_name == "gated"
        stored = stored_in(name, n, k)
        x = torch.randn(rows, k).to(dtype)
        norm = torch.randn(k).to(dtype) if fusion_name in ("norm", "gated") else None
        bias = torch.randn(n).to(dtype) if fusion_name != "plain" else None
        out = n // 2 if gated else n
        residual = torch.randn(rows, out).to(dtype) if fusion_name == "residual" else None
        wide = x.double() if norm is None else F.rms_norm(x.double(), norm.shape, norm.double(), 1e-6)
        want = want_of(wide, stored, bias, gated, residual)
        fusion = Fusion(norm, 1e-6, bias, gated, residual)
        config = TritonConfig(16, 32, 4, launch_pdl=False)
        if rows > 1 and isinstance(stored, Fp8Format):
            numbers, x_scales = round_to_fp8(x.float() if norm is None else wide.float(), stored.group)
            numbers, x_scales = numbers.contiguous(), x_scales.contiguous()
            rounded = numbers.double() * x_scales.double().repeat_interleave(stored.group, 1)[:, :k]
            want = want_of(rounded, stored, bias, gated, residual)
            rest = Fusion(None, 0.0, bias, gated, residual)
            got = scaled_linear(
                numbers, x_scales, stored.data, stored.scales, stored.group, config, rest,
                torch.empty(rows, out, dtype=dtype) if residual is None else None,
            )  # fmt: skip
        else:
            got = quantized_linear(x, stored.data, stored.scales, stored.zeros, stored.group, config, fusion)
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < DTYPES[dtype_name], f"{n}x{k}: {error}"
        assert residual is None or got is residual


def check_rounding() -> None:
    from fenceline.layers.kernels.triton.quantized_gemm import quantize_rows

    for group, k in ((128, 300), (300, 300), (5000, 5000)):
        x = torch.randn(3, k) * torch.tensor([[1.0], [1e-3], [0.0]])
        numbers, scales = quantize_rows(x, group, None)
        expected, expected_scales = round_to_fp8(x, group)
        torch.testing.assert_close(scales, expected_scales)
        # The interpreter loses the carry of a number that is rounded up to a power of two.
        halved = (numbers.float() * 2 == expected.float()) & (expected.float() != 0)
        assert (expected.float().abs()[halved].log2() % 1 == 0).all()
        assert ((numbers.float() == expected.float()) | halved).all() and halved.float().mean() < 0.02


def check_static_scale() -> None:
    from fenceline.layers.kernels.triton.quantized_gemm import quantize_rows

    numbers, scales = quantize_rows(torch.tensor([[1.0, 2.0, -600.0]]), 3, torch.tensor(0.5))
    assert numbers.float().tolist() == [[2.0, 4.0, -448.0]] and scales.tolist() == [[0.5]]


def _stand_in(calls: list[str], name: str, *operands: torch.Tensor) -> torch.Tensor:
    calls.append(name)
    x, x_scales, weight, scales = operands[:4]

    def plain(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        group = 128 if scales.shape[1] > 1 else numbers.shape[1]
        return numbers.float() * scales.repeat_interleave(group, 1)[:, : numbers.shape[1]]

    return (plain(x, x_scales) @ plain(weight, scales).t()).to(operands[4])


def check_choice() -> None:
    from fenceline.layers.cuda_quantized import CudaQuantizedWeight, QuantizedProducts

    calls: list[str] = []
    row, block = partial(_stand_in, calls, "row"), partial(_stand_in, calls, "block")
    norm = RMSNorm(256, 1e-6, torch.float32, LayerKernels())
    norm.weight.normal_()
    ours = {(9, 0): 128, (8, 9): 1}  # up to so many rows go to Triton
    for (name, called), capability in itertools.product((("fp8-rows", "row"), ("fp8-blocks", "block")), ours):
        products = QuantizedProducts(132, capability, row, block)
        products._pdl = False  # the interpreter has no such launches
        weight = CudaQuantizedWeight(stored_in(name, 32, 256), products)
        plain = weight.stored.dequantized(torch.float32)
        bias = torch.randn(32)
        for rows in (129, 2, 1) if capability == (9, 0) else (2, 1):
            x = torch.randn(rows, 256)
            residual = torch.randn(rows, 32)
            normed = norm.forward(x)
            gate, up = F.linear(normed, plain, bias).chunk(2, -1)
            product = weight.product(x, bias)
            own_gate, own_up = product.chunk(2, -1)
            pairs = (
                (product, F.linear(x, plain, bias)),
                (weight.product(x, None, torch.empty(rows, 32)), F.linear(x, plain)),
                (weight.normed_product(x, norm, bias), F.linear(normed, plain, bias)),
                (weight.gated_product(x, norm, bias, norm.kernels), F.silu(gate) * up),
                (weight.gated_product(x, None, bias, norm.kernels), F.silu(own_gate) * own_up),
                (weight.add_product(residual.clone(), x, bias), residual + F.linear(x, plain, bias)),
            )
            assert calls == ([called] * 6 if rows > ours[capability] else [])
            calls.clear()
            for got, want in pairs:
                # The input of several rows is rounded too, and badly by the interpreter (see above).
                assert (got - want).norm() / want.norm() < (0.1 if rows > 1 else 1e-5)
        assert weight.product(torch.empty(0, 256)).shape == (0, 32) and not calls


def check_plain() -> None:
    from fenceline.layers.cuda_quantized import CudaQuantizedWeight, QuantizedProducts

    def never(*operands: object) -> torch.Tensor:
        raise AssertionError("called")

    cases = [
        ("int4", (32, 128), (never, never)),
        ("int8", (32, 256), (never, never)),
        ("int8-groups", (32, 200), (never, never)),
        ("fp8-rows", (32, 256), (None, never)),
        ("fp8-blocks", (32, 256), (never, None)),
        ("fp8-rows", (40, 256), (never, never)),  # no multiple of 16
        ("fp8-rows", (32, 72), (never, never)),
    ]
    for name, (n, k), scaled in cases:
        stored = stored_in(name, n, k)
        x = torch.randn(257 if name == "int4" else 150, k)
        y = CudaQuantizedWeight(stored, QuantizedProducts(132, (8, 0), *scaled)).product(x)
        torch.testing.assert_close(y, F.linear(x, stored.dequantized(torch.float32)))
        few = CudaQuantizedWeight(stored, QuantizedProducts(132, (8, 0), None, None)).product(x[:2])
        torch.testing.assert_close(few, F.linear(x[:2], stored.dequantized(torch.float32)))
    # Blocks that begin inside another part of a fused layer are no blocks of 128 of the whole.
    stored = make_format(FORMATS["fp8-blocks"], 256, 256, torch.float32)
    for rows in (slice(0, 64), slice(64, 256)):
        part = (rows.stop - rows.start, 256)
        fill_slots(stored.slots("x", rows, part, 0, 0), [("x.weight", torch.randn(part))])
    CudaQuantizedWeight(stored, QuantizedProducts(132, (8, 9), never, never)).product(torch.randn(150, 256))


def check_scaled_mm() -> None:
    from fenceline.layers import cuda_quantized

    def scaled_mm(a, b, scale_a, scale_b, out_dtype):  # type: ignore[no-untyped-def]
        """As torch documents its operands on sm_90."""
        (m, k), n = a.shape, b.shape[1]
        assert a.dtype == b.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
        assert a.is_contiguous() and b.t().is_contiguous() and not k % 16 and not n % 16
        if scale_a.shape == (m, 1):
            assert scale_b.shape == (1, n) and scale_a.is_contiguous() and scale_b.is_contiguous()
        else:
            assert m % 4 == 0 and scale_a.shape == (m, -(-k // 128)) and scale_a.stride() == (1, m)
            assert scale_b.shape == (-(-k // 128), -(-n // 128))
            assert scale_b.stride() == (1, 4 * -(-k // 512))  # as cuBLAS reads it, whatever is passed
            scale_b = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:k, :n]
            scale_a = scale_a.repeat_interleave(128, 1)[:, :k]
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    torch._scaled_mm, real = scaled_mm, torch._scaled_mm
    try:
        working = cuda_quantized._working
        assert working(torch.device("cpu"), cuda_quantized.row_scaled_product, 256) is not None
        assert working(torch.device("cpu"), cuda_quantized.block_scaled_product, 128) is not None
        # Called with 21 rows, which are padded.
        x, x_scales = round_to_fp8(torch.randn(21, 256), 128)
        weight = round_to_fp8(torch.randn(256, 256), 128)[0]
        y = cuda_quantized.block_scaled_product(x, x_scales, weight, torch.ones(256, 2), torch.float32)
        assert y.shape == (21, 256)
        torch._scaled_mm = lambda *args, **kwargs: scaled_mm(*args, **kwargs) * 1.1
        assert working(torch.device("cpu"), cuda_quantized.row_scaled_product, 256) is None

        def refuses(*args: object, **kwargs: object) -> None:
            raise RuntimeError("not on this GPU")

        torch._scaled_mm = refuses
        assert working(torch.device("cpu"), cuda_quantized.block_scaled_product, 128) is None
    finally:
        torch._scaled_mm = real


def check_float16() -> None:
    from fenceline.layers.cuda_quantized import CudaQuantizedWeight, QuantizedProducts

    norm = RMSNorm(128, 1e-6, torch.float16, LayerKernels())
    norm.weight.fill_(30.0)
    weight = CudaQuantizedWeight(stored_in("int4", 32, 128), QuantizedProducts(132, (8, 9), None, None))
    x = 3000 * torch.randn(3, 128).sign().half()  # a residual beside which the others are small
    want = F.linear(norm.forward(x).float(), weight.stored.dequantized(torch.float32))
    for rows in (1, 3):
        torch.testing.assert_close(weight.normed_product(x[:rows], norm).float(), want[:rows], rtol=0.02, atol=1.0)
        assert weight.gated_product(x[:rows], norm, None, norm.kernels).isfinite().all()


def check_cuda_choice() -> None:
    from fenceline.layers.cuda_quantized import CudaQuantizedWeight, QuantizedProducts
    from fenceline.layers.kernels.triton.skinny_gemm import Fusion
    from fenceline.layers.skinny_table import (
        SHARED_BYTES,
        CudaConfig,
        GpuTraits,
        SkinnyChoice,
        SkinnyTable,
        shared_bytes,
        table_key,
    )

    launches: list[tuple[int, CudaConfig]] = []

    def cuda_product(
        x: torch.Tensor, stored: QuantizedFormat, config: CudaConfig, fusion: Fusion, out: torch.Tensor
    ) -> None:
        launches.append((len(x), config))
        bits = 4 if stored.kind == "int4" else 8
        assert shared_bytes(config, len(x), bits, stored.group) <= SHARED_BYTES
        wide = F.rms_norm(x, x.shape[1:], fusion.norm_weight, fusion.eps) if fusion.norm_weight is not None else x
        y = F.linear(wide, stored.dequantized(torch.bfloat16), fusion.bias)
        if fusion.gated:
            y = F.silu(y[:, : len(out[0])]) * y[:, len(out[0]) :]
        out.copy_(y if fusion.residual is None else fusion.residual + y)

    gpu = GpuTraits("", 132, (8, 9), has_cuda_kernels=True)
    measured: dict[str, SkinnyChoice] = {
        table_key(4, 32, 256, False, "fp8"): CudaConfig(tiles=2, warps_k=1, depth=2),
        table_key(64, 32, 256, False, "fp8"): CudaConfig(tiles=3, warps_k=1, depth=2),
        table_key(2, 32, 256, False, "fp8/128"): None,
        table_key(1, 32, 256, True, "int4/64"): CudaConfig(tiles=6, warps_k=1, depth=2),
    }
    row, block = (partial(_stand_in, [], "unused") for _ in range(2))
    found = QuantizedProducts(132, (8, 9), row, block, cuda_product, SkinnyTable(gpu, measured))

    def launched(name: str, rows: int, gated: bool = False, dtype: torch.dtype = torch.bfloat16) -> list[int]:
        """The tiles of each launch, if there were some with at most 16 rows each."""
        stored = stored_in(name, 32, 256)
        weight, norm = CudaQuantizedWeight(stored, found), RMSNorm(256, 1e-6, dtype, LayerKernels())
        norm.weight.fill_(0.5)
        x = torch.randn(rows, 256).to(dtype)
        launches.clear()
        if gated:
            got = weight.gated_product(x, norm, None, norm.kernels)
            gate, up = F.linear(norm.forward(x).float(), stored.dequantized(torch.float32)).chunk(2, -1)
            want = F.silu(gate) * up
        else:
            residual = torch.randn(rows, 32).to(dtype)
            want = residual + F.linear(x.float(), stored.dequantized(torch.float32))
            got = weight.add_product(residual, x, None)
        if launches:
            assert (got - want).norm() / want.norm() < 0.02
            assert sum(count for count, _ in launches) == rows and max(launches)[0] <= 16
        return [config.tiles for _, config in launches]

    assert launched("fp8-rows", 3) == [2]  # of the bucket of 4
    assert launched("fp8-rows", 1) == [2]  # a guess: the weight is small
    assert launched("fp8-rows", 37) == [3, 3, 3]
    assert launched("int4", 1, gated=True) == [6]
    assert launched("int4", 16, gated=True) == [2]
    assert launched("int4", 17) == [2, 2]
    assert launched("int4", 33) == [], "the plain matrix is read once, int4's three times"
    assert launched("fp8-rows", 3, dtype=torch.float32) == []
    assert launched("fp8-rows", 5) == [], "the GPU has a product of its own"
    calls: list[str] = []
    found._block_scaled = partial(_stand_in, calls, "block")
    assert launched("fp8-blocks", 2) == [] and calls == ["block"], "the library was faster"
    assert launched("fp8-blocks", 3) == [2]


def check_triton_trial() -> None:
    from fenceline.layers import cuda_quantized

    def fails(*operands: object) -> torch.Tensor:
        raise RuntimeError("not on this GPU")

    right, tolerance = cuda_quantized.scaled_linear, cuda_quantized._TOLERANCE
    outcomes = ((right, True), (lambda *operands: right(*operands) * 1.3, False), (fails, False))
    try:
        cuda_quantized._TOLERANCE = 0.15  # the interpreter rounds to FP8 badly (see above)
        for product, used in outcomes:
            cuda_quantized.scaled_linear = product
            assert cuda_quantized._multiplies_fp8(torch.device("cpu"), (8, 9)) is used
    finally:
        cuda_quantized.scaled_linear, cuda_quantized._TOLERANCE = right, tolerance
    stored = stored_in("fp8-rows", 32, 256)
    products = cuda_quantized.QuantizedProducts(132, (8, 9), None, None, multiplies_fp8=False)
    assert products.few_rows(torch.randn(5, 256), stored) is None


def check_cuda_trial() -> None:
    from fenceline.layers import cuda_quantized
    from fenceline.layers.kernels.triton.skinny_gemm import Fusion
    from fenceline.layers.skinny_table import CudaConfig

    tried: set[str] = set()

    def product(
        x: torch.Tensor, stored: QuantizedFormat, config: CudaConfig, fusion: Fusion, out: torch.Tensor,
        wrong: str = "", wrong_rows: int = 0,
    ) -> None:  # fmt: skip
        name = cuda_quantized.numbers_name(stored)
        tried.add(name)
        wide = x.float()
        if fusion.norm_weight is not None:
            wide = F.rms_norm(wide, x.shape[1:], fusion.norm_weight.float(), fusion.eps)
        y = F.linear(wide, stored.dequantized(torch.float32))
        if fusion.gated:
            y = F.silu(y[:, : len(out[0])]) * y[:, len(out[0]) :]
        out.copy_(y if fusion.residual is None else fusion.residual + y)
        if wrong == name and len(x) == wrong_rows:
            out[-1] *= float("nan") if fusion.gated else 1.1

    def refuses(*operands: object) -> None:
        raise RuntimeError("not on this GPU")

    cpu = torch.device("cpu")
    for kind, names in (("fp8", {"fp8", "fp8/128"}), ("int4", {"int4/32", "int4/64", "int4/128"})):
        tried.clear()
        assert cuda_quantized._agrees(cpu, product, kind), kind
        assert tried == names, tried
        for name, rows in itertools.product(names, (1, 2, 8, 16)):
            assert not cuda_quantized._agrees(cpu, partial(product, wrong=name, wrong_rows=rows), kind)
        assert not cuda_quantized._agrees(cpu, refuses, kind)


def main() -> None:
    set_up_interpreter()
    checks = dict(
        zip(
            OTHERS,
            (
                check_rounding,
                check_static_scale,
                check_choice,
                check_plain,
                check_scaled_mm,
                check_float16,
                check_cuda_choice,
                check_cuda_trial,
                check_triton_trial,
            ),
            strict=True,
        )
    )
    for product in PRODUCTS:
        name, dtype, rows, fusion = product.split()
        checks[product] = partial(check_product, name, dtype, int(rows), fusion)
    print_outcomes(checks)


if __name__ == "__main__":
    main()
