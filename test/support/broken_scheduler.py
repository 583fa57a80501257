"""The real scheduler process with a defect: it loses a page, a step never ends, or a rank decides differently."""

from __future__ import annotations

import threading

from fenceline.config.engine_config import EngineConfig
from fenceline.ipc.io_struct import PortArgs


def run_wrong_books(config: EngineConfig, ports: PortArgs) -> None:
    """Loses a page with the first request."""
    from fenceline.scheduler.process import run_scheduler_process
    from fenceline.scheduler.request_memory import RequestMemory

    release = RequestMemory.release

    def losing(self, req):  # type: ignore[no-untyped-def]
        release(self, req)
        self.pages.alloc(1)

    RequestMemory.release = losing  # type: ignore[method-assign]
    run_scheduler_process(config, ports)


def run_hanging_step(config: EngineConfig, ports: PortArgs) -> None:
    """Never publishes a decode step, and prints a line when the first one should be published."""
    from fenceline.scheduler.process import run_scheduler_process
    from fenceline.scheduler.publishing import Publisher

    def hang(self: Publisher, *_: object) -> None:
        print("the step hangs", flush=True)
        threading.Event().wait()

    Publisher.publish_decode = hang  # type: ignore
    run_scheduler_process(config, ports)


def run_rank_apart(config: EngineConfig, ports: PortArgs, rank: int = 0) -> None:
    """Rank 1 gives its requests different pages than rank 0."""
    from fenceline.scheduler.process import run_scheduler_process
    from fenceline.scheduler.request_memory import RequestMemory

    admit = RequestMemory.admit

    def other_pages(self, req, prefix):  # type: ignore[no-untyped-def]
        first, after = self.pages.alloc(1)
        admitted = admit(self, req, prefix)
        self.pages.retire(first, after=after)
        return admitted

    if rank == 1:
        RequestMemory.admit = other_pages  # type: ignore[method-assign]
    run_scheduler_process(config, ports, rank)
