"""Make or refresh the environment .venv that scripts/serve and scripts/test run in; prints its Python's path.

Usage: setup_env.py [EXTRA ...]. Standard library only. Nothing is done if the environment is up to date: a stamp in it
names what it was made from. During an installation there is a marker file in it. If one is found at the start, the last
installation was killed half-way, and the environment is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pick_torch
from pick_installer import Run, make_installer, say, why_unreachable
from pick_torch import Choice, NoTorch

ROOT = Path(__file__).resolve().parent.parent
STAMP = "fenceline-stamp.json"
UNFINISHED = "fenceline-unfinished"
_INPUTS = (
    "pyproject.toml",
    "constraints-cpu.txt",
    "scripts/setup_env.py",
    "scripts/pick_torch.py",
    "scripts/pick_installer.py",
)
# From this line on, constraints-cpu.txt pins packages that a CUDA build of torch needs in other versions.
TORCHS_OWN = "# torch's own"
BUILD_TOOL = "setuptools>=77"  # as the build systems in pyproject.toml and sgl-kernel/pyproject.toml ask for


class SetupError(Exception):
    """The environment cannot be made; the message is one line with the remedy."""


@dataclass(frozen=True)
class Env:
    """A virtual environment at ``path``."""

    path: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    def key(self, root: Path, torch: str) -> str:
        """A text with everything that an installation depends on besides its extras."""
        digest = hashlib.sha256()
        for name in _INPUTS:
            digest.update((root / name).read_bytes())
        config = self.path / "pyvenv.cfg"
        version = re.search(r"^version\S* = (.*)$", config.read_text(), re.MULTILINE) if config.exists() else None
        for text in (str(root), version.group(1) if version else "", platform.machine(), torch):
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()

    def installed_extras(self, key: str) -> set[str] | None:
        """The extras that an installation for ``key`` has, None if there is none or it was interrupted."""
        try:
            stamp = json.loads((self.path / STAMP).read_text())
        except (OSError, ValueError):
            return None
        usable = os.access(self.python, os.X_OK) and not (self.path / UNFINISHED).exists()
        return set(stamp["extras"]) if usable and stamp["key"] == key else None

    def write_stamp(self, key: str, extras: set[str]) -> None:
        """Record a finished installation, atomically."""
        new = self.path / (STAMP + ".new")
        new.write_text(json.dumps({"key": key, "extras": sorted(extras)}))
        new.replace(self.path / STAMP)

    def version_of(self, name: str) -> str:
        """The version of an installed distribution, local label included."""
        (found,) = self.path.glob(f"lib/python*/site-packages/{name}-*.dist-info")
        return found.name.removesuffix(".dist-info").split("-")[1]

    def distributions(self) -> list[str]:
        """Names of the installed distributions, from their metadata directories."""
        found = self.path.glob("lib/python*/site-packages/*.dist-info")
        return sorted(path.name.split("-")[0].lower() for path in found)


def ensure(root: Path, env: Env, extras: Sequence[str]) -> None:
    """Bring ``env`` up to date with ``root``, with at least ``extras``. Raises SetupError or NoTorch."""
    choice = torch_choice()
    env.path.parent.mkdir(parents=True, exist_ok=True)
    with open(env.path.parent / f"{env.path.name}.lock", "w") as lock:
        # If two scripts start at the same time, the second waits here and then finds the finished environment.
        fcntl.flock(lock, fcntl.LOCK_EX)
        key = env.key(root, repr(choice))
        installed = env.installed_extras(key)
        if installed is not None and installed >= set(extras):
            return
        wanted = set(extras) | (installed or set())
        create(env)
        unfinished = env.path / UNFINISHED
        unfinished.touch()
        (env.path / STAMP).unlink(missing_ok=True)
        try:
            begin = time.monotonic()
            run = make_installer(env.python, root / "constraints-cpu.txt")
            install(root, env, choice, sorted(wanted), run)
            compile_bytecode(env)
            say(f"done in {time.monotonic() - begin:.0f} s")
        except SetupError:
            unfinished.unlink()  # the installer has failed without leaving a half-installed package
            raise
        env.write_stamp(env.key(root, repr(choice)), wanted)
        unfinished.unlink()


def torch_choice() -> Choice:
    """Which torch to install here: by FENCELINE_TORCH if it is set, otherwise by the machine. Raises NoTorch."""
    if name := os.environ.get("FENCELINE_TORCH"):
        return pick_torch.named(name, platform.system())
    return pick_torch.choose(pick_torch.look(platform.system()))


def create(env: Env) -> None:
    """Make the virtual environment unless there is one that works. Raises SetupError."""
    unfinished = (env.path / UNFINISHED).exists()
    if not unfinished and env.python.exists() and _answers([str(env.python), "-m", "pip", "--version"]):
        return
    if env.path.exists():
        if not unfinished and not (env.path / "pyvenv.cfg").exists() and any(env.path.iterdir()):
            raise SetupError(f"{env.path} is not a virtual environment: move it away")
        say(f"{env.path} is {'half-made' if unfinished else 'broken'}, making it anew")
        shutil.rmtree(env.path)
    say(f"making {env.path} with Python {platform.python_version()}")
    env.path.mkdir(parents=True)
    (env.path / UNFINISHED).touch()
    result = subprocess.run([sys.executable, "-m", "venv", str(env.path)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SetupError("this Python cannot make virtual environments: install its venv package (python3-venv)")


def _answers(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def install(root: Path, env: Env, choice: Choice, extras: Sequence[str], run: Run) -> None:
    """Install torch first, on its own, and then the package with its other dependencies. Raises SetupError."""
    say(f"installing {choice.summary} (first time only)")
    install_torch(choice, run)
    names = [*extras, *(["cuda"] if choice.cuda is not None else [])]
    package = str(root) + (f"[{','.join(names)}]" if names else "")
    say(f"installing the package{' with ' + ', '.join(names) if names else ''}")
    torch = choice.requirements[0][0] if choice.cuda is None else f"torch=={env.version_of('torch')}"
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text(constraints_for(choice, torch, (root / "constraints-cpu.txt").read_text()))
        pinned = ["--constraint", str(constraints)]
        # A CUDA torch restricts which setuptools builds the package. The CPU build's dependencies are installed with
        # it.
        tools = [BUILD_TOOL] if choice.cuda is None else [BUILD_TOOL, torch]
        built = run(["install", *pinned, *tools]) and run(
            ["install", *pinned, "--no-build-isolation", "--editable", package]
        )
    if not built:
        raise SetupError("the package could not be installed (see above): check the network and run this again")
    check_torch(env, choice)
    install_kernels(root, choice, run)


def compile_bytecode(env: Env, interval_s: float = 5.0) -> None:
    """Compile what is installed, on all cores, and say every ``interval_s`` seconds how far it is: it takes a minute on
    two. Without it every process of a machine that writes no bytecode compiles torch and transformers anew."""
    files = sorted(str(path) for path in env.path.glob("lib/python*/site-packages/**/*.py"))
    say(f"compiling {len(files)} files to bytecode")
    command = [str(env.python), "-m", "compileall", "-i", "-"]  # a line for each file that it compiles
    num_workers = min(os.cpu_count() or 1, 8)
    read, write = os.pipe()
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write, stderr=subprocess.DEVNULL)
        for _ in range(num_workers)
    ]
    os.close(write)
    for first, worker in enumerate(workers):
        assert worker.stdin is not None, "a pipe was asked for"
        with worker.stdin as names:  # all are read before the first is compiled
            names.write("\n".join(files[first::num_workers]).encode())
    num_done, said = 0, time.monotonic()
    with open(read, "rb") as lines:
        while part := lines.read1(1 << 16):
            num_done += part.count(b"\n")
            if time.monotonic() - said >= interval_s:
                said = time.monotonic()
                say(f"compiled {min(num_done, len(files))} of {len(files)} files")
    for worker in workers:
        worker.wait()  # a file that does not compile is no reason to stop: nobody imports it


def install_kernels(root: Path, choice: Choice, run: Run) -> None:
    """Install our own CUDA kernels on a machine with a GPU. They compile on first use; the server also runs without
    them."""
    if choice.cuda is None:
        return
    source = str(root / "sgl-kernel")
    if not run(["install", "--no-deps", "--no-build-isolation", "--editable", source]):
        say("sgl-kernel/ could not be installed (see above): the server runs without our own CUDA kernels")


def install_torch(choice: Choice, run: Run) -> None:
    """Try the indexes in order. Raises SetupError if none has the wheel."""
    # The CPU wheel is installed without its dependencies, because the package brings them with pinned versions.
    alone = ["--no-deps"] if choice.cuda is None else []
    for requirement, index in choice.requirements:
        where = ["--index-url", index] if index is not None else []
        reason = why_unreachable(f"{index}/torch/") if index is not None else None
        if reason is not None:
            say(f"{index} cannot be reached ({reason})")
            if (requirement, index) != choice.requirements[-1]:
                continue
            where = ["--no-index"]  # pip's own index has other builds, so only a folder of wheels is used
        if run(["install", *alone, *where, requirement]):
            return
    wanted, index = choice.requirements[0]
    raise SetupError(
        f"no index has {wanted} for Python {platform.python_version()}: make {index or 'PyPI'} reachable, or put the"
        " wheel into a folder and name it in PIP_FIND_LINKS"
    )


def constraints_for(choice: Choice, torch: str, text: str) -> str:
    """The pins in ``text`` (constraints-cpu.txt) with ``torch``, "torch==VERSION", in place of the line for torch. For
    a CUDA torch, the pins of packages of which it needs other versions are left out."""
    pins, _, torchs_own = text.partition(TORCHS_OWN)
    lines = (pins if choice.cuda is not None else pins + torchs_own).splitlines()
    return "\n".join([line for line in lines if "==" in line and not line.startswith("torch==")] + [torch, ""])


def check_torch(env: Env, choice: Choice) -> None:
    """Raise SetupError if the torch in ``env`` is not the one that was chosen."""
    if choice.cuda is None:
        cuda_packages = [name for name in env.distributions() if name.startswith("nvidia")]
        if cuda_packages:
            raise SetupError(
                f"CUDA packages were installed although there is no NVIDIA driver ({', '.join(cuda_packages)}): remove"
                f" {env.path} and make {pick_torch.WHEELS}/cpu reachable"
            )
        return
    code = "import torch.version as v; print(v.cuda or '0.0')"
    built = subprocess.run([str(env.python), "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    version = tuple(int(part) for part in built.split(".")[:2]) if built else (0, 0)
    if version[0] != choice.cuda[0]:
        raise SetupError(f"torch was built for CUDA {built or 'nothing'}, the driver wants {choice.cuda}: see above")


def main(extras: Sequence[str]) -> int:
    """Entry point; the exit status."""
    env = Env(Path(os.environ.get("FENCELINE_VENV", ROOT / ".venv")).absolute())
    try:
        ensure(ROOT, env, extras)
    except (SetupError, NoTorch) as error:
        print(f"[set-up] error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[set-up] interrupted; the next call starts it again", file=sys.stderr)
        return 130
    print(env.python)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
