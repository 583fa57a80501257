"""MXFP4: numbers of four bits, of which each 32 of a row share an exponent (OCP Microscaling Formats v1.0). The experts
of gpt-oss are published in this format, with two tensors for the matrices of all experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fenceline.config.quantization import MXFP4_GROUP
from fenceline.layers.kernels.four_bit import pack_halves, round_to_mxfp4
from fenceline.layers.quantized import QuantizingSlot
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
    two numbers of a row, the first in its lower bits.

    ``data`` and ``scales`` are the parameters in the form that ``arrange`` makes (see ``four_bit``), ``starts`` where
    their parts begin.
    """
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
