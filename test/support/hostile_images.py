"""Image files that are meant to do harm, or are only odd: each is decoded or refused, and nothing else."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from random import Random

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# What files of a format can be written from.
_MODES = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
}


def data_url(data: bytes, media: str = "image/png") -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(noise.integers(0, 1 << 16, (height, width), dtype=np.uint16))
    return Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)


def written(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png(width: int, height: int, rows: bytes = b"", depth: int = 8, color: int = 0, times: int = 1) -> bytes:
    """A file whose header says so, with ``rows`` compressed as its pixels, so many times."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    packed = zlib.compressobj(9)
    pixels = b"".join([*(packed.compress(rows) for _ in range(times)), packed.flush()])
    parts = (b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def oriented(orientation: int, width: int, height: int) -> bytes:
    exif = Image.Exif()
    exif[0x112] = orientation
    return written(picture(width, height), "JPEG", exif=exif)


def hostile_images(count: int, seed: int = 0) -> Iterator[bytes]:
    """``count`` of them, always the same for a ``seed``."""
    random = Random(seed)
    good = {
        (format, mode): written(picture(random.randint(1, 40), random.randint(1, 40), mode), format)
        for format in FORMATS
        for mode in _MODES[format]
    }
    files = list(good.values())
    frames = [picture(9, 7, "RGB", seed) for seed in range(4)]
    files += [written(frames[0], format, save_all=True, append_images=frames[1:]) for format in ("GIF", "WEBP", "PNG")]
    files += [oriented(orientation, 12, 5) for orientation in (1, 3, 6, 8, 99)]
    for number in range(count):
        data = bytearray(random.choice(files))
        match number % 10:
            case 0:  # truncated
                del data[random.randrange(len(data)) :]
            case 1:  # some bytes changed
                for _ in range(random.randint(1, 8)):
                    data[random.randrange(len(data))] = random.randrange(256)
            case 2:  # the beginning of another format
                other = random.choice(files)[: random.randint(4, 32)]
                data[: len(other)] = other
            case 3:  # a size that is a lie, with too few pixels
                sides = random.choice([(1, 1 << 31), (10_000, 10_000), (0, 5), (8192, 8192), (5, 0), (1, 60_000)])
                data = bytearray(png(*sides, bytes(1 + sides[0] % 97)))
            case 4:  # nothing but noise, perhaps after a beginning
                data = bytearray(
                    random.choice((b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", b"GIF89a"))
                )
                data += random.randbytes(random.randint(0, 300))
            case 5:  # a run of bytes twice, or not at all
                start = random.randrange(len(data))
                part = data[start : start + random.randint(1, 64)]
                data[start : start + (0 if number % 20 < 10 else len(part))] = part if number % 20 < 10 else b""
            case 6:  # lengths of segments and chunks
                start = random.randrange(len(data))
                data[start : start + 4] = random.choice((b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff"))
            case 7:  # two files in one
                data += random.choice(files)
            case 8:  # modes that Pillow treats in their own ways, all right
                pass
            case 9:  # many small segments before the size
                data = bytearray(b"\xff\xd8" + b"\xff\xe1\x00\x02" * random.randint(1, 3000) + bytes(data[2:]))
        yield bytes(data)
