"""compute-sanitizer's memcheck finds nothing in a short life of a model runner."""

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


def sanitizer() -> str | None:
    """The tool, if it is anywhere that CUDA toolkits put it."""
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--eager",), ("--speculative",)], ids=["graphs", "eager", "speculative"])
def test_memcheck_is_clean(flags: tuple[str, ...]) -> None:
    tool = sanitizer()
    if tool is None:
        pytest.skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")]))
    if "--eager" in flags:
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(SCRIPT), *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
