"""The configuration: flags, what they resolve to on this machine, and what the model's files say. Imports no torch."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ConfigError(ValueError):
    """A configuration that cannot work. The message is one line and states the remedy."""


def require(condition: bool, message: str) -> None:
    """Raises ``ConfigError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def num_usable_cores() -> int:
    """How many cores this process may use: those of its CPU affinity, or all cores where the system has no affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def user_path(name: str) -> Path:
    """The path that a user has written, in which ``~`` is a home. Raises ConfigError if there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{name}: there is no such user; write the whole path") from error


@contextmanager
def importing() -> Iterator[None]:
    """Inside, Python's collector does not look for garbage among modules again and again, which takes a tenth of the
    time that torch's import takes. What has been imported stays, and is not looked at later either."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
