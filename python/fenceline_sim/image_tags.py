"""Tags of images: what the rows of the pool of embeddings hold, the deltas of request rows, and the meanings of tokens.

As for KV slots, what a step must read follows from its requests alone: for each token of an image the embedding of that
token as the present weights make it, and for each request behind its prompt the delta of its own images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fenceline.images.image_input import ImageInput
from fenceline.images.positions import position_delta
from fenceline.layers.forward_batch import SINK_ROW
from fenceline.mem_cache.image_keys import ImageKeys
from fenceline.memory_order.edges import ENCODED_FIRST, OLD_KV, ROW_DELTA, STEP_IMAGES
from fenceline.model_executor.step import StepBatch
from fenceline.scheduler.req import Req
from fenceline_sim.accounts import Seq
from fenceline_sim.layout import Layout
from fenceline_sim.memory import Access, Tag, row_values
from fenceline_sim.streams import Operation

# Of an error: the operation, the memory's name, what is wrong, and the guard that should have prevented it.
Report = Callable[[Operation, str, str, str], None]


class _Embedding(NamedTuple):
    """That of a token of an image, as ``weights`` make it."""

    digest: bytes
    token: int
    weights: str

    def __str__(self) -> str:
        return f"token {self.token} of image {self.digest.hex()}{' with ' if self.weights else ''}{self.weights}"


class ImageTags:
    def __init__(self, pool: Tag, deltas: tuple[Tag, Layout], report: Report) -> None:
        self._pool, self._report = pool, report
        self._deltas, self._layout = deltas
        self._held: dict[int, _Embedding] = {}  # by row of the pool
        self._numbers: dict[bytes, int] = {}  # that stand for digests in prefixes
        self._keys: dict[int, int] = {}  # the same numbers by those in the tree's keys

    def tokens_of(self, req: Req) -> list[int]:
        """The tokens of ``req`` so far, with a number below zero for each token of an image."""
        tokens: list[int] = req.token_ids().tolist()
        for image in req.images:
            number = self._number(image.digest)
            self._keys.setdefault(int(req.prompt_keys[image.offset]), number)
            tokens[image.offset : image.end] = [number] * image.num_tokens
        return tokens

    def token_of(self, key: int, keys: ImageKeys) -> int:
        """What ``key`` of the tree stands for, as in :meth:`tokens_of`. ``keys``: the tree's, which know the image of a
        prefix that came from storage for a request that has never run."""
        return key if key >= 0 else self._keys[key] if key in self._keys else self._number(keys._digests[key])

    def _number(self, digest: bytes) -> int:
        return self._numbers.setdefault(digest, -1 - len(self._numbers))


class StepImages:
    """The images of a step: those that it encodes, in order, and those of its requests' tokens. After the target, each
    layer of a draft reads the embeddings of the tokens from which it computes its rows."""

    def __init__(
        self, images: ImageTags, seqs: Sequence[Seq], batch: StepBatch, weights: str, ahead: Sequence[int]
    ) -> None:
        """``ahead``: how many tokens further on those of each read begin."""
        self._images, self._seqs, self._weights = images, {seq.row: seq for seq in seqs}, weights
        self._encodes = list(batch.encodes)
        self._expected = [[one for seq in seqs for one in self._of_tokens(seq, shift)] for shift in ahead]

    def _of_tokens(self, seq: Seq, shift: int) -> Iterator[tuple[str, _Embedding] | None]:
        """Of each token of a prompt from which the step computes a row: its name and the embedding that it takes, if
        any."""
        images = iter(seq.account.images)
        image: ImageInput | None = next(images, None)
        for place in range(seq.first + shift, seq.length + shift):
            while image is not None and image.end <= place:
                image = next(images, None)
            is_inside = image is not None and image.offset <= place
            found = _Embedding(image.digest, place - image.offset, self._weights) if image and is_inside else None
            yield None if found is None else (f"token {place} of {seq.account.name}", found)

    def ran(self, op: Operation, access: Access, writes: bool) -> None:
        images = self._images
        if access.tag is images._pool and writes:
            assert access.rows is not None, "the pool is written by rows"
            num_written = 0
            while num_written < len(row_values(access.rows)):  # one call of the tower computes several images
                encode = self._encodes.pop(0)
                num_written += len(encode.rows)
                for token, row in enumerate(encode.rows.tolist()):
                    images._held[row] = _Embedding(encode.image.digest, token, self._weights)
        elif access.tag is images._pool:
            self._check_read(op, access)
        elif access.tag is images._deltas and not writes:
            self._check_deltas(op, access)

    def _check_read(self, op: Operation, access: Access) -> None:
        assert access.rows is not None, "the pool is read by rows"
        rows = row_values(access.rows).tolist()
        expected_rows = self._expected[0] if len(self._expected) == 1 else self._expected.pop(0)
        for row, expected in zip(rows, expected_rows, strict=False):
            held = None if row == SINK_ROW else self._images._held.get(row)
            right = None if expected is None else expected[1]
            if held != right:
                name = "no image's" if expected is None else f"{expected[0]}, {right}"
                text = f"image_embeddings row {row} holds {held or 'nothing'}, and is read as {name}\n  by"
                is_old = held is not None and right is not None and held.weights != right.weights
                guard = ENCODED_FIRST if self._encodes else OLD_KV if is_old else STEP_IMAGES
                self._images._report(op, "image_embeddings", text, guard.name)
                return

    def _check_deltas(self, op: Operation, access: Access) -> None:
        values = access.tag.region.view(self._images._layout).numpy()
        for row in set(self._seqs if access.rows is None else row_values(access.rows).tolist()):
            seq = self._seqs.get(row)
            right = 0 if seq is None else position_delta(seq.account.images)
            if seq is not None and seq.decodes and values[row] != right:
                text = f"position_deltas row {row} is {values[row]}, and {right} for {seq.account.name}\n  read by"
                self._images._report(op, "req_pool.position_deltas", text, ROW_DELTA.name)
