"""The compiled all-reduce on one GPU: ranks are streams of one process, or processes that open each other's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "test" / "support" / "one_gpu_all_reduce.py"

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def run(case: str, size: int, *flags: str) -> dict[str, object]:
    """The case in a process of its own: a launch that hung would take the GPU from all later tests."""
    paths = [str(ROOT / "python"), str(ROOT / "sgl-kernel" / "python"), os.environ.get("PYTHONPATH", "")]
    # A queue for each stream, and no kernel that is loaded while another one waits for it.
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(PROGRAM), case, str(size), *flags]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_all_ways_give_the_sum_in_the_order_of_ranks(size: int) -> None:
    assert len(run("ways", size)) == 7


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_type_and_sizes_around_every_boundary(size: int) -> None:
    assert run("types", size) == {"sums": 39 * size}


@pytest.mark.parametrize("flags", [(), ("pdl",)], ids=["plain", "pdl"])
@pytest.mark.parametrize("case, size", [("mixed", 2), ("mixed", 4), ("wraps", 2)])
def test_kinds_and_sizes_in_turn_in_one_graph(case: str, size: int, flags: tuple[str, ...]) -> None:
    """``wraps``: the generation passes 2^32. ``pdl``: launches that may start while the preceding kernel ends."""
    assert run(case, size, *flags) == {"replays": 120}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_of_every_length_are_added_up_and_normalised(size: int) -> None:
    num_cases = {2: 40, 3: 32, 4: 56}[size]  # not all lengths can be divided, nor do 70 long rows fit one shot
    assert run("rows", size) == {"rows": num_cases * size}


def test_a_rank_whose_peers_never_come_gives_up_in_time() -> None:
    assert run("alone", 2) == {"ended": 2}
