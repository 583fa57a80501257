"""Declares transfers of KV pages to the checker (``--memory-check order``)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fenceline.memory_order.checker import OrderChecker
from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.watched_memory import WatchedMemory

I32 = npt.NDArray[np.int32]


class TransferOrder:
    """Device pages, host pages and the resource ``sm`` as the checker knows them.

    All methods are called after the edges have been applied and before the work is submitted, and raise ``OrderError``.
    ``device_pages`` stands for all layers of a page, as steps declare them. What a load has brought of each layer is
    declared beside that: a step may read layers that are there while others are on their way.
    """

    def __init__(
        self, checker: OrderChecker, device_pages: WatchedMemory, num_layers: int, num_host_pages: int
    ) -> None:
        self._checker = checker
        self._device_pages = device_pages
        self.host_pages = checker.memory("host_pool", num_host_pages, "page")
        self._layers = [
            checker.memory(f"kv_pool.layer{layer}", device_pages.num_rows, "page")
            for layer in range(num_layers)
        ]

    def store(self, device_pages: I32, host_pages: I32, uses_sm: bool) -> None:
        """A backup of whole pages."""
        checker = self._checker
        op = checker.begin(StreamName.STORE, "backup of KV pages")
        checker.read(op, self._device_pages, device_pages)
        checker.write(op, self.host_pages, host_pages)
        if uses_sm:
            checker.occupy_sm(op)

    def load(self, layers: range, device_pages: I32, host_pages: I32) -> None:
        """Some layers of a load."""
        checker = self._checker
        op = checker.begin(StreamName.LOAD, f"load of KV pages, layers {layers.start}-{layers.stop - 1}")
        checker.read(op, self.host_pages, host_pages)
        checker.write(op, self._device_pages, device_pages)
        for layer in layers:
            checker.write(op, self._layers[layer], device_pages)

    def read_layer(self, layer: int, device_pages: I32) -> None:
        """A step on FORWARD reads a layer of pages that have been loaded for it."""
        op = self._checker.begin(StreamName.FORWARD, f"layer {layer} of a prefill step")
        self._checker.read(op, self._layers[layer], device_pages)

    def persistent_forward(self) -> None:
        """A step on FORWARD with persistent attention."""
        self._checker.occupy_sm(self._checker.begin(StreamName.FORWARD, "persistent attention"))
