"""Positions of tokens in prompts with images where they have three axes: time, row and column (Qwen2-VL,
arXiv:2409.12191). The tokens of an image share one time, and their rows and columns count from there; what follows an
image begins behind the largest position in it, which is usually before its place among the tokens. All frames of a
video begin where it begins, and their times go on (Qwen2.5-VL, arXiv:2502.13923)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from fenceline.images.image_input import ImageInput

I64 = npt.NDArray[np.int64]


def prompt_axes(images: Iterable[ImageInput], start: int, end: int) -> I64:
    """The positions [3, end - start] of tokens ``start`` to ``end - 1`` of a request whose prompt has ``images``, in
    order. Tokens behind the last image, the answer's too, have one position in all axes."""
    axes = np.empty((3, end - start), dtype=np.int64)
    place, delta = start, 0  # the first token that has no positions yet, and how far texts there are from their places
    for image, first, behind in _positioned(images):
        if image.offset >= end:
            break
        if place < image.offset:
            axes[:, place - start : image.offset - start] = np.arange(place, image.offset) + delta
            place = image.offset
        columns = image.grid[1]
        last = min(image.end, end)
        if place < last:
            inside = np.arange(place, last) - image.offset
            at = slice(place - start, last - start)
            axes[0, at], axes[1, at], axes[2, at] = image.moment, inside // columns, inside % columns
            axes[:, at] += first
            place = last
        delta = behind - image.end
    axes[:, place - start :] = np.arange(place, end) + delta
    return axes


def position_delta(images: Iterable[ImageInput]) -> int:
    """The position of a token behind all ``images`` less its place among the tokens."""
    delta = 0
    for image, _, behind in _positioned(images):
        delta = behind - image.end
    return delta


def _positioned(images: Iterable[ImageInput]) -> Iterator[tuple[ImageInput, int, int]]:
    """``images`` with the positions at which they begin, and those behind them: one more than the largest before."""
    first = behind = end = 0
    for image in images:
        if not image.continues:
            first = behind = behind + image.offset - end
        behind = max(behind, first + max(image.moment + 1, *image.grid))
        end = image.end
        yield image, first, behind
