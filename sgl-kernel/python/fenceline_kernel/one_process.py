"""Ranks that are streams of one process on one GPU, so that tests and benchmarks can run the compiled all-reduce
without a second GPU. A rank's memory is plain device memory, and its address takes the place of a handle."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fenceline_kernel.all_reduce import PeerAllReduce
from fenceline_kernel.library import KernelLibrary, load

_BLOCKS = 128  # of all ranks' launches together: any data-centre GPU can run as many at once


class _OneProcessLibrary:
    """A KernelLibrary whose handles are addresses, because CUDA cannot open a handle in the process that has made
    it."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self.device_type = library.device_type
        self.call = library.call

    def function(self, unit: str, name: str) -> Any:
        replaced = _REPLACED.get(name)
        # The caller sets argtypes, which is possible on a partial as on a function of ctypes.
        return self._library.function(unit, name) if replaced is None else functools.partial(replaced)


def _locate(address: int, handle: ctypes.Array[ctypes.c_char], offset: Any) -> None:
    handle.raw = address.to_bytes(8, "little").ljust(len(handle), b"\0")
    offset._obj.value = 0


def _open(handle: bytes, memory: Any) -> None:
    memory._obj.value = int.from_bytes(handle[:8], "little")


def _close(memory: int) -> None:
    return None


_REPLACED: dict[str, Callable[..., None]] = {
    "fenceline_peer_locate": _locate,
    "fenceline_peer_open": _open,
    "fenceline_peer_close": _close,
}


class OneProcessRanks:
    """``size`` ranks, each with a PeerAllReduce and a stream. The caller makes every launch on all of them. Methods
    that exchange bytes (:meth:`register`, :meth:`close`) are called here, for all ranks at once."""

    def __init__(
        self, size: int, device: torch.device, one_shot_bytes: int, max_bytes: int, limit_s: float, pdl: int = 0
    ) -> None:
        """The last four: see ``PeerAllReduce``. A launch that waits longer than ``limit_s`` gives up."""
        self.size = size
        self.streams = [torch.cuda.Stream(device) for _ in range(size)]
        self._parts = [b""] * size
        self._barrier = threading.Barrier(size)
        library: Any = _OneProcessLibrary(load(device))

        def make(rank: int) -> PeerAllReduce:
            exchange = functools.partial(self._exchange, rank)
            blocks = _BLOCKS // size
            return PeerAllReduce(rank, size, device, exchange, one_shot_bytes, max_bytes, library, blocks, limit_s, pdl)

        self.ranks = self._in_threads(make)

    def register(self) -> None:
        """See ``PeerAllReduce.register``, on all ranks."""
        self._in_threads(lambda rank: self.ranks[rank].register())

    def close(self) -> None:
        """See ``PeerAllReduce.close``, on all ranks."""
        self._in_threads(lambda rank: self.ranks[rank].close())

    @property
    def lost(self) -> bool:
        """Whether a launch of any rank has given up."""
        return any(rank.lost for rank in self.ranks)

    def capture(self, body: Callable[[int], None]) -> Sequence[torch.cuda.CUDAGraph]:
        """Capture ``body(rank)`` on each rank's stream as a graph, and register the graphs. None of them has run
        yet."""
        graphs = []
        for rank, stream in enumerate(self.streams):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                body(rank)
            graphs.append(graph)
        self.register()
        return graphs

    def replay(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        """Replay all ranks' graphs, each on its rank's stream. Does not wait for them."""
        for graph, stream in zip(graphs, self.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()

    def _exchange(self, rank: int, data: bytes) -> Sequence[bytes]:
        self._parts[rank] = data
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def _in_threads(self, work: Callable[[int], Any]) -> list[Any]:
        """Run ``work(rank)`` for all ranks at the same time, since they wait for each other. Raises the first error."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results
