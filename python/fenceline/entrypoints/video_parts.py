"""Videos in requests: lists of frames in the forms that clients know. Video files are not decoded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from fenceline.config.request_limits import MAX_IMAGE_CHARS
from fenceline.frontend.request_types import ImageSource, VideoSource
from fenceline.images.video import FrameTimes

# vLLM's form: JPEG files in base64, one behind the other.
_FRAMES_URL = re.compile(r"data:video/jpeg(;[a-z0-9=.+-]+)*;base64,", re.IGNORECASE)
_MAX_PREFIX_CHARS = 256
_MOST_SECONDS = 1e6
_MOST_FPS = 1e3


def frame_urls(video: object) -> list[str]:
    """The images of which ``video`` consists: a list of their URLs, or one URL with all of them. Raises ValueError,
    whose text goes on after "a video". Count its frames first (:func:`num_frames`), of which there may be millions."""
    if isinstance(video, str):
        found = _FRAMES_URL.match(video, 0, _MAX_PREFIX_CHARS)
        if found is None:
            raise ValueError(
                "that is no list of frames, and video files are not decoded here: send its frames, as in "
                '{"type": "video", "video": [image URLs], "fps": 2.0}, or as data:video/jpeg;base64,JPEG,JPEG,...'
            )
        return video[found.end() :].split(",")
    if not isinstance(video, list | tuple) or not video:
        raise ValueError("without frames: send a list of image URLs")
    for index, url in enumerate(video):
        if not isinstance(url, str) or not url:
            raise ValueError(f"whose frame {index} is not the URL of an image")
        if len(url) > MAX_IMAGE_CHARS:
            raise ValueError(f"whose frame {index} has {len(url)} characters, at most {MAX_IMAGE_CHARS} are allowed")
    return list(video)


def num_frames(video: object) -> int:
    """How many frames ``video`` has at most, before anything is made of them."""
    if isinstance(video, str):
        return max(video.count(","), 1)
    return len(video) if isinstance(video, list | tuple) else 1


def frame_times(part: Mapping[str, object], num_frames: int) -> FrameTimes:
    """When the frames of a video are, from its fields ``fps`` or ``sample_fps``, or ``timestamps``, all of which may be
    missing. Raises ValueError, whose text goes on after "a video"."""
    fps, stamps = part.get("fps"), part.get("timestamps")
    fps = part.get("sample_fps") if fps is None else fps
    if fps is not None and stamps is not None:
        raise ValueError("with both fps and timestamps: give one of them")
    if stamps is not None:
        if not isinstance(stamps, list | tuple) or len(stamps) != num_frames:
            raise ValueError(f"whose timestamps are not a list of {num_frames} numbers, one for each frame")
        seconds = tuple(map(_number, stamps))
        if not all(0.0 <= one <= _MOST_SECONDS for one in seconds):
            raise ValueError(f"whose timestamps are not seconds from 0 to {_MOST_SECONDS:.0f}")
        if any(later < earlier for earlier, later in pairwise(seconds)):
            raise ValueError("whose timestamps do not ascend")
        return FrameTimes(stamps=seconds)
    if fps is None:
        return FrameTimes()
    rate = _number(fps)
    if not 1 / _MOST_SECONDS <= rate <= _MOST_FPS:
        raise ValueError(f"whose fps is not a number above 0, and at most {_MOST_FPS:.0f}")
    return FrameTimes(rate)


def _number(value: object) -> float:
    """``value``, nan for what is no number. The examples of Qwen3-VL write numbers as texts."""
    try:
        return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def video_source(
    place: str, urls: Sequence[str], times: FrameTimes, min_pixels: int | None, max_pixels: int | None
) -> VideoSource:
    """The video at ``place`` with frames at ``urls``; the limits are those of each frame."""
    frames = [
        ImageSource(f"{place}.video[{index}]", url, min_pixels=min_pixels, max_pixels=max_pixels)
        for index, url in enumerate(urls)
    ]
    return VideoSource(place, tuple(frames), times)
