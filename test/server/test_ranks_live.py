"""Servers whose model two ranks compute, on one host or two: the answers of one, and an end with the reason when a rank
fails."""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from demo_requests import prompts
from live_server import WAIT_S, WATCHDOG_S, LiveServer, scheduler_state, unused_port, wait_for
from model_parity import save_checkpoint
from scheduler_driver import answers, make_model_driver, request

RANKS = ("--device", "cpu", "--tp-size", "2", "--page-size", "16")
TIERS = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--retract-policy", "offload"),
    *("--max-total-tokens", "512", "--schedule-conservativeness", "0.01"),
    *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
)
ENDLESS = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
PARAMS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.1, "seed": 12, "top_p": 0.8, "frequency_penalty": 0.3},
    {"temperature": 0.7, "seed": 13, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.2},
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LiveServer]:
    with LiveServer.real("--model-path", "demo", *RANKS) as server:
        yield server.wait_ready()


def generate_body(ids: list[int], params: dict[str, object]) -> dict[str, object]:
    sampling = {**params, "max_new_tokens": 20, "ignore_eos": True}
    sampling["sampling_seed"] = sampling.pop("seed", 0)
    return {"input_ids": ids, "sampling_params": sampling}


@pytest.mark.long
def test_ranks_with_experts_of_their_own_answer_as_one(tmp_path: Path) -> None:
    """And with latents, which all ranks have, and states, which they divide."""
    save_checkpoint("kimi-linear", tmp_path)
    flags: dict[str, object] = {"model_path": str(tmp_path), "max_total_tokens": 1024}
    prompts = [[(7 * i + j) % 50 for j in range(70)] for i in range(6)]
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    reqs = [request(f"r{i}", ids, **params) for i, ids in enumerate(prompts)]
    expected = answers(make_model_driver(**flags), reqs)
    argv = ["--model-path", str(tmp_path), "--skip-tokenizer-init", "--max-total-tokens", "1024"]
    with LiveServer.real(*argv, "--dtype", "float32", *RANKS, "--ep-size", "2") as server:
        server.wait_ready()
        asked = [
            server.post_in_thread({"input_ids": ids, "sampling_params": params | {"sampling_seed": 0}})
            for ids in prompts
        ]
        assert [answer.result(WAIT_S).json()["output_ids"] for answer in asked] == expected


def test_answers_are_those_of_one_rank(ranks: LiveServer) -> None:
    """Alone and all at once, with and without cached prefixes."""
    reqs = [
        request(f"r{i}", ids, max_new_tokens=20, ignore_eos=True, **params)  # type: ignore[arg-type]
        for i, (ids, params) in enumerate(zip(prompts(), PARAMS, strict=True))
    ]
    expected = answers(make_model_driver(), reqs)
    bodies = [generate_body(ids, params) for ids, params in zip(prompts(), PARAMS, strict=True)]
    with ranks.client() as client:
        alone = [client.post("/generate", json=body).json()["output_ids"] for body in bodies]
    assert alone == expected
    at_once = [ranks.post_in_thread(body) for body in bodies]
    assert [answer.result(WAIT_S).json()["output_ids"] for answer in at_once] == expected


@pytest.mark.long
def test_ranks_that_speculate_replay_graphs_of_both_kinds() -> None:
    """With the demo model's EAGLE-3 head, and a constrained answer beside the others. Every rank captures and registers
    the same sizes; prompts and batches around them, one after the other and at once (F11)."""
    graphs = ("--cuda-graph-bs", "1", "4", "--piecewise-cuda-graph-tokens", "16", "64")
    graphs += ("--dtype", "float32", "--speculative-algorithm", "EAGLE3", "--max-running-requests", "4")
    prompts = [[5 + (7 * i + j) % 900 for j in range(n)] for i, n in enumerate((16, 17, 63, 64))]
    reqs = [
        request(f"r{i}", ids, max_new_tokens=20, ignore_eos=True, **PARAMS[i % len(PARAMS)])  # type: ignore[arg-type]
        for i, ids in enumerate(prompts)
    ]
    expected = answers(make_model_driver(), reqs)
    bodies = [generate_body(ids, PARAMS[i % len(PARAMS)]) for i, ids in enumerate(prompts)]
    counting = {"text": "1, 2, 3, 4, 5, 6, 7, 8,", "sampling_params": {"regex": "( [0-9]{1,2},){4}"}}
    with LiveServer.real("--model-path", "demo", *RANKS, *graphs, "--chunked-prefill-size", "64") as server:
        server.wait_ready()
        with server.client() as client:
            assert [client.post("/generate", json=body).json()["output_ids"] for body in bodies] == expected
            assert client.post("/flush_cache").status_code == 200
            asked = [server.post_in_thread(body) for body in (*bodies, counting)]
            *answered, constrained = (answer.result(WAIT_S).json() for answer in asked)
            assert [answer["output_ids"] for answer in answered] == expected
            assert max(answer["meta_info"]["spec_accept_length"] for answer in answered) > 1.5
            assert re.fullmatch("( [0-9]{1,2},){4}", constrained["text"])
            state = scheduler_state(client)
        for kind in ("cuda_graphs", "piecewise_cuda_graphs"):
            counts = state[kind]
            assert counts["replays"] == counts["eligible_steps"] > 0 and not counts["repairs"], counts


def test_the_openai_api_and_the_logprobs_of_a_chat(ranks: LiveServer) -> None:
    with ranks.client() as client:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "What is 12 + 30?"}],
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
        }
        answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert "42" in answer["message"]["content"]
        for token in answer["logprobs"]["content"]:
            assert token["top_logprobs"][0]["logprob"] == token["logprob"]


def test_control_messages_reach_all_ranks(ranks: LiveServer) -> None:
    """A pause that one rank did not know of would end the server: the ranks' steps would differ."""
    with ranks.client() as client:
        running = [ranks.post_in_thread(ENDLESS) for _ in range(2)]
        wait_for(lambda: _num_running(client) == 2)
        assert client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
        assert client.post("/continue_generation", json={}).status_code == 200
        assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
        for answer in running:
            assert answer.result(WAIT_S).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert client.post("/flush_cache").status_code == 200
        assert client.get("/health_generate").status_code == 200


def _num_running(client: httpx.Client) -> int:
    return int(scheduler_state(client)["num_running_reqs"])


def assert_gone(children: list[psutil.Process], folder: Path) -> None:
    """No process is left, and of the shared memory and sockets nothing."""
    _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert alive == []
    wait_for(lambda: not [path for path in folder.glob("fenceline-*") if "flight" not in path.name])


@pytest.mark.long
def test_a_rank_that_decides_otherwise_ends_the_server() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="fl", dir="/tmp") as folder,
        LiveServer.fake(*RANKS[2:], entry="run_rank_apart", env={"TMPDIR": folder}) as server,
    ):
        children = server.wait_ready().engine_processes(num_ranks=2)
        answer = server.post_in_thread({"input_ids": [5, 6]})
        assert server.wait_exit() == 1
        reason = "RanksDifferError: ranks 0 and 1 have decided differently: step 1, pages"
        assert reason in server.last_lines()
        assert reason in answer.result(WAIT_S).json()["error"]["message"]
        dumps = list(Path(folder).glob("fenceline-flight-recorder-*/*"))
        assert len({path.name.split("-")[1] for path in dumps}) == 2, f"the flight records of both: {dumps}"
        assert_gone(children, Path(folder))


# --- two hosts, which are one host here


@contextmanager
def nodes(folder: str, *flags: str) -> Iterator[tuple[LiveServer, LiveServer]]:
    """Node 0, which answers, and node 1. ``folder``: of what they leave while they run."""
    address = f"127.0.0.1:{unused_port()}"
    common = ("--model-path", "demo", *RANKS, "--nnodes", "2", "--dist-init-addr", address, *flags)
    with (
        LiveServer.real(*common, "--node-rank", "0", env={"TMPDIR": folder}) as first,
        LiveServer.real(*common, "--node-rank", "1", env={"TMPDIR": folder}) as second,
    ):
        yield first.wait_ready(), second


@pytest.mark.long
def test_two_nodes_answer_as_one_rank_and_stop_together(tmp_path: Path) -> None:
    reqs = [
        request(f"r{i}", ids, max_new_tokens=20, ignore_eos=True, **params)  # type: ignore[arg-type]
        for i, (ids, params) in enumerate(zip(prompts(), PARAMS, strict=True))
    ]
    expected = answers(make_model_driver(), reqs)
    bodies = [generate_body(ids, params) for ids, params in zip(prompts(), PARAMS, strict=True)]
    with tempfile.TemporaryDirectory(prefix="fl", dir="/tmp") as folder:
        tiers = (*TIERS, "--hicache-storage-dir", str(tmp_path / "pages"))
        with nodes(folder, *tiers) as (first, second):
            for _ in range(2):
                at_once = [first.post_in_thread(body) for body in bodies]
                assert [answer.result(WAIT_S).json()["output_ids"] for answer in at_once] == expected
            children = first.children() + second.children()
            first.signal(signal.SIGTERM)
            assert (first.wait_exit(), second.wait_exit()) == (0, 0)
            assert_gone(children, Path(folder))


def _rank(server: LiveServer) -> psutil.Process:
    """The process of a node that computes most: its rank."""
    return max(server.children(), key=lambda child: child.memory_info().rss)


@pytest.mark.long
def test_a_killed_rank_ends_both_nodes_with_the_reason() -> None:
    """The rank of the node that answers nobody: test_ranks_killed.py kills both of one node."""
    with tempfile.TemporaryDirectory(prefix="fl", dir="/tmp") as folder, nodes(folder) as both:
        answer = both[0].post_in_thread(ENDLESS)
        with both[0].client() as client:
            wait_for(lambda: _num_running(client) == 1)
        children = both[0].children() + both[1].children()
        _rank(both[1]).kill()
        assert (both[0].wait_exit(), both[1].wait_exit()) == (1, 1)
        reason = "the scheduler-1 process ended unexpectedly (killed by SIGKILL"
        assert reason in both[0].last_lines() and reason in both[1].last_lines()
        assert reason in answer.result(WAIT_S).json()["error"]["message"]
        assert_gone(children, Path(folder))


@pytest.mark.long
def test_a_node_that_is_gone_while_nothing_runs_is_noticed() -> None:
    """Nothing of it is left to say why: all its processes are killed at once, as if the host had lost its power."""
    with tempfile.TemporaryDirectory(prefix="fl", dir="/tmp") as folder:
        with nodes(folder, "--watchdog-timeout", str(WATCHDOG_S)) as (first, second):
            second.signal(signal.SIGSTOP)  # or it tells of the first process that is gone
            for process in [*second.children(), psutil.Process(second.pid)]:
                process.kill()
            assert first.wait_exit() == 1
            assert "nothing was heard of node 1" in first.last_lines()
