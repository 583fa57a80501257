"""Device: where memory lives and work runs. The engine is written once against it.

The CPU's is here too: it is the simplest one, synchronous, so that every Point has passed once it is recorded.

A device also starts the threads of the host beside the scheduler's, and makes the queues between them and it: on a
virtual device they run one at a time, in an order that a seed decides. What was done before ``put`` happened before
what follows the ``get``, or the ``poll``, that returns the item; nothing else orders two threads.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

import psutil
import torch

from fenceline.config import num_usable_cores
from fenceline.memory_order.access import Accesses, Memory
from fenceline.memory_order.checker import OrderChecker
from fenceline.memory_order.edges import EDGE_PARTS, EDGES, GUARDS, Guard, StreamName
from fenceline.memory_order.graph import Graph, GraphPool, Registers
from fenceline.memory_order.kernel import KernelAccesses, declare_kernel
from fenceline.memory_order.stream import NoChecker, Point, Stream

T = TypeVar("T")
P = ParamSpec("P")

logger = logging.getLogger(__name__)


class HostWorker(Protocol):
    """A running thread. It ends with the process, or when what it runs returns."""

    def join(self) -> None:
        """Wait for its end. Raises what it raised."""


class HostChannel(Protocol[T]):
    """An unbounded queue between threads of the host: first in, first out, any number of threads at either end."""

    def put(self, item: T) -> None:
        """Add an item; never blocks."""

    def get(self) -> T:
        """The oldest item; blocks until there is one."""

    def poll(self) -> T | None:
        """The oldest item, None if there is none now. (If None itself may be an item, use only ``get``.)"""


@dataclass(frozen=True, slots=True)
class FillField:
    """Rows to write: the first ``num_live`` of ``target`` from ``source`` (None: no rows), ``pad`` to the rest."""

    target: torch.Tensor  # [num_rows, ...], contiguous
    source: torch.Tensor | None  # [num_live, ...], contiguous, same dtype and row shape
    num_live: int
    pad: int | float


def fill_each(fields: Sequence[FillField]) -> None:
    """Write heads and tails by torch's operators, one or two a field."""
    for field in fields:
        if field.source is not None:
            field.target[: field.num_live].copy_(field.source)
        if field.num_live < len(field.target):
            field.target[field.num_live :].fill_(field.pad)


@declare_kernel
def fill_rows(op: KernelAccesses, num_fields: int, *tensors: torch.Tensor | None) -> None:
    """fenceline_kernel's ``FillPlan.fill``: one launch for all fields. First their targets, then their sources."""
    for source in tensors[num_fields:]:
        op.read(source)
    for target in tensors[:num_fields]:
        op.write(target)


@declare_kernel
def copy_words(op: KernelAccesses, source: torch.Tensor, host: torch.Tensor) -> None:
    """fenceline_kernel's ``copy_words``: FORWARD writes results to pinned memory."""
    op.read(source)
    op.write(host)


class Device(ABC):
    """One accelerator (or the CPU) with its named streams. ``severed`` names edges, parts of edges and guards that are
    left out: for tests that prove them necessary, never for serving. Raises ``ValueError`` for an unknown name."""

    kind: str
    tolerates_repairs = True  # tests' devices raise where a replay's precondition had to be repaired
    keeps_time = True  # whether measured times mean anything; with tests' devices nothing may depend on them
    watches_host = False  # whether calls of :meth:`host_access` have an effect

    def __init__(self, torch_device: torch.device, severed: frozenset[str] = frozenset()) -> None:
        unknown = severed - EDGES.keys() - GUARDS.keys() - set(EDGE_PARTS)
        if unknown:
            raise ValueError(f"no such edge or guard: {', '.join(sorted(unknown))}; see docs/internals/edges.md")
        self.torch_device = torch_device
        self.severed = severed
        self.schedule = self._make_stream(StreamName.SCHEDULE)
        self.forward = self._make_stream(StreamName.FORWARD)
        self.copy = self._make_stream(StreamName.COPY)
        self.load = self._make_stream(StreamName.LOAD)
        self.store = self._make_stream(StreamName.STORE)
        self.communicators: tuple[Registers, ...] = ()  # of its streams, in the order in which they were made
        self.checker = NoChecker()  # with --memory-check order: see check_order
        self._readers: tuple[Callable[..., None], ...] = ()  # of declarations

    @property
    def streams(self) -> tuple[Stream, ...]:
        return (self.schedule, self.forward, self.copy, self.load, self.store)

    def check_order(self) -> None:
        """From now on raise ``OrderError`` when an operation is submitted that races with an earlier one, as declared.
        Call it before rings and pools are made."""
        if not isinstance(self.checker, OrderChecker):
            self.checker = OrderChecker()
            self._readers += (self.checker.declare,)
            for stream in self.streams:
                stream.checker = self.checker

    def memory(self, name: str, tensor: torch.Tensor) -> Memory:
        """A Memory for :meth:`declare` that stands for all of ``tensor``; ``name`` is for reports."""
        self.name_memory(tensor, name)
        return Memory(name, tensor=tensor)

    def declare(
        self,
        stream: StreamName,
        label: str,
        accesses: Callable[Concatenate[Accesses, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Declare what an operation reads and writes. The scheduler thread is about to submit it to ``stream``, or to
        do it itself (HOST); ``accesses(op, *args)`` names the accesses. Call it after the operation's waits. Only
        accesses to memory that outlives operations are declared. The virtual GPU takes from it what it cannot see."""
        for reader in self._readers:
            reader(stream, label, accesses, *args, **kwargs)

    @abstractmethod
    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Uninitialised host memory [nbytes] uint8 that this device's copies can use asynchronously."""

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        """Uninitialised device memory [nbytes] uint8, preallocated: it may cross streams under a lease."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device's memory."""

    @abstractmethod
    def make_graph_pool(self, owner: str) -> GraphPool:
        """Memory for the graphs of ``owner`` alone (F17)."""

    @abstractmethod
    def capture(self, name: str, pool: GraphPool, body: Callable[[], None]) -> Graph:
        """Capture what ``body`` submits to FORWARD, which is current inside. The caller has run ``body`` once before,
        so that nothing is set up or compiled during the capture. ``body`` must not wait for the device."""

    def compile_ahead(self, walk: Callable[[], object]) -> bool:
        """Compile the kernels that ``walk`` launches, several at a time, by calling it without them. Its results are
        meaningless. Whether any was new to this machine; a device whose kernels need no compiling does not call it.
        Raises ``torch.OutOfMemoryError`` as ``walk`` does; after any other error kernels are compiled later."""
        return False

    def start_worker(self, name: str, run: Callable[[], None]) -> HostWorker:
        """Start a thread of the host, which ends when ``run`` returns. It submits nothing and records no Points. It
        waits for Points that it is given by :meth:`Stream.synchronize_from_worker`."""
        return ThreadWorker(name, run)

    def make_channel(self) -> HostChannel[T]:
        """A queue between threads of the host: those of :meth:`start_worker` and the one that made the device."""
        return QueueChannel()

    def fill_rows(self, fields: Sequence[FillField]) -> None:
        """Write heads and tails on the current stream."""
        fill_each(fields)

    @property
    def writes_host(self) -> bool:
        """Whether :meth:`write_host` works without the copy engine."""
        return True

    @abstractmethod
    def write_host(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the bytes of ``source``, uint8 on the device, to ``host``, uint8 of a :meth:`host_buffer`, on FORWARD.
        Their number must be a multiple of 8. A kernel on FORWARD does it, for a few kilobytes at most: the copy engine
        makes copies to the host in the order in which all streams have submitted them, so that this one might have to
        wait for a large backup."""

    def synchronize(self) -> None:
        """Block the host until all streams are empty: start-up, growth of a ring and shut-down only."""
        self._synchronize()
        self.checker.host_waited_for_all()

    def full_stop(self, guard: Guard) -> None:
        """``guard``: :meth:`synchronize`. Severed, the host does not wait."""
        if self.keeps(guard):
            self.synchronize()

    def keeps(self, guard: Guard) -> bool:
        """Whether ``guard`` is in force; only a test can have severed it. Only this package may ask."""
        return guard.name not in self.severed

    def name_memory(self, tensor: torch.Tensor, name: str, row_bytes: int | None = None) -> None:
        """Name the memory of ``tensor`` for reports. ``row_bytes``: the bytes of one of its rows, if it has rows. For
        devices that watch their memory; others ignore it."""
        return

    def name_rows(self, tensor: torch.Tensor, name: str) -> None:
        """:meth:`name_memory` for a tensor [num_rows, ...], whose rows reports name."""
        self.name_memory(tensor, name, tensor[0].nbytes)

    def host_access(self, buffer: torch.Tensor, write: bool, what: str) -> None:
        """Declare that the calling thread, one of :meth:`start_worker`, now reads or writes ``buffer``, which is from
        :meth:`host_buffer`. (The scheduler's thread uses :meth:`declare`.) Has an effect only on a device with
        ``watches_host``, so a caller that would have to make a view for ``buffer`` need not call it on others."""
        return

    def protect_from_graphs(self, tensor: torch.Tensor, guard: Guard) -> None:
        """Graphs may read ``tensor`` but never write it (F9); ``guard`` ensures that. For devices that watch their
        memory; others ignore it."""
        return

    def begin_fill(self, tensors: Sequence[torch.Tensor], guard: Guard) -> None:
        """Reads of ``tensors`` from now on must find bytes that were written from now on (F7); ``guard`` ensures that.
        For devices that watch their memory; others ignore it."""
        return

    def lease(self, tensor: torch.Tensor) -> None:
        """``tensor`` may be used in work that is submitted before the next :meth:`begin_fill` of its memory (F8). For
        devices that watch their memory; others ignore it."""
        return

    @abstractmethod
    def _synchronize(self) -> None: ...

    @abstractmethod
    def _make_stream(self, name: StreamName) -> Stream: ...


class ThreadWorker:
    """A daemon thread that runs ``run``."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
        self._thread.start()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # raised again by join
            logger.exception("thread %s has failed", threading.current_thread().name)
            self._error = error

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class QueueChannel(Generic[T]):
    """See :class:`HostChannel`."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()

    def put(self, item: T) -> None:
        self._items.put(item)

    def get(self) -> T:
        return self._items.get()

    def poll(self) -> T | None:
        try:
            return self._items.get_nowait()
        except Empty:
            return None


# --- the CPU

_current = threading.local()  # its ``stream`` is the innermost one that is active in this thread


class CpuStream(Stream):
    """Work runs when it is submitted. With the checker, a Point passes only when the host waits for it or asks for it a
    second time, so that memory is handed out and edges are applied as on an asynchronous device."""

    def __init__(self, name: StreamName, severed: frozenset[str]) -> None:
        super().__init__(name, severed)
        self.lags = False  # True with the checker: Points do not pass at once
        self._asked_serial = 0  # of the latest Point at the time of the last query without success

    def record(self) -> Point:
        point = super().record()
        if not self.lags:
            self.passed_serial = point.serial
        return point

    @contextmanager
    def active(self) -> Iterator[None]:
        before = getattr(_current, "stream", None)
        _current.stream = self
        try:
            yield
        finally:
            _current.stream = before

    @property
    def is_current(self) -> bool:
        return getattr(_current, "stream", None) is self

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def _record_event(self) -> object:
        return None

    def _wait_event(self, point: Point) -> None:
        assert self.lags, f"{point} had not passed on a synchronous device"

    def _block(self, point: Point) -> None:
        return  # work has run when it is submitted

    def _query(self, point: Point) -> bool:
        assert self.lags, f"{point} had not passed on a synchronous device"
        if point.serial <= self._asked_serial:
            return True
        self._asked_serial = self.serial
        return False


class CpuGraph(Graph):
    """Runs its body again, which on a synchronous device is what a replay does."""

    def __init__(self, name: str, pool: GraphPool, body: Callable[[], None]) -> None:
        super().__init__(name, pool)
        self._body = body

    def _replay(self) -> None:
        self._body()


class CpuDevice(Device):
    """Host memory and this process's threads."""

    kind = "cpu"

    def __init__(self, severed: frozenset[str] = frozenset()) -> None:
        super().__init__(torch.device("cpu"), severed)
        # One core is left to the front end's processes: OpenMP threads that wait for a core in use make every
        # operation many times slower. OMP_NUM_THREADS can reduce the number further.
        torch.set_num_threads(min(torch.get_num_threads(), max(num_usable_cores() - 1, 1)))

    def check_order(self) -> None:
        super().check_order()
        for stream in self.streams:
            if isinstance(stream, CpuStream):
                stream.lags = True

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def write_host(self, host: torch.Tensor, source: torch.Tensor) -> None:
        self.forward.copy(host, source)

    def memory_info(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def make_graph_pool(self, owner: str) -> GraphPool:
        return GraphPool(owner, None)

    def capture(self, name: str, pool: GraphPool, body: Callable[[], None]) -> Graph:
        return CpuGraph(name, pool, body)

    def _synchronize(self) -> None:
        return

    def _make_stream(self, name: StreamName) -> Stream:
        return CpuStream(name, self.severed)
