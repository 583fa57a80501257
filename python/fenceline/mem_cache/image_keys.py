"""ImageKeys: what stands for the tokens of images in the keys of cached prefixes.

The same text with another image is another prefix, but the images' tokens are the same in all prompts. So in keys, and
only there, each token of an image is replaced by a number below zero that stands for the image's digest. In the tree,
which lives as long as these numbers, they are as good as the whole digest in every token, wherever a page ends. Pages
outlive them in storage, whose keys are made from the digests themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from fenceline.images.image_input import ImageInput

Int32Array = npt.NDArray[np.int32]


class ImageKeys:
    """Numbers digests from -1 downwards, in the order in which they are first seen: ranks that take in the same
    requests give them the same numbers. A digest keeps its number for ever, at 100 bytes each."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._digests: list[bytes] = []

    def keys_of(self, token_ids: Int32Array, images: Iterable[ImageInput]) -> Int32Array:
        """``token_ids`` [n] int32 with the tokens of ``images`` replaced; without images ``token_ids`` itself."""
        keys = token_ids
        for image in images:
            keys = keys.copy() if keys is token_ids else keys
            keys[image.offset : image.end] = self._number(image.digest)
        return keys

    def _number(self, digest: bytes) -> int:
        number = self._numbers.get(digest)
        if number is None:
            self._digests.append(digest)
            number = self._numbers[digest] = -len(self._digests)
        return number

    def page_bytes(self, keys: npt.NDArray[np.integer[Any]]) -> bytes:
        """What the hash of a page with ``keys`` [n] is made from: the same bytes for the same tokens and digests,
        whatever their numbers are here, and other bytes for others. Without images those of the keys, int32."""
        if not len(keys) or int(keys.min()) >= 0:
            return keys.astype("<i4").tobytes()
        # Images are numbered anew by their first tokens in the page, so that the bytes of one length say how many
        # digests follow.
        found = dict.fromkeys(number for number in keys.tolist() if -len(self._digests) <= number < 0)
        local = keys.astype("<i4")
        for index, number in enumerate(found, start=1):
            local[keys == number] = -index
        return local.tobytes() + b"".join(self._digests[-number - 1] for number in found)
