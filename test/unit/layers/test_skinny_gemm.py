"""The Triton products of few rows against float64, in Triton's interpreter.

The interpreter is chosen when triton is imported, so the cases run in a process of their own: this file as a script.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from triton_interpreter import outcomes_of, print_outcomes, set_up_interpreter

ROWS = (1, 5, 17)  # each a kernel, or a padding, of its own
# N and K: whole blocks, ragged blocks, less than a block, K in segments.
SHAPES = ((48, 64), (50, 72), (7, 40), (50, 300))
FUSIONS = ("plain", "bias", "norm", "gated", "residual")
# The interpreter multiplies bfloat16 matrices by their bit patterns, so two rows or more are tried in float16.
DTYPES = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2}


@dataclass(frozen=True, slots=True)
class Case:
    dtype: str
    rows: int
    n: int
    k: int
    fusion: str


CASES = [
    Case(dtype, rows, n, k, fusion)
    for dtype, rows, (n, k), fusion in itertools.product(DTYPES, ROWS, SHAPES, FUSIONS)
    if (dtype == "bfloat16") <= (rows == 1) and (dtype == "float32" or (n, k) == SHAPES[1])
]


CHECKS = [f"{dtype} {fusion}" for dtype, fusion in itertools.product(DTYPES, FUSIONS)]
results = outcomes_of(__file__)


@pytest.mark.parametrize("name", CHECKS)
def test_agrees_with_float64_whatever_the_other_rows_are(name: str, results: dict[str, str]) -> None:
    assert results[name] == ""


# --- the checks, run in the script -------------------------------------------------------------------------------


def check(name: str) -> None:
    dtype, fusion = name.split()
    cases = [case for case in CASES if (case.dtype, case.fusion) == (dtype, fusion)]
    assert cases
    for case in cases:
        error, change = _measure(case)
        assert error < DTYPES[dtype] and change == 0, (case, error, change)


def _measure(case: Case) -> list[float]:
    from fenceline.layers.kernels.triton.skinny_gemm import Fusion, SplitWorkspace, TritonConfig, skinny_linear

    dtype = getattr(torch, case.dtype)
    x = torch.randn(case.rows, case.k).to(dtype)
    out = case.n // 2 if case.fusion == "gated" else case.n
    weight = (torch.randn(2 * out if case.fusion == "gated" else out, case.k) / case.k**0.5).to(dtype)
    norm = torch.randn(case.k).to(dtype) if case.fusion in ("norm", "gated") else None
    bias = torch.randn(len(weight)).to(dtype) if case.fusion != "plain" else None
    residual = torch.randn(case.rows, out).to(dtype) if case.fusion == "residual" else None
    want = _reference(x, weight, norm, bias, case.fusion == "gated", residual)
    config = TritonConfig(16, 32, 4, launch_pdl=False, split=3 if case.k == 300 else 1)
    workspace = SplitWorkspace(x.device)
    fusion = Fusion(norm, 1e-6, bias, case.fusion == "gated", None if residual is None else residual.clone())
    got = skinny_linear(x, weight, config, fusion, None, workspace)
    # The same last row among other rows of the same number.
    others = torch.cat([torch.randn(case.rows - 1, case.k).to(dtype), x[-1:]])
    fusion_again = replace(fusion, residual=None if residual is None else residual.clone())
    again = skinny_linear(others, weight, config, fusion_again, None, workspace)
    assert residual is None or got is fusion.residual
    error = ((got.double() - want).norm() / want.norm()).item()
    return [error, (again[-1] - got[-1]).abs().max().item()]


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor | None,
    bias: torch.Tensor | None,
    gated: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    wide = x.double()
    if norm is not None:
        wide = F.rms_norm(wide, norm.shape, norm.double(), 1e-6)
    y = F.linear(wide, weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.double()


if __name__ == "__main__":
    set_up_interpreter()
    print_outcomes({name: partial(check, name) for name in CHECKS})
