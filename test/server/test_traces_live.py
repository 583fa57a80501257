"""A live server whose requests are traced, and whose KV events are published."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zmq
from kv_event_mirror import Mirror
from live_server import WAIT_S, LiveServer, wait_for
from trace_collector import Collector

SPAN_ID = "00f067aa0ba902b7"
END = (-1).to_bytes(8, "big", signed=True)
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
REQUESTS = {
    "/generate": {"text": "What is 12 + 30?", "sampling_params": {"max_new_tokens": 8}},
    "/v1/completions": {"prompt": "What is 12 + 30?", "max_tokens": 8},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": "What is 12 + 30?", "max_output_tokens": 16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('events')}/events"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def client(collector: Collector, endpoint: str, directory: Path) -> Iterator[httpx.Client]:
    flags = (
        *("--model-path", "demo", "--device", "cpu", "--page-size", "16", "--max-total-tokens", "1024"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-storage-backend", "file"),
        *("--hicache-storage-dir", str(directory), "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--otlp-traces-endpoint", collector.url, "--kv-events-config"),
        json.dumps({"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": f"{endpoint}-replay"}),
    )
    with LiveServer.real(*flags, env={"OTEL_BSP_SCHEDULE_DELAY": "50"}) as server:
        with server.wait_ready().client() as client:
            yield client


def trace_id(number: int) -> str:
    return f"{number:032x}"


def parent(number: int) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id(number)}-{SPAN_ID}-01"}


@pytest.mark.parametrize(("number", "path"), list(enumerate(REQUESTS, start=1)))
def test_requests_of_all_apis_are_traced(client: httpx.Client, collector: Collector, number: int, path: str) -> None:
    begin = time.time()
    answer = client.post(path, json={"model": "demo", **REQUESTS[path]}, headers=parent(number))
    assert answer.status_code == 200, answer.text
    end = time.time()
    root, stages = collector.trace(trace_id(number))
    assert (root.parent_id, root.service, root.attributes["gen_ai.request.model"]) == (SPAN_ID, "fenceline", "demo")
    is_chat = path not in ("/generate", "/v1/completions")
    assert root.attributes["gen_ai.operation.name"] == ("chat" if is_chat else "text_completion")
    assert {"queue", "prefill"} <= set(stages)
    assert begin - 0.01 <= root.start <= stages["queue"].start <= stages["queue"].end <= stages["prefill"].end
    assert all(span.end <= root.end + 1e-3 for span in stages.values()) and root.end <= end + 0.01


def test_a_streaming_client_that_leaves_is_traced(client: httpx.Client, collector: Collector) -> None:
    body = {"prompt": "a", "max_tokens": 700, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json={"model": "demo", **body}, headers=parent(20)) as answer:
        next(answer.iter_lines())
    root, stages = collector.trace(trace_id(20))
    assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"] and "prefill" in stages


def test_loads_of_a_cached_prefix_are_traced(client: httpx.Client, collector: Collector) -> None:
    prompts = [[5 + step * token % 390 for token in range(350)] for step in (1, 2, 3, 4)]
    params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    for number, prompt in enumerate([*prompts, prompts[0]], start=30):
        body = {"input_ids": prompt, "sampling_params": params}
        assert client.post("/generate", json=body, headers=parent(number)).status_code == 200
    root, stages = collector.trace(trace_id(34))
    assert stages["load_host"].attributes["fenceline.num_tokens"] == 336
    assert root.attributes["gen_ai.usage.cached_tokens"] == 336
    assert root.start <= stages["load_host"].start <= stages["load_host"].end <= root.end


def test_events_of_a_live_server_rebuild_its_cache(client: httpx.Client, endpoint: str, directory: Path) -> None:
    """All since its start, by a replay: as many pages on each tier as the server counts."""
    context = zmq.Context()
    replay = context.socket(zmq.DEALER)
    replay.connect(f"{endpoint}-replay")

    def told() -> dict[str, int]:
        mirror, number = Mirror(), b""
        replay.send_multipart([b"", bytes(8)])
        while number != END:
            assert replay.poll(1000 * WAIT_S), "the replay does not end"
            _, _, number, payload = replay.recv_multipart()
            if number != END:
                mirror.apply(payload)
        return {medium: len(blocks) for medium, blocks in mirror.media.items()}

    def counted() -> dict[str, int]:
        pages = client.get("/get_server_info").json()["internal_states"][0]["hicache"]["pages"]
        num_stored = len(list(directory.rglob("*.page")))
        return {"GPU": pages["device"] + pages["both"], "CPU_PINNED": pages["host"] + pages["both"], "DISK": num_stored}

    try:
        prompt = {"input_ids": [9] * 400, "sampling_params": {"max_new_tokens": 4}}
        assert client.post("/generate", json=prompt).status_code == 200
        wait_for(lambda: told() == counted())
        assert min(told().values()) >= 25
    finally:
        context.destroy(0)
