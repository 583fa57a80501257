"""Chooses the torch to install on this machine. Standard library only: it runs before anything is installed.

Without an NVIDIA driver that is the pinned CPU build, with one the newest release in range whose CUDA build the
driver and the GPU support.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CPU_VERSION = "2.13.0"
NEWEST_BELOW = "2.15"
WHEELS = "https://download.pytorch.org/whl"
_PROC_VERSION = Path("/proc/driver/nvidia/version")

Version = tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that matter: ``cuda`` is the newest CUDA version that the driver supports, None
    without a driver."""

    system: str
    cuda: Version | None = None
    capability: Version | None = None


@dataclass(frozen=True)
class Choice:
    """The arguments for pip: ``requirements`` in order of preference, each with the index to try (None: pip's own)."""

    summary: str
    requirements: tuple[tuple[str, str | None], ...]
    cuda: Version | None = None


@dataclass(frozen=True)
class Build:
    """One line of CUDA wheels: CUDA version, first torch release without it, GPU architectures it runs on."""

    tag: str
    cuda: Version
    torch_below: str
    capabilities: tuple[Version, Version]
    on_pypi: bool = False


# Best first, from PyTorch's release compatibility matrix. PyPI has CUDA 13.0. torch 2.12 dropped CUDA 12.8, which is
# for GPUs that the 12.6 build does not support and the driver does.
BUILDS = (
    Build("cu130", (13, 0), NEWEST_BELOW, ((7, 5), (12, 1)), on_pypi=True),
    Build("cu126", (12, 6), NEWEST_BELOW, ((5, 0), (9, 0))),
    Build("cu128", (12, 8), "2.12", ((7, 5), (12, 1))),
)

# First Linux driver branch of each CUDA version (CUDA toolkit release notes). Within a major version older drivers
# run newer builds (minor version compatibility), hence 12.6 for every CUDA 12 driver.
_DRIVERS = ((580, (13, 0)), (570, (12, 8)), (525, (12, 6)))


class NoTorch(Exception):
    """There is no torch for this machine; the message is one line with the remedy."""


def cuda_of_driver(driver: int) -> Version | None:
    """The CUDA version that a driver branch (580 of 580.65.06) can run, None if it is too old for any build."""
    for branch, cuda in _DRIVERS:
        if driver >= branch:
            return cuda
    return None


def driver_branch(proc_version: str) -> int | None:
    """The branch from the text of /proc/driver/nvidia/version, None if there is none in it."""
    match = re.search(r"NVRM version:.*?\s(\d{3,})\.\d+", proc_version)
    return int(match.group(1)) if match else None


def cuda_of_nvidia_smi(output: str) -> Version | None:
    """The newest CUDA version whose builds can run, from the header that nvidia-smi prints; None if it names none."""
    match = re.search(r"CUDA\s+(?:UMD\s+|Driver\s+)?Version\s*:\s*(\d+)\.(\d+)", output)
    if match is None:
        return None
    found = (int(match.group(1)), int(match.group(2)))
    return max(found, (12, 6)) if found[0] == 12 else found  # minor version compatibility, as above


def lowest_capability(output: str) -> Version | None:
    """The lowest compute capability in ``nvidia-smi --query-gpu=compute_cap --format=csv,noheader``."""
    found = [(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d+)$", output, re.MULTILINE)]
    return min(found, default=None)


def look(system: str) -> Machine:
    """This machine's properties. If there is a driver, it reads /proc and runs nvidia-smi, which takes a few seconds at
    most."""
    cuda = None
    if _PROC_VERSION.exists():
        driver = driver_branch(_PROC_VERSION.read_text(errors="replace"))
        if driver is not None:
            cuda = cuda_of_driver(driver) or (0, 0)
    if shutil.which("nvidia-smi") is None:
        return Machine(system, cuda)
    return Machine(
        system,
        cuda if cuda is not None else cuda_of_nvidia_smi(_nvidia_smi()),
        lowest_capability(_nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader")),
    )


def _nvidia_smi(*args: str) -> str:
    try:
        return subprocess.run(["nvidia-smi", *args], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def choose(machine: Machine) -> Choice:
    """What to install on ``machine``. Raises NoTorch if its driver or GPU is too old for every build."""
    if machine.cuda is None:
        return _cpu(machine.system)
    for build in BUILDS:
        low, high = build.capabilities
        if machine.cuda >= build.cuda and (machine.capability is None or low <= machine.capability <= high):
            return _cuda(build)
    raise NoTorch(
        "the NVIDIA driver or GPU is too old for torch 2.11 and newer: install driver 580 or newer (525 at least),"
        " or set FENCELINE_TORCH=cpu to run on the CPU"
    )


def named(name: str, system: str) -> Choice:
    """The choice for a value of FENCELINE_TORCH, whatever this machine has: ``cpu`` or the tag of a build. (Images are
    built on machines without a driver.) Raises NoTorch for another name."""
    if name == "cpu":
        return _cpu(system)
    for build in BUILDS:
        if build.tag == name:
            return _cuda(build)
    raise NoTorch(f"FENCELINE_TORCH={name} is unknown: use cpu, {', '.join(build.tag for build in BUILDS)}")


def _cpu(system: str) -> Choice:
    if system != "Linux":  # on other systems the wheels of the default index are CPU builds
        wanted = f"torch=={CPU_VERSION}"
        return Choice(f"torch {CPU_VERSION}", ((wanted, None),))
    # The local version label matches only the CPU build, so no index can return gigabytes of CUDA packages.
    wanted = f"torch=={CPU_VERSION}+cpu"
    return Choice(f"torch {CPU_VERSION} for the CPU", ((wanted, f"{WHEELS}/cpu"), (wanted, None)))


def _cuda(build: Build) -> Choice:
    wanted = f"torch>=2.11,<{build.torch_below}"
    requirements: tuple[tuple[str, str | None], ...] = ((wanted, f"{WHEELS}/{build.tag}"),)
    if build.on_pypi:
        requirements += ((wanted, None),)
    version = ".".join(map(str, build.cuda))
    return Choice(f"torch (newest below {build.torch_below}) for CUDA {version}", requirements, build.cuda)
