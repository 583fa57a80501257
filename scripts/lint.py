"""Runs all checks other than tests: style, formatting, types, import direction, ordering primitives."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tuple(f"python/fenceline{suffix}" for suffix in ("", "_demo", "_sim", "_proof"))
CHECKS = (
    ("-m", "ruff", "check", "--quiet"),
    ("-m", "ruff", "format", "--check", "--quiet", "--diff"),
    ("-m", "mypy", "--no-error-summary", *PACKAGES, "SNIPPETS"),
    ("scripts/tidy.py",),
)
# Pages whose programs are checked as a user's would be with mypy --strict, which has no short form within a file.
SNIPPET_PAGES = ("README.md", "docs/use/api.md")
STRICT = (
    "# mypy: disallow-untyped-defs, disallow-untyped-calls, disallow-any-generics, warn-return-any, strict-equality,"
    " warn-unused-ignores\n"
)


def main() -> int:
    """Run all checks and print each one's name and messages. Returns the exit status: 1 if one fails."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        snippets = write_snippets(Path(folder))
        for check in CHECKS:
            print("== " + " ".join(check), flush=True)
            words = [word for part in check for word in (snippets if part == "SNIPPETS" else [part])]
            if subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode != 0:
                failed.append(" ".join(check))
    print(f"lint: failed: {'; '.join(failed)}" if failed else "lint: clean")
    return 1 if failed else 0


def write_snippets(folder: Path) -> list[str]:
    """The programs of SNIPPET_PAGES that use this package as files of ``folder``."""
    files = []
    for page in SNIPPET_PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for index, program in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
            if "import fenceline" in program or "from fenceline" in program:
                file = folder / f"{Path(page).stem.lower()}_{index}.py"
                file.write_text(STRICT + program, encoding="utf-8")
                files.append(str(file))
    assert len(files) >= len(SNIPPET_PAGES), "no programs were found"
    return files


if __name__ == "__main__":
    sys.exit(main())
