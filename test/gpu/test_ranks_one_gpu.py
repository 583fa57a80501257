"""Ranks on one GPU, a process each (FENCELINE_RANKS_SHARE_GPU), which open each other's memory as on several: sums in
graphs, ranks that are lost, and a server of two ranks. Slow, because the processes take turns on the GPU."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from live_server import LiveServer, scheduler_state
from rank_processes import Ended

from fenceline.demo.evaluation import held_out_items
from fenceline.distributed.shared_gpu import VARIABLE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

FLAGS = (
    *("--model-path", "demo", "--device", "cuda", "--dtype", "float32", "--max-total-tokens", "16384"),
    *("--cuda-graph-bs", "1", "4", "16", "--piecewise-cuda-graph-tokens", "64", "256"),
    *("--max-running-requests", "16", "--chunked-prefill-size", "256", "--watchdog-timeout", "40"),
)


@pytest.mark.parametrize("case", ["graphs", "gives_up"])
def test_it_works_and_leaves_no_memory_open(case: str, tmp_path: Path) -> None:
    """How much of the GPU is free tells nothing, since other programs may use it."""
    ended = Ended(case, 2, tmp_path, limit_s=60, shared=True)
    assert ended.well, (ended.statuses, ended.text)
    assert ended.found[0] == ended.found[1]
    assert ended.found[0] is not None and ended.found[0]["open"] == 0


def answers_of(server: LiveServer) -> list[str]:
    items = held_out_items(0, 16)
    asked = [
        server.post_in_thread(
            {"text": item.prompt(), "sampling_params": {"temperature": 0.0, "max_new_tokens": 16}}
        )
        for item in items
    ]
    return [answer.result(60).json()["text"] for answer in asked]


def test_a_server_of_two_ranks_answers_as_one_does_with_graphs_of_both_kinds() -> None:
    with LiveServer.real(*FLAGS) as server:
        wanted = answers_of(server.wait_ready())
    with LiveServer.real(*FLAGS, "--tp-size", "2", env={VARIABLE: "1"}) as server:
        children = server.wait_ready().engine_processes(num_ranks=2)
        assert answers_of(server) == wanted
        assert answers_of(server) == wanted  # with cached prefixes
        with server.client() as client:
            state = scheduler_state(client)
        for kind in ("cuda_graphs", "piecewise_cuda_graphs"):
            stats = state[kind]
            assert stats["replays"] > 0 and not stats["fallbacks"] and not stats["repairs"], stats
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
