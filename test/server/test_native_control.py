"""Health, information, control, aborts, metrics, keys and request ids."""

from __future__ import annotations

import platform
import socket
from importlib.metadata import version
from urllib.parse import urlsplit

import httpx
import orjson
import pytest
from fake_scheduler import Seed
from live_server import WAIT_S, LiveServer, scheduler_state, wait_for
from prometheus_client.parser import text_string_to_metric_families

from fenceline.version import __version__


def hanging(rid: str) -> dict[str, object]:
    """A request that is never answered."""
    return {"input_ids": [1, 2], "rid": rid, "sampling_params": {"seed": Seed.HANG}}


def test_health_and_health_generate(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    before = scheduler_state(client)["num_generated_tokens"]
    assert client.get("/health_generate").status_code == 200
    assert scheduler_state(client)["num_generated_tokens"] == before + 1


def test_model_and_server_info(client: httpx.Client) -> None:
    info = client.get("/model_info").json()
    assert info == client.get("/get_model_info").json()
    assert info["is_generation"] is True
    assert info["weight_version"] == "default"
    server = client.get("/server_info").json()
    assert (server["max_total_num_tokens"], server["max_running_requests"]) == (4096, 64)
    assert server["api_key"] is False
    assert server["memory_bytes"] == {"weights": 1, "kv_cache": 2}
    assert server["cuda_graph_bs"] == []
    assert server["schedule_policy"] == "fcfs"
    assert server["internal_states"][0]["paused"] is False
    assert server["internal_states"][0]["cuda_graphs"]["fallbacks"] == {"size": 2}
    assert server["internal_states"][0]["piecewise_cuda_graphs"]["replays_by_size"] == {"16": 4}


def test_tokenize_and_detokenize_are_inverse(client: httpx.Client) -> None:
    text = "naïve 🙂 fox"
    for prefix in ("", "/v1"):
        answer = client.post(f"{prefix}/tokenize", json={"prompt": text}).json()
        assert answer["count"] == len(answer["tokens"])
        assert client.post(f"{prefix}/detokenize", json={"tokens": answer["tokens"]}).json() == {"text": text}
    batch = client.post("/tokenize", json={"prompt": [text, "a"]}).json()
    assert len(batch["tokens"]) == 2
    assert client.post("/detokenize", json={"tokens": batch["tokens"]}).json() == {"text": [text, "a"]}


def test_request_id_is_echoed_and_names_the_request(client: httpx.Client) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    answer = client.post("/generate", json=body, headers={"x-request-id": "trace-7.a"})
    assert answer.headers["x-request-id"] == "trace-7.a"
    assert answer.json()["meta_info"]["id"] == "trace-7.a"
    fresh = client.post("/generate", json=body, headers={"x-request-id": "bad id!"})
    assert fresh.headers["x-request-id"] == fresh.json()["meta_info"]["id"] != "bad id!"


@pytest.mark.parametrize("rid", ["abort-me", "abort"])
def test_abort_by_id_ends_the_request_with_its_own_reason(server: LiveServer, client: httpx.Client, rid: str) -> None:
    answer = server.post_in_thread(hanging("abort-me"))
    wait_for(lambda: scheduler_state(client)["num_running_reqs"] == 1)
    assert client.post("/abort_request", json={"rid": rid}).status_code == 200
    assert answer.result(WAIT_S).status_code == 200
    assert answer.result(WAIT_S).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert client.post("/abort_request", json={"rid": "nobody"}).status_code == 200


def test_abort_all(server: LiveServer, client: httpx.Client) -> None:
    answers = [server.post_in_thread(hanging(f"all-{index}")) for index in range(3)]
    wait_for(lambda: scheduler_state(client)["num_running_reqs"] == 3)
    assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
    for answer in answers:
        assert answer.result(WAIT_S).json()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_requests(server: LiveServer, client: httpx.Client, stream: bool) -> None:
    before = scheduler_state(client)["num_aborts"]
    seed = Seed.HELD if stream else Seed.HANG
    body = orjson.dumps({
        # No end-of-sequence id among them: the answers echo the prompts and must not end by themselves.
        "input_ids": [[5, 6], [7, 8]], "stream": stream, "sampling_params": {"seed": seed, "max_new_tokens": 900}
    })  # fmt: skip
    address = urlsplit(server.base_url)
    with socket.create_connection((address.hostname, address.port)) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: scheduler_state(client)["num_running_reqs"] == 2)
        if stream:
            assert raw.recv(16) == b"HTTP/1.1 200 OK\r"
    wait_for(lambda: scheduler_state(client)["num_running_reqs"] == 0)
    assert scheduler_state(client)["num_aborts"] == before + 2
    wait_for(lambda: client.get("/server_info").json()["num_active_requests"] == 0)


def test_flush_is_refused_while_busy_and_forgets_when_idle(server: LiveServer, client: httpx.Client) -> None:
    ask = {"input_ids": [91, 92, 93], "sampling_params": {"max_new_tokens": 1}}
    cached = []
    for _ in range(2):
        cached.append(client.post("/generate", json=ask).json()["meta_info"]["cached_tokens"])
    answer = server.post_in_thread(hanging("busy"))
    wait_for(lambda: scheduler_state(client)["num_running_reqs"] == 1)
    refused = client.post("/flush_cache")
    assert refused.status_code == 400
    assert "running" in refused.json()["error"]["message"]
    client.post("/abort_request", json={"rid": "busy"})
    answer.result(WAIT_S)
    wait_for(lambda: client.get("/flush_cache").status_code == 200)
    cached.append(client.post("/generate", json=ask).json()["meta_info"]["cached_tokens"])
    assert cached == [0, 2, 0]


def test_pause_and_continue(server: LiveServer, client: httpx.Client) -> None:
    assert client.post("/pause_generation", json={"mode": "in_place"}).json()["success"] is True
    answer = server.post_in_thread({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
    wait_for(lambda: scheduler_state(client)["num_queue_reqs"] == 1)
    assert scheduler_state(client)["paused"] is True
    assert not answer.done()
    client.post("/continue_generation")
    assert answer.result(WAIT_S).status_code == 200


def test_metrics(server: LiveServer, client: httpx.Client) -> None:
    client.post("/generate", json={"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 5}})
    text = client.get("/metrics").text
    values = {line.split(" ")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
    label = '{model_name="demo"}'
    assert values["fenceline:num_retractions_total" + label] == 3
    assert values["fenceline:cuda_graph_eligible_steps_total" + label] == 9
    assert values["fenceline:cuda_graph_replays_total" + label] == 7
    reason = '{model_name="demo",reason="%s"}'
    assert values["fenceline:cuda_graph_fallbacks_total" + reason % "size"] == 2
    assert values["fenceline:cuda_graph_repairs_total" + reason % "none"] == 0
    assert values["fenceline:prefill_cuda_graph_eligible_steps_total" + label] == 5
    assert values["fenceline:prefill_cuda_graph_replays_total" + label] == 4
    assert values["fenceline:prefill_cuda_graph_fallbacks_total" + reason % "address"] == 1
    assert values["fenceline:prefill_cuda_graph_repairs_total" + reason % "none"] == 0
    assert values["fenceline:cache_hit_rate" + label] == 0.25
    assert values["fenceline:gen_throughput" + label] == 123.0
    assert values["fenceline:spec_accept_length" + label] == 2.5
    assert values['fenceline:spec_steps_total{depth="2",model_name="demo"}'] == 5
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "num_used_tokens"):
        assert f"fenceline:{name}{label}" in values
    for name in ("prompt_tokens_total", "generation_tokens_total", "num_requests_total"):
        assert values[f"fenceline:{name}{label}"] > 0
    assert values["fenceline:e2e_request_latency_seconds_count" + label] > 0
    assert values["fenceline:time_to_first_token_seconds_count" + label] > 0
    assert values["fenceline:inter_token_latency_seconds_count" + label] >= 4
    infinity = 'fenceline:inter_token_latency_seconds_bucket{le="+Inf",model_name="demo"}'
    assert values[infinity] == values["fenceline:inter_token_latency_seconds_count" + label]


def test_metrics_of_lengths_ends_processes_and_versions(client: httpx.Client) -> None:
    def read() -> dict[str, float]:
        families = text_string_to_metric_families(client.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return {f"{one.name} {' '.join(sorted(one.labels.values()))}": one.value for one in samples}

    before = read()
    body = {"input_ids": list(range(5, 25)), "sampling_params": {"max_new_tokens": 40}}
    assert client.post("/generate", json=body).json()["meta_info"]["finish_reason"]["type"] == "length"
    after = read()
    more = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert more["fenceline:finished_requests_total demo length"] == 1
    assert more["fenceline:finished_requests_total abort demo"] == 0
    for name, tokens in (("prompt", 20), ("generation", 40)):
        assert more[f"fenceline:{name}_tokens_histogram_sum demo"] == tokens
        assert more[f"fenceline:{name}_tokens_histogram_bucket 16.0 demo"] == 0
        assert more[f"fenceline:{name}_tokens_histogram_bucket 64.0 demo"] == 1
    python, torch = platform.python_version(), version("torch")
    [build] = [name for name in after if name.startswith("fenceline:build_info")]
    assert set(build.split()[1:]) == {"demo", __version__, python, torch}
    for process in ("main", "scheduler", "detokenizer"):
        of_process = {name.split()[0]: value for name, value in after.items() if process in name.split()[1:]}
        assert 10e6 < of_process["process_resident_memory_bytes"] < of_process["process_virtual_memory_bytes"]
        assert of_process["process_cpu_seconds_total"] > 0 and of_process["process_open_fds"] > 3


def test_api_key_queue_limit_and_incremental_streams() -> None:
    flags = ("--api-key", "s3cret-key", "--max-queued-requests", "1", "--incremental-streaming-output",
             "--log-requests")  # fmt: skip
    with LiveServer.fake(*flags) as server, server.wait_ready().client() as client:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 60, "seed": Seed.SLOW}}
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 404  # open, but not enabled
        for key in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            refused = client.post("/generate", json=body, headers=key)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        client.headers["authorization"] = "Bearer s3cret-key"
        with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
            lines = [orjson.loads(line[6:]) for line in response.iter_lines() if line and "[DONE]" not in line]
        assert sum((line["output_ids"] for line in lines), []) == [5, 6, 7] * 20
        assert len(lines) > 1
        _check_queue_limit(client)
        for line in ("Receive: rid=", "Finish: rid="):
            wait_for(lambda line=line: line in server.output)
        assert "s3cret" not in server.output


def _check_queue_limit(client: httpx.Client) -> None:
    """64 places: 65 requests are one that waits, 66 are one too many; refused requests leave no trace."""
    many = {"input_ids": [[1]] * 65, "sampling_params": {"max_new_tokens": 1}}
    assert client.post("/generate", json=many).status_code == 200
    too_many = {**many, "input_ids": [[1]] * 66}
    refused = client.post("/generate", json=too_many)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "queue_full"
    assert refused.headers["retry-after"] == "1"
    assert client.post("/generate", json=many).status_code == 200


def test_skip_tokenizer_init_speaks_ids_only() -> None:
    with LiveServer.fake("--skip-tokenizer-init") as server, server.wait_ready().client() as client:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}
        answer = client.post("/generate", json=body).json()
        assert "text" not in answer
        assert answer["output_ids"] == [5, 6, 7, 5]
        assert client.post("/generate", json={"text": "a"}).status_code == 400
        stop = client.post("/generate", json={**body, "sampling_params": {"stop": "x"}})
        assert "stop_token_ids" in stop.json()["error"]["message"]
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 400
