"""What the runners of captured steps share: a list of sizes, their capture with a progress bar, and counts.

A step runs in the smallest captured size that holds it, its other rows padded. One runner is one owner: its graphs
share a pool and overwrite each other's temporaries there, and nothing that outlives a replay lies in it.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from fenceline.memory_order import Device, Graph, GraphPool
from fenceline.memory_order.arena import size_lookup

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GraphStats:
    """Steps of one kind while graphs are on. ``fallbacks`` ran without a graph and ``repairs`` only after something
    that was wrong had been put right, by reason; the aims are ``replays == eligible_steps`` and no repairs."""

    eligible_steps: int = 0
    replays: int = 0
    replays_by_size: dict[str, int] = field(default_factory=dict)  # captured sizes, as text
    fallbacks: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)
    capture_s: float = 0.0
    capture_bytes: int = 0

    def restart(self) -> None:
        """Count steps from now on: those before were the warm-up's."""
        self.eligible_steps = self.replays = 0
        self.replays_by_size = dict.fromkeys(self.replays_by_size, 0)
        self.fallbacks.clear()
        self.repairs.clear()

    def count_replay(self, size: int) -> None:
        """A step has been replayed in ``size``."""
        self.replays += 1
        self.replays_by_size[str(size)] += 1

    def count_fallback(self, reason: str) -> None:
        """An eligible step runs without a graph."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1


class GraphMismatch(RuntimeError):
    """``--debug-cuda-graph``: a replay and the same step without its graph disagree."""


class GraphRunner(ABC):
    """The captured sizes of one kind of step."""

    def __init__(
        self, device: Device, name: str, unit: str, sizes: Sequence[int], padding: bool = True
    ) -> None:
        """``name`` of the steps and ``unit`` of their ``sizes``, which ascend, are for people to read."""
        assert list(sizes) == sorted(set(sizes)), "sizes ascend"
        self.stats = GraphStats()
        self.has_graphs = bool(sizes)
        self._device = device
        self._name = name
        self._unit = unit
        self._sizes = list(sizes)
        self._lookup = size_lookup(device, padding)
        self._captured_addresses: Sequence[int] = ()

    @abstractmethod
    def addresses(self) -> Sequence[int]:
        """Where the memory lies now that captured graphs have baked in beside the weights."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured sizes, ascending."""
        return tuple(self._sizes)

    def size_for(self, num: int) -> int | None:
        """The size that a step of ``num`` is replayed in, None if it runs without a graph; total (F11)."""
        size = self._lookup(self._sizes, num)
        if size is None:
            fits = bool(self._sizes) and num <= self._sizes[-1]
            self.stats.count_fallback("padding" if fits else "size")
        return size

    def fits(self) -> bool:
        """Whether captured graphs still name the memory that is in use; counted as a fallback if not."""
        if self._captured_addresses == self.addresses():
            return True
        self.stats.count_fallback("address")
        return False

    def graph_size(self, num: int) -> int | None:
        """The size whose graphs run a step of ``num``, which counts as eligible; None if it runs without, or if there
        are no graphs at all."""
        if not self.has_graphs:
            return None
        self.stats.eligible_steps += 1
        size = self.size_for(num)
        return size if size is not None and self.fits() else None

    def _capture_sizes(
        self, capture: Callable[[GraphPool, int], Sequence[Graph]], show_progress: bool
    ) -> None:
        """``capture`` every size, the largest first so that smaller ones fit into its memory. A size without graphs is
        left out. Waits for the device."""
        begin, (free_before, _) = time.perf_counter(), self._device.memory_info()
        self._captured_addresses = self.addresses()
        pool = self._device.make_graph_pool(self._name)
        graphs: list[Graph] = []
        bar = tqdm(
            sorted(self._sizes, reverse=True),
            desc=f"Capturing {self._name} graphs",
            disable=None if show_progress else True,  # None: off a terminal
        )
        for size in bar:
            captured = capture(pool, size)
            if not captured:
                self._sizes.remove(size)
            for graph in captured:
                graph.register(*self._device.communicators)
            graphs += captured
            free, _ = self._device.memory_info()
            bar.set_postfix_str(f"{size} {self._unit}, {max(free_before - free, 0) / 2**30:.2f} GiB")
        for graph in graphs:
            graph.allow_replay()
        self._device.synchronize()
        stats = self.stats
        stats.replays_by_size = {str(size): 0 for size in self._sizes}
        stats.capture_bytes = max(free_before - self._device.memory_info()[0], 0)
        stats.capture_s = time.perf_counter() - begin
        what = f"{self._name} graphs of {len(self._sizes)} sizes up to {max(self._sizes, default=0)} {self._unit}"
        logger.info("Captured %s in %.1f s, %.2f GiB", what, stats.capture_s, stats.capture_bytes / 2**30)
