"""ConfigReader: typed reads of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fenceline.config import ConfigError

# The most that a size may be. No model comes near it, so a larger number is a mistake, and it is found before memory is
# asked for. Positions beyond it are no whole numbers in float32.
MOST = 1 << 24


class ConfigReader:
    """Typed reads from config.json. A value of the wrong type or size raises ``ConfigError``, which names the key."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values

    def size(self, key: str, default: int | None = None, most: int = MOST) -> int:
        """An integer from 1 to ``most``."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(f"config.json: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json: {key} must be a whole number of at least 1, got {value!r}")
        if value > most:
            raise ConfigError(f"config.json: {key} must be at most {most}, got {value!r}")
        return value

    def count(self, key: str, most: int = MOST, default: int = 0) -> int:
        """An integer from 0 to ``most``; ``default`` if the key is missing."""
        return 0 if self.values.get(key) == 0 else self.size(key, default, most)

    def whole(self, key: str, default: int) -> int:
        """An integer of at least -1."""
        value = self.values.get(key)
        return default if value is None else -1 if value == -1 else self.count(key)

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"config.json: {key} must be a finite number, got {value!r}")
        return float(value)

    def switch(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} must be true or false, got {value!r}")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty if the key is missing."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"config.json: {key} must be a list of strings, got {value!r}")
        return tuple(value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of integers, empty if the key is missing."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            isinstance(n, int) and not isinstance(n, bool) for n in value
        ):
            raise ConfigError(f"config.json: {key} must be a list of whole numbers, got {value!r}")
        return tuple(value)
