"""kill -9 of a rank at any moment ends the server with the reason, within the watchdog's time, and leaves nothing, on a
CPU and on GPUs."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from random import Random

import psutil
import pytest
import torch
from live_server import WAIT_S, LiveServer, wait_for

RANKS = ("--model-path", "demo", "--tp-size", "2", "--page-size", "16")
TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "2", "--max-total-tokens", "512")
WATCHDOG_S = 20.0
_START_S = {"cpu": 5.0, "cuda": 12.0}  # the moments are spread over as much of the start
_LOAD_S = 4.0  # and of the load
_LEFT_BYTES = 64 << 20  # by which a GPU's free memory may differ afterwards


def processes(server: LiveServer) -> list[psutil.Process]:
    """Those that have been started so far: rank 0, rank 1, detokenizer."""
    found = []
    for child in server.children():
        try:
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.append((child.create_time(), child))
        except psutil.NoSuchProcess:
            pass
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", range(metafunc.config.getoption("--kills")))


@pytest.mark.long
def test_a_killed_rank_ends_the_server_in_time_with_the_reason(seed: int) -> None:
    check_kill(seed, "cpu")


@pytest.mark.long
@pytest.mark.multi_gpu
def test_a_killed_rank_on_a_gpu_leaves_no_memory(seed: int) -> None:
    free = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    check_kill(seed, "cuda")
    for i in range(2):
        wait_for(lambda i=i: torch.cuda.mem_get_info(i)[0] > free[i] - _LEFT_BYTES)


def check_kill(seed: int, device: str) -> None:
    """Every third moment is in the start, the others are under load; two of four servers have a host tier. Two seeds
    kill one rank in the start and the other under load, twelve do both to each with and without a host tier."""
    random = Random(seed)
    which, has_tiers, in_the_start = seed % 2, seed // 2 % 2, seed % 3 == 0
    flags = (*RANKS, "--device", device, *(TIERS if has_tiers else ()), "--watchdog-timeout", str(WATCHDOG_S))
    with (
        tempfile.TemporaryDirectory(prefix="fl", dir="/tmp") as folder,
        LiveServer.real(*flags, env={"TMPDIR": folder}, cold=in_the_start) as server,
    ):
        if in_the_start:
            wait_for(lambda: len(processes(server)) == 3)
            children = processes(server)
            time.sleep(random.uniform(0, _START_S[device]))  # the moment; nothing is waited for
        else:
            server.wait_ready()
            children = processes(server)
            lengths = [random.randrange(2, 300) for _ in range(8)]
            for number, length in enumerate(lengths):
                params = {"max_new_tokens": random.randrange(1, 200), "ignore_eos": True, "sampling_seed": number}
                server.post_in_thread(
                    {"input_ids": [5 + (number + i) % 900 for i in range(length)], "sampling_params": params}
                )
            time.sleep(random.uniform(0, _LOAD_S))
        begin = time.monotonic()
        children[which].kill()
        assert server.wait_exit() == 1, server.output
        took_s = time.monotonic() - begin
        assert took_s < WATCHDOG_S, f"it took {took_s:.1f} s"
        name = ("scheduler", "scheduler-1")[which]
        assert f"the {name} process ended unexpectedly (killed by SIGKILL" in server.last_lines(), server.output
        _, alive = psutil.wait_procs(children, timeout=WAIT_S)
        assert alive == []
        wait_for(lambda: not [path for path in Path(folder).glob("fenceline-*") if "flight" not in path.name])
