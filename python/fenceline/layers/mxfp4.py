"""MXFP4: numbers of four bits, of which each 32 in a row share an exponent (OCP Microscaling Formats v1.0), as the
experts of gpt-oss are published. They are turned into plain numbers while they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fenceline.layers.weight import WeightSlot

GROUP = 32  # numbers with one exponent, two of which are in a byte, the lower bits first
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the highest bit is the sign
_BIAS = 127  # of an exponent, E8M0


def dequantized(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``blocks`` [..., groups, 16] and ``scales`` [..., groups], both uint8 → the numbers [..., groups * 32]."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=blocks.device)
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    spread = torch.ldexp(values[numbers.int()], scales.int().unsqueeze(-1) - _BIAS)
    return spread.flatten(-2).to(dtype)


@dataclass(slots=True)
class _Halves:
    """What has come of one matrix: its numbers and exponents are separate tensors of the checkpoint, in any order."""

    blocks: torch.Tensor | None = None
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Slot(WeightSlot):
    """One of the two tensors; the second that comes fills ``dest``, matrix by matrix of the first axis. ``convert``
    brings a matrix of plain numbers [rows, K] into the form of which ``dest[i]`` takes its part along ``dim``."""

    half: str
    halves: _Halves = field(compare=False)
    matrix: Callable[[torch.Tensor], torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def nbytes(self) -> int:
        return self.dest.nbytes if self.half == "blocks" else 0  # both fill the same parameter

    @property
    def together(self) -> object:
        """See ``WeightSlot.together``."""
        return self.halves

    def check_type(self, name: str, tensor: torch.Tensor) -> None:
        """See ``WeightSlot.check_type``."""
        if tensor.dtype != torch.uint8:
            raise ValueError(f"weight {name} is {tensor.dtype}, it must be uint8 (MXFP4)")

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """See ``WeightSlot.load``."""
        self.check(name, tensor)
        self.check_type(name, tensor)
        setattr(self.halves, self.half, tensor.clone())  # it is valid until the next one is read
        blocks, scales = self.halves.blocks, self.halves.scales
        if blocks is None or scales is None:
            return
        device, size = self.dest.device, self.dest.shape[1 + self.dim]
        for index, dest in enumerate(self.dest):
            plain = self.matrix(
                dequantized(blocks[index].to(device), scales[index].to(device), self.dest.dtype)
            )
            dest.copy_(plain.narrow(self.dim, self.start, size))
        self.halves.blocks = self.halves.scales = None


def mxfp4_slots(
    name: str,
    dest: torch.Tensor,
    shape: tuple[int, int, int],
    dim: int,
    start: int,
    matrix: Callable[[torch.Tensor], torch.Tensor] = lambda plain: plain,
) -> dict[str, WeightSlot]:
    """The slots ``{name}_blocks`` and ``{name}_scales`` of matrices of ``shape`` [number, rows, K]: see ``Mxfp4Slot``.

    Raises ``ValueError`` where groups do not divide K."""
    num, rows, k = shape
    if k % GROUP:
        raise ValueError(f"{name}: {k} input features are no groups of {GROUP}, which MXFP4 needs")
    halves = _Halves()
    shapes = {
        "blocks": (num, rows, k // GROUP, GROUP // 2),
        "scales": (num, rows, k // GROUP),
    }
    return {
        f"{name}_{half}": Mxfp4Slot(dest, full, dim, start, half=half, halves=halves, matrix=matrix)
        for half, full in shapes.items()
    }
