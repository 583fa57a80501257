"""Collective operations of several virtual devices: the steps of ``fenceline_sim.all_reduce``, one operation each.

A step of a kernel's thread is an operation on a stream of that thread, which runs when the seed says. Flags order: what
a thread releases with a flag happened before what follows the acquire that reads it, and nothing else orders two
devices within a launch. Words are written and read in one access each, in any order, so a reader that finds its
launch's generation in a word has read what was written with it. That orders nothing else until the launch ends: the end
of a kernel and the beginning of the next one are fences, so the next launch happens after all that the sender had done
before the launch that sent the word. A write that comes too early, over words that another rank has not read yet, is a
race.

Ranks whose launches of the same number differ, or that wait for a launch that another rank never makes, are reported
with the lines that have submitted both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from fenceline.memory_order import CollectiveBackend
from fenceline.memory_order.edges import FLAG_GENERATION, ONE_STREAM, PEER_HALVES, PEER_WORDS, REGISTERED_GRAPH, Hazard
from fenceline.memory_order.stream import Clock, joined
from fenceline_sim.all_reduce import REFRESH_EVERY, Act, Generations, Launch, Step, count_steps, steps_of
from fenceline_sim.errors import DeadlockError, FreshnessError, PeerError
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.layout import layout_of
from fenceline_sim.memory import Access, whole
from fenceline_sim.place import Place, here
from fenceline_sim.streams import Operation, VirtualStream, who
from fenceline_sim.tensor import VTensor

_TAGS = 1 << 32  # different generations that a word can hold


class Grain(NamedTuple):
    """How finely operations are divided. The default is one block of one thread, with the whole message as a vector:
    for the engine's runs. Smaller vectors, more blocks and threads are for the algorithm's own tests.

    ``two_shots_from``: elements from which on a sum takes two shots, ``in_words`` if that is set and slices are equal.
    ``word``: bytes that are written and read in one access, with a generation, 0: all of a vector. ``num_tags``:
    generations that a word can tell apart, small to see what happens when they repeat. ``capacity``: vectors of a half.
    ``refresh_every``: see ``Launch.refreshed``. A launch has fewer blocks than ``num_blocks`` if its vectors do not
    fill them."""

    vector: int = 0  # elements of one, 0: all of the message
    num_blocks: int = 1
    num_threads: int = 1
    two_shots_from: int = 1 << 62
    in_words: bool = False
    word: int = 0
    num_tags: int = _TAGS
    capacity: int = 4
    vector_bytes: int = 1 << 12
    refresh_every: int = REFRESH_EVERY

    def words(self, num_bytes: int) -> list[slice]:
        """The bytes of each word of a vector of ``num_bytes``."""
        size = self.word or self.vector_bytes
        return [slice(start, min(start + size, num_bytes)) for start in range(0, max(num_bytes, 1), size)]


class Group:
    """The state that the ranks of one group share: each rank's buffer, which all others have opened, and its flags."""

    def __init__(self, gpu: VirtualGpu, size: int, grain: Grain = Grain()) -> None:
        self.gpu = gpu
        self.size = size
        self.grain = grain
        self.ranks: dict[int, PeerRank] = {}  # as they join
        self.launches: dict[int, _Record] = {}  # by number: the first rank to make it, and how


class _Record(NamedTuple):
    rank: int
    what: str
    place: Place


class _Flag:
    """A flag in a rank's memory: its value, and the clock of what was released with it."""

    def __init__(self) -> None:
        self.value = 0
        self.clock: Clock = ()


class _Word(NamedTuple):
    """What is written with a word of a rank's memory: the number of the launch, and the clock of its beginning."""

    number: int
    clock: Clock


_ZERO = _Word(0, ())  # what memory holds at first


class PeerRank(CollectiveBackend):
    """That of one rank, on the device of the thread that makes it.

    ``severed``: guards that a test has severed; ``left_out``: kinds of steps that are left out, for tests of the
    algorithm."""

    def __init__(
        self, group: Group, rank: int, severed: frozenset[str] = frozenset(), left_out: frozenset[Act] = frozenset()
    ) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.generations = Generations(severed)
        self.left_out = left_out
        gpu, grain = group.gpu, group.grain
        self.device = gpu.thread.device
        self.resource = whole(gpu.resource(f"communicator of rank {rank}"))
        self.resource.tag.guards = {Hazard.EXCLUSIVE: (ONE_STREAM.name,)}
        shape = (2, group.size, grain.capacity, grain.vector_bytes)
        self.words = self._buffer("words", shape, grain.word)
        self.staged = self._buffer("staging", shape)
        self.sums = self._buffer("sums", shape)
        self.written: dict[tuple[int, int, int, int], _Word] = {}  # by half, sender, vector and word
        self.flags: dict[tuple[object, ...], _Flag] = {}
        self.launched = [0] * grain.num_blocks  # by block: launches counted
        self.latest: _Record | None = None
        self._threads: list[list[VirtualStream]] = []
        self.registered: dict[int, list[VTensor | None]] = {}  # all ranks' outputs, by the slot that a graph uses
        self.unregistered: list[tuple[int, VTensor]] = []  # slots of captured launches, not registered yet
        self._num_slots = 0
        assert rank not in group.ranks, f"rank {rank} has joined already"
        group.ranks[rank] = self

    def _buffer(self, name: str, shape: tuple[int, ...], unit: int = 0) -> VTensor:
        """``unit``: bytes that are accessed at once, 0: those of a vector."""
        gpu = self.group.gpu
        tensor = torch.empty(shape, dtype=torch.uint8, device="vgpu")
        assert isinstance(tensor, VTensor)
        gpu.name_memory(tensor, f"{name} of rank {self.rank}", unit or shape[-1])
        _share(tensor)
        return tensor

    def flag(self, *name: object) -> _Flag:
        """A flag of this rank's memory, 0 at first."""
        return self.flags.setdefault(name, _Flag())

    # --- the back end ---------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor) -> None:
        self._launch("all-reduce", x, x)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._launch("all-gather", x, out)

    def register(self) -> None:
        """See ``memory_order.CollectiveBackend``: the others learn where the outputs of captured launches lie."""
        for slot, tensor in self.unregistered:
            self.group.gpu.collect_released()
            for rank in range(self.size):
                known = self.group.ranks[rank].registered.setdefault(slot, [None] * self.size)
                known[self.rank] = tensor
            _share(tensor)
        self.unregistered = []

    def give_up(self) -> None:
        """See ``memory_order.CollectiveBackend``. A virtual GPU reports waits that do not end."""

    def close(self) -> None:
        """See ``memory_order.CollectiveBackend``."""

    def _launch(self, kind: str, x: torch.Tensor, out: torch.Tensor) -> None:
        assert isinstance(x, VTensor) and isinstance(out, VTensor), "tensors of the device"
        gpu, grain = self.group.gpu, self.group.grain
        stream = gpu.thread.current
        two_shots = kind == "all-reduce" and x.numel() >= grain.two_shots_from
        size = grain.vector or max(x.numel(), 1)
        num_vectors = math.ceil(x.numel() / size)
        assert num_vectors <= grain.capacity, "more vectors than the buffers hold"
        assert size * x.element_size() <= grain.vector_bytes, "vectors that the buffers do not hold"
        slot = -1
        in_words = two_shots and grain.in_words and num_vectors % self.size == 0
        if two_shots and not in_words and stream.is_captured:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
            self.unregistered.append((slot, x))
        num_blocks = max(1, min(grain.num_blocks, num_vectors // grain.num_threads))
        cut = num_vectors, num_blocks, grain.num_threads
        shape = Launch(self.rank, self.size, *cut, two_shots, slot >= 0, words=in_words)
        what = f"{kind} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        running = _Running(self, kind, what, shape, x, out, size, slot, here())
        gpu.submit(f"launch of {what}", running.open, writes=(self.resource,))
        alone = grain.num_blocks == grain.num_threads == 1
        if alone:  # the steps of both threads on the stream itself
            self._submit(_Held(running, 0, 0), stream, _merged(steps_of(shape, 0, 0), count_steps(shape, 0)))
            self._submit(_Held(running, 0, 0), stream, (Step(Act.END),))
            return
        start, ends = gpu.record(stream), []
        for block in range(num_blocks):
            branches = [self._thread(block, thread) for thread in range(grain.num_threads + 1)]
            for branch in branches:
                gpu.wait(branch, start)
            held = [_Held(running, block, thread) for thread in range(grain.num_threads + 1)]
            parts = [_between_barriers(steps_of(shape, block, thread)) for thread in range(grain.num_threads)]
            arrived: list[Operation] = []
            for number, part in enumerate(zip(*parts, strict=True)):
                if number > 0 and Act.BARRIER not in self.left_out:
                    marks = [gpu.record(branch) for branch in branches[:-1]]
                    for branch in branches[:-1]:
                        for mark in marks:
                            gpu.wait(branch, mark)
                for thread, mine in enumerate(part):
                    arrived += self._submit(held[thread], branches[thread], mine)
            self._submit(held[-1], branches[-1], count_steps(shape, block), arrived)
            ends += [gpu.record(branch) for branch in branches]
        for end in ends:
            gpu.wait(stream, end)
        self._submit(_Held(running, 0, 0), stream, (Step(Act.END),))

    def _thread(self, block: int, thread: int) -> VirtualStream:
        while len(self._threads) <= block:
            names = [f"block{len(self._threads)}.{i}" for i in range(self.group.grain.num_threads + 1)]
            self._threads.append([self.group.gpu.stream(name, self.device) for name in names])
        return self._threads[block][thread]

    def _submit(
        self, held: _Held, stream: VirtualStream, steps: Iterable[Step], arrived: Iterable[Operation] = ()
    ) -> list[Operation]:
        """``arrived``: marks where the block's threads for data have read the generation. Returns its own."""
        gpu, running, marks = self.group.gpu, held.running, []
        for step in steps:
            if step.act is Act.COUNT and Act.ARRIVE not in self.left_out:
                for mark in arrived:
                    gpu.wait(stream, mark)
            if step.act in self.left_out:
                continue
            if step.act is Act.ARRIVE:
                marks.append(gpu.record(stream))
                continue
            by_word = step.act in (Act.PUSH_WORDS, Act.PUSH_SUM_WORDS, Act.AWAIT_WORDS)
            for word in range(len(running.words(step.vector)) if by_word else 1):
                spin = _Spin(held, step, word)
                op = Operation(f"{running.kind}: {step.act.value}", running.place, spin.run)
                op.spin = spin
                gpu.enqueue(stream, op)
        return marks


def _merged(data: Iterator[Step], count: Iterator[Step]) -> Iterator[Step]:
    """The steps of one thread that has both jobs."""
    yield from (step for step in data if step.act not in (Act.ARRIVE, Act.BARRIER))
    yield from (step for step in count if step.act is not Act.BEGIN)


def _between_barriers(steps: Iterable[Step]) -> list[list[Step]]:
    parts: list[list[Step]] = [[]]
    for step in steps:
        if step.act is Act.BARRIER:
            parts.append([])
        else:
            parts[-1].append(step)
    return parts


class _Running:
    """A launch of a rank. A graph replays it: what belongs to one run is set anew by its first operation."""

    def __init__(
        self, mine: PeerRank, kind: str, what: str, shape: Launch, x: VTensor, out: VTensor, vector: int, slot: int,
        place: Place,
    ) -> None:  # fmt: skip
        self.mine, self.kind, self.what, self.shape, self.place = mine, kind, what, shape, place
        self.x, self.out, self.vector, self.slot = x, out, vector, slot
        self.number = 0
        self.received: Clock = ()  # what happened before the launches whose words this one has received

    def words(self, vector: int) -> list[slice]:
        size = min(self.vector, self.x.numel() - vector * self.vector) * self.x.element_size()
        return self.mine.group.grain.words(size)

    def open(self) -> None:
        """The launch begins: it must be the one that the other ranks make under its number."""
        mine, group = self.mine, self.mine.group
        self.number, self.received = mine.launched[0] + 1, ()
        record = mine.latest = _Record(mine.rank, self.what, self.place)
        other = group.launches.setdefault(self.number, record)
        if other.what != record.what:
            lines = [f"deadlock: ranks wait for different collectives, each for its {self.number}. one"]
            lines += [f"  rank {one.rank}: {one.what}, {one.place}" for one in (other, record)]
            lines.append("  one of them has taken a branch that the others have not, or on a stream of its own")
            group.gpu.findings.stop(DeadlockError("\n".join(lines)))


class _Held:
    """What a thread has in its registers."""

    def __init__(self, running: _Running, block: int, thread: int) -> None:
        self.running, self.block, self.thread = running, block, thread
        self.number = 0  # of the launch, as the thread has read it
        self.began: Clock = ()  # what had happened when it read that
        self.vectors: dict[tuple[int, int], torch.Tensor] = {}  # rank, vector
        self.words: dict[tuple[int, int], list[torch.Tensor]] = {}  # the same: the words that have come, in order


class _Spin:
    """One step, or that for one word of a vector: see ``streams.Spin``. A graph replays it: ``begin`` finds out anew
    what it accesses."""

    def __init__(self, held: _Held, step: Step, word: int = 0) -> None:
        self.held, self.step, self.word = held, step, word
        self._reads: Sequence[Access] = ()
        self._writes: Sequence[Access] = ()
        self.reads_what_it_waits_for = step.act is Act.AWAIT_WORDS and self._mine.generations.awaits(word)

    @property
    def _mine(self) -> PeerRank:
        return self.held.running.mine

    @property
    def what(self) -> str:
        """For reports: the rank for which it waits, and how far that rank has come."""
        mine, step = self._mine, self.step
        latest = mine.group.ranks[step.peer].latest
        before = "has launched nothing" if latest is None else f"has last launched {latest.what}, {latest.place}"
        mine_is = f"the {self.held.number}. collective, {self.held.running.what}"
        return f"rank {step.peer} in {mine_is}; rank {step.peer} {before}"

    # --- waiting --------------------------------------------------------------------------------------

    def ready(self) -> bool:
        mine, held, step = self._mine, self.held, self.step
        gens, number = mine.generations, held.number
        match step.act:
            case Act.ACQUIRE:
                return mine.flag(step.vector, held.block, step.peer).value >= gens.generation(number)
            case Act.AWAIT_WORDS:
                if not gens.awaits(self.word):
                    return True
                return self._tag(self._written.number) == self._tag(number)
        return True

    def _tag(self, number: int) -> int:
        return self._mine.generations.generation(number) % self._mine.group.grain.num_tags

    # --- accesses -------------------------------------------------------------------------------------

    def begin(self, op: Operation) -> Clock:
        mine, held, step = self._mine, self.held, self.step
        running, group, number = held.running, mine.group, held.number
        reads: list[Access] = []
        writes: list[Access] = []
        acquired: Clock = ()
        match step.act:
            case Act.BEGIN:
                held.number = mine.launched[held.block] + 1
            case Act.END:
                acquired = running.received
            case Act.ACQUIRE:
                acquired = mine.flag(step.vector, held.block, step.peer).clock
            case Act.READ:
                reads = [self._part(running.x)]
            case Act.PUSH_WORDS | Act.PUSH_SUM_WORDS:
                writes = [self._place(group.ranks[step.peer].words, mine.rank, self._at, self._bytes)]
            case Act.REFRESH if (refreshed := self._refreshed) is not None:
                writes = [self._place(group.ranks[step.peer].words, mine.rank, refreshed)]
            case Act.AWAIT_WORDS:
                written = self._written
                if written.number != number and mine.generations.awaits(self.word):
                    group.gpu.checks.found(_old_words(self, op, written.number))
                running.received = joined(running.received, written.clock)
                reads = [self._place(mine.words, step.peer, self._at, self._bytes)]
            case Act.KEEP:
                writes = [self._part(running.x)]
            case Act.SUM if running.kind == "all-reduce":
                writes = [self._part(running.x)]
            case Act.SUM:
                writes = [self._part(running.out, row) for row in range(running.shape.size)]
            case Act.PUSH:
                reads = [self._part(running.x)]
                writes = [self._place(group.ranks[step.peer].staged, mine.rank, step.vector)]
            case Act.LOAD:
                reads = [self._place(mine.staged, step.peer, step.vector)]
            case Act.PUSH_SUM:
                writes = [self._target(op)]
            case Act.TAKE:
                reads = [self._place(mine.sums, step.peer, step.vector)]
                writes = [self._part(running.x)]
        op.reads, op.writes = self._reads, self._writes = reads, writes
        return acquired

    def _target(self, op: Operation) -> Access:
        """Where a sum is pushed: into the peer's buffer, or into its output, whose address this rank must know."""
        mine, running, step = self._mine, self.held.running, self.step
        if not running.shape.registered:
            return self._place(mine.group.ranks[step.peer].sums, mine.rank, step.vector)
        known = mine.registered.get(running.slot, [None] * mine.size)[step.peer]
        if known is None:
            mine.group.gpu.checks.found(_unregistered(self, op))
            known = running.x  # where the findings are only collected
        return self._part(known)

    def _part(self, tensor: VTensor, row: int | None = None) -> Access:
        """The step's vector of a message, in ``row`` of a gathered one. Plain views: an operator of the device would be
        a call into it, at which another thread might run what comes after this step."""
        plain = tensor.plain if row is None else tensor.plain[row]
        size, vector = self.held.running.vector, self.step.vector
        return Access(tensor.allocation.tag, layout_of(plain.reshape(-1)[vector * size : (vector + 1) * size]))

    def _place(self, buffer: VTensor, rank: int, vector: int, part: slice = slice(None)) -> Access:
        """A vector's place in a buffer, or that of a word of it."""
        return Access(buffer.allocation.tag, layout_of(buffer.plain[self._half, rank, vector, part]))

    @property
    def _half(self) -> int:
        return self._mine.generations.half(self.held.number)

    @property
    def _refreshed(self) -> int | None:
        grain = self._mine.group.grain
        return self.held.running.shape.refreshed(self.held.number, grain.capacity, grain.refresh_every)

    @property
    def _written(self) -> _Word:
        return self._mine.written.get((self._half, self.step.peer, self._at, self.word), _ZERO)

    @property
    def _at(self) -> int:
        return self.step.vector if self.step.place < 0 else self.step.place

    @property
    def _bytes(self) -> slice:
        return self.held.running.words(self.step.vector)[self.word]

    # --- running --------------------------------------------------------------------------------------

    def run(self) -> None:
        mine, held, step = self._mine, self.held, self.step
        running, group, number = held.running, mine.group, held.number
        vectors, key, own = held.vectors, (step.peer, step.vector), (mine.rank, step.vector)
        read = [access.tag.region.view(access.layout) for access in self._reads]
        write = [access.tag.region.view(access.layout) for access in self._writes]
        match step.act:
            case Act.COUNT:
                mine.launched[held.block] = number
            case Act.COUNT_ABSENT:
                for block in range(running.shape.num_blocks, group.grain.num_blocks):
                    mine.launched[block] = number
            case Act.READ:
                vectors[own] = read[0].clone()
            case Act.PUSH_WORDS | Act.PUSH_SUM_WORDS:
                pushed = own if step.act is Act.PUSH_WORDS else (-1, step.vector)
                write[0].copy_(vectors[pushed].view(torch.uint8)[self._bytes])
                place = (self._half, mine.rank, self._at, self.word)
                group.ranks[step.peer].written[place] = _Word(number, held.began)
            case Act.REFRESH if (refreshed := self._refreshed) is not None:
                for word in range(len(group.grain.words(group.grain.vector_bytes))):
                    place = (self._half, mine.rank, refreshed, word)
                    group.ranks[step.peer].written[place] = _Word(number, held.began)
            case Act.AWAIT_WORDS:
                if self.word == 0:
                    held.words[key] = []
                held.words[key].append(read[0].clone())
                vectors[key] = torch.cat(held.words[key]).view(running.x.dtype)
            case Act.KEEP:
                write[0].copy_(vectors[key])
            case Act.SUM:
                parts = [vectors[rank, step.vector] for rank in range(running.shape.size)]
                if running.kind == "all-reduce":
                    parts = [sum((part.float() for part in parts[1:]), parts[0].float()).to(parts[0].dtype)]
                    vectors[-1, step.vector] = parts[0]
                for target, part in zip(write, parts, strict=True):
                    target.copy_(part)
            case Act.PUSH:
                _put(write[0], read[0])
            case Act.LOAD:
                vectors[key] = read[0][: self._nbytes].clone().view(running.x.dtype)
            case Act.PUSH_SUM:
                _put(write[0], vectors[-1, step.vector])
            case Act.TAKE:
                write[0].copy_(read[0][: self._nbytes].view(running.x.dtype))

    @property
    def _nbytes(self) -> int:
        return self.held.running.words(self.step.vector)[-1].stop

    def ran(self, op: Operation) -> None:
        step, mine = self.step, self._mine
        if step.act is Act.BEGIN:
            self.held.began = op.passed
        elif step.act is Act.RELEASE:
            flag = mine.group.ranks[step.peer].flag(step.vector, self.held.block, mine.rank)
            flag.value = mine.generations.generation(self.held.number)
            flag.clock = op.passed


def _put(target: torch.Tensor, values: torch.Tensor) -> None:
    """``target``: an output, or bytes of a buffer, of which only the first may be needed."""
    if target.dtype is not values.dtype:
        values = values.contiguous().view(torch.uint8)
    target[: values.numel()].copy_(values)


def _share(tensor: VTensor) -> None:
    """All devices may access it; what orders their accesses are generations and halves."""
    tag = tensor.allocation.tag
    late = (FLAG_GENERATION.name, PEER_HALVES.name, PEER_WORDS.name)
    tag.guards = {Hazard.RAW: (FLAG_GENERATION.name, PEER_WORDS.name), Hazard.WAR: late, Hazard.WAW: late}


def _old_words(spin: _Spin, op: Operation, written: int) -> FreshnessError:
    memory, number = f"words of rank {spin._mine.rank}", spin.held.number
    text = f"freshness: {memory} from rank {spin.step.peer} of launch {written} are taken for those of launch {number}"
    return FreshnessError(f"{text}\n  {who(op)}", FLAG_GENERATION.name, memory, (str(op.place),))


def _unregistered(spin: _Spin, op: Operation) -> PeerError:
    what, ranks = spin.held.running.what, (spin._mine.rank, spin.step.peer)
    text = f"{op.graph or 'a launch'} was replayed before rank {ranks[0]} was told where rank {ranks[1]} has its {what}"
    return PeerError(f"peers: {text}\n  {who(op)}", REGISTERED_GRAPH.name, what, (str(op.place),))
