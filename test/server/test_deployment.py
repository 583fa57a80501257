"""What docker/ and deploy/ rely on, held against a live server: the dashboard's queries, and a key out of sight."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from fake_scheduler import Seed
from live_server import LiveServer, scheduler_state, unused_port, wait_for
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docker/grafana/dashboards/fenceline.json"
ALERTS = ROOT / "deploy/alerts.yaml"
ADDED_BY_PROMETHEUS = {"instance", "job"}
# A metric and its selector; what an aggregation keeps; what a legend shows.
_METRIC = re.compile(r"\b((?:[a-z]+:|process_)\w+)(?:\{([^}]*)\})?")
_BY = re.compile(r"\bby \(([^)]*)\)")
_LEGEND = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')


def queries() -> list[tuple[str, str]]:
    """(expression, legend) of every panel; the variables' queries have no legend."""
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    variables = [variable["definition"] for variable in dashboard["templating"]["list"]]
    return [(target["expr"], target["legendFormat"]) for target in targets] + [(text, "") for text in variables]


def alerts() -> list[tuple[str, str]]:
    """(expression, texts) of every alert."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    return [(rule["expr"], " ".join(rule["annotations"].values())) for rule in rules]


def labels_asked_for(expression: str, legend: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, the labels that the expression expects it to have)."""
    kept = {label.strip() for group in _BY.findall(expression) for label in group.split(",")}
    found = re.search(r"label_values\(.*,\s*(\w+)\)", expression)
    shown = set(_LEGEND.findall(legend)) | ({found[1]} if found else set())
    for name, selector in _METRIC.findall(expression):
        yield name, set(_MATCHER.findall(selector or "")) | kept | shown


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each name in /metrics of a server with all tiers and graphs, after a request."""
    flags = "--enable-metrics --enable-hierarchical-cache --hicache-storage-backend file --hicache-storage-size 0.001"
    folder = str(tmp_path_factory.mktemp("pages"))
    with LiveServer.fake(*flags.split(), "--hicache-storage-dir", folder) as server:
        with server.wait_ready().client() as client:
            body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}}
            assert client.post("/generate", json=body).status_code == 200
            text = client.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.mark.parametrize(("expression", "legend"), [*queries(), *alerts()])
def test_every_query_of_the_dashboard_finds_its_metrics(
    exposed: dict[str, set[str]], expression: str, legend: str
) -> None:
    asked = list(labels_asked_for(expression, legend))
    if expression.startswith("up{"):
        return  # Prometheus' own
    assert asked, f"no metric is recognised in {expression}"
    for name, labels in asked:
        assert name in exposed, f"{name} is not in /metrics"
        assert labels - ADDED_BY_PROMETHEUS <= exposed[name], f"{name} has {sorted(exposed[name])}: {expression}"


def test_the_queries_are_read_as_they_are_meant() -> None:
    """The check above is worth what its reading is worth."""
    expression = 'sum by (le, reason) (rate(fenceline:x_bucket{model_name=~"$model", job="a"}[1m]))'
    assert list(labels_asked_for(expression, "p50 {{tier}}")) == [
        ("fenceline:x_bucket", {"le", "reason", "model_name", "job", "tier"})
    ]
    assert list(labels_asked_for("label_values(fenceline:y, model_name)", "")) == [("fenceline:y", {"model_name"})]
    assert len(queries()) > 30


def test_a_key_of_the_environment_is_in_no_process_list() -> None:
    with LiveServer.fake("--enable-metrics", env={"FENCELINE_API_KEY": "sesame-0815"}) as server:
        with server.wait_ready().client() as client:
            assert client.get("/v1/models").status_code == 401
            headers = {"Authorization": "Bearer sesame-0815"}
            assert client.get("/v1/models", headers=headers).status_code == 200
            # The health check of the image and Prometheus have no key.
            assert httpx.get(f"{server.base_url}/health").status_code == 200
            assert client.get("/metrics").status_code == 200
        processes = [psutil.Process(server.pid), *server.children()]
        assert len(processes) >= 3
        assert not any("sesame" in word for process in processes for word in process.cmdline())
        assert "sesame" not in server.output


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_streams_pass_nginx_at_once_and_leaving_ends_requests(tmp_path: Path) -> None:
    with LiveServer.fake() as server, server.wait_ready().client() as direct:
        port = unused_port()
        text = (ROOT / "deploy/nginx.conf").read_text()
        for before, after in {
            "127.0.0.1:30000": server.base_url.removeprefix("http://"),
            "listen 8080": f"listen 127.0.0.1:{port}",
            "events {": f"daemon off;\npid {tmp_path}/pid;\nerror_log stderr;\nevents {{",
            "http {": "http {" + "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in _FOLDERS),
        }.items():
            assert before in text
            text = text.replace(before, after)
        (tmp_path / "nginx.conf").write_text(text)
        command = ["nginx", "-p", str(tmp_path), "-e", "stderr", "-c", str(tmp_path / "nginx.conf")]
        subprocess.run([*command, "-t"], check=True, timeout=60)
        with subprocess.Popen(command) as nginx, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            try:
                wait_for(lambda: _answers(client))
                assert client.get("/metrics").status_code == 403
                held = {"max_new_tokens": 4, "sampling_seed": Seed.HELD}
                body = {"input_ids": [5, 6], "stream": True, "sampling_params": held}
                with client.stream("POST", "/generate", json=body) as answer:
                    assert next(answer.iter_lines()).startswith("data: "), "while the others are held"
                wait_for(lambda: scheduler_state(direct)["num_running_reqs"] == 0)
                held["sampling_seed"] = 1
                answer = client.post("/generate", json=body)
                assert answer.text.endswith("data: [DONE]\n\n")
            finally:
                nginx.terminate()


_FOLDERS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.ConnectError:
        return False
