"""The set-ups resolve for every Python and every torch in range, from wheels alone. Asks a package registry for
metadata and downloads nothing else: ``scripts/test -m network test/network``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pick_installer
import pick_torch
import setup_env

pytestmark = [pytest.mark.network, pytest.mark.timeout(600)]

ROOT = setup_env.ROOT
PYTHONS = ("3.11", "3.12", "3.13")
TORCHS = ("2.11", "2.12", "2.13", "2.14")
PLATFORM = "x86_64-manylinux_2_28"
CPU = pick_torch.choose(pick_torch.Machine("Linux"))
GPU = pick_torch.choose(pick_torch.Machine("Linux", (13, 0), (9, 0)))
PINS = (ROOT / "constraints-cpu.txt").read_text()
Versions = dict[str, str]


class Resolver:
    """uv as the set-up uses it, asked which versions it would install."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
        if uv is None:
            pytest.skip("needs uv: pip install uv")
        settings = pick_installer.pip_settings(
            subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
        )
        variables = pick_installer.uv_variables(settings)
        if variables is None:
            pytest.skip(f"uv has no counterpart for these settings of pip: {sorted(settings)}")
        # Not this machine's own wheels, for example of torch for the CPU: the test asks what users get.
        variables.pop("UV_FIND_LINKS", None)
        self._environment = {**variables, **os.environ}
        self._command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"]
        self._made: dict[tuple[str, ...], Versions] = {}
        index = variables.get("UV_DEFAULT_INDEX", "https://pypi.org/simple")
        reason = pick_installer.why_unreachable(index.rstrip("/") + "/torch/")
        if reason is not None:
            pytest.skip(f"no package registry can be reached: {index}: {reason}")

    def resolve(self, python: str, requirements: str, constraints: str, *options: str) -> Versions:
        """The versions by name. Fails with uv's explanation where there are none."""
        key = (python, requirements, constraints, *options)
        if key not in self._made:
            wanted, pinned = (
                self._write("requirements.txt", requirements),
                self._write("constraints.txt", constraints),
            )
            where = ["--python-version", python, "--python-platform", PLATFORM]
            command = [*self._command, *where, "--constraint", pinned, *options, wanted]
            result = subprocess.run(command, capture_output=True, text=True, env=self._environment, cwd=self._folder)
            assert result.returncode == 0, f"Python {python}, {requirements}:\n{result.stderr}"
            pairs = re.findall(r"^([\w.-]+)==(\S+)", result.stdout, re.MULTILINE)
            self._made[key] = {name.lower(): version for name, version in pairs}
        return self._made[key]

    def cuda(self, python: str, torch: str) -> Versions:
        """The set-up with a driver, everything in it."""
        constraints = setup_env.constraints_for(GPU, f"torch=={torch}.*", PINS)
        return self.resolve(python, _package("test", "dev", "cuda"), constraints)

    def cpu(self, python: str, torch: str) -> Versions:
        """The set-up without a driver. The CPU builds lie on an index of their own and ask for what the CUDA builds
        do, less what is CUDA's and less triton, which is there for the tests and of a version of its own."""
        pinned = torch == pick_torch.CPU_VERSION.rpartition(".")[0]
        wanted = f"torch=={pick_torch.CPU_VERSION}" if pinned else f"torch=={torch}.*"
        constraints = setup_env.constraints_for(CPU if pinned else GPU, wanted, PINS)
        cuda = [name for name in self.cuda(python, torch) if re.match("nvidia-|cuda-", name)]
        excludes = self._write("excludes.txt", "\n".join(cuda))
        overrides = self._write("overrides.txt", next(line for line in PINS.splitlines() if "triton==" in line))
        return self.resolve(
            python, _package("test", "dev"), constraints, "--excludes", excludes, "--overrides", overrides
        )

    def _write(self, name: str, text: str) -> str:
        (self._folder / name).write_text(text + "\n")
        return name


def _package(*extras: str) -> str:
    """What ``pip install --editable .[extras]`` asks for, and what builds it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return "\n".join([setup_env.BUILD_TOOL, *(line for group in groups for line in group)])


@pytest.fixture(scope="module")
def resolver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Resolver:
    if "network" not in request.config.option.markexpr:
        pytest.skip("asks a package registry: run it with -m network")
    return Resolver(tmp_path_factory.mktemp("resolution"))


def test_every_minor_release_in_range_is_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [line for line in project["dependencies"] if Requirement(line).name == "torch"]
    assert torch == f"torch>={TORCHS[0]},<2.{int(TORCHS[-1].split('.')[1]) + 1}"
    assert [f"Programming Language :: Python :: {python}" in project["classifiers"] for python in PYTHONS]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("torch", TORCHS)
def test_the_set_up_with_a_driver_resolves(resolver: Resolver, torch: str, python: str) -> None:
    versions = resolver.cuda(python, torch)
    print(python, *(f"{name}=={versions[name]}" for name in ("torch", "triton", "setuptools", "flashinfer-python")))
    assert versions["torch"].startswith(torch)
    assert any(name.startswith("nvidia-") for name in versions)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("torch", TORCHS)
def test_the_set_up_for_the_cpu_resolves(resolver: Resolver, torch: str, python: str) -> None:
    versions = resolver.cpu(python, torch)
    print(python, *(f"{name}=={versions[name]}" for name in ("torch", "triton", "setuptools")))
    assert versions["torch"].startswith(torch)
    assert not any(name.startswith("nvidia-") for name in versions)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_set_up_for_the_cpu_is_pinned_whole(resolver: Resolver, python: str) -> None:
    """Nothing that it installs is left to the day of the installation."""
    pinned = dict(line.lower().replace("_", "-").split("==") for line in PINS.splitlines() if "==" in line)
    versions = resolver.cpu(python, pick_torch.CPU_VERSION.rpartition(".")[0])
    assert {name: version for name, version in versions.items() if pinned.get(name) != version} == {}
