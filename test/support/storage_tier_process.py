"""Storage tiers in separate processes: one is killed while it writes, the disk of another hangs. Run as a script:
``MODE ROOT SEED``."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from random import Random

os.environ.setdefault("OMP_NUM_THREADS", "1")
from storage_faults import FaultyBackend
from storage_tier import KEYS, Gate, file_backend, make_tier

from fenceline.mem_cache.storage.controller import StorageLimits

NUM_KEYS = 64


def write_until_killed(root: Path, seed: int) -> None:
    """Write prefixes of eight pages, forever; prints a line for each that is written."""
    random = Random(seed)
    tier = make_tier(file_backend(root, 1 << 16))
    while True:
        first = random.randrange(0, NUM_KEYS, 8)
        tier.store(KEYS[first : first + 8])
        print("written", first, flush=True)


def hang(root: Path, seed: int) -> None:
    """Let a storage worker wait for its disk forever."""
    gate = Gate()

    def pause() -> None:
        gate()
        threading.Event().wait()

    gate.open()
    tier = make_tier(FaultyBackend(file_backend(root), pause=pause), limits=StorageLimits(close_s=0.1))
    tier.write(KEYS[:1])
    gate.wait_for_somebody()
    print("hangs", flush=True)
    tier.controller.close()
    print("closed", flush=True)


if __name__ == "__main__":
    {"write": write_until_killed, "hang": hang}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
