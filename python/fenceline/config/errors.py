"""The one error that a user's configuration can raise."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot work. The message is one line and names the remedy."""
