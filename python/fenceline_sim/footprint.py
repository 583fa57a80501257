"""Footprints: what operations access, compared with what they have declared.

``--memory-check order`` knows only what an operation has declared. So it would not know of memory that is accessed but
not declared, and memory that is declared but not accessed would make other operations wait.

The memory of rings is compared between two Points of a stream: whoever waits for a Point is ordered after what was
declared before it. Pages are compared by step and by transfer, with those of its requests and of its copies, which copy
each byte once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fenceline.mem_cache.host.host_states import Pairs
from fenceline.mem_cache.transfer import Ticket
from fenceline.memory_order.access import Memory, Rows
from fenceline.memory_order.checker import OrderChecker
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import StepBatch
from fenceline_sim.device import Declared, VgpuDevice, VgpuStream
from fenceline_sim.errors import FootprintError
from fenceline_sim.memory import Access, row_values
from fenceline_sim.streams import Operation, VirtualStream
from fenceline_sim.tags import Tags


class Footprints:
    """Reads the declarations of ``device`` from now on.

    Of a device of which something is severed, only the pages that steps access are compared with those that they have
    declared: a severed guard lets other memory be accessed, and it is the race that must be reported.
    """

    def __init__(self, device: VgpuDevice, runner: ModelRunner, tags: Tags) -> None:
        self._tags = tags
        self._accesses = runner.parts.accesses
        self._memories = device.whole_memories
        self._declared: dict[StreamName, set[tuple[Memory, bool]]] = {}  # since the stream's latest Point
        self._touched: dict[StreamName, dict[tuple[Memory, bool], Operation]] = {}
        self._read_by: dict[Memory, Operation] = {}  # FORWARD's reads that have not been declared yet
        # The rings of those reads that have been declared since FORWARD's latest Point, later than it.
        self._declares_earlier: set[str] = set()
        self._of_transfer: Declared | None = None
        # What each operation writes, of the transfer that is being submitted.
        self._copies: list[tuple[Access, ...]] = []
        self._sm, self._layout = device._sm.tag, runner.kv_pool.layout
        hicache = runner._config.hicache
        self._copies_by_sm = hicache is not None and hicache.io_backend == "kernel"
        # The device pages of each load whose end nobody has heard of, and what declares those that a step reads.
        self._loading: dict[Ticket, frozenset[int]] = {}
        self._of_layer: Callable[..., None] | None = None
        self._num_layers = runner.kv_pool.num_layers
        # Of pinned memory: who used it last, and since which Point, if the host has not declared its own use since.
        self._used_by: dict[Memory, tuple[Operation, int]] = {}
        self._num_points = 0
        # With ``full`` transfers also move tags, which no declaration names.
        self._only_pages = bool(device.severed) or runner._config.server_args.memory_check == "full"
        if (runner._config.server_args.memory_check == "order") != isinstance(device.checker, OrderChecker):
            raise FootprintError("footprint: --memory-check is not what the device has")
        self._names = {stream.raw: stream.name for stream in device.streams if isinstance(stream, VgpuStream)}
        device._readers += (self._read,)
        if self._only_pages:
            return
        tags.compares_declared = True
        device.gpu.submitted = self._submitted
        for stream in device.streams:
            assert isinstance(stream, VgpuStream), "made by this device"
            stream.recorded = self._recorded
        if runner.hicache is not None:
            controller: Any = runner.hicache
            self._of_layer = controller._layer_accesses
            for name in ("store", "load"):
                setattr(controller, name, self._watched(getattr(controller, name)))
            drain = controller.drain_acks

            def drained(*args: Any) -> Sequence[Ticket]:
                tickets: Sequence[Ticket] = drain(*args)
                for ticket in tickets:
                    self._loading.pop(ticket, None)
                return tickets

            controller.drain_acks = drained

    # --- declarations

    def _read(self, stream: StreamName, label: str, names: Callable[..., None], *args: Any) -> None:
        op = Declared()
        names(op, *args)
        accesses = self._accesses
        if names in (accesses.decode, accesses.extend):
            written = op.pages(accesses.pages, True)
            self._tags.declared(op.pages(accesses.pages, False) | written, written)
            self._check_rows(op, *args)
            return
        if self._only_pages:
            return
        if names == self._of_layer:
            self._check_layer(op, *args)
        if self._of_transfer is not None:
            self._of_transfer.accesses += op.accesses
        if stream is StreamName.HOST:
            for memory, _, _ in op.accesses:
                self._used_by.pop(memory, None)
        else:
            whole = self._declared.setdefault(stream, set())
            whole.update((memory, write) for memory, write, _ in op.accesses if memory.tensor is not None)
            for memory, write, _ in op.accesses:
                reader = self._read_by.get(memory)
                if stream is StreamName.FORWARD:
                    if self._read_by.pop(memory, None) is not None:
                        self._declares_earlier.add(_ring(memory))
                elif write and reader is not None:
                    raise _undeclared(reader, memory, False)

    def _check_rows(self, op: Declared, batch: StepBatch) -> None:
        """A step reads the page tables of its requests, writes some entries, and stores the last tokens of those for
        which it samples. For prompts it writes deltas and embeddings and reads embeddings, else it reads deltas."""
        accesses = self._accesses
        rows, sampled = batch.rows.tolist(), batch.rows[batch.samples].tolist()
        right_rows = [
            (accesses.page_table, False, rows),
            (accesses.page_table, True, batch.page_writes.rows.tolist()),
            (accesses.last_tokens, True, sampled),
        ]
        if accesses.position_deltas is not None:
            right_rows.append((accesses.position_deltas, True, rows[: len(batch.chunks)]))
            right_rows.append((accesses.position_deltas, False, rows[len(batch.chunks) :]))
        if accesses.tokens is not None:
            right_rows.append((accesses.tokens, True, rows))
        if accesses.embeddings is not None:
            read = [one.image_rows for one in batch.chunks if one.image_rows is not None]
            right_rows.append((accesses.embeddings, False, [row for part in read for row in part.tolist() if row]))
            written = [row for encode in batch.encodes for row in encode.rows.tolist()]
            right_rows.append((accesses.embeddings, True, written))
        for memory, write, right in right_rows:
            said, verb = op.pages(memory, write), "writes" if write else "reads"
            if said != frozenset(right):
                raise FootprintError(
                    f"footprint: a step says that it {verb} {memory.name} {sorted(said)}, not {sorted(set(right))}"
                )

    # --- memory of rings

    def _submitted(self, stream: VirtualStream, op: Operation) -> None:
        name = self._names.get(stream)
        if name is None:
            return
        if self._of_transfer is not None and name in (StreamName.LOAD, StreamName.STORE):
            self._copies.append(tuple(op.writes))
        for accesses, write in ((op.reads, False), (op.writes, True)):
            for access in accesses:
                memory = self._memories.get(access.tag)
                if memory is not None:
                    self._touched.setdefault(name, {}).setdefault((memory, write), op)
                    if access.tag.is_host:
                        self._check_turn(memory, op)

    def _check_turn(self, memory: Memory, op: Operation) -> None:
        """Between two uses by a stream the host fills pinned memory, or takes what is there."""
        before, since = self._used_by.setdefault(memory, (op, self._num_points))
        if since != self._num_points:
            raise FootprintError(
                f"footprint: {op.label} uses {memory.name}, and the host has not since {before.label} at {before.place}"
            )

    def _recorded(self, name: StreamName) -> None:
        self._num_points += 1
        declared, touched = self._declared.pop(name, set()), self._touched.pop(name, {})
        if name is StreamName.FORWARD:
            # Who waits for this Point waits for all that has read the ring. Of two rings each has a Point of its own.
            for memory, reader in self._read_by.items():
                if _ring(memory) in self._declares_earlier:
                    raise _undeclared(reader, memory, False)
            self._declares_earlier.clear()
        for (memory, write), op in touched.items():
            if (memory, write) in declared or (memory, True) in declared:
                continue
            if write or name is not StreamName.FORWARD:
                raise _undeclared(op, memory, write)
            self._read_by[memory] = op  # of a plan it is declared before the next one is uploaded
        for memory, write in declared:
            if name is StreamName.FORWARD and not write:
                continue  # of a plan it is declared that work which has been submitted may read it
            if not any(one is memory for one, _ in touched):
                raise FootprintError(f"footprint: {memory.name} is declared on {name.value}, and nothing uses it")

    # --- pages of transfers

    def _check_layer(self, op: Declared, layer: int, loads: Sequence[Ticket]) -> None:
        """A step declares the pages of a layer that its loads bring, as long as they may not have ended."""
        pages = frozenset[int]().union(*(self._loading.get(ticket, frozenset()) for ticket in loads))
        said = [(memory.name, write, sorted(rows)) for memory, write, rows in op.accesses]
        right = [(f"kv_pool.layer{layer}", False, sorted(pages))]
        if said != right:
            raise FootprintError(f"footprint: a step declares {said} of a layer, {right} is being loaded")

    def _watched(self, submit: Callable[..., None]) -> Callable[..., None]:
        def submitted(ticket: Any, device_pages: Rows, host_pages: Rows, after: Any, states: Pairs) -> None:
            self._copies, kind = [], submit.__name__
            self._of_transfer = op = Declared()
            submit(ticket, device_pages, host_pages, after, states)
            self._of_transfer = None
            device, host = (frozenset(pages.tolist()) for pages in (device_pages, host_pages))
            if self._tags.states is not None:
                of_states = self._tags.states.carried, self._tags.states.host
                self._copies = [writes for writes in self._copies if writes[0].tag not in of_states]
            if device:
                self._check_pages(op, kind, device, host)
                self._check_copies(kind == "load", len(device))
            if kind == "load":
                self._loading[ticket] = device

        return submitted

    def _check_pages(self, op: Declared, kind: str, device: frozenset[int], host: frozenset[int]) -> None:
        to_device = kind == "load"
        for memory, write, rows in op.accesses:
            right = host if write != to_device else device
            if rows != right:
                raise FootprintError(f"footprint: a {kind} declares {memory.name} {sorted(rows)}, not {sorted(right)}")
        named = {(memory.name, write) for memory, write, _ in op.accesses}
        layers = {(f"kv_pool.layer{layer}", True) for layer in range(self._num_layers if to_device else 0)}
        if named != {("host_pool", not to_device), ("kv_pool", to_device)} | layers:
            raise FootprintError(f"footprint: a {kind} declares {sorted(named)}")

    def _check_copies(self, to_device: bool, num_pages: int) -> None:
        """Each byte is copied once, and a backup by SMs occupies them."""
        copies = [writes for writes in self._copies if all(access.tag is not self._sm for access in writes)]
        nbytes = sum(_nbytes(access) for writes in copies for access in writes)
        right = num_pages * self._layout.page_nbytes
        if nbytes != right:
            raise FootprintError(f"footprint: a transfer copies {nbytes} bytes, its pages have {right}")
        if self._copies_by_sm and not to_device and len(copies) == len(self._copies):
            raise FootprintError("footprint: a backup by SMs does not occupy them")


def _ring(memory: Memory) -> str:
    """The name of the ring whose slot ``memory`` is: without what it is of the slot, and the slot's number."""
    return memory.name.rpartition(".")[0]


def _nbytes(access: Access) -> int:
    """Bytes that are accessed, each row as often as it is named."""
    form = access.layout.form
    num_rows = form.shape[0] if access.rows is None else len(row_values(access.rows))
    return form.numel // form.shape[0] * num_rows * form.itemsize


def _undeclared(op: Operation, memory: Memory, write: bool) -> FootprintError:
    verb, where = "writes" if write else "reads", str(op.place)
    return FootprintError(
        f"footprint: {op.label} {verb} {memory.name}, which is not declared\n  {where}", places=(where,)
    )
