"""KV events: what the tiers of the prefix cache gain and lose, for routers that send requests where prefixes are.

The tree and the storage tier note each change in a :class:`KVEventLog`, with references to what they have at hand
anyway; whoever publishes takes the notes once a step and encodes them elsewhere. A block is a page. Its hash is the end
of its storage key (``page_hash``), which stands for the whole prefix up to the page, its namespace and the model.

The events are those of vLLM and SGLang: maps with the fields of vLLM, media with the names of SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.image_keys import ImageKeys
from fenceline.mem_cache.page_hash import PageKey

_HASH_NBYTES = 8


class Medium(StrEnum):
    """The tiers."""

    GPU = "GPU"  # the device, also where that is a CPU
    CPU = "CPU_PINNED"
    DISK = "DISK"


ExtraKey = str | tuple[str, int]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """``block_hashes``: of blocks that follow one another; ``token_ids``: theirs. ``extra_keys``: for each block what
    its hash depends on besides tokens: (digest, offset in the block) of images, and the namespace with the first block
    of a prefix."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True):
    """The blocks are not on ``medium`` any more; they may be on others."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """No block is on any medium."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events of one step, in order. ``ts``: seconds since 1970."""

    ts: float
    events: Sequence[KVEvent]
    data_parallel_rank: int


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages that follow one another. ``tokens``: theirs, perhaps with a lookahead. ``parent``: the key of the page
    before them, None for the first of a prefix."""

    keys: Sequence[PageKey]
    tokens: npt.NDArray[np.int32]
    parent: PageKey | None
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None

    def part(self, first: int, last: int, page_size: int) -> PageRun:
        """The pages from ``first`` on, before ``last``."""
        extra = None if self.extra_keys is None else self.extra_keys[first:last]
        parent = self.keys[first - 1] if first else self.parent
        return PageRun(self.keys[first:last], self.tokens[first * page_size :], parent, extra)


@dataclass(frozen=True, slots=True)
class Stored:
    """``medium`` has the pages of ``run`` now."""

    medium: Medium
    run: PageRun


@dataclass(frozen=True, slots=True)
class Removed:
    """``medium`` has the pages no longer."""

    medium: Medium
    keys: Sequence[PageKey]


@dataclass(frozen=True, slots=True)
class Cleared:
    """All tiers are empty."""


Note = Stored | Removed | Cleared


class KVEventLog:
    """Notes the changes of all tiers, in order, until they are taken. One thread uses it."""

    def __init__(self, page_size: int, placeholder: int | None = None) -> None:
        """``placeholder``: the model's token for images, which events have in place of what stands for them in keys;
        None for a model that reads text only."""
        self.page_size = page_size
        self.images: ImageKeys | None = None  # those of the tree, which sets it
        self._placeholder = placeholder
        self._notes: list[Note] = []

    def run(
        self, keys: Sequence[PageKey], tokens: npt.NDArray[np.int32], parent: PageKey | None, namespace: str
    ) -> PageRun:
        """The pages ``keys`` with their ``tokens``, and what their hashes depend on besides: ``namespace`` if they are
        the first ones of a prefix, and images."""
        is_image = None
        if self._placeholder is not None and int(tokens.min()) < 0:
            is_image = tokens < 0
        if not namespace and is_image is None:
            return PageRun(keys, tokens, parent)
        extra: list[tuple[ExtraKey, ...] | None] = [None] * len(keys)
        if is_image is not None:
            extra = [self._of_images(tokens[at : at + self.page_size]) for at in self._starts(len(keys))]
            tokens = np.where(is_image, np.int32(self._placeholder or 0), tokens)
        if namespace:
            # A text of JSON may have half of a surrogate pair, which UTF-8 has not.
            text = namespace.encode("utf-8", "backslashreplace").decode()
            extra[0] = (*(extra[0] or ()), text)
        return PageRun(keys, tokens, parent, extra)

    def stored(self, medium: Medium, run: PageRun) -> None:
        self._notes.append(Stored(medium, run))

    def removed(self, medium: Medium, keys: Sequence[PageKey]) -> None:
        self._notes.append(Removed(medium, keys))

    def cleared(self) -> None:
        """All tiers are empty now. What was noted before makes no difference any more."""
        self._notes = [Cleared()]

    def take(self) -> list[Note]:
        """The notes since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def event(self, note: Note) -> KVEvent:
        """What is published of ``note``. Any thread may call this."""
        match note:
            case Stored(medium, run):
                num_tokens = len(run.keys) * self.page_size
                return BlockStored(
                    block_hashes=block_hashes(run.keys),
                    parent_block_hash=None if run.parent is None else block_hash(run.parent),
                    token_ids=run.tokens[:num_tokens].tolist(),
                    block_size=self.page_size,
                    lora_id=None,
                    medium=medium.value,
                    lora_name=None,
                    extra_keys=run.extra_keys,
                )
            case Removed(medium, keys):
                return BlockRemoved(block_hashes=block_hashes(keys), medium=medium.value)
            case Cleared():
                return AllBlocksCleared()

    def _starts(self, num_pages: int) -> range:
        return range(0, num_pages * self.page_size, self.page_size)

    def _of_images(self, page: npt.NDArray[np.int32]) -> tuple[ExtraKey, ...] | None:
        assert self.images is not None, "the log is a tree's"
        found: list[ExtraKey] = []
        for number in dict.fromkeys(page[page < 0].tolist()):
            digest = self.images.digest(number)
            if digest is not None:
                found.append((digest.hex(), int((page == number).argmax())))
        return tuple(found) or None


def block_hash(key: PageKey) -> int:
    """The hash of the block with this key, an unsigned number of 64 bits."""
    return int.from_bytes(key[-_HASH_NBYTES:], "big")


def block_hashes(keys: Sequence[PageKey]) -> list[int]:
    return [block_hash(key) for key in keys]
