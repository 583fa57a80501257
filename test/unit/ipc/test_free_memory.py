"""Freed memory goes back to the system: when that is worth it, and that it does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fenceline.ipc.child_process import Watchdog
from fenceline.ipc.free_memory import FreeMemoryWatch
from fenceline.ipc.io_struct import Message, ShutdownReq
from fenceline.scheduler.process import SocketInbox, TurnInbox
from fenceline.scheduler.ranks import Turn

MIB = 1 << 20

# Freed blocks between others that stay, none so large that the C library maps it on its own.
KEPT_BYTES = """
from pathlib import Path
from fenceline.ipc.free_memory import FreeMemoryWatch, trim_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

trim_memory()
times = iter(range(10))
watch = FreeMemoryWatch(clock=lambda: 10.0 * next(times))
watch.look()
before = resident()
blocks = [bytes([1]) * 100_000 for _ in range(2000)]
del blocks[::2]
watch.look()
print(resident() - before)
"""


class Process:
    """A process whose memory is told, at a time that is told."""

    def __init__(self) -> None:
        self.now, self.unused, self.num_trims, self.kept = 0.0, 100 * MIB, 0, 0
        self.num_looks = 0

    def watch(self) -> FreeMemoryWatch:
        return FreeMemoryWatch(self.unused_bytes, self.trim, lambda: self.now)

    def unused_bytes(self) -> int:
        self.num_looks += 1
        return self.unused

    def trim(self) -> None:
        self.num_trims += 1
        self.unused = self.kept


def test_memory_is_given_back_when_much_more_is_unused() -> None:
    process = Process()
    watch = process.watch()
    trims = []
    process.kept = 110 * MIB
    for process.now, process.unused in enumerate(
        MIB * unused for unused in (100, 120, 131, 90, 121, 123, 141, 143, 110, 143)
    ):
        watch.look()
        trims.append(process.num_trims)
    assert trims == [0, 0, 0, 0, 0, 1, 1, 2, 2, 3], "32 MiB more than the least since the last time"


def test_looking_costs_nothing_for_a_second() -> None:
    process = Process()
    watch = process.watch()
    for step in range(1000):
        process.now = step / 250
        watch.look()
    assert process.num_looks == 4


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone tells")
def test_the_c_library_gives_it_back() -> None:
    run = subprocess.run([sys.executable, "-c", KEPT_BYTES], capture_output=True, text=True, check=True, timeout=120)
    assert int(run.stdout) < 150_000_000, "half of 200 MB had been freed"


class FakeInbox:
    """An inbox in which the messages of each wait are known."""

    def __init__(self, arrives_at_wait: int | None) -> None:
        self.waits: list[int | None] = []
        self._arrives_at_wait = arrives_at_wait

    def wait(self, timeout_ms: int | None = None) -> bool:
        self.waits.append(timeout_ms)
        return len(self.waits) == self._arrives_at_wait

    def drain(self, limit: int | None = None, max_bytes: int | None = None) -> list[Message]:
        return [ShutdownReq()]


@pytest.mark.parametrize(
    ("block", "timeout_ms", "arrives_at_wait", "waits", "num_looks"),
    [
        (False, None, None, [], 1),
        (True, None, 1, [1000], 0),
        (True, None, 2, [1000, None], 1),
        (True, 5000, None, [1000, 4000], 1),
        (True, 40, None, [40], 0),
    ],
)
def test_the_scheduler_looks_between_steps_and_in_quiet_moments(
    block: bool, timeout_ms: int | None, arrives_at_wait: int | None, waits: list[int | None], num_looks: int
) -> None:
    process = Process()
    inbox = FakeInbox(arrives_at_wait)
    ours = SocketInbox(inbox, Watchdog(0, print), process.watch())  # type: ignore[arg-type]
    assert ours.drain(block, timeout_ms) == [ShutdownReq()]
    assert inbox.waits == waits
    assert process.num_looks == num_looks


class FakeTurns:
    """An inbox whose turn comes at once, or after a quiet second that is told."""

    def __init__(self, process: Process, quiet: bool) -> None:
        self._process, self._quiet = process, quiet

    def wait(self, timeout_ms: int) -> bool:
        self._process.now += timeout_ms / 1000 if self._quiet else 0.0
        return not self._quiet

    def receive(self) -> list[Turn]:
        return [Turn(7, [], False)]


@pytest.mark.parametrize(("quiet", "num_looks"), [(False, 1), (True, 2)])
def test_other_ranks_look_at_the_same_moments(quiet: bool, num_looks: int) -> None:
    process = Process()
    turns = TurnInbox(FakeTurns(process, quiet), Watchdog(0, print), process.watch())  # type: ignore[arg-type]
    assert turns.receive().number == 7
    assert process.num_looks == num_looks
