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
    axes = np.empty((3, end - start), dtype=np.int64)
    place, delta = start, 0  # the first token that has no positions yet, and how far texts there are from their places
    for image in images:
        if image.offset >= end:
            break
        if place < image.offset:
            axes[:, place - start : image.offset - start] = np.arange(place, image.offset) + delta
            place = image.offset
        rows, columns = image.grid
        last = min(image.end, end)
        if place < last:
            inside = np.arange(place, last) - image.offset
            at = slice(place - start, last - start)
            axes[0, at], axes[1, at], axes[2, at] = 0, inside // columns, inside % columns
            axes[:, at] += image.offset + delta
            place = last
        delta += max(rows, columns) - image.num_tokens
    axes[:, place - start :] = np.arange(place, end) + delta
    return axes


def position_delta(images: Iterable[ImageInput]) -> int:
    """The position of a token behind all ``images`` less its place among the tokens."""
    return sum(max(image.grid) - image.num_tokens for image in images)
