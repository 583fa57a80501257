"""Fenceline: an LLM inference server whose graph replays never read stale or racing memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fenceline.version import __version__

if TYPE_CHECKING:
    from fenceline.entrypoints.engine import Engine, SamplingParams
    from fenceline.entrypoints.llm import LLM

__all__ = ["LLM", "Engine", "SamplingParams", "__version__", "demo_model_path"]


def demo_model_path(name: str = "demo") -> str:
    """The directory inside the package that ``--model-path demo`` stands for, or ``demo-moe``, a mixture of experts,
    ``demo-tools``, which calls a calculator, or ``demo-vision``, which reads pictures."""
    from fenceline.config.model_files import demo_model_path as path

    return path(name)


def __getattr__(name: str) -> object:
    # These import torch; `import fenceline` must stay cheap (the command line's --help goes through it).
    if name in ("Engine", "SamplingParams"):
        from fenceline.entrypoints import engine

        return getattr(engine, name)
    if name == "LLM":
        from fenceline.entrypoints.llm import LLM

        return LLM
    raise AttributeError(f"module 'fenceline' has no attribute {name!r}")
