"""What one page of the KV cache consists of (KVLayout): the only source of the cache's sizes, also where torch is not
loaded."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

INDEX = "index"  # the name of the row by which tokens are selected
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class KVRow:
    """What one token keeps in one tensor of one layer: ``shape`` elements of ``dtype`` (as torch names it), contiguous.
    ``name`` says what it is: ``k``, ``v``, ``latent`` or ``index``. The layer asks the pool for the row by this name,
    which is also in reports and in the keys of stored pages. ``replicated``: all ranks have the same."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    replicated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def share(self, num_ranks: int) -> KVRow:
        """What one of ``num_ranks`` ranks keeps of the row on the host: its part if the row is replicated, as bytes.
        The row is divided into as many equal parts as its bytes allow."""
        num_shares = math.gcd(self.nbytes, num_ranks) if self.replicated else 1
        return self if num_shares == 1 else KVRow(self.name, (self.nbytes // num_shares,), "uint8")


def keys_and_values(num_kv_heads: int, head_dim: int, dtype: str) -> tuple[KVRow, ...]:
    """The rows of a layer that keeps keys and values: two of [num_kv_heads, head_dim]."""
    shape = (num_kv_heads, head_dim)
    return KVRow("k", shape, dtype), KVRow("v", shape, dtype)


def latent(width: int, dtype: str) -> tuple[KVRow, ...]:
    """The row of a layer that keeps one compressed vector of ``width`` elements (MLA), like one head of keys."""
    return (KVRow("latent", (1, width), dtype, replicated=True),)


def index_keys(head_dim: int, dtype: str) -> tuple[KVRow, ...]:
    """The row of a layer with an indexer, which selects the tokens to attend to: one key, beside the latent. In FP8 the
    row is of bytes, and ends with the key's scale, a float32."""
    if dtype == "float8_e4m3fn":
        return (KVRow(INDEX, (1, head_dim + 4), "uint8", replicated=True),)
    return (KVRow(INDEX, (1, head_dim), dtype, replicated=True),)


def group_means(num_kv_heads: int, head_dim: int, group: int, dtype: str) -> tuple[KVRow, ...]:
    """The row of a layer that selects blocks of tokens: the means of the keys of each ``group`` successive tokens,
    which lie one after the other in a page. Their rows together have the mean of each head, so a token's row has that
    share of the features."""
    return (KVRow(INDEX, (num_kv_heads, head_dim // group), dtype),)


class Part(NamedTuple):
    """The rows of one page in one tensor of one layer: ``nbytes`` bytes, which begin ``offset`` bytes into the page."""

    layer: int
    row: KVRow
    offset: int
    nbytes: int


@dataclass(frozen=True)
class KVLayout:
    """What a page consists of: ``page_size`` tokens, and for each layer the rows that one token keeps there.

    ``layers[i]`` has the rows of layer i: two for keys and values, one for a latent. Layers may differ in the number of
    rows, in shape and in dtype. The layers of a draft model follow those of the target, so that a page of the target's
    tokens always brings the draft's with it (F14).

    A *part* is the memory of one page in one tensor of one layer: page_size rows. The bytes of a page are its parts one
    after the other, without gaps: by layer, within a layer by row, within a row by token. Every copy of a page moves
    parts as bytes; host memory, copies, storage and hashes know nothing else of what is in them.

    Two servers may share stored pages only if ``describe()`` says the same for both.
    """

    page_size: int
    layers: tuple[tuple[KVRow, ...], ...]

    def __post_init__(self) -> None:
        assert self.page_size >= 1, f"page_size {self.page_size}"
        assert self.layers, "a page needs at least one layer"
        for layer, rows in enumerate(self.layers):
            assert rows and all(row.nbytes > 0 for row in rows), f"layer {layer} keeps nothing"
            assert len({row.name for row in rows}) == len(rows), f"layer {layer} has two rows of one name"

    @staticmethod
    def uniform(page_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVLayout:
        """Keys and values of the same shape in every layer."""
        return KVLayout(page_size, (keys_and_values(num_kv_heads, head_dim, dtype),) * num_layers)

    def share(self, num_ranks: int) -> KVLayout:
        """What one of ``num_ranks`` ranks keeps of a page on the host and in storage, so that together they keep a row
        that all of them have once. A part has a rank's share of the bytes of the same part here."""
        return KVLayout(self.page_size, tuple(tuple(row.share(num_ranks) for row in rows) for rows in self.layers))

    @property
    def num_layers(self) -> int:
        """Layers of a page, those of a draft model included."""
        return len(self.layers)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a page in the order of its bytes."""
        parts, offset = [], 0
        for layer, rows in enumerate(self.layers):
            for row in rows:
                parts.append(Part(layer, row, offset, self.page_size * row.nbytes))
                offset += parts[-1].nbytes
        return tuple(parts)

    @cached_property
    def page_nbytes(self) -> int:
        """Bytes of a page, all layers."""
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def _first_parts(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(len(rows) for rows in self.layers))

    def parts_of(self, layers: range) -> range:
        """Which of ``parts`` belong to ``layers`` (step 1)."""
        return range(self._first_parts[layers.start], self._first_parts[layers.stop])

    @cached_property
    def alike(self) -> tuple[range, ...]:
        """The layers, in order, as few ranges of neighbours that keep the same rows: one where all are alike."""
        ranges, first = [], 0
        for _, group in itertools.groupby(self.layers):
            ranges.append(range(first, first + len(list(group))))
            first = ranges[-1].stop
        return tuple(ranges)

    def describe(self) -> str:
        """The whole layout as one line of JSON, the same for equal layouts."""
        layers = [
            [len(layers), [[row.name, row.dtype, row.shape] for row in rows]]
            for layers, rows in ((layers, self.layers[layers.start]) for layers in self.alike)
        ]
        facts = {"order": "layer, row, token", "page_size": self.page_size, "layers": layers}
        return json.dumps(facts, sort_keys=True)
