"""VideoForm: how a video, a list of frames, becomes groups of frames that are to all that follows a few images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fenceline.images.image_input import DIGEST_NBYTES, ImageInput
from fenceline.images.prepare import ImageSettings


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """When frames are: at ``stamps``, in seconds, one for each; or without them ``fps`` in a second, from 0 on."""

    fps: float = 2.0
    stamps: tuple[float, ...] = ()

    def seconds(self, num_frames: int) -> list[float]:
        """The time of each."""
        return list(self.stamps) or [index / self.fps for index in range(num_frames)]

    def moments(self, num_groups: int, group_size: int, tokens_per_second: float) -> list[int]:
        """How far the positions of each group are behind the first's. The same roundings as in transformers."""
        if self.stamps:
            since = np.array(self.stamps[::group_size], dtype=np.float32) - np.float32(self.stamps[0])
            moments = since * np.float32(tokens_per_second)
        else:
            step = np.float32(tokens_per_second) * np.float32(group_size / self.fps)
            moments = np.arange(num_groups, dtype=np.float32) * step
        return np.floor(moments).astype(np.int64).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoForm:
    """How a model's videos are prepared: ``settings`` are those of their frames. ``placeholder``: the id of the token
    that stands for one embedding in a prompt, and before that for a group. ``written``: what chat templates write for
    a video, and ``group``: what the tokenizer gets for each of its groups, with ``{}`` in place of its seconds if the
    model reads these as text. Otherwise they are its positions: ``tokens_per_second`` to a second."""

    settings: ImageSettings
    placeholder: int
    written: str
    group: str
    tokens_per_second: float = 0.0

    def as_tokenized(self, num_frames: int, times: FrameTimes) -> str:
        """The text of a video of ``num_frames`` frames: one placeholder for each group."""
        size, seconds = self.settings.group_size, times.seconds(num_frames)
        padded = [*seconds, *seconds[-1:] * (-num_frames % size)]
        means = [(padded[start] + padded[start + size - 1]) / 2 for start in range(0, len(padded), size)]
        return "".join([self.group.format(f"{mean:.1f}") for mean in means])

    def in_text(self, text: str, videos: Sequence[tuple[int, FrameTimes]]) -> str:
        """``text``, a prompt in which ``written`` stands for each of ``videos``, given by numbers of frames and their
        times, as the tokenizer gets it. Raises ``ValueError`` if it does not."""
        before, *behind = text.split(self.written)
        self._check_number(len(behind), videos)
        return before + "".join([self.as_tokenized(*one) + rest for one, rest in zip(videos, behind, strict=True)])

    def in_ids(
        self, ids: Sequence[int], videos: Sequence[tuple[int, FrameTimes]], encode: Callable[[str], Sequence[int]]
    ) -> list[int]:
        """The same of token ids; ``encode``: of texts without further tokens."""
        written = list(encode(self.written))
        first = written.index(self.placeholder)
        places = [place for place, token in enumerate(ids) if token == self.placeholder]
        self._check_number(len(places), videos)
        made: list[int] = []
        end = 0
        for place, one in zip(places, videos, strict=True):
            start = place - first
            if start < end or list(ids[start : start + len(written)]) != written:
                raise ValueError(f"the prompt's video placeholders are not written as {self.written}")
            made += [*ids[end:start], *encode(self.as_tokenized(*one))]
            end = start + len(written)
        return [*made, *ids[end:]]

    def _check_number(self, num_written: int, videos: Sequence[object]) -> None:
        if num_written != len(videos):
            raise ValueError(
                f"the prompt has {num_written} video placeholders and the request {len(videos)} videos: give one video"
                f" for each, written as {self.written}, and do not write the model's video tokens into texts"
            )

    def moments(self, num_frames: int, times: FrameTimes) -> list[int]:
        """How far the positions of each group are behind the first's; 0 where time is no axis of positions."""
        num_groups = self.settings.num_groups(num_frames)
        if not self.tokens_per_second:
            return [0] * num_groups
        return times.moments(num_groups, self.settings.group_size, self.tokens_per_second)

    def groups(self, frames: Sequence[ImageInput], times: FrameTimes) -> list[ImageInput]:
        """The groups of ``frames``, at least one, all of one size."""
        size, moves = self.settings.group_size, self.tokens_per_second > 0
        padded = [*frames, *[frames[-1]] * (-len(frames) % size)]
        moments = enumerate(self.moments(len(frames), times))
        return [_joined(padded[i * size : (i + 1) * size], moment, moves and i > 0) for i, moment in moments]


def _joined(frames: Sequence[ImageInput], moment: int, continues: bool) -> ImageInput:
    first = frames[0]
    known = hashlib.blake2b(repr((len(frames), moment, continues)).encode(), digest_size=DIGEST_NBYTES)
    for frame in frames:
        known.update(frame.digest)
    return ImageInput(
        pixels=b"".join([frame.pixels for frame in frames]),
        height=first.height,
        width=first.width,
        grid=first.grid,
        digest=known.digest(),
        num_frames=len(frames),
        moment=moment,
        continues=continues,
    )
