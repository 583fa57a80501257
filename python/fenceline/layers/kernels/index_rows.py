"""An indexer's queries and keys in FP8, as DeepSeek deploys them: multiplied by a Hadamard matrix, which changes no
product of theirs and spreads large features over all, and rounded to e4m3 with a scale for each vector."""

from __future__ import annotations

import torch

_MAX = torch.finfo(torch.float8_e4m3fn).max
_LEAST = 1e-4  # of a vector's largest feature, so that a scale is never zero


def spread(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] float32, n a power of two, times the Hadamard matrix of Sylvester's construction / sqrt(n)."""
    size, num = 1, x.shape[-1]
    assert num & (num - 1) == 0, f"{num} is no power of two"
    while size < num:
        first, second = x.unflatten(-1, (-1, 2, size)).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        size *= 2
    return x * num**-0.5


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., n] float32 → e4m3 numbers of its shape and scales [..., 1] float32, whose product is near x."""
    scales = x.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / _MAX
    return (x / scales).to(torch.float8_e4m3fn), scales


def packed(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A result of ``rounded`` as the pool keeps it: uint8 [..., n + 4], the scale last."""
    return torch.cat((numbers.view(torch.uint8), scales.view(torch.uint8)), -1)


def unpacked(rows: torch.Tensor) -> torch.Tensor:
    """Rows of the pool [N, features] in float32. Those of bytes are what ``packed`` has returned."""
    if rows.dtype != torch.uint8:
        return rows.float()
    return rows[:, :-4].view(torch.float8_e4m3fn).float() * rows[:, -4:].contiguous().view(torch.float32)
