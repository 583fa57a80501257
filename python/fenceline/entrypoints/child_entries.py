"""What the engine's processes begin with. It lies apart because a new process imports the module of its entry: the
front end's would cost each of them a tenth of a second."""

from __future__ import annotations

import os

from fenceline.config import importing
from fenceline.config.engine_config import EngineConfig
from fenceline.ipc.io_struct import PortArgs


def run_scheduler(config: EngineConfig, ports: PortArgs, rank: int = 0) -> None:
    """The entry of a scheduler's process. Its imports (torch, the model) happen in the child only."""
    if config.device == "cpu":
        # Between two operations torch's threads would spin for milliseconds on cores that the front end's processes
        # need. OpenMP reads the variable when torch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with importing():
        from fenceline.scheduler.process import run_scheduler_process

    run_scheduler_process(config, ports, rank)


def run_detokenizer(config: EngineConfig, ports: PortArgs) -> None:
    with importing():
        from fenceline.frontend.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(config, ports)
