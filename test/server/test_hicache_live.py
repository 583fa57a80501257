"""A live server with all tiers: conversations that do not fit the device, what the metrics say, flushing, a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest
from live_server import LiveServer

PAGE = 16
PARAMS = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


def server(directory: Path) -> LiveServer:
    return LiveServer.real(
        *("--model-path", "demo", "--device", "cpu", "--page-size", str(PAGE), "--max-total-tokens", "1024"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-storage-backend", "file"),
        *("--hicache-storage-dir", str(directory), "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--enable-metrics", "--random-seed", "1"),
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def metrics_at_first() -> list[str]:
    """/metrics before any request, as ``client`` finds it."""
    return []


@pytest.fixture(scope="module")
def client(directory: Path, metrics_at_first: list[str]) -> Iterator[httpx.Client]:
    with server(directory) as live, live.wait_ready().client() as client:
        metrics_at_first.extend(client.get("/metrics").text.splitlines())
        yield client


def prompts() -> list[list[int]]:
    random = Random(2)
    return [[random.randrange(5, 400) for _ in range(350)] for _ in range(4)]


def generate(client: httpx.Client, prompt: list[int]) -> dict:
    answer = client.post("/generate", json={"input_ids": prompt, "sampling_params": PARAMS})
    assert answer.status_code == 200, answer.text
    return answer.json()


def tiers(client: httpx.Client) -> dict:
    return client.get("/get_server_info").json()["internal_states"][0]["hicache"]


def test_gauges_of_an_idle_server_are_there(client: httpx.Client, metrics_at_first: list[str]) -> None:
    """An autoscaler reads 0, and does not miss a metric until somebody has asked something."""
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "hicache_host_used_tokens"):
        for prefix in ("fenceline", "sglang"):
            assert f'{prefix}:{name}{{model_name="demo"}} 0.0' in metrics_at_first
    assert 'fenceline:max_total_num_tokens{model_name="demo"} 1024.0' in metrics_at_first


def test_conversations_come_back_from_the_host(client: httpx.Client) -> None:
    """Four of 350 tokens take turns on a device that holds two of them."""
    first = [generate(client, prompt) for prompt in prompts()]
    again = [generate(client, prompt) for prompt in prompts()]
    assert [a["output_ids"] for a in again] == [a["output_ids"] for a in first]
    details = [a["meta_info"]["cached_tokens_details"] for a in again]
    assert sum(d["host"] for d in details) >= 2 * 336
    assert all(sum(d.values()) == a["meta_info"]["cached_tokens"] for d, a in zip(details, again, strict=True))
    state = tiers(client)
    assert state["load"]["num_tokens"] > 0 and state["store"]["num_bytes"] > 0
    assert state["evicted_tokens"]["device"] > 0 and state["num_locked_nodes"] == 0
    metrics = client.get("/metrics").text
    assert 'fenceline:cached_tokens_total{cache_source="host"' in metrics
    assert "fenceline:load_back_bytes_total" in metrics


@pytest.mark.long
def test_storage_outlives_a_killed_server(client: httpx.Client, directory: Path) -> None:
    """What one server has written another finds, though nobody said goodbye."""
    expected = [generate(client, prompt)["output_ids"] for prompt in prompts()]
    with server(directory) as other:
        other.wait_ready()
        for phase in ("Allocated the host tier in", "Opened the storage in"):
            assert other.output.count(phase) == 1
        with other.client() as again:
            answers = [generate(again, prompt) for prompt in prompts()]
            stored = [a["meta_info"]["cached_tokens_details"]["storage"] for a in answers]
            assert [a["output_ids"] for a in answers] == expected
            assert sum(stored) >= 2 * 256
        for child in other.children():
            with suppress(psutil.NoSuchProcess):  # they follow each other
                child.kill()
    assert [generate(client, prompt)["output_ids"] for prompt in prompts()] == expected


def test_flushing_empties_the_tiers_that_were_named(client: httpx.Client) -> None:
    prompt = prompts()[0]
    expected = generate(client, prompt)["output_ids"]
    assert client.post("/flush_cache").status_code == 200
    metrics = client.get("/metrics").text  # of a server that does nothing
    for state in ("device", "host", "both", "in_transit"):
        assert f'fenceline:hicache_pages{{model_name="demo",state="{state}"}} 0.0' in metrics
    found = generate(client, prompt)
    assert found["meta_info"]["cached_tokens_details"]["device"] == 0
    assert found["meta_info"]["cached_tokens_details"]["host"] == 0
    assert client.post("/flush_cache", params={"storage": "true"}).status_code == 200
    found = generate(client, prompt)
    assert found["meta_info"]["cached_tokens"] == 0 and found["output_ids"] == expected
