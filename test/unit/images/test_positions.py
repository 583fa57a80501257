"""Positions of prompts with images, against transformers' for the same grids."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
import torch
from vision_cases import IMAGE, VIDEO, VISION_MODELS, published_positions

from fenceline.images.image_input import ImageInput, expand_placeholders
from fenceline.images.positions import position_delta, prompt_axes
from fenceline.images.prepare import ImageSettings
from fenceline.images.video import FrameTimes, VideoForm

SETTINGS = ImageSettings(
    patch_size=14, merge_size=2, min_pixels=3136, max_pixels=9**6, mean=(0.5,) * 3, std=(0.5,) * 3, group_size=2
)


@pytest.mark.parametrize("grids", [[], [(1, 1)], [(2, 5), (7, 1)], [(3, 3), (1, 4), (2, 2)]])
@pytest.mark.parametrize("between", [0, 1, 3])
def test_axes_are_those_of_transformers(grids: list[tuple[int, int]], between: int) -> None:
    images = [ImageInput(pixels=b"", height=0, width=0, grid=grid, digest=bytes(16)) for grid in grids]
    prompt = [3] * between + [token for _ in grids for token in (IMAGE, *[4] * between)] + [5, 6]
    ids, placed = expand_placeholders(prompt, images, (IMAGE, VIDEO))
    axes = prompt_axes(placed, 0, len(ids) + 3)
    tokens = torch.tensor([ids.tolist()])
    expected = np.tile(np.arange(len(ids)), (3, 1))
    if grids and between:  # transformers takes images without a token between them for one
        model = VISION_MODELS["Qwen2_5_VLForConditionalGeneration"]().model
        shapes = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])
        positions, delta = model.get_rope_index(tokens, (tokens == IMAGE).int(), shapes)
        expected = positions[:, 0].numpy()
        assert position_delta(placed) == delta.item()
    if not grids or between:
        np.testing.assert_array_equal(axes[:, : len(ids)], expected)
    behind = np.arange(len(ids), len(ids) + 3) + position_delta(placed)
    np.testing.assert_array_equal(axes[:, len(ids) :], np.tile(behind, (3, 1)))
    for start in range(len(ids)):
        np.testing.assert_array_equal(prompt_axes(placed, start, start + 3), axes[:, start : start + 3])


FILMS = [((3, 2, 4), 2.0), ((1, 2, 2), 1.0), ((5, 1, 1), 0.3), ((4, 3, 5), 24.0)]  # (groups, rows, columns), fps


@pytest.mark.parametrize("between", [1, 3])
def test_axes_of_videos(between: int) -> None:
    """Within each video those of transformers, which lets the text behind some begin too early."""
    form = VideoForm(settings=SETTINGS, placeholder=VIDEO, written="", group="", tokens_per_second=4.0)
    images, prompt = [], [3] * between
    for (groups, rows, columns), fps in FILMS:
        frame = ImageInput(pixels=b"", height=0, width=0, grid=(rows, columns), digest=bytes(16))
        images += form.groups([frame] * (2 * groups - 1), FrameTimes(fps))
        prompt += [VIDEO] * groups + [4] * between
    ids, placed = expand_placeholders(prompt, images, (IMAGE, VIDEO))
    axes = prompt_axes(placed, 0, len(ids))
    grids = [[groups, 2 * rows, 2 * columns] for (groups, rows, columns), _ in FILMS]
    rates = [fps for _, fps in FILMS]
    np.testing.assert_array_equal(axes, published_positions(ids.tolist(), iter(()), iter(grids), rates)[:, 0])
    model = VISION_MODELS["Qwen2_5_VLForConditionalGeneration"]().model
    tokens, seconds = torch.tensor([ids.tolist()]), torch.tensor([2 / fps for fps in rates])
    expected = model.get_rope_index(tokens, 2 * (tokens == VIDEO).int(), None, torch.tensor(grids), seconds)[0][:, 0]
    for kind, group in groupby(range(len(ids)), lambda place: ids[place] == VIDEO):
        at = list(group)
        if kind:
            np.testing.assert_array_equal(axes[:, at] - axes[:, at[:1]], expected[:, at] - expected[:, at[:1]])
    assert axes[0, -1] - len(ids) + 1 == position_delta(placed)
    for start in range(len(ids)):
        np.testing.assert_array_equal(
            prompt_axes(placed, start, start + 3)[:, : len(ids) - start], axes[:, start : start + 3]
        )


def test_times_may_be_given_one_by_one() -> None:
    form = VideoForm(settings=SETTINGS, placeholder=VIDEO, written="", group="<{}>", tokens_per_second=2.0)
    frames = [ImageInput(pixels=b"", height=0, width=0, grid=(1, 1), digest=bytes([i] * 16)) for i in range(5)]
    times = FrameTimes(stamps=(1.0, 1.5, 4.0, 5.0, 9.25))
    assert [group.moment for group in form.groups(frames, times)] == [0, 6, 16]
    assert form.as_tokenized(5, times) == "<1.2><4.5><9.2>"
    assert form.as_tokenized(3, FrameTimes(2.0)) == "<0.2><1.0>"
    faster, other = form.groups(frames, FrameTimes(8.0)), form.groups(frames[::-1], FrameTimes(8.0))
    assert len({group.digest for group in (*form.groups(frames, times), *faster[1:], *other)}) == 8


def test_a_chunk_costs_what_it_is_long_itself() -> None:
    """The scheduler computes the axes of each chunk of a prompt."""
    start = 1 << 40
    image = ImageInput(pixels=b"", height=0, width=0, grid=(2, 3), digest=bytes(16), offset=1)
    np.testing.assert_array_equal(prompt_axes([image], start, start + 2), [[start - 3, start - 2]] * 3)
