"""docker/ and deploy/ against the code: stopping takes as long as it may, paths exist, flags are flags, nothing runs as
root or listens beyond the loopback interface. There is no engine here to build or run an image with."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import pick_torch
import setup_env
from fenceline.config.engine_config import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE
from fenceline.config.flags import flags_of
from fenceline.config.server_args import ServerArgs, parse_args
from fenceline.entrypoints.supervisor import STOP_TIMEOUT_S

ROOT = setup_env.ROOT
DOCKER = ROOT / "docker"
STOPS_WITHIN_S = ServerArgs(model_path="demo").shutdown_timeout + STOP_TIMEOUT_S
UNIT = ROOT / "deploy/fenceline.service"
Step = tuple[str, str]


def targets() -> dict[str, list[Step]]:
    """Each target's instructions as (name, rest), continuation lines joined, comments left out."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    steps = [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]
    found: dict[str, list[Step]] = {}
    for step in steps:
        if step[0] == "FROM":
            found[step[1].split(" AS ")[1]] = current = []
        current.append(step)
    return found


def only(steps: list[Step], name: str) -> str:
    (rest,) = [rest for step, rest in steps if step == name]
    return rest


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_is_made_from_what_is_there(target: str) -> None:
    steps = targets()[target]
    sources = [word for step, rest in steps if step == "COPY" for word in rest.split()[:-1]]
    for source in sources:
        assert (ROOT / source).exists(), source
    # What an environment is made from is there before it is made.
    before = [rest for _, rest in steps[: [rest for _, rest in steps].index("python python")]]
    for name in setup_env._INPUTS:
        assert any(name in rest for rest in before), name
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    for source in sources:
        assert f"!{source.split('/')[0]}" in ignored, source
    torch = next(rest for step, rest in steps if step == "ENV" and "FENCELINE_TORCH" in rest).partition("=")[2]
    assert (pick_torch.named(torch, "Linux").cuda is not None) == (target == "cuda")


def test_both_targets_differ_in_what_they_start_from_alone() -> None:
    differing = {
        target: [step for step in steps if step not in targets()["cpu" if target == "cuda" else "cuda"]]
        for target, steps in targets().items()
    }
    assert [step for step, _ in differing["cpu"]] == ["FROM", "ENV"]
    assert [step for step, _ in differing["cuda"]] == ["FROM", "RUN", "ENV"]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_serves_without_root_and_says_how_it_is(target: str) -> None:
    steps = targets()[target]
    user = only(steps, "USER").split(":")[0]
    assert int(user) > 0
    assert any(step == "RUN" and f"useradd --uid {user} " in rest for step, rest in steps)
    assert [step for step, _ in steps].index("USER") > max(i for i, (step, _) in enumerate(steps) if step == "RUN")
    command = json.loads(only(steps, "ENTRYPOINT")) + json.loads(only(steps, "CMD"))
    assert command[:3] == ["python", "-m", "fenceline.launch_server"]
    args = parse_args(command[3:])
    assert (args.host, args.port) == ("0.0.0.0", int(only(steps, "EXPOSE")))
    check = json.loads(only(steps, "HEALTHCHECK").partition("CMD ")[2])
    assert f"http://127.0.0.1:{args.port}/health" in check[-1]
    assert only(steps, "STOPSIGNAL") == "SIGTERM"
    # Whatever is downloaded or compiled at run time goes into the volume.
    volume = only(steps, "VOLUME")
    environment = " ".join(rest for step, rest in steps if step == "ENV")
    for name in ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        assert re.search(rf"\b{name}={volume}", environment), name


def compose(*names: str) -> dict[str, Any]:
    """The services of compose files, later ones over earlier ones as far as these need it."""
    services: dict[str, Any] = {}
    for name in names:
        for service, values in yaml.safe_load((DOCKER / name).read_text())["services"].items():
            merged = services.setdefault(service, {})
            for key, value in values.items():
                merged[key] = {**merged[key], **value} if isinstance(value, dict) and key in merged else value
    return services


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.cuda.yaml")])
def test_the_composed_server(files: tuple[str, ...]) -> None:
    server = compose(*files)["fenceline"]
    assert server["build"]["target"] in targets()
    assert (DOCKER / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    model = server["command"].index("${FENCELINE_MODEL:-demo}")
    args = parse_args([*server["command"][:model], "demo", *server["command"][model + 1 :]])
    assert args.enable_metrics
    assert args.api_key is None and server["environment"][API_KEY_VARIABLE] == f"${{{API_KEY_VARIABLE}:-}}"
    assert server["environment"][ADMIN_API_KEY_VARIABLE] == f"${{{ADMIN_API_KEY_VARIABLE}:-}}"
    assert int(server["stop_grace_period"].removesuffix("s")) > STOPS_WITHIN_S
    assert server["volumes"] == [f"cache:{only(targets()['cpu'], 'VOLUME')}"]


def test_nothing_is_published_beyond_the_loopback_interface() -> None:
    published = [port for service in compose("compose.yaml").values() for port in service["ports"]]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_what_is_mounted_is_there_and_names_what_is_there() -> None:
    services = compose("compose.yaml")
    mounted = [volume.split(":") for service in services.values() for volume in service["volumes"]]
    binds = {target: DOCKER / source for source, target, *_ in mounted if source.startswith(".")}
    assert all(path.exists() for path in binds.values()), binds
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"fenceline:{only(targets()['cpu'], 'EXPOSE')}"]}]
    provisioning = DOCKER / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    (provider,) = yaml.safe_load((provisioning / "dashboards/fenceline.yaml").read_text())["providers"]
    assert provider["options"]["path"] in binds
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    dashboard = json.loads((binds[str(home.parent)] / home.name).read_text())
    used = {target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel.get("targets", [])}
    assert used == {source["uid"]}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_alerts_are_rules_of_the_composed_prometheus() -> None:
    (name,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["rule_files"]
    mounts = [volume.split(":") for volume in compose("compose.yaml")["prometheus"]["volumes"]]
    (source,) = [source for source, target, *_ in mounts if target == f"/etc/prometheus/{name}"]
    text = (DOCKER / source).read_text()
    flags = {flag.option for flag in flags_of(ServerArgs).values()}
    assert set(re.findall(r"--[a-z-]+", text)) <= flags
    (group,) = yaml.safe_load(text)["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names)) > 5
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]


def test_kubernetes_waits_for_the_start_and_for_the_end() -> None:
    documents = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))
    claim, deployment, service = documents
    template = deployment["spec"]["template"]
    pod = template["spec"]
    (server,) = pod["containers"]
    image = targets()["cuda"]
    entry = json.loads(only(image, "ENTRYPOINT"))[3:]
    args = parse_args([*entry, *server["args"]])
    assert args.enable_metrics and args.api_key is None
    assert server["envFrom"] == [{"secretRef": {"name": "fenceline"}}]
    sleeps_s = float(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > sleeps_s + args.shutdown_timeout + STOP_TIMEOUT_S
    (port,) = server["ports"]
    assert port["containerPort"] == args.port == int(only(image, "EXPOSE"))
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(args.port)
    probes = [server[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert all(probe["httpGet"] == {"path": "/health", "port": port["name"]} for probe in probes)
    assert probes[0]["periodSeconds"] * probes[0]["failureThreshold"] >= 900  # as in the image's health check
    assert pod["securityContext"]["runAsUser"] == int(only(image, "USER").split(":")[0])
    mounts = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    assert mounts["cache"] == only(image, "VOLUME") and mounts["tmp"] == "/tmp"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]


def unit() -> dict[str, list[str]]:
    """The unit's settings by name, of all sections together."""
    pairs = [line.partition("=") for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#"]
    return {name: [value for key, _, value in pairs if key == name] for name, _, _ in pairs}


def test_the_unit_stops_the_server_as_it_wants_to_be_stopped() -> None:
    settings = unit()
    assert float(settings["TimeoutStopSec"][0]) > STOPS_WITHIN_S
    assert settings["KillMode"] == ["mixed"]  # children stop when their parent says so
    assert settings["DynamicUser"] == ["yes"]
    (command,) = settings["ExecStart"]
    assert command == "/opt/fenceline/.venv/bin/python -m fenceline.launch_server $FENCELINE_FLAGS"
    (flags,) = [value for value in settings["Environment"] if value.startswith("FENCELINE_FLAGS=")]
    assert parse_args(shlex.split(shlex.split(flags)[0].partition("=")[2])).host == "127.0.0.1"
    environment = " ".join(settings["Environment"])
    assert API_KEY_VARIABLE not in environment  # the unit can be read by everybody


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to("/bin/true")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/fenceline/.venv/bin/python", str(python)))
    result = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    ours = [line for line in result.stderr.splitlines() if UNIT.name in line or str(copy) in line]
    assert ours == []
