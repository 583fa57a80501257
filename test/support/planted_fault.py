"""Runs the real server with a planted fault: python test/support/planted_fault.py [launch_server flags].

After some decode steps one request's page table names a page that does not exist, like a stale index. The attention
kernel of the next step, in a graph or not, then reads unmapped memory. It is used to test the steps in
docs/use/debugging.md.
"""

from __future__ import annotations

import sys

from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import parse_args
from fenceline.entrypoints.supervisor import serve_until_stopped
from fenceline.ipc.io_struct import PortArgs

NUM_GOOD_STEPS = 20
NO_SUCH_PAGE = (1 << 31) - 1


def run_planted_scheduler(config: EngineConfig, ports: PortArgs) -> None:
    """The scheduler process' entry."""
    import torch

    from fenceline.model_executor.model_runner import ModelRunner
    from fenceline.model_executor.step import ForwardResult, StepBatch
    from fenceline.scheduler.process import run_scheduler_process

    launch = ModelRunner.launch
    num_steps = 0

    @torch.inference_mode()
    def planted(self: ModelRunner, batch: StepBatch) -> ForwardResult:
        nonlocal num_steps
        num_steps += batch.is_decode
        if batch.is_decode and num_steps == NUM_GOOD_STEPS:
            with self.device.forward.active():
                self.req_pool.page_table[int(batch.rows[0]), :2] = NO_SUCH_PAGE
        return launch(self, batch)

    ModelRunner.launch = planted  # type: ignore[method-assign]
    run_scheduler_process(config, ports)


if __name__ == "__main__":
    import planted_fault  # the server's processes import this file by its name, not as the program that it is here

    sys.exit(serve_until_stopped(resolve(parse_args(sys.argv[1:])), planted_fault.run_planted_scheduler))
