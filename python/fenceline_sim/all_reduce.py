"""The all-reduce of GPUs of one host, step by step: what each thread of its kernel does, in order.

This is the algorithm; ``sgl-kernel/csrc/all_reduce_kernel.cuh`` is its code for GPUs, and a test compares the two
step by step. The virtual GPU runs these steps, one operation each, on all schedules tried.

Every rank has a buffer that its peers have opened. Data is pushed: a rank writes to its peers' buffers and reads its
own, because a write to another GPU takes half as long as a read. There are two ways:

* **one shot**: every rank pushes all of its data to every peer, and adds up what it gets. A word of 8 bytes is
  written in one access and holds 4 bytes of data and the generation of the launch, so a reader that finds the
  generation has the data too. Two words are written by one instruction, but may arrive one by one; each is waited for.
  There is no flag and no fence: data crosses the link once, and for few bytes this is the fastest.
* **two shots**: rank r gets slice r of all ranks, adds it up and pushes the sum to all. What is pushed is released by a
  flag and acquired by the reader, once for each block and shot, so only data is moved. Where rows are normalised in the
  same launch, a slice is a part of every row, and a block has whole rows.
* **two shots in words**: the same for rows, with words in place of flags: twice the bytes, but no fence, and nothing
  waits for more than the data that it needs.

Both add in float32 in the order of ranks and round once: the same bits on all ranks.

**Generations.** Each launch has the next generation, which a rank counts in its own memory, so a graph may bake in
everything else. Each block has a counter of its own, so that blocks need not wait for each other; block 0 also counts
for blocks that the launch does not have. Flags hold 64 bits of the generation and never repeat. Words hold 32, so they
would repeat after 2^32 launches, and a word that no launch has written for so long could be taken for a new one. So
some launches write words without data, which nobody reads in that launch, and so rewrite all words in turn
(``REFRESH``), each at least once in 2 * 64 * capacity launches, which is less than 2^32. So words that
were zeros at first are safe too, and nothing has to be reset.

**When a buffer may be written again.** A launch g of this rank writes half g % 2 of its peers' buffers. The last to
write there was launch g - 2, if not an earlier one. A peer has read what it wrote when its own launch g - 2 has ended,
since a launch reads everything before it ends. In launch g - 1 this rank has received something from every peer: in one
shot and in a gather all words, in two shots a flag, or in words its own slice (which therefore no rank may lack). The
peer sent it in its launch g - 1, which began when its launch g - 2 had ended, because kernels of a stream run one after
the other. So a rank is never more than one launch ahead of a peer, of whatever kinds and sizes the launches are, and
two halves are enough; one would not be. Two launches of a rank never overlap.

**Blocks** are numbered alike on all ranks, and block b of a rank waits for block b of the others only. All blocks of a
launch fit the GPU at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from fenceline.memory_order.edges import FLAG_GENERATION, PEER_HALVES, PEER_WORDS

REFRESH_EVERY = 64  # a pair of launches of so many refreshes a vector's words


class Act(Enum):
    """What a step does. ``peer``: another rank. ``vector``: 16 bytes of the message, by number."""

    BEGIN = "begin"  # read the generation of this launch
    ARRIVE = "arrive"  # this thread has read the generation; it does not wait for the others
    COUNT = "count"  # wait until all threads of the block have read it, and count the launch for the block
    COUNT_ABSENT = "count_absent"  # count it for the blocks that the launch does not have
    READ = "read"  # read this rank's own vector of the input
    PUSH_WORDS = "push_words"  # write the vector, in words, to peer
    PUSH_SUM_WORDS = "push_sum_words"  # the same with the sum of the vector, which has the place ``place``
    KEEP = "keep"  # write a sum that has come in words to the output
    REFRESH = "refresh"  # some launches: write words of this launch to peer, where nobody reads in this launch
    AWAIT_WORDS = "await_words"  # wait for all words of peer's vector
    SUM = "sum"  # add all ranks' vectors, in the order of ranks, and write the sum to the output
    PUSH = "push"  # write the vector to peer, in whose slice it is
    BARRIER = "barrier"  # wait for all threads for data of the block
    RELEASE = "release"  # tell peer that this block has pushed its data of shot 0 or 1 (``vector``)
    ACQUIRE = "acquire"  # wait until peer has said the same
    LOAD = "load"  # read peer's vector of this rank's slice from this rank's buffer
    PUSH_SUM = "push_sum"  # write the sum of a vector of this rank's slice to peer's buffer, or to its output
    TAKE = "take"  # copy the vector of peer's slice from this rank's buffer to the output
    # No instruction: the launch has ended. The next one happens after what peers had done before they began the
    # launches whose words this one has received.
    END = "end"


class Step(NamedTuple):
    """One access, flag or wait of a thread. ``place``: where the vector's words lie among those of their sender; -1: at
    its own number."""

    act: Act
    peer: int = -1
    vector: int = -1
    place: int = -1


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch on one rank: ``num_blocks`` blocks of ``num_threads`` threads for data, and one thread more in each that
    counts. ``two_shots``: whether it takes two shots. ``registered``: peers' outputs are known, so sums are pushed
    straight there in the second shot. ``row``: vectors of a row, if slices are parts of rows; 0: slices follow each
    other. ``words``: two shots in words."""

    rank: int
    size: int
    num_vectors: int
    num_blocks: int
    num_threads: int
    two_shots: bool = False
    registered: bool = False
    row: int = 0
    words: bool = False

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, beginning with the next one, so that not all ranks write to the same one at once."""
        return tuple((self.rank + i) % self.size for i in range(1, self.size))

    @property
    def slice_size(self) -> int:
        """Vectors of a slice; the last ones may be shorter, or empty."""
        return -(-self.num_vectors // self.size)

    def slice_of(self, rank: int) -> Sequence[int]:
        """The vectors that ``rank`` adds up in two shots."""
        if self.row:
            part = self.row // self.size
            return [row + rank * part + i for row in range(0, self.num_vectors, self.row) for i in range(part)]
        start = rank * self.slice_size
        return range(min(start, self.num_vectors), min(start + self.slice_size, self.num_vectors))

    def refreshed(self, number: int, capacity: int, every: int = REFRESH_EVERY) -> int | None:
        """The vector whose words the ``number``-th launch refreshes, of ``capacity`` in a half: all in turn, so that
        each is written at least once in ``2 * every * capacity`` launches. None where it belongs to the message, and in
        launches that refresh nothing."""
        pair = number // 2
        if pair % every:
            return None
        vector = pair // every % capacity
        used = 2 * self.slice_size if self.words else 0 if self.two_shots else self.num_vectors
        return vector if vector >= used else None

    def share(self, block: int, thread: int, count: int) -> range:
        """Which of ``count`` vectors a thread handles."""
        return range(block * self.num_threads + thread, count, self.num_blocks * self.num_threads)


def count_steps(launch: Launch, block: int) -> Iterator[Step]:
    """What the thread of a block does that counts the launch. Only the end of the launch waits for this thread."""
    yield Step(Act.BEGIN)
    if block == 0:
        for peer in launch.peers:
            yield Step(Act.REFRESH, peer)
    yield Step(Act.COUNT)
    if block == 0:
        yield Step(Act.COUNT_ABSENT)


def one_shot_steps(launch: Launch, block: int, thread: int) -> Iterator[Step]:
    """What a thread for data does in one shot: each rank gets all data and adds it up. It reads the first vector before
    the generation, so that it waits for both at once."""
    mine = launch.share(block, thread, launch.num_vectors)
    if mine:
        yield Step(Act.READ, vector=mine[0])
    yield Step(Act.BEGIN)
    yield Step(Act.ARRIVE)
    for vector in mine:
        if vector != mine[0]:
            yield Step(Act.READ, vector=vector)
        for peer in launch.peers:
            yield Step(Act.PUSH_WORDS, peer, vector)
    for vector in mine:
        for peer in sorted(launch.peers):
            yield Step(Act.AWAIT_WORDS, peer, vector)
        yield Step(Act.SUM, vector=vector)


def two_shot_steps(launch: Launch, block: int, thread: int) -> Iterator[Step]:
    """What a thread for data does in two shots: each rank adds up one slice."""
    yield Step(Act.BEGIN)
    yield Step(Act.ARRIVE)
    mine = launch.share(block, thread, launch.slice_size)
    for offset in mine:
        for peer in launch.peers:
            if offset < len(launch.slice_of(peer)):
                yield Step(Act.PUSH, peer, launch.slice_of(peer)[offset])
    yield from _shot(launch, thread, 0)
    for offset in mine:
        if offset < len(launch.slice_of(launch.rank)):
            vector = launch.slice_of(launch.rank)[offset]
            yield Step(Act.READ, vector=vector)
            for peer in sorted(launch.peers):
                yield Step(Act.LOAD, peer, vector)
            yield Step(Act.SUM, vector=vector)
            for peer in launch.peers:
                yield Step(Act.PUSH_SUM, peer, vector)
    yield from _shot(launch, thread, 1)
    if launch.registered:
        return
    for offset in mine:
        for peer in launch.peers:
            if offset < len(launch.slice_of(peer)):
                yield Step(Act.TAKE, peer, launch.slice_of(peer)[offset])


def word_shot_steps(launch: Launch, block: int, thread: int) -> Iterator[Step]:
    """What a thread for data does in two shots in words: what a peer gets of its own slice comes before the sums."""
    yield Step(Act.BEGIN)
    yield Step(Act.ARRIVE)
    size = launch.slice_size
    mine = launch.share(block, thread, size)
    for offset in mine:
        for peer in launch.peers:
            if offset < len(launch.slice_of(peer)):
                yield Step(Act.READ, vector=launch.slice_of(peer)[offset])
                yield Step(Act.PUSH_WORDS, peer, launch.slice_of(peer)[offset], offset)
    for offset in mine:
        if offset < len(launch.slice_of(launch.rank)):
            vector = launch.slice_of(launch.rank)[offset]
            yield Step(Act.READ, vector=vector)
            for peer in sorted(launch.peers):
                yield Step(Act.AWAIT_WORDS, peer, vector, offset)
            yield Step(Act.SUM, vector=vector)
            for peer in launch.peers:
                yield Step(Act.PUSH_SUM_WORDS, peer, vector, size + offset)
    yield Step(Act.BARRIER)
    for offset in mine:
        for peer in launch.peers:
            if offset < len(launch.slice_of(peer)):
                yield Step(Act.AWAIT_WORDS, peer, launch.slice_of(peer)[offset], size + offset)
                yield Step(Act.KEEP, peer, launch.slice_of(peer)[offset])


def steps_of(launch: Launch, block: int, thread: int) -> Iterator[Step]:
    """What a thread for data does."""
    way = word_shot_steps if launch.words else two_shot_steps if launch.two_shots else one_shot_steps
    return way(launch, block, thread)


def _shot(launch: Launch, thread: int, shot: int) -> Iterator[Step]:
    """Release what the block has pushed to the same block of each peer, and acquire what theirs have pushed."""
    yield Step(Act.BARRIER)
    others = launch.peers[thread :: launch.num_threads]
    for peer in others:
        yield Step(Act.RELEASE, peer, shot)
    for peer in others:
        yield Step(Act.ACQUIRE, peer, shot)
    yield Step(Act.BARRIER)


# --- what generations and halves are, and the guards ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generations:
    """What follows from the number of a launch. A test may sever ``flag_generation`` (all launches then have the same
    generation), ``peer_halves`` (all write the same half) or ``peer_words`` (only the first word of a vector is waited
    for)."""

    severed: frozenset[str] = frozenset()

    def generation(self, number: int) -> int:
        """The generation of the ``number``-th launch, which is counted from 1; 0 is what memory holds at first."""
        return min(number, 1) if FLAG_GENERATION.name in self.severed else number

    def half(self, number: int) -> int:
        """The half that the launch writes in its peers' buffers, and reads in its own: 0 or 1."""
        return 0 if PEER_HALVES.name in self.severed else number % 2

    def awaits(self, word: int) -> bool:
        """Whether a word of a vector, counted from 0, is waited for before it is read."""
        return word == 0 or PEER_WORDS.name not in self.severed
