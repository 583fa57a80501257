"""A consumer of KV events: it knows of the cache what they say, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec

MEDIA = ("GPU", "CPU_PINNED", "DISK")


class Mirror:
    """Which blocks are on which tier. ``blocks``: of all that were ever stored, (parent's hash, tokens, extra keys)."""

    def __init__(self) -> None:
        self.media: dict[str, set[int]] = {medium: set() for medium in MEDIA}
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], Any]] = {}
        self.num_events = 0

    def apply(self, payload: bytes) -> None:
        """Take in a batch: a map for each event, as vLLM and SGLang encode them."""
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            self.num_events += 1
            getattr(self, event.pop("type"))(**event)

    def BlockStored(
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: None,
        medium: str,
        lora_name: None,
        extra_keys: list[Any] | None = None,
    ) -> None:
        assert len(token_ids) == len(block_hashes) * block_size > 0 and min(token_ids) >= 0
        known = set().union(*self.media.values())
        assert parent_block_hash is None or parent_block_hash in known, "a parent comes before its children"
        # What is written to the disk again is told again.
        assert medium == "DISK" or not self.media[medium] & set(block_hashes), "no block is stored twice"
        self.media[medium].update(block_hashes)
        for number, block in enumerate(block_hashes):
            tokens = tuple(token_ids[number * block_size : (number + 1) * block_size])
            told = parent_block_hash, tokens, None if extra_keys is None else extra_keys[number]
            assert self.blocks.setdefault(block, told) == told, "a hash stands for one prefix"
            parent_block_hash = block

    def BlockRemoved(self, block_hashes: list[int], medium: str) -> None:
        # The disk may have pages of earlier servers.
        assert medium == "DISK" or self.media[medium] >= set(block_hashes), "only what is there is removed"
        self.media[medium].difference_update(block_hashes)

    def AllBlocksCleared(self) -> None:
        for blocks in self.media.values():
            blocks.clear()

    def prefix(self, block: int) -> list[int]:
        """The tokens of a block and of all before it."""
        parent, tokens, _ = self.blocks[block]
        return [*([] if parent is None else self.prefix(parent)), *tokens]
