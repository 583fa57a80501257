"""HiCache as clients see it: cached tokens by tier, the scheduler's state, metrics, emptying the tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import orjson
import pytest
from fake_scheduler import HICACHE_STATE
from live_server import LiveServer


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server with all three tiers."""
    folder: Path = tmp_path_factory.mktemp("pages")
    flags = (
        "--enable-metrics --enable-cache-report --enable-hierarchical-cache --hicache-storage-backend file"
        f" --hicache-storage-size 0.001 --hicache-storage-dir {folder}"
    )
    with LiveServer.fake(*flags.split()) as server, server.wait_ready().client() as client:
        yield client


def ask(client: httpx.Client, ids: list[int]) -> dict[str, object]:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    meta: dict[str, object] = client.post("/generate", json=body).json()["meta_info"]
    return meta


def details(client: httpx.Client, ids: list[int]) -> tuple[object, object]:
    meta = ask(client, ids)
    return meta["cached_tokens"], meta["cached_tokens_details"]


NOWHERE = (0, {"device": 0, "host": 0, "storage": 0})
ON_DEVICE = (2, {"device": 2, "host": 0, "storage": 0})
IN_STORAGE = (2, {"device": 0, "host": 0, "storage": 2})


def test_flushing_spares_the_storage_unless_asked(tiers: httpx.Client) -> None:
    prompt = [31, 32, 33]
    assert details(tiers, prompt) == NOWHERE
    assert details(tiers, prompt) == ON_DEVICE
    assert tiers.post("/flush_cache").text == "Cache flushed.\n"
    assert details(tiers, prompt) == IN_STORAGE
    assert tiers.post("/flush_cache", params={"storage": "false"}).status_code == 200
    assert details(tiers, prompt) == IN_STORAGE
    assert tiers.get("/flush_cache", params={"storage": "true"}).status_code == 200
    assert details(tiers, prompt) == NOWHERE


@pytest.mark.parametrize("path", ["/clear_hicache_storage_backend", "/hicache/storage-backend/clear"])
def test_the_storage_is_cleared_under_sglangs_names(tiers: httpx.Client, path: str) -> None:
    prompt = [41, 42, 43]
    ask(tiers, prompt)
    answer = tiers.post(path)
    assert (answer.status_code, answer.json()) == (200, "Hierarchical cache storage backend cleared.")
    assert details(tiers, prompt) == NOWHERE


def test_a_switch_is_true_or_false(tiers: httpx.Client) -> None:
    answer = tiers.post("/flush_cache", params={"storage": "perhaps"})
    assert answer.status_code == 400
    assert "storage" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/flush_cache?storage=true", "/clear_hicache_storage_backend", "/hicache/storage-backend/clear"]
)
def test_without_a_storage_tier_there_is_nothing_to_clear(client: httpx.Client, path: str) -> None:
    ask(client, [51, 52, 53])
    answer = client.post(path)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith("this server has no storage tier: start it with")
    assert error["param"] == "storage"
    meta = ask(client, [51, 52, 53])
    assert meta["cached_tokens"] == 2  # nothing was flushed
    assert "cached_tokens_details" not in meta


def test_streams_carry_the_tiers_in_every_event(tiers: httpx.Client) -> None:
    body = {"input_ids": [61, 62, 63], "stream": True, "sampling_params": {"max_new_tokens": 3}}
    with tiers.stream("POST", "/generate", json=body) as response:
        events = [
            orjson.loads(line[6:])
            for line in response.iter_lines()
            if line.startswith("data: ") and "[DONE]" not in line
        ]
    assert [event["meta_info"]["cached_tokens_details"] for event in events] == [NOWHERE[1]] * len(events)


def test_usage_carries_the_tiers(tiers: httpx.Client) -> None:
    body = {"prompt": [71, 72, 73], "max_tokens": 1}
    for expected in (NOWHERE, ON_DEVICE):
        usage = tiers.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected[0], "cached_tokens_details": expected[1]}


def test_server_info_shows_configuration_and_state(tiers: httpx.Client, client: httpx.Client) -> None:
    info = tiers.get("/get_server_info").json()
    assert info["hicache_storage_backend"] == "file"
    assert info["hicache"]["storage"]["max_bytes"] == 1_000_000
    assert info["internal_states"][0]["hicache"] == msgspec.to_builtins(HICACHE_STATE)
    plain = client.get("/get_server_info").json()
    assert plain["hicache"] is None
    assert plain["internal_states"][0]["hicache"] is None


def test_metrics(tiers: httpx.Client, client: httpx.Client) -> None:
    assert tiers.get("/flush_cache", params={"storage": "true"}).status_code == 200
    before = read_metrics(tiers)
    for _ in range(2):
        ask(tiers, [81, 82, 83])
    tiers.post("/flush_cache")
    ask(tiers, [81, 82, 83])
    after = read_metrics(tiers)
    for source, number in (("device", 2), ("host", 0), ("storage", 2)):
        name = f'cached_tokens_total{{cache_source="{source}",model_name="demo"}}'
        assert after[name] - before[name] == number
    assert {name: after[name] for name in STATE_METRICS} == STATE_METRICS
    plain = read_metrics(client)
    assert 'cached_tokens_total{model_name="demo"}' in plain
    assert not any("hicache" in name or "cache_source" in name for name in plain)


def read_metrics(client: httpx.Client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
    return {line.rsplit(" ", 1)[0].removeprefix("fenceline:"): float(line.rsplit(" ", 1)[1]) for line in lines}


def _labels(**labels: str) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in sorted({**labels, "model_name": "demo"}.items()))
    return "{" + inside + "}"


STATE_METRICS = {
    "hicache_host_used_tokens" + _labels(): 640,
    "hicache_host_total_tokens" + _labels(): 8192,
    "hicache_pages" + _labels(state="device"): 1,
    "hicache_pages" + _labels(state="host"): 2,
    "hicache_pages" + _labels(state="both"): 3,
    "hicache_pages" + _labels(state="in_transit"): 4,
    "hicache_locked_nodes" + _labels(): 5,
    "evicted_tokens_total" + _labels(cache_source="device"): 14,
    "evicted_tokens_total" + _labels(cache_source="host"): 15,
    "load_back_tokens_total" + _labels(): 22,
    "load_back_bytes_total" + _labels(): 23,
    "load_back_duration_seconds_count" + _labels(): 21,
    "load_back_duration_seconds_sum" + _labels(): 2.5,
    "hicache_backup_tokens_total" + _labels(): 32,
    "hicache_backup_bytes_total" + _labels(): 33,
    "hicache_backup_duration_seconds_count" + _labels(): 31,
    "hicache_backup_duration_seconds_sum" + _labels(): 3.5,
    "prefetched_tokens_total" + _labels(): 42,
    "prefetched_bytes_total" + _labels(): 43,
    "prefetched_duration_seconds_sum" + _labels(): 4.5,
    "backuped_tokens_total" + _labels(): 52,
    "backuped_bytes_total" + _labels(): 53,
    "backuped_duration_seconds_sum" + _labels(): 5.5,
    "hicache_prefetches_total" + _labels(outcome="complete"): 6,
    "hicache_prefetches_total" + _labels(outcome="cancelled"): 7,
    "hicache_storage_misses_total" + _labels(): 9,
    "hicache_storage_errors_total" + _labels(reason="no_space"): 10,
    "hicache_recomputes_total" + _labels(reason="queued_match"): 8,
}
