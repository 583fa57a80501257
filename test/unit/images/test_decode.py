"""Image files: what is read of their beginning, what becomes of each kind, and that none does harm."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hostile_images import FORMATS, hostile_images, oriented, picture, png, written
from PIL import Image

from fenceline.images.decode import decode, from_base64
from fenceline.images.header import MAX_PIXELS, Header, read_header


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("options", [{}, {"lossless": True}])
def test_the_first_bytes_say_how_large_an_image_is(format: str, options: dict) -> None:
    data = written(picture(300, 7), format, **options)
    assert read_header(data, is_whole=True) == Header(format, 300, 7)
    if format != "JPEG":
        assert read_header(data[:30], is_whole=False) == Header(format, 300, 7)
    assert read_header(data[:20], is_whole=False) is None


def test_padding_in_a_jpeg_file_costs_nothing() -> None:
    """The event loop reads the first bytes of all images of a request, one after the other."""
    data = written(picture(300, 7), "JPEG")
    padded = data[:2] + bytes([255]) * (4 << 20) + data[2:]
    began = time.process_time()
    assert read_header(padded, is_whole=True) == Header("JPEG", 300, 7)
    assert time.process_time() - began < 0.2


def test_webp_with_transparency_has_its_size_elsewhere() -> None:
    data = written(picture(30, 9, "RGBA"), "WEBP", exif=Image.Exif().tobytes())
    assert data[12:16] in (b"VP8X", b"VP8L")
    assert read_header(data, is_whole=True) == Header("WEBP", 30, 9)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a PNG, JPEG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a PNG"),
        (written(picture(3, 3), "BMP"), "not a PNG"),
        (written(picture(3, 3), "TIFF"), "not a PNG"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "does not say how large"),
        (b"\xff\xd8\xff\xe0" + bytes(40), "does not say how large"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 " + bytes(40), "does not say how large"),
        (png(0, 5), "of 0x5 pixels"),
        (png(10_000, 10_000), f"at most {MAX_PIXELS} are read"),
        (written(picture(20, 20), "PNG")[:-30], "PNG file is broken"),
        (written(picture(20, 20), "JPEG")[:-90], "JPEG file is broken"),
    ],
)
def test_why_a_file_is_no_image(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode(data)


def test_a_bomb_of_100_megapixels_costs_microseconds() -> None:
    bomb = png(10_000, 10_000, bytes(10_001), times=10_000)
    assert len(bomb) < 100_000
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        with pytest.raises(ValueError, match="at most"):
            decode(bomb)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.001


def test_an_image_that_grows_behind_its_header_is_refused() -> None:
    """The first frame of a GIF may be larger than what its header says."""
    data = bytearray(written(Image.new("P", (40, 40)), "GIF"))
    place = data.index(b"\x2c")
    data[place + 5 : place + 9] = b"\xff\xff\xff\xff"
    assert read_header(bytes(data), is_whole=True) == Header("GIF", 40, 40)
    with pytest.raises(ValueError, match="behind its header|broken"):
        decode(bytes(data))


def test_sixteen_bits_become_eight() -> None:
    values = np.arange(0, 1 << 16, 257, dtype=np.uint16).reshape(16, 16)
    assert (np.asarray(decode(written(Image.fromarray(values), "PNG")))[..., 1] == values >> 8).all()


def test_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (5, 4), color) for color in ("red", "lime")]
    for format in ("GIF", "WEBP", "PNG"):
        image = decode(written(frames[0], format, save_all=True, append_images=frames[1:], lossless=True))
        assert image.getpixel((2, 2)) == (255, 0, 0)


def test_images_are_turned_as_cameras_say() -> None:
    assert decode(oriented(1, 12, 5)).size == (12, 5)
    assert decode(oriented(6, 12, 5)).size == (5, 12)
    assert decode(oriented(99, 12, 5)).size == (12, 5)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "L", "CMYK"])
def test_every_kind_of_pixels_becomes_rgb(mode: str) -> None:
    image = decode(written(picture(9, 5, mode), "JPEG" if mode == "CMYK" else "PNG"))
    assert (image.mode, image.size) == ("RGB", (9, 5))


@pytest.mark.parametrize("text", ["AA", "AA=", "AAAA\n", " AAAA", "AA-_", "AA==AA==", "AA%3D", "é", "AAA=AAAA"])
def test_base64_is_strict(text: str) -> None:
    with pytest.raises(ValueError, match="it is not base64"):
        from_base64(text)


def test_2000_hostile_images_are_decoded_or_refused() -> None:
    num_decoded = 0
    for data in hostile_images(2000):
        try:
            image = decode(data)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
        else:
            assert image.mode == "RGB" and image.width * image.height <= MAX_PIXELS
            num_decoded += 1
    assert 300 < num_decoded < 1700
