"""ImageInput: an image as a request carries it, and the placement of images among a prompt's tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    IdArray = array[int]
else:  # an array takes no parameter before Python 3.12
    IdArray = array

DIGEST_NBYTES = 16


class ImageInput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An image, decoded and resized. It is normalised on the device, because its pixels are an eighth of the bytes that
    a tower reads.

    ``grid`` (rows, columns): the embeddings that the tower makes of it, in the order of the placeholder tokens that
    stand for them. ``digest`` names what the embeddings depend on: the pixels, their shape and the settings.
    ``offset``: the index of its first placeholder token in the prompt, -1 before ``expand_placeholders``."""

    pixels: bytes  # uint8 [height, width, 3], RGB
    height: int
    width: int
    grid: tuple[int, int]
    digest: bytes  # DIGEST_NBYTES
    offset: int = -1

    @property
    def num_tokens(self) -> int:
        """The number of its placeholder tokens, which is that of its embeddings."""
        return self.grid[0] * self.grid[1]

    @property
    def end(self) -> int:
        """The index behind its last placeholder token."""
        return self.offset + self.num_tokens

    def array(self) -> npt.NDArray[np.uint8]:
        """The pixels [height, width, 3], not copied."""
        return np.frombuffer(self.pixels, dtype=np.uint8).reshape(self.height, self.width, 3)


def misplaced(prompt_ids: npt.NDArray[np.int32], images: Sequence[ImageInput], placeholder: int, factor: int) -> str:
    """Why ``images`` cannot have their places in a prompt, whose tokens ``placeholder`` stand for squares of ``factor``
    x ``factor`` pixels; empty if they can."""
    end = 0
    for number, image in enumerate(images):
        fits = (image.height, image.width) == (image.grid[0] * factor, image.grid[1] * factor)
        if not fits or len(image.pixels) != 3 * image.height * image.width or len(image.digest) != DIGEST_NBYTES:
            return f"image {number} was not prepared for this model"
        if image.offset < end or image.end > len(prompt_ids) or image.num_tokens < 1:
            return f"image {number} has no place in the prompt"
        if bool((prompt_ids[image.offset : image.end] != placeholder).any()):
            return f"image {number} is not where the prompt has its tokens"
        end = image.end
    return ""


def expand_placeholders(
    token_ids: Sequence[int], images: Iterable[ImageInput], placeholder: int
) -> tuple[IdArray, tuple[ImageInput, ...]]:
    """A prompt in which each image is one token ``placeholder``, with as many of these as the image has embeddings; and
    the ``images``, which are given in the prompt's order, at their places. Raises ``ValueError`` if the prompt has not
    one placeholder for each image."""
    ids, images = np.asarray(token_ids, dtype=np.int32), tuple(images)
    places = np.flatnonzero(ids == placeholder)
    if len(places) != len(images):
        raise ValueError(
            f"the prompt has {len(places)} image placeholders and the request {len(images)} images: give one image for"
            " each, and do not write the model's image tokens into texts"
        )
    counts = np.ones(len(ids), dtype=np.int64)
    counts[places] = [image.num_tokens for image in images]
    starts = np.cumsum(counts) - counts
    placed = [
        msgspec.structs.replace(image, offset=start)
        for image, start in zip(images, starts[places].tolist(), strict=True)
    ]
    return array("i", np.repeat(ids, counts).tobytes()), tuple(placed)
