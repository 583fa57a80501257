"""What a commit has to pass: scripts/lint as one test of the suite, and the hook that reads its title."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("prefill: ignore host-only pages when choosing victims\n\nThey counted as freed.\n", ""),
        ("# a comment of git's\nmessages, responses: take what clients send\n# another\n", ""),
        ("storage/tier: " + "x" * 51, ""),
        ("storage/tier: " + "x" * 52, "66 characters, 65 are allowed"),
        ("Which samples others give way to is decided with pages", "is not `area: what it does now`"),
        ("docs:\n\nforgot what\n", "is not `area: what it does now`"),
        ("docs: say what it is.\n", "full stop"),
        ("docs: say what it is\nand why\n", "second line"),
        ("Merge branch 'a'\n", ""),
        ("fixup! docs: say what it is\n", ""),
    ],
)
def test_the_hook_refuses_a_title_with_the_reason(message: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(message)
    hook = setup_env.ROOT / "scripts" / "hooks" / "commit-msg"
    result = subprocess.run([sys.executable, str(hook), str(file)], capture_output=True, text=True, timeout=60)
    assert (result.returncode == 0) == (not reason), result.stderr
    assert reason in result.stderr and bool(result.stderr) == bool(reason)


def test_git_can_run_the_hooks() -> None:
    hooks = list((setup_env.ROOT / "scripts" / "hooks").iterdir())
    assert {hook.name for hook in hooks} == {"commit-msg", "pre-commit"}
    assert all(hook.stat().st_mode & 0o100 and hook.read_text().startswith("#!/usr/bin/env ") for hook in hooks)
