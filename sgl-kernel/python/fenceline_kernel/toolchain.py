"""nvcc: its path, its version, and the flags that the kernels are compiled with.

Environment variables are read here (CUDA_HOME, CUDA_PATH, PATH) and in ``cache``, and nowhere else.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fenceline_kernel.errors import KernelUnavailable

# The code in a wheel: each runs on every GPU of its major version from its minor version on, sm_90a on 9.0 alone.
WHEEL_ARCHS = ("80", "90a", "100")
_FLAGS = ("-shared", "-std=c++17", "-O3", "--compiler-options", "-fPIC", "-cudart", "static", "--threads", "0")
_NO_NVCC = (
    "nvcc was not found: install the CUDA 13 toolkit and set CUDA_HOME to it, or install a wheel of fenceline-kernel"
    " that was built where nvcc is (pip wheel --no-deps sgl-kernel/)"
)


@dataclass(frozen=True, slots=True)
class Nvcc:
    """A CUDA compiler. ``version`` is the text that it prints with --version, including its build."""

    path: Path
    version: str

    def command(self, archs: Sequence[str], include: Path, source: Path, output: Path) -> list[str]:
        """The command that makes ``output``, a shared library for ``archs``, of ``source``."""
        return [str(self.path), *_FLAGS, *arch_flags(archs), f"-I{include}", "-o", str(output), str(source)]


def check_driver(nvcc: Nvcc, driver: int | None) -> None:
    """Raises KernelUnavailable if the output of ``nvcc`` cannot run because its runtime is of a newer major version
    than the driver (``driver_version``; None: unknown, not checked)."""
    release = re.search(r"release (\d+)\.", nvcc.version)
    if driver is not None and release is not None and int(release.group(1)) > driver // 1000:
        raise KernelUnavailable(
            f"{nvcc.path} is of CUDA {release.group(1)}, the driver of CUDA {driver // 1000}.{driver % 1000 // 10}: "
            "update the driver, or set CUDA_HOME to a toolkit that is no newer"
        )


def driver_version() -> int | None:
    """The newest CUDA version that the installed driver runs, as 13000 for 13.0; None without a driver."""
    try:
        version = ctypes.c_int()
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


def arch_of(capability: tuple[int, int]) -> str:
    """``90a`` for (9, 0): Hopper's own instructions need the a; elsewhere the plain number."""
    major, minor = capability
    return f"{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def arch_flags(archs: Sequence[str]) -> list[str]:
    """nvcc's flags for machine code of each of ``archs``. The shorthand -arch=sm_90a would also run a plain pass."""
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]


def runs_on(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether machine code for one of ``archs`` runs on a GPU of ``capability``."""
    major, minor = capability
    for arch in archs:
        if arch.endswith("a"):
            if arch == f"{major}{minor}a":
                return True
        elif int(arch[:-1]) == major and int(arch[-1]) <= minor:
            return True
    return False


def find_nvcc(environ: Mapping[str, str] | None = None) -> Nvcc:
    """The nvcc of CUDA_HOME or CUDA_PATH, else of PATH, /usr/local/cuda, or NVIDIA's compiler wheel in this
    environment.

    Raises KernelUnavailable if there is none, if CUDA_HOME names a folder without one, or if it does not run.
    """
    environ = os.environ if environ is None else environ
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(variable):
            path = Path(environ[variable]) / "bin" / "nvcc"
            if not os.access(path, os.X_OK):
                raise KernelUnavailable(f"{variable} is set but {path} is no program: correct it or unset it")
            return Nvcc(path, _version(path))
    for candidate in _candidates(environ):
        if os.access(candidate, os.X_OK):
            return Nvcc(candidate, _version(candidate))
    raise KernelUnavailable(_NO_NVCC)


def _candidates(environ: Mapping[str, str]) -> list[Path]:
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    wheels = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"))
    return [*([Path(on_path)] if on_path else []), Path("/usr/local/cuda/bin/nvcc"), *wheels]


def _version(path: Path) -> str:
    try:
        result = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{path} does not run ({error}): install the CUDA toolkit anew") from error
    if result.returncode != 0:
        raise KernelUnavailable(f"{path} --version failed: install the CUDA toolkit anew")
    return result.stdout.strip()
