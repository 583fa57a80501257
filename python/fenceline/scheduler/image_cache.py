"""ImageCache: which rows of the device's pool hold the embeddings of which images.

An image's embeddings are computed in the first step that computes some of its tokens, and kept under its digest until
the rows are needed for others: the least recently used go first, never those that the step being planned reads. Rows
that a step in flight reads may go, because they are retired with its Points, which their next user waits for. So a
later chunk of the prompt, a resumed request or another conversation finds them, or they are computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fenceline.images.image_input import ImageInput
from fenceline.images.positions import position_delta, prompt_axes
from fenceline.memory_order import LeasePool, Point, Points
from fenceline.model_executor.step import Encode

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Entry:
    """The ``rows`` of an image, in the order of its tokens, and the end of the last step that used them."""

    rows: I32
    after: Points


@dataclass(slots=True)
class StepImages:
    """The images of the step that is being planned: those that it reads, by digest, and those that it computes."""

    used: dict[bytes, int] = field(default_factory=dict)  # with their numbers of rows
    encodes: list[Encode] = field(default_factory=list)
    after: Points = field(default_factory=Points.none)  # when the rows of ``encodes`` may be written


class ImageCache:
    """Leases the rows of the pool. One thread, the scheduler's, calls it, and its decisions are a function of these
    calls."""

    def __init__(
        self, num_rows: int, has_axes: bool, sees_whole: bool = False, most_computed: int = 0, lookahead: int = 0
    ) -> None:
        """``num_rows``: embeddings of the pool, without the sink; 0 for a model without a tower. ``has_axes``: whether
        the tokens' positions have three axes. ``sees_whole``: whether the tokens of an image attend to one another, so
        that one step computes all of them that are not cached. ``most_computed``: embeddings that one step computes,
        apart from those of a single larger image, so that requests beside it do not wait for many images.
        ``lookahead``: of how many tokens behind a chunk a draft reads the embeddings."""
        self.most_in_step = num_rows  # embeddings of the images that one step reads
        self.rows = LeasePool("image embeddings", num_rows + 1, reserved=min(num_rows, 1))
        self._has_axes, self._sees_whole, self._most_computed = has_axes, sees_whole, most_computed
        self._lookahead = lookahead
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self.planned: list[_Entry] = []  # of the step that is launched next
        self.num_computed = 0  # images whose embeddings were computed

    def room(self, step: StepImages, images: Sequence[ImageInput], start: int, size: int, most: int) -> int:
        """How many of the ``size`` tokens from ``start`` on of a prompt with ``images`` the step may compute, beside
        what it has already: as many as have room for the embeddings of their images, all at once. If images are seen
        whole, those before an image that would not be; or else, so that the prompt goes on, all of its tokens, if these
        are not more than ``most``."""
        num_used = sum(step.used.values())
        num_computed = sum([len(encode.rows) for encode in step.encodes])
        is_alone, added = num_computed == 0, set[bytes]()
        for image in _within(images, start, start + size + self._lookahead):
            if image.offset >= start + size + self._lookahead:
                break
            num_before = self._num_before(images, image, start)
            if image.digest not in step.used and image.digest not in added:
                num_used += image.num_tokens
                added.add(image.digest)
                if image.digest not in self._entries:
                    is_first = num_computed == 0 or (is_alone and num_before == 0)
                    num_computed += image.num_tokens
                    if not is_first and num_computed > self._most_computed:
                        return num_before
            if num_used > self.most_in_step:
                return num_before
            if self._sees_whole and image.offset < start + size < image.end:
                size = image.offset - start if image.offset > start else image.end - start
                if size > most:
                    return 0
        return size

    def _num_before(self, images: Sequence[ImageInput], image: ImageInput, start: int) -> int:
        """How many tokens from ``start`` on can be computed without the embeddings of ``image``."""
        end = image.offset - self._lookahead
        if self._sees_whole:
            end = next((one.offset for one in _within(images, end, end)), end)
        return max(end - start, 0)

    def whole(self, images: Sequence[ImageInput], start: int, size: int) -> tuple[tuple[int, int], ...]:
        """``Chunk.whole`` of the ``size`` tokens from ``start`` on."""
        if not self._sees_whole:
            return ()
        return tuple([(max(one.offset - start, 0), one.end - start) for one in _within(images, start, start + size)])

    def take(self, step: StepImages, images: Sequence[ImageInput], start: int, size: int) -> I64 | None:
        """The rows [size + lookahead] of a chunk's tokens and those behind it, the sink's for those of no image; None
        if no token is of one. There must be ``room``. Images whose embeddings are not there are added to
        ``step.encodes``."""
        rows: I64 | None = None
        size += self._lookahead
        for image in _within(images, start, start + size):
            of_image = self._rows_of(step, image)
            rows = np.zeros(size, dtype=np.int64) if rows is None else rows
            first, end = max(image.offset, start), min(image.end, start + size)
            rows[first - start : end - start] = of_image[first - image.offset : end - image.offset]
        return rows

    def axes(self, images: Sequence[ImageInput], start: int, end: int) -> I64 | None:
        """The positions [3, end - start] of the tokens from ``start`` on of a prompt with ``images``; None if each has
        its place in all axes."""
        if not self._has_axes or not images or end <= images[0].offset:
            return None
        return prompt_axes(images, start, end)

    def delta(self, images: Sequence[ImageInput]) -> int:
        """How far positions behind a prompt with ``images`` are from the tokens' places."""
        return position_delta(images) if self._has_axes else 0

    def launched(self, done: Point) -> None:
        """The planned step has been launched; ``done`` is when it has read its embeddings."""
        for entry in self.planned:
            entry.after = Points.of(done)
        self.planned.clear()

    def check_memory(self) -> None:
        """Raises ``RuntimeError`` unless every leased row is an image's."""
        num_held = sum([len(entry.rows) for entry in self._entries.values()])
        if num_held != self.rows.num_leased:
            raise RuntimeError(f"{self.rows.num_leased} rows of image embeddings are leased, images have {num_held}")

    def clear(self) -> None:
        """Forget all embeddings, because the weights change. No step is being planned."""
        assert not self.planned, "a planned step reads embeddings"
        while self._entries:
            self._evict(next(iter(self._entries)))

    def _rows_of(self, step: StepImages, image: ImageInput) -> I32:
        entry, size = self._entries.get(image.digest), image.num_tokens
        if image.digest not in step.used:
            step.used[image.digest] = size
            if entry is None:
                entry = _Entry(self._alloc(step, size), Points.none())
                self._entries[image.digest] = entry
                step.encodes.append(Encode(image, entry.rows.astype(np.int64)))
                self.num_computed += 1
            self.planned.append(entry)
            self._entries.move_to_end(image.digest)
        assert entry is not None and len(entry.rows) == size, "a digest stands for one size"
        return entry.rows

    def _alloc(self, step: StepImages, size: int) -> I32:
        while self.rows.num_free < size:
            self._evict(next(iter(self._entries)))  # none of the step's: those are the latest, and there is room
        leased = self.rows.alloc(size)
        assert leased is not None, f"{size} rows were promised, {self.rows.num_free} are free"
        step.after = step.after.join(leased[1])
        return leased[0]

    def _evict(self, digest: bytes) -> None:
        entry = self._entries.pop(digest)
        self.rows.retire(entry.rows, after=entry.after)


def _within(images: Sequence[ImageInput], start: int, end: int) -> Iterator[ImageInput]:
    """Those of which a token is among tokens ``start`` to ``end - 1``."""
    return (image for image in images if image.offset < end and start < image.end)
