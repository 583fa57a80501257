"""Runs all checks other than tests: style, formatting, types, import direction, ordering primitives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS = (
    ("-m", "ruff", "check", "--quiet"),
    ("-m", "ruff", "format", "--check", "--quiet", "--diff"),
    ("-m", "mypy", "--no-error-summary"),
    ("scripts/tidy.py",),
)


def main() -> int:
    """Run all checks and print each one's name and messages. Returns the exit status: 1 if one fails."""
    failed = []
    for check in CHECKS:
        print("== " + " ".join(check), flush=True)
        if subprocess.run([sys.executable, *check], cwd=ROOT, check=False).returncode != 0:
            failed.append(" ".join(check))
    print(f"lint: failed: {'; '.join(failed)}" if failed else "lint: clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
