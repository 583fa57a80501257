"""The server with random delays, or without one of its edges or guards.

    python benchmark/h200/disturbed.py --jitter 7 --sever staging_reuse [launch_server flags]

A GPU on which everything takes its usual time shows few of the orders that it may choose. --jitter delays host and
streams at random where they record and wait, so others occur; the seed makes the host's delays repeatable, not what
comes of them. With --sever a wait or a guard is left out: for showing that a test would notice.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections.abc import Callable, Sequence

from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import parse_args
from fenceline.entrypoints.supervisor import serve_until_stopped
from fenceline.ipc.io_struct import PortArgs

_HOST_S = 3e-4  # the longest delays
_STREAM_CYCLES = 500_000


def run_disturbed_scheduler(
    jitter: int | None, severed: frozenset[str], config: EngineConfig, ports: PortArgs, rank: int = 0
) -> None:
    """The entry of the scheduler's process."""
    from fenceline import memory_order
    from fenceline.memory_order.stream import Stream
    from fenceline.scheduler import process

    if severed:
        process.open_device = functools.partial(memory_order.open_device, severed=severed)  # type: ignore[attr-defined]
    if jitter is not None:
        rng = random.Random(jitter + rank)
        for name in ("record", "wait"):
            setattr(Stream, name, _delayed(getattr(Stream, name), rng))
    process.run_scheduler_process(config, ports, rank)


def _delayed(method: Callable[..., object], rng: random.Random) -> Callable[..., object]:
    """A method of ``Stream`` before which the host or the stream is sometimes delayed."""
    import torch

    from fenceline.memory_order.stream import Stream

    def call(self: Stream, *args: object) -> object:
        chance = rng.random()
        if chance < 1 / 16:
            time.sleep(rng.random() * _HOST_S)
        elif chance < 1 / 8 and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
            with self.active():
                torch.cuda._sleep(rng.randrange(_STREAM_CYCLES))
        return method(self, *args)

    return call


def main(argv: Sequence[str]) -> int:
    """The command line: two options defined here, all others are launch_server's."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--jitter", type=int, metavar="SEED")
    parser.add_argument("--sever", action="append", default=[], metavar="NAME", help="an edge or a guard")
    own, flags = parser.parse_known_args(argv)
    import disturbed  # the server's processes import this file by its name, not as the program that it is here

    entry = functools.partial(disturbed.run_disturbed_scheduler, own.jitter, frozenset(own.sever))
    return serve_until_stopped(resolve(parse_args(flags)), entry)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
