"""What the declarations, rings, arenas and graphs of memory_order promise, asked with random values when a run ends.

The engine's own steps use few depths, sizes and shapes of them. Here a CPU's device notes all that it is told: which
memory is declared, protected, leased, or said to get new values, and on which stream torch's operators are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from fenceline.memory_order import (
    InputRing,
    LeasePool,
    Points,
    ResultLease,
    ResultRing,
    access,
    open_device,
    register_device,
    staging,
)
from fenceline.memory_order import arena as arenas
from fenceline.memory_order import device as device_module
from fenceline.memory_order.access import Memory, PagedMemory, row_numbers
from fenceline.memory_order.all_reduce import Act, Launch, count_steps
from fenceline.memory_order.arena import Arena, ArenaField, Role
from fenceline.memory_order.checker import OrderChecker, OrderError
from fenceline.memory_order.communicator import Communicator, CommunicatorError
from fenceline.memory_order.device import CpuDevice, CpuStream, copy_words, fill_rows
from fenceline.memory_order.edges import (
    ARENA_PAD,
    EDGES,
    GUARDS,
    MASK_ROWS,
    PLAN_SOURCE,
    SINK,
    STEP_SLOTS,
    TOTAL_BUCKETS,
    UNDER_SPECULATION,
    Guard,
    StreamName,
    edges_markdown,
    missing_edge,
)
from fenceline.memory_order.graph import GraphError
from fenceline.memory_order.lease import LeaseError
from fenceline.memory_order.relocation import table_of_step
from fenceline.memory_order.staging import MaskTable, PlanRing
from fenceline.memory_order.stream import applied_at, joined
from fenceline.vgpu import order_record
from fenceline.vgpu.errors import FootprintError
from fenceline.vgpu.order_record import OrderRecord
from fenceline.vgpu.proving.contracts import compare_contracts, raises

_NUM_OPERATIONS = 18
_GRANULE = 16  # bytes at a multiple of which an array begins
_Access = tuple[str, str, str, str]  # stream, label, what is done, name of the memory


def compare_order(random: Random) -> str:
    """The first promise that is not kept, "" if all are."""
    parts = (
        _names, _kernels, _clocks, _passes, _accesses, _order, _tables, _refusals, _arenas, _severed, _graphs, _inputs,
        _results, _masks, _plans, _blocks, _ranks,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash(random.getstate()[1]) % 2**32)  # torch's numbers follow ``random`` too
        for part in parts:
            for wrong in part(random):
                return f"contracts: {wrong}"
    return ""


def broken_promise(num_questions: int) -> str:
    """A promise of memory_order that is not kept, asked so often; "" if all are."""
    for seed in range(num_questions):
        try:
            wrong = compare_contracts(Random(seed)) or compare_order(Random(seed))
        except Exception as error:
            wrong = f"contracts: {type(error).__name__}: {error}"
        if wrong:
            return wrong
    return ""


class _Accesses:
    """Notes what a declaration names, in order."""

    def __init__(self) -> None:
        self.named: list[tuple[str, Any]] = []

    def __getattr__(self, kind: str) -> Callable[..., None]:
        return lambda memory=None, *rest: self.named.append((kind, memory))


class _Noting(CpuDevice):
    """Notes what it is told. ``stops``: how often the host has waited for everything."""

    def __init__(self, severed: frozenset[str] = frozenset()) -> None:
        super().__init__(severed)
        self.declared: list[_Access] = []
        self.said: list[tuple[str, str, torch.Tensor]] = []  # call, guard, tensor
        self.stops = 0
        self._readers = (self._note,)

    def _note(self, stream: StreamName, label: str, accesses: Callable[..., None], *args: Any) -> None:
        op = _Accesses()
        accesses(op, *args)
        self.declared += [(stream.value, label, kind, memory.name) for kind, memory in op.named]

    def taken(self) -> list[tuple[str, str, str]]:
        """Stream, kind and memory of the accesses that were declared since the last call."""
        declared, self.declared = self.declared, []
        return [(stream, kind, memory) for stream, _, kind, memory in declared]

    def name_memory(self, tensor: torch.Tensor, name: str, row_bytes: int | None = None) -> None:
        self.said.append(("name", name, tensor))

    def protect_from_graphs(self, tensor: torch.Tensor, guard: Guard) -> None:
        self.said.append(("protect", guard.name, tensor))

    def begin_fill(self, tensors: Sequence[torch.Tensor], guard: Guard) -> None:
        self.said += [("begin_fill", guard.name, tensor) for tensor in tensors]

    def lease(self, tensor: torch.Tensor) -> None:
        self.said.append(("lease", "", tensor))

    def told(self, call: str, guard: str = "") -> list[tuple[int, int]]:
        """Address and bytes of the memory that such calls were about since the last question of this kind."""
        mine = [one for one in self.said if one[:2] == (call, guard)]
        self.said = [one for one in self.said if one[:2] != (call, guard)]
        return [(tensor.data_ptr(), tensor.nbytes) for _, _, tensor in mine]

    def _synchronize(self) -> None:
        self.stops += 1


class _Streams(TorchFunctionMode):
    """Notes on which stream each write by an operator is made, None: on the default one."""

    _WRITES = ("copy_", "fill_", "index_copy_", "clone")

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, str | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self._WRITES:
            stream = getattr(device_module._current, "stream", None)
            self.written.append((name, None if stream is None else stream.name.value))
        return func(*args, **(kwargs or {}))


# --- names and declarations


def _names(random: Random) -> Iterator[str]:
    """Reports name each run of numbers once, only the first ones; a race's report names all edges that fit. A part of
    an edge has the name of the edge, and of its two streams and function where there are several."""
    most = access._MAX_RUNS  # it may be a small limit
    numbers = np.array(sorted(random.sample(range(40), random.randint(1, 30))), np.int64)
    right: list[list[int]] = []
    for number in numbers.tolist():
        if right and right[-1][-1] == number - 1:
            right[-1].append(number)
        else:
            right.append([number])
    text = ", ".join("-".join(str(one) for one in sorted({run[0], run[-1]})) for run in right[:most])
    text += f" and {len(right) - most} more runs" if len(right) > most else ""
    if row_numbers(numbers) != text:
        yield f"{numbers.tolist()} are named as {row_numbers(numbers)}, {text} is right"
    some = random.sample(list(EDGES.values()), random.randrange(3))
    said, last = missing_edge(some, "store", "load"), [edge.name for edge in some]
    if not all(name in said for name in last) or ("no edge" in said) == bool(last):
        yield f"{said!r} is said of a race for which {last} fit"
    for edge in EDGES.values():
        functions = [site for site, _ in edge.sites] or [""]
        parts = [
            (pair, site, edge.name + (f":{pair[0].value}-{pair[1].value}" if edge.pairs[1:] else "") + site)
            for pair in edge.pairs
            for site in (f"@{name}" if name else "" for name in functions)
        ]
        if [part.name for part in edge.parts] != [name for _, _, name in parts]:
            yield f"the parts of {edge.name} are {[part.name for part in edge.parts]}"
    memories = [Memory(f"memory {number}") for number in range(2)]
    wanted: list[tuple[Callable[..., None], tuple[Memory, ...], list[tuple[str, Memory | None]]]] = [
        (access.reads, (memories[0],), [("read", memories[0])]),
        (access.writes, (memories[0],), [("write", memories[0])]),
        (access.copies, (memories[0], memories[1]), [("read", memories[0]), ("write", memories[1])]),
        (access.releases, (memories[0], memories[1]), [("release", one) for one in memories]),
        (access.occupies_sm, (), [("occupy_sm", None)]),
    ]
    for declares, given, names in wanted:
        op: Any = _Accesses()
        declares(op, *given)
        if op.named != names:
            yield f"{declares.__name__} declares {op.named}, {names} is right"

    def here() -> str:
        return applied_at()

    if here() != f"{_names.__name__}":
        yield f"an edge applied in {_names.__name__} is said to be applied in {here()}"
    kind, device = f"contract-{random.randrange(1000)}", _Noting()
    kinds: set[str] = set()
    with (
        patch.dict("fenceline.memory_order._registered"),
        patch("fenceline.config.server_args._registered_kinds", kinds),
    ):
        register_device(kind, lambda severed: device)
        if open_device(kind) is not device or kinds != {kind}:
            yield f"a device {kind} is registered, and the configuration knows {kinds}"
    rows = torch.zeros(random.randint(1, 4), 2)
    memory = device.memory("some memory", rows)
    if device.told("name", "some memory") != [(rows.data_ptr(), rows.nbytes)] or memory.tensor is not rows:
        yield "a memory that is made for declarations has no name for reports of the device"


def _kernels(random: Random) -> Iterator[str]:
    """A fill reads all of its sources and writes all of its targets; words are copied from the source to the host."""
    num = random.randint(1, 4)
    targets, sources = ([torch.zeros(2) for _ in range(num)] for _ in range(2))
    op: Any = _Accesses()
    fill_rows.accesses(op, num, *targets, *sources)
    copy_words.accesses(op, sources[0], targets[0])
    right = [("read", one) for one in sources] + [("write", one) for one in targets]
    right += [("read", sources[0]), ("write", targets[0])]
    if [(kind, id(one)) for kind, one in op.named] != [(kind, id(one)) for kind, one in right]:
        yield f"a fill of {num} fields and a copy of words declare {[kind for kind, _ in op.named]}"


def _clocks(random: Random) -> Iterator[str]:
    """Two clocks joined have the later position of each agent. The first one itself is returned if nothing is new."""
    size = random.randint(1, 4)
    a, b = (
        tuple(random.randrange(4) for _ in range(size - short)) for short in (0, random.choice((0, 0, 1)))
    )
    for one, other in ((a, b), (b, a)):
        if not one:
            continue
        pad = [(clock + (0,) * size)[:size] for clock in (one, other)]
        right = tuple(max(pair) for pair in zip(*pad, strict=True))[: max(len(one), len(other))]
        got = joined(one, other)
        if got != right or (right == one and got is not one):
            yield f"the clocks {one} and {other} joined are {got}, {right} is right"


def _passes(random: Random) -> Iterator[str]:
    """A Point that the host waits for, or learns of, has passed from then on, and not before the device was waited
    for."""
    device = CpuDevice()
    device.check_order()
    edges = [(edge, pair[1]) for edge in EDGES.values() for pair in edge.pairs if pair[0] is StreamName.HOST]
    edge, name = random.choice(edges)
    stream: Any = next(stream for stream in device.streams if stream.name is name)
    point, blocked = stream.record(), []
    with patch.object(stream, "_block", lambda one: blocked.append((one, one.passed))):
        if random.random() < 0.5:
            stream.synchronize(point, edge)
            right = [(point, False)]
        else:
            stream.learn(point)
            right = []
    if blocked != right or not point.passed:
        yield f"a Point on {name.value} has passed: {point.passed}, waited for as {blocked}; {right} is right"


# --- the checker of --memory-check order


def _order(random: Random) -> Iterator[str]:
    """The checker finds each access that nothing orders, and no other, as a plain record of all accesses says. Asked
    in half of the runs, because it takes the most time."""
    if random.random() < 0.5:
        return
    device = CpuDevice()
    device.check_order()
    assert isinstance(device.checker, OrderChecker), "it was asked for"
    record = OrderRecord(device.checker)
    num_rows, num_columns, size = random.randint(2, 4), random.randint(2, 4), random.randint(1, 3)
    paged = PagedMemory("pages", 9, size, (num_rows, num_columns), StreamName.FORWARD)
    memories = [paged, Memory("one"), *[Memory("rows", 6)] * random.randrange(1, 4)]
    arrays: dict[str, list[Any]] = {
        one.name: [None, *(_some(random, one.num_rows) for _ in range(2))] for one in memories
    }
    lengths = np.zeros(num_rows, np.int64)
    streams = random.sample([StreamName.HOST, *(one.name for one in device.streams)], random.randint(2, 3))
    shares = random.choice(((1, 1, 1), (3, 1, 2), (1, 1, 9)))  # of accesses, changes of the table, and steps
    whole = np.arange(num_rows)
    most_kept, every = random.choice((1, 2, 3, 256)), random.choice((2, 4, 7))
    with patch.object(access, "_MAX_LOG", most_kept), patch.object(order_record, "_EVERY", every):
        for _ in range(_NUM_OPERATIONS):
            kind, memory = random.choices(("access", "table", "step"), shares)[0], random.choice(memories)
            if random.random() < 0.4:
                device.synchronize()
            elif random.random() < 0.5:
                source, waiter = random.sample(device.streams, 2)
                device.checker.wait(waiter.name, source.record().clock)
            stream, label = random.choice(streams), f"operation {random.randrange(99)}"
            if kind == "access":
                rows = random.choice(arrays[memory.name]) if memory.num_rows > 1 else None
                does = random.choice(("read", "write", "release"))
                given: tuple[Any, ...] = (memory,) if does == "release" else (memory, rows)
            elif kind == "table":
                stream, row = StreamName.FORWARD, random.randrange(num_rows)
                column = random.randrange(num_columns)
                lengths[row], page = min(lengths[row], column * size), random.randrange(1, 9)
                whole = np.arange(num_rows)  # a step's array of rows may stay the same while its lengths grow
                does, given = "write_table", (paged, *(np.array([one]) for one in (row, column, page)))
            else:
                stream = StreamName.FORWARD
                most = num_columns * size
                if random.random() < 0.3:
                    lengths, whole = np.array([random.randint(1, most) for _ in lengths]), np.arange(num_rows)
                else:
                    lengths = np.minimum(np.maximum(lengths, 0) + 1, most)
                does = random.choice(("read_pages", "append_pages"))
                given = (paged, whole, lengths.copy())
            try:
                device.checker.declare(stream, label, _does, does, given)
            except OrderError:
                # Nothing was noted of it. Once the host has waited for everything it is in order.
                _count(record, stream, label)
                device.synchronize()
                try:
                    device.checker.declare(stream, label, _does, does, given)
                except OrderError as error:
                    yield f"what the host has waited for is not in order: {error}"
                    return
            try:
                record.declared(stream, label, _does, does, given)
            except FootprintError as error:
                yield str(error)
                return
            if len(paged._log) >= most_kept:
                yield f"{len(paged._log)} steps are kept apart from the pages, fewer than {most_kept} are right"
    paged.write_table(np.repeat(np.arange(num_rows), num_columns), np.tile(np.arange(num_columns), num_rows),
                      np.arange(num_rows * num_columns) % 9)  # fmt: skip
    for row in range(num_rows):
        last = random.randint(1, num_columns * size)
        first = random.randrange(last)
        pages = sorted({token // size for token in range(first, last)})
        right = [(row * num_columns + column) % 9 for column in pages]
        got = paged.pages_between(np.array([row]), np.array([first]), np.array([last])).tolist()
        if got != right:
            yield f"tokens {first} to {last - 1} are said to be in pages {got}, they are in {right}"


def _does(op: Any, does: str, given: tuple[Any, ...]) -> None:
    getattr(op, does)(*given)


def _accesses(random: Random) -> Iterator[str]:
    """Memory knows the last read and the last write of each agent, also of those that name the same array of rows."""
    num_agents = len(StreamName)
    for _ in range(8):
        memory, rows, last = Memory("rows", 3), np.array([0, 2]), {}
        agents = random.sample(range(num_agents), 2)
        for tick in range(1, 4):
            agent, write = random.choice(agents), random.random() < 0.5
            memory.note(agent, tick, write, rows)
            last[agent, write] = tick
        for (agent, _), tick in last.items():
            # Everything else is known to one that has seen no more than what came before this access.
            clock = tuple(tick - 1 if other == agent else 9 for other in range(num_agents))
            past = memory.unordered((agent + 1) % num_agents, clock, True, rows[:1])
            both = [ticks for (other, _), ticks in last.items() if other == agent and ticks >= tick]
            if past is None or past.agent != agent or past.tick not in both:
                yield f"of the accesses {last} (agent, writes) that of agent {agent} at {tick} is known as {past}"


def _some(random: Random, num: int) -> Any:
    return np.array(sorted(random.sample(range(num), random.randint(1, num))), np.int64)


def _count(record: OrderRecord, stream: StreamName, label: str) -> None:
    """An operation that the checker has refused, but counted."""
    agent = tuple(StreamName).index(stream)
    record._submitted(agent)
    record._ticks[agent] += 1
    record._labels[agent, record._ticks[agent]] = label, record._num_steps


def _tables(random: Random) -> Iterator[str]:
    """The page about edges has a row for each part of an edge, for each guard, and for each that is severed again under
    speculation."""
    rows = [
        line.split(" | ")[0].removeprefix("| ")
        for line in edges_markdown().splitlines()
        if line.startswith("| ")
    ]
    found = Counter(row for row in rows if row not in ("edge", "guard", "edge or guard"))
    right = Counter(edge.name for edge in EDGES.values() for _ in edge.parts)
    right += Counter(list(GUARDS)) + Counter(row.partition("/")[0] for row in UNDER_SPECULATION)
    if found != right:
        yield f"the page about edges has too few rows for {right - found}, too many for {found - right}"


# --- leases


def _refusals(random: Random) -> Iterator[str]:
    """The report of a wrong retirement says what is wrong with it."""
    reserved, size = random.randrange(3), random.randint(4, 7)
    pool = LeasePool("contract", size, reserved)
    got = pool.alloc(size - reserved)
    assert got is not None, "so many are free"
    pool.retire(got[0][:1], Points.none())
    for num in (1, 2, size + 1):
        ids = [random.randrange(-1, size + 1) for _ in range(num)]
        if num > size and random.random() < 0.5:
            ids = [min(max(one, reserved), size) for one in ids]  # none of them is too small
        free = int(got[0][0])
        if not set(ids) <= set(range(reserved, size)):
            right = f"ids {min(ids)}..{max(ids)} are not all in {reserved}..{size - 1}"
        elif free in ids and num <= size:
            right = "retired twice"
        elif len(set(ids)) < num:
            right = "named twice"
        else:
            continue
        try:
            pool.retire(np.array(ids, np.int32), Points.none())
            said = "nothing"
        except LeaseError as error:
            said = str(error)
        if right not in said:
            yield f"{said!r} is said of the retirement of {ids}, {right!r} is right"


# --- arenas and graphs


def _arena_of(random: Random, device: CpuDevice) -> Arena:
    roles = [Role.PLAN, *random.choices(list(Role), k=random.randint(1, 4))]
    types = (torch.int32, torch.int64, torch.float32)
    fields = [
        ArenaField(f"f{number}", random.choice(types), role, random.choice((SINK, 0, 3)), (2,) * random.randrange(2))
        for number, role in enumerate(roles)
    ]  # fmt: skip
    return Arena(device, "contract", random.randint(3, 6), fields)


def _places(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


def _of(arena: Arena, *roles: Role) -> list[torch.Tensor]:
    return [arena[name] for name, field in arena.fields.items() if field.role in roles]


def _fill(random: Random, arena: Arena, num_live: int, *num_rows: int) -> dict[str, list[Any]]:
    """Fill it with random values; what each field must hold then: a list of rows."""
    sources, right = {}, {}
    last = num_rows[0] if num_rows else arena.num_rows
    for name, field in arena.fields.items():
        rows = arena[name].tolist()
        pad = torch.full(field.shape, arena.pads[name], dtype=field.dtype).tolist()
        if field.role is Role.PLAN:
            shape = (num_live, *field.shape)
            sources[name] = torch.randint(5, 99, shape, dtype=torch.int64).to(field.dtype)
            rows[:last] = sources[name].tolist() + [pad] * (last - num_live)
        elif field.role is Role.INPUT:
            rows[:last] = [pad] * last
        right[name] = rows
    arena.fill(sources, num_live, *num_rows)
    return right


def _arenas(random: Random) -> Iterator[str]:
    """Graphs may not write what plans have written. A fill gives live rows their values and padding its own, as far as
    a replay reads, and nothing else. It is said when new values begin, and how long those of a replay may be used."""
    device = _Noting()
    arena = _arena_of(random, device)
    plan, output = _of(arena, Role.PLAN), _of(arena, Role.OUTPUT)
    if device.told("protect", PLAN_SOURCE.name) != _places(plan):
        yield f"graphs are not kept from writing a batch's plan; missing guard: {PLAN_SOURCE.name}"
    for tensor in (arena[name] for name in arena.fields):
        tensor.copy_(torch.randint(100, 200, tensor.shape))
    num_fills = random.randint(1, 3)
    for _ in range(num_fills):
        num_live = random.randint(0, arena.num_rows)
        limits = () if random.random() < 0.4 else (random.randint(num_live, arena.num_rows),)
        filled = [rows[: limits[0]] if limits else rows for rows in _of(arena, Role.PLAN, Role.INPUT)]
        right = _fill(random, arena, num_live, *limits)
        got = {name: arena[name].tolist() for name in arena.fields}
        if got != right:
            yield f"an arena of {arena.num_rows} rows filled with {num_live} up to {limits} is {got}, not {right}"
        if Counter(device.told("begin_fill", ARENA_PAD.name)) != Counter(_places(filled)):
            yield f"it is not said that an arena's values begin to be others; missing guard: {ARENA_PAD.name}"
    if arena.num_fills != num_fills:
        yield f"an arena is said to be filled {arena.num_fills} times, it was {num_fills} times"
    outputs = arena.begin_replay()
    if device.told("begin_fill", TOTAL_BUCKETS.name) != _places(output):
        yield f"it is not said that a replay's outputs begin to be others; missing guard: {TOTAL_BUCKETS.name}"
    for name, field in arena.fields.items():
        if field.role is not Role.PLAN:
            num = random.randint(1, arena.num_rows)
            taken = outputs.take(name, num)
            if _places([taken]) != _places([arena[name][:num]]) or device.told("lease") != _places([taken]):
                yield f"{num} rows of {name} are taken, and not leased until the next replay"
    arena.begin_replay()
    for name, field in arena.fields.items():
        if field.role is not Role.PLAN and not raises(LeaseError, outputs.take, name, 1):
            yield f"{name} of a replay is taken after the next one"


def _severed(random: Random) -> Iterator[str]:
    """What a severed guard does in place of its own work, on which the proof of its necessity relies. The graph of a
    batch is the smallest that holds it; severed, the largest one that is not larger, or the smallest."""
    arena = _arena_of(random, _Noting(frozenset({ARENA_PAD.name})))
    before = {name: arena[name].fill_(7).tolist() for name in arena.fields}
    num_live = random.randint(0, arena.num_rows)
    right = _fill(random, arena, num_live)
    for name, field in arena.fields.items():
        if field.role is Role.PLAN:
            right[name][num_live:] = before[name][num_live:]
    if {name: arena[name].tolist() for name in arena.fields} != right:
        yield f"without {ARENA_PAD.name} a fill of {num_live} rows writes others"
    sizes = sorted(random.sample(range(1, 9), random.randint(1, 4)))
    for num in range(1, 10):
        larger, smaller = [one for one in sizes if one >= num], [one for one in sizes if one <= num]
        wanted = {
            (frozenset[str](), True): larger[0] if larger else None,
            (frozenset[str](), False): num if num in sizes else None,
            (frozenset({TOTAL_BUCKETS.name}), True): smaller[-1] if smaller else sizes[0],
        }
        for (severed, has_padding), expected in wanted.items():
            found = arenas.size_lookup(_Noting(severed), has_padding)(sizes, num)
            if found != expected:
                yield f"of the graphs {sizes} {found} is for {num} requests, {expected} is right (severed {severed})"
    table = torch.zeros(2, 2)
    for device, lag in ((_Noting(), 0), (_Noting(frozenset({STEP_SLOTS.name})), 1)):
        of_step, seen, true = table_of_step(device, table.fill_(0)), [], [0.0]
        for number in range(1, 4):
            true.append(float(table.fill_(number)[0, 0]))
            seen.append(float(of_step()[0, 0]))
        if seen != true[1 - lag : 4 - lag]:
            yield f"steps get the page tables {seen}, {true[1 - lag : 4 - lag]} is right (severed {device.severed})"


def _graphs(random: Random) -> Iterator[str]:
    """A graph is replayed, by either way, only when it has been registered with all communicators and allowed."""
    device, runs, registered = CpuDevice(), [0], [0]

    class Registers:
        def register(self) -> None:
            registered[0] += 1

    def body() -> None:
        runs[0] += 1

    graph = device.capture("contract", device.make_graph_pool("contract"), body)
    num = random.randint(0, 2)
    steps = [lambda: graph.register(*(Registers() for _ in range(num))), graph.allow_replay]
    for step in steps:
        if not (raises(GraphError, graph.replay) and raises(GraphError, graph.bind)):
            yield f"a graph that is {graph.state.name} is replayed"
        step()
    if not all(raises(GraphError, step) for step in steps):
        yield "a graph is registered or allowed twice"
    before, bound = runs[0], graph.bind()
    for replay in (graph.replay, bound):
        replay()
    if runs[0] != before + 2 or registered[0] < num:
        yield f"two replays run {runs[0] - before} times; {registered[0]} of {num} communicators are told of the graph"


# --- rings


def _inputs(random: Random) -> Iterator[str]:
    """Arrays arrive with the values that they had. A slot becomes larger only for what it has no room for; the host
    waits for the device then, and says that the old slot's memory is given back."""
    device = _Noting()
    ring = InputRing(device, random.randint(1, 2))
    names = [(slot.host_memory.name, slot.device_memory.name) for slot in ring._slots]
    room = [slot.host.numel() for slot in ring._slots]
    for turn in range(4):
        nbytes = random.choice((64, room[turn % len(room)], room[turn % len(room)] + _GRANULE))
        types: tuple[Any, ...] = (np.int64, np.int32)
        arrays: dict[str, Any] = {
            f"a{number}": np.array([random.randrange(99) for _ in range(random.randint(0, 4))], random.choice(types))
            for number in range(random.randrange(3))
        }  # fmt: skip
        used = sum(-(-array.nbytes // _GRANULE) * _GRANULE for array in arrays.values())
        arrays["rest"] = np.full((nbytes - used) // 8, turn, np.int64)
        copies = {name: array.copy() for name, array in arrays.items()}
        stops, (pinned, on_device) = device.stops, names[turn % len(names)]
        mode = _Streams()
        with mode:
            got = ring.upload(arrays)
        for array in arrays.values():
            array.fill(-1)
        if any(not np.array_equal(got[name].numpy(), array) for name, array in copies.items()):
            yield f"arrays of {nbytes} bytes arrive with other values"
        grows = nbytes > room[turn % len(room)]
        room[turn % len(room)] = max(room[turn % len(room)], 1 << (nbytes - 1).bit_length())
        right = [("host", "release", pinned), ("host", "release", on_device)] if grows else []
        right += [("host", "write", pinned), ("schedule", "read", pinned), ("schedule", "write", on_device)]
        right += [("forward", "read", on_device)]
        declared = device.taken()
        if declared != right:
            yield f"an upload of {nbytes} bytes declares {declared}, {right} is right"
        if device.stops - stops != grows:
            yield f"the host waits {device.stops - stops} times for an upload of {nbytes} bytes, {grows} is right"
        if ("clone", None) in mode.written:
            yield "FORWARD's own copy of a step's inputs is made on no stream of the engine"


def _results(random: Random) -> Iterator[str]:
    """Results arrive with the values that they had, whoever brings them; when they have been taken, the host knows that
    FORWARD has produced them. A ring has room for as many steps as it is deep."""
    depth = random.randint(1, 3)
    for is_small in (False, True):
        device = _Noting()
        for stream in device.streams:
            assert isinstance(stream, CpuStream), "a CPU's"
            stream.lags = True
        ring = ResultRing(device, depth, random.random() < 0.3)
        flights: list[tuple[ResultLease, dict[str, list[Any]], object]] = []
        for _ in range(5):
            types = random.choices((torch.int64, torch.int32, torch.float32), k=random.randint(1, 3))
            tensors = {
                f"result{number}": torch.randint(0, 99, (random.randint(1, 5),)).to(dtype)
                for number, dtype in enumerate(types)
            }
            if len(flights) == depth:
                if not raises(LeaseError, ring.download, tensors, is_small):
                    yield f"{depth + 1} steps of results are in a ring of {depth}"
                yield from _take(*flights.pop(0))
                device.taken()
            mode, right = _Streams(), {name: tensor.tolist() for name, tensor in tensors.items()}
            with mode:
                lease = ring.download(tensors, is_small)
            flights.append((lease, right, tensors))
            for tensor in tensors.values():
                tensor.fill_(-1)
            nbytes = sum(-(-tensor.nbytes // _GRANULE) * _GRANULE for tensor in tensors.values())
            by_forward = (is_small or ring._small_by_forward) and nbytes <= staging._SMALL_BYTES
            alone = len(tensors) == 1 and tensors["result0"].nbytes % 8 == 0
            slot = lease._slot
            assert slot is not None, "they have not been taken"
            pack = [("forward", "write", slot.device_memory.name)]
            if by_forward:
                said = [("forward", "write", slot.host_memory.name), *([] if alone else pack)]
            else:
                said = [
                    *pack,
                    ("copy", "read", slot.device_memory.name),
                    ("copy", "write", slot.host_memory.name),
                ]
            declared = device.taken()
            if declared != said:
                yield f"a download of {len(tensors)} results declares {declared}, {said} is right"
            # FORWARD packs them; what brings them to the host has a stream of its own.
            num_packed = 0 if by_forward and alone else len(tensors)
            if [stream for _, stream in mode.written].count("forward") != num_packed:
                yield f"of {num_packed} results that FORWARD packs, writes are made on {mode.written}"
        for flight in flights:
            yield from _take(*flight)


def _take(lease: Any, right: dict[str, list[Any]], tensors: object) -> Iterator[str]:
    got = {name: values.tolist() for name, values in lease.wait().items()}
    if got != right:
        yield f"the results {right} arrive as {got}"
    if not lease.produced.passed:
        yield "results have been taken, and the host does not know that they have been produced"
    if not raises(LeaseError, lease.wait):
        yield "results are taken twice"


def _masks(random: Random) -> Iterator[str]:
    """What is declared of masks, and that new ones begin. The pinned memory keeps its values until the host writes it;
    it has room for as many rows as a draw reads."""
    device = _Noting()
    words = random.randint(1, 3)
    most = random.choice(
        (6, max((staging._MIN_SLOT_BYTES - _GRANULE) // (4 * words), 6))
    )  # or as many as fit a slot
    table = MaskTable(device, most, 32 * words - random.randrange(32))
    slot, kept = table._slots[0], None
    pinned, on_device = slot.host_memory.name, slot.device_memory.name
    for _ in range(3):
        num_reqs = random.randint(1, 6)
        num_rows = random.choice((num_reqs, max(num_reqs, random.randint(1, 6)), most))
        rows = sorted(random.sample(range(num_reqs), random.choice((num_reqs, random.randint(1, num_reqs)))))
        device.taken()
        masks = table.begin(np.array(rows, np.int64), num_reqs, num_rows)
        if masks.shape != (len(rows), words):
            yield f"masks of {len(rows)} requests with {words} words each are written to {masks.shape}"
            return
        is_same, slot = table._slots[0] is slot, table._slots[0]
        if kept is not None and is_same and not np.array_equal(masks[: len(kept)], kept[: len(masks)]):
            yield "memory for masks is written before the grammars write it"
        masks[:] = kept = np.array([[random.randrange(99) for _ in range(words)] for _ in rows], np.int32)
        table.table.fill_(random.randrange(99))  # every row that a draw reads is written in its step
        mode = _Streams()
        with mode:
            got = table.upload()
        right = np.full((num_rows, words), -1, np.int32)
        right[rows] = kept
        if not np.array_equal(got.numpy(), right):
            yield f"the masks of {rows} of {num_reqs} requests are not those of the draw"
        whole = len(rows) == num_reqs
        said = [("host", "write", pinned), ("schedule", "read", pinned)]
        said += [("schedule", "write", "token_masks" if whole else on_device)]
        said += [] if whole else [("forward", "read", on_device), ("forward", "write", "token_masks")]
        declared = [one for one in device.taken() if one[1] != "release"]
        if declared != [*said, ("forward", "read", "token_masks")]:
            yield f"masks of {len(rows)} of {num_reqs} requests declare {declared}, not {said} and the draw"
        if device.told("begin_fill", MASK_ROWS.name) != _places([got]):
            yield f"it is not said that a draw's masks begin to be others; missing guard: {MASK_ROWS.name}"
        wrong = [name for name, stream in mode.written if stream != "forward" and name != "copy_"]
        if wrong:
            yield f"FORWARD's masks are written by {wrong}, on no stream of the engine"
        table.drawn(device.forward.record())


def _plans(random: Random) -> Iterator[str]:
    """Each plan gets the slot whose plan is the oldest one, and FORWARD is said to have read the latest plan before the
    next one is made."""
    device, depth, latest = _Noting(), random.randint(1, 4), ""
    ring = PlanRing(device, 64, depth)
    used: list[str] = []
    for _ in range(2 * depth + 1):
        with ring.planning() as slot:
            if not device.schedule.is_current:
                yield "a plan is made, and SCHEDULE is not the current stream"
            name = slot.device_memory.name
        right = [("forward", "read", latest)] if latest else []
        right += [("host", "write", slot.host_memory.name)]
        right += [("schedule", "read", slot.host_memory.name), ("schedule", "write", name)]
        declared = device.taken()
        if declared != right:
            yield f"a plan declares {declared}, {right} is right"
        if name in used[-depth + 1 :] and depth > 1:
            yield f"plans of a ring of {depth} slots are written to {used} and {name}"
        used.append(name)
        latest = name


# --- ranks


def _blocks(random: Random) -> Iterator[str]:
    """All threads of a launch together handle each vector once. Once for the whole launch, words of each peer are
    refreshed and the blocks are counted that the launch does not have; each block is counted."""
    launch = Launch(0, random.randint(2, 4), random.randrange(30), random.randint(1, 3), random.randint(1, 4))
    threads = [(block, thread) for block in range(launch.num_blocks) for thread in range(launch.num_threads)]
    handled = sorted(one for at in threads for one in launch.share(*at, launch.num_vectors))
    if handled != list(range(launch.num_vectors)):
        yield f"the threads of {launch} handle the vectors {handled}"
    steps = [step for block in range(launch.num_blocks) for step in count_steps(launch, block)]
    found = Counter(step[:2] for step in steps)
    right = Counter({(Act.REFRESH, peer): 1 for peer in launch.peers})
    right += Counter({(Act.COUNT_ABSENT, -1): 1})
    right += Counter({(act, -1): launch.num_blocks for act in (Act.BEGIN, Act.COUNT)})
    if found != right:
        yield f"the blocks of {launch} count and refresh as {found}, {right} is right"


class _Alone:
    """A back end that notes what is asked of it."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.asked: list[str] = []

    def all_reduce_add_norm(self, *args: object) -> torch.Tensor | None:
        self.asked.append("norm")
        return torch.zeros(1) if len(self.asked) % 2 else None

    def give_up(self) -> None:
        self.asked.append("give up")

    def check(self) -> None:
        self.asked.append("check")


def _ranks(random: Random) -> Iterator[str]:
    """A sum with its norm is refused on another stream, and declared if the back end makes it. A back end is told to
    give up, and asked whether others have."""
    device, backend = _Noting(), _Alone()
    ranks = Communicator("contract", device, device.forward, backend)  # type: ignore[arg-type]
    given = (torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), 1e-6)
    with device.store.active():
        if not raises(CommunicatorError, ranks.all_reduce_add_norm, *given):
            yield "a sum with its norm is made on another stream"
    for _ in range(2):
        with device.forward.active():
            normed = ranks.all_reduce_add_norm(*given)
        right = [] if normed is None else [("forward", "write", "communicator contract")]
        declared = device.taken()
        if declared != right:
            yield f"a sum with its norm declares {declared}, {right} is right"
    ranks.give_up()
    ranks.check()
    if backend.asked != ["norm", "norm", "give up", "check"]:
        yield f"the back end of a communicator is asked {backend.asked}"
