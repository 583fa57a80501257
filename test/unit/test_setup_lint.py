"""Style, formatting, types and walls: scripts/lint as one test of the suite."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import setup_env


@pytest.mark.slow
@pytest.mark.timeout(660)  # mypy without a cache, beside everything else
@pytest.mark.skipif(
    any(importlib.util.find_spec(tool) is None for tool in ("ruff", "mypy")), reason="needs the extra dev"
)
def test_lint_is_clean() -> None:
    result = subprocess.run(
        [sys.executable, "scripts/lint.py"], cwd=setup_env.ROOT, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
