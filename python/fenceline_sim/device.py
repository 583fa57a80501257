"""The virtual GPU as a Device of memory_order, on which the engine runs unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from fenceline.layers.context import register_layers
from fenceline.memory_order import register_device
from fenceline.memory_order.access import Accesses, Memory, PagedMemory, Rows, occupies_sm
from fenceline.memory_order.device import Device, FillField, HostChannel, HostWorker, copy_words, fill_each, fill_rows
from fenceline.memory_order.edges import GRAPH_POOL, Edge, Guard, StreamName
from fenceline.memory_order.graph import Graph, GraphPool
from fenceline.memory_order.kernel import register_launcher
from fenceline.memory_order.stream import Point, Stream, applied_at
from fenceline_sim import backend
from fenceline_sim.factories import use
from fenceline_sim.gpu import Graph as VirtualGraph
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.kernels import launch_declared
from fenceline_sim.layers import launched_context
from fenceline_sim.memory import Tag, whole
from fenceline_sim.streams import Operation, VirtualStream

T = TypeVar("T")
P = ParamSpec("P")


class VgpuStream(Stream):
    """A virtual stream under one of the engine's names."""

    def __init__(self, name: StreamName, severed: frozenset[str], gpu: VirtualGpu) -> None:
        super().__init__(name, severed)
        self.gpu = gpu
        self.raw: VirtualStream = gpu.stream(name.value)  # of the calling thread's device
        self.recorded: Callable[[StreamName], None] | None = None  # is told of each Point

    def _is_cut(self, edge: Edge, waiter: StreamName, source: StreamName) -> bool:
        self.gpu.edges_met.add((edge.part(waiter, source), applied_at()))
        return super()._is_cut(edge, waiter, source)

    def active(self) -> AbstractContextManager[None]:
        return self.gpu.on(self.raw)

    @property
    def is_current(self) -> bool:
        return self.gpu.thread.current is self.raw

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        host = dst if dst.device.type == "cpu" else src
        assert host.device.type != "cpu" or self.gpu.pinned.find(host) is not None, (
            "a copy of pageable memory would block the host"
        )
        with self.gpu.on(self.raw):
            dst.copy_(src, non_blocking=True)

    def _record_event(self) -> object:
        if self.recorded is not None:
            self.recorded(self.name)
        return self.gpu.record(self.raw)

    def _wait_event(self, point: Point) -> None:
        assert isinstance(point.event, Operation)
        self.gpu.wait(self.raw, point.event)

    def _block(self, point: Point) -> None:
        assert isinstance(point.event, Operation)
        self.gpu.synchronize(point.event)

    def _query(self, point: Point) -> bool:
        assert isinstance(point.event, Operation)
        return self.gpu.query(point.event)


class VgpuGraph(Graph):
    def __init__(self, name: str, pool: GraphPool, stream: VgpuStream) -> None:
        super().__init__(name, pool)
        self._stream = stream
        assert pool.raw is None or isinstance(pool.raw, VirtualGraph)
        self.raw = stream.gpu.graph(name, pool.raw)

    def _replay(self) -> None:
        with self._stream.active():
            self.raw.replay()

    def _bound(self) -> Callable[[], None]:
        def replay() -> None:
            assert self._stream.gpu.thread.current is self._stream.raw, (
                f"{self.name} is replayed without FORWARD current"
            )
            self.raw.replay()

        return replay


class Declared:
    """The accesses of one operation, in order: see ``memory_order.access.Accesses``."""

    def __init__(self) -> None:
        self.accesses: list[tuple[Memory, bool, frozenset[int]]] = []  # memory, whether it is written, its rows

    def read(self, memory: Memory, rows: Rows | None = None) -> None:
        self.accesses.append((memory, False, _numbers(memory, rows)))

    def write(self, memory: Memory, rows: Rows | None = None) -> None:
        self.accesses.append((memory, True, _numbers(memory, rows)))

    def read_pages(self, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        self.read(memory, memory.pages_of(rows, lengths))

    def append_pages(self, memory: PagedMemory, rows: Rows, lengths: Rows) -> None:
        self.read_pages(memory, rows, lengths)
        self.write(memory, memory.last_pages_of(rows, lengths))

    def write_table(self, memory: PagedMemory, rows: Rows, columns: Rows, pages: Rows) -> None:
        memory.write_table(rows, columns, pages)

    def release(self, memory: Memory) -> None:
        return

    def occupy_sm(self) -> None:
        return

    def pages(self, memory: Memory, written: bool) -> frozenset[int]:
        """The rows of ``memory`` that are read, or ``written``."""
        found = (rows for one, write, rows in self.accesses if one is memory and write is written)
        return frozenset().union(*found)


def _numbers(memory: Memory, rows: Rows | None) -> frozenset[int]:
    return frozenset(range(memory.num_rows) if rows is None else np.asarray(rows).tolist())


class VgpuDevice(Device):
    """A Device over ``gpu``, which becomes the one that ``device="vgpu"`` means to torch. Of several devices of ``gpu``
    it is the calling thread's."""

    kind = "vgpu"
    tolerates_repairs = False
    watches_host = True
    keeps_time = False

    def __init__(self, severed: frozenset[str] = frozenset(), gpu: VirtualGpu | None = None) -> None:
        self.gpu = VirtualGpu() if gpu is None else gpu
        # Those that are declared as a whole. Not where something is severed: what is kept here never goes back to the
        # allocator, and ``growth_stop`` is about what goes back.
        self.whole_memories: dict[Tag, Memory] = {}
        super().__init__(use(self.gpu), severed)
        self._sm = whole(self.gpu.resource("sm"))
        self._by_name = {stream.name: stream for stream in self.streams}

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return self.gpu.pinned.buffer(nbytes)

    def memory_info(self) -> tuple[int, int]:
        pool = self.gpu.pool
        return pool.total_bytes - pool.used_bytes, pool.total_bytes

    def make_graph_pool(self, owner: str) -> GraphPool:
        # Severed: as if captured without a pool, so that memory that a capture frees can be allocated by others.
        if not self.keeps(GRAPH_POOL):
            assert isinstance(self.forward, VgpuStream), "made by this device"
            return GraphPool(owner, self.gpu.graph(owner, self.forward.raw))
        return GraphPool(owner, self.gpu.graph(owner))

    def capture(self, name: str, pool: GraphPool, body: Callable[[], None]) -> Graph:
        assert isinstance(self.forward, VgpuStream), "made by this device"
        graph = VgpuGraph(name, pool, self.forward)
        with self.forward.active(), self.gpu.capture(graph.raw):
            body()
        return graph

    def start_worker(self, name: str, run: Callable[[], None]) -> HostWorker:
        return self.gpu.spawn(name, run)

    def make_channel(self) -> HostChannel[T]:
        return self.gpu.channel()

    def fill_rows(self, fields: Sequence[FillField]) -> None:
        """One launch, as with fenceline_kernel."""

        def compute(num_fields: int, *tensors: torch.Tensor) -> None:
            given = zip(fields, tensors[:num_fields], tensors[num_fields:], strict=True)
            fill_each([replace(field, target=target, source=source) for field, target, source in given])

        fill_rows.launch(compute, len(fields), *(f.target for f in fields), *(f.source for f in fields))

    def write_host(self, host: torch.Tensor, source: torch.Tensor) -> None:
        def compute(source: torch.Tensor, host: torch.Tensor) -> None:
            host.copy_(source)

        with self.forward.active():
            copy_words.launch(compute, source, host)

    def _synchronize(self) -> None:
        self.gpu.synchronize_all()

    def declare(
        self, stream: StreamName, label: str, accesses: Callable[Concatenate[Accesses, P], None], *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:  # fmt: skip
        """Declare accesses of the host that torch does not see, and use of the SMs. Others are seen when made."""
        if stream is StreamName.HOST:
            said = Declared()
            accesses(said, *args, **kwargs)
            for memory, write, _ in said.accesses:
                assert memory.tensor is not None, f"where {memory.name} lies is not known"
                self.gpu.host_access(memory.tensor, write, label)
        elif accesses is occupies_sm:
            with self._by_name[stream].active():
                self.gpu.submit("work on all SMs", lambda: None, writes=(self._sm,))
        for reader in self._readers:
            reader(stream, label, accesses, *args, **kwargs)

    def memory(self, name: str, tensor: torch.Tensor) -> Memory:
        memory = super().memory(name, tensor)
        if not self.severed:
            self.whole_memories[self.gpu.tag_of(tensor)] = memory
        return memory

    def name_memory(self, tensor: torch.Tensor, name: str, row_bytes: int | None = None) -> None:
        self.gpu.name_memory(tensor, name, row_bytes or 0)

    def host_access(self, buffer: torch.Tensor, write: bool, what: str) -> None:
        self.gpu.host_access(buffer, write, what)

    def protect_from_graphs(self, tensor: torch.Tensor, guard: Guard) -> None:
        self.gpu.checks.protect_from_graphs(tensor, guard.name)

    def begin_fill(self, tensors: Sequence[torch.Tensor], guard: Guard) -> None:
        self.gpu.checks.begin_fill(tensors, guard.name)

    def lease(self, tensor: torch.Tensor) -> None:
        self.gpu.checks.lease(tensor)

    def _make_stream(self, name: StreamName) -> Stream:
        return VgpuStream(name, self.severed, self.gpu)


register_device(VgpuDevice.kind, VgpuDevice)
register_layers(backend.NAME, launched_context)
register_launcher(backend.NAME, launch_declared)
