"""ImageInput: an image, or some frames of a video, as a request carries it, and the placement of these among a prompt's
tokens."""

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
    a tower reads. Or ``num_frames`` successive frames of a video, of which the tower makes one embedding where it
    makes one of an image, so that a video is to all that follows a few images.

    ``grid`` (rows, columns): the embeddings that the tower makes of it, in the order of the placeholder tokens that
    stand for them. ``digest`` names what the keys and values of its tokens depend on, apart from those before them:
    the pixels, their shape, the settings, and the positions in a video. ``offset``: the index of its first
    placeholder token in the prompt, -1 before ``expand_placeholders``. Where time is an axis of positions, the
    frames of a video are ``moment`` behind its beginning; ``continues``: so are those of the image before, of the same
    video."""

    pixels: bytes  # or a view: uint8 [height, width, 3], RGB; of each frame
    height: int
    width: int
    grid: tuple[int, int]
    digest: bytes  # DIGEST_NBYTES
    offset: int = -1
    num_frames: int = 0  # 0: it is an image
    moment: int = 0
    continues: bool = False

    @property
    def is_video(self) -> bool:
        """Whether it is of a video."""
        return self.num_frames > 0

    @property
    def num_tokens(self) -> int:
        """The number of its placeholder tokens, which is that of its embeddings."""
        return self.grid[0] * self.grid[1]

    @property
    def end(self) -> int:
        """The index behind its last placeholder token."""
        return self.offset + self.num_tokens

    def array(self) -> npt.NDArray[np.uint8]:
        """The pixels [frames, height, width, 3], one frame of an image, not copied."""
        return np.frombuffer(self.pixels, dtype=np.uint8).reshape(-1, self.height, self.width, 3)


def misplaced(
    prompt_ids: npt.NDArray[np.int32],
    images: Sequence[ImageInput],
    placeholders: tuple[int, int],
    factor: int,
    num_frames: int,
) -> str:
    """Why ``images`` cannot have their places in a prompt, whose tokens ``placeholders``, of images and of videos,
    stand for squares of ``factor`` x ``factor`` pixels, in videos of ``num_frames`` frames; empty if they can."""
    end, before = 0, None
    for number, image in enumerate(images):
        fits = (image.height, image.width) == (image.grid[0] * factor, image.grid[1] * factor)
        size = 3 * image.height * image.width * max(image.num_frames, 1)
        if not fits or len(image.pixels) != size or len(image.digest) != DIGEST_NBYTES:
            return f"image {number} was not prepared for this model"
        if image.num_frames not in (0, num_frames) or image.moment < 0:
            return f"image {number} was not prepared for this model"
        if image.offset < end or image.end > len(prompt_ids) or image.num_tokens < 1:
            return f"image {number} has no place in the prompt"
        if bool((prompt_ids[image.offset : image.end] != placeholders[image.is_video]).any()):
            return f"image {number} is not where the prompt has its tokens"
        if image.continues and (before is None or not before.is_video or image.offset > end):
            return f"image {number} does not follow the frames before it"
        end, before = image.end, image
    return ""


def expand_placeholders(
    token_ids: Sequence[int], images: Iterable[ImageInput], placeholders: tuple[int, int]
) -> tuple[IdArray, tuple[ImageInput, ...]]:
    """A prompt in which each image is one token, of ``placeholders`` that of images or of videos, with as many of these
    as the image has embeddings; and the ``images`` in the prompt's order at their places. Those of each kind are given
    in this order. Raises ``ValueError`` if the prompt has not one placeholder for each image."""
    ids, images = np.asarray(token_ids, dtype=np.int32), tuple(images)
    places = np.flatnonzero((ids == placeholders[0]) | (ids == placeholders[1]))
    kinds = (ids[places] == placeholders[1]).tolist()
    given = [[image for image in images if image.is_video is kind] for kind in (False, True)]
    if [kinds.count(False), kinds.count(True)] != list(map(len, given)):
        raise ValueError(
            f"the prompt has {kinds.count(False)} placeholders of images and {kinds.count(True)} of videos' frames, the"
            f" request {len(given[0])} images and {len(given[1])} groups of frames: give one for each, and do not write"
            " the model's image tokens into texts"
        )
    of_kind = [iter(each) for each in given]
    images = tuple([next(of_kind[kind]) for kind in kinds])
    counts = np.ones(len(ids), dtype=np.int64)
    counts[places] = [image.num_tokens for image in images]
    starts = np.cumsum(counts) - counts
    placed = [
        msgspec.structs.replace(image, offset=start)
        for image, start in zip(images, starts[places].tolist(), strict=True)
    ]
    return array("i", np.repeat(ids, counts).tobytes()), tuple(placed)
