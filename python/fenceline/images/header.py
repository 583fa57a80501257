"""The format and the size of an image, from the first bytes of its file: limits are checked before anything is decoded.

Not read by Pillow, some of whose decoders take memory for the whole image when they open it.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Literal

MAX_PIXELS = 1 << 26  # of an image: more than any phone's
MAX_BYTES = 32 << 20  # of its file
HEAD_BYTES = 3 << 14  # with which read_header nearly always has enough
_MAX_SEGMENTS = 1024  # of a JPEG file before its size
_PADDING = re.compile(rb"\xff*")  # of a JPEG segment; a loop over its bytes would take milliseconds

Format = Literal["PNG", "JPEG", "WEBP", "GIF"]


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of the image in it."""

    format: Format
    width: int
    height: int

    def check(self) -> None:
        """Raise ValueError for an image with no pixels, or too many."""
        if not (self.width > 0 and self.height > 0):
            raise ValueError(f"it is a {self.format} image of {self.width}x{self.height} pixels")
        if self.width * self.height > MAX_PIXELS:
            raise ValueError(f"it has {self.width}x{self.height} pixels, at most {MAX_PIXELS} are read: shrink it")


def read_header(head: bytes, is_whole: bool) -> Header | None:
    """What the file that begins with ``head`` says; None if that is not enough, and not the whole file. Raises
    ValueError for what is no image of the four formats."""
    if len(head) < 30 and not is_whole:
        return None
    found = None
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        if len(head) >= 24 and head[12:16] == b"IHDR":
            found = Header("PNG", *struct.unpack_from(">II", head, 16))
    elif head.startswith((b"GIF87a", b"GIF89a")):
        if len(head) >= 10:
            found = Header("GIF", *struct.unpack_from("<HH", head, 6))
    elif head.startswith(b"\xff\xd8\xff"):
        found = _jpeg(head)
        if found is None and not is_whole:
            return None
    elif head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        found = _webp(head)
    else:
        raise ValueError("it is not a PNG, JPEG, WebP or GIF image")
    if found is None:
        raise ValueError("its file is broken: it does not say how large the image is")
    return found


def _jpeg(head: bytes) -> Header | None:
    place = 2
    for _ in range(_MAX_SEGMENTS):
        padding = _PADDING.match(head, place)
        place = max(place, 0 if padding is None else padding.end() - 1)
        if len(head) < place + 9 or head[place] != 0xFF:
            return None
        kind = head[place + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", head, place + 5)
            return Header("JPEG", width, height)
        place += 2 if kind in (0x01, *range(0xD0, 0xD8)) else 2 + max(struct.unpack_from(">H", head, place + 2)[0], 2)
    return None


def _webp(head: bytes) -> Header | None:
    if len(head) < 30:
        return None
    match head[12:16]:
        case b"VP8 " if head[23:26] == b"\x9d\x01\x2a":
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", head, 26))
        case b"VP8L" if head[20] == 0x2F:
            bits = int.from_bytes(head[21:25], "little")
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            width, height = (int.from_bytes(head[place : place + 3], "little") + 1 for place in (24, 27))
        case _:
            return None
    return Header("WEBP", width, height)
