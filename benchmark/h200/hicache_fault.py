"""Runs the real server with planted faults.

    python benchmark/h200/hicache_fault.py --faults none,zero --fault-log FILE [launch_server flags]

The faults alternate over the loads from the host: ``none``, ``zero`` (one of the load's host pages is zeroed before it
is copied) and ``stale`` (one page of the device gets the bytes of another page, as with a stale index). Each load
writes a line to the log. With this the soak's check shows that it can detect one wrong page.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import parse_args
from fenceline.entrypoints.supervisor import serve_until_stopped
from fenceline.ipc.io_struct import PortArgs

KINDS = ("none", "zero", "stale")


def run_planted_scheduler(faults: Sequence[str], log: Path, config: EngineConfig, ports: PortArgs) -> None:
    """The entry of the scheduler process."""
    import numpy as np
    import numpy.typing as npt

    from fenceline.mem_cache.host.cache_controller import HiCacheController
    from fenceline.mem_cache.transfer import Ticket
    from fenceline.memory_order import Points
    from fenceline.scheduler.process import run_scheduler_process

    load = HiCacheController.load
    num_loads = 0

    def planted(
        self: HiCacheController,
        ticket: Ticket,
        device_pages: npt.NDArray[np.int32],
        host_pages: npt.NDArray[np.int32],
        after: Points,
    ) -> object:
        nonlocal num_loads
        kind, num_pages = faults[num_loads % len(faults)], len(host_pages)
        position = (num_loads * 7) % max(num_pages - 1, 1)
        num_loads += 1
        if kind == "zero":
            for piece in self.host_pool.page(int(host_pages[position])):
                piece[:] = 0
        elif kind == "stale" and num_pages > 1:
            host_pages = host_pages.copy()
            host_pages[position] = host_pages[position + 1]
        with log.open("a") as file:
            file.write(json.dumps({"kind": kind, "position": position, "num_pages": num_pages}) + "\n")
        return load(self, ticket, device_pages, host_pages, after)

    HiCacheController.load = planted  # type: ignore[method-assign, assignment]
    run_scheduler_process(config, ports)


def main(argv: Sequence[str]) -> int:
    """The command line: two options defined here, all others are launch_server's."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--faults", required=True, help=f"comma-separated, of {', '.join(KINDS)}")
    parser.add_argument("--fault-log", type=Path, required=True)
    args, flags = parser.parse_known_args(argv)
    faults = args.faults.split(",")
    if not set(faults) <= set(KINDS):
        parser.error(f"--faults {args.faults}: choose of {', '.join(KINDS)}")
    import hicache_fault  # the server's processes import this file by its name, not as the program that it is here

    entry = functools.partial(hicache_fault.run_planted_scheduler, faults, args.fault_log)
    return serve_until_stopped(resolve(parse_args(flags)), entry)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
