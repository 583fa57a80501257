"""The package's version, readable without torch."""

__version__ = "0.1.0"
