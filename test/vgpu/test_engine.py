"""The real scheduler and model runner on the virtual GPU."""

from __future__ import annotations

from functools import lru_cache

import pytest
from tiny_model import answers, tiny_driver, tiny_requests

from fenceline.vgpu import VgpuDevice, VirtualGpu


@lru_cache
def expected() -> list[list[int]]:
    return answers(tiny_driver("cpu"), tiny_requests())


@pytest.mark.parametrize("policy", ["fifo", "eager", "laziest", "random", "pct"])
def test_tokens_equal_those_of_the_cpu(policy: str) -> None:
    for seed in range(4):
        device = VgpuDevice(gpu=VirtualGpu(seed=seed, policy=policy))
        assert answers(tiny_driver(device), tiny_requests()) == expected(), f"{policy} {seed}"
