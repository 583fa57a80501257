"""Torch's operators on a CPU, so used that a row's result is the same bits whatever rows are computed beside it.

Libraries choose the order of a product's sums by its shape. So rows are multiplied ``_ROWS`` at a time, always in the
same shape. What remains to be shown, that a row's place in such a tile has no effect, depends on the library and its
number of threads, and is tried once for each shape, when the first weight of this shape is made. Element-wise operators
compute the last elements of a tensor, or of a thread's part, by other code than the rest; a few of them, which are
replaced here, then round differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fenceline.layers.kernels.base import GELU, RELU, RELU2, SILU, LayerKernels

_ROWS = 8
_tried: set[tuple[object, ...]] = set()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` of x [T, K]: [T, N]. Raises ``ValueError`` with the remedy if this machine's products depend on a
    row's place."""
    n, k = weight.shape
    try_products(n, k, weight.dtype, _ROWS, F.linear)
    out = x.new_empty(len(x), n)
    for rows, into in zip(x.split(_ROWS), out.split(_ROWS), strict=True):
        missing = _ROWS - len(rows)
        tile = F.linear(F.pad(rows, (0, 0, 0, missing)) if missing else rows, weight, bias)
        into.copy_(tile[: len(into)])
    return out


def try_products(
    n: int, k: int, dtype: torch.dtype, num_rows: int, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Multiply ``num_rows`` rows of ``k`` numbers by a matrix [n, k], then the same rows in other places. Each case is
    tried once in a process. Raises ``ValueError`` with the remedy if the results differ."""
    case = (n, k, dtype, num_rows, torch.get_num_threads(), product)
    if case in _tried:
        return
    generator = torch.Generator().manual_seed(0)
    rows, matrix = (torch.randn(num, k, generator=generator).to(dtype) for num in (num_rows, n))
    result = product(rows, matrix)
    for shift in range(1, num_rows):
        places = torch.arange(num_rows).roll(shift)
        if not torch.equal(product(rows[places], matrix), result[places]):
            raise ValueError(
                f"--enable-deterministic-inference: on this CPU the products of a [{n}, {k}] matrix with"
                f" {torch.get_num_threads()} threads depend on a row's place; set OMP_NUM_THREADS=1 in the environment"
            )
    _tried.add(case)


class FixedOrderKernels(LayerKernels):
    """``LayerKernels`` by ``linear``, and without the operators whose last elements round differently."""

    fixed_order = True

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, weight, bias)

    def prepare_linear(self, n: int, k: int, dtype: torch.dtype) -> None:
        try_products(n, k, dtype, _ROWS, F.linear)

    def by_head(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        for rows, own, into in zip(x.unbind(1), weight, out.unbind(1), strict=True):
            into.copy_(linear(rows.contiguous(), own))
        return out

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return (1 + (-x.float()).exp()).reciprocal().to(x.dtype)

    def activate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if activation in (RELU, RELU2):
            return super().activate(gate_up, activation)
        gate, up = gate_up.float().chunk(2, dim=-1)
        if activation == SILU:
            share = (1 + (-gate).exp()).reciprocal()
        elif activation == GELU:
            share = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
        else:
            share = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)))
        return (gate * share).to(gate_up.dtype) * up.to(gate_up.dtype)
