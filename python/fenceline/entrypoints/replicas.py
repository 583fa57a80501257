"""Several replicas of the engine (--dp-size), each with its own processes, behind one front end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

from fenceline.config.engine_config import EngineConfig
from fenceline.entrypoints.launch import EngineProcesses, ProcessEntry, launch_processes, run_detokenizer, run_scheduler
from fenceline.frontend.replica_link import ReplicaLink


class Replicas:
    """See :class:`EngineBackend`. If one replica ends, all end."""

    def __init__(self, backends: Sequence[EngineProcesses], config: EngineConfig) -> None:
        self._backends = backends
        self.link = ReplicaLink([backend.link for backend in backends], config)

    def watch(self, on_death: Callable[[str], None]) -> None:

        def died(number: int, reason: str) -> None:
            on_death(f"replica {number}: {reason}")

        for number, backend in enumerate(self._backends):
            backend.watch(partial(died, number))

    def dump_flight_recorder(self) -> None:
        """Have each scheduler write its last steps to a file, even while it hangs."""
        for backend in self._backends:
            backend.dump_flight_recorder()

    def tell_nodes(self, reason: str) -> None:
        """Replicas are all on this host."""

    def stop(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for backend in self._backends:
            backend.ending()
        for backend in self._backends:
            backend.stop(max(deadline - time.monotonic(), 0.0))


def launch(
    config: EngineConfig,
    scheduler_entry: ProcessEntry = run_scheduler,
    detokenizer_entry: ProcessEntry = run_detokenizer,
) -> EngineProcesses | Replicas:
    """The processes of all replicas of the engine. Entry functions must be importable."""
    backends: list[EngineProcesses] = []
    try:
        for replica in range(config.server_args.dp_size):
            own = dataclasses.replace(config, replica=replica)
            backends.append(launch_processes(own, scheduler_entry, detokenizer_entry))
    except BaseException:
        for backend in backends:
            backend.stop(0.0)
            backend.link.close()
        raise
    return backends[0] if len(backends) == 1 else Replicas(backends, config)
