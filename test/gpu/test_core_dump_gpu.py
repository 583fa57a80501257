"""A kernel that reads memory that is not there: the driver's dump, the flight recorder's file, an end with status 1."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 90.0


def serve_until_it_dies(folder: Path) -> tuple[int, str]:
    """Start the server, ask it for more tokens than it lives for; its status and its output."""
    log = folder / "server.log"
    command = [
        *(sys.executable, str(Path(__file__).parents[1] / "support" / "planted_fault.py"), "--model-path", "demo"),
        *("--port", "0", "--cuda-coredump-dir", str(folder / "dumps"), "--max-total-tokens", "4096"),
        *("--flight-recorder-dir", str(folder / "flights"), "--cuda-graph-max-bs", "8"),
        *("--attention-backend", "triton"),
    ]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        url = address(server, log)
        body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=END_TIMEOUT_S)
        assert caught.value.code in (500, 503)
        return server.wait(END_TIMEOUT_S), log.read_text()
    finally:
        server.kill()
        server.wait()


def address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        found = re.search(r" at (http://\S+)", log.read_text())
        if found:
            return found[1]
        time.sleep(0.2)
    pytest.fail(f"the server never served:\n{log.read_text()}")


def test_a_failing_kernel_leaves_its_dump_and_the_recorders(tmp_path: Path) -> None:
    status, output = serve_until_it_dies(tmp_path)
    assert status == 1, output
    dumps = list((tmp_path / "dumps").glob("*.nvcudmp"))
    assert len(dumps) == 1, output
    assert f"GPU core dump: {dumps[0]}" in output
    assert dumps[0].stat().st_size < 1 << 30, "no global memory in it"
    flights = list((tmp_path / "flights").glob("flight-*.json"))
    assert len(flights) == 1, output
    assert len(json.loads(flights[0].read_text())["steps"]) >= 20
    debugger = shutil.which("cuda-gdb") or "/usr/local/cuda/bin/cuda-gdb"
    if not Path(debugger).exists():
        return
    told = subprocess.run(
        [debugger, "-batch", "-ex", f"target cudacore {dumps[0]}", "-ex", "info cuda kernels", "-ex", "bt"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "Illegal Address" in told.stdout
    assert "_decode_kernel" in told.stdout, "the guilty one: attention reads the page table"
