"""Graphs: operations captured once with their memory and scalars, and queued again by each replay.

As in CUDA: a stream that waits for a captured mark joins the capture and must be joined again before it ends; whatever
makes the host wait, or reads host memory at the call, is refused; memory allocated inside belongs to the graph's pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fenceline.vgpu.errors import CaptureError, StaleMemoryError
from fenceline.vgpu.memory import Tag
from fenceline.vgpu.operation import Operation
from fenceline.vgpu.streams import VirtualStream

if TYPE_CHECKING:
    from fenceline.vgpu.event import Event
    from fenceline.vgpu.gpu import VirtualGpu


class _Node(NamedTuple):
    """An operation of branch ``branch``, whose wait, if it is one, is for node ``after`` or an outside ``event``."""

    branch: int
    op: Operation
    after: int | None
    event: Event | None


class Graph:
    """What was captured. ``pool`` names the memory it allocated from; graphs that share one overwrite each other."""

    def __init__(self, gpu: VirtualGpu, name: str, pool: str) -> None:
        self.name = name
        self.pool = pool
        self.num_replays = 0
        self._gpu = gpu
        self._nodes: list[_Node] = []
        self._branches: list[VirtualStream] = []  # those beside the stream of the launch
        self.failed = False
        self._uses: dict[Tag, Operation] = {}  # memory, and the first operation that touches it
        self._writes: dict[Tag, Operation] = {}  # the same of those that write
        self._ready = False
        self._last: Operation | None = None  # the end of the latest replay

    @property
    def num_nodes(self) -> int:
        """Operations of a replay, marks and waits included."""
        return len(self._nodes)

    def replay(self) -> None:
        """Queue everything again on the current stream. Raises ``StaleMemoryError`` if memory it uses was freed,
        ``ProtectionError`` if it writes what graphs may not.

        It runs after earlier replays of this graph on whatever streams, as ``cudaGraphLaunch`` promises.
        """
        gpu = self._gpu
        if not self._ready:
            raise CaptureError(f"{self.name} has not been captured")
        launch = gpu.thread.current
        if launch.capture is not None:
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

    def _queue(self, node: _Node, stream: VirtualStream, queued: list[Operation]) -> Operation:
        gpu, old = self._gpu, node.op
        if node.event is not None and old.after is None:
            node.event.mark = gpu.record(stream)
            return node.event.mark
        op = Operation(old.label, old.place, old.run, old.reads, old.writes, bounds=old.bounds)
        op.graph = self.name
        if node.event is not None:
            if node.event.mark is None:
                return op
            op.after = node.event.mark
        elif node.after is not None:
            op.after = queued[node.after]
        gpu.enqueue(stream, op)
        return op

    def _check_memory(self) -> None:
        for tag, op in self._uses.items():
            if tag.ended and tag.pool != self.pool:
                text = f"lifetime: {self.name} replays {op.label} on freed memory: {tag}\n  captured at {op.place}"
                raise StaleMemoryError(text, "", str(tag), (str(op.place),))
        for tag, op in self._writes.items():
            self._gpu.checks.graph_write(op, tag, self.name)
            tenant = tag.region.tenant
            # Graphs of one owner may share memory; whoever else has it now does not expect them.
            if tag.ended and tenant is not None and not tenant.ended and not tenant.captured:
                self._gpu.checks.found(_somebody_elses(self.name, op, tenant))


def _somebody_elses(graph: str, op: Operation, tenant: Tag) -> StaleMemoryError:
    lines = [
        f"lifetime: {graph} writes {tenant}, which is not its own",
        f"  captured: {op.label} at {op.place}",
        "  what it wrote went back to the allocator when the capture ended, and was handed out again at",
        f"  {tenant.place}",
        "  missing guard: graph_pool",
    ]
    return StaleMemoryError("\n".join(lines), "graph_pool", str(tenant), (str(op.place), str(tenant.place)))


class Capture:
    """A capture in progress, of one or more streams."""

    def __init__(self, graph: Graph, origin: VirtualStream) -> None:
        self.graph = graph
        self._streams = [origin]
        self._numbers: dict[Operation, int] = {}
        self._unjoined: dict[VirtualStream, Operation] = {}  # each branch's latest work that nobody waits for
        origin.capture = self

    def add(self, stream: VirtualStream, op: Operation, event: Event | None = None) -> None:
        """Note ``op``; ``stream`` joins the capture if it waits for something in it."""
        after = None
        if op.after is not None and event is None:
            if op.after.capture is not self:
                raise CaptureError(
                    f"{stream.name}, which is being captured, waits for work outside the graph (recorded at "
                    f"{op.after.place}); use an external event"
                )
            after = self._numbers[op.after]
            self._join(op.after)
        if stream not in self._streams:
            self._streams.append(stream)
            stream.capture = self
        op.stream = stream
        op.where = stream.name
        op.capture = self
        self._numbers[op] = len(self._numbers)
        nodes = self.graph._nodes
        nodes.append(_Node(self._streams.index(stream), op, after, event))
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
        if work is not None and self._numbers[work] < self._numbers[mark]:
            del self._unjoined[mark.stream]

    def end(self, gpu: VirtualGpu, completed: bool) -> None:
        """Finish. Raises ``CaptureError`` if a branch was not joined."""
        for stream in self._streams:
            stream.capture = None
        if not completed:
            return
        if self.graph.failed:
            raise CaptureError(f"the capture of {self.graph.name} was broken by an earlier error")
        for stream, op in self._unjoined.items():
            raise CaptureError(f"{stream.name} was not joined: nothing waits for {op.label} at {op.place}")
        graph = self.graph
        graph._branches = [gpu.stream(f"{graph.name}/{stream.name}") for stream in self._streams[1:]]
        graph._ready = True
