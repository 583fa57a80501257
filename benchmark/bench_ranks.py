"""What several ranks cost the scheduler of rank 0, and how late its turns reach the others.

    python benchmark/bench_ranks.py [--ranks 2] [--running 1,64] [--steps 2000] [--step-ms 2]

Each rank is a process with the scheduler of a server in the midst of decoding, linked as in a server: by sockets for
the turns and by shared memory for progress and decisions, which are compared. Workers compute nothing.

``added``: CPU time that a step takes more on rank 0 than without other ranks: that of the scheduler's thread, and that
of all threads of the process, of which some send. The two schedulers run in turns, and the fastest tenth of their
blocks of steps are compared, because other load can only add time. ``late``: from the moment when rank 0 begins to
send a turn to the moment when the last of the other ranks has read it; here a step begins every --step-ms
milliseconds, so the others wait for it, as for a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from bench_scheduler import Bench, NullBox, NullWorker
from fenceline.ipc.channel import PullSocket, PushSocket
from fenceline.ipc.io_struct import PortArgs
from fenceline.ipc.rank_board import RankBoard, create_rank_board, rank_endpoint
from fenceline.ipc.sockets import make_ports, remove_ports
from fenceline.scheduler.ranks import TURN_DECODER, FollowingRank, LeadingRank, Turn

_BLOCK = 16  # steps of one scheduler before the other runs
_WARM = 64  # steps that are not counted
_PAGE_SIZE = 16


class _Over(Exception):
    """Rank 0 has ended."""


def follow(ports: PortArgs, rank: int, num_ranks: int, running: int, steps: int, results: Connection) -> None:
    """The process of a rank other than 0. Sends the times at which it had read each turn, in nanoseconds."""
    socket = PullSocket(rank_endpoint(ports, rank))
    times: list[int] = []

    def receive() -> Turn:
        data = socket.receive()
        if not data:
            raise _Over
        turn = TURN_DECODER.decode(data)
        times.append(time.monotonic_ns())
        return turn

    board = RankBoard(ports, rank, num_ranks)
    results.send("listens")
    try:
        bench = Bench(
            running, steps, _PAGE_SIZE, make_link=lambda worker, box: FollowingRank(board, worker, receive)
        )
        while True:
            bench.run(1)
    except _Over:
        results.send(times)
    socket.close()


class Leader:
    """Rank 0 with the others' processes."""

    def __init__(self, num_ranks: int, running: int, steps: int) -> None:
        self._ports = make_ports()
        create_rank_board(self._ports, num_ranks)
        spawn = multiprocessing.get_context("spawn")
        self._results: list[Connection] = []
        self._processes = []
        for rank in range(1, num_ranks):
            ours, theirs = spawn.Pipe()
            arguments = (self._ports, rank, num_ranks, running, steps, theirs)
            self._processes.append(spawn.Process(target=follow, args=arguments, daemon=True))
            self._processes[-1].start()
            self._results.append(ours)
        for results in self._results:
            assert results.recv() == "listens"
        endpoints = [rank_endpoint(self._ports, rank) for rank in range(1, num_ranks)]
        self._sockets = [PushSocket(endpoint) for endpoint in endpoints]
        board = RankBoard(self._ports, 0, num_ranks)
        send: list[Callable[[bytes], None]] = [socket.send for socket in self._sockets]
        self.sent: list[int] = []  # when each turn began to be sent, in nanoseconds
        send[0] = self._send_first(send[0])

        def link(worker: NullWorker, box: NullBox) -> LeadingRank:
            return LeadingRank(board, worker, box.drain, send)

        self.bench = Bench(running, steps, _PAGE_SIZE, make_link=link)

    def _send_first(self, send: Callable[[bytes], None]) -> Callable[[bytes], None]:
        def timed(data: bytes) -> None:
            self.sent.append(time.monotonic_ns())
            send(data)

        return timed

    def end(self) -> list[list[int]]:
        """End all. Returns the others' times."""
        for socket in self._sockets:
            socket.send(b"")
        times = [results.recv() for results in self._results]
        for process in self._processes:
            process.join()
        for socket in self._sockets:
            socket.close()
        remove_ports(self._ports)
        return times


def added_us(num_ranks: int, running: int, steps: int) -> tuple[float, float, float]:
    """CPU microseconds of a step without other ranks, of the scheduler's thread; and what other ranks add to it, and to
    that of all threads."""
    alone = Bench(running, steps + _WARM, _PAGE_SIZE)
    leader = Leader(num_ranks, running, steps + _WARM)
    for bench in (alone, leader.bench):
        # As on a GPU, a step is published while the next one runs. Without this only the scheduler without other ranks
        # would find its results at once.
        bench.scheduler.may_publish_early = lambda flight: False  # type: ignore[method-assign]
        bench.run(_WARM // 2)
    times: dict[Bench, list[tuple[float, float]]] = {alone: [], leader.bench: []}
    for index in range(steps // _BLOCK * 2):
        bench = (alone, leader.bench)[(index + 1) // 2 % 2]
        begin = time.thread_time_ns()
        process_us = bench.run(_BLOCK)
        times[bench].append(((time.thread_time_ns() - begin) / _BLOCK / 1e3, process_us))
    leader.end()
    plain, linked = (
        [statistics.quantiles(kind, n=10)[0] for kind in zip(*found, strict=True)] for found in times.values()
    )
    return plain[0], linked[0] - plain[0], linked[1] - plain[1]


def late_us(num_ranks: int, running: int, steps: int, step_s: float) -> list[float]:
    """Microseconds from the sending of each turn to its last reader."""
    leader = Leader(num_ranks, running, steps + _WARM)
    begin = time.monotonic()
    first = len(leader.sent)
    for index in range(steps):
        leader.bench.run(1)
        time.sleep(max(begin + (index + 1) * step_s - time.monotonic(), 0))
    last = len(leader.sent)
    read = np.array(leader.end())[:, first:last].max(0)
    late: list[float] = ((read - np.array(leader.sent[first:last])) / 1e3).tolist()
    return late


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--running", default="1,64", help="numbers of running requests")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, default=2.0)
    args = parser.parse_args()
    print("| ranks | running | alone, us a step | added | all threads | late us: p50 | p99 | most |")
    print("|---|---|---|---|---|---|---|---|")
    for running in map(int, args.running.split(",")):
        alone, added, added_by_all = added_us(args.ranks, running, args.steps)
        late = sorted(late_us(args.ranks, running, args.steps, args.step_ms / 1e3))
        p50, p99 = late[len(late) // 2], late[len(late) * 99 // 100]
        print(
            f"| {args.ranks} | {running} | {alone:.1f} | {added:.1f} | {added_by_all:.1f}"
            f" | {p50:.0f} | {p99:.0f} | {late[-1]:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
