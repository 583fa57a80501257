"""Triton's product of some rows with a weight in int4: in Triton's interpreter against float64, the choice of it, and
its machine code: the tensor core takes the weight from registers.

The interpreter is chosen when triton is imported, so the checks run in processes of their own: this file as a script.
"""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from triton_interpreter import check_shared_sums, outcomes_of, print_outcomes, set_up_interpreter

from fenceline.config.quantization import QuantConfig
from fenceline.layers.quantized import Int4Format, make_format, spread
from fenceline.layers.weight import fill_slots

pytestmark = pytest.mark.long

FUSIONS = ("plain", "bias", "norm", "gated", "residual")
# Weight rows (no multiples of a tile), K (no multiple of all blocks) and group.
SHAPES = ((144, 128, 32), (80, 320, 64), (64, 384, 128))
ROWS = (5, 37)
# Rows of the weight, rows of x and inputs of a block, warps, stages, programs that share K; then what is not as usual.
CUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "whole groups of 32": ((64, 32, 32, 4, 2, 2), {}),
    "groups of 64": ((64, 16, 64, 4, 2, 1), {}),
    "split": ((128, 16, 128, 4, 2, 3), {}),
    "more programs than blocks": ((64, 64, 64, 4, 2, 8), {}),
    "reordered by 64": ((64, 16, 64, 4, 2, 1), {"reorder": True}),
    "reordered by 128": ((64, 16, 128, 4, 2, 2), {"reorder": True}),
    "reordered by 32": ((64, 16, 32, 4, 2, 2), {"reorder": True}),
}
# The interpreter multiplies bfloat16 matrices by their bit patterns, so other types are tried.
DTYPES = {"float32": 1e-6, "float16": 1e-3}
PRODUCTS = [f"{cut}, {fusion}" for cut, fusion in itertools.product(CUTS, FUSIONS)]
OTHERS = (
    "numbers and zero points at the ends of their ranges",
    "columns in the order of the lanes",
    "which product is chosen",
    "a product that is wrong is not used",
)
VARIANTS = {  # rows of the weight, rows of x and inputs of a block, warps, stages
    "few": (64, 32, 128, 4, 4),
    "many": (128, 128, 128, 8, 3),
    "small blocks": (64, 128, 64, 4, 4),
}

results = outcomes_of(__file__)
compiled = outcomes_of(__file__, "compile")


@pytest.mark.parametrize("check", (*PRODUCTS, *OTHERS))
def test_interpreted(check: str, results: dict[str, str]) -> None:
    assert results[check] == ""


@pytest.mark.parametrize("name", [*VARIANTS, "sm_80", "sm_100", "float32", "reordering"])
def test_compiles(name: str, compiled: dict[str, str]) -> None:
    assert compiled[name] == ""


# --- the checks, run in the script -------------------------------------------------------------------------------


def stored_in(n: int, k: int, group: int) -> Int4Format:
    config = QuantConfig(method="on-line", kind="int4", group_size=group)
    stored = make_format(config, n, k, torch.float32)
    matrix = torch.randn(n, k) / k**0.5 * torch.rand(n, 1)
    fill_slots(stored.slots("x", slice(None), (n, k), 0, 0), [("x.weight", matrix)])
    assert isinstance(stored, Int4Format)
    return stored


def plain_of(stored: Int4Format) -> torch.Tensor:
    """The matrix, float64."""
    assert stored.zeros is not None
    k = stored.shape[1]
    numbers = stored.unpack(stored.data).double() - spread(stored.zeros, stored.group, k)
    return numbers * spread(stored.scales.double(), stored.group, k)


def check_product(cut: str, fusion_name: str) -> None:
    from fenceline.layers.kernels.triton.int4_gemm import Int4Config, SplitWorkspace, int4_linear
    from fenceline.layers.kernels.triton.skinny_gemm import Fusion

    workspace = SplitWorkspace(torch.device("cpu"))
    sizes, rest = CUTS[cut]
    config = Int4Config(*sizes, launch_pdl=False, **rest)
    shapes = [shape for shape in SHAPES if config.block_k <= shape[2]]
    turn = FUSIONS.index(fusion_name)  # so that the fusions of a cut share its shapes and types
    n, k, group = shapes[turn % len(shapes)]
    for number, rows in enumerate(ROWS):
        name, tolerance = list(DTYPES.items())[(turn + number) % 2]
        dtype, gated = getattr(torch, name), fusion_name == "gated"
        stored = stored_in(n, k, group)
        assert stored.zeros is not None
        x = torch.randn(rows, k).to(dtype)
        norm = torch.randn(k).to(dtype) if fusion_name in ("norm", "gated") else None
        bias = torch.randn(n).to(dtype) if fusion_name != "plain" else None
        residual = torch.randn(rows, n).to(dtype) if fusion_name == "residual" else None
        wide = x.double()
        if norm is not None:
            wide = F.rms_norm(wide, (k,), norm.double(), 1e-6).to(dtype).double()
        plain = plain_of(stored)
        want = F.linear(wide, plain, None if bias is None else bias.double())
        if gated:
            gate, up = want.chunk(2, -1)
            want = F.silu(gate) * up
        if residual is not None:
            want += residual.double()
        fusion = Fusion(norm, 1e-6, bias, gated, residual)
        out = None if residual is not None else torch.full((rows, want.shape[1]), torch.nan, dtype=dtype)
        got = int4_linear(x, stored.data, stored.scales, stored.zeros, group, config, workspace, fusion, out)
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < tolerance, f"{n}x{k} {rows} {name}: {error}"
        assert got is (out if residual is None else residual)
        assert not workspace.num_done.any()


def check_ends() -> None:
    """Every number from 0 to 15 with every zero point from 0 to 16, the largest that a checkpoint of GPTQ has."""
    from fenceline.layers.kernels.triton.int4_gemm import Int4Config, SplitWorkspace, int4_linear

    numbers = torch.arange(16).repeat(32, 2).to(torch.uint8)
    numbers = torch.stack([row.roll(shift) for shift, row in enumerate(numbers)])
    zeros = (torch.arange(32) % 17).to(torch.uint8)[:, None]
    x, scales = torch.eye(32), torch.ones(32, 1)
    want = (numbers.float() - zeros).t()
    for reorder in (False, True):
        config = Int4Config(64, 32, 32, 4, 2, reorder=reorder, launch_pdl=False)
        workspace = SplitWorkspace(torch.device("cpu"))
        got = int4_linear(x, Int4Format.pack(numbers), scales, zeros, 32, config, workspace)
        assert torch.equal(got, want), reorder


def check_reordering() -> None:
    from fenceline.layers.kernels.triton.int4_gemm import reorder_columns

    columns = torch.arange(256.0)[None, :]
    blocks = reorder_columns(columns, 64)[0].view(4, 2, 4, 4, 2)  # block, word, pair, lane, 2
    for block, word, pair, lane, half in itertools.product(range(4), range(2), range(4), range(4), range(2)):
        assert blocks[block, word, pair, lane, half] == 64 * block + 8 * (2 * lane + word) + 2 * pair + half
    x, norm = torch.randn(3, 96), torch.randn(96)
    got = reorder_columns(x, 32, norm, 1e-6)
    want = reorder_columns(F.rms_norm(x, (96,), norm, 1e-6), 32)
    torch.testing.assert_close(got, want)


def check_choice() -> None:
    from fenceline.layers import cuda_quantized
    from fenceline.layers.kernels.triton.int4_gemm import Int4Config, SplitWorkspace
    from fenceline.layers.skinny_table import CudaConfig, GpuTraits, SkinnyTable, choice_to_json, load_table, table_key

    calls: list[Int4Config] = []

    def product(*operands: Any) -> torch.Tensor:
        x, data, config = operands[0], operands[1], operands[5]
        calls.append(config)
        return x.new_zeros(len(x), len(data))

    workspace = SplitWorkspace(torch.device("cpu"))
    measured = Int4Config(128, 32, 64, 8, 3, split=2, reorder=True)
    gpu = GpuTraits("", 132, (9, 0), has_cuda_kernels=True)
    key = table_key(256, 64, 256, False, "int4/64")
    table = SkinnyTable(gpu, {key: measured})
    stored = stored_in(64, 256, 64)
    cuda_quantized.int4_linear, right = product, cuda_quantized.int4_linear  # type: ignore[assignment]
    try:
        for found, has_int4 in itertools.product((None, table), (True, False)):
            products = cuda_quantized.QuantizedProducts(
                132, (9, 0), None, None, None, found, int4=workspace if has_int4 else None
            )
            weight = cuda_quantized.CudaQuantizedWeight(stored, products)
            for rows in (2, 17, 200, 512, 513):
                calls.clear()
                assert weight.product(torch.randn(rows, 256).bfloat16()).shape == (rows, 64)
                assert len(calls) == (has_int4 and rows <= 512), (rows, calls)
                if found is not None and has_int4 and rows == 200:
                    assert calls == [measured]
            calls.clear()
            weight.product(torch.randn(20, 256))
            assert not calls, "only for bfloat16"
    finally:
        cuda_quantized.int4_linear = right
    # Up to 8 rows are the CUDA kernel's where there is one, and up to 32 where there is no other.
    for has_int4, rows, kind in (
        (True, 8, CudaConfig), (True, 9, Int4Config), (False, 32, CudaConfig), (False, 33, type(None)),
    ):  # fmt: skip
        products = cuda_quantized.QuantizedProducts(
            132, (9, 0), None, None, lambda *_: None, None, int4=workspace if has_int4 else None
        )
        choice = products._choose(torch.randn(rows, 256).bfloat16(), stored, False)
        assert isinstance(choice, kind), (rows, choice)
    stored = stored_in(4096, 1024, 128)
    few, many = (cuda_quantized.guess_int4(rows, stored, 132, True) for rows in (20, 300))
    assert (few.block_rows, few.block_n, few.split) == (32, 64, 2)
    assert (many.block_rows, many.block_n, many.split) == (128, 64, 1)
    # A file of measurements holds all fields.
    import json
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        entries = {key: choice_to_json(measured)}
        (Path(folder) / "A_GPU.json").write_text(json.dumps({"entries": entries}))
        loaded = load_table(replace(gpu, name="A GPU"), Path(folder))
        assert loaded.choose_quantized(129, 64, 256, False, "int4/64", None) == measured


def check_trial() -> None:
    from fenceline.layers import cuda_quantized
    from fenceline.layers.kernels.triton.int4_gemm import SplitWorkspace

    factor = 1.0
    tried_cuts: list[Any] = []

    def product(
        x: Any, data: Any, scales: Any, zeros: Any, group: int, config: Any, workspace: Any, fusion: Any, out: Any
    ) -> torch.Tensor:  # fmt: skip
        tried_cuts.append(config)
        if factor == 0:
            raise RuntimeError("not on this GPU")
        k = x.shape[1]
        matrix = (Int4Format.unpack(data).float() - spread(zeros, group, k)) * spread(scales, group, k)
        wide = x.float()
        if fusion.norm_weight is not None:
            wide = F.rms_norm(wide, (k,), fusion.norm_weight.float(), fusion.eps)
        y = F.linear(wide, matrix) * factor
        if fusion.gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        return y if fusion.residual is None else fusion.residual + y

    workspace = SplitWorkspace(torch.device("cpu"))
    cuda_quantized.int4_linear, right = product, cuda_quantized.int4_linear
    try:
        for tried, used in ((1.0, True), (1.1, False), (0.0, False)):
            factor = tried
            assert cuda_quantized._multiplies_int4(torch.device("cpu"), workspace) is used
        first = tried_cuts[:3]
        assert {cut.reorder for cut in first} == {True, False} and any(cut.split > 1 for cut in first)
        assert any(cut.num_warps == 8 and cut.block_rows == 128 for cut in first)
    finally:
        cuda_quantized.int4_linear = right


def ptx_of(sizes: tuple[int, int, int, int, int], capability: int = 90, x: str = "bf16", **constants: Any) -> str:
    """The PTX of a gated product. Checks that it compiles to machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fenceline.layers.kernels.triton.int4_gemm import _int4_kernel

    block_n, block_rows, block_k, num_warps, num_stages = sizes
    fixed: dict[str, Any] = {
        "K": 4096, "GROUP": 128, "HAS_BIAS": True, "GATED": True, "ADD": False, "BLOCK_N": block_n,
        "BLOCK_ROWS": block_rows, "BLOCK_K": block_k, "SPLIT": 1, "PROGRAMS": 1, "REORDERED": False,
        "PACKED": x == "bf16", "PDL": capability >= 90, "row_stride": 1,
    } | constants  # fmt: skip
    types = dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), f"*{x}")
    types |= {"words_ptr": "*i32", "scales_ptr": "*fp32", "zeros_ptr": "*u8", "partial_ptr": "*fp32"}
    types |= {"num_done_ptr": "*i32"} | dict.fromkeys(fixed, "constexpr")
    names = _int4_kernel.arg_names
    source = ASTSource(
        _int4_kernel,
        {name: types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in fixed.items()},
        {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if types.get(name, "").startswith("*") or name in ("num_out", "group_stride")
        },
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": fixed["PDL"]}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert binary.asm["cubin"] and binary.metadata.shared <= 227 << 10
    return str(binary.asm["ptx"])


def check_reordering_compiles() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fenceline.layers.kernels.triton.int4_gemm import _reorder_kernel

    fixed = {"HAS_NORM": True, "WORDS": 4, "SIZE": 4096, "PDL": True}
    types = dict.fromkeys(("x_ptr", "norm_ptr", "out_ptr"), "*bf16") | {"eps": "fp32", "k_size": "i32"}
    names = _reorder_kernel.arg_names
    source = ASTSource(
        _reorder_kernel,
        types | dict.fromkeys(fixed, "constexpr"),
        {(names.index(name),): value for name, value in fixed.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("x_ptr", "norm_ptr", "out_ptr", "k_size")},
    )
    options = {"num_warps": 8, "launch_pdl": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "ld.global.v4.b32" in ptx and ptx.count("griddepcontrol.wait") == 1


def check_machine_code(name: str) -> None:
    """The left side of each product is in registers, and all products of a block have ended before the registers are
    written again: a loop carries no product over its end."""
    sizes = VARIANTS[name]
    for constants in ({}, {"REORDERED": True}, {"SPLIT": 2, "PROGRAMS": 2, "GATED": False, "ADD": True}, {"SPLIT": 4}):
        ptx = ptx_of(sizes, **constants)
        assert check_shared_sums(ptx) == ("PROGRAMS" in constants)
        products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k16)\S*\s+\{[^}]*\},\s*(\S)", ptx)
        assert len(products) == sizes[2] // 16, products
        assert all(shape == f"m64n{sizes[1]}k16" and left == "{" for shape, left in products), products
        behind = ptx[ptx.rindex("wgmma.mma_async") :]
        assert behind.index("wgmma.wait_group.sync.aligned 0") < behind.index("bra"), behind
        assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == 1
        assert "lop3.b32" in ptx and "prefetch.global.L2" in ptx


def main() -> None:
    if sys.argv[1] == "compile":
        checks: dict[str, Any] = {name: lambda name=name: check_machine_code(name) for name in VARIANTS}
        few = VARIANTS["few"]
        checks |= {f"sm_{number}": lambda number=number: ptx_of(few, number) for number in (80, 100)}
        checks["reordering"] = check_reordering_compiles
        checks["float32"] = lambda: ptx_of((64, 16, 64, 4, 2), x="fp32")
        print_outcomes(checks)
        return
    set_up_interpreter()
    checks = {
        f"{cut}, {fusion}": lambda cut=cut, fusion=fusion: check_product(cut, fusion)
        for cut, fusion in itertools.product(CUTS, FUSIONS)
    }
    checks |= dict(zip(OTHERS, (check_ends, check_reordering, check_choice, check_trial), strict=True))
    print_outcomes(checks)


if __name__ == "__main__":
    main()
