"""ImageKeys: what stands for the tokens of images in the keys of cached prefixes.

The same text with another image is another prefix, but the images' tokens are the same in all prompts. So in keys, and
only there, each token of an image is replaced by a number below zero that stands for the image's digest. In the tree,
which lives as long as these numbers, they are as good as the whole digest in every token, wherever a page ends. Pages
outlive them in storage, whose keys are made from the digests themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from fenceline.images.image_input import ImageInput

Int32Array = npt.NDArray[np.int32]


_MOST_KNOWN = 1 << 17


class ImageKeys:
    """Numbers digests from -1 downwards, in the order in which they are first seen: ranks that take in the same
    requests give them the same numbers. No number is used twice. Those of the ``most_known`` latest images are known,
    at 200 bytes each. An image that has been forgotten and comes again gets another number, so that its old pages are
    not found, and those of them that have no name in storage yet get none."""

    def __init__(self, in_tree: Callable[[bytes], bytes] = bytes, in_names: Callable[[bytes], bytes] = bytes) -> None:
        """What tells digests apart in the tree and in the names of storage: the digests themselves."""
        self._in_tree, self._in_names = in_tree, in_names
        self.most_known = _MOST_KNOWN
        self._numbers: dict[bytes, int] = {}  # least recently used first
        self._digests: dict[int, bytes] = {}
        self._num_given = 0

    def keys_of(self, token_ids: Int32Array, images: Iterable[ImageInput]) -> Int32Array:
        """``token_ids`` [n] int32 with the tokens of ``images`` replaced; without images ``token_ids`` itself."""
        keys = token_ids
        for image in images:
            keys = keys.copy() if keys is token_ids else keys
            keys[image.offset : image.end] = self._number(self._in_tree(image.digest))
        return keys

    def _number(self, digest: bytes) -> int:
        number = self._numbers.pop(digest, 0)
        if not number:
            self._num_given += 1
            number = -self._num_given
            self._digests[number] = digest
        self._numbers[digest] = number
        if len(self._numbers) > self.most_known:
            del self._digests[self._numbers.pop(next(iter(self._numbers)))]
        return number

    def digest(self, number: int) -> bytes | None:
        """The digest for which ``number``, below zero, stands; None if it has been forgotten."""
        return self._digests.get(number)

    def page_bytes(self, keys: npt.NDArray[np.integer[Any]]) -> bytes | None:
        """What the hash of a page with ``keys`` [n] is made from: the same bytes for the same tokens and digests,
        whatever their numbers are here, and other bytes for others. Without images those of the keys, int32. None if
        one of the images has been forgotten."""
        if not len(keys) or int(keys.min()) >= 0:
            return keys.astype("<i4").tobytes()
        # Images are numbered anew by their first tokens in the page, so that the bytes of one length say how many
        # digests follow.
        found = dict.fromkeys(number for number in keys.tolist() if number < 0)
        if any(number not in self._digests for number in found):
            return None
        local = keys.astype("<i4")
        for index, number in enumerate(found, start=1):
            local[keys == number] = -index
        return local.tobytes() + b"".join(self._in_names(self._digests[number]) for number in found)
