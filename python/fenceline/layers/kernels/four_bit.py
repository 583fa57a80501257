"""The storage of experts' matrices with four bits for each number: integers with zero points (int4), or MXFP4.

Of each 32 numbers of a row, byte i has number i in its low half and number i + 16 in its high half. So adjacent bytes
are multiplied by adjacent inputs.
"""

from __future__ import annotations

import torch

from fenceline.config.quantization import MXFP4_GROUP

_BLOCK = 32  # numbers that are packed together
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitudes of E2M1 numbers; the highest bit is the sign
_BIAS = 127  # of an exponent, E8M0


def pack_halves(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits, uint8 [..., K], K a multiple of 32 → bytes [..., K / 2]."""
    low, high = numbers.unflatten(-1, (-1, 2, _BLOCK // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_halves(data: torch.Tensor) -> torch.Tensor:
    """Bytes [..., K / 2] → the numbers, uint8 [..., K]."""
    blocks = data.unflatten(-1, (-1, _BLOCK // 2))
    return torch.stack((blocks & 15, blocks >> 4), -2).flatten(-3)


def four_bit_numbers(
    data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers that ``data`` [..., K / 2] stores, [..., K] of ``dtype``. With ``zeros`` [..., groups] uint8 they are
    integers: (stored number - zero point of its group) * scale of its group, ``scales`` [..., groups] float32. Without,
    they are MXFP4 (OCP Microscaling Formats v1.0): E2M1 numbers times 2 ** (exponent of its group - 127), with the
    exponents in ``scales`` [..., groups] uint8."""
    numbers = unpack_halves(data)
    grouped = numbers.unflatten(-1, (scales.shape[-1], -1))
    if zeros is not None:
        return ((grouped.float() - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(-2).to(dtype)
    # Computed from the two bits of exponent and one of fraction, because a graph could not capture a lookup table that
    # is copied from the host.
    size = (grouped & 7).int()
    exponent = size >> 1
    twice = torch.where(exponent > 0, (2 | size & 1) << (exponent - 1).clamp_(min=0), size)
    values = torch.where(grouped > 7, -twice, twice).float()
    return torch.ldexp(values, scales.int().unsqueeze(-1) - _BIAS - 1).flatten(-2).to(dtype)


def round_to_mxfp4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """matrix [N, K] of any float type, K a multiple of 32 → MXFP4's data and exponents. A group's exponent is that of
    its largest number minus E2M1's largest exponent; the numbers are the nearest E2M1 numbers."""
    grouped = matrix.float().unflatten(-1, (-1, MXFP4_GROUP))
    largest = grouped.abs().amax(-1).clamp_(min=2.0**-100)
    exponents = torch.frexp(largest).exponent - 1 - 2
    sizes = torch.ldexp(grouped.abs(), -exponents.unsqueeze(-1))
    values = torch.tensor(_E2M1, device=matrix.device)
    bits = torch.bucketize(sizes.contiguous(), (values[1:] + values[:-1]) / 2).to(torch.uint8)
    bits |= (grouped < 0).to(torch.uint8) << 3
    return pack_halves(bits.flatten(-2)), (exponents + _BIAS).to(torch.uint8)
