"""Reading the YAML file of ``--config``."""

from __future__ import annotations

from pathlib import Path

import yaml

from fenceline.config.errors import ConfigError


def read_mapping(path: str) -> dict[str, object]:
    """The top-level mapping of a YAML file, keys as text. Raises ConfigError, one line."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({_first_line(error)})") from error
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"--config {path}: not valid YAML{where} ({_first_line(error)})") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"--config {path}: expected one mapping, as in 'page_size: 16'")
    return {str(key): item for key, item in value.items()}


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
