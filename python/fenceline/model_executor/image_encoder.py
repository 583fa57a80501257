"""ImageEncoder: the stage of a prefill step that computes the embeddings of its new images, of all its requests.

The scheduler says which (``scheduler/image_cache.py``): those that the step's chunks need and that are in no row of the
pool yet, up to a number of embeddings. So none are computed for a request that has ended before.
"""

from __future__ import annotations

from collections.abc import Sequence

from fenceline.mem_cache.kv_pool import EmbeddingPool
from fenceline.model_executor.decode_runner import Arrays, Views
from fenceline.model_executor.step import Encode, concatenated
from fenceline.models.patch_order import PatchOrder, packed_runs, run_bounds
from fenceline.models.vision import PackedImages, Segments, VisionTower


class ImageEncoder:
    """Writes the embeddings of images to their rows of ``pool``. ``together``: in one call of the tower, or else one
    image after the other, so that not even the last bits of its embeddings depend on the images beside it."""

    def __init__(self, tower: VisionTower, pool: EmbeddingPool, together: bool) -> None:
        self._tower, self.pool, self._together = tower, pool, together

    def arrays(self, encodes: Sequence[Encode]) -> Arrays:
        """The arrays to upload before :meth:`encode`."""
        arrays: Arrays = {f"pixels_{index}": encode.image.array() for index, encode in enumerate(encodes)}
        for call in self._calls(encodes):
            part, number = encodes[call], call.start
            orders = self._orders(part)
            windows, images = packed_runs(orders)
            rows = [encode.rows[order.embeddings] for encode, order in zip(part, orders, strict=True)]
            packed = self._tower.pack([encode.image.grid for encode in part])
            arrays |= {
                f"patches_{number}": packed.patches,
                f"places_{number}": packed.places,
                f"windows_{number}": run_bounds(windows),
                f"images_{number}": run_bounds(images),
                f"embedding_rows_{number}": concatenated(rows),
            }
            if packed.points is not None:
                arrays[f"points_{number}"] = packed.points
        return arrays

    def encode(self, encodes: Sequence[Encode], views: Views) -> None:
        """Submit the tower's calls to the current stream. ``views``: the uploaded :meth:`arrays` of ``encodes``."""
        for call in self._calls(encodes):
            number = call.start
            windows, images = packed_runs(self._orders(encodes[call]))
            packed = PackedImages(
                pixels=[views[f"pixels_{index}"] for index in range(number, call.stop)],
                patches=views[f"patches_{number}"],
                places=views[f"places_{number}"],
                points=views.get(f"points_{number}"),
                windows=Segments(windows, views[f"windows_{number}"]),
                images=Segments(images, views[f"images_{number}"]),
            )
            self.pool.rows.index_copy_(0, views[f"embedding_rows_{number}"], self._tower.forward(packed))

    def _calls(self, encodes: Sequence[Encode]) -> list[slice]:
        """Which of ``encodes`` each call of the tower computes."""
        size = max(len(encodes), 1) if self._together else 1
        return [slice(first, min(first + size, len(encodes))) for first in range(0, len(encodes), size)]

    def _orders(self, encodes: Sequence[Encode]) -> list[PatchOrder]:
        return [self._tower.order(encode.image.grid) for encode in encodes]
