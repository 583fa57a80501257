"""The compile cache: each .cu file is a separate shared library, one for each combination of sources, compiler and GPU
architecture. So a kernel that is slow to compile, or does not compile, matters only to its callers.

The cache is in ``$XDG_CACHE_HOME/fenceline/kernels``, by default ``~/.cache/fenceline/kernels``. If several processes
need the same library at once, one compiles it under a lock and the others wait. A library appears under its name whole
or not at all. The folder can always be deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fenceline_kernel.errors import KernelUnavailable
from fenceline_kernel.toolchain import Nvcc, runs_on

_PACKAGE = Path(__file__).resolve().parent
# What a wheel carries, or `python -m fenceline_kernel build` made beside a checkout's modules.
PREBUILT = _PACKAGE / "_lib"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sources:
    """The CUDA sources: headers in ``root``/include, and ``root``/csrc, of which each .cu file makes one library."""

    root: Path

    @property
    def include(self) -> Path:
        """The folder for -I."""
        return self.root / "include"

    def units(self) -> list[str]:
        """Names of the libraries: the .cu files without their ending."""
        return sorted(path.stem for path in (self.root / "csrc").glob("*.cu"))

    def unit_file(self, unit: str) -> Path:
        """The file that makes library ``unit``."""
        return self.root / "csrc" / f"{unit}.cu"

    def digest(self, unit: str) -> str:
        """SHA-256, in hexadecimal, of the names and contents of ``unit``'s file and of all that it includes of ours."""
        digest = hashlib.sha256()
        for path in sorted(self._closure(self.unit_file(unit))):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(self.root).as_posix()}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()

    def _closure(self, start: Path) -> set[Path]:
        found, todo = {start}, [start]
        while todo:
            path = todo.pop()
            for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
                for folder in (path.parent, self.include):
                    included = folder / name
                    if included.is_file() and included not in found:
                        found.add(included)
                        todo.append(included)
        return found


def find_sources() -> Sources:
    """The sources of the checkout, or those that the wheel carries. Raises KernelUnavailable if there are neither."""
    for root in (_PACKAGE.parent.parent, _PACKAGE / "_src"):
        if (root / "csrc").is_dir() and (root / "include" / "fenceline").is_dir():
            return Sources(root)
    raise KernelUnavailable(f"{_PACKAGE} has lost its CUDA sources: install fenceline-kernel anew")


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where compiled libraries are kept. A relative XDG_CACHE_HOME is ignored, as its specification says.

    Raises KernelUnavailable for a user without a home directory, as in some containers."""
    environ = os.environ if environ is None else environ
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "fenceline" / "kernels"
    except RuntimeError as error:
        raise KernelUnavailable(f"{error}: set XDG_CACHE_HOME to a folder that can be written") from error


def cache_key(sources: Sources, unit: str, nvcc: Nvcc, archs: Sequence[str]) -> str:
    """A hash of all that a library depends on (sources, compiler, flags); 24 hexadecimal digits."""
    command = nvcc.command(archs, Path("include"), Path("source"), Path("out"))[1:]  # without real paths
    text = "\0".join((sources.digest(unit), nvcc.version, *command))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def compiled_library(sources: Sources, unit: str, nvcc: Nvcc, archs: Sequence[str], folder: Path) -> Path:
    """Library ``unit`` for ``archs``, compiled now unless ``folder`` has it. Raises KernelUnavailable."""
    library = folder / f"{unit}-{'-'.join(archs)}-{cache_key(sources, unit, nvcc, archs)}.so"
    if library.exists():
        return library
    with _locked(library.with_suffix(".lock")):
        if not library.exists():  # else another process compiled it while this one waited
            compile_library(sources, unit, nvcc, archs, library)
    return library


def compile_library(sources: Sources, unit: str, nvcc: Nvcc, archs: Sequence[str], library: Path) -> None:
    """Compile into ``library``, which is replaced whole. Raises KernelUnavailable with the compiler's first error."""
    part = library.with_name(f"{library.name}.{os.getpid()}.part")
    command = nvcc.command(archs, sources.include, sources.unit_file(unit), part)
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise KernelUnavailable(f"{nvcc.path} failed: {_first_error(result.stdout + result.stderr)}")
        part.replace(library)
    except OSError as error:
        raise KernelUnavailable(f"{nvcc.path} could not be run ({error}): install the CUDA toolkit anew") from error
    finally:
        part.unlink(missing_ok=True)


def build_ahead(sources: Sources, nvcc: Nvcc, archs: Sequence[str], folder: Path) -> None:
    """Compile every unit for ``archs`` into ``folder``; build.json names the sources. Raises KernelUnavailable."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.json").unlink(missing_ok=True)
    for unit in sources.units():
        compile_library(sources, unit, nvcc, archs, folder / f"{unit}.so")
    build = {"archs": list(archs), "units": {unit: sources.digest(unit) for unit in sources.units()}}
    (folder / "build.json").write_text(json.dumps(build, indent=1))


def prebuilt_library(sources: Sources, unit: str, capability: tuple[int, int], folder: Path) -> Path | None:
    """Library ``unit`` of ``build_ahead``, if it was made of these sources and has code for ``capability``."""
    try:
        build = json.loads((folder / "build.json").read_text())
    except (OSError, ValueError):
        return None
    library = folder / f"{unit}.so"
    same = build["units"].get(unit) == sources.digest(unit) and library.exists()
    return library if same and runs_on(build["archs"], capability) else None


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("Cannot find compiler" in line or "gcc: No such file" in line for line in lines):
        return "it found no host compiler: install g++"
    errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
    return (errors or lines or ["it said nothing"])[0]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive among processes and threads; the system releases it when the holder dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise KernelUnavailable(
            f"{path.parent} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder that can"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
