"""In which order a vision tower computes the patches of images, several of them one behind the other.

Those of an image's window lie together, and windows of one size too: without a kernel for segments of any length,
attention within windows is one product for each size that there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, groupby, repeat

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Runs = tuple[tuple[int, int], ...]  # segments of patches: (how many, of how many patches each), one behind the other


@dataclass(frozen=True, slots=True, eq=False)
class PatchOrder:
    """The order of one image's patches. ``patches`` [P]: the number of each in the image, row by row. ``embeddings``
    [N]: the number in the image's grid of each row of the tower's result. ``windows``: how the patches are divided for
    layers that attend within windows."""

    patches: I64
    embeddings: I64
    windows: Runs


@lru_cache(maxsize=64)
def patch_order(grid: tuple[int, int], merge: int, window: int) -> PatchOrder:
    """The order for ``grid`` (rows, columns) of embeddings, each of ``merge`` x ``merge`` patches, and windows of
    ``window`` x ``window`` embeddings."""
    rows, columns = grid
    numbers = np.arange(rows * columns, dtype=np.int64).reshape(rows, columns)
    windows = [
        numbers[row : row + window, column : column + window].ravel()
        for row in range(0, rows, window)
        for column in range(0, columns, window)
    ]
    windows.sort(key=len)
    embeddings = np.concatenate(windows)
    inside = np.arange(merge, dtype=np.int64)
    across = (embeddings // columns * merge)[:, None, None] + inside[:, None]
    along = (embeddings % columns * merge)[:, None, None] + inside
    patches = (across * (columns * merge) + along).ravel()
    return PatchOrder(patches, embeddings, _runs([len(numbers) * merge * merge for numbers in windows]))


@dataclass(frozen=True, slots=True, eq=False)
class PackedPatches:
    """Images of P patches in all, one behind the other, each in its own order. ``patches`` [P]: the numbers within
    their images; ``places`` [2, P]: their rows and columns there. ``points`` [2, P] float32: where they are in a square
    of learned positions that covers their image from corner to corner, None without such a square."""

    patches: I64
    places: I64
    points: F32 | None


def pack(orders: Sequence[PatchOrder], widths: Sequence[int], side: int) -> PackedPatches:
    """Images with these ``orders``, which are ``widths`` patches wide; ``side``: of the square of learned positions, 0
    for none."""
    places = [np.stack(np.divmod(order.patches, width)) for order, width in zip(orders, widths, strict=True)]
    points = None
    if side:
        lasts = [np.maximum(at.max(1, keepdims=True), 1).astype(np.float32) for at in places]
        scaled = [at.astype(np.float32) * np.float32(side - 1) for at in places]
        points = np.concatenate([at / last for at, last in zip(scaled, lasts, strict=True)], axis=1)
    return PackedPatches(np.concatenate([order.patches for order in orders]), np.concatenate(places, axis=1), points)


def packed_runs(orders: Sequence[PatchOrder]) -> tuple[Runs, Runs]:
    """The segments that attend to themselves in images with these ``orders``: windows, and whole images."""
    windows = chain.from_iterable(repeat(size, count) for order in orders for count, size in order.windows)
    return _runs(windows), _runs(len(order.patches) for order in orders)


def run_bounds(runs: Runs) -> I32:
    """Where the n segments begin and the last one ends, [n + 1]."""
    sizes = chain.from_iterable(repeat(size, count) for count, size in runs)
    return np.array([0, *accumulate(sizes)], dtype=np.int32)


def _runs(sizes: Iterable[int]) -> Runs:
    return tuple([(len(list(same)), size) for size, same in groupby(sizes)])
