"""Reads the header of a GGUF file, llama.cpp's format: its metadata, and the types, shapes and places of its tensors.

A header is untrusted: each count and length is compared with the rest of the file before anything is allocated.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fenceline.config import ConfigError
from fenceline.config.config_reader import MOST

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Types of metadata by their numbers, as struct calls them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 20  # entries of metadata, and tensors: far beyond any model
_MOST_NAME = 256
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

Value = bool | int | float | str


@dataclass(frozen=True, slots=True)
class TensorType:
    """A number format of ggml: ``numbers`` of a row share a block of ``nbytes``."""

    name: str
    numbers: int
    nbytes: int


TENSOR_TYPES: Mapping[int, TensorType] = {
    number: TensorType(name, numbers, nbytes)
    for number, name, numbers, nbytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2),
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (20, "IQ4_NL", 32, 18), (23, "IQ4_XS", 256, 136),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
    )
}  # fmt: skip
# Types that the package gguf dequantises. All others of at least a block are dequantised here (models/gguf_weights.py).
BY_PACKAGE = frozenset(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ3_S", "IQ2_S", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4"))


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of ``shape``, rows first, whose blocks begin at byte ``offset`` of the file."""

    type: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.numbers * self.type.nbytes


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """An array in the metadata of ``path``, which is read when it is asked for: a vocabulary is large, and few
    processes need it."""

    path: Path
    kind: int
    length: int
    offset: int

    def values(self) -> list[Value]:
        with _Cursor.over(self.path) as cursor:
            cursor.at = self.offset
            if self.kind == _STRING:
                return [cursor.string() for _ in range(self.length)]
            return list(cursor.numbers(_SCALARS[self.kind], self.length))


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a file says before its numbers."""

    path: Path
    metadata: Mapping[str, Value | GGUFArray]
    tensors: Mapping[str, GGUFTensor]


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a file that has the ending .gguf or begins like one (ollama's have no ending)."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def names_of_parts(name: str) -> list[str]:
    """The files of a model of which ``name`` is one: itself, or NAME-00001-of-00004.gguf and the others, in order."""
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count:
        return [name]
    return [f"{found['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def parts_of(path: Path) -> list[Path]:
    """The same for a file at ``path``. Raises ``ConfigError`` if one is missing."""
    names = names_of_parts(path.name)
    missing = [name for name in names if not path.with_name(name).is_file()]
    if len(names) > 1 and missing:
        raise ConfigError(
            f"{path}: {len(missing)} of the model's {len(names)} files are missing, first {missing[0]}; download them"
            " into the same folder"
        )
    return [path.with_name(name) for name in names]


def read_header(path: Path) -> GGUFHeader:
    """The header of the file at ``path``. Raises ``ConfigError``, one line with the file and the remedy, if the file is
    damaged, truncated, or in a version that is not read."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    return _read_header(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _read_header(path: Path, size: int, changed_ns: int) -> GGUFHeader:
    with _Cursor.over(path) as cursor:
        return cursor.header()


class _Cursor:
    """Reads values one after the other, and nothing beyond the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    @classmethod
    def over(cls, path: Path) -> _Cursor:
        try:
            with path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise ConfigError(
                        f"{path}: is no GGUF file, it does not begin with GGUF; download it again (git lfs pull)"
                    )
                return cls(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self.data.close()

    def damaged(self, why: str) -> ConfigError:
        return ConfigError(f"{self.path}: truncated or damaged ({why}); download the file again")

    def take(self, nbytes: int) -> int:
        """Where the next ``nbytes`` begin, which count as read."""
        begin = self.at
        if nbytes > len(self.data) - begin:
            raise self.damaged(f"{nbytes} bytes are announced at {begin}, the file has {len(self.data)}")
        self.at = begin + nbytes
        return begin

    def number(self, kind: str) -> int:
        value: int = struct.unpack_from(f"<{kind}", self.data, self.take(struct.calcsize(f"<{kind}")))[0]
        return value

    def numbers(self, kind: str, count: int) -> tuple[Value, ...]:
        return struct.unpack_from(f"<{count}{kind}", self.data, self.take(count * struct.calcsize(f"<{kind}")))

    def string(self) -> str:
        length = self.number("Q")
        begin = self.take(length)
        if length > MOST:
            raise self.damaged(f"a text of {length} bytes")
        return str(self.data[begin : begin + length], "utf-8", "replace")

    def name(self) -> str:
        text = self.string()
        if len(text) > _MOST_NAME or not text.isprintable():
            raise self.damaged(f"a name of {len(text)} characters that is none")
        return text

    def header(self) -> GGUFHeader:
        self.take(len(MAGIC))
        version = self.number("I")
        if version not in _VERSIONS:
            order = ", for machines of another byte order" if version & 0xFFFF == 0 else ""
            raise ConfigError(f"{self.path}: GGUF version {version}{order} is not read; download a newer conversion")
        num_tensors, num_entries = self.number("Q"), self.number("Q")
        if max(num_tensors, num_entries) > _MOST_ENTRIES:
            raise self.damaged(f"{num_tensors} tensors and {num_entries} entries are announced")
        metadata: dict[str, Value | GGUFArray] = {}
        for _ in range(num_entries):
            key = self.name()
            metadata[key] = self.value(key)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment % 8 or not 0 < alignment <= MOST:
            raise self.damaged(f"general.alignment is {alignment!r}")
        described = [self.described() for _ in range(num_tensors)]
        begin = self.at + -self.at % alignment
        tensors = {name: self.tensor(name, number, shape, begin + at) for name, shape, number, at in described}
        if len(tensors) < num_tensors:
            raise self.damaged("a tensor comes twice")
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < begin or tensor.offset % alignment:
                raise self.damaged(f"tensor {name} begins at {tensor.offset}, inside another or between two places")
            begin = tensor.offset + tensor.nbytes
        return GGUFHeader(self.path, metadata, tensors)

    def value(self, key: str) -> Value | GGUFArray:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], 1)[0]
        if kind != _ARRAY:
            raise self.damaged(f"{key} has the unknown type {kind}")
        inside, length = self.number("I"), self.number("Q")
        if length > MOST or (inside != _STRING and inside not in _SCALARS):
            raise self.damaged(f"{key} is an array of {length} values of type {inside}")
        array = GGUFArray(self.path, inside, length, self.at)
        if inside == _STRING:
            for _ in range(length):
                self.take(self.number("Q"))
        else:
            self.take(length * struct.calcsize(f"<{_SCALARS[inside]}"))
        return array

    def described(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor. The file has the shape's last dimension first."""
        name, dims = self.name(), self.number("I")
        if not 1 <= dims <= 4:
            raise self.damaged(f"tensor {name} has {dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(dims))[::-1]
        return name, shape, self.number("I"), self.number("Q")

    def tensor(self, name: str, number: int, shape: tuple[int, ...], offset: int) -> GGUFTensor:
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            known = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise ConfigError(
                f"{self.path}: tensor {name} is of ggml's type {number}, which is not read ({known} are); choose"
                " another quantisation of the model"
            )
        if min(shape) < 1 or shape[-1] % kind.numbers:
            raise self.damaged(f"tensor {name} has shape {list(shape)} in {kind.name}")
        tensor = GGUFTensor(kind, shape, offset)
        if offset + tensor.nbytes > len(self.data):
            raise self.damaged(f"tensor {name} ends at {offset + tensor.nbytes}, the file at {len(self.data)}")
        return tensor
