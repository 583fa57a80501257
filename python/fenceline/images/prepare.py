"""Prepares images for a model's tower with Pillow: the same pixels as the processors of transformers without
torchvision. It runs where requests arrive; the scheduler's process gets an ``ImageInput``."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fenceline.images.image_input import DIGEST_NBYTES, ImageInput

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_RATIO = 200  # of the longer side to the shorter one, in images that keep their proportions


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """How a model's images are prepared, from its preprocessor_config.json.

    An image is resized so that its sides are multiples of ``patch_size * merge_size`` pixels, keeping its proportions,
    with ``min_pixels`` to ``max_pixels`` in all; or to the ``size`` (height, width), if there is one. One embedding
    stands for a square of so many pixels. ``resample`` is Pillow's number of the filter. Values 0 to 255 are multiplied
    by ``rescale_factor``; then the ``mean`` of their channel is subtracted, and they are divided by its ``std``.

    ``group_size``: how many successive frames of a video have one grid of embeddings; 1 for images. All frames of a
    video have one size. ``shares_pixels``: they have ``min_pixels`` to ``max_pixels`` together, otherwise each has."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    size: tuple[int, int] | None = None
    resample: int = 3
    rescale_factor: float = 1 / 255
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    group_size: int = 1
    shares_pixels: bool = False

    @property
    def token_bytes(self) -> int:
        """Of the pixels for which one embedding stands."""
        return 3 * self.factor**2 * self.group_size

    @property
    def factor(self) -> int:
        """The side in pixels of the square for which one embedding stands."""
        return self.patch_size * self.merge_size

    @property
    def most_tokens(self) -> int:
        """The most embeddings that one image has."""
        most = self.max_pixels if self.size is None else self.size[0] * self.size[1]
        return max(most // self.factor**2, 1)

    def with_pixels(
        self, min_pixels: int | None = None, max_pixels: int | None = None, num_frames: int = 1
    ) -> ImageSettings:
        """These settings with other limits of the pixels of an image, or of each frame of a video of ``num_frames``;
        None keeps one. ``max_pixels`` can only be lowered. Raises ``ValueError`` if no size is within them."""
        together = num_frames if self.shares_pixels else 1
        least = self.min_pixels if min_pixels is None else min_pixels * together
        most = self.max_pixels if max_pixels is None else min(max_pixels * together, self.max_pixels)
        if not self.factor**2 <= most or not 0 < least <= most:
            of_all = f" of {num_frames} frames together" if together > 1 else ""
            raise ValueError(
                f"min_pixels {least} and max_pixels {most}{of_all} are no range of sizes: at least one embedding, of"
                f" {self.factor**2} pixels, must fit, and at most {self.max_pixels} pixels are possible"
            )
        return replace(self, min_pixels=least, max_pixels=most)

    def fitted(self, width: int, height: int, num_frames: int = 1) -> tuple[int, int]:
        """(height, width) to which an image of this size, or each frame of a video of ``num_frames``, is resized. Costs
        nothing, so that limits can be checked before pixels are decoded. Raises ``ValueError`` for proportions that no
        model reads."""
        if self.size is not None:
            return self.size
        factor, frames, whole_groups = self.factor, 1, 1
        if max(width, height) > _MOST_RATIO * min(width, height):
            raise ValueError(
                f"an image of {width}x{height} pixels is more than {_MOST_RATIO} times as long as it is wide: crop it"
            )
        if self.shares_pixels:
            frames = max(num_frames, self.group_size)
            whole_groups = round(frames / self.group_size) * self.group_size
            grow = max(1.0, factor / height, factor / width)
            width, height = int(width * grow), int(height * grow)
        sides = [round(height / factor) * factor, round(width / factor) * factor]
        if whole_groups * sides[0] * sides[1] > self.max_pixels:
            shrink = math.sqrt(frames * height * width / self.max_pixels)
            sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
        elif whole_groups * sides[0] * sides[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
        return sides[0], sides[1]

    def num_groups(self, num_frames: int) -> int:
        """How many groups ``num_frames`` frames are: the last frame is repeated until the last group is whole."""
        return -(-num_frames // self.group_size)

    def num_tokens(self, width: int, height: int, num_frames: int = 1) -> int:
        """The number of embeddings of an image of this size, or of a video. Raises as ``fitted`` does."""
        fitted = self.fitted(width, height, num_frames)
        return fitted[0] * fitted[1] // self.factor**2 * self.num_groups(num_frames)

    def values(self) -> npt.NDArray[np.float32]:
        """What a pixel's value is normalised to, float32 [256, 3 channels]. The same roundings as in transformers: it
        rescales in float64 and normalises in float32."""
        rescaled = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.divide(np.subtract(rescaled[:, None], mean), std, dtype=np.float32)


def prepare(image: Image, settings: ImageSettings, num_frames: int = 1) -> ImageInput:
    """``image``, decoded here at the latest, as the model with ``settings`` gets it; or one of ``num_frames`` frames of
    a video. Raises ``ValueError`` for proportions that no model reads, and whatever Pillow raises for bytes that are no
    image."""
    height, width = settings.fitted(*image.size, num_frames)
    pixels = as_rgb(image).resize((width, height), resample=settings.resample).tobytes()
    factor = settings.factor
    facts = settings.patch_size, factor, settings.rescale_factor, settings.mean, settings.std, height, width
    known = hashlib.sha256(repr(facts).encode())  # processors have instructions for it
    known.update(pixels)
    grid, digest = (height // factor, width // factor), known.digest()[:DIGEST_NBYTES]
    return ImageInput(pixels=pixels, height=height, width=width, grid=grid, digest=digest)


def as_rgb(image: Image) -> Image:
    """``image`` in the mode RGB, itself if it is."""
    return image if image.mode == "RGB" else image.convert("RGB")
