"""Positions of tokens in prompts with images where they have three axes: time, row and column (Qwen2-VL,
arXiv:2409.12191). The tokens of an image share one time, and their rows and columns count from there; what follows an
image begins behind the largest position in it, which is usually before its place among the tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fenceline.images.image_input import ImageInput

I64 = npt.NDArray[np.int64]


def prompt_axes(images: Iterable[ImageInput], start: int, end: int) -> I64:
    """The positions [3, end - start] of tokens ``start`` to ``end - 1`` of a request whose prompt has ``images``, in
    order. Tokens behind the last image, the answer's too, have one position in all axes."""
    axes = np.tile(np.arange(end, dtype=np.int64), (3, 1))
    for image in images:
        if image.offset >= end:
            break
        rows, columns = image.grid
        first, inside = axes[0, image.offset], np.arange(image.num_tokens)[: end - image.offset]
        axes[1, image.offset : image.end] = first + inside // columns
        axes[2, image.offset : image.end] = first + inside % columns
        axes[0, image.offset : image.end] = first
        axes[:, image.end :] += max(rows, columns) - image.num_tokens
    return axes[:, start:]


def position_delta(images: Iterable[ImageInput]) -> int:
    """The position of a token behind all ``images`` less its place among the tokens."""
    return sum(max(image.grid) - image.num_tokens for image in images)
