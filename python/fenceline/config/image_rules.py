"""ImageRules: which images a server takes, and what becomes of them, from the flags and the model's files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fenceline.config import ConfigError, require
from fenceline.config.model_config import ModelConfig
from fenceline.config.server_args import ServerArgs
from fenceline.images.prepare import ImageSettings
from fenceline.images.video import VideoForm

# Unless --limit-mm-data-per-request says otherwise.
_MAX_IMAGES = 32
_MAX_VIDEOS = 4
_MAX_FRAMES = 256
_MEDIA = ("image", "video", "audio")
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|[0-9a-f:.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """``placeholder``: the token that stands for an image in a prompt, and for each of its embeddings. ``max_images``
    and ``max_videos``: of one request; ``max_frames``: of one video. ``domains``: hosts from which images are fetched,
    in lower case. ``written`` and ``video``: see ``VisionConfig``."""

    settings: ImageSettings
    placeholder: int
    max_images: int
    domains: frozenset[str]
    written: tuple[str, str] | None = None
    video: VideoForm | None = None
    max_videos: int = _MAX_VIDEOS
    max_frames: int = _MAX_FRAMES

    @property
    def placeholders(self) -> tuple[int, int]:
        """The tokens that stand for images and for groups of a video's frames; -1 is none."""
        return self.placeholder, -1 if self.video is None else self.video.placeholder


def image_rules(args: ServerArgs, model: ModelConfig) -> ImageRules | None:
    """None for a model that reads text only. Raises ConfigError for flags that are wrong, or are not for it."""
    if model.vision is None:
        for option, value in (
            ("--limit-mm-data-per-request", args.limit_mm_data_per_request),
            ("--allowed-media-domains", args.allowed_media_domains),
            ("--mm-process-config", args.mm_process_config),
        ):
            require(value is None, f"{option}: {model.architecture} reads text only: leave it out")
        return None
    hosts = [host.lower().rstrip(".") for host in args.allowed_media_domains or ()]
    for host in hosts:
        require(
            _HOST.fullmatch(host) is not None,
            f"--allowed-media-domains {host}: give a host's name alone, as in images.example.org",
        )
    video = model.vision.video
    return ImageRules(
        settings=_settings(args, model.vision.images, "image"),
        placeholder=model.vision.placeholder,
        max_images=_limit(args, "image", "count", _MAX_IMAGES),
        domains=frozenset(hosts),
        written=model.vision.written,
        video=None if video is None else replace(video, settings=_settings(args, video.settings, "video")),
        max_videos=_limit(args, "video", "count", _MAX_VIDEOS),
        max_frames=_limit(args, "video", "num_frames", _MAX_FRAMES),
    )


def _limit(args: ServerArgs, kind: str, name: str, usual: int) -> int:
    option = "--limit-mm-data-per-request"
    most = _object(option, args.limit_mm_data_per_request, _MEDIA).get(kind, usual)
    if isinstance(most, Mapping):  # vLLM's form, whose sizes are for its measuring
        most = most.get(name, usual)
    elif name != "count":
        most = usual
    if type(most) is not int or most < 0:
        raise ConfigError(f'{option}: {kind} must be a number of {kind}s, as in {{"{kind}": 8}}')
    return most


def _settings(args: ServerArgs, settings: ImageSettings, kind: str) -> ImageSettings:
    option = "--mm-process-config"
    given = _object(option, args.mm_process_config, _MEDIA).get(kind, {})
    pixels = _object(option, json.dumps(given), ("min_pixels", "max_pixels"))
    if not all(type(value) is int for value in pixels.values()):
        raise ConfigError(f"{option}: min_pixels and max_pixels must be whole numbers")
    try:
        return settings.with_pixels(**pixels)  # type: ignore[arg-type]  # checked
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def _object(option: str, text: str | None, names: tuple[str, ...]) -> Mapping[str, object]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{option}: not valid JSON: {error}") from error
    if not isinstance(value, dict) or (unknown := sorted(value.keys() - set(names))):
        what = f"has {unknown[0]!r}" if isinstance(value, dict) else f"is {text}"
        raise ConfigError(f"{option} {what}: give a JSON object with {', '.join(names)}")
    return value
