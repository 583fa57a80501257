"""The configuration: flags, what they resolve to on this machine, and what the model's files say. Imports no torch."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot work. The message is one line and names the remedy."""
