"""Images through the scheduler over a worker whose tokens depend on every token and embedding that a step reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, assert_right, capacity, expected_output, make_tiered_driver, request
from token_worker import VOCAB_SIZE

from fenceline.config.vision import VisionConfig
from fenceline.images.image_input import ImageInput
from fenceline.images.prepare import ImageSettings
from fenceline.ipc.io_struct import ContinueGenerationReq, FlushCacheReq, PauseGenerationReq, TokenizedGenerateReq
from fenceline.memory_order import open_device
from fenceline.scheduler.image_cache import ImageCache, StepImages

_DIGESTS = [bytes(16), bytes(15) + b"\1", b"\1" + bytes(15), b"\0\0\0\1" * 4, b"\1\0\0\0" * 4]
_SIZES = [(2, 3), (2, 3), (2, 3), (3, 2), (1, 1)]
# Of which conversation a turn is the next, its words and images, the answer's length, and what happens behind it.
_turns = st.tuples(
    st.integers(0, 9),
    st.lists(st.one_of(st.integers(1, 2), st.sampled_from([-1, -2, -3, -4, -5])), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from(["", "", "step", "run", "retract", "flush"]),
)


def _asked(rid: str, parts: Sequence[int], num_tokens: int) -> TokenizedGenerateReq:
    """Of ``parts`` those below zero are images."""
    tokens: list[int] = []
    images = []
    for part in parts:
        if part >= 0:
            tokens.append(part)
            continue
        rows, columns = grid = _SIZES[part]
        image = ImageInput(
            pixels=bytes(3 * rows * columns), height=rows, width=columns, grid=grid, digest=_DIGESTS[part],
            offset=len(tokens),
        )  # fmt: skip
        images.append(image)
        tokens += [VOCAB_SIZE - 1] * image.num_tokens
    made = request(rid, tokens, max_new_tokens=num_tokens, ignore_eos=True)
    return msgspec.structs.replace(made, images=images)


def _image_driver(num_embedding_rows: int, sees_whole: bool, page_size: int, **flags: object) -> Driver:
    """Over a TokenWorker with little memory."""
    made = make_tiered_driver(96 // page_size, 24 // page_size, page_size, num_rows=3, **flags)
    image_settings = ImageSettings(
        patch_size=1, merge_size=1, min_pixels=1, max_pixels=64, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
    )
    vision = VisionConfig(
        images=image_settings, placeholder=VOCAB_SIZE - 1, depth=1, hidden_size=8, intermediate_size=8, num_heads=1,
        out_size=8, temporal_patch_size=1, full_layers=frozenset(), window=1, sees_whole=sees_whole,
    )  # fmt: skip
    model = dataclasses.replace(made.config.model, vision=vision)
    config = dataclasses.replace(made.config, model=model, num_embedding_rows=num_embedding_rows)
    return Driver(config, made.worker)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(_turns, min_size=2, max_size=14), st.sampled_from([6, 7, 13, 14]), st.booleans(),
    st.sampled_from([1, 2, 4]), st.sampled_from([8, 12, -1]), st.integers(1, 6), st.integers(0, 99),
)  # fmt: skip
def test_conversations_are_answered_as_without_caches(
    turns: list[tuple[int, list[int], int, str]], num_embedding_rows: int, sees_whole: bool, page_size: int,
    chunk: int, most_known: int, seed: int,
) -> None:  # fmt: skip
    """Few images, nearly equal digests, few rows for embeddings, two tiers, retraction, flushes, and numbers of
    images that are soon forgotten."""
    driver = _image_driver(num_embedding_rows, sees_whole, page_size, seed=seed, chunked_prefill_size=chunk)
    driver.scheduler.memory.tree.images.most_known = most_known
    conversations: list[list[int]] = [[]]
    sent: list[TokenizedGenerateReq] = []
    for number, (which, words, num_tokens, then) in enumerate(turns):
        parts = [*conversations[which % len(conversations)], *words]
        made = _asked(f"r{number}", parts, num_tokens)
        if len(made.input_ids) + num_tokens > 90:
            continue
        driver.send(made)
        sent.append(made)
        conversations.append([*parts, *expected_output(made, capacity(driver))])
        match then:
            case "step":
                driver.step()
            case "run":
                driver.run()
            case "retract":
                driver.step()
                driver.send(PauseGenerationReq(id="p", mode="retract"))
                driver.step()
                driver.send(ContinueGenerationReq(id="c"))
            case "flush":
                driver.run()
                driver.send(FlushCacheReq(id="f"))
    driver.run()
    assert_right(driver, *sent)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, -1, -2, -4, -5]), min_size=1, max_size=12), st.integers(0, 3), st.booleans(),
    st.integers(12, 20), st.sampled_from([0, 6, 12, 99]),
)  # fmt: skip
def test_a_prompt_goes_on_whatever_is_read_ahead(
    parts: list[int], lookahead: int, sees_whole: bool, chunk: int, most_computed: int
) -> None:
    """With room for two images, each step gets the rows of its own tokens and of those that a draft reads, though the
    images stand side by side; and no step ends within an image that is seen whole."""
    asked, done = _asked("r", parts, 1), open_device("cpu").forward.record()
    cache = ImageCache(12 + lookahead, False, sees_whole, most_computed, lookahead)
    start, total = 0, len(asked.input_ids)
    while start < total:
        step = StepImages()
        size = cache.room(step, asked.images, start, min(chunk, total - start), chunk)
        assert size > 0
        rows = cache.take(step, asked.images, start, size)
        right = np.zeros(size + lookahead, dtype=np.int64)
        for image in asked.images:
            for place in range(max(image.offset, start), min(image.end, start + size + lookahead)):
                right[place - start] = cache._entries[image.digest].rows[place - image.offset]
        assert np.array_equal(right, right * 0 if rows is None else rows)
        start += size
        assert not sees_whole or not any(image.offset < start < image.end for image in asked.images)
        cache.launched(done)


def test_a_prompt_that_is_not_split_goes_on_alone() -> None:
    """Its images do not fit into one step. What is left of it is more than a step's tokens, and texts wait."""
    driver = _image_driver(6, False, 4, chunked_prefill_size=-1, max_prefill_tokens=8)
    long = _asked("long", [1, -5, -4, -3, 2], 3)
    driver.send(long)
    driver.step()
    short = request("short", [3, 4, 5, 6], max_new_tokens=3, ignore_eos=True)
    driver.send(short)
    driver.run()
    assert_right(driver, long, short)
