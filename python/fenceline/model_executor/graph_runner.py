"""GraphRunner: the base of the runners of CUDA graphs. It captures a list of sizes and counts replays and fallbacks.

A step runs in the smallest captured size that holds it, with its remaining rows padded. All graphs of one runner share
one memory pool and overwrite each other's temporaries there, so nothing that must outlive a replay is in that pool.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from fenceline.memory_order import Device, Graph, GraphPool
from fenceline.memory_order.guards import size_lookup

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GraphStats:
    """Counts of the steps of one kind while graphs are enabled. ``fallbacks`` are eligible steps that ran without a
    graph, by reason. ``repairs`` are steps for which something had to be corrected first, by reason. The goal is
    ``replays == eligible_steps`` and no repairs. ``capture_s`` and ``capture_bytes`` are what the capture took."""

    eligible_steps: int = 0
    replays: int = 0
    replays_by_size: dict[str, int] = field(default_factory=dict)  # the keys are captured sizes, as text
    fallbacks: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)
    capture_s: float = 0.0
    capture_bytes: int = 0

    def restart(self) -> None:
        """Start counting again, because the steps until now were those of the warm-up."""
        self.eligible_steps = self.replays = 0
        self.replays_by_size = dict.fromkeys(self.replays_by_size, 0)
        self.fallbacks.clear()
        self.repairs.clear()

    def count_replay(self, size: int) -> None:
        """Count a step that has been replayed in ``size``."""
        self.replays += 1
        self.replays_by_size[str(size)] += 1

    def count_fallback(self, reason: str) -> None:
        """Count an eligible step that runs without a graph."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1


class GraphMismatch(RuntimeError):
    """``--debug-cuda-graph``: a replay and the same step without the graph have different results."""


class GraphRunner(ABC):
    """Captures graphs of one kind of step, for a list of sizes, and chooses the size for each step."""

    def __init__(self, device: Device, name: str, unit: str, sizes: Sequence[int], padding: bool = True) -> None:
        """``sizes`` ascend; they are counted in ``unit``, for example requests or tokens. ``name`` is the kind of step.
        Both texts are for logs only. Without ``padding``, only a step of exactly a captured size is replayed."""
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
        """The present addresses of the memory, other than weights, whose addresses are part of captured graphs."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured sizes, ascending."""
        return tuple(self._sizes)

    def size_for(self, num: int) -> int | None:
        """The captured size in which a step of size ``num`` is replayed. None, which is counted as a fallback, if there
        is none. Defined for every ``num`` (F11)."""
        size = self._lookup(self._sizes, num)
        if size is None:
            fits = bool(self._sizes) and num <= self._sizes[-1]
            self.stats.count_fallback("padding" if fits else "size")
        return size

    def fits(self) -> bool:
        """Whether the memory is still at the addresses that the graphs contain; if not, a fallback is counted."""
        if self._captured_addresses == self.addresses():
            return True
        self.stats.count_fallback("address")
        return False

    def graph_size(self, num: int) -> int | None:
        """Count a step of size ``num`` as eligible and return the captured size in which it is replayed, or None if it
        runs without a graph. If there are no graphs at all, nothing is counted."""
        if not self.has_graphs:
            return None
        self.stats.eligible_steps += 1
        size = self.size_for(num)
        return size if size is not None and self.fits() else None

    def _capture_sizes(self, capture: Callable[[GraphPool, int], Sequence[Graph]], show_progress: bool) -> None:
        """Call ``capture`` for every size, the largest first so that the smaller ones fit into its memory. A size for
        which it returns no graphs is removed. Waits for the device."""
        begin, (free_before, _) = time.perf_counter(), self._device.memory_info()
        self._captured_addresses = self.addresses()
        pool = self._device.make_graph_pool(self._name)
        graphs: list[Graph] = []
        bar = tqdm(
            sorted(self._sizes, reverse=True),
            desc=f"Capturing {self._name} graphs",
            disable=None if show_progress else True,  # None: only if stderr is not a terminal
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
