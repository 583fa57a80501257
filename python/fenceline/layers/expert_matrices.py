"""ExpertMatrices: one matrix for each expert, in any number format, stored as grouped products read them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fenceline.config.quantization import MXFP4_GROUP, ON_LINE_METHOD, QuantConfig
from fenceline.layers.context import LayerContext, converts_fp8
from fenceline.layers.kernels.base import SILU, Routing
from fenceline.layers.kernels.four_bit import pack_halves, round_to_mxfp4
from fenceline.layers.quantized import QuantizedFormat, QuantizingSlot, make_format
from fenceline.layers.weight import WeightSlot, WeightSlots

# Matrices of all experts [num, rows, anything] → those of this process, arranged so that its part is a range of axis 2.
Arrange = Callable[[torch.Tensor], torch.Tensor]


def mxfp4_slots(
    name: str,
    data: torch.Tensor,
    scales: torch.Tensor,
    shape: tuple[int, int, int],
    arrange: Arrange,
    starts: tuple[int, int],
) -> WeightSlots:
    """The slots ``{name}_blocks`` and ``{name}_scales`` of matrices of ``shape`` [num, rows, K], both uint8: a byte has
    two numbers of a row, the first in its lower bits (OCP Microscaling Formats v1.0, as gpt-oss is published). ``data``
    and ``scales`` are the parameters in the form that ``arrange`` makes (see ``four_bit``), ``starts`` where their
    parts begin."""
    num, rows, k = shape
    groups, both = k // MXFP4_GROUP, object()
    return {
        f"{name}_blocks": WeightSlot(
            data,
            (num, rows, groups, MXFP4_GROUP // 2),
            2,
            starts[0],
            lambda blocks: arrange(_repacked(blocks)),
            together=both,
        ),
        f"{name}_scales": WeightSlot(scales, (num, rows, groups), 2, starts[1], arrange, together=both),
    }


def rounding_slot(
    data: torch.Tensor,
    scales: torch.Tensor,
    shape: tuple[int, int, int],
    arrange: Arrange,
    starts: tuple[int, int],
    dtype: torch.dtype,
) -> WeightSlot:
    """The slot of a tensor of plain matrices [num, K, rows] of ``dtype``, which are rounded to MXFP4 when they are
    loaded. See ``mxfp4_slots``."""
    num, rows, k = shape

    def rounded(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        experts = [round_to_mxfp4(matrix) for matrix in stack]  # one by one, because they are large
        return torch.stack([bits for bits, _ in experts]), torch.stack([exponents for _, exponents in experts])

    return QuantizingSlot(
        dest=data,
        full_shape=(num, k, rows),
        dim=2,
        parts=((data, starts[0]), (scales, starts[1])),
        round=rounded,
        plain_dtype=dtype,
        convert=lambda stack: arrange(stack.transpose(1, 2)),
    )


def _repacked(blocks: torch.Tensor) -> torch.Tensor:
    """Published blocks [num, rows, groups, 16] → ``four_bit``'s bytes [num, rows, K / 2]."""
    data = torch.empty(*blocks.shape[:2], blocks.shape[2] * blocks.shape[3], dtype=torch.uint8, device=blocks.device)
    for expert, own in enumerate(blocks):  # one by one, because they are large
        data[expert] = pack_halves(torch.stack((own & 15, own >> 4), -1).flatten(1))
    return data


class ExpertMatrices:
    """A matrix [rows, k] for each expert, all in one format: ``data`` [num, rows, k], or for numbers of four bits [num,
    rows, k / 2] uint8. Formats other than plain numbers have ``scales`` [num, rows, groups], and int4 also has
    ``zeros`` of this shape: see ``LayerKernels.grouped_product``."""

    def __init__(self, num: int, rows: int, k: int, context: LayerContext, config: QuantConfig | None) -> None:
        """Uninitialised, on the default device; ``config`` is the format, None for plain numbers. Raises ``ValueError``
        for a matrix that it cannot hold and for a GPU that cannot read it."""
        self.shape = num, rows, k
        self.scales: torch.Tensor | None = None
        self.zeros: torch.Tensor | None = None
        self._stored: QuantizedFormat | None = None
        self._config, self._dtype, self._kernels = config, context.dtype, context.kernels
        self._kernels.prepare_linear(rows, k, context.dtype)
        if config is None:
            self.data = torch.empty(num, rows, k, dtype=context.dtype)
            return
        if config.kind == "mxfp4":
            if k % MXFP4_GROUP:
                raise ValueError(
                    f"MXFP4: {k} input features for each rank are no groups of {MXFP4_GROUP}; choose another --tp-size,"
                    " or --ep-size"
                )
            self.data = torch.empty(num, rows, k // 2, dtype=torch.uint8)
            self.scales = torch.empty(num, rows, k // MXFP4_GROUP, dtype=torch.uint8)
        else:
            self._stored = stored = make_format(config, num * rows, k, context.dtype, of_experts=True)
            if config.kind == "fp8" and not converts_fp8(stored.data.device):
                raise ValueError(
                    "experts in fp8 need a GPU of compute capability 8.9 or more: use the model's unquantised weights"
                )
            # The scales of a row must be adjacent in memory, as grouped products read them.
            stored.scales = stored.scales.contiguous()
            self.data, self.scales = stored.data.view(num, rows, -1), stored.scales.view(num, rows, -1)
            if stored.zeros is not None:
                stored.zeros = stored.zeros.contiguous()
                self.zeros = stored.zeros.view(num, rows, -1)
        if self.data.dtype == torch.uint8:
            self._kernels.prepare_four_bits(k // self.scales.shape[2], self.zeros is not None)

    def product(
        self,
        x: torch.Tensor,
        routing: Routing,
        gated: bool = False,
        bias: torch.Tensor | None = None,
        limit: float = 0.0,
        activation: str = SILU,
    ) -> torch.Tensor:
        """See ``LayerKernels.grouped_product``. ``activation``: see ``LayerKernels.activate``."""
        fused = gated and activation == SILU
        y = self._kernels.grouped_product(
            x, self.data, routing, fused, bias=bias, limit=limit, scales=self.scales, zeros=self.zeros
        )
        return self._kernels.activate(y, activation) if gated and not fused else y

    def slots(
        self, name: str, expert: int, rows: slice, full_shape: tuple[int, int], dim: int, start: int
    ) -> WeightSlots:
        """Where the tensors of the matrix ``name`` go: into ``rows`` of that of ``expert``. See ``Weight.slots``."""
        if self._stored is None:
            return {f"{name}.weight": WeightSlot(self.data[expert, rows], full_shape, dim, start)}
        first = expert * self.shape[1]
        return self._stored.slots(name, slice(first + rows.start, first + rows.stop), full_shape, dim, start)

    def stacked_slots(
        self, name: str, full_shape: tuple[int, int, int], arrange: Arrange, start: int, halves: bool = False
    ) -> WeightSlots:
        """Where tensors with the matrices of all experts go; ``full_shape`` is [num, rows, k]. The checkpoint has one
        tensor of plain numbers, with the last two axes exchanged, or the two tensors of MXFP4. ``arrange`` turns such a
        tensor into [own, 2, rows / 2, k] if ``halves``, and this process takes the rows from ``start`` on of each half.
        Otherwise it turns it into [own, rows, k], and this process takes the inputs from ``start`` on."""
        num, rows, k = full_shape
        params = [param for param in (self.data, self.scales) if param is not None]
        starts = [start if halves else start * param.shape[2] // self.shape[2] for param in params]
        if halves:
            params = [param.unflatten(1, (2, -1)) for param in params]
        if len(params) == 1:
            return {name: WeightSlot(params[0], (num, k, rows), 2, start, lambda stack: arrange(stack.transpose(1, 2)))}
        assert self._config is not None and self._config.kind == "mxfp4"
        (data, scales), (first, second) = params, starts
        if self._config.method == ON_LINE_METHOD:
            return {name: rounding_slot(data, scales, full_shape, arrange, (first, second), self._dtype)}
        return mxfp4_slots(name, data, scales, full_shape, arrange, (first, second))
