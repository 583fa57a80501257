"""Positions of prompts with images, against transformers' for the same grids."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vision_cases import IMAGE, VISION_MODELS

from fenceline.images.image_input import ImageInput, expand_placeholders
from fenceline.images.positions import position_delta, prompt_axes


@pytest.mark.parametrize("grids", [[], [(1, 1)], [(2, 5), (7, 1)], [(3, 3), (1, 4), (2, 2)]])
@pytest.mark.parametrize("between", [0, 1, 3])
def test_axes_are_those_of_transformers(grids: list[tuple[int, int]], between: int) -> None:
    images = [ImageInput(pixels=b"", height=0, width=0, grid=grid, digest=bytes(16)) for grid in grids]
    prompt = [3] * between + [token for _ in grids for token in (IMAGE, *[4] * between)] + [5, 6]
    ids, placed = expand_placeholders(prompt, images, IMAGE)
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


def test_a_chunk_costs_what_it_is_long_itself() -> None:
    """The scheduler computes the axes of each chunk of a prompt."""
    start = 1 << 40
    image = ImageInput(pixels=b"", height=0, width=0, grid=(2, 3), digest=bytes(16), offset=1)
    np.testing.assert_array_equal(prompt_axes([image], start, start + 2), [[start - 3, start - 2]] * 3)
