"""Configuration: flags (``ServerArgs``) are resolved once into a frozen ``EngineConfig``. Imports no torch."""
