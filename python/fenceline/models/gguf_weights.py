"""Reads the tensors of GGUF files: quantised numbers become floats, block by block, on the default device."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fenceline.config.gguf_file import TensorType
from fenceline.config.gguf_model import StoredPiece, header_type
from fenceline.config.quantization import QuantConfig, gguf_pieces

# So many numbers become float32 at a time: on a CPU those that its caches hold, which is three times as fast.
_CHUNKS = {"cpu": 1 << 19, "cuda": 1 << 24}


class GGUFWeights:
    """The file at ``path`` with the methods of safetensors' ``safe_open``: names and shapes are those of the checkpoint
    that it was made from. Quantised tensors become ``dtype`` on the default device, unless they are kept according to
    ``quantization``; the others are memory-mapped."""

    def __init__(self, path: Path, dtype: torch.dtype, quantization: QuantConfig | None = None) -> None:
        self._pieces = gguf_pieces(path, quantization)
        self._dtype = dtype
        with path.open("rb") as file:
            # A private mapping: torch wants to be allowed to write.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __enter__(self) -> GGUFWeights:
        return self

    def __exit__(self, *_: object) -> None:
        pass  # tensors may still refer to the mapping, which ends with the last of them

    def keys(self) -> list[str]:
        return list(self._pieces)

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        tensor = self._pieces[name].tensor
        return tensor.nbytes if self._pieces[name].expert is None else tensor.nbytes // tensor.shape[0]

    def get_slice(self, name: str) -> _Described:
        return _Described(self._pieces[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        piece = self._pieces[name]
        tensor, shape, nbytes = piece.tensor, piece.shape, self.nbytes(name)
        begin = tensor.offset + nbytes * (piece.expert or 0)
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=nbytes, offset=begin)
        plain = _PLAIN.get(tensor.type.name)
        if piece.part == "weight_shape":
            return torch.tensor(tensor.shape[-2:], device="cpu")
        if piece.part != "weight":
            values = _kept(piece.part, raw.view(-1, tensor.type.nbytes))
        else:
            values = raw.view(plain) if plain is not None else dequantised(tensor.type, raw, self._dtype)
        values = values.view(shape)
        if piece.heads:  # (head, pair, first or second of the pair) → (head, first or second, pair)
            values = values.view(piece.heads, -1, 2, *shape[1:]).transpose(1, 2).reshape(shape)
        return values.float() - piece.minus if piece.minus else values


class _Described:
    def __init__(self, piece: StoredPiece) -> None:
        self._piece = piece

    def get_shape(self) -> list[int]:
        return list(self._piece.shape)

    def get_dtype(self) -> str:
        return header_type(self._piece)


_PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _kept(part: str, blocks: torch.Tensor) -> torch.Tensor:
    """The scales of blocks in Q4_0, float32, or their numbers, words int32 with each eight, the first in the lowest
    bits. On the CPU."""
    if part == "weight_scale":
        return _half(blocks, 0)
    numbers = _split(blocks[:, 2:], 4, 16).view(-1, 8)
    words = numbers[:, 0].int()
    for place in range(1, 8):
        words |= numbers[:, place].int() << 4 * place
    return words


def dequantised(kind: TensorType, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of ``raw``, [bytes] uint8 on the CPU, as ``dtype`` on the default device. Memory for float32 is
    needed for a part of them at a time. Those of ``BY_PACKAGE`` need the package gguf."""
    blocks = raw.view(-1, kind.nbytes)
    values = torch.empty(len(blocks), kind.numbers, dtype=dtype)
    function = FORMATS.get(kind.name) or partial(_by_package, name=kind.name)
    step = _CHUNKS[values.device.type] // kind.numbers
    for begin in range(0, len(blocks), step):
        values[begin : begin + step] = function(blocks[begin : begin + step].to(values.device))
    return values


def _by_package(blocks: torch.Tensor, name: str) -> torch.Tensor:
    import gguf

    values: Any = gguf.quants.dequantize(blocks.cpu().numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(values).to(blocks.device)


# --- formats: blocks [N, bytes] uint8 → numbers [N, 32 or 256] float32


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The float16 at byte ``begin`` of each block, [N, 1] float32."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _split(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Numbers of ``bits`` bits, [N, numbers] uint8, of which byte i of a run of ``run`` bytes has every ``run``-th: the
    first in its lowest bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    numbers = packed.reshape(len(packed), -1, 1, run) >> shifts.view(1, 1, -1, 1)
    return (numbers & ((1 << bits) - 1)).flatten(1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """The bits of each byte, the lowest first: [N, bytes] → [N, 8 * bytes] uint8."""
    return _split(packed.reshape(-1, 1), 1, 1).view(len(packed), -1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_split(blocks[:, 2:], 4, 16).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _split(blocks[:, 4:], 4, 16).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _split(blocks[:, 6:], 4, 16) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (numbers.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _split(blocks[:, 8:], 4, 16) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * numbers.float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _scaled(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Numbers [N, 256] times scales [N, groups] of their groups."""
    return (numbers.view(*scales.shape, -1).float() * scales.unsqueeze(-1)).flatten(1)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, numbers = blocks[:, :16], _split(blocks[:, 16:80], 2, 32)
    least = _half(blocks, 82) * (scales >> 4).float()
    return _scaled(numbers, _half(blocks, 80) * (scales & 15).float()) - least.repeat_interleave(16, 1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    high = _split(blocks[:, :32], 1, 32)
    numbers = _split(blocks[:, 32:96], 2, 32).to(torch.int8) - ((high ^ 1) << 2).to(torch.int8)
    scales = (_split(blocks[:, 96:104], 4, 8) | _split(blocks[:, 104:108], 2, 4) << 4).float() - 32
    return _scaled(numbers, _half(blocks, 108) * scales)


def _scales_and_leasts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and subtrahends [N, 8] of Q4_K and Q5_K: six bits each, in twelve bytes."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)), 1)
    leasts = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)), 1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * leasts.float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, leasts = _scales_and_leasts(blocks)
    return _scaled(_split(blocks[:, 16:], 4, 32), scales) - leasts.repeat_interleave(32, 1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, leasts = _scales_and_leasts(blocks)
    numbers = _split(blocks[:, 48:], 4, 32) | _split(blocks[:, 16:48], 1, 32) << 4
    return _scaled(numbers, scales) - leasts.repeat_interleave(32, 1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _split(blocks[:, :128], 4, 64) | _split(blocks[:, 128:192], 2, 32) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _scaled(numbers.to(torch.int8) - 32, _half(blocks, 208) * scales)


_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4


def _levels(numbers: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_LEVELS, dtype=torch.int8, device=numbers.device)[numbers.long()]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _levels(_split(blocks[:, 2:], 4, 16)).float()


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = _split(blocks[:, 4:8].reshape(-1, 1), 4, 1).view(len(blocks), 8)
    high = _split(blocks[:, 2:4].reshape(-1, 1), 2, 1).view(len(blocks), 8)
    return _scaled(_levels(_split(blocks[:, 8:], 4, 16)), _half(blocks, 0) * ((low | high << 4).float() - 32))


# The others are those of BY_PACKAGE.
FORMATS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "IQ4_NL": _iq4_nl,
        "IQ4_XS": _iq4_xs,
    }
)
