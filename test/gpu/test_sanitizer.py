"""compute-sanitizer finds nothing: memcheck in a short life of a model runner, all its tools in our CUDA kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[1] / "support" / "sanitizer_run.py"
PACKAGE = Path(__file__).parents[2] / "python"
KERNELS = Path(__file__).with_name("test_kernel_accesses_gpu.py")
REFUSED = "Device not supported"  # what it says of a GPU in some sandboxes


def run(tool: str, *program: str, **environ: str) -> str:
    """What the program and ``tool`` say. Skips where the sanitizer is not installed or cannot see the GPU."""
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if found is None:
        pytest.skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    env = os.environ | environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])}
    command = [found, "--tool", tool, "--error-exitcode", "9", sys.executable, *program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    said = f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    if REFUSED in done.stdout + done.stderr:
        pytest.skip(REFUSED)
    assert done.returncode == 0, said
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [(), ("--eager",), ("--speculative",), ("--mixed",)], ids=["graphs", "eager", "speculative", "mixed"]
)
def test_memcheck_is_clean(flags: tuple[str, ...]) -> None:
    caching = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if "--eager" in flags else {}
    assert "ERROR SUMMARY: 0 errors" in run("memcheck", str(SCRIPT), *flags, **caching)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_kernels_in_cuda_are_clean(tool: str) -> None:
    """All but the all-reduce, whose ranks wait for each other, which the sanitizer does not let them."""
    said = run(tool, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(KERNELS), "-k", "not triton")
    assert " passed" in said and ("0 errors" in said or "0 hazards" in said)
