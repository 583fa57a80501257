"""VirtualGpu: streams whose operations run later, in an order that a seed decides; its marks and its graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, TypeVar
from weakref import ref

import torch

from fenceline.memory_order.stream import joined
from fenceline_sim import backend
from fenceline_sim.checks import Checks
from fenceline_sim.detector import Detector
from fenceline_sim.errors import CaptureError, CheckError, DeadlockError, RaceError, StaleMemoryError, VgpuError
from fenceline_sim.findings import Findings
from fenceline_sim.layout import Form, layout_at
from fenceline_sim.memory import ALIGN, NO_ACCESS, NO_BOUNDS, Accesses, Bounds, PinnedMemory, Pool, Region, Tag, whole
from fenceline_sim.place import Place, here
from fenceline_sim.policy import Policy, make_policy
from fenceline_sim.streams import DEFAULT_STREAM, RELEASE, HostThread, Operation, Purpose, VirtualStream
from fenceline_sim.threads import Channel, Rotation, Worker

T = TypeVar("T")

_DEFAULT_BYTES = 1 << 30


class VirtualGpu:
    """One virtual GPU: its memory, its streams, the host threads that use it, and the schedule.

    ``policy`` is a name of ``policy.POLICIES`` or a Policy. ``detect`` keeps vector clocks and raises ``RaceError`` at
    the first race, or ``CheckError`` where one of ``checks`` fails (``collect``: keeps all in ``findings`` instead). Of
    the host threads one runs at a time: see ``spawn``.

    ``num_devices``: it is that many devices of one host, each with streams and memory of its own, under one schedule.
    Each belongs to the threads that were spawned for it, as to a rank's process; what orders two of them is in
    ``peers``.
    """

    def __init__(
        self, seed: int = 0, policy: str | Policy = "random", detect: bool = True, collect: bool = False,
        total_bytes: int = _DEFAULT_BYTES, num_devices: int = 1,
    ) -> None:  # fmt: skip
        self.seed = seed
        self.num_devices = num_devices
        self.policy = make_policy(policy, seed) if isinstance(policy, str) else policy
        self._agents: list[VirtualStream | HostThread] = []
        self.detector = Detector(self._agents) if detect else None
        self.findings = Findings(collect, self._look_ahead)
        self.checks = Checks(self.findings, self._moment, self._agents, enabled=detect)
        self.pool = Pool(total_bytes)
        self.pinned = PinnedMemory()
        self.num_run = 0
        self.streams: list[VirtualStream] = []
        self._seq = 0
        self._released: list[list[tuple[Tag, int]]] = [[] for _ in range(num_devices)]  # with the stream's number
        self._capturing: dict[int, Capture] = {}  # by device
        self._num_graphs = 0
        self.default_streams = [self.stream(DEFAULT_STREAM, device) for device in range(num_devices)]
        self.default_stream = self.default_streams[0]
        self.rotation = Rotation(self._thread("host"), seed, self.policy.switch_odds)
        # (edge, function that applies it) of each edge that was reached, severed or not.
        self.edges_met: set[tuple[str, str]] = set()
        # Is told of each operation that is submitted and accesses memory, also of those of a replay.
        self.submitted: Callable[[VirtualStream, Operation], None] | None = None
        self.execute: Callable[[Operation], None] | None = None  # in the place of an operation's own ``run``

    # --- agents --------------------------------------------------------------------------------------

    def stream(self, name: str, device: int | None = None) -> VirtualStream:
        """A new stream of ``device`` (default: the calling thread's). It is ordered with no other, the default stream
        included."""
        device = self.thread.device if device is None else device
        full_name = name if self.num_devices == 1 else f"gpu{device}.{name}"
        stream = VirtualStream(len(self._agents), full_name, device, name)
        self._agents.append(stream)
        self.streams.append(stream)
        return stream

    def _thread(self, name: str, device: int = 0) -> HostThread:
        thread = HostThread(len(self._agents), name, self.default_streams[device])
        self._agents.append(thread)
        return thread

    @property
    def thread(self) -> HostThread:
        return self.rotation.agent

    def spawn(self, name: str, run: Callable[[], None], device: int | None = None) -> Worker:
        """Start a thread of the host that may use ``device`` (default: the calling thread's); its current stream is the
        default stream."""
        agent = self._thread(f"host:{name}", self.thread.device if device is None else device)
        agent.order_after(self.thread.now())
        return Worker(self.rotation, agent, run)

    def channel(self) -> Channel[T]:
        return Channel(self.rotation, self.findings)

    def on(self, stream: VirtualStream) -> AbstractContextManager[None]:
        return _holding(self.thread, "current", stream)

    @property
    def capturing(self) -> Capture | None:
        return self._capturing.get(self.thread.device)

    # --- memory --------------------------------------------------------------------------------------

    def allocate(self, form: Form, place: Place) -> tuple[torch.Tensor, Allocation]:
        """Memory for a tensor of ``form`` from the current stream's pool: its plain view, and the tenancy."""
        stream = self.thread.current
        self.collect_released()
        capture = self.capturing if stream.is_captured else None
        pool = f"stream {stream.number}" if capture is None else capture.graph.pool
        tag = Tag(self.pool.take(pool, form.nbytes), place, form.shape)
        tag.pool, tag.captured, tag.device = pool, capture is not None, stream.device
        tag.region.tenant = tag
        return tag.region.view(layout_at(form, 0)), Allocation(tag, self, stream.number)

    def released(self, tag: Tag, stream: int) -> None:
        """The last tensor over ``tag`` was freed, which Python's garbage collector may do at any time."""
        self._released[tag.device].append((tag, stream))

    def collect_released(self) -> None:
        """Take back the memory of tensors of this thread's device that were freed since the last call."""
        released = self._released[self.thread.device]
        while released:
            tag, number = released.pop(0)
            region, stream = tag.region, self._agents[number]
            assert isinstance(stream, VirtualStream), "memory is allocated from a stream's pool"
            tag.ended = True
            op = Operation(RELEASE, tag.place, region.poison, writes=(whole(tag),))
            if not tag.pool.startswith("graph "):
                self._queue(stream, op)
            elif stream.is_captured:
                self.enqueue(stream, op)
            # Otherwise a graph's output was dropped after the capture, and its replays still write there.
            self.pool.put(tag.pool, region)

    def name_memory(self, tensor: torch.Tensor, name: str, row_bytes: int = 0) -> None:
        """Give the memory of ``tensor``, on the device or pinned, a ``name`` for reports, and rows of ``row_bytes``."""
        tag = self.tag_of(tensor)
        tag.name, tag.row_bytes = name, row_bytes

    def tag_of(self, tensor: torch.Tensor) -> Tag:
        """The use of memory that ``tensor``, on the device or pinned, is in."""
        tag = getattr(tensor, "allocation", None) or self.pinned.find(tensor)
        tag = tag.tag if isinstance(tag, Allocation) else tag
        assert tag is not None, "only device memory and pinned memory have names"
        return tag

    def resource(self, name: str) -> Tag:
        """A resource that may have one user at a time, such as ``sm``: its users write it."""
        tag = Tag(Region(0, ALIGN), here(), ())
        tag.name, tag.is_exclusive, tag.device = name, True, self.thread.device
        return tag

    def submitting_for(self, purpose: Purpose) -> AbstractContextManager[None]:
        """Inside, ``purpose.ran`` is called for each operation that this thread submits, after each of its runs."""
        return _holding(self.thread, "purpose", purpose)

    @property
    def races(self) -> list[RaceError]:
        return self.findings.races

    def _moment(self) -> int:
        self._seq += 1
        return self._seq

    # --- submission ----------------------------------------------------------------------------------

    def submit(
        self, label: str, run: Callable[[], None], reads: Accesses = NO_ACCESS, writes: Accesses = NO_ACCESS,
        place: Place | None = None, stream: VirtualStream | None = None, bounds: Bounds = NO_BOUNDS,
        after: Operation | None = None, starts_next: bool = False,
    ) -> Operation:  # fmt: skip
        """Queue an operation on ``stream`` (default: the current one). The device may run some work now.

        ``after``: the operation with a kernel's early reads. ``starts_next``: see ``Operation``."""
        place = here() if place is None else place
        op = Operation(label, place, run, reads, writes, after, bounds, starts_next)
        self.collect_released()
        self.enqueue(self.thread.current if stream is None else stream, op)
        self._drift()
        return op

    def submit_ahead(self, op: Operation) -> bool:
        """Queue ``op``: what the kernel that is submitted to the current stream next does before it waits for the
        preceding one. False, and nothing is done, if the kernel begins only when everything before it has ended."""
        self.collect_released()
        stream = self.thread.current
        if stream.front is None:
            return False
        if stream.ahead is None:
            stream.ahead = self.stream(f"{stream.edge_name} ahead")
            stream.ahead.is_ahead_of = stream.edge_name
        for mark in stream.joined:
            self.enqueue(stream.ahead, Operation("wait", op.place, None, after=mark))
        op.after = stream.front
        self.enqueue(stream.ahead, op)
        return True

    def enqueue(self, stream: VirtualStream, op: Operation) -> None:
        """Put ``op`` into the queue of ``stream``, or into the graph that is being captured."""
        after, capture = op.after, self.capturing
        inside = None if after is None else after.capture
        if not stream.is_captured and inside is None:
            self._queue(stream, op)
            return
        if capture is None or (not stream.is_captured and inside is not capture):
            raise CaptureError(f"{stream.name} waits for a mark inside a graph, recorded at {after}")
        capture.add(stream, op)

    def _queue(self, stream: VirtualStream, op: Operation) -> None:
        thread = self.thread
        op.seq, op.purpose = self._moment(), None if stream.is_ahead_of else thread.purpose
        if self.submitted is not None and (op.reads or op.writes):
            self.submitted(stream, op)
        stream.append(op, thread.submitting)

    def record(self, stream: VirtualStream) -> Operation:
        """A mark after everything submitted to ``stream`` so far."""
        op = Operation("record", here(), None)
        self.collect_released()
        self.enqueue(stream, op)
        self._drift()
        return op

    def graph(self, name: str = "graph", pool: Graph | VirtualStream | None = None) -> Graph:
        """A graph to capture into, with its own memory pool or ``pool``: another graph's, or a stream's, from which
        others can allocate the memory as soon as the capture has ended."""
        self._num_graphs += 1
        if isinstance(pool, VirtualStream):
            return Graph(self, name, f"stream {pool.number}")
        if pool is not None:
            return Graph(self, name, pool.pool)
        return Graph(self, name, f"graph {self._num_graphs}")

    @contextmanager
    def capture(self, graph: Graph) -> Iterator[None]:
        """Inside, work submitted to the current stream, and to streams that wait for it, is captured, not queued."""
        if self.capturing is not None:
            raise CaptureError("another capture is in progress")
        self.collect_released()
        device = self.thread.device
        capture = self._capturing[device] = Capture(graph, self.thread.current)
        try:
            yield
        except BaseException:
            del self._capturing[device]
            capture.end(self, completed=False)
            raise
        self.collect_released()
        del self._capturing[device]
        capture.end(self, completed=True)

    def forbid_in_capture(self, what: str, stream: VirtualStream | None = None) -> None:
        """Raise ``CaptureError`` if ``stream`` (default: any) is being captured."""
        capture = self.capturing
        if capture is not None and (stream is None or stream.is_captured):
            capture.graph.failed = True
            raise CaptureError(f"{what} is not allowed while {capture.graph.name} is being captured")

    def wait(self, stream: VirtualStream, mark: Operation) -> None:
        """What is submitted to ``stream`` from now on runs after ``mark``. The host does not block."""
        self.collect_released()
        self.enqueue(stream, Operation("wait", here(), None, after=mark))
        self._drift()

    # --- the host ------------------------------------------------------------------------------------

    def synchronize(self, op: Operation) -> None:
        self.collect_released()
        self.forbid_in_capture("making the host wait")
        self._run_until(op)
        self.thread.order_after(op.passed)

    def synchronize_all(self) -> None:
        device = self.thread.device
        for mark in [self.record(stream) for stream in self.streams if stream.device == device]:
            self.synchronize(mark)

    def query(self, op: Operation) -> bool:
        """Whether ``op`` has run. If so, what the calling thread does next is ordered after it. After enough calls the
        answer is yes: a device makes progress by itself, which some policies would not let it do."""
        self.forbid_in_capture("asking whether work is done")
        self._drift()
        hurries = self.policy.asked(op, self._seq)
        if not op.done and (hurries or (op.stream is not None and op.stream.count_query())):
            self._run_until(op, for_certain=False)
        if op.done:
            self.thread.order_after(op.passed)
        return op.done

    def host_access(self, tensor: torch.Tensor, write: bool, what: str) -> None:
        """Declare that the calling thread reads or writes ``tensor``, which is in pinned memory, now."""
        self.collect_released()
        if self.detector is not None:
            tag = self.pinned.find(tensor)
            assert tag is not None, "only pinned memory is used by host and device"
            op = Operation(what, here(), None)
            op.seq = self._moment()
            self.thread.act(op)
            self.findings.add_races(self.detector.host_access(op, tag, tensor, write))
        self._drift()

    # --- running -------------------------------------------------------------------------------------

    def _drift(self) -> None:
        """Let the device run as far as the policy wants while the host is not blocked."""
        self.rotation.maybe_switch()
        stream = self._next(None)
        if stream is not None:
            with backend.inference():
                while stream is not None:
                    self._run_head(stream)
                    stream = self._next(None)

    def _next(self, awaited: Operation | None) -> VirtualStream | None:
        """The stream whose head runs next; None if the host continues or nothing can run."""
        runnable = [  # VirtualStream.runnable, which costs a call
            stream
            for stream in self.streams
            if (queue := stream.queue)
            and ((after := queue[0].after) is None or after.done)
            and ((spin := queue[0].spin) is None or spin.ready())
        ]
        if not runnable:
            return None
        if awaited is None:
            return self.policy.pick(runnable, None)
        needed = _needed(awaited)
        if needed not in runnable:  # it spins until another device has come further
            needed = min(runnable, key=lambda stream: stream.queue[0].seq)
        return self.policy.pick(runnable, needed)

    def _run_until(self, op: Operation, for_certain: bool = True) -> None:
        """``for_certain``: False if it need not run now, should it wait for what another thread has yet to submit."""
        self.rotation.maybe_switch()
        with backend.inference():
            while not op.done:
                stream = self._next(op)
                if stream is not None:
                    self._run_head(stream, awaited=True)
                elif for_certain:
                    self._wait_for_threads(op)
                else:
                    self.rotation.give_way()
                    return

    def _wait_for_threads(self, op: Operation) -> None:
        """Nothing can run before another thread has submitted more. Raises ``DeadlockError`` if none can."""
        self.findings.raise_again()
        try:
            self.rotation.block_until(lambda: op.done or any(s.runnable for s in self.streams), "its device")
        except DeadlockError:
            self.findings.raise_again()  # an error that has ended the other thread is the cause
            raise DeadlockError(self._stuck(op)) from None

    def _run_head(self, stream: VirtualStream, awaited: bool = False) -> None:
        self.findings.raise_again()
        op = stream.queue.popleft()
        if self.num_devices > 1:
            self._gain(stream, op)
        if op.run is not None:
            if self.detector is not None:
                if races := self.detector.check(op):
                    self.findings.add_races(races)
                self.checks.run(op)
            try:
                if self.execute is None:
                    op.run()
                else:
                    self.execute(op)
            except (DeadlockError, CheckError):
                raise
            except Exception as error:
                self.findings.fail(op, error)
            if op.purpose is not None:
                op.purpose.ran(op)
            if op.spin is not None:
                op.spin.ran(op)
            op.ran, op.ran_awaited = self._seq, awaited
            op.run = None
            op.reads = op.writes = NO_ACCESS
            op.bounds = NO_BOUNDS
            self.num_run += 1
        op.done = True
        op.after = op.purpose = op.spin = None

    def _gain(self, stream: VirtualStream, op: Operation) -> None:
        """``op`` is about to run: it happens after what it, earlier operations of its stream and what it waits for have
        acquired from other devices."""
        gained = stream.gained
        if op.after is not None:
            gained = joined(gained, op.after.passed)
        if op.spin is not None:
            gained = joined(gained, op.spin.begin(op))
        stream.gained = gained
        op.clock = joined(op.clock, gained)

    def _look_ahead(self) -> list[RaceError]:
        """Races of work that is queued, because a schedule may show an effect before its cause. There are none with
        several devices, where it is not known yet what queued work will have acquired before it runs."""
        if self.detector is None or self.num_devices > 1:
            return []
        queued = [op for stream in self.streams for op in stream.queue if op.run is not None]
        queued.sort(key=lambda op: op.seq)  # an operation is checked before those that happen after it
        return [race for op in queued for race in self.detector.look_ahead(op)]

    def _stuck(self, op: Operation) -> str:
        waits = []
        for head in (stream.queue[0] for stream in self.streams if stream.queue):
            if head.spin is not None:
                waits.append(f"  {head.where} waits for {head.spin.what}; submitted at {head.place}")
            elif head.after is not None and not head.after.done:
                waits.append(f"  {head.where} waits for {head.after.where} at {head.place}")
        return "\n".join([f"deadlock: {op.label} on {op.where} can never run", *waits])


class Allocation:
    """A use of memory of ``gpu``, from the stream of that number, which ends when the last tensor over it is freed.

    It does not keep the GPU alive: Python's garbage collector takes all that a tensor with views refers to for alive,
    and a GPU that has seen a fault refers to the engine, by way of the frames in which that was raised.
    """

    __slots__ = ("_gpu", "_stream", "tag")

    def __init__(self, tag: Tag, gpu: VirtualGpu, stream: int) -> None:
        self.tag = tag
        self._gpu = ref(gpu)
        self._stream = stream

    @property
    def gpu(self) -> VirtualGpu:
        """Whose memory it is. Raises ``VgpuError`` if nobody has kept that."""
        gpu = self._gpu()
        if gpu is None:
            raise VgpuError("the virtual GPU of this tensor has been freed")
        return gpu

    def __del__(self) -> None:
        gpu = self._gpu()
        if gpu is not None:
            gpu.released(self.tag, self._stream)


@contextmanager
def _holding(thread: HostThread, name: str, value: object) -> Iterator[None]:
    before = getattr(thread, name)
    setattr(thread, name, value)
    try:
        yield
    finally:
        setattr(thread, name, before)


def _needed(op: Operation) -> VirtualStream:
    """A runnable stream without whose progress ``op`` cannot run."""
    stream = op.stream
    assert stream is not None, "only work on a stream is waited for"
    while stream.queue and (after := stream.queue[0].after) is not None and not after.done:
        assert after.stream is not None, "a mark lies on a stream"
        stream = after.stream
    return stream


# --- graphs -------------------------------------------------------------------------------


class _Node(NamedTuple):
    """An operation of branch ``branch``. If it is a wait, it waits for node ``after``."""

    branch: int
    op: Operation
    after: int | None


class Graph:
    """Operations captured once with their memory and scalars, and queued again by each replay.

    ``pool`` names the memory it allocated from; graphs that share one overwrite each other.
    """

    def __init__(self, gpu: VirtualGpu, name: str, pool: str) -> None:
        self.name = name
        self.pool = pool
        self.num_replays = 0
        self._gpu = gpu
        self._nodes: list[_Node] = []
        self._branches: list[VirtualStream] = []  # streams besides that of the launch
        self.failed = False
        self._uses: dict[Tag, Operation] = {}  # memory, and the first operation that accesses it
        self._writes: dict[Tag, Operation] = {}  # memory, and the first operation that writes it
        self._ready = False
        self._last: Operation | None = None  # the end of the latest replay

    def replay(self) -> None:
        """Queue everything again on the current stream. Raises ``StaleMemoryError`` if memory it uses was freed,
        ``ProtectionError`` if it writes what graphs may not.

        It runs after earlier replays of this graph on whatever streams, as ``cudaGraphLaunch`` promises.
        """
        gpu = self._gpu
        if not self._ready:
            raise CaptureError(f"{self.name} has not been captured")
        launch = gpu.thread.current
        if launch.is_captured:
            raise CaptureError(f"{self.name} is replayed on {launch.name}, which is being captured")
        gpu.collect_released()
        self._check_memory()
        self.num_replays += 1
        if self._last is not None and self._last.stream is not launch:
            gpu.wait(launch, self._last)
        streams = [launch, *self._branches]
        if self._branches:
            start = gpu.record(launch)
            for branch in self._branches:
                gpu.wait(branch, start)
        queued: list[Operation] = []
        for node in self._nodes:
            queued.append(self._queue(node, streams[node.branch], queued))
        for branch in self._branches:
            gpu.wait(launch, gpu.record(branch))
        self._last = gpu.record(launch)
        launch.restart(self._last)

    def _queue(self, node: _Node, stream: VirtualStream, queued: list[Operation]) -> Operation:
        old = node.op
        op = Operation(old.label, old.place, old.run, old.reads, old.writes, None, old.bounds, old.starts_next)
        op.graph, op.spin = self.name, old.spin
        if node.after is not None:
            op.after = queued[node.after]
        self._gpu.enqueue(stream, op)
        return op

    def _check_memory(self) -> None:
        for tag, op in self._uses.items():
            if tag.ended and tag.pool != self.pool:
                text = f"lifetime: {self.name} replays {op.label} on freed memory: {tag}\n  captured at {op.place}"
                raise StaleMemoryError(text, "", str(tag), (str(op.place),))
        for tag, op in self._writes.items():
            self._gpu.checks.graph_write(op, tag, self.name)
            tenant = tag.region.tenant
            # Graphs of one owner may share memory, but nothing else may use it.
            if tag.ended and tenant is not None and not tenant.ended and not tenant.captured:
                self._gpu.checks.found(_foreign_write(self.name, op, tenant))


def _foreign_write(graph: str, op: Operation, tenant: Tag) -> StaleMemoryError:
    lines = [
        f"lifetime: {graph} writes {tenant}, which belongs to something else",
        f"  captured: {op.label} at {op.place}",
        "  what it wrote went back to the allocator when the capture ended, and was handed out again at",
        f"  {tenant.place}",
    ]
    return StaleMemoryError("\n".join(lines), "graph_pool", str(tenant), (str(op.place), str(tenant.place)))


class Capture:
    """A capture in progress, of one or more streams.

    As in CUDA, a stream that waits for a captured mark joins the capture and must be joined again before it ends.
    Operations that make the host wait, or read host memory at the call, are refused. Memory allocated inside belongs to
    the graph's pool.
    """

    def __init__(self, graph: Graph, origin: VirtualStream) -> None:
        self.graph = graph
        self._streams = [origin]
        self._numbers: dict[Operation, int] = {}
        # Each branch's latest operation that nothing waits for.
        self._unjoined: dict[VirtualStream, Operation] = {}
        origin.is_captured = True
        origin.restart(None)

    def add(self, stream: VirtualStream, op: Operation) -> None:
        """Record ``op``; ``stream`` joins the capture if it waits for an operation of it."""
        after = None
        if op.after is not None:
            if op.after.capture is not self:
                raise CaptureError(
                    f"{stream.name}, which is being captured, waits for work outside the graph (recorded at "
                    f"{op.after.place})"
                )
            after = self._numbers[op.after]
            self._join(op.after)
        if stream not in self._streams:
            self._streams.append(stream)
            stream.is_captured = True
            stream.restart(None)
        stream.follow(op)
        op.stream = stream
        op.where = stream.name
        op.capture = self
        self._numbers[op] = len(self._numbers)
        nodes = self.graph._nodes
        nodes.append(_Node(self._streams.index(stream), op, after))
        op.graph = self.graph.name
        for tag, _, _ in (*op.reads, *op.writes):
            self.graph._uses.setdefault(tag, op)
        for tag, _, _ in op.writes:
            self.graph._writes.setdefault(tag, op)
            self.graph._gpu.checks.graph_write(op, tag, self.graph.name)
        if stream is not self._streams[0] and op.run is not None:
            self._unjoined[stream] = op

    def _join(self, mark: Operation) -> None:
        assert mark.stream is not None, "a mark lies on a stream"
        work = self._unjoined.get(mark.stream)
        if work is not None and self._numbers[work] <= self._numbers[mark]:
            del self._unjoined[mark.stream]

    def end(self, gpu: VirtualGpu, completed: bool) -> None:
        """Finish. Raises ``CaptureError`` if a branch was not joined."""
        for stream in self._streams:
            stream.is_captured = False
            stream.restart(None)
        if not completed:
            return
        if self.graph.failed:
            raise CaptureError(f"the capture of {self.graph.name} was broken by an earlier error")
        for stream, op in self._unjoined.items():
            raise CaptureError(f"{stream.name} was not joined: nothing waits for {op.label} at {op.place}")
        graph = self.graph
        graph._branches = [gpu.stream(f"{graph.name}/{stream.edge_name}") for stream in self._streams[1:]]
        for branch, stream in zip(graph._branches, self._streams[1:], strict=True):
            branch.is_ahead_of = stream.is_ahead_of
        graph._ready = True
