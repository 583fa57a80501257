"""A scheduler over the proof's tiny model, on any device, and workloads in addition to the proof's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
from scheduler_driver import Driver, request

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.memory_order import Device, open_device
from fenceline.model_executor.model_runner import ModelRunner
from fenceline_proof.script import Scenario, Workload
from fenceline_proof.tiny_model import tiny_model_path
from fenceline_proof.workloads import WORKLOADS


def tiny_driver(device: Device | str = "cpu", num_rows: int = 6, **flags: object) -> Driver:
    """A scheduler over a ModelRunner with the tiny model; ``flags`` are ServerArgs fields."""
    device = open_device(device) if isinstance(device, str) else device
    flags = {"max_total_tokens": 256, "page_size": 4, "random_seed": 1, "chunked_prefill_size": 16} | flags
    flags["max_running_requests"] = num_rows
    config = resolve(ServerArgs(model_path=tiny_model_path(), device=device.kind, **flags))  # type: ignore[arg-type]
    return Driver(config, ModelRunner(config, device, show_progress=False))


def tiny_requests(num_tokens: int = 6) -> list[TokenizedGenerateReq]:
    """Greedy and sampled requests of different lengths, two of them with a common prefix."""
    prompts = [[3, 1, 4, 1, 5], list(range(2, 25)), list(range(2, 20)), [7] * 9, [2, 2]]
    return [
        request(f"r{i}", ids, seed=i, temperature=0.9 * (i % 2), max_new_tokens=num_tokens + i, ignore_eos=True)
        for i, ids in enumerate(prompts)
    ]


def more_workloads(makers: Mapping[str, Callable[[Random], Scenario]]) -> Any:
    """A fixture of a test file: adds its workloads, by name, to the proof's while one of its tests runs."""

    @pytest.fixture(autouse=True)
    def added(monkeypatch: pytest.MonkeyPatch) -> None:
        for name, make in makers.items():
            monkeypatch.setitem(WORKLOADS, name, Workload(name, "", make))

    return added
