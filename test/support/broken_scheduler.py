"""The real scheduler process with a defect: it loses a page, a table names a wrong one, a step never ends, or a rank
decides differently."""

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


def run_wrong_page(config: EngineConfig, ports: PortArgs) -> None:
    """The fourth decode step finds its request's first page in the place of the second."""
    from fenceline.model_executor.model_runner import ModelRunner
    from fenceline.model_executor.step import ForwardResult, HeldStep, StepBatch
    from fenceline.scheduler.process import run_scheduler_process

    launch = ModelRunner.launch
    num_steps = 0

    def launched(self: ModelRunner, batch: StepBatch) -> ForwardResult | HeldStep:
        nonlocal num_steps
        num_steps += batch.is_decode
        if batch.is_decode and num_steps == 4:
            table = self.req_pool.page_table[int(batch.rows[0])]
            table[1] = table[0]
        return launch(self, batch)

    ModelRunner.launch = launched  # type: ignore[method-assign]
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
