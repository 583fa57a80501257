"""Quantised weights: a Weight with its number format inside.

A format says how a matrix is stored, where a checkpoint's tensors go, and which numbers they stand for. All formats
store numbers of few bits, and a float32 scale for each ``group`` of them along a row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from fenceline.config.quantization import FP8_BLOCK, INT4_GROUPS, INT8_GROUP, ON_LINE_METHOD, WHOLE_ROWS, QuantConfig
from fenceline.layers.kernels.base import FP8_MAX
from fenceline.layers.kernels.four_bit import pack_halves, unpack_halves
from fenceline.layers.weight import Linear, Weight, WeightSlot, WeightSlots

FP8 = torch.float8_e4m3fn
COLUMN_ORDER = "g_idx"  # a tensor of GPTQ: the group of each column
_SMALLEST_SCALE = 1e-12  # the scale of a group that has only zeros


class QuantizedFormat(ABC):
    """A stored matrix [out_features, in_features]. A number of the matrix is (stored number - zero point) * scale.
    ``data`` [out_features, ...] holds the stored numbers, ``scales`` [out_features, ceil(in_features / group)] float32
    the scale of each group, and ``zeros`` [as scales] uint8 its zero point (None: there are none). If a row has one
    scale, ``group`` is ``in_features``. In memory the scales of all rows for the same group of columns are adjacent,
    because kernels multiply many rows at a time."""

    kind: str
    data: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group: int

    @abstractmethod
    def slots(self, name: str, rows: slice, full_shape: tuple[int, int], dim: int, start: int) -> WeightSlots:
        """See ``Weight.slots``."""

    def moves_rows(self, size: int) -> None:
        return

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix that is stored, [out_features, in_features], rounded to ``dtype``."""
        return (self.data.float() * spread(self.scales, self.group, self._shape[1])).to(dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self._shape

    def __init__(self, out_features: int, in_features: int, config: QuantConfig, dtype: torch.dtype) -> None:
        """``dtype``: the model's. Parameters are uninitialised, on the default device."""
        self._shape, self.config, self._dtype = (out_features, in_features), config, dtype

    def _allocate_groups(self, dtype: torch.dtype, group: int) -> None:
        """Makes numbers of ``dtype`` and scales for a whole row, or for each ``group`` numbers of it if the config says
        so."""
        out_features, in_features = self._shape
        self.group = group if self.config.scales in ("block", "group") else in_features
        self.data = torch.empty(out_features, in_features, dtype=dtype)
        self.scales = torch.empty(-(-in_features // self.group), out_features, dtype=torch.float32).t()

    def _rounding_slot(
        self, name: str, full_shape: tuple[int, int], dim: int, round: Rounding, *parts: tuple[torch.Tensor, int]
    ) -> WeightSlots:
        """The slot of a plain matrix, see ``QuantizingSlot``."""
        dest, dtype = parts[0][0], self._dtype
        slot = QuantizingSlot(dest=dest, full_shape=full_shape, dim=dim, parts=parts, round=round, plain_dtype=dtype)
        return {f"{name}.weight": slot}

    def group_start(self, name: str, full_shape: tuple[int, int], dim: int, start: int) -> int:
        """Where this rank's part begins in a tensor with one column for each group. Raises ``ValueError`` where the
        ranks' parts would cut a group."""
        columns = self._shape[1]
        if dim == 0:
            return start
        if columns != full_shape[1] and columns % self.group and self.group % columns:
            raise ValueError(
                f"{name}: {columns} input features for each rank cut its groups of {self.group}; choose a"
                " smaller --tp-size"
            )
        return start // self.group


class Fp8Format(QuantizedFormat):
    """E4M3 numbers (arXiv:2209.05433) with a scale for each row, or for each 128 numbers of a row. Checkpoints have
    scales for tensors, rows or blocks of 128 x 128. A scale for several rows is stored once for each of them, so that
    fused layers and ranks may cut a matrix anywhere. A kernel that multiplies in fp8 divides the input by
    ``input_scale``; None: it computes a scale for each row."""

    kind = "fp8"

    def __init__(self, out_features: int, in_features: int, config: QuantConfig, dtype: torch.dtype) -> None:
        super().__init__(out_features, in_features, config, dtype)
        self._allocate_groups(FP8, FP8_BLOCK)
        self.has_whole_blocks = config.scales == "block"  # 128 rows, from any multiple of 128, have one scale
        self.input_scale = torch.empty((), dtype=torch.float32) if config.static_input else None
        # The parts of a fused layer have the same input, so the largest of their input scales is used.
        self._input_scales = torch.empty(out_features if config.static_input else 0, dtype=torch.float32)

    def slots(self, name: str, rows: slice, full_shape: tuple[int, int], dim: int, start: int) -> WeightSlots:
        blocks = self.config.scales == "block"
        column = self.group_start(name, full_shape, dim, start) if blocks or dim == 0 else 0
        # Otherwise a block lies in two parts of this matrix, or begins in another rank's part.
        self.has_whole_blocks &= blocks and not (rows.start or 0) % FP8_BLOCK and not (dim == 0 and start % FP8_BLOCK)
        data, scales = self.data[rows], self.scales[rows]
        if self.config.method == ON_LINE_METHOD:
            return self._rounding_slot(
                name,
                full_shape,
                dim,
                lambda matrix: round_to_fp8(matrix, FP8_BLOCK if blocks else matrix.shape[1]),
                (data, start),
                (scales, column),
            )
        both = object()
        slots = {f"{name}.weight": WeightSlot(data, full_shape, dim, start, together=both)}
        num_rows = full_shape[0]
        scale_name = f"{name}.weight_scale"
        if self.config.scales == "tensor":
            slots[scale_name] = WeightSlot(
                scales, (), convert=lambda scale: scale.reshape(1, 1).expand(num_rows, 1), together=both
            )
        elif self.config.scales == "channel":
            slots[scale_name] = WeightSlot(scales, (num_rows, 1), 0, start if dim == 0 else 0, together=both)
        else:
            shape = (-(-num_rows // FP8_BLOCK), -(-full_shape[1] // FP8_BLOCK))
            slots[scale_name + "_inv" * (self.config.method == "fp8")] = WeightSlot(
                scales,
                shape,
                dim,
                column,
                lambda scale: scale.repeat_interleave(FP8_BLOCK, 0)[:num_rows],
                together=both,
            )
        if self.input_scale is not None:
            parts = self._input_scales[rows]
            slots[f"{name}.input_scale"] = WeightSlot(
                parts, (), convert=lambda scale: scale.reshape(1).expand(len(parts)), loaded=self._choose_input_scale
            )
        return slots

    def moves_rows(self, size: int) -> None:
        self.has_whole_blocks &= FP8_BLOCK % size == 0

    def _choose_input_scale(self) -> None:
        assert self.input_scale is not None
        self.input_scale.copy_(self._input_scales.amax())


class Int8Format(QuantizedFormat):
    """Integers from -128 to 127 with a scale for each row, or for each 128 numbers of a row. Checkpoints of which
    inputs are rounded too (W8A8) are multiplied with the input as it is, which is nearer to the model that was rounded.
    The tensors with scales and zero points of inputs are not used."""

    kind = "int8"

    def __init__(self, out_features: int, in_features: int, config: QuantConfig, dtype: torch.dtype) -> None:
        super().__init__(out_features, in_features, config, dtype)
        self._allocate_groups(torch.int8, INT8_GROUP)

    def slots(self, name: str, rows: slice, full_shape: tuple[int, int], dim: int, start: int) -> WeightSlots:
        by_group = self.config.scales == "group"
        first = self.group_start(name, full_shape, dim, start) if by_group or dim == 0 else 0
        data, scales = self.data[rows], self.scales[rows]
        if self.config.method == ON_LINE_METHOD:
            return self._rounding_slot(
                name,
                full_shape,
                dim,
                lambda matrix: round_to_int8(matrix, INT8_GROUP if by_group else matrix.shape[1]),
                (data, start),
                (scales, first),
            )
        n, k = full_shape
        both = object()
        shape: tuple[int, ...] = (n, -(-k // INT8_GROUP) if by_group else 1)
        convert: Convert | None = None
        if self.config.scales == "tensor":
            convert, shape = (lambda scale: scale.reshape(1, 1).expand(n, 1)), ()
        slots = {f"{name}.weight_scale": WeightSlot(scales, shape, dim, first, convert, together=both)}
        nothing = torch.empty(0)
        if self.config.packed:
            slots |= {
                f"{name}.weight_packed": WeightSlot(
                    data, (n, -(-k // 4)), dim, start, lambda words: _bytes(words)[:, :k], together=both
                ),
                f"{name}.weight_shape": WeightSlot(nothing.long(), (2,)),
            }
        else:
            slots[f"{name}.weight"] = WeightSlot(data, full_shape, dim, start, together=both)
        for unused in ("input_scale", "input_zero_point"):
            dest = nothing if unused == "input_scale" else nothing.to(torch.int8)
            slots[f"{name}.{unused}"] = WeightSlot(dest, (), convert=torch.flatten, optional=True)
        return slots


class Int4Format(QuantizedFormat):
    """Integers of four bits, from 0 to 15, with a scale and a zero point for each group along a row. ``data``
    [out_features, in_features / 2] uint8: each eight numbers of a row are a little-endian word of 32 bits. Number 2 j
    is in the four bits from bit 4 j on, and number 2 j + 1 in those from bit 16 + 4 j on. So a shift and a mask yield
    two adjacent numbers, one in each half of a word."""

    kind = "int4"

    @staticmethod
    def pack(numbers: torch.Tensor) -> torch.Tensor:
        """Numbers from 0 to 15, uint8 [N, K] → as they are stored [N, K / 2]."""
        return pack_int4(numbers)

    @staticmethod
    def unpack(data: torch.Tensor) -> torch.Tensor:
        return unpack_int4(data)

    def __init__(self, out_features: int, in_features: int, config: QuantConfig, dtype: torch.dtype) -> None:
        """Uninitialised but for the zero points, on the default device. Raises ``ValueError`` where groups do not
        divide ``in_features``; numbers that are made on-line, or have a scale for each row, get smaller groups then."""
        super().__init__(out_features, in_features, config, dtype)
        # A scale for a whole row is stored once for each of its groups, which is what the kernels read.
        whole_rows = config.group_size == WHOLE_ROWS
        self.group = INT4_GROUPS[-1] if whole_rows else config.group_size
        if whole_rows or config.method == ON_LINE_METHOD:
            self.group = math.gcd(in_features, self.group)
        if in_features % self.group or self.group not in INT4_GROUPS:
            groups = min(INT4_GROUPS) if whole_rows else config.group_size
            raise ValueError(
                f"int4: {in_features} input features for each rank are no groups of {groups}; choose another --tp-size,"
                " or --quantization fp8"
            )
        self.data = torch.empty(out_features, in_features // 2, dtype=torch.uint8)
        self.scales = torch.empty(in_features // self.group, out_features, dtype=torch.float32).t()
        self.zeros = torch.full((in_features // self.group, out_features), 8, dtype=torch.uint8).t()

    def slots(self, name: str, rows: slice, full_shape: tuple[int, int], dim: int, start: int) -> WeightSlots:
        assert self.zeros is not None
        group_start = self.group_start(name, full_shape, dim, start)
        byte_start = start if dim == 0 else start // 2
        data, scales, zeros = self.data[rows], self.scales[rows], self.zeros[rows]
        if self.config.method == ON_LINE_METHOD:
            parts = (data, byte_start), (scales, group_start), (zeros, group_start)
            rounding = partial(round_to_int4, group=self.group, pack=self.pack)
            return self._rounding_slot(name, full_shape, dim, rounding, *parts)
        n, k = full_shape
        whole_rows, all_of_them = self.config.group_size == WHOLE_ROWS, object()
        groups = 1 if whole_rows else k // self.group
        num_spread = k // self.group

        def stored(dest: torch.Tensor, shape: tuple[int, int], convert: Convert) -> WeightSlot:
            if dest is data:
                return WeightSlot(dest, shape, dim, byte_start, convert, together=all_of_them)
            spread_out = partial(_spread_out, num_spread, convert)
            return WeightSlot(dest, shape, dim, group_start, spread_out, together=all_of_them)

        if self.config.method == "compressed-tensors":
            slots = {
                "weight_packed": stored(data, (n, k // 8), lambda words: self.pack(_numbers(words, 1))),
                "weight_scale": stored(scales, (n, groups), lambda scales: scales),
                "weight_shape": WeightSlot(torch.empty(0, dtype=torch.int64), (2,)),
            }
            if self.config.has_zeros:
                slots["weight_zero_point"] = stored(zeros, (n // 8, groups), lambda words: _numbers(words, 0))
        elif self.config.method == "awq":
            slots = {
                "qweight": stored(data, (k, n // 8), lambda words: self.pack(_numbers(words, 1, _AWQ_ORDER).t())),
                "qzeros": stored(zeros, (groups, n // 8), lambda words: _numbers(words, 1, _AWQ_ORDER).t()),
                "scales": stored(scales, (groups, n), torch.Tensor.t),
            }
            if not self.config.has_zeros:
                slots["qzeros"] = replace(slots["qzeros"], together=None, optional=True)
        else:
            ones = self.config.zero_offset * 0x11111111  # one for each of a word's zero points
            slots = {
                "qweight": stored(data, (k // 8, n), lambda words: self.pack(_numbers(words, 0).t())),
                "qzeros": stored(zeros, (groups, n // 8), lambda words: _numbers(words.int() + ones, 1).t()),
                "scales": stored(scales, (groups, n), torch.Tensor.t),
                COLUMN_ORDER: WeightSlot(
                    torch.empty(0, dtype=torch.int64), (k,), convert=partial(_check_order, name, k // groups)
                ),
            }
        return {f"{name}.{suffix}": slot for suffix, slot in slots.items()}

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        assert self.zeros is not None
        columns = self._shape[1]
        zeros = spread(self.zeros, self.group, columns)
        return ((self.unpack(self.data).float() - zeros) * spread(self.scales, self.group, columns)).to(dtype)


class Int4ExpertsFormat(Int4Format):
    """The same for the matrices of experts, whose bytes are those of ``four_bit``."""

    pack = staticmethod(pack_halves)
    unpack = staticmethod(unpack_halves)


Convert = Callable[[torch.Tensor], torch.Tensor]
# For each four bits of a word, from the lowest on, the index of their number among the word's eight numbers.
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _numbers(words: torch.Tensor, dim: int, order: Sequence[int] = _IN_ORDER) -> torch.Tensor:
    """``words`` int32, each with eight four-bit numbers along ``dim`` → the numbers, uint8, with ``dim`` eight times as
    long."""
    parts: list[torch.Tensor] = [words] * len(order)
    for position, place in enumerate(order):
        parts[place] = (words >> 4 * position & 15).to(torch.uint8)
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """``words`` int32 [N, K / 4], each with four numbers plus 128 → the numbers [N, K] int8."""
    return torch.stack([(words >> 8 * place & 255) - 128 for place in range(4)], 2).to(torch.int8).flatten(1)


def _spread_out(num_groups: int, convert: Convert, stored: torch.Tensor) -> torch.Tensor:
    """Scales or zero points as a checkpoint has them → [N, num_groups]; one for a whole row is that of all groups."""
    return convert(stored).expand(-1, num_groups)


def _check_order(name: str, group: int, indices: torch.Tensor) -> torch.Tensor:
    """Checks GPTQ's tensor with the group of each column. Raises ``ValueError`` unless groups are adjacent columns."""
    expected = torch.arange(len(indices), device=indices.device) // group
    if not torch.equal(indices.to(expected.dtype), expected):
        raise ValueError(
            f"{name}.{COLUMN_ORDER}: columns are in the order of activations (desc_act), which is not supported; use a"
            " checkpoint without it"
        )
    return indices


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers from 0 to 15, uint8 [N, K], K a multiple of 8 → ``Int4Format``'s bytes [N, K / 2]."""
    low, high = numbers.reshape(len(numbers), -1, 2, 2, 2).permute(0, 1, 4, 2, 3).unbind(4)
    return (low | high << 4).flatten(1)


def unpack_int4(data: torch.Tensor) -> torch.Tensor:
    """``Int4Format``'s bytes [N, K / 2] → the numbers, uint8 [N, K]."""
    words = data.reshape(len(data), -1, 2, 2)
    return torch.stack((words & 15, words >> 4), 4).permute(0, 1, 3, 4, 2).flatten(1)


def round_to_int4(
    matrix: torch.Tensor, group: int, pack: Convert = pack_int4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """matrix [N, K] of any float type → ``Int4Format``'s data, packed by ``pack``, scales and zeros. The 16 numbers of
    a group cover the range from its smallest to its largest number and include zero exactly; the rounding error is at
    most half a step."""
    grouped = matrix.float().reshape(len(matrix), -1, group)
    low, high = grouped.amin(2).clamp_(max=0), grouped.amax(2).clamp_(min=0)
    scales = ((high - low) / 15).clamp_(min=_SMALLEST_SCALE)
    zeros = (-low / scales).round_()
    numbers = ((grouped / scales[:, :, None]).round_() + zeros[:, :, None]).clamp_(0, 15)
    return pack(numbers.to(torch.uint8).flatten(1)), scales, zeros.to(torch.uint8)


def spread(scales: torch.Tensor, group: int, num_columns: int) -> torch.Tensor:
    """The scale of each number: [N, groups] → [N, num_columns], or [N, 1] if a row has one group."""
    if scales.shape[1] == 1:
        return scales
    return scales.unsqueeze(2).expand(-1, -1, group).flatten(1)[:, :num_columns]


def round_to_fp8(matrix: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """matrix [N, K] of any float type → the nearest E4M3 numbers [N, K] and their scales [N, ceil(K / group)], which
    map the largest number of each group to the largest of E4M3."""
    numbers, scales = _scaled_to(matrix, group, FP8_MAX)
    return numbers.clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


def round_to_int8(matrix: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """matrix [N, K] of any float type → integers [N, K] from -127 to 127 and their scales [N, ceil(K / group)]."""
    numbers, scales = _scaled_to(matrix, group, 127)
    return numbers.round_().to(torch.int8), scales


def _scaled_to(matrix: torch.Tensor, group: int, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """matrix [N, K] → its numbers divided by the scales [N, ceil(K / group)], float32, and these: the largest number of
    each group becomes ``largest``."""
    num_rows, num_columns = matrix.shape
    padded = F.pad(matrix.float(), (0, -num_columns % group)).view(num_rows, -1, group)
    scales = (padded.abs().amax(2) / largest).clamp_(min=_SMALLEST_SCALE)
    return (padded / scales[:, :, None]).view(num_rows, -1)[:, :num_columns], scales


# A plain matrix [N, K] on the parameter's device → its numbers and scales (and zero points) as a format stores them.
Rounding = Callable[[torch.Tensor], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizingSlot(WeightSlot):
    """A slot that takes a plain matrix of the model's type, rounds the whole matrix, and keeps its part. ``parts``: for
    each tensor that ``round`` returns, the parameter and where its part begins along ``dim``."""

    parts: tuple[tuple[torch.Tensor, int], ...]
    round: Rounding
    plain_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.plain_dtype

    @property
    def nbytes(self) -> int:
        return sum(param.nbytes for param, _ in self.parts)

    def check_type(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ValueError(f"weight {name} is {tensor.dtype}; use the model's unquantised weights")

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.check(name, tensor)
        self.check_type(name, tensor)
        tensor = tensor.to(self.dest.device)
        rounded = self.round(tensor if self.convert is None else self.convert(tensor))
        for (param, start), values in zip(self.parts, rounded, strict=True):
            param.copy_(values.narrow(self.dim, start, param.shape[self.dim]))


class QuantizedWeight(Weight):
    """A quantised weight, dequantised and multiplied by torch's operators, on any device: the reference for kernels."""

    def __init__(self, stored: QuantizedFormat, linear: Linear = F.linear) -> None:
        super().__init__(*stored.shape)
        self.linear = linear
        self.stored = stored
        self.kind = stored.kind

    def slots(self, name: str, rows: slice, full_shape: tuple[int, int], dim: int, start: int) -> WeightSlots:
        return self.stored.slots(name, rows, full_shape, dim, start)

    def moves_rows(self, size: int) -> None:
        self.stored.moves_rows(size)

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self.linear(x, self.stored.dequantized(x.dtype), bias)
        return y if out is None else out.copy_(y)


def make_format(
    config: QuantConfig, out_features: int, in_features: int, dtype: torch.dtype, of_experts: bool = False
) -> QuantizedFormat:
    """The storage of a matrix in the format ``config``, uninitialised, on the default device. ``dtype``: the model's.
    ``of_experts``: grouped products read it. Raises ``ValueError`` for a matrix that the format cannot hold."""
    formats: dict[str, type[Fp8Format] | type[Int8Format] | type[Int4Format]] = {
        "fp8": Fp8Format,
        "int8": Int8Format,
        "int4": Int4ExpertsFormat if of_experts else Int4Format,
    }
    return formats[config.kind](out_features, in_features, config, dtype)
