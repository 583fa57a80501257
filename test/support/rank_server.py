"""Servers of several ranks, replicas or nodes on GPUs, whose answers are compared with those of one rank."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from random import Random

import psutil
from live_server import LiveServer

from fenceline_demo.evaluation import held_out_items

FLAGS = (
    *("--device", "cuda", "--dtype", "float32", "--max-total-tokens", "16384"),
    *("--cuda-graph-bs", "1", "4", "16", "--piecewise-cuda-graph-tokens", "64", "1024"),
    *("--max-running-requests", "16", "--chunked-prefill-size", "2048", "--watchdog-timeout", "40"),
)
# Prompts of these lengths are a prefill step each: around the sizes of its graphs, and beyond them (F11).
LENGTHS = (63, 64, 65, 1023, 1024, 1025, 1100)
_LONGEST = {"demo": 4000, "demo-moe": 1000}
_WAIT_S = 60


def answers_of(server: LiveServer, longest: int) -> list[object]:
    """The answers to 16 problems that are asked at the same time, and then to prompts of ``LENGTHS`` one by one; of at
    most ``longest`` characters and tokens."""
    problems = [text for text in (item.prompt() for item in held_out_items(0, 40)) if len(text) <= longest]
    greedy = {"temperature": 0.0, "max_new_tokens": 16}
    asked = [server.post_in_thread({"text": text, "sampling_params": greedy}) for text in problems[:16]]
    answers: list[object] = [answer.result(_WAIT_S).json()["text"] for answer in asked]
    params = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
    for length in filter(longest.__ge__, LENGTHS):
        random = Random(length)
        ids = [random.randrange(5, 900) for _ in range(length)]
        answer = server.post_in_thread({"input_ids": ids, "sampling_params": params})
        answers.append(answer.result(_WAIT_S).json()["output_ids"])
    return answers


def answers_of_one_rank(model: str) -> list[object]:
    """Those of a server of one rank without speculation."""
    with LiveServer.real("--model-path", model, *FLAGS) as server:
        return answers_of(server.wait_ready(), _LONGEST[model])


def check_server(model: str, wanted: list[object], *flags: str, env: Mapping[str, str] | None = None) -> None:
    """A server with ``flags`` gives the answers ``wanted``, twice in a row and again with cached prefixes. No eligible
    step goes without its graph but for prompts that no graph takes. It ends well when it is told to, and no process is
    left. ``env``: of the server."""
    with LiveServer.real("--model-path", model, *FLAGS, *flags, env=dict(env or {})) as server:
        server.wait_ready()
        children = server.children()
        check_answers(server, wanted, _LONGEST[model])
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0, server.output
        assert not re.search("NCCL error|ProcessGroupNCCL|terminate called|Traceback", server.output), server.output
    _, alive = psutil.wait_procs(children, timeout=_WAIT_S)
    assert alive == []


def check_answers(server: LiveServer, wanted: list[object], longest: int = 4000) -> None:
    """See ``check_server``."""
    assert answers_of(server, longest) == wanted
    with server.client() as client:
        assert client.post("/flush_cache").status_code == 200
    assert answers_of(server, longest) == wanted
    assert answers_of(server, longest) == wanted
    with server.client() as client:
        states = client.get("/server_info").json()["internal_states"]
    for state in states:
        for kind in ("cuda_graphs", "piecewise_cuda_graphs"):
            stats = state[kind]
            assert stats["replays"] > 0 and set(stats["fallbacks"]) <= {"size"}, stats
            assert not stats["repairs"], stats
        assert not state["cuda_graphs"]["fallbacks"], state["cuda_graphs"]
