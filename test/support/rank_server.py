"""A server of two ranks on GPUs, whose answers are compared with those of one rank."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
from live_server import LiveServer, scheduler_state

from fenceline.demo.evaluation import held_out_items

FLAGS = (
    *("--model-path", "demo", "--device", "cuda", "--dtype", "float32", "--max-total-tokens", "16384"),
    *("--cuda-graph-bs", "1", "4", "16", "--piecewise-cuda-graph-tokens", "64", "256"),
    *("--max-running-requests", "16", "--chunked-prefill-size", "256", "--watchdog-timeout", "40"),
)


def answers_of(server: LiveServer) -> list[str]:
    """The answers to 16 problems that are asked at the same time."""
    asked = [
        server.post_in_thread(
            {"text": item.prompt(), "sampling_params": {"temperature": 0.0, "max_new_tokens": 16}}
        )
        for item in held_out_items(0, 16)
    ]
    return [answer.result(60).json()["text"] for answer in asked]


def check_two_ranks_answer_as_one(env: Mapping[str, str] | None = None) -> None:
    """With graphs of both kinds, and again with cached prefixes. No process is left. ``env``: of the two ranks."""
    with LiveServer.real(*FLAGS) as server:
        wanted = answers_of(server.wait_ready())
    with LiveServer.real(*FLAGS, "--tp-size", "2", env=dict(env or {})) as server:
        children = server.wait_ready().engine_processes(num_ranks=2)
        assert answers_of(server) == wanted
        assert answers_of(server) == wanted
        with server.client() as client:
            state = scheduler_state(client)
        for kind in ("cuda_graphs", "piecewise_cuda_graphs"):
            stats = state[kind]
            assert stats["replays"] > 0 and not stats["fallbacks"] and not stats["repairs"], stats
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
