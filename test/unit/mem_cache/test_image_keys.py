"""Which prompts share a page: those with the same tokens and the same images, in the tree and in storage."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
from hicache_tiers import Tiers
from hypothesis import given
from hypothesis import strategies as st

from fenceline.images.image_input import ImageInput
from fenceline.mem_cache.image_keys import ImageKeys
from fenceline.mem_cache.page_hash import PageFingerprint, page_keys
from fenceline.mem_cache.tree.radix_cache import RadixCache
from fenceline.memory_order import LeasePool

ROOT = PageFingerprint("model", "layout", 64).root_key()
PLACEHOLDER = 9
# Nearly equal ones: they differ in the first byte, in the last, or in a byte of every word.
DIGESTS = [bytes(16), bytes(15) + b"\1", b"\1" + bytes(15), b"\0\0\0\1" * 4, b"\1\0\0\0" * 4]
Prompt = list[int | tuple[int, int]]  # tokens, and images: (which digest, how many tokens)

_images = st.tuples(st.integers(0, len(DIGESTS) - 1), st.integers(1, 6))
_prompts = st.lists(st.one_of(st.integers(0, 2), st.just(PLACEHOLDER), _images), max_size=8)


def placed(prompt: Prompt) -> tuple[np.ndarray, list[ImageInput], list[object]]:
    """Its tokens, its images, and what each token means: the token, or the image's digest."""
    tokens: list[int] = []
    images, meanings = [], []
    for part in prompt:
        if isinstance(part, int):
            tokens.append(part)
            meanings.append(part)
            continue
        which, size = part
        digest = DIGESTS[which]
        image = ImageInput(pixels=b"", height=0, width=0, grid=(1, size), digest=digest, offset=len(tokens))
        images.append(image)
        tokens += [PLACEHOLDER] * size
        meanings += [digest] * size
    return np.array(tokens, dtype=np.int32), images, meanings


def num_common(one: list[object], other: list[object]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@given(st.lists(_prompts, min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 2))
def test_pages_are_shared_by_the_same_tokens_and_images(prompts: list[Prompt], page_size: int, lookahead: int) -> None:
    pool = LeasePool("pages", 400)
    tree = RadixCache(pool, page_size, lookahead=lookahead)
    others = ImageKeys()  # of another server, which has seen the images in another order
    known: list[list[object]] = []
    stored: dict[bytes, tuple[object, ...]] = {}
    for digest in reversed(DIGESTS):
        others.keys_of(*placed([(DIGESTS.index(digest), 1)])[:2])
    for prompt in prompts:
        tokens, images, meanings = placed(prompt)
        before = tokens.copy()
        keys = tree.images.keys_of(tokens, images)
        assert (tokens == before).all(), "the model's tokens stay what they are"
        expected = max([max(num_common(meanings, one) - lookahead, 0) // page_size for one in known], default=0)
        assert len(tree.match_prefix(keys).pages) == expected
        num_pages = max(len(tokens) - lookahead, 0) // page_size
        leased = pool.alloc(num_pages)
        assert leased is not None
        tree.insert(keys[: num_pages * page_size + lookahead] if num_pages else keys[:0], leased[0])
        known.append(meanings[: num_pages * page_size + lookahead] if num_pages else [])
        hashes = page_keys(ROOT, keys, page_size, lookahead, tree.images)
        assert hashes == page_keys(ROOT, others.keys_of(tokens, images), page_size, lookahead, others)
        for number, one in enumerate(hashes):
            meaning = tuple(meanings[: (number + 1) * page_size + lookahead])
            assert stored.setdefault(one, meaning) == meaning, "another prefix has the same name in storage"


@given(_prompts)
def test_prompts_without_images_keep_their_keys(prompt: Prompt) -> None:
    tokens, _, _ = placed([part for part in prompt if isinstance(part, int)])
    keys = ImageKeys()
    assert keys.keys_of(tokens, []) is tokens
    assert page_keys(ROOT, tokens, 2, 1, keys) == page_keys(ROOT, tokens, 2, 1)


@given(st.lists(_prompts, min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2))
def test_a_forgotten_image_is_missed_and_is_no_other(
    prompts: list[Prompt], most_known: int, page_size: int, lookahead: int
) -> None:
    ranks, everything = [ImageKeys(), ImageKeys()], ImageKeys()
    for rank in ranks:
        rank.most_known = most_known
    meant: dict[int, object] = {}
    taken: list[tuple[np.ndarray, np.ndarray]] = []
    for prompt in prompts:
        tokens, images, meanings = placed(prompt)
        keys, same = (rank.keys_of(tokens, images) for rank in ranks)
        assert (keys == same).all(), "ranks give the same numbers"
        for key, meaning in zip(keys.tolist(), meanings, strict=True):
            assert meant.setdefault(key, meaning) == meaning, "a number that has stood for something else"
        taken.append((keys, everything.keys_of(tokens, images)))
        known = {number for number in meant if number < 0 and ranks[0].page_bytes(np.array([number])) is not None}
        assert len(known) <= most_known
        for one, complete in taken:
            names = page_keys(ROOT, one, page_size, lookahead, ranks[0])
            assert names == page_keys(ROOT, complete, page_size, lookahead, everything)[: len(names)]
            end = next((place for place, key in enumerate(one.tolist()) if key < 0 and key not in known), len(one))
            assert len(names) == max(end - lookahead, 0) // page_size, "up to the first page with a forgotten image"


def test_only_pages_in_front_of_a_forgotten_image_are_stored() -> None:
    tiers = Tiers(root_key=lambda _: ROOT)
    images = tiers.tree.images
    images.most_known = 1
    tokens, placed_images, _ = placed([1, 1, 1, 1, (1, 4), 1, 1, 1, 1, 1, 1, 1, 1])
    keys = images.keys_of(tokens, placed_images)
    upper = tiers.tree.insert(keys[:12], tiers.pages(3)).node
    images.keys_of(*placed([(2, 4)])[:2])  # the first one is forgotten
    lower = tiers.tree.insert(keys, tiers.pages(4)).node
    tiers.back_up(upper, lower, done=True)
    assert [len(tiers.tree.hold_host(node).keys) for node in (upper, lower)] == [1, 0]
    tiers.tree.match_prefix(keys[:4])
    tiers.tree.match_prefix(keys[:8])
    assert [len(node.keys or ()) for node in lower.path()] == [1, 0, 0, 0]
