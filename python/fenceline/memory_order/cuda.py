"""An NVIDIA GPU as a device: the only place that holds raw CUDA streams and events."""

from __future__ import annotations

import gc
import logging
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from fenceline.config import num_usable_cores
from fenceline.memory_order.device import Device, FillField
from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.graph import Graph, GraphPool
from fenceline.memory_order.stream import Point, Stream

try:
    import fenceline_kernel
except ImportError:  # it is optional: torch's operators do the same more slowly
    fenceline_kernel = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

# Smaller buffers come from torch's allocator, which is as good for them and reuses their memory.
MIN_MAPPED_BYTES = 256 << 20
_TOUCH_BYTES = 256 << 20  # that a thread writes at a time
_MAX_THREADS = 32


_NOTHING = nullcontext()


class _Current:
    """``torch.cuda.stream`` for a stream of the process's current device, in a tenth of its time: a step switches
    several times, and the GPU may wait for the host meanwhile. To be entered once."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        torch._C._cuda_setStream(*self._before)


def _is_current(stream: torch.cuda.Stream) -> bool:
    """Whether ``stream`` is its device's current one."""
    raw: int = torch._C._cuda_getCurrentRawStream(stream.device_index)
    return raw == stream.cuda_stream


class CudaStream(Stream):
    """A CUDA stream (never the legacy default stream, which would order everything)."""

    def __init__(self, name: StreamName, severed: frozenset[str], device: torch.device) -> None:
        super().__init__(name, severed)
        self.raw = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._timed = name in (StreamName.LOAD, StreamName.STORE)  # see seconds_between

    def active(self) -> AbstractContextManager[None]:
        # A step enters FORWARD many times while it is in it, and asking is several times cheaper than entering again.
        return _NOTHING if self.is_current else _Current(self.raw)

    @property
    def is_current(self) -> bool:
        return _is_current(self.raw)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        host = dst if dst.device.type == "cpu" else src
        assert host.device.type != "cpu" or host.is_pinned(), "a copy of pageable memory would block the host"
        with self.active():
            dst.copy_(src, non_blocking=True)

    def _record_event(self) -> object:
        event = torch.cuda.Event(enable_timing=self._timed)  # type: ignore[no-untyped-call]
        event.record(self.raw)
        return event

    def seconds_between(self, first: Point, last: Point) -> float | None:
        """See ``Stream.seconds_between``. Only for LOAD and STORE: other streams' events have no time."""
        assert isinstance(first.event, torch.cuda.Event) and isinstance(last.event, torch.cuda.Event)
        return first.event.elapsed_time(last.event) / 1e3 if self._timed else None

    def _wait_event(self, point: Point) -> None:
        assert isinstance(point.event, torch.cuda.Event)
        self.raw.wait_event(point.event)

    def _block(self, point: Point) -> None:
        assert isinstance(point.event, torch.cuda.Event)
        point.event.synchronize()

    def _query(self, point: Point) -> bool:
        assert isinstance(point.event, torch.cuda.Event)
        passed: bool = point.event.query()  # type: ignore[no-untyped-call]
        return passed


class CudaGraph(Graph):
    """A CUDA graph over a pool of its owner."""

    def __init__(self, name: str, pool: GraphPool, stream: torch.cuda.Stream) -> None:
        super().__init__(name, pool)
        self._stream = stream
        self.raw = torch.cuda.CUDAGraph()

    def _replay(self) -> None:
        with _NOTHING if _is_current(self._stream) else _Current(self._stream):
            self.raw.replay()

    def _bound(self) -> Callable[[], None]:
        replay: Callable[[], None] = self.raw.replay
        return replay


class CudaDevice(Device):
    """A CUDA device, the process's current one."""

    kind = "cuda"

    def __init__(self, severed: frozenset[str] = frozenset(), index: int | None = None) -> None:
        """``index``: the CUDA device that becomes the process's current one; None keeps the current one. Raises
        ``ValueError`` with the remedy if there is no such device."""
        if not torch.cuda.is_available():
            raise ValueError("no CUDA device is available: use --device cpu, or install a CUDA build of torch")
        if index is not None:
            num_devices = torch.cuda.device_count()
            if index >= num_devices:
                raise ValueError(
                    f"rank {index} of this host needs a GPU of its own, and there are {num_devices}: lower --tp-size"
                    " or --dp-size, or make more visible (CUDA_VISIBLE_DEVICES)"
                )
            torch.cuda.set_device(index)
        super().__init__(torch.device("cuda", torch.cuda.current_device()), severed)
        self._kernels = _load_kernels(self.torch_device)
        self._fills: dict[tuple[int, ...], fenceline_kernel.FillPlan] = {}  # by the rows that they fill

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        if nbytes >= MIN_MAPPED_BYTES:
            return pin_for_cuda(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def fill_rows(self, fields: Sequence[FillField]) -> None:
        """See ``Device.fill_rows``. One launch with fenceline_kernel; without it one or two for each field."""
        if self._kernels is None:
            super().fill_rows(fields)
            return
        num_live = max(field.num_live for field in fields)
        assert all(field.num_live in (0, num_live) for field in fields), "one batch fills all fields"
        targets = (*(field.target.data_ptr() for field in fields), *(len(field.target) for field in fields))
        sources = [field.source for field in fields]
        plan = self._fills.get(targets)
        if plan is None:  # made once for each arena, because its checks take longer than a fill
            plan = self._fills[targets] = fenceline_kernel.FillPlan(
                [fenceline_kernel.FillField(field.target, None, field.pad) for field in fields], self._kernels
            )
        plan.fill(num_live, sources)

    @property
    def writes_host(self) -> bool:
        return self._kernels is not None

    def write_host(self, host: torch.Tensor, source: torch.Tensor) -> None:
        assert self._kernels is not None and isinstance(self.forward, CudaStream)
        assert source.is_contiguous() and host.nbytes == source.nbytes
        stream: int = self.forward.raw.cuda_stream
        self._kernels.copy_words(host.data_ptr(), source.data_ptr(), source.nbytes // 8, self.torch_device, stream)

    def memory_info(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free, total

    def make_graph_pool(self, owner: str) -> GraphPool:
        return GraphPool(owner, torch.cuda.graph_pool_handle())

    def capture(self, name: str, pool: GraphPool, body: Callable[[], None]) -> Graph:
        assert isinstance(self.forward, CudaStream), "made by this device"
        graph = CudaGraph(name, pool, self.forward.raw)
        # thread_local: another thread of this process (a storage worker) may use the device meanwhile.
        with (
            _no_garbage_collection(),
            torch.cuda.graph(graph.raw, pool.raw, self.forward.raw, capture_error_mode="thread_local"),  # type: ignore[arg-type]
        ):
            body()
        return graph

    def compile_ahead(self, walk: Callable[[], object]) -> bool:
        try:
            from fenceline.memory_order import triton_launcher
        except ImportError:
            return False
        begin, number = time.perf_counter(), 0
        try:
            number = triton_launcher.compile_ahead(walk, min(num_usable_cores(), _MAX_THREADS))
        except torch.OutOfMemoryError:
            raise  # one rank may be short of memory, and the others would wait for it where it has left the walk
        except Exception:
            logger.warning("Kernels are compiled when they are first launched", exc_info=True)
        self.synchronize()
        if number:
            logger.info("Compiled %d kernels in %.1f s", number, time.perf_counter() - begin)
        return number > 0

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def _make_stream(self, name: StreamName) -> Stream:
        return CudaStream(name, self.severed, self.torch_device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Suspends garbage collection: if it freed something in the middle of a capture, such as an earlier engine's graphs
    and their memory, the capture would fail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _load_kernels(device: torch.device) -> fenceline_kernel.KernelLibrary | None:
    """Our own kernels, compiled on first use; None where they are not installed or cannot be compiled."""
    if fenceline_kernel is None:
        return None
    try:
        return fenceline_kernel.load(device)
    except fenceline_kernel.KernelUnavailable as error:
        logger.warning("Our own CUDA kernels cannot be used, so decode is slower: %s", error)
        return None


# --- large pinned memory ------------------------------------------------------------------------------

# This makes pinned host memory of many gigabytes within seconds. torch's pinned allocator rounds up to a power of
# two and lets the driver fault in and clear page by page on one thread, which takes tens of seconds for 60 GB. Here
# the memory is an anonymous mapping that asks for huge pages. Many threads write to it first (the system provides
# and clears a page at its first use), so that all pages exist when it is registered. It is not handed to child
# processes: a fork would have to copy every pinned page. On a machine of several NUMA nodes the pages lie
# where the threads ran: bind the process (numactl) to the GPU's node for the link's full rate.


class _Pinned(mmap.mmap):
    """A private mapping. It is freed when the last tensor that uses it is gone, and unregistered just before."""

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister()


def pinned_buffer(
    nbytes: int, register: Callable[[int, int], None], unregister: Callable[[int], object]
) -> torch.Tensor:
    """Zeroed host memory [nbytes] uint8 that ``register(address, nbytes)`` has pinned. ``unregister(address)`` is
    called when nothing uses it any more. Raises ``OSError`` if memory is short, or what ``register`` raises."""
    mapping = _Pinned(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # Linux has both, but a kernel may refuse
        try:
            mapping.madvise(getattr(mmap, advice))
        except (AttributeError, OSError):
            continue
    _touch(np.frombuffer(mapping, dtype=np.uint8))
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    address = buffer.data_ptr()
    register(address, nbytes)
    mapping.unregister = lambda: unregister(address)
    return buffer


def pin_for_cuda(nbytes: int) -> torch.Tensor:
    """``pinned_buffer`` registered with CUDA, for all devices. Raises ``RuntimeError`` where CUDA refuses."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, size: int) -> None:
        error = runtime.cudaHostRegister(address, size, 1)  # cudaHostRegisterPortable
        if int(error) != 0:
            raise RuntimeError(f"cudaHostRegister failed with error {int(error)}")

    return pinned_buffer(nbytes, register, runtime.cudaHostUnregister)


def _touch(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Have the system provide every page of ``memory``, on several threads; numpy releases the GIL."""

    def touch(start: int) -> None:
        memory[start : start + _TOUCH_BYTES : mmap.PAGESIZE] = 0

    with ThreadPoolExecutor(min(num_usable_cores(), _MAX_THREADS)) as threads:
        for _ in threads.map(touch, range(0, len(memory), _TOUCH_BYTES)):
            pass
