"""KV events: from them alone a consumer knows what is on which tier."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from hicache_machine import FINGERPRINT, TwoTierMachine, Walk
from kv_event_mirror import Mirror

from fenceline.images.image_input import ImageInput
from fenceline.mem_cache.kv_events import KVEventBatch, KVEventLog, block_hash
from fenceline.mem_cache.page_hash import page_keys
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import RadixCache
from fenceline.memory_order.lease import LeasePool

CASES = [(1, "write_through", 0), (4, "write_through_selective", 0), (4, "write_back", 0), (4, "write_through", 1)]


def payload_of(log: KVEventLog) -> bytes:
    batch = KVEventBatch(time.time(), [log.event(note) for note in log.take()], 0)
    return msgspec.msgpack.encode(batch)


def on_tiers(machine: TwoTierMachine) -> dict[str, set[int]]:
    """What the tree has, by the names of pages."""
    found: dict[str, set[int]] = {"GPU": set(), "CPU_PINNED": set(), "DISK": set()}
    for node in machine.tree._nodes():
        space, symbols = machine.prefix_of(node)
        tokens, root = machine.tokens(symbols), FINGERPRINT.root_key(space)
        keys = page_keys(root, tokens, machine.page_size, machine.lookahead)[-node.num_pages :]
        for medium, there in (("GPU", node.on_device), ("CPU_PINNED", node.host_pages is not None)):
            found[medium].update(block_hash(key) for key in keys if there)
    return found


@pytest.mark.parametrize(("page_size", "policy", "lookahead"), CASES)
def test_events_alone_rebuild_the_tree(page_size: int, policy: str, lookahead: int) -> None:
    """After each of 4,000 random operations, in all: the blocks of each tier, their parents known before them."""
    walk = Walk(page_size, page_size, policy, lookahead, checks=False)
    machine, mirror = walk.machine, Mirror()
    log = KVEventLog(page_size)
    machine.tree.note_events(log, FINGERPRINT.root_key)
    for _ in range(4_000 // len(CASES)):
        walk.step()
        mirror.apply(payload_of(log))
        assert mirror.media == on_tiers(machine)
    for node in machine.tree._nodes():
        space, symbols = machine.prefix_of(node)
        key = machine.tree.keys(node)[-1]
        whole = machine.tokens(symbols)[: len(symbols) * page_size].tolist()
        assert mirror.prefix(block_hash(key)) == whole
        top = block_hash(machine.tree.keys(node.path()[0])[0])
        assert mirror.blocks[top][2] == ([space] if space else None)
    assert mirror.num_events > 400 and any(mirror.media.values())
    machine.teardown()
    mirror.apply(payload_of(log))
    assert not any(mirror.media.values())


def test_a_tree_without_a_log_computes_no_keys() -> None:
    tree = RadixCache(LeasePool("KV pages", 9), 4)
    pages = tree._pool.alloc(2)
    assert pages is not None
    node = tree.insert(np.arange(8), pages[0]).node
    assert node.keys is None and tree.events is None


def test_images_are_named_by_their_digests() -> None:
    """In place of the numbers that stand for them in keys, events have the model's token."""
    host = LeasePool("host KV pages", 9, reserved=0)
    tree = HiRadixCache(LeasePool("KV pages", 9), 4, host, "write_through")
    log = KVEventLog(4, placeholder=99)
    tree.note_events(log, FINGERPRINT.root_key)
    image = ImageInput(pixels=b"", height=2, width=3, grid=(2, 3), digest=bytes(range(16)), offset=3)
    keys = tree.images.keys_of(np.arange(12, dtype=np.int32), [image])
    pages = tree._pool.alloc(3)
    assert pages is not None
    tree.insert(keys, pages[0], extra_key="salt \udc80")
    mirror = Mirror()
    mirror.apply(payload_of(log))
    [first, second, third] = (mirror.blocks[block_hash(key)] for key in tree.keys(next(iter(tree._nodes()))))
    assert first[1:] == ((0, 1, 2, 99), [[image.digest.hex(), 3], "salt \\udc80"])
    assert second[1:] == ((99, 99, 99, 99), [[image.digest.hex(), 0]])
    assert third[1:] == ((99, 9, 10, 11), [[image.digest.hex(), 0]])


def test_pages_of_a_forgotten_image_have_no_events() -> None:
    tree = RadixCache(LeasePool("KV pages", 9), 4)
    log = KVEventLog(4, placeholder=99)
    tree.note_events(log, FINGERPRINT.root_key)
    tree.images.most_known = 1
    images = [
        ImageInput(pixels=b"", height=2, width=2, grid=(2, 2), digest=bytes(15) + bytes([n]), offset=4) for n in (1, 2)
    ]
    keys = [tree.images.keys_of(np.arange(12, dtype=np.int32), [image]) for image in images]
    pages = tree._pool.alloc(3)
    assert pages is not None
    tree.insert(keys[0], pages[0])  # whose image the second one has displaced
    mirror = Mirror()
    mirror.apply(payload_of(log))
    assert [told[1] for told in mirror.blocks.values()] == [(0, 1, 2, 3)]
    tree.evict(3)
    mirror.apply(payload_of(log))
    assert not mirror.media["GPU"]
