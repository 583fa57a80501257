"""A server with two replicas: the answers of one, both work, control messages reach both, and if one ends all end."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from demo_requests import prompts
from live_server import WAIT_S, LiveServer, wait_for
from scheduler_driver import answers, make_model_driver, request

REPLICAS = ("--model-path", "demo", "--device", "cpu", "--dp-size", "2", "--enable-metrics")
ENDLESS = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Of what servers leave while they run."""
    with tempfile.TemporaryDirectory(prefix="fl", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[LiveServer]:
    flags = ("--load-balance-method", "round_robin")
    with LiveServer.real(*REPLICAS, *flags, env={"TMPDIR": str(folder)}) as server:
        yield server.wait_ready()


def states(client: httpx.Client, name: str) -> list[int]:
    """A field of each replica's state."""
    found = client.get("/server_info").json()["internal_states"]
    return [state[name] for state in found]


def test_both_replicas_answer_as_one_would(replicas: LiveServer) -> None:
    reqs = [
        request(f"r{i}", ids, max_new_tokens=12, ignore_eos=True, temperature=0.0) for i, ids in enumerate(prompts())
    ]
    expected = answers(make_model_driver(), reqs)
    params = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.0}
    for _ in range(2):  # each prompt at either replica
        at_once = [replicas.post_in_thread({"input_ids": ids, "sampling_params": params}) for ids in prompts()]
        assert [answer.result(WAIT_S).json()["output_ids"] for answer in at_once] == expected
    with replicas.client() as client:
        assert min(states(client, "num_generated_tokens")) > 0
        text = client.get("/metrics").text
    for replica in range(2):
        assert f'fenceline:max_total_num_tokens{{dp_rank="{replica}",model_name="demo"}}' in text


def test_samples_of_one_prompt_differ_over_replicas(replicas: LiveServer) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"n": 4, "temperature": 2.0, "max_new_tokens": 16}}
    with replicas.client() as client:
        samples = client.post("/generate", json=body).json()
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 4


def test_control_messages_reach_both(replicas: LiveServer) -> None:
    with replicas.client() as client:
        running = [replicas.post_in_thread(ENDLESS) for _ in range(4)]
        wait_for(lambda: states(client, "num_running_reqs") == [2, 2])
        assert client.post("/flush_cache").status_code == 400
        assert client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        assert states(client, "paused") == [True, True]
        assert client.post("/continue_generation", json={}).status_code == 200
        assert states(client, "paused") == [False, False]
        assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
        for answer in running:
            assert answer.result(WAIT_S).json()["meta_info"]["finish_reason"]["type"] == "abort"
        running = [replicas.post_in_thread({**ENDLESS, "rid": f"mine-{i}"}) for i in range(2)]
        wait_for(lambda: states(client, "num_running_reqs") == [1, 1])
        for i in range(2):
            assert client.post("/abort_request", json={"rid": f"mine-{i}"}).status_code == 200
            assert running[i].result(WAIT_S).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert client.post("/flush_cache").status_code == 200
        generated = states(client, "num_generated_tokens")
        assert client.get("/health_generate").status_code == 200
        more = states(client, "num_generated_tokens")
        assert all(after > before for before, after in zip(generated, more, strict=True))


def test_replicas_stop_together(replicas: LiveServer, folder: Path) -> None:
    """The last test of the server that they share."""
    children = replicas.children()
    replicas.signal(signal.SIGTERM)
    assert replicas.wait_exit() == 0
    assert_gone(children, folder)


@pytest.mark.long
def test_a_replica_that_ends_ends_the_server_and_is_named(folder: Path) -> None:
    """One of replicas with two ranks each."""
    flags = ("--tp-size", "2", "--page-size", "16")
    with LiveServer.real(*REPLICAS, *flags, env={"TMPDIR": str(folder)}) as server:
        server.wait_ready()
        children = server.children()
        answer = server.post_in_thread(ENDLESS)
        with server.client() as client:
            wait_for(lambda: sum(states(client, "num_running_reqs")) == 1)
        ranks = sorted(children, key=lambda child: child.memory_info().rss)[-4:]  # what computes has the most memory
        max(ranks, key=lambda child: (child.create_time(), child.pid)).kill()
        assert server.wait_exit() == 1
        reason = "replica 1: the scheduler-1 process ended unexpectedly (killed by SIGKILL"
        assert reason in server.last_lines()
        assert reason in answer.result(WAIT_S).json()["error"]["message"]
        assert_gone(children, folder)


def assert_gone(children: list[psutil.Process], folder: Path) -> None:
    """No process is left, and of the sockets nothing."""
    _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert alive == []
    wait_for(lambda: not [path for path in folder.glob("fenceline-*") if "flight" not in path.name])
