"""ImageClient: checks the images of requests, and has them decoded by another process.

What is too much is refused before it costs anything: a file's first bytes say how large its image is, and so how many
tokens it has. Decoding is limited in time and memory (:mod:`fenceline.images.decode`), and happens once for the samples
of a prompt. The latest images are kept decoded, because each turn of a conversation sends all of its images again.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import msgspec

from fenceline.config import num_usable_cores
from fenceline.config.image_rules import ImageRules
from fenceline.frontend.image_fetch import fetch
from fenceline.frontend.job_process import JobProcess, JobQueue, RestartedProcess
from fenceline.frontend.request_types import ImageSource, MediaSource, RequestError, VideoSource
from fenceline.images.decode import DECODING, DecodeJob, from_base64, serve
from fenceline.images.header import HEAD_BYTES, MAX_BYTES, Header, read_header
from fenceline.images.image_input import ImageInput
from fenceline.images.prepare import ImageSettings
from fenceline.ipc.forked_jobs import JobResult

MAX_WAITING = 1024  # to be decoded
MAX_PIXEL_BYTES = 4 << 30  # of the requests in flight, each of which keeps its images decoded, in every rank
MAX_KEPT_BYTES = 256 << 20  # of the pixels of the latest images
MAX_FETCHES = 8  # at a time, until what they bring is decoded
LOW_PIXELS = 512 * 512  # of an image with the detail "low"
_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]+|application/octet-stream)?(;[a-z0-9=.+-]+)*;base64,", re.IGNORECASE)
_MAX_PREFIX_CHARS = 256
_FEW_BYTES = 3 << 9
_LONG_CHARS = 1 << 17  # of a file whose digest takes so long that others would wait for those of many
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


class Least(NamedTuple):
    """Of images: at least so many tokens, and bytes of pixels as the model gets them; and positions that pass within
    videos."""

    num_tokens: int
    num_bytes: int
    num_moments: int


class ImageClient:
    """Lives on one event loop. Errors name an image by its place."""

    def __init__(self, rules: ImageRules | None) -> None:
        """``rules``: None for a model that reads text only."""
        self.rules = rules
        self._process = RestartedProcess(self._start)
        # Half of the cores, so that generation has the others; two, so that nobody waits for one alone.
        self._num_children = min(8, max(2, num_usable_cores() // 2))
        self._queue = JobQueue(self._num_children)
        self._fetching = asyncio.Semaphore(MAX_FETCHES)
        self._latest = _Latest()
        self._num_waiting = self._num_bytes = 0  # images, and the pixels that they will have at least

    def check(self, images: Sequence[MediaSource]) -> None:
        """Raise RequestError (400) for images and videos that this server does not take, whatever they show."""
        if not images:
            return
        if self.rules is None:
            raise _refused(images[0], "this model reads text only, leave images out", "unsupported")
        pictures = [image for image in images if isinstance(image, ImageSource)]
        videos = [image for image in images if isinstance(image, VideoSource)]
        if videos and self.rules.video is None:
            raise _refused(videos[0], "this model reads no videos: send frames as images", "unsupported")
        _check_number(pictures, self.rules.max_images, "the request", "images")
        _check_number(videos, self.rules.max_videos, "the request", "videos")
        for video in videos:
            _check_number(video.frames, self.rules.max_frames, "the video", "frames")
        for image, _ in _files(images):
            try:
                self._data_start(image.url)
            except ValueError as error:
                raise _refused(image, str(error)) from None

    def least(self, images: Sequence[MediaSource]) -> Least:
        """What the images and videos have at least, as far as their files' first bytes say. Raises RequestError (400)
        for those that are no images, or too large ones, and for frames of several sizes."""
        return Least(*map(sum, zip(*map(self._least, images), strict=True)))

    def _least(self, image: MediaSource) -> Least:
        files = (image,) if isinstance(image, ImageSource) else image.frames
        num_frames, size = len(files) if isinstance(image, VideoSource) else 0, None
        num_tokens, settings = 1, self._settings(files[0], num_frames)
        for file in files:
            try:
                start = self._data_start(file.url)
                header = None if start is None else _header(file.url, start)
                if header is None:
                    continue
                header.check()
                if size is None:
                    size = header.width, header.height
                    num_tokens = settings.num_tokens(*size, max(num_frames, 1))
                _check_size((header.width, header.height), size)
            except ValueError as error:
                raise _refused(file, str(error)) from None
        num_moments = 0
        if isinstance(image, VideoSource) and self.rules is not None and self.rules.video is not None:
            num_moments = self.rules.video.moments(num_frames, image.times)[-1]
        return Least(num_tokens, num_tokens * settings.token_bytes, num_moments)

    async def prepare(self, images: Sequence[MediaSource], num_bytes: int = 0, num_held: int = 0) -> list[ImageInput]:
        """The images as the model gets them, and each group of frames of videos. ``num_bytes``: what their pixels are
        at least; ``num_held``: what those of requests in flight are. Raises RequestError: 400 with the reason where one
        cannot be decoded, 503 where it could be later."""
        assert self.rules is not None, "checked before"
        files = list(_files(images))
        if num_bytes > MAX_PIXEL_BYTES:
            raise RequestError(400, f"the body's images have {num_bytes >> 20} MiB of pixels; send several bodies")
        if images and num_held + self._num_bytes + num_bytes > MAX_PIXEL_BYTES:
            raise RequestError(503, "the images of the requests in flight take too much memory; try again later")
        if self._num_waiting + len(files) > MAX_WAITING:
            raise RequestError(503, f"{self._num_waiting} images wait to be decoded; try again later")
        self._num_waiting += len(files)
        self._num_bytes += num_bytes
        tasks = [asyncio.ensure_future(self._prepared(*file)) for file in files]
        try:
            if tasks:  # gather would end only with the last of them, if the request has been aborted
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in tasks if task.done() and task.exception()]
            decoded = iter([task.result() for task in failed or tasks])
            made: list[ImageInput] = []
            for image in images:
                if isinstance(image, ImageSource):
                    made.append(next(decoded))
                else:
                    made += await self._groups(image, list(islice(decoded, len(image.frames))))
            return made
        finally:
            self._num_waiting -= len(files)
            self._num_bytes -= num_bytes
            for task in tasks:
                task.add_done_callback(lambda task: task.cancelled() or task.exception())  # one has been raised
                task.cancel()

    def close(self) -> None:
        """End the process that decodes. Requests that wait for it get RequestError (503)."""
        self._process.close()

    async def _groups(self, video: VideoSource, frames: Sequence[ImageInput]) -> Sequence[ImageInput]:
        """The groups of the decoded ``frames``. Raises RequestError (400) if they are of several sizes: of files that
        are fetched, or turned."""
        assert self.rules is not None and self.rules.video is not None, "checked before"
        for source, frame in zip(video.frames, frames, strict=True):
            try:
                _check_size((frame.width, frame.height), (frames[0].width, frames[0].height))
            except ValueError as error:
                raise _refused(source, str(error)) from None
        return await asyncio.to_thread(self.rules.video.groups, frames, video.times)

    async def _prepared(self, image: ImageSource, num_frames: int) -> ImageInput:
        assert self.rules is not None, "checked before"
        start = self._data_start(image.url)
        if start is not None:
            return await self._decoded(image, num_frames, b"", start)
        async with self._fetching:
            try:
                data = await fetch(image.url, self.rules.domains)
            except ValueError as error:
                raise _refused(image, str(error)) from None
            return await self._decoded(image, num_frames, data, 0)

    async def _decoded(self, image: ImageSource, num_frames: int, data: bytes, start: int) -> ImageInput:
        """``data``, or the base64 in the URL from ``start`` on, unless it is among the latest."""
        settings = self._settings(image, num_frames)
        is_long = max(len(data), len(image.url)) > _LONG_CHARS
        digest = (
            await asyncio.to_thread(_digest, data, image.url, start) if is_long else _digest(data, image.url, start)
        )
        key = digest, settings, num_frames
        kept = self._latest.get(key)
        if kept is not None:
            return kept
        made = await self._made(image, num_frames, data, start, settings)
        if made.error:
            raise RequestError(400 if made.is_refused else 503, f"{image.place}: {made.error}", param=image.place)
        decoded = msgspec.msgpack.decode(made.data, type=ImageInput)
        self._latest.put(key, decoded)
        return decoded

    async def _made(
        self, image: ImageSource, num_frames: int, data: bytes, start: int, settings: ImageSettings
    ) -> JobResult:
        def make(id: int, is_short: bool) -> DecodeJob:
            limits = settings.min_pixels, settings.max_pixels
            return DecodeJob(id, is_short, *limits, num_frames, data, "" if data else image.url, start)

        for is_long in (False, True):
            async with self._queue.turn(0, is_long):
                process = self._process.get()
                await process.started()
                job = asyncio.ensure_future(process.run(partial(make, is_short=not is_long)))
                try:
                    made = await asyncio.shield(job)
                finally:
                    await asyncio.wait([job])  # nor does the turn end before, if the client leaves
            if not made.is_given_up:
                break
        return made

    def _start(self) -> JobProcess:
        assert self.rules is not None, "checked before"
        video = self.rules.video
        settings = msgspec.msgpack.encode((self.rules.settings, None if video is None else video.settings))
        return JobProcess("image-decoder", serve, (self._num_children,), settings, DECODING)

    def _settings(self, image: ImageSource, num_frames: int) -> ImageSettings:
        """How it is prepared, one of ``num_frames`` of a video, or an image. Raises RequestError for limits that leave
        no size."""
        assert self.rules is not None, "checked before"
        settings, most = self.rules.settings, image.max_pixels
        if num_frames and self.rules.video is not None:
            settings = self.rules.video.settings
        if most is None and image.detail == "low":
            most = max(LOW_PIXELS, settings.min_pixels)
        try:
            return settings.with_pixels(image.min_pixels, most, max(num_frames, 1))
        except ValueError as error:
            raise _refused(image, str(error)) from None

    def _data_start(self, url: str) -> int | None:
        """Where base64 begins in ``url``; None for an image that is to be fetched. Raises ValueError."""
        assert self.rules is not None, "checked before"
        scheme = _SCHEME.match(url, 0, _MAX_PREFIX_CHARS)
        if scheme is None:
            start = 0
        elif scheme[0].lower() in ("http:", "https:"):
            if not self.rules.domains:
                raise ValueError(
                    "this server fetches no images: send it as a data: URL, or start the server with "
                    "--allowed-media-domains and the image's host"
                )
            return None
        else:
            found = _DATA_URL.match(url, 0, _MAX_PREFIX_CHARS)
            if found is None:
                raise ValueError("its URL must be data:image/TYPE;base64,... or of http or https")
            start = found.end()
        if (len(url) - start) // 4 * 3 > MAX_BYTES + 2:
            raise ValueError(f"its file has more than {MAX_BYTES >> 20} MiB")
        return start


_Key = tuple[bytes, ImageSettings, int]  # the digest of a file, how it is prepared, and its video's number of frames


class _Latest:
    """The images that were decoded or sent again last, with MAX_KEPT_BYTES of pixels at most."""

    def __init__(self) -> None:
        self._images: OrderedDict[_Key, ImageInput] = OrderedDict()  # the least recently used first
        self._num_bytes = 0

    def get(self, key: _Key) -> ImageInput | None:
        found = self._images.get(key)
        if found is not None:
            self._images.move_to_end(key)
        return found

    def put(self, key: _Key, image: ImageInput) -> None:
        if key in self._images:  # it was sent twice at the same time
            return
        self._images[key] = image
        self._num_bytes += len(image.pixels)
        while self._num_bytes > MAX_KEPT_BYTES:
            self._num_bytes -= len(self._images.popitem(last=False)[1].pixels)


def _digest(data: bytes, url: str, start: int) -> bytes:
    """Of a file, ``data``, or else of the base64 in ``url`` from ``start`` on; a file of the same bytes has another."""
    made = hashlib.sha256(b"file" if data else b"text")
    made.update(data or url[start:].encode(errors="surrogatepass"))
    return made.digest()


def _header(url: str, start: int) -> Header | None:
    """What the first bytes say, None if they are not enough. Few are, of most files, and a video has many files."""
    for num_bytes in (_FEW_BYTES, HEAD_BYTES):
        end = start + num_bytes // 3 * 4
        found = read_header(from_base64(url[start:end]), is_whole=end >= len(url))
        if found is not None:
            return found
    return None


def _files(images: Sequence[MediaSource]) -> Iterator[tuple[ImageSource, int]]:
    """The files of ``images``, each with the number of frames of its video; 0 for an image."""
    for image in images:
        if isinstance(image, ImageSource):
            yield image, 0
        else:
            yield from ((frame, len(image.frames)) for frame in image.frames)


def _check_number(images: Sequence[MediaSource], most: int, of: str, what: str) -> None:
    if len(images) > most:
        limit = "--limit-mm-data-per-request"
        raise _refused(images[most], f"{of} has {len(images)} {what}, this server takes {most} at most ({limit})")


def _check_size(size: tuple[int, int], first: tuple[int, int]) -> None:
    if size != first:
        raise ValueError(
            f"its {size[0]}x{size[1]} pixels are not the {first[0]}x{first[1]} of the frames before it: send frames of"
            " one size"
        )


def _refused(image: MediaSource, reason: str, code: str | None = None) -> RequestError:
    return RequestError(400, f"{image.place}: {reason}", param=image.place, code=code)
