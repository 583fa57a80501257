"""The process that decodes and resizes images, each as a job of its own (:mod:`fenceline.ipc.forked_jobs`): whatever a
file does to its decoder, it costs that file's request alone."""

from __future__ import annotations

import binascii
import io
import warnings
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, get_args

import msgspec
import numpy as np

from fenceline.images.header import MAX_PIXELS, Format, read_header
from fenceline.images.prepare import ImageSettings, as_rgb, prepare
from fenceline.ipc.child_process import freeze_garbage_collector
from fenceline.ipc.forked_jobs import Job, JobLimits, JobResult, Work, serve_jobs

if TYPE_CHECKING:
    from PIL import Image

DECODING = JobLimits(
    cpu_s=10,
    short_cpu_s=1.0,
    wall_s=30.0,
    memory_bytes=1 << 30,  # an image of MAX_PIXELS takes a quarter with transparency, and is copied once or twice
    done="decoded",
    smaller="make it smaller",
)
# EXIF data that say that an image is upright.
_UPRIGHT = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x01\0\0\0\0\0\0\0"


class DecodeJob(Job, frozen=True):
    """An image file, ``data``, or ``text`` from ``start`` on in base64. Its limits of pixels are within the model's.
    ``num_frames``: of the video of which it is one; 0: it is of none."""

    min_pixels: int
    max_pixels: int
    num_frames: int = 0
    data: bytes = b""
    text: str = ""
    start: int = 0


def serve(connection: Connection, num_children: int) -> None:
    """The process's main function: receive the ImageSettings of images and of videos, load Pillow, and decode."""
    serve_jobs(connection, num_children, DECODING, DecodeJob, _begin)


def _begin(message: bytes) -> tuple[bytes, Work[DecodeJob]]:
    settings, of_videos = msgspec.msgpack.decode(message, type=tuple[ImageSettings, ImageSettings | None])
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = MAX_PIXELS  # checked before; this is for what a plugin finds out later
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    for format in get_args(Format):  # here, so that not every child imports the modules for it
        file = io.BytesIO()
        Image.new("RGB", (1, 1)).save(file, format, exif=_UPRIGHT)
        prepare(decode(file.getvalue()), settings)
    freeze_garbage_collector()

    def decoded(job: DecodeJob) -> JobResult:
        used = of_videos if job.num_frames and of_videos is not None else settings
        image = decode(job.data or from_base64(job.text[job.start :]))
        made = prepare(image, used.with_pixels(job.min_pixels, job.max_pixels), max(job.num_frames, 1))
        return JobResult(job.id, msgspec.msgpack.encode(made))

    return b"", decoded


def from_base64(text: str) -> bytes:
    """The bytes that ``text`` stands for. Raises ValueError unless it is base64 as it is written by everyone, without
    line breaks and with its padding."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:  # binascii's own too
        raise ValueError(f"it is not base64 ({error})") from None


def decode(data: bytes) -> Image.Image:
    """The first image in the file ``data``, upright, as RGB. Raises ValueError for what is none, and MemoryError."""
    from PIL import Image

    header = read_header(data, is_whole=True)
    assert header is not None, "the file is whole"
    header.check()
    try:
        image = Image.open(io.BytesIO(data), formats=[header.format])
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"an image of {image.width}x{image.height} pixels is behind its header")
        image.load()
        _turn_upright(image)
        return as_rgb(_eight_bits(image))
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plugins raise whatever they come across
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ValueError(f"its {header.format} file is broken ({reason[:200]})") from None


def _eight_bits(image: Image.Image) -> Image.Image:
    """``image``, one of 16 bits scaled to 8: Pillow itself would make everything but the darkest white."""
    if not image.mode.startswith("I"):
        return image
    from PIL import Image

    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _turn_upright(image: Image.Image) -> None:
    """Turn ``image`` as its EXIF data say that it is to be turned. What they say wrongly is not heeded."""
    from PIL import ImageOps

    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:
        return
