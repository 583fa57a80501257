"""What parts of memory_order promise to any caller, asked with random values at the end of a run.

The engine uses them rightly, and on the virtual GPU not in all ways. So leases are also retired wrongly, waits made
with edges that do not fit, masks written for vocabularies of other sizes, threads of the real host started, and the
operations of a communicator called with more ranks. What is right is computed here from the documentation of each.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import torch

from fenceline.memory_order import Communicator, LeasePool, Points
from fenceline.memory_order import device as device_module
from fenceline.memory_order.all_reduce import Launch
from fenceline.memory_order.communicator import sum_gathered
from fenceline.memory_order.device import CpuDevice, CpuStream, HostChannel
from fenceline.memory_order.edges import EDGES, Edge, StreamName
from fenceline.memory_order.lease import LeaseError
from fenceline.memory_order.staging import MaskTable
from fenceline.memory_order.stream import Point

_NUM_TURNS = 12
_WORKER_TIMEOUT_S = 10.0  # a worker's answer takes microseconds


def compare_contracts(random: Random) -> str:
    """The first promise that is not kept, "" if all are."""
    for part in (_leases, _points, _edges, _refreshes, _masks, _workers, _threads, _ranks):
        for wrong in part(random):
            return f"contracts: {wrong}"
    return ""


def raises(kind: type[Exception], call: Callable[..., object], *args: object) -> bool:
    """Whether ``call`` with ``args`` raises an exception of this kind."""
    try:
        call(*args)
    except kind:
        return True
    return False


def _streams() -> list[CpuStream]:
    """Streams whose Points pass when the host learns of it."""
    streams = [CpuStream(name, frozenset()) for name in (StreamName.FORWARD, StreamName.LOAD)]
    for stream in streams:
        stream.lags = True
    return streams


# --- leases


def _leases(random: Random) -> Iterator[str]:
    """No id has two owners; an id comes with the Points of its retirement unless these have passed; of those that may
    be used at once, these are handed out first. What retires wrongly is refused, and changes nothing."""
    reserved, size, streams = random.randrange(3), random.randint(4, 9), _streams()
    pool = LeasePool("contract", size, reserved)
    leased: set[int] = set()
    free: dict[int, Point | None] = dict.fromkeys(range(reserved, size))
    for _ in range(_NUM_TURNS):
        point = random.choice(streams).record()
        num = random.randint(1, size)
        got = pool.alloc(num)
        if (got is None) != (num > len(free)):
            yield f"{num} of {len(free)} free ids are {'not ' * (got is None)}handed out"
        if got is not None:
            ids, after = got[0].tolist(), got[1]
            if len({*ids} & free.keys()) != num:
                yield f"the ids {ids} are handed out, free are {sorted(free)}"
            waits = [one for one in map(free.pop, ids) if one is not None and not one.passed]
            num_ready = num - len(waits) + sum(one is None or one.passed for one in free.values())
            if any(not _covers(after, one) for one in waits):
                yield f"ids are handed out with {after}, and must wait for {waits}"
            if waits and num_ready >= num:
                yield f"{num} ids are handed out that must wait, {num_ready} need not"
            leased |= {*ids}
        wrong = [random.randrange(-2, size + 2) for _ in range(random.choice((1, 2, 2, 3, size + 1)))]
        before = pool.owned().tolist()
        if before != sorted(leased):
            yield f"{before} are said to be leased, {sorted(leased)} are"
        is_right = len({*wrong}) == len(wrong) and {*wrong} <= leased
        if raises(LeaseError, pool.retire, np.array(wrong, np.int32), Points.of(point)) == is_right:
            yield f"the ids {wrong} are {'not ' * is_right}retired, leased are {before}"
        right = wrong if is_right else random.sample(before, random.randint(0, len(before)))
        if not is_right:
            pool.retire(np.array(right, np.int32), Points.of(point))
        leased -= {*right}
        free |= dict.fromkeys(right, point)
        if random.random() < 0.3:
            point.stream.note_passed(point)
    if pool.num_leased != len(leased) or pool.num_free != len(free):
        yield f"{pool.num_leased} ids are said to be leased, {len(leased)} are"


def _covers(after: Points, point: Point) -> bool:
    return any(one.stream is point.stream and one.serial >= point.serial for one in after)


# --- Points and edges


def _points(random: Random) -> Iterator[str]:
    """A set of Points has the latest of each stream, without those that have passed."""
    streams = _streams()
    made = [random.choice(streams).record() for _ in range(random.randint(1, 6))]
    for point in random.sample(made, random.randrange(2)):
        point.stream.note_passed(point)
    for num in range(len(made) + 1):
        some = random.sample(made, num)
        right = {(point.stream.name, max(p.serial for p in some if p.stream is point.stream))
                 for point in some if not point.passed}  # fmt: skip
        half = random.randint(0, num)
        for got in (Points.of(*some), Points.of(*some[:half]).join(Points.of(*some[half:]))):
            if {(point.stream.name, point.serial) for point in got} != right:
                yield f"{some} joined are {list(got)}, of which {len(right)} have not passed"


def _edges(random: Random) -> Iterator[str]:
    """A wait is refused if its edge is not between these streams."""
    for stream in _streams():
        point = stream.record()
        for edge in random.sample(list(EDGES.values()), 4):
            fits = (StreamName.HOST, stream.name) in edge.pairs
            for wait in (stream.synchronize_from_worker, stream.synchronize):
                if raises(AssertionError, wait, point, edge) == fits:
                    yield _misjudged(wait.__name__, edge, stream, fits)


def _misjudged(wait: str, edge: Edge, stream: CpuStream, fits: bool) -> str:
    return f"{wait} for a Point on {stream.name.value} with {edge.name} is {'refused' if fits else 'made'}"


# --- an all-reduce's old words


def _refreshes(random: Random) -> Iterator[str]:
    """Of each of the two halves, which launches use in turn, every vector outside of the message is refreshed in
    ``2 * every * capacity`` launches, wherever one begins to count, and none of the message."""
    capacity, every, first = random.randint(1, 6), random.randint(1, 3), random.randrange(50)
    num_vectors, two_shots = random.randint(0, capacity), random.random() < 0.3
    launch = Launch(0, 2, num_vectors, 1, 1, two_shots)
    right = set(range(0 if two_shots else num_vectors, capacity))
    for half in (0, 1):
        numbers = (number for number in range(first, first + 2 * every * capacity) if number % 2 == half)
        got = {launch.refreshed(number, capacity, every) for number in numbers} - {None}
        if got != right:
            yield f"launches of {num_vectors} vectors refresh {got} of half {half}, not {right}"


# --- masks of tokens


def _masks(random: Random) -> Iterator[str]:
    """The table has the masks of the requests that have one; all others, and padding, may draw every token."""
    device = CpuDevice()
    device.check_order()
    num_full, most = random.choice((1, 2, 4)), random.randint(5, 6)
    full = 32 * (1 << 16) // 4 // num_full  # masks of so many rows fill a slot, without the rows' numbers
    vocab_size = random.choice((random.randint(1, 300), random.randint(300, 3000), full))
    table = MaskTable(device, most, vocab_size)
    num_words = math.ceil(vocab_size / 32)
    for _ in range(3):
        num_reqs = random.randint(1, most)
        num_masks = random.choice((num_reqs, random.randint(1, num_reqs), min(num_full, num_reqs)))
        rows = sorted(random.sample(range(num_reqs), num_masks))
        num_rows = random.randint(num_reqs, most)
        masks = np.random.default_rng(random.randrange(1 << 30)).integers(
            0, 99, (len(rows), num_words), np.int32
        )
        right = np.full((num_rows, num_words), -1, np.int32)
        right[rows] = masks
        try:
            pinned = table.begin(np.array(rows, np.int64), num_reqs, num_rows)
            pinned[:] = masks
            with device.forward.active():
                got = table.upload().numpy()
        except (RuntimeError, ValueError) as error:
            yield f"masks of {rows} of {num_reqs} requests, {num_words} words each: {error}"
            return
        if not np.array_equal(got, right):
            yield f"masks of {rows} of {num_reqs} requests, {num_words} words each, are {got}, not {right}"
        table.drawn(device.forward.record())


# --- threads of the host


class _Stop(Exception):
    pass


def _workers(random: Random) -> Iterator[str]:
    """A worker runs what it is given, beside the thread that waits for it, and ``join`` raises what it raised."""
    device = CpuDevice()
    asked: HostChannel[int | None] = device.make_channel()
    answered: HostChannel[int] = device.make_channel()
    # Beside the channels, which may be at fault, so that nobody waits without an end.
    has_answered = threading.Semaphore(0)

    def serve() -> None:
        while (item := asked.get()) is not None:
            answered.put(item + 1)
            has_answered.release()
        sum(range(20_000))  # so that a join which does not wait comes too early
        raise _Stop

    worker = device.start_worker("contract", serve)
    thread = getattr(worker, "_thread", None)
    if not isinstance(thread, threading.Thread) or not thread.is_alive():
        yield "a worker does not run"
        return
    numbers = [random.randrange(100) for _ in range(3)]
    for number in numbers:
        asked.put(number)
    if not all(has_answered.acquire(timeout=_WORKER_TIMEOUT_S) for _ in numbers):
        yield "a worker does not answer"
        return
    got = [answered.poll() for _ in numbers]
    if got != [number + 1 for number in numbers] or answered.poll() is not None:
        yield f"a channel has brought {got} for {numbers}"
    device_module.logger.disabled = True  # the worker's failure is one that it was asked for
    try:
        asked.put(None)
        raised = raises(_Stop, worker.join)
    finally:
        device_module.logger.disabled = False
    if not raised:
        yield "join does not raise what the worker raised"


def _threads(random: Random) -> Iterator[str]:
    """Torch's threads leave a core to the front end; no more are used than before."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before = torch.get_num_threads()
    try:
        for num in (1, cores, cores + random.randint(1, 3)):
            torch.set_num_threads(num)
            CpuDevice()
            right = min(num, max(cores - 1, 1))
            if torch.get_num_threads() != right:
                yield f"{torch.get_num_threads()} threads are used of {num} on {cores} cores, {right} are right"
    finally:
        torch.set_num_threads(before)


# --- ranks


class _OtherRanks:
    """A back end whose other ranks give ``others`` [size - 1], one list for each operation."""

    def __init__(self, rank: int, size: int, others: list[list[torch.Tensor]]) -> None:
        self.rank, self.size, self.others = rank, size, others
        self.is_closed = False

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        parts = list(self.others.pop(0))
        parts.insert(self.rank, x)
        for target, part in zip(out, parts, strict=True):
            target.copy_(part)

    def all_reduce(self, x: torch.Tensor) -> None:
        sum_gathered(self, x)  # type: ignore[arg-type]

    def close(self) -> None:
        self.is_closed = True


def _ranks(random: Random) -> Iterator[str]:
    """A sum is that of all ranks, added in float32 in their order; an exchange gives each rank's bytes; each operation
    declares that it uses the communicator's order."""
    size, device = random.randint(2, 4), CpuDevice()
    rank, declared = random.randrange(size), [0]

    def noted(stream: StreamName, label: str, accesses: Callable[..., None], *args: object) -> None:
        declared[0] += 1

    device._readers = (noted,)
    values = [
        torch.tensor([random.uniform(-9, 9) for _ in range(3)], dtype=torch.bfloat16) for _ in range(size)
    ]
    data = [bytes(random.randrange(1, 256) for _ in range(random.randrange(5))) for _ in range(size)]
    width = max(1, *map(len, data))
    lengths = [torch.tensor([len(part)]) for part in data]
    padded = [torch.tensor(list(part.ljust(width, b"\0")), dtype=torch.uint8) for part in data]
    operations = (values, lengths, padded, values)
    others = [[part for one, part in enumerate(parts) if one != rank] for parts in operations]
    backend = _OtherRanks(rank, size, others)
    ranks = Communicator("contract", device, device.forward, backend)  # type: ignore[arg-type]
    with device.forward.active():
        summed, exchanged = ranks.all_reduce(values[rank].clone()), ranks.exchange(data[rank])
    right = torch.zeros(3)
    for value in values:
        right += value.float()
    if not torch.equal(summed, right.to(torch.bfloat16)):
        yield f"the sum of {values} is {summed}"
    if exchanged != data:
        yield f"{exchanged} is exchanged, not {data}"
    if declared[0] != 3:
        yield f"{declared[0]} of 3 operations of a communicator are declared"
    if not raises(RuntimeError, ranks.all_gather, values[rank]):
        yield "a communicator's operation is made on another stream"
    ranks.close()
    if not backend.is_closed:
        yield "a communicator does not leave its group"
