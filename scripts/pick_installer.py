"""Chooses what installs packages into the environment: uv if it is available, which takes a fifth of the time, else
pip.

Standard library only. Callers use options that both have; pip's configuration (mirrors, folders of wheels, constraints)
is used for either.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Run = Callable[[Sequence[str]], bool]

_PROBE_TIMEOUT_S = 5.0

# pip's settings for the origin of packages, each with uv's variable for it and the separator of the values.
_UV_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}
# Settings that do not change what is installed.
_HARMLESS = frozenset(
    (
        "cache-dir", "default-timeout", "disable-pip-version-check", "no-cache-dir", "no-color", "no-input",
        "no-warn-conflicts", "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv", "retries",
        "root-user-action", "timeout", "verbose",
    )
)  # fmt: skip


def say(message: str) -> None:
    """Print progress to stderr, because stdout has the interpreter's path."""
    print(f"[set-up] {message}", file=sys.stderr, flush=True)


def why_unreachable(url: str) -> str | None:
    """Why no connection can be made to ``url``; None if one can. It makes one attempt of a few seconds, because pip and
    uv would try for minutes. The server's answer is not looked at."""
    try:
        urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return None
    except urllib.error.URLError as error:
        return None if "CERTIFICATE" in str(error.reason) else str(error.reason)
    except OSError as error:
        return str(error)
    return None


def make_installer(python: Path, constraints: Path) -> Run:
    """A function that runs ``install ...`` for the environment with the interpreter ``python`` and returns whether it
    succeeded. If uv fails, pip is tried. uv is installed in the version of ``constraints`` unless it is on the PATH;
    FENCELINE_INSTALLER=pip uses pip alone."""
    pip = _pip_runner(python)
    uv = _uv_runner(python, constraints, pip) if os.environ.get("FENCELINE_INSTALLER", "uv") == "uv" else None
    if uv is None:
        return pip

    def run(args: Sequence[str]) -> bool:
        if uv(args):
            return True
        say("uv could not (see above): trying the same with pip")
        return pip(args)

    return run


def _pip_runner(python: Path) -> Run:
    bar = [] if sys.stderr.isatty() else ["--progress-bar", "off"]

    def run(args: Sequence[str]) -> bool:
        # Conflicts occur between the steps of an installation only: the last step resolves them, or fails.
        options = ["--disable-pip-version-check", "--no-warn-conflicts", "--no-compile", *bar]
        return _run([str(python), "-m", "pip", args[0], *options, *args[1:]])

    return run


def _uv_runner(python: Path, constraints: Path, pip: Run) -> Run | None:
    settings = _pip_settings(python)
    variables = uv_variables(settings) if settings is not None else None
    if variables is None:
        say("installing with pip, whose settings uv has no counterpart for")
        return None
    uv = shutil.which("uv") or shutil.which("uv", path=str(python.parent))
    if uv is None:
        say("installing uv, which installs the rest faster than pip")
        if not pip(["install", "--constraint", str(constraints), "uv"]):
            say("uv is not available: installing with pip")
            return None
        uv = str(python.parent / "uv")
    environment = {**variables, **os.environ}
    progress = [] if sys.stderr.isatty() else ["--no-progress"]

    def run(args: Sequence[str]) -> bool:
        return _run([uv, "pip", args[0], *progress, "--python", str(python), *args[1:]], environment)

    return run


def _pip_settings(python: Path) -> dict[str, str] | None:
    """pip's configuration for ``install`` (files and variables); None if pip cannot list it."""
    command = [str(python), "-m", "pip", "config", "list"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return pip_settings(result.stdout) if result.returncode == 0 else None


def pip_settings(listing: str) -> dict[str, str]:
    """The output of ``pip config list`` by name; settings for ``install`` and variables take precedence."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in sections:
            sections[section][key] = ast.literal_eval(value)
    return {key: value for section in sections.values() for key, value in section.items()}


def uv_variables(settings: Mapping[str, str]) -> dict[str, str] | None:
    """uv's variables for pip's ``settings``; None if one has no counterpart."""
    variables = {}
    for key, value in settings.items():
        if key in _UV_VARIABLES:
            name, separator = _UV_VARIABLES[key]
            variables[name] = separator.join(value.split())
        elif key not in _HARMLESS:
            return None
    # pip takes the best version of all indexes, uv by default that of the first index that has the package.
    if "UV_INDEX" in variables:
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return variables


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> bool:
    return subprocess.run(command, stdout=sys.stderr, env=environment, check=False).returncode == 0
