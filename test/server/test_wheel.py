"""The wheel in an environment of its own, without the checkout: its command serves the demo model."""

from __future__ import annotations

import importlib.util
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from live_server import LiveServer

import setup_env
from fenceline import __version__

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console script of an environment with the wheel, and with the packages of this environment."""
    if missing := [name for name in ("pip", "setuptools") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("wheel")
    source, env = folder / "source", folder / "env"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "fenceline_*")
    shutil.copytree(setup_env.ROOT / "python", source / "python", ignore=ignored)
    for file in ("pyproject.toml", "LICENSE"):
        shutil.copy(setup_env.ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", str(folder), str(source)], check=True)
    shutil.rmtree(source)
    venv.create(env)
    wheel = str(folder / f"fenceline-{__version__}-py3-none-any.whl")
    subprocess.run([*pip, "--python", str(env / "bin" / "python"), "install", *offline, wheel], check=True)
    [packages] = env.glob("lib/python*/site-packages")
    (packages / "beside.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return env / "bin" / "fenceline"


def test_a_wheel_serves_the_demo_model(command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    where = [str(command.with_name("python")), "-c", "import fenceline; print(fenceline.__file__)"]
    assert subprocess.check_output(where, text=True).startswith(str(command.parents[1]))
    assert subprocess.check_output([command, "--version"], text=True) == f"fenceline {__version__}\n"
    with LiveServer([str(command), "serve", "demo", "--port", "0", "--device", "cpu"]) as server:
        url = server.wait_ready().base_url
        asked = subprocess.run([command, "chat", url], input="What is 12 + 30?", capture_output=True, text=True)
        assert (asked.stdout, asked.stderr, asked.returncode) == ("42\n", "", 0)
        with server.client() as client:
            assert client.get("/").status_code == 200, "with the page"
