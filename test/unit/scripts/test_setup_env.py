"""Making the environment: what is installed in which order and by what, when nothing is, and what an interruption
leaves."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import pick_installer
import pick_torch
import setup_env
from pick_torch import Choice, Machine
from setup_env import STAMP, UNFINISHED, Env, SetupError

ROOT = setup_env.ROOT
CPU = pick_torch.choose(Machine("Linux"))
GPU = pick_torch.choose(Machine("Linux", (13, 0), (9, 0)))


class FakePip:
    """Answers True unless a command contains one of ``failing``; keeps the commands and the constraints they saw."""

    def __init__(self, failing: Sequence[str] = ()) -> None:
        self.failing = failing
        self.commands: list[list[str]] = []
        self.constraints = ""

    def __call__(self, args: Sequence[str]) -> bool:
        self.commands.append(list(args))
        if "--constraint" in args:
            self.constraints = Path(args[args.index("--constraint") + 1]).read_text()
        return not any(word in args for word in self.failing)


@pytest.fixture(autouse=True)
def unreachable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """No test asks the network: what is in this set cannot be reached."""
    found: set[str] = set()
    monkeypatch.setattr(setup_env, "why_unreachable", lambda url: "no route" if url in found else None)
    return found


@pytest.fixture
def env(tmp_path: Path) -> Env:
    """An environment that looks real enough: an interpreter and a version."""
    env = Env(tmp_path / ".venv")
    env.python.parent.mkdir(parents=True)
    env.python.symlink_to(sys.executable)
    (env.path / "pyvenv.cfg").write_text("version = 3.11.7\n")
    return env


def add_distribution(env: Env, name: str, version: str = "1.0") -> None:
    (env.path / f"lib/python3.11/site-packages/{name}-{version}.dist-info").mkdir(parents=True)


def test_cpu_set_up_takes_torch_alone_and_first(env: Env) -> None:
    pip = FakePip()
    setup_env.install(ROOT, env, CPU, ["test"], pip)
    torch, tools, package = pip.commands
    assert torch[-1] == "torch==2.13.0+cpu"
    assert torch[torch.index("--index-url") + 1] == "https://download.pytorch.org/whl/cpu"
    assert "--no-deps" in torch
    assert tools[-1] == setup_env.BUILD_TOOL
    assert package[-2:] == ["--editable", f"{ROOT}[test]"]
    assert "torch==2.13.0+cpu\n" in pip.constraints
    assert "transformers==" in pip.constraints


def test_an_index_without_the_wheel_falls_back_then_refuses(env: Env) -> None:
    pip = FakePip(failing=["--index-url"])
    setup_env.install_torch(CPU, pip)
    assert [command[-1] for command in pip.commands] == ["torch==2.13.0+cpu"] * 2
    assert "--index-url" not in pip.commands[1]
    with pytest.raises(SetupError, match=r"no index has torch==2\.13\.0\+cpu for Python 3.* PIP_FIND_LINKS"):
        setup_env.install_torch(CPU, FakePip(failing=["torch==2.13.0+cpu"]))


def test_an_unreachable_index_is_not_tried(unreachable: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Installers try each of its files again and again, which took minutes."""
    unreachable.add(f"{pick_torch.WHEELS}/cpu/torch/")
    pip = FakePip()
    setup_env.install_torch(CPU, pip)
    assert pip.commands == [["install", "--no-deps", "torch==2.13.0+cpu"]]
    assert f"{pick_torch.WHEELS}/cpu cannot be reached (no route)" in capsys.readouterr().err


def test_a_folder_of_wheels_stands_in_for_an_index(unreachable: set[str]) -> None:
    """And nothing else does: pip's own index would answer with gigabytes for another CUDA."""
    unreachable.add(f"{pick_torch.WHEELS}/cu126/torch/")
    pip = FakePip()
    setup_env.install_torch(pick_torch.choose(Machine("Linux", (12, 6), (9, 0))), pip)
    assert pip.commands == [["install", "--no-index", "torch>=2.11,<2.15"]]


def test_gpu_set_up_lets_torch_bring_its_own_and_adds_the_extra(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "check_torch", lambda env, choice: None)
    add_distribution(env, "torch", "2.14.1+cu130")
    pip = FakePip()
    setup_env.install(ROOT, env, GPU, [], pip)
    assert pip.commands[0][-1] == "torch>=2.11,<2.15"
    assert "--no-deps" not in pip.commands[0]
    assert pip.commands[1][-2:] == [setup_env.BUILD_TOOL, "torch==2.14.1+cu130"]  # torch bounds setuptools
    assert pip.commands[-2][-1] == f"{ROOT}[cuda]"
    assert "torch==2.14.1+cu130\n" in pip.constraints
    assert "transformers==" in pip.constraints
    assert pip.commands[-1][-2:] == ["--editable", f"{ROOT}/sgl-kernel"]
    assert "--no-deps" in pip.commands[-1]  # torch is there, and stays what it is


def test_gpu_set_up_goes_on_without_our_kernels(
    env: Env, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_env, "check_torch", lambda env, choice: None)
    add_distribution(env, "torch", "2.14.1")
    setup_env.install(ROOT, env, GPU, [], FakePip(failing=[f"{ROOT}/sgl-kernel"]))
    assert "the server runs without our own CUDA kernels" in capsys.readouterr().err


def test_cuda_packages_in_a_cpu_environment_are_refused(env: Env) -> None:
    add_distribution(env, "numpy")
    setup_env.check_torch(env, CPU)
    add_distribution(env, "nvidia_cublas_cu12")
    with pytest.raises(SetupError, match=r"nvidia_cublas_cu12.*whl/cpu reachable"):
        setup_env.check_torch(env, CPU)


def test_failed_package_is_refused_with_the_remedy(env: Env) -> None:
    with pytest.raises(SetupError, match="check the network and run this again"):
        setup_env.install(ROOT, env, CPU, [], FakePip(failing=["--editable"]))


# What each torch in range asks of the packages that it shares with us: its wheels' metadata for Linux and CUDA.
# test/network/test_resolution.py asks for the real ones.
TORCHS = {
    "2.11.0": ["setuptools<82", "triton==3.6.0", "sympy>=1.13.3", "networkx>=2.5.1", "fsspec>=0.8.5"],
    "2.12.0": ["setuptools<82", "triton==3.7.1", "sympy>=1.13.3", "networkx>=2.5.1", "fsspec>=0.8.5"],
    "2.13.0": ["setuptools>=77.0.3", "triton==3.7.1", "sympy>=1.13.3", "networkx>=2.5.1", "fsspec>=0.8.5"],
    "2.14.1": ["setuptools>=77.0.3", "triton==3.8.0", "sympy>=1.13.3", "networkx>=2.5.1", "fsspec>=0.8.5"],
}


@pytest.mark.parametrize("torch", TORCHS)
def test_no_pin_of_the_gpu_set_up_excludes_a_torch_in_range(
    env: Env, monkeypatch: pytest.MonkeyPatch, torch: str
) -> None:
    monkeypatch.setattr(setup_env, "check_torch", lambda env, choice: None)
    add_distribution(env, "torch", torch)
    pip = FakePip()
    setup_env.install(ROOT, env, GPU, ["test", "dev"], pip)
    pins = _pins(pip.constraints)
    assert pins["torch"] == torch
    for requirement in map(Requirement, TORCHS[torch]):
        pinned = pins.get(requirement.name)
        assert pinned is None or requirement.specifier.contains(pinned), f"{pinned} excludes {requirement}"
    assert len(pins) > 60  # what is ours stays pinned


def test_the_tool_that_builds_the_package_is_what_it_asks_for() -> None:
    for folder in (ROOT, ROOT / "sgl-kernel"):
        build = tomllib.loads((folder / "pyproject.toml").read_text())["build-system"]
        assert build["requires"] == [setup_env.BUILD_TOOL]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is run instead of being run; uv is on no PATH, and pip has no settings."""
    calls: list[list[str]] = []
    monkeypatch.setattr(pick_installer, "_run", lambda command, env=None: calls.append(list(command)) or True)
    monkeypatch.setattr(pick_installer, "_pip_settings", lambda python: {})
    monkeypatch.setattr(pick_installer.shutil, "which", lambda name, path=None: None)
    monkeypatch.delenv("FENCELINE_INSTALLER", raising=False)
    return calls


def test_uv_is_installed_in_its_pinned_version_and_used(env: Env, calls: list[list[str]]) -> None:
    run = pick_installer.make_installer(env.python, ROOT / "constraints-cpu.txt")
    assert run(["install", "x"])
    ours, theirs = calls
    assert ours[:4] == [str(env.python), "-m", "pip", "install"]
    assert ours[-3:] == ["--constraint", f"{ROOT}/constraints-cpu.txt", "uv"]
    assert "uv" in _pins()
    assert theirs[:3] == [str(env.python.parent / "uv"), "pip", "install"]
    assert theirs[-1] == "x"


@pytest.mark.parametrize("obstacle", ["chosen", "not available", "settings without a counterpart", "uv fails"])
def test_pip_installs_where_uv_cannot(
    env: Env, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    fails = {"not available": lambda c: c[-1] == "uv", "uv fails": lambda c: c[0].endswith("uv")}.get(obstacle)
    if fails is not None:
        monkeypatch.setattr(
            pick_installer, "_run", lambda command, env=None: calls.append(list(command)) or not fails(command)
        )
    elif obstacle == "chosen":
        monkeypatch.setenv("FENCELINE_INSTALLER", "pip")
    else:
        monkeypatch.setattr(pick_installer, "_pip_settings", lambda python: {"only-binary": "x"})
    run = pick_installer.make_installer(env.python, ROOT / "constraints-cpu.txt")
    assert run(["install", "x"])
    assert calls[-1][:4] == [str(env.python), "-m", "pip", "install"]
    assert calls[-1][-1] == "x"
    assert any(command[0].endswith("uv") for command in calls) == (obstacle == "uv fails")


def test_uv_looks_where_pip_is_set_to_look() -> None:
    """uv reads no configuration of pip."""
    settings = pick_installer.pip_settings(
        ":env:.find-links='/wheels'\n:env:.disable-pip-version-check='1'\n"
        "global.find-links='/elsewhere'\nglobal.index-url='https://mirror/simple'\n"
        "global.extra-index-url='file:///one\\nfile:///two'\ninstall.constraint='/etc/c.txt'\n"
        "download.no-binary='x'\nglobal.trusted-host='mirror'\nglobal.cert='/etc/ca.pem'\n"
    )
    assert pick_installer.uv_variables(settings) == {
        "UV_DEFAULT_INDEX": "https://mirror/simple",
        "UV_INDEX": "file:///one file:///two",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels",
        "UV_CONSTRAINT": "/etc/c.txt",
        "UV_INSECURE_HOST": "mirror",
        "SSL_CERT_FILE": "/etc/ca.pem",
    }
    assert pick_installer.uv_variables({"no-index": "true"}) is None


class Installs:
    """Stands for ``setup_env.install``: counts, and may be interrupted."""

    def __init__(self) -> None:
        self.extras: list[list[str]] = []
        self.error: BaseException | None = None

    def __call__(self, root: Path, env: Env, choice: Choice, extras: Sequence[str], pip: object) -> None:
        self.extras.append(list(extras))
        assert not (env.path / STAMP).exists()
        assert (env.path / UNFINISHED).exists()
        if self.error is not None:
            raise self.error


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> Installs:
    installs = Installs()
    monkeypatch.setattr(setup_env, "install", installs)
    monkeypatch.setattr(setup_env, "torch_choice", lambda: CPU)
    monkeypatch.setattr(setup_env, "create", lambda env: None)
    monkeypatch.setattr(setup_env, "make_installer", lambda python, constraints: None)
    return installs


def test_second_call_does_nothing_and_a_new_extra_installs(env: Env, installs: Installs) -> None:
    setup_env.ensure(ROOT, env, [])
    setup_env.ensure(ROOT, env, [])
    assert installs.extras == [[]]
    setup_env.ensure(ROOT, env, ["test"])
    setup_env.ensure(ROOT, env, [])
    setup_env.ensure(ROOT, env, ["test"])
    assert installs.extras == [[], ["test"]]
    setup_env.ensure(ROOT, env, ["dev"])
    assert installs.extras[-1] == ["dev", "test"]


def test_changed_inputs_install_again(env: Env, installs: Installs, monkeypatch: pytest.MonkeyPatch) -> None:
    setup_env.ensure(ROOT, env, [])
    monkeypatch.setattr(setup_env, "torch_choice", lambda: GPU)  # a driver was installed
    setup_env.ensure(ROOT, env, [])
    (env.path / "pyvenv.cfg").write_text("version = 3.12.1\n")  # another Python
    setup_env.ensure(ROOT, env, [])
    assert len(installs.extras) == 3


def test_changed_pins_install_again(env: Env, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "scripts").mkdir(parents=True)
    for name in setup_env._INPUTS:
        (root / name).write_text("one")
    before = env.key(root, "torch")
    for name in setup_env._INPUTS:
        (root / name).write_text("two")
        assert env.key(root, "torch") != before
        (root / name).write_text("one")
    assert env.key(root, "torch") == before


def test_killed_installation_is_started_again(env: Env, installs: Installs) -> None:
    installs.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        setup_env.ensure(ROOT, env, [])
    assert (env.path / UNFINISHED).exists()
    installs.error = None
    setup_env.ensure(ROOT, env, [])
    assert len(installs.extras) == 2
    assert not (env.path / UNFINISHED).exists()


def test_failed_installation_leaves_an_environment_to_go_on_with(env: Env, installs: Installs) -> None:
    setup_env.ensure(ROOT, env, [])
    installs.error = SetupError("no network")
    with pytest.raises(SetupError):
        setup_env.ensure(ROOT, env, ["test"])
    assert not (env.path / UNFINISHED).exists()
    assert not (env.path / STAMP).exists()


def test_half_made_environment_is_made_anew(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Sequence[str]] = []
    monkeypatch.setattr(setup_env, "_answers", lambda command: True)
    monkeypatch.setattr(setup_env.subprocess, "run", lambda command, **_: made.append(command) or Done())
    setup_env.create(env)
    assert made == []  # it works: kept
    (env.path / UNFINISHED).touch()
    setup_env.create(env)
    assert made == [[sys.executable, "-m", "venv", str(env.path)]]
    # The old one is gone, the new one is marked.
    assert [path.name for path in env.path.iterdir()] == [UNFINISHED]


class Done:
    returncode = 0


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    env = Env(tmp_path / ".venv")
    env.path.mkdir()
    (env.path / "precious").touch()
    with pytest.raises(SetupError, match="is not a virtual environment: move it away"):
        setup_env.create(env)
    assert (env.path / "precious").exists()


def test_environment_variable_overrules_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pick_torch, "look", lambda system: Machine(system, (13, 0)))
    monkeypatch.setattr(setup_env.platform, "system", lambda: "Linux")
    assert setup_env.torch_choice().cuda == (13, 0)
    monkeypatch.setenv("FENCELINE_TORCH", "cpu")
    assert setup_env.torch_choice() == CPU
    # As when an image is built: there is no driver.
    monkeypatch.setattr(pick_torch, "look", lambda system: Machine(system))
    monkeypatch.setenv("FENCELINE_TORCH", "cu130")
    assert setup_env.torch_choice() == GPU
    monkeypatch.setenv("FENCELINE_TORCH", "cu13")
    with pytest.raises(pick_torch.NoTorch, match="cu13 is unknown: use cpu, cu130, cu126, cu128"):
        setup_env.torch_choice()


def _project() -> dict[str, list[Requirement]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(line) for line in lines] for name, lines in groups.items()}


def _pins(text: str | None = None) -> dict[str, str]:
    lines = (text or (ROOT / "constraints-cpu.txt").read_text()).splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): pinned for name, pinned in pairs}


def test_pins_satisfy_the_bounds_and_cover_every_dependency() -> None:
    pins = _pins()
    for group in ("", "test", "dev"):
        for requirement in _project()[group]:
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            assert name in pins, f"{name} is not pinned in constraints-cpu.txt"
            assert requirement.specifier.contains(Version(pins[name])), f"{name}=={pins[name]} is out of bounds"
    assert pins["torch"] == pick_torch.CPU_VERSION


# A GPU host that was seen working, whose packages cannot be chosen.
GPU_HOST = {
    "fastapi": "0.128.0",
    "starlette": "0.50.0",
    "uvicorn": "0.54.0",
    "pydantic": "2.14.3",
    "msgspec": "0.22.0",
    "orjson": "3.13.0",
    "transformers": "5.17.0",
    "torch": "2.11.0+cu130",
    "openai": "2.6.1",
    "flashinfer-python": "0.6.14",
}


def test_bounds_admit_the_gpu_host() -> None:
    declared = {requirement.name.lower(): requirement for lines in _project().values() for requirement in lines}
    for name, installed in GPU_HOST.items():
        assert declared[name].specifier.contains(Version(installed)), f"{name} {installed} is out of bounds"


def test_every_declared_dependency_has_both_bounds() -> None:
    for requirement in _project()[""]:
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {">=", "<"}, str(requirement)
