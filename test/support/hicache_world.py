"""A model of the tree's environment: streams that run when the test decides, memories that hold prefixes, a naive tree.

A page holds the prefix of which it is the last page. Every operation checks what it reads when it runs, so a page that
is leased too early, a missing wait of a transfer or a wrong page number leads to a wrong prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.lease import LeasePool
from fenceline.memory_order.stream import Point, Points, Stream

# A prefix: its namespace and its pages, each page named by one symbol.
Prefix = tuple[str, tuple[int, ...]]
Contents = list[tuple[int, Prefix]]  # (page, the prefix that it holds or is to hold)


class WorldStream(Stream):
    """A stream that runs its operations one by one, when the test says so and their Points have been reached."""

    def __init__(self, name: StreamName) -> None:
        super().__init__(name, frozenset())
        self.ops: deque[tuple[Points, Callable[[], None], int]] = deque()
        self.ran = 0  # the serial that has been reached; the host may only know an earlier one

    def submit(self, after: Points, action: Callable[[], None]) -> Point:
        point = self.record()
        self.ops.append((after, action, point.serial))
        return point

    def run_one(self) -> bool:
        if not self.ops or not reached(self.ops[0][0], self):
            return False
        _, action, serial = self.ops.popleft()
        action()
        self.ran = serial
        return True

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def is_current(self) -> bool:
        raise AssertionError("no tensor moves here")

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        raise AssertionError("no tensor moves here")

    def _record_event(self) -> object:
        return None

    def _wait_event(self, point: Point) -> None:
        raise AssertionError("waits are arguments here")

    def _block(self, point: Point) -> None:
        raise AssertionError("nobody blocks here")


def reached(after: Points, stream: Stream | None = None) -> bool:
    """Whether work of ``stream`` that waits for ``after`` may run."""
    return all(p.stream is stream or p.stream.ran >= p.serial for p in after)  # type: ignore[attr-defined]


class SpyPool(LeasePool):
    """A page pool that records which ids were retired, in order, and after which Points."""

    def __init__(self, name: str, size: int, reserved: int = 1) -> None:
        super().__init__(name, size, reserved)
        self.log: list[tuple[list[int], Points]] = []

    def retire(self, ids: np.ndarray, after: Points) -> None:
        super().retire(ids, after)
        self.log.append((ids.tolist(), after))

    def take_log(self) -> list[list[int]]:
        """The ids since the last call, without empty retirements."""
        log, self.log = self.log, []
        return [ids for ids, _ in log if ids]


class World:
    """Two memories and the streams that access them."""

    def __init__(self) -> None:
        self.forward = WorldStream(StreamName.FORWARD)
        self.load = WorldStream(StreamName.LOAD)
        self.store = WorldStream(StreamName.STORE)
        self.streams = (self.forward, self.load, self.store)
        self.device: dict[int, Prefix] = {}
        self.host: dict[int, Prefix] = {}

    def step(self, reads: Contents, writes: Contents, after: Points) -> Point:
        """A forward: reads some pages, writes others."""

        def run() -> None:
            check(self.device, reads, "forward reads")
            self.device.update(writes)

        return self.forward.submit(after, run)

    def copy(self, to_device: bool, pages: list[tuple[int, int, Prefix]], after: Points) -> Point:
        """A transfer of ``pages``: (device page, host page, the prefix that they hold)."""

        def run() -> None:
            for device, host, prefix in pages:
                if to_device:
                    check(self.host, [(host, prefix)], "load reads")
                    self.device[device] = prefix
                else:
                    check(self.device, [(device, prefix)], "store reads")
                    self.host[host] = prefix

        return (self.load if to_device else self.store).submit(after, run)

    def run_until(self, after: Points) -> None:
        """Run operations until ``after`` has passed, like a host thread that waits. Other operations may run too."""
        while not reached(after):
            assert any(stream.run_one() for stream in self.streams), f"nothing can run before {after}"


def check(memory: dict[int, Prefix], contents: Iterable[tuple[int, Prefix]], what: str) -> None:
    for page, prefix in contents:
        assert memory.get(page) == prefix, f"{what} {memory.get(page)} on page {page} instead of {prefix}"


@dataclass(eq=False)
class Entry:
    """One cached page."""

    device: int | None
    host: int | None
    tick: int
    hits: int
    locks: int = 0
    num_moves: int = 0
    holds: set[int] = field(default_factory=set)


class TwoTierModel:
    """All cached pages by the prefix that they end, and the prefixes at which a node of the tree ends."""

    def __init__(self) -> None:
        self.pages: dict[Prefix, Entry] = {}
        self.ends: set[Prefix] = set()
        self.clock = 0

    def walk(self, prefix: Prefix) -> list[Entry]:
        self.clock += 1
        found: list[Entry] = []
        for part in parts(prefix):
            if part not in self.pages:
                break
            found.append(self.pages[part])
            found[-1].tick = self.clock
            found[-1].hits += 1
        if found:
            self.ends.add((prefix[0], prefix[1][: len(found)]))
        return found

    def insert(self, prefix: Prefix, pages: list[int]) -> int:
        """Returns how many leading pages were on the device already."""
        found = self.walk(prefix)
        num_on_device = sum(entry.device is not None for entry in found)
        for entry, page in list(zip(found, pages, strict=False))[num_on_device:]:
            entry.device, entry.num_moves = page, entry.num_moves + 1
        for part, page in list(zip(parts(prefix), pages, strict=True))[len(found) :]:
            self.pages[part] = Entry(page, None, self.clock, hits=1)
        if prefix[1]:
            self.ends.add(prefix)
        return num_on_device

    def insert_host(self, prefix: Prefix, pages: list[int]) -> list[int]:
        """Returns the pages not taken."""
        first = len(prefix[1]) - len(pages)
        num_known = len(self.walk(prefix)) - first
        if num_known < 0:
            return pages
        for part, page in zip(parts(prefix)[first + num_known :], pages[num_known:], strict=True):
            self.pages[part] = Entry(None, page, self.clock, hits=0)
            self.ends.add(prefix)
        return pages[:num_known]

    def lock(self, prefix: Prefix, step: int) -> None:
        for part in parts(prefix):
            self.pages[part].locks += step

    def node(self, end: Prefix) -> list[Prefix]:
        """The pages of one node: from its end back to the node above."""
        own = [end]
        for part in reversed(parts(end)[:-1]):
            if part in self.ends:
                break
            own.append(part)
        return own[::-1]

    def entries(self, end: Prefix) -> list[Entry]:
        return [self.pages[part] for part in self.node(end)]

    def children(self, end: Prefix) -> list[Entry]:
        space, symbols = end
        return [e for (s, t), e in self.pages.items() if s == space and t[:-1] == symbols]

    def oldest_on_device(self, gone: list[Prefix]) -> Prefix | None:
        """The node whose device pages are evicted next if those of ``gone`` have been evicted."""
        ends = [
            end
            for end in self.ends
            if self.pages[end].device is not None
            and self.pages[end].locks == 0
            and end not in gone
            and not any(self.is_below(other, end) and other not in gone for other in self.ends)
        ]
        return min(ends, key=lambda end: self.pages[end].tick, default=None)

    def is_below(self, one: Prefix, other: Prefix) -> bool:
        """Whether ``one`` is on the device and below ``other``."""
        on_device = self.pages[one].device is not None
        return on_device and one != other and one[0] == other[0] and one[1][: len(other[1])] == other[1]

    def host_candidates(self, protected: set[Prefix]) -> list[Prefix]:
        """The nodes whose host pages may be evicted."""
        found = []
        for end in self.ends - protected:
            entry, below = self.pages[end], self.children(end)
            free = entry.host is not None and entry.locks == 0 and not entry.holds
            if free and all(e.host is None for e in below) and (entry.device is not None or not below):
                found.append(end)
        return found

    def leave_host(self, pages: list[int], protected: set[Prefix]) -> None:
        """The tree has retired host ``pages``. Check that their node was the next one to be evicted."""
        ends = self.host_candidates(protected)
        end = next((e for e in ends if [entry.host for entry in self.entries(e)] == pages), None)
        assert end is not None, f"host pages {pages} were not to go"
        assert self.pages[end].tick == min(self.pages[e].tick for e in ends), f"{end} was not the oldest"
        for entry in self.entries(end):
            entry.host = None
        if self.pages[end].device is None:
            self.drop(end)

    def drop(self, end: Prefix) -> list[Entry]:
        """Remove the node that ends at ``end`` with all nodes below it; returns the entries below."""
        for part in self.node(end):
            del self.pages[part]
        below = [p for p in self.pages if p[0] == end[0] and p[1][: len(end[1])] == end[1]]
        self.ends -= {end, *below}
        return [self.pages.pop(part) for part in below]


def parts(prefix: Prefix) -> list[Prefix]:
    space, symbols = prefix
    return [(space, symbols[:n]) for n in range(1, len(symbols) + 1)]
