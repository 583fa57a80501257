"""Which device the model will run on, found out without torch where that is possible."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fenceline.config.errors import ConfigError

# Where Linux shows an NVIDIA driver: bare metal and containers, WSL, Tegra.
_DRIVER_MARKS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu")


# Kinds beside cpu and cuda that somebody has registered; see memory_order.register_device.
_registered: set[str] = set()


def register_kind(kind: str) -> None:
    """Let the configuration name ``kind`` as a device. Limits that depend on the device are the CPU's."""
    _registered.add(kind)


def is_registered(kind: object) -> bool:
    """Whether ``kind`` is a device that :func:`register_kind` was told about."""
    return kind in _registered


def machine_bytes() -> int:
    """All memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cuda_is_available() -> bool:
    """Whether torch can use a CUDA GPU. Imports torch only where there is a driver."""
    if not any(Path(mark).exists() for mark in _DRIVER_MARKS):
        return False
    import torch

    return torch.cuda.is_available()


def choose_device(wanted: str, probe: Callable[[], bool] = cuda_is_available) -> str:
    """``cpu`` or ``cuda`` for the value of ``--device``, or a registered kind.

    Raises ConfigError if there is no GPU to use.
    """
    if wanted == "cpu" or wanted in _registered:
        return wanted
    available = probe()
    if wanted == "cuda" and not available:
        raise ConfigError(
            "--device cuda: torch sees no CUDA GPU; use --device cpu, or install a torch build for your driver"
        )
    return "cuda" if available else "cpu"
