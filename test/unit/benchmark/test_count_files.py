"""benchmark/count_files.py: who follows a decode step opens few files."""

from __future__ import annotations

import re
import subprocess
import sys

import setup_env


def test_a_steady_decode_step_enters_at_most_28_files() -> None:
    command = [sys.executable, "benchmark/count_files.py", "--list"]
    result = subprocess.run(command, cwd=setup_env.ROOT, capture_output=True, text=True, timeout=120)
    found = re.search(r"^files entered: (\d+)", result.stdout, re.MULTILINE)
    assert found is not None, result.stderr
    assert 10 <= int(found[1]) <= 28, result.stdout
